"""Twenty steps against PyTorch: the loss at each of them, and the weights at the end."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from tolerances import BF16, FP32

import slidedp

pytest.importorskip("torch", reason="the reference")
reference = pytest.importorskip("reference", reason="needs torch")

STEPS, ROWS, T = 20, 4, 19
HYPER = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def rate(step: int) -> float:
    return 1e-3 * min(1.0, (step + 1) / 5)


def batches(vocab: int) -> np.ndarray:
    """Tokens with something to learn: each follows from the one before, mostly."""
    rng = np.random.default_rng(11)
    follow = rng.permutation(vocab)
    ids = rng.integers(0, vocab, (STEPS, ROWS, T))
    for t in range(1, T):
        keep = rng.random((STEPS, ROWS)) < 0.8
        ids[:, :, t] = np.where(keep, follow[ids[:, :, t - 1]], ids[:, :, t])
    return ids


def ours(
    folder: Path, device: str, data: np.ndarray, micro: int = 1, **more: Any
) -> tuple[list[float], dict[str, np.ndarray]]:
    args = slidedp.TrainingArguments(
        output_dir=folder.parent / "out",
        device=device,
        max_seq_length=T,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=micro,
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.1,
        **{"max_grad_norm": 0, **more},
    )
    with slidedp.Trainer(model=folder, args=args) as trainer:
        losses = []
        for step, ids in enumerate(data):
            parts = np.split(ids, micro)
            batch = [{"input_ids": part, "labels": part} for part in parts]
            losses.append(trainer.train_step(batch, lr=rate(step)).loss)
        return losses, {name: trainer.tensor(name) for name, _ in trainer.named_tensors()}


@pytest.mark.parametrize("micro", [1, 4])
@pytest.mark.parametrize("case", ["llama3", "llama-bias", "qwen2", "qwen3-tied", "mistral-window"])
def test_fp32(checkpoints: families.Checkpoints, device: str, case: str, micro: int) -> None:
    model = families.make_model(case)
    data = batches(model.config.vocab_size)
    want = list(reference.train_fp32(model, data, rate, **HYPER))
    got, masters = ours(checkpoints(case), device, data, micro, bf16=False)
    assert want[-1] < want[0] - 0.3  # it learns
    assert np.abs(np.subtract(got, want)).max() <= FP32.trajectory
    moved = families.make_model(case).state_dict()
    for name, parameter in model.named_parameters():
        step = float((parameter.detach() - moved[name]).abs().max())
        worst = float(np.abs(masters[name] - parameter.detach().numpy()).max())
        # An element whose gradient is all rounding still moves by the learning rate, either way.
        assert worst <= 0.05 * step, (name, worst, step)


@pytest.mark.parametrize("case", ["llama3", "qwen2", "qwen3-tied", "mistral-window"])
def test_baseline_semantics(checkpoints: families.Checkpoints, device: str, case: str) -> None:
    """BF16 weights cast from FP32 masters, BF16 gradients, FP32 AdamW a unit: the same curve."""
    model = families.make_model(case)
    exact = copy.deepcopy(model)
    data = batches(model.config.vocab_size)
    want = list(reference.train_baseline(model, data, rate, **HYPER))
    plain = list(reference.train_fp32(exact, data, rate, **HYPER))
    got, _ = ours(checkpoints(case), device, data, bf16=True)
    assert got[-1] < got[0] - 0.3
    assert np.abs(np.subtract(got, want) / want).max() <= BF16.trajectory
    assert np.abs(np.subtract(got, plain) / plain).max() <= BF16.trajectory


def test_gradient_dtype(checkpoints: families.Checkpoints, device: str) -> None:
    """FP32 gradients with BF16 weights: as near to the baseline, and not the same bits."""
    data = batches(101)
    half, _ = ours(checkpoints("llama3"), device, data, bf16=True)
    full, _ = ours(checkpoints("llama3"), device, data, bf16=True, gradient_dtype="float32")
    assert half != full
    assert np.abs(np.subtract(half, full) / full).max() <= BF16.trajectory
