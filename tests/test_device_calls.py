"""Calls of the device that fail, one after the other, and that allocate: on whichever backend the
tests run (--device)."""

from __future__ import annotations

from pathlib import Path

import families
import numpy as np
import pytest

import slidedp


def open_trainer(folder: Path, device: str) -> slidedp.Trainer:
    args = slidedp.TrainingArguments(
        output_dir=folder.parent / "out",
        device=device,
        per_device_train_batch_size=2,
        max_seq_length=32,
        gradient_accumulation_steps=2,
        chunk_bytes=4096,
        threads=1,
    )
    return slidedp.Trainer(folder, args)


def batches(seed: int, rows: int, seq: int) -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(seed)
    out = []
    for _ in range(2):
        ids = random.integers(0, 60, (rows, seq))
        out.append({"input_ids": ids, "labels": ids})
    return out


def engine_of(trainer: slidedp.Trainer):  # type: ignore[no-untyped-def]
    assert trainer._engine
    return trainer._engine


def test_each_call_of_a_step_fails(checkpoints: families.Checkpoints, device: str) -> None:
    """An exception that says what was asked; no hang; the states are whole, for they can be read;
    and a fresh trainer of the same process gives the same loss as ever."""
    folder = checkpoints("qwen3")
    step = batches(1, 2, 9)
    with open_trainer(folder, device) as trainer:
        before = engine_of(trainer).device_calls()[0]
        want = trainer.train_step(step, lr=1e-3).loss
        calls = engine_of(trainer).device_calls()[0] - before
    assert calls > 100
    # Each of the first and last few, and a spread of those between, so that it ends today.
    chosen = sorted({*range(1, 12), *range(12, calls, max(calls // 40, 1)), calls - 1, calls})
    for n in chosen:
        with open_trainer(folder, device) as trainer:
            engine_of(trainer).device_calls(fail_at=n)
            with pytest.raises(RuntimeError, match=r"device call \d+ fails, as asked"):
                trainer.train_step(step, lr=1e-3)
            for name, shape in list(trainer.named_tensors())[:3]:
                master = trainer.tensor(name)
                assert master.shape == shape and np.isfinite(master).all()
            with pytest.raises(RuntimeError, match="failed before"):
                trainer.train_step(step, lr=1e-3)
    with open_trainer(folder, device) as trainer:
        assert trainer.train_step(step, lr=1e-3).loss == want


def test_steps_of_random_lengths_allocate_nothing(
    checkpoints: families.Checkpoints, device: str
) -> None:
    random = np.random.default_rng(2)
    steps = 200 if device == "cpu" else 25
    with open_trainer(checkpoints("llama3"), device) as trainer:
        trainer.train_step(batches(0, 2, 32), lr=1e-4)
        before = engine_of(trainer).device_calls()[1]
        for seed in range(steps):
            rows = int(random.integers(1, 3))
            result = trainer.train_step(batches(seed, rows, int(random.integers(1, 33))), lr=1e-4)
            assert result.skipped or np.isfinite(result.loss)
        assert engine_of(trainer).device_calls()[1] == before
