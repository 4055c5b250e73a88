"""Weights whole or in shards, gradients summed by the CPU or by the devices: the same bits."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import families
import pytest
from stepping import Run, learnable

import slidedp

PAIRS = list(itertools.product(("full", "shard"), ("cpu", "gpu")))
STEPS = 3
VOCAB = 61  # of every case's ids


def routes(pair: tuple[str, str]) -> dict[str, str]:
    return {"weight_delivery": pair[0], "gradient_reduction": pair[1]}


@pytest.mark.parametrize(
    ("case", "world", "micro", "options"),
    [
        ("llama3", 2, 1, {"bf16": True}),
        ("llama3", 4, 1, {"bf16": False, "max_grad_norm": 0, "defer_updates": False}),
        ("qwen3-tied", 3, 1, {"bf16": True, "max_grad_norm": 0, "chunk_bytes": 5000}),
        ("qwen3-tied", 2, 2, {"bf16": True, "max_grad_norm": 0.3, "slots": 3}),
        ("qwen3-tied", 2, 2, {"bf16": True, "max_grad_norm": 0, "gradient_dtype": "float32"}),
    ],
)
def test_same_bits(
    checkpoints: families.Checkpoints,
    tmp_path: Path,
    case: str,
    world: int,
    micro: int,
    options: dict[str, Any],
) -> None:
    data = learnable(STEPS, VOCAB)
    runs = {
        pair: Run(
            checkpoints(case),
            tmp_path / "-".join(pair),
            data,
            world,
            micro=micro,
            **options,
            **routes(pair),
        )
        for pair in PAIRS
    }
    want = runs["full", "cpu"]
    assert want.told()[0]["norm"] > 0
    for pair, run in runs.items():
        assert run.told() == want.told(), pair
        for step in range(STEPS):
            assert run.state(step) == want.state(step), (pair, step)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("stage", ["gather", "offer"])
@pytest.mark.parametrize("action", ["kill", "error"])
def test_fault(tiny_llama: Path, tmp_path: Path, stage: str, action: str, rank: int) -> None:
    run = Run(
        tiny_llama,
        tmp_path / "run",
        learnable(STEPS, VOCAB),
        2,
        fault=f"{stage}:{rank}:{action}:4",
        **routes(("shard", "gpu")),
    )
    assert run.failed
    assert f"rank {rank}" in run.text
    assert ("died" if action == "kill" else stage) in run.text


@pytest.mark.parametrize("value", ["inf", "nan"])
def test_nonfinite_chunk(tiny_llama: Path, tmp_path: Path, value: str) -> None:
    """A spoilt chunk of one rank: all forget the step, by this route as by the other."""
    data = learnable(STEPS, VOCAB)
    runs = [
        Run(tiny_llama, tmp_path / str(pair), data, 2, f"chunk:1:{value}:2", **routes(PAIRS[pair]))
        for pair in (0, 3)
    ]
    for run in runs:
        assert [told["skipped"] for told in run.told()] == [True, False, False]
    for step in range(STEPS):
        assert runs[0].state(step) == runs[1].state(step)


def test_plan(tiny_llama: Path, tmp_path: Path) -> None:
    """With one rank all routes are the same, and the plan says which are used."""
    args = slidedp.TrainingArguments(output_dir=tmp_path, device="cpu", **routes(("shard", "gpu")))
    with slidedp.Trainer(model=tiny_llama, args=args) as trainer:
        assert trainer.plan["weight delivery"] == "full"
        assert trainer.plan["gradient reduction"] == "cpu"
        assert "host slots" not in trainer.plan


@pytest.mark.parametrize("name", ["weight_delivery", "gradient_reduction"])
def test_unknown_route(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.*auto"):
        slidedp.TrainingArguments(output_dir=tmp_path, **{name: "both"})
