"""Checkpoint folders: what safetensors files hold, and where each tensor's bytes lie.

Headers are read and checked here, byte counts and overlaps included, and by the `safetensors`
package; the bytes themselves are moved by the extension, straight between the files and the planes.
Saving writes the source's names, shapes, dtypes, shard layout and side files into a folder beside
the target, which takes the target's place only when it has been read back and compared.
"""

import json
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8,
    "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
TRAINABLE = ("F32", "BF16", "F16")
HEADER_MAX = 100 << 20  # bytes; the safetensors package has the same limit
# First match wins: models.md, chapter 4.
PREFIXES = (
    ("model.language_model.", ""),
    ("language_model.model.", ""),
    ("language_model.lm_head.", "lm_head."),
    ("model.", ""),
)
IGNORED = ("rotary_emb.inv_freq",)
MARK = ".slidedp-saving"  # in a folder that a save is being made in
WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
HEAD, TABLE = "lm_head.weight", "embed_tokens.weight"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pth", ".pt", ".gguf", ".h5", ".msgpack", ".onnx")


class CheckpointError(ValueError):
    """A checkpoint that can't be read or written. The message names file and tensor."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a file."""

    name: str
    file: str  # within the folder
    dtype: str
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file
    nbytes: int

    @property
    def count(self) -> int:
        n = 1
        for size in self.shape:
            n *= size
        return n


def read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str], int]:
    """(tensors, metadata, bytes of header) of a safetensors file. Raises CheckpointError."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(8)
            if len(head) < 8:
                raise CheckpointError(f"{path}: {size} bytes are no safetensors file")
            (length,) = struct.unpack("<Q", head)
            if length > min(size - 8, HEADER_MAX):
                raise CheckpointError(
                    f"{path}: the header claims {length} bytes; the file has {size} "
                    "(truncated or damaged)"
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ is not an object of strings")
    tensors = {}
    for name, entry in header.items():
        tensors[name] = _tensor(path, name, entry, 8 + length, size)
    _check_cover(path, tensors, 8 + length, size)
    return tensors, metadata, 8 + length


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name stands twice")
    return result


def _tensor(path: Path, name: str, entry: Any, base: int, size: int) -> TensorInfo:
    where = f"{path}: tensor {name}"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where}: the entry is not an object")
    dtype, shape, offsets = (entry.get(k) for k in ("dtype", "shape", "data_offsets"))
    if dtype not in SIZES:
        raise CheckpointError(f"{where}: unknown dtype {dtype!r}")
    if not isinstance(shape, list) or not all(_natural(n) for n in shape):
        raise CheckpointError(f"{where}: shape {shape!r} is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_natural(n) for n in offsets):
        raise CheckpointError(f"{where}: data_offsets {offsets!r} are not two positions")
    nbytes = SIZES[dtype]
    for n in shape:
        nbytes *= n
    begin, end = offsets
    if end - begin != nbytes:
        raise CheckpointError(
            f"{where}: {dtype} {shape} takes {nbytes} bytes, data_offsets span {end - begin}"
        )
    if base + end > size:
        raise CheckpointError(
            f"{where}: ends at byte {base + end}, the file has {size}: it is truncated"
        )
    return TensorInfo(name, path.name, dtype, tuple(shape), base + begin, nbytes)


def _natural(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _check_cover(path: Path, tensors: dict[str, TensorInfo], base: int, size: int) -> None:
    """Tensors lie side by side: no byte belongs to two, none to no one."""
    at, before = base, "the header"
    for info in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        if info.offset < at:
            raise CheckpointError(f"{path}: tensors {before} and {info.name} overlap")
        if info.offset > at:
            raise CheckpointError(
                f"{path}: {info.offset - at} bytes before tensor {info.name} belong to no tensor"
            )
        at, before = info.offset + info.nbytes, info.name
    if at != size:
        raise CheckpointError(f"{path}: {size - at} bytes at the end belong to no tensor")


def normal_name(name: str) -> str:
    """A tensor's name without the prefix that its wrapper gave it."""
    for prefix, short in PREFIXES:
        if name.startswith(prefix):
            return short + name[len(prefix) :]
    return name


@dataclass
class Checkpoint:
    """A folder's tensors, and how they map to the model's."""

    folder: Path
    files: list[str]  # in the order of the folder's index
    tensors: dict[str, TensorInfo]  # by the checkpoint's names
    metadata: dict[str, dict[str, str]]  # by file
    has_index: bool
    own: dict[str, str] = field(default_factory=dict)  # normalised name -> checkpoint name
    tied_copy: str | None = None  # name of a head that repeats the embedding

    def parts(self, folder: Path | None = None) -> list[dict[str, Any]]:
        """The model's tensors as the engine's parts, in this folder or one of the same layout."""
        return [self._part(short, name, folder or self.folder) for short, name in self.own.items()]

    def _part(self, short: str, name: str, folder: Path) -> dict[str, Any]:
        info = self.tensors[name]
        return {
            "name": short,
            "path": str(folder / info.file),
            "offset": info.offset,
            "dtype": info.dtype,
            "count": info.count,
        }

    def fingerprint(self) -> str:
        """Names, dtypes and sizes of everything, for the comparison of ranks."""
        import hashlib

        text = json.dumps([[t.name, t.file, t.dtype, t.shape] for t in self.tensors.values()])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def open_checkpoint(folder: Path) -> Checkpoint:
    """Reads the headers of a folder's safetensors files. Raises CheckpointError."""
    index = folder / INDEX
    where: dict[str, str] | None = None
    if index.is_file():
        where = _read_index(index)
        files = sorted(set(where.values()))
        missing = [name for name in files if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(f"{index} names files that are not there: {', '.join(missing)}")
    elif (folder / SINGLE).is_file():
        files = [SINGLE]
    else:
        raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}")
    tensors: dict[str, TensorInfo] = {}
    metadata = {}
    for name in files:
        found, metadata[name], _ = read_header(folder / name)
        _check_by_package(folder / name)
        for tensor, info in found.items():
            if tensor in tensors:
                raise CheckpointError(
                    f"{folder}: tensor {tensor} is in {tensors[tensor].file} and in {name}"
                )
            tensors[tensor] = info
    if where is not None:
        for tensor, file in where.items():
            if tensor not in tensors or tensors[tensor].file != file:
                raise CheckpointError(f"{index}: tensor {tensor} is not in {file}")
    return Checkpoint(folder, files, tensors, metadata, where is not None)


def _read_index(index: Path) -> dict[str, str]:
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        where = content["weight_map"]
        good = isinstance(where, dict) and all(isinstance(v, str) for v in where.values())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index}: no weight_map can be read: {error!r}") from None
    if not good or not where:
        raise CheckpointError(f"{index}: weight_map is not an object of file names")
    for name in where.values():
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index}: {name!r} is not the name of a safetensors file here")
    return dict(where)


def _check_by_package(path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="numpy") as file:
            file.keys()
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from None


def match(
    checkpoint: Checkpoint,
    wanted: Iterable[tuple[str, tuple[int, ...]]],
    tied: bool,
    warn: Callable[[str], None],
) -> None:
    """Finds the model's tensors in the checkpoint: fills `own` and `tied_copy`.

    wanted: (normalised name, shape) of each. Raises CheckpointError for what is missing, of another
    shape or of a dtype that can't be trained; tells `warn` what is there and unknown.
    """
    short: dict[str, str] = {}
    for name in checkpoint.tensors:
        normal = normal_name(name)
        if normal in short:
            raise CheckpointError(f"{checkpoint.folder}: {short[normal]} and {name} are one tensor")
        short[normal] = name
    missing = []
    for normal, shape in wanted:
        if normal not in short:
            missing.append(normal)
            continue
        info = checkpoint.tensors[short[normal]]
        where = f"{checkpoint.folder / info.file}: tensor {info.name}"
        if info.shape != shape:
            raise CheckpointError(
                f"{where} has the shape {list(info.shape)}, config.json makes it {list(shape)}"
            )
        if info.dtype not in TRAINABLE:
            raise CheckpointError(
                f"{where} is {info.dtype}; weights to train are {', '.join(TRAINABLE)}"
            )
        checkpoint.own[normal] = info.name
    if missing == [HEAD]:
        raise CheckpointError(
            f"{checkpoint.folder} has no lm_head.weight, and config.json does not tie it to the "
            "embedding (tie_word_embeddings is false)"
        )
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise CheckpointError(f"{checkpoint.folder} has no tensor {', '.join(missing[:5])}{more}")
    if tied and HEAD in short:
        _check_tied(checkpoint, short[HEAD])
    known = set(checkpoint.own.values()) | {checkpoint.tied_copy}
    unknown = [n for n in checkpoint.tensors if n not in known and not n.endswith(IGNORED)]
    if unknown:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        warn(
            f"{', '.join(unknown[:3])}{more}: not part of the model that is trained; kept as "
            "they are"
        )


def _check_tied(checkpoint: Checkpoint, head: str) -> None:
    table = checkpoint.tensors[checkpoint.own[TABLE]]
    other = checkpoint.tensors[head]
    same = (table.dtype, table.shape) == (other.dtype, other.shape)
    if not same or not _same_bytes(checkpoint.folder, table, other):
        raise CheckpointError(
            f"{checkpoint.folder}: config.json ties lm_head.weight to the embedding, but the files "
            "hold a different lm_head.weight. Either remove it from the files, or set "
            '"tie_word_embeddings": false to train it on its own'
        )
    checkpoint.tied_copy = head


def _same_bytes(folder: Path, a: TensorInfo, b: TensorInfo) -> bool:
    with open(folder / a.file, "rb") as x, open(folder / b.file, "rb") as y:
        x.seek(a.offset)
        y.seek(b.offset)
        left = a.nbytes
        while left:
            n = min(left, 1 << 22)
            if x.read(n) != y.read(n):
                return False
            left -= n
    return True


# ---- saving ----


def check_output(folder: Path, needed: int) -> None:
    """Tests that a checkpoint of `needed` bytes can be written to `folder`. Raises OSError."""
    parent = folder
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise NotADirectoryError(f"{parent} is not a folder")
    try:
        with tempfile.TemporaryFile(dir=parent) as file:
            file.write(b"x")
    except OSError as error:
        raise OSError(error.errno, f"can't write to {parent}: {error.strerror}") from error
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise OSError(f"{parent} has {free:,} bytes free, a checkpoint takes {needed:,}")


def check_target(folder: Path) -> None:
    """Refuses to replace anything but an empty folder or a checkpoint."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is there and is not a folder")
    entries = [entry.name for entry in folder.iterdir()]
    if entries and not ({"config.json"} & set(entries)):
        raise CheckpointError(
            f"{folder} holds other things than a checkpoint; give an empty or a new folder"
        )


def side_files(folder: Path) -> list[Path]:
    """What goes along with the weights: everything but weight files, folders and hidden files."""
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file()
        and not path.name.startswith(".")
        and not path.name.endswith((*WEIGHT_SUFFIXES, ".index.json"))
    ]


def draft_of(target: Path) -> Path:
    """The folder beside `target` in which a save is made; all ranks know it."""
    return target.parent / f".{target.name}.saving"


def is_draft(draft: Path) -> bool:
    """Whether a save made this folder."""
    return (draft / MARK).is_file()


def discard(draft: Path) -> None:
    """Removes what an interrupted save left."""
    shutil.rmtree(draft, ignore_errors=True)


def start_save(checkpoint: Checkpoint, draft: Path) -> None:
    """Makes `draft` with files of full size: headers, and tensors that are not the model's, byte
    for byte. The model's tensors are to be written next."""
    if draft.exists() and not is_draft(draft):
        raise CheckpointError(f"{draft} is in the way: it is not what an interrupted save left")
    discard(draft)
    draft.mkdir(parents=True)
    (draft / MARK).touch()
    own = set(checkpoint.own.values()) | {checkpoint.tied_copy}
    for name in checkpoint.files:
        source = checkpoint.folder / name
        with open(source, "rb") as old, open(draft / name, "wb") as new:
            length = 8 + struct.unpack("<Q", old.read(8))[0]
            old.seek(0)
            new.write(old.read(length))
            new.truncate(os.fstat(old.fileno()).st_size)
            for info in checkpoint.tensors.values():
                if info.file == name and info.name not in own:
                    _copy_bytes(old, info.offset, new, info.offset, info.nbytes)


def _copy_bytes(old: Any, at: int, new: Any, to: int, nbytes: int) -> None:
    old.seek(at)
    new.seek(to)
    while nbytes:
        data = old.read(min(nbytes, 1 << 22))
        if not data:
            raise CheckpointError(f"{old.name} has become shorter")
        new.write(data)
        nbytes -= len(data)


def finish_save(
    checkpoint: Checkpoint, draft: Path, target: Path, warn: Callable[[str], None]
) -> None:
    """After the tensors: the head's copy, side files, a reading back, and the change of places."""
    if checkpoint.tied_copy is not None:
        table = checkpoint.tensors[checkpoint.own[TABLE]]
        head = checkpoint.tensors[checkpoint.tied_copy]
        with open(draft / table.file, "rb") as old, open(draft / head.file, "r+b") as new:
            _copy_bytes(old, table.offset, new, head.offset, head.nbytes)
    for name in checkpoint.files:
        descriptor = os.open(draft / name, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    if checkpoint.has_index:
        shutil.copyfile(checkpoint.folder / INDEX, draft / INDEX)
    for path in side_files(checkpoint.folder):
        try:
            shutil.copyfile(path, draft / path.name)
        except OSError as error:
            if path.name == "config.json":
                raise
            warn(f"{path} was not copied: {error}")
    saved = open_checkpoint(draft)
    if list(saved.tensors.values()) != list(checkpoint.tensors.values()):
        raise CheckpointError(f"{draft} reads back differently from {checkpoint.folder}")
    replace(draft, target)
    (target / MARK).unlink()


def replace(draft: Path, target: Path) -> None:
    """Puts `draft` into `target`'s place. Only afterwards are the weights removed that were there;
    everything else that the draft does not have stays."""
    if not target.exists():
        draft.rename(target)
    else:
        check_target(target)
        old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
        target.rename(old / "folder")
        try:
            draft.rename(target)
        except OSError:
            (old / "folder").rename(target)
            raise
        for entry in (old / "folder").iterdir():
            if not WEIGHTS.fullmatch(entry.name) and not (target / entry.name).exists():
                entry.rename(target / entry.name)
        shutil.rmtree(old)
    descriptor = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
