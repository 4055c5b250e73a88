"""Settings that must not change a bit: threads, chunks, slots, overlap, recomputation, sleeps in
the queues, instruction sets. Masters, moments and gradients are compared, after three steps.

Several ranks are in test_ranks.py. How many rows the head takes at a time changes the order of a
sum, and has a bound instead.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from tolerances import FP32

import slidedp
from slidedp import _slidedp

State = dict[str, np.ndarray]
ROWS, T, STEPS = 3, 17, 3
CASES = ["llama3", "llama-tied", "qwen2-window", "qwen3"]
BASE: dict[str, Any] = {
    "activations": "recompute",
    "threads": 2,
    "slots": 2,
    "chunk_bytes": 4 << 20,
    "head_rows": 16,
    "overlap": True,
}
VARIANTS: list[dict[str, Any]] = [
    {"activations": "keep"},
    {"activations": "selective"},
    {"threads": 1},
    {"threads": 3},
    {"chunk_bytes": 256},
    {"chunk_bytes": 1009},
    {"slots": 3},
    {"slots": 9},
    {"overlap": False},
    {"defer_updates": False},
    {"activations": "keep", "threads": 1, "chunk_bytes": 4099, "slots": 4, "overlap": False},
]
IDS = ["-".join(f"{k}={v}" for k, v in variant.items()) for variant in VARIANTS]


def batches(vocab: int, seed: int = 4) -> list[list[dict[str, np.ndarray]]]:
    """Steps of two micro-batches of different shapes: masked labels, and packed documents."""
    rng = np.random.default_rng(seed)
    steps = []
    for _ in range(STEPS):
        wide = rng.integers(0, vocab, (ROWS, T))
        labels = np.where(rng.random(wide.shape) < 0.2, -100, wide)
        narrow = rng.integers(0, vocab, (1, T - 6))
        documents = np.repeat(np.arange(3), [1, 5, 5])[None]
        steps.append(
            [
                {"input_ids": wide, "labels": labels},
                {"input_ids": narrow, "labels": narrow, "document_ids": documents},
            ]
        )
    return steps


def open_trainer(folder: Path, device: str, bf16: bool, **more: Any) -> slidedp.Trainer:
    args = slidedp.TrainingArguments(
        output_dir=folder.parent / "out",
        device=device,
        bf16=bf16,
        keep_gradients=True,
        weight_decay=0.1,
        max_seq_length=T,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=2,
        **{**BASE, **more},
    )
    return slidedp.Trainer(model=folder, args=args)


def state_of(trainer: slidedp.Trainer) -> State:
    return {
        f"{what} {name}": trainer.tensor(name, what)
        for name, _ in trainer.named_tensors()
        for what in ("master", "exp_avg", "exp_avg_sq", "grad")
    }


def train(folder: Path, device: str, bf16: bool, **more: Any) -> State:
    with open_trainer(folder, device, bf16, **more) as trainer:
        results = [trainer.train_step(step, lr=1e-2) for step in batches(trainer.config.vocab_size)]
        state = state_of(trainer)
    state["losses"] = np.array([result.loss for result in results])
    state["norms"] = np.array([result.grad_norm for result in results])
    return state


def same(a: State, b: State) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if a[name].tobytes() != b[name].tobytes()] == []


class Trained:
    """The state that BASE leads to, for each case and precision, trained once."""

    def __init__(self, checkpoints: families.Checkpoints, device: str) -> None:
        self.checkpoints, self.device = checkpoints, device
        self.made: dict[tuple[str, bool], State] = {}

    def __call__(self, case: str, bf16: bool) -> State:
        if (case, bf16) not in self.made:
            self.made[case, bf16] = train(self.checkpoints(case), self.device, bf16)
        return self.made[case, bf16]


@pytest.fixture(scope="module")
def trained(checkpoints: families.Checkpoints, device: str) -> Trained:
    return Trained(checkpoints, device)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_training_moves_every_tensor(
    checkpoints: families.Checkpoints, device: str, trained: Trained, case: str, bf16: bool
) -> None:
    """Else the comparisons below would say little."""
    state = trained(case, bf16)
    assert all(np.isfinite(values).all() for values in state.values())
    with open_trainer(checkpoints(case), device, bf16) as trainer:
        for name, _ in trainer.named_tensors():
            assert (trainer.tensor(name) != state[f"master {name}"]).any(), name
            assert state[f"grad {name}"].any(), name
    same(state, train(checkpoints(case), device, bf16))


@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_same_bits(
    checkpoints: families.Checkpoints,
    device: str,
    trained: Trained,
    case: str,
    bf16: bool,
    variant: dict[str, Any],
) -> None:
    same(trained(case, bf16), train(checkpoints(case), device, bf16, **variant))


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(
    "activations",
    ["offload", ["offload", "keep", "offload", "offload", "selective", "offload"]],
    ids=["all", "mixed"],
)
def test_offloaded_activations(
    checkpoints: families.Checkpoints,
    device: str,
    trained: Trained,
    bf16: bool,
    activations: str | list[str],
) -> None:
    """Inputs of blocks that wait in host memory: the same bits, overlapped or not."""
    for overlap in (True, False):
        more = {"activations": activations, "overlap": overlap}
        with open_trainer(checkpoints("llama-deep"), device, bf16, **more) as trainer:
            assert trainer.plan["host activations"] > 0
        same(trained("llama-deep", bf16), train(checkpoints("llama-deep"), device, bf16, **more))


def test_policies_of_blocks(checkpoints: families.Checkpoints, device: str) -> None:
    with pytest.raises(ValueError, match="3 for the model's 6 blocks"):
        open_trainer(checkpoints("llama-deep"), device, True, activations=["keep"] * 3)


def test_a_budget_that_is_kept(checkpoints: families.Checkpoints, device: str) -> None:
    """Met to the byte, or refused with the plan and what would make it smaller."""
    with open_trainer(checkpoints("llama3"), device, True) as trainer:
        needed = int(trainer.plan["device_bytes"])
    with open_trainer(checkpoints("llama3"), device, True, gpu_memory_budget=needed) as trainer:
        assert trainer.plan["device_bytes"] == needed
    with pytest.raises(MemoryError, match=r"gpu_memory_budget is .* weight slots .*'offload'"):
        open_trainer(checkpoints("llama3"), device, True, gpu_memory_budget=needed - 1)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_reading_changes_nothing(
    checkpoints: families.Checkpoints, device: str, trained: Trained, bf16: bool
) -> None:
    """Evaluation, logits, tensors and refused batches between the steps."""
    with open_trainer(checkpoints("llama-tied"), device, bf16) as trainer:
        losses = []
        for step in batches(trainer.config.vocab_size):
            trainer.evaluate(step[0])
            trainer.logits(step[1]["input_ids"])
            with pytest.raises(ValueError, match="token id"):
                bad = np.full((1, 4), trainer.config.vocab_size)
                trainer.train_step([step[0], {"input_ids": bad, "labels": bad}])
            losses.append(trainer.train_step(step, lr=1e-2).loss)
            trainer.tensor("model.norm.weight", "exp_avg")
        state = state_of(trainer)
    want = trained("llama-tied", bf16)
    same(state, {name: want[name] for name in state})
    assert losses == want["losses"].tolist()


@pytest.mark.parametrize("head_rows", [1, 13, 64])
def test_head_rows(
    checkpoints: families.Checkpoints, device: str, trained: Trained, head_rows: int
) -> None:
    """Of the first step: later ones start from weights that differ by a rounding."""
    found = []
    for rows in (BASE["head_rows"], head_rows):
        with open_trainer(checkpoints("llama3"), device, False, head_rows=rows) as trainer:
            loss = trainer.train_step(batches(trainer.config.vocab_size)[0], lr=0.0).loss
            names = [name for name, _ in trainer.named_tensors()]
            found.append((loss, {name: trainer.tensor(name, "grad") for name in names}))
    (loss, grads), (other_loss, other_grads) = found
    assert other_loss == pytest.approx(loss, rel=FP32.reordered)
    for name, grad in grads.items():
        worst = float(np.abs(other_grads[name] - grad).max() / np.abs(grad).max())
        assert worst <= FP32.reordered, (name, worst)


def test_micro_batches(checkpoints: families.Checkpoints, device: str) -> None:
    """One batch of four rows, two of two, four of one: the same gradient but for the order of
    sums, also where they hold different numbers of targets."""
    rng = np.random.default_rng(8)
    ids = rng.integers(0, 101, (4, T))
    labels = ids.copy()
    labels[0, 3:] = -100
    labels[2] = -100
    found = []
    for parts in (1, 2, 4):
        more = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": parts}
        args = slidedp.TrainingArguments(
            output_dir=checkpoints.folder / "out",
            device=device,
            bf16=False,
            keep_gradients=True,
            max_seq_length=T,
            **more,
        )
        with slidedp.Trainer(model=checkpoints("llama3"), args=args) as trainer:
            split = zip(np.split(ids, parts), np.split(labels, parts), strict=True)
            batch = [{"input_ids": x, "labels": y} for x, y in split]
            loss = trainer.train_step(batch, lr=0.0).loss
            names = [name for name, _ in trainer.named_tensors()]
            found.append((loss, {name: trainer.tensor(name, "grad") for name in names}))
    for (loss, grads), (other_loss, other_grads) in itertools.pairwise(found):
        assert other_loss == pytest.approx(loss, rel=FP32.reordered)
        for name, grad in grads.items():
            worst = float(np.abs(other_grads[name] - grad).max() / np.abs(grad).max())
            assert worst <= FP32.reordered, (name, worst)


# ---- what is read once a process ----


def in_a_process(folder: Path, device: str, bf16: bool, out: Path, **env: str) -> State:
    """train() of BASE in a process of its own with more environment."""
    code = (
        "import sys, pathlib, numpy as np\n"
        "from test_equivalence import train\n"
        "folder, device, bf16, out = sys.argv[1:]\n"
        "np.savez(out, **train(pathlib.Path(folder), device, bf16 == '1'))\n"
    )
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    result = subprocess.run(
        [sys.executable, "-c", code, str(folder), device, str(int(bf16)), str(out)],
        env={**os.environ, "PYTHONPATH": path, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    with np.load(out) as file:
        return {name: file[name] for name in file.files}


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("isa", ["base", "avx2"])
def test_instruction_sets(
    checkpoints: families.Checkpoints,
    device: str,
    trained: Trained,
    tmp_path: Path,
    isa: str,
    bf16: bool,
) -> None:
    """Ours; the BLAS chooses its own kernels, the same ones in both processes."""
    order = ["base", "avx2", "avx512"]
    if order.index(isa) > order.index(_slidedp.env()["isa_best"]):
        pytest.skip(f"this processor has no {isa}")
    found = in_a_process(checkpoints("qwen3"), device, bf16, tmp_path / "state.npz", SLIDE_ISA=isa)
    same(found, trained("qwen3", bf16))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_sleeps_in_every_queue(
    checkpoints: families.Checkpoints, device: str, trained: Trained, tmp_path: Path, seed: int
) -> None:
    found = in_a_process(
        checkpoints("llama-tied"), device, True, tmp_path / "state.npz", SLIDE_JITTER=str(seed)
    )
    same(found, trained("llama-tied", True))
