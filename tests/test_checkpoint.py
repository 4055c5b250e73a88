"""Checkpoint folders: every kind of damage is an error that names file and tensor; a save has the
source's names, shapes, dtypes, shards and side files, and appears whole or not at all."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import slidedp
from slidedp import checkpoint
from slidedp.checkpoint import CheckpointError, open_checkpoint, read_header


def arguments(folder: Path, **more: Any) -> slidedp.TrainingArguments:
    options = {"device": "cpu", "max_seq_length": 16, "per_device_train_batch_size": 1, **more}
    return slidedp.TrainingArguments(output_dir=folder / "out", **options)


def write(path: Path, header: Any, body: bytes = b"") -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + body)


def entry(dtype: str, shape: Any, begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


# name, content of the file, words of the error
HOSTILE: list[tuple[str, Callable[[Path], object], list[str]]] = [
    ("empty", lambda p: p.write_bytes(b""), ["0 bytes"]),
    ("short", lambda p: p.write_bytes(b"\1\2\3"), ["3 bytes"]),
    (
        "huge header",
        lambda p: p.write_bytes(struct.pack("<Q", 2**63) + b"{}"),
        [str(2**63)],
    ),
    ("truncated header", lambda p: p.write_bytes(struct.pack("<Q", 90) + b"{}"), ["90"]),
    ("not JSON", lambda p: write(p, b"{"), ["JSON"]),
    ("not UTF-8", lambda p: write(p, b'{"\xff": 1}'), ["JSON"]),
    ("deep", lambda p: write(p, b"[" * 100_000), ["JSON"]),
    ("a list", lambda p: write(p, b"[]"), ["object"]),
    ("twice", lambda p: write(p, b'{"a": 1, "a": 2}'), ["twice"]),
    ("no entry", lambda p: write(p, {"a": 3}), ["tensor a"]),
    ("unknown dtype", lambda p: write(p, {"a": entry("F12", [1], 0, 4)}), ["tensor a", "F12"]),
    ("negative", lambda p: write(p, {"a": entry("F32", [-1], 0, 4)}), ["tensor a", "shape"]),
    ("float shape", lambda p: write(p, {"a": entry("F32", [1.0], 0, 4)}), ["tensor a", "shape"]),
    ("bool shape", lambda p: write(p, {"a": entry("F32", [True], 0, 4)}), ["tensor a", "shape"]),
    ("backwards", lambda p: write(p, {"a": entry("F32", [1], 4, 0)}), ["tensor a", "-4"]),
    ("size", lambda p: write(p, {"a": entry("F32", [2], 0, 4)}, b"1234"), ["tensor a", "8 bytes"]),
    (
        "overflow",
        lambda p: write(p, {"a": entry("F32", [2**62, 2**62], 0, 4)}, b"1234"),
        ["tensor a"],
    ),
    ("truncated", lambda p: write(p, {"a": entry("F32", [2], 0, 8)}, b"1234"), ["truncated"]),
    (
        "overlap",
        lambda p: write(
            p, {"a": entry("F32", [2], 0, 8), "b": entry("F32", [1], 4, 8)}, b"12345678"
        ),
        ["overlap", "a", "b"],
    ),
    (
        "hole",
        lambda p: write(
            p, {"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 8, 12)}, b"1" * 12
        ),
        ["no tensor", "b"],
    ),
    ("tail", lambda p: write(p, {"a": entry("F32", [1], 0, 4)}, b"12345"), ["at the end"]),
    ("metadata", lambda p: write(p, {"__metadata__": {"a": 1}}), ["__metadata__"]),
]


@pytest.mark.parametrize(
    ("make", "words"), [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE]
)
def test_hostile_headers(tmp_path: Path, make: Callable[[Path], object], words: list[str]) -> None:
    path = tmp_path / "model.safetensors"
    make(path)
    with pytest.raises(CheckpointError) as error:
        read_header(path)
    assert all(word in str(error.value) for word in [str(path), *words]), error.value


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        read_header(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="neither"):
        open_checkpoint(tmp_path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_fuzzed_header(tiny_llama: Path, tmp_path: Path, data: st.DataObject) -> None:
    """Bytes of a good file changed, cut or repeated: it reads, or there is a CheckpointError."""
    raw = bytearray((tiny_llama / "model.safetensors").read_bytes()[:4000])
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw[:cut] if data.draw(st.booleans()) else raw)
    try:
        tensors, _, _ = read_header(path)
    except CheckpointError as error:
        assert str(path) in str(error)
    else:
        assert all(t.offset + t.nbytes <= len(raw) for t in tensors.values())


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("model.layers.3.mlp.up_proj.weight", "layers.3.mlp.up_proj.weight"),
        ("model.language_model.norm.weight", "norm.weight"),
        ("language_model.model.embed_tokens.weight", "embed_tokens.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_names(name: str, short: str) -> None:
    assert checkpoint.normal_name(name) == short


# ---- whole folders ----


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama, tmp_path / "checkpoint"))


def tensors_of(folder: Path) -> tuple[dict[str, np.ndarray], Path]:
    from safetensors.numpy import load_file

    path = folder / "model.safetensors"
    return load_file(path), path


def rewrite(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    from safetensors.numpy import save_file

    tensors, path = tensors_of(folder)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(ValueError) as error:
        slidedp.Trainer(model=folder, args=arguments(folder.parent))
    assert all(word in str(error.value) for word in words), error.value


def test_missing_tensor(folder: Path) -> None:
    rewrite(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    refused(folder, "layers.1.mlp.up_proj.weight", str(folder))


def test_wrong_shape(folder: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    rewrite(folder, lambda t: t.update({name: np.ascontiguousarray(t[name].T)}))
    refused(folder, name, "shape", "config.json")


def test_wrong_dtype(folder: Path) -> None:
    name = "model.norm.weight"
    rewrite(folder, lambda t: t.update({name: t[name].astype(np.int32)}))
    refused(folder, name, "I32")


def test_nonfinite_weight(folder: Path) -> None:
    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.1.self_attn.o_proj.weight"][3, 5] = np.nan

    rewrite(folder, spoil)
    refused(folder, "layers.1.self_attn.o_proj.weight", "NaN")


def test_untied_without_head(folder: Path) -> None:
    rewrite(folder, lambda t: t.pop("lm_head.weight"))
    refused(folder, "lm_head.weight", "tie_word_embeddings")


def test_tied_with_another_head(folder: Path) -> None:
    change_config(folder, tie_word_embeddings=True)
    refused(folder, "lm_head.weight", "tie_word_embeddings", "remove")


def test_tied_with_the_same_head(folder: Path, tmp_path: Path) -> None:
    """Read once; written back in both places with the trained value."""
    change_config(folder, tie_word_embeddings=True)
    table = "model.embed_tokens.weight"
    rewrite(folder, lambda t: t.update({"lm_head.weight": t[table].copy()}))
    ids = np.arange(16)[None]
    with slidedp.Trainer(model=folder, args=arguments(tmp_path, learning_rate=0.1)) as trainer:
        trainer.train_step({"input_ids": ids, "labels": ids})
        assert (trainer.tensor("lm_head.weight") == trainer.tensor(table)).all()
        trainer.save_model(tmp_path / "saved")
    before, _ = tensors_of(folder)
    after, _ = tensors_of(tmp_path / "saved")
    assert (after["lm_head.weight"] == after[table]).all()
    assert (after[table] != before[table]).any()


def test_tensor_in_two_shards(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "a.safetensors")
    shutil.copy(folder / "model.safetensors", folder / "b.safetensors")
    tensors, _ = tensors_of(folder)
    names = list(tensors)
    where = {n: ("a" if i % 2 else "b") + ".safetensors" for i, n in enumerate(names)}
    (folder / checkpoint.INDEX).write_text(json.dumps({"weight_map": where}))
    refused(folder, "a.safetensors", "b.safetensors")


def test_missing_shards(folder: Path) -> None:
    tensors, _ = tensors_of(folder)
    where = {n: f"part-{i % 3}.safetensors" for i, n in enumerate(tensors)}
    (folder / checkpoint.INDEX).write_text(json.dumps({"weight_map": where}))
    shutil.copy(folder / "model.safetensors", folder / "part-1.safetensors")
    refused(folder, "part-0.safetensors", "part-2.safetensors", "not there")


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "../x.safetensors"}}']
)
def test_bad_index(folder: Path, content: str) -> None:
    (folder / checkpoint.INDEX).write_text(content)
    refused(folder, checkpoint.INDEX)


def test_truncated_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    refused(folder, str(path), "truncated")


def test_token_outside_vocabulary(folder: Path, tmp_path: Path) -> None:
    rows = np.zeros((5, 8), int)
    rows[3, 2] = 5000
    args = arguments(tmp_path, max_steps=5)
    with slidedp.Trainer(model=folder, args=args, train_dataset=rows) as trainer:
        with pytest.raises(ValueError, match="sample 3: token id 5000"):
            trainer.train()
        ids = np.zeros((1, 8), int)
        trainer.train_step({"input_ids": ids, "labels": ids})  # nothing was lost


def test_unwritable_output(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    args = slidedp.TrainingArguments(output_dir=tmp_path / "file" / "out", device="cpu")
    with pytest.raises(OSError, match="file"):
        slidedp.Trainer(model=folder, args=args)


# ---- saving ----


def test_save_replaces_only_checkpoints(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    with (
        slidedp.Trainer(model=folder, args=arguments(tmp_path)) as trainer,
        pytest.raises(ValueError, match="other things"),
    ):
        trainer.save_model(other)
    assert [p.name for p in other.iterdir()] == ["thesis.txt"]
    with slidedp.Trainer(model=folder, args=arguments(tmp_path)) as trainer:
        trainer.save_model(tmp_path / "saved")
        trainer.save_model(tmp_path / "saved")  # a checkpoint may be replaced
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint", "other", "saved"]


def test_save_into_the_source(folder: Path, tmp_path: Path) -> None:
    ids = np.arange(16)[None]
    with slidedp.Trainer(model=folder, args=arguments(tmp_path, learning_rate=0.1)) as trainer:
        trainer.train_step({"input_ids": ids, "labels": ids})
        logits = trainer.logits(ids)
        trainer.save_model(folder)
    with slidedp.Trainer(model=folder, args=arguments(tmp_path)) as trainer:
        assert (trainer.logits(ids) == logits).all()


def test_side_files_and_bytes(folder: Path, tmp_path: Path) -> None:
    """Untrained, an FP32 source comes back byte for byte, with every side file."""
    (folder / "tokenizer.json").write_bytes(b'{"odd":  "spacing"}\n')
    (folder / "chat_template.jinja").write_text("{{ x }}")
    (folder / "pytorch_model.bin").write_bytes(b"old weights")
    change_config(folder, some_key={"kept": [1, None]})
    with slidedp.Trainer(model=folder, args=arguments(tmp_path)) as trainer:
        trainer.save_model(tmp_path / "saved")
    names = {p.name for p in folder.iterdir()} - {"pytorch_model.bin"}
    assert {p.name for p in (tmp_path / "saved").iterdir()} == names
    for name in names:
        assert (tmp_path / "saved" / name).read_bytes() == (folder / name).read_bytes(), name


def test_failed_save_loses_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that fails before, during or after the writing: training goes on, and the next save
    works."""
    ids = np.arange(16)[None]
    batch = {"input_ids": ids, "labels": ids}
    with slidedp.Trainer(model=folder, args=arguments(tmp_path)) as trainer:
        with pytest.raises(ValueError, match="not a folder"):
            trainer.save_model(folder / "config.json")
        trainer.train_step(batch)
        monkeypatch.setenv("SLIDE_FAULT", "save:0:error")
        with pytest.raises(RuntimeError, match="save"):
            trainer.save_model(tmp_path / "saved")
        monkeypatch.delenv("SLIDE_FAULT")
        trainer.train_step(batch)

        def fail(*_: object) -> None:
            raise OSError("no space left")

        monkeypatch.setattr(checkpoint, "replace", fail)
        with pytest.raises(OSError, match="no space left"):
            trainer.save_model(tmp_path / "saved")
        monkeypatch.undo()
        assert trainer.train_step(batch).step == 3
        assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint"]
        trainer.save_model(tmp_path / "saved")
    assert (tmp_path / "saved" / "model.safetensors").exists()


def test_save_keeps_what_is_not_its_own(folder: Path, tmp_path: Path) -> None:
    """Replacing a checkpoint, the source itself included, removes its weights and nothing else."""
    (folder / "sub").mkdir()
    (folder / "sub" / "thesis.txt").write_text("years of work")
    (folder / ".gitignore").write_text("*")
    (folder / "other.gguf").write_bytes(b"weights of another kind")
    (folder / "model-00001-of-00009.safetensors").write_bytes(b"of an older layout")
    with slidedp.Trainer(model=folder, args=arguments(tmp_path)) as trainer:
        trainer.save_model(folder)
    assert (folder / "sub" / "thesis.txt").read_text() == "years of work"
    assert {".gitignore", "other.gguf", "config.json"} <= {p.name for p in folder.iterdir()}
    assert not (folder / "model-00001-of-00009.safetensors").exists()
    assert not (folder / checkpoint.MARK).exists()
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


def test_save_through_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    with slidedp.Trainer(model=folder, args=arguments(tmp_path)) as trainer:
        trainer.save_model(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "disk" / "model.safetensors").exists()


def test_foreign_folder_in_the_drafts_place(folder: Path, tmp_path: Path) -> None:
    (tmp_path / ".saved.saving").mkdir()
    (tmp_path / ".saved.saving" / "mine").write_text("kept")
    with (
        slidedp.Trainer(model=folder, args=arguments(tmp_path)) as trainer,
        pytest.raises(ValueError, match="in the way"),
    ):
        trainer.save_model(tmp_path / "saved")
    assert (tmp_path / ".saved.saving" / "mine").read_text() == "kept"


def test_nonfinite_weights_are_not_saved(folder: Path, tmp_path: Path) -> None:
    """What could not be loaded again does not replace what could."""
    ids = np.arange(16)[None]
    batch = {"input_ids": ids, "labels": ids}
    with slidedp.Trainer(model=folder, args=arguments(tmp_path, bf16=False)) as trainer:
        trainer.save_model(tmp_path / "saved")
        good = (tmp_path / "saved" / "model.safetensors").read_bytes()
        with pytest.raises(ValueError, match="learning rate"):
            trainer.train_step(batch, lr=1e300)
        trainer.train_step(batch, lr=3e38)
        trainer.train_step(batch, lr=3e38) if np.isfinite(trainer.logits(ids)).all() else None
        with pytest.raises(ValueError, match="not saved"):
            trainer.save_model(tmp_path / "saved")
    assert (tmp_path / "saved" / "model.safetensors").read_bytes() == good
