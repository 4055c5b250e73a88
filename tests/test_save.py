"""A saved folder loads in transformers as it is, gives our logits, and equals the source in names,
shapes, dtypes, shards and side files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import families
import numpy as np
import pytest

import slidedp
from slidedp.checkpoint import open_checkpoint

torch = pytest.importorskip("torch", reason="the reference")
transformers = pytest.importorskip("transformers", reason="the reference")

T = 12


def arguments(folder: Path, device: str, bf16: bool) -> slidedp.TrainingArguments:
    return slidedp.TrainingArguments(
        output_dir=folder / "out",
        device=device,
        max_seq_length=T,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        bf16=bf16,
    )


def source(folder: Path, case: str, dtype: str, shard: str) -> Path:
    model = families.make_model(case).to(getattr(torch, dtype))
    model.save_pretrained(folder / "source", max_shard_size=shard)
    return folder / "source"


@pytest.mark.parametrize("shard", ["1GB", "60KB"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", ["llama-tied", "llama-bias", "qwen2", "qwen3", "mistral-nemo"])
def test_round(tmp_path: Path, device: str, case: str, dtype: str, shard: str) -> None:
    folder = source(tmp_path, case, dtype, shard)
    ids = np.random.default_rng(2).integers(0, 101, (2, T))
    bf16 = dtype == "bfloat16"
    with slidedp.Trainer(model=folder, args=arguments(tmp_path, device, bf16)) as trainer:
        trainer.train_step({"input_ids": ids, "labels": ids})
        logits = trainer.logits(ids)
        masters = {name: trainer.tensor(name) for name, _ in trainer.named_tensors()}
        trainer.save_model(tmp_path / "saved")
    before, after = open_checkpoint(folder), open_checkpoint(tmp_path / "saved")
    assert before.files == after.files and (len(before.files) > 1) == (shard == "60KB")
    assert before.tensors == after.tensors and before.metadata == after.metadata
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            assert (tmp_path / "saved" / path.name).read_bytes() == path.read_bytes(), path.name

    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", dtype=torch.float32, attn_implementation="eager"
    )
    for name, parameter in model.named_parameters():
        want = torch.tensor(masters[name])
        if dtype == "bfloat16":  # hi: to nearest, ties away from zero
            assert (parameter - want).abs().max() <= want.abs().max() * 2**-8
        else:
            assert (parameter == want.to(getattr(torch, dtype)).float()).all(), name
    with torch.no_grad():
        theirs = model(input_ids=torch.tensor(ids)).logits.numpy()
    bound = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    assert np.abs(logits - theirs).max() <= bound * np.abs(theirs).max()

    with slidedp.Trainer(
        model=tmp_path / "saved", args=arguments(tmp_path, device, bf16)
    ) as trainer:
        again = trainer.logits(ids)
    if dtype != "float16":  # we compute with just what was saved
        assert (again == logits).all()


def test_language_model_inside_a_wrapper(tmp_path: Path, device: str) -> None:
    """Prefixes of multimodal wrappers; other parts' tensors are written back byte for byte."""
    from safetensors.numpy import load_file, save_file

    folder = source(tmp_path, "mistral-nemo", "float32", "1GB")
    tensors = load_file(folder / "model.safetensors")
    renamed = {
        n.replace("model.", "language_model.model.", 1)
        if n.startswith("model.")
        else f"language_model.{n}": t
        for n, t in tensors.items()
    }
    other = np.arange(7, dtype=np.int64)
    renamed["vision_tower.patch.weight"] = other
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    outer = {"model_type": "mistral3", "text_config": config, "architectures": ["Mistral3"]}
    (folder / "config.json").write_text(json.dumps(outer))
    ids = np.random.default_rng(2).integers(0, 101, (2, T))
    with slidedp.Trainer(model=folder, args=arguments(tmp_path, device, False)) as trainer:
        trainer.train_step({"input_ids": ids, "labels": ids})
        name = "language_model.model.layers.0.mlp.up_proj.weight"
        trained = trainer.tensor(name)
        trainer.save_model(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert set(saved) == set(renamed)
    assert (saved["vision_tower.patch.weight"] == other).all()
    assert (saved[name] == trained).all() and (trained != renamed[name]).any()


def test_interrupted_save_is_not_seen(tmp_path: Path, device: str) -> None:
    """A draft that an earlier run left is no obstacle, and nothing of it comes through."""
    folder = source(tmp_path, "llama-tied", "float32", "1GB")
    draft = tmp_path / ".saved.saving"
    shutil.copytree(folder, draft)
    (draft / "left-over").write_text("x")
    (draft / ".slidedp-saving").touch()
    with slidedp.Trainer(model=folder, args=arguments(tmp_path, device, False)) as trainer:
        trainer.save_model(tmp_path / "saved")
    assert not draft.exists() and not (tmp_path / "saved" / "left-over").exists()
