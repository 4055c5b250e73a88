"""Clipping is exact, and a step with an Inf or NaN anywhere is forgotten on all ranks."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from stepping import Run, T, learnable
from tolerances import FP32

import slidedp


def rate(step: int) -> float:
    return 1e-3 * min(1.0, (step + 1) / 5)


@pytest.mark.parametrize(
    ("case", "world", "micro"),
    [("llama3", 1, 1), ("llama3", 2, 2), ("qwen3-tied", 1, 4), ("qwen3-tied", 2, 1)],
)
def test_fifty_steps_as_pytorch(
    checkpoints: families.Checkpoints, tmp_path: Path, case: str, world: int, micro: int
) -> None:
    pytest.importorskip("torch", reason="the reference")
    reference = pytest.importorskip("reference", reason="needs torch")
    model = families.make_model(case)
    data = learnable(50, model.config.vocab_size)
    hyper = {"betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}

    def torch_run(model: Any, bound: float) -> np.ndarray:
        return np.array(list(reference.train_clipped(model, data, rate, bound, **hyper)))

    # About half of the steps are clipped.
    bound = float(np.median(torch_run(copy.deepcopy(model), math.inf)[:, 1]))
    want = torch_run(model, bound)
    clipped = int((want[:, 1] > bound).sum())
    assert 5 <= clipped <= 45, (clipped, want[:, 1])  # both kinds of step are in it
    run = Run(
        checkpoints(case),
        tmp_path / "run",
        data,
        world,
        micro=micro,
        states=False,
        bf16=False,
        max_grad_norm=bound,
        adam_epsilon=1e-6,
    )
    told = run.told()
    losses, norms = [np.array([t[key] for t in told]) for key in ("loss", "norm")]
    assert np.abs(losses - want[:, 0]).max() <= FP32.trajectory
    assert np.abs(norms / want[:, 1] - 1).max() <= FP32.norms


@pytest.mark.parametrize("value", ["inf", "nan"])
@pytest.mark.parametrize(
    ("world", "rank", "options"),
    [
        (1, 0, {}),
        (2, 1, {}),
        (3, 0, {"bf16": False}),
        (2, 0, {"max_grad_norm": 0, "skip_nonfinite": True, "defer_updates": False}),
        (1, 0, {"max_grad_norm": 0, "skip_nonfinite": True}),
    ],
)
def test_spoilt_step_is_forgotten(
    tiny_llama: Path, tmp_path: Path, world: int, rank: int, options: dict[str, Any], value: str
) -> None:
    """One element of one chunk of one rank in step 1 of 0 to 3: the state stays as it was, and the
    run goes on as if that step had never been."""
    data = learnable(4, 64)
    with slidedp.Trainer(
        model=tiny_llama, args=slidedp.TrainingArguments(output_dir=tmp_path / "x", device="cpu")
    ) as trainer:
        units = trainer.plan["units"]
    # A rank sends one chunk to each owner, from the highest unit down.
    chunk = units * world + world + 1
    spoilt = Run(
        tiny_llama, tmp_path / "spoilt", data, world, f"chunk:{rank}:{value}:{chunk}", **options
    )
    clean = Run(tiny_llama, tmp_path / "clean", np.delete(data, 1, axis=0), world, **options)
    told = spoilt.told()
    assert [t["skipped"] for t in told] == [False, True, False, False]
    assert [t["step"] for t in told] == [1, 1, 2, 3]
    assert [t["nonfinite"] for t in told] == [0, 1, 0, 0]
    assert told[1]["unit"] == units - 2
    assert "step 2 is skipped" in spoilt.text and f"first in unit {units - 2}" in spoilt.text
    assert spoilt.state(1) == spoilt.state(0)
    assert spoilt.state(2) != spoilt.state(1)
    # The rates of the two runs differ by a step, so only what came before and the counters compare.
    assert clean.state(0) == spoilt.state(0)


def test_later_steps_do_not_notice(tiny_llama: Path, tmp_path: Path) -> None:
    """The same bits as a run that never saw the step that was skipped."""
    data = learnable(9, 64)
    data[6] = data[7]  # from step 5 on all have the same rate
    with slidedp.Trainer(
        model=tiny_llama, args=slidedp.TrainingArguments(output_dir=tmp_path / "x", device="cpu")
    ) as trainer:
        units = trainer.plan["units"]
    fault = f"chunk:1:nan:{2 * units * 6 + 1}"
    spoilt = Run(tiny_llama, tmp_path / "spoilt", data, 2, fault)
    clean = Run(tiny_llama, tmp_path / "clean", np.delete(data, 6, axis=0), 2)
    assert spoilt.told()[6]["skipped"]
    assert spoilt.state(8) == clean.state(7)


@pytest.mark.parametrize("world", [1, 2])
def test_without_waiting_it_is_an_error(tiny_llama: Path, tmp_path: Path, world: int) -> None:
    """Where updates run during backward a spoilt gradient can't be taken back."""
    run = Run(
        tiny_llama,
        tmp_path / "run",
        learnable(3, 64),
        world,
        f"chunk:0:inf:{world + 1}",
        max_grad_norm=0,
        defer_updates=False,
    )
    assert run.failed and "RuntimeError" in run.text
    assert "1 gradients are Inf or NaN, first in unit" in run.text
    assert "skip_nonfinite=True" in run.text


def test_skips_in_a_row_stop_the_run(tiny_llama: Path, tmp_path: Path) -> None:
    """A model whose logits overflow never gets better."""
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny_llama.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tiny_llama / "model.safetensors")
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], 3e38)
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    args = slidedp.TrainingArguments(
        output_dir=tmp_path / "out", device="cpu", max_seq_length=T, max_skipped_steps=3
    )
    ids = learnable(1, 64)[0, :1]
    with slidedp.Trainer(model=broken, args=args) as trainer:
        before = {name: trainer.tensor(name).tobytes() for name, _ in trainer.named_tensors()}
        for _ in range(2):
            result = trainer.train_step({"input_ids": ids, "labels": ids})
            assert result.skipped and result.nonfinite and result.step == 0
        with pytest.raises(RuntimeError, match=r"skipped 3 times in a row \(max_skipped_steps\)"):
            trainer.train_step({"input_ids": ids, "labels": ids})
        after = {name: trainer.tensor(name).tobytes() for name, _ in trainer.named_tensors()}
        assert before == after
