"""`debug_nonfinite`: the first op that makes an Inf or NaN is named; a healthy step is the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import families
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import slidedp

IDS = np.arange(12).reshape(2, 6) % 40
STEP = {"input_ids": IDS, "labels": IDS}


def open_trainer(folder: Path, device: str, **more: object) -> slidedp.Trainer:
    args = slidedp.TrainingArguments(
        output_dir=folder.parent / "out",
        device=device,
        per_device_train_batch_size=2,
        max_seq_length=8,
        bf16=False,
        **more,
    )
    return slidedp.Trainer(folder, args)


def with_a_huge_number(folder: Path, target: Path, tensor: str) -> Path:
    """A copy of the checkpoint whose tensor has one number at the end of FP32's range."""
    copy = Path(shutil.copytree(folder, target / "copy"))
    for path in copy.glob("*.safetensors"):
        with safe_open(path, "np") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            meta = file.metadata()
        if tensor in tensors:
            changed = tensors[tensor].copy()
            changed.reshape(-1)[3] = 3e38
            save_file({**tensors, tensor: changed}, path, meta)
    return copy


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        ("model.layers.1.mlp.up_proj.weight", "value gu, after linear of unit 2"),
        ("model.layers.0.self_attn.v_proj.weight", "value .*, after .* of unit 1"),
    ],
)
def test_the_op_is_named(
    checkpoints: families.Checkpoints, device: str, tmp_path: Path, tensor: str, text: str
) -> None:
    """The huge number is finite: it is the product with it that is not, and the op that made it."""
    folder = with_a_huge_number(checkpoints("llama3"), tmp_path, tensor)
    message = f"debug_nonfinite: the first Inf or NaN is in {text}"
    with (
        open_trainer(folder, device, debug_nonfinite=True) as trainer,
        pytest.raises(RuntimeError, match=message),
    ):
        for _ in range(3):
            trainer.train_step(STEP, lr=0.0)


def test_a_healthy_step_is_the_same(checkpoints: families.Checkpoints, device: str) -> None:
    losses = []
    for debug in (False, True):
        with open_trainer(checkpoints("qwen3"), device, debug_nonfinite=debug) as trainer:
            losses.append([trainer.train_step(STEP, lr=1e-3).loss for _ in range(2)])
    assert losses[0] == losses[1]
