"""Data: from what users have (text, tokens, arrays) to the int32 arrays that the engine takes.

A sample is a mapping with `input_ids` and optionally `labels`, `attention_mask`, `position_ids`,
`document_ids`, each of one length; labels are unshifted, -100 masks, as in transformers. The shift
is done here, once.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

IGNORE = -100
KEYS = ("input_ids", "labels", "attention_mask", "position_ids", "document_ids")


@runtime_checkable
class Dataset(Protocol):
    """Anything with a length and samples by index."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class DataError(ValueError):
    """Data that can't be used. The message names the sample or file."""


class Rows:
    """A stream of tokens as rows of `length`; `documents` numbers them where several meet."""

    def __init__(
        self, tokens: NDArray[np.int32], documents: NDArray[np.int32] | None, length: int
    ) -> None:
        self.tokens, self.documents, self.length = tokens, documents, length

    def __len__(self) -> int:
        # The last row may be short; one token alone predicts nothing.
        rest = len(self.tokens) % self.length
        return len(self.tokens) // self.length + (rest > 1)

    def __getitem__(self, index: int) -> dict[str, NDArray[np.int32]]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        cut = slice(index * self.length, (index + 1) * self.length)
        row = {"input_ids": self.tokens[cut]}
        if self.documents is not None:
            row["document_ids"] = self.documents[cut]
        return row


def open_dataset(
    source: Any, tokenizer_file: Path, max_length: int, what: str = "train_dataset"
) -> Dataset:
    """Makes a dataset of what the user gave.

    `source`: the path of a .txt file (one document), of a .jsonl file (a document a line, under
    "text", or tokens under "input_ids"), or of a .npy file; a list of str; a NumPy array of token
    ids, [N, T] rows or a stream [T]; or anything with __len__ and __getitem__ that gives samples.
    Text becomes one stream of tokens, cut into rows of `max_length`; documents in a row don't see
    each other. Raises DataError.
    """
    if isinstance(source, str | os.PathLike):
        source = _read_file(Path(source), what)
    if isinstance(source, np.ndarray):
        return _from_array(source, max_length, what)
    if isinstance(source, Sequence) and source and all(isinstance(x, str) for x in source):
        return _from_texts(list(source), tokenizer_file, max_length, what)
    if not isinstance(source, Dataset):
        raise DataError(
            f"{what}: {type(source).__name__} is neither a path, texts, an array nor a dataset "
            "(__len__ and __getitem__)"
        )
    if len(source) == 0:
        raise DataError(f"{what} is empty")
    return source


def _read_file(path: Path, what: str) -> Any:
    if not path.is_file():
        raise DataError(f"{what}: there is no file {path}")
    if path.suffix == ".npy":
        return np.load(path, allow_pickle=False, mmap_mode="r")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{what}: {path} is not UTF-8: {error}") from None
    if path.suffix not in (".jsonl", ".json"):
        return [text] if text.strip() else []
    samples = []
    for number, line in enumerate(text.split("\n"), 1):  # U+2028 is legal in JSON
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{what}: {path}, line {number}: {error}") from None
        if not isinstance(record, dict) or not ("text" in record or "input_ids" in record):
            raise DataError(f"{what}: {path}, line {number}: neither 'text' nor 'input_ids'")
        if "text" in record and not isinstance(record["text"], str):
            raise DataError(f"{what}: {path}, line {number}: 'text' is not a string")
        samples.append(record)
    texts = ["text" in record for record in samples]
    if any(texts) and not all(texts):
        raise DataError(f"{what}: {path} mixes lines with 'text' and with 'input_ids'")
    return [record["text"] for record in samples] if all(texts) else samples


def _from_array(array: NDArray[Any], max_length: int, what: str) -> Dataset:
    if array.dtype.kind not in "iu":
        raise DataError(f"{what}: token ids are integers, not {array.dtype}")
    if array.size == 0:
        raise DataError(f"{what} is empty")
    if array.ndim == 1:
        rows = Rows(_int32(array, what), None, max_length)
        if len(rows) == 0:
            raise DataError(f"{what}: one token alone predicts nothing")
        return rows
    if array.ndim != 2:
        raise DataError(f"{what}: an array of {array.ndim} dimensions; 1 or 2 are wanted")
    return [{"input_ids": row} for row in array]


def _from_texts(texts: list[str], tokenizer_file: Path, max_length: int, what: str) -> Rows:
    from tokenizers import Tokenizer

    if not tokenizer_file.is_file():
        raise DataError(f"{what} is text, but there is no {tokenizer_file}")
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    encoded = [e.ids for e in tokenizer.encode_batch(texts)]
    end = _end_token(tokenizer_file.parent, tokenizer)
    if end is not None:
        encoded = [ids if ids and ids[-1] == end else [*ids, end] for ids in encoded]
    encoded = [ids for ids in encoded if ids]
    if sum(map(len, encoded)) < 2:
        raise DataError(f"{what} has no text")
    tokens = np.concatenate([np.asarray(ids, np.int32) for ids in encoded])
    if len(encoded) == 1:
        return Rows(tokens, None, max_length)
    documents = np.repeat(np.arange(len(encoded), dtype=np.int32), [len(ids) for ids in encoded])
    return Rows(tokens, documents, max_length)


def _end_token(folder: Path, tokenizer: Any) -> int | None:
    """The end-of-text token that tokenizer_config.json names, if any."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        token = config["eos_token"]
        token = token["content"] if isinstance(token, dict) else token
        found = tokenizer.token_to_id(token)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, int) else None


def _int32(values: Any, name: str) -> NDArray[np.int32]:
    array = np.asarray(values)
    if array.size == 0:
        array = array.astype(np.int32)  # an empty list has no type of its own
    if array.dtype.kind not in "iu":
        raise DataError(f"{name}: integers are wanted, not {array.dtype}")
    if array.size and (array.min() < -(2**31) or array.max() >= 2**31):
        raise DataError(f"{name}: {int(array.max())} does not fit 32 bits")
    return np.ascontiguousarray(array, np.int32)


def collate(samples: Sequence[Any], names: Sequence[str], max_length: int) -> dict[str, Any]:
    """Samples of one length each as arrays [B, T], right-padded with ignored zeros."""
    rows: list[dict[str, NDArray[np.int32]]] = []
    for sample, name in zip(samples, names, strict=True):
        if not isinstance(sample, Mapping):
            raise DataError(f"{name} is {type(sample).__name__}, a mapping is wanted")
        row = {k: _int32(sample[k], f"{name}, {k}") for k in KEYS if sample.get(k) is not None}
        if "input_ids" not in row:
            raise DataError(f"{name} has no input_ids")
        length = len(row["input_ids"]) if row["input_ids"].ndim == 1 else -1
        if length < 1 or any(v.shape != (length,) for v in row.values()):
            shapes = ", ".join(f"{k} {list(v.shape)}" for k, v in row.items())
            raise DataError(f"{name}: one dimension and one length are wanted: {shapes}")
        if length > max_length:
            raise DataError(f"{name} has {length} tokens; max_seq_length is {max_length}")
        row.setdefault("labels", row["input_ids"])
        rows.append(row)
    width = max(len(row["input_ids"]) for row in rows)
    keys = {k for row in rows for k in row}
    batch = {}
    for key in sorted(keys):
        fill = IGNORE if key == "labels" else 0
        out = np.full((len(rows), width), fill, np.int32)
        for i, row in enumerate(rows):
            length = len(row["input_ids"])
            if key in row:
                out[i, :length] = row[key]
            elif key == "attention_mask":
                out[i, :length] = 1
            elif key == "position_ids":
                out[i, :length] = np.arange(length)
            if key == "document_ids":  # padding is a document of its own
                out[i, length:] = out[i, length - 1] + 1 if length < width else 0
        batch[key] = out
    return batch


def prepare(batch: Mapping[str, Any], vocab: int, name: str) -> dict[str, NDArray[np.int32]]:
    """One micro-batch, unshifted, as the engine takes it: `input_ids`, `labels` (shifted: the
    target of each position), and where they matter `positions` and `first`.

    batch: `input_ids` [B, T] and optionally `labels`, `attention_mask`, `position_ids`,
    `document_ids`, integers of the same shape. Raises DataError naming `name`, row and column.
    """
    unknown = set(batch) - set(KEYS)
    if unknown:
        raise DataError(
            f"{name}: unknown {', '.join(sorted(unknown))}; there are {', '.join(KEYS)}"
        )
    if batch.get("input_ids") is None:
        raise DataError(f"{name} has no input_ids")
    arrays = {k: _int32(batch[k], f"{name}, {k}") for k in KEYS if batch.get(k) is not None}
    ids = arrays["input_ids"]
    if ids.ndim != 2 or ids.size == 0:
        raise DataError(f"{name}: input_ids is {list(ids.shape)}, [rows, tokens] is wanted")
    for key, array in arrays.items():
        if array.shape != ids.shape:
            raise DataError(f"{name}: {key} is {list(array.shape)}, input_ids is {list(ids.shape)}")
    _check_range(ids, vocab, f"{name}: token id", low=0)
    out = {"input_ids": ids}
    labels = arrays.get("labels")
    mask = arrays.get("attention_mask")
    if mask is not None:
        _check_mask(mask, name)
        if labels is not None:
            labels = np.where(mask != 0, labels, np.int32(IGNORE))
    documents = arrays.get("document_ids")
    starts = None if documents is None else _document_starts(documents, name)
    if labels is not None:
        _check_range(labels, vocab, f"{name}: label", low=0, ignore=IGNORE)
        shifted = np.full_like(labels, IGNORE)
        shifted[:, :-1] = labels[:, 1:]
        if documents is not None:
            border = documents[:, :-1] != documents[:, 1:]
            shifted[:, :-1][border] = IGNORE
        out["labels"] = np.ascontiguousarray(shifted)
    columns = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    if starts is not None:
        out["first"] = np.ascontiguousarray(starts)
    if "position_ids" in arrays:
        _check_range(arrays["position_ids"], 2**31 - 1, f"{name}: position", low=0)
        out["positions"] = arrays["position_ids"]
    elif starts is not None:
        out["positions"] = np.ascontiguousarray(columns - starts)
    return out


def _check_range(
    array: NDArray[np.int32], end: int, what: str, low: int, ignore: int | None = None
) -> None:
    bad = (array < low) | (array >= end)
    if ignore is not None:
        bad &= array != ignore
    if bad.any():
        row, column = (int(x[0]) for x in np.nonzero(bad))
        raise DataError(
            f"{what} {int(array[row, column])} in row {row}, column {column} is not in "
            f"[{low}, {end})"
        )


def _check_mask(mask: NDArray[np.int32], name: str) -> None:
    if ((mask != 0) & (mask != 1)).any() or (np.diff(mask, axis=1) > 0).any():
        raise DataError(
            f"{name}: attention_mask must be 1 for the tokens of a row and 0 behind them "
            "(padding on the right)"
        )


def _document_starts(documents: NDArray[np.int32], name: str) -> NDArray[np.int32]:
    """The index in the row of the first token of each token's document."""
    rows, length = documents.shape
    change = np.ones((rows, length), bool)
    change[:, 1:] = documents[:, 1:] != documents[:, :-1]
    for row in range(rows):
        begun = documents[row][change[row]]
        values, counts = np.unique(begun, return_counts=True)
        if (counts > 1).any():
            again = int(values[counts > 1][0])
            raise DataError(f"{name}: document {again} begins twice in row {row}")
    index = np.where(change, np.arange(length, dtype=np.int32), np.int32(0))
    return np.maximum.accumulate(index, axis=1).astype(np.int32)
