"""Ranks as processes: one host state, the same update as one rank with the same global batch, and
an end before the first step where they disagree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import slidedp

# Trains three steps on rows dealt to the ranks, writes every master of rank 0 and what steps said.
SCRIPT = """
import json, os, sys
import numpy as np
import slidedp

checkpoint, out, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
rows = np.load(options.pop("rows"))
labels = np.load(options.pop("labels"))
shares = options.pop("shares", None) or [len(rows[0]) * (r + 1) // world for r in range(world)]
micro = options.pop("micro", 1)
options.update({k: v[rank] for k, v in options.pop("by_rank", {}).items()})
args = slidedp.TrainingArguments(output_dir=out, device="cpu", bf16=False, weight_decay=0.1,
                                 max_seq_length=rows.shape[-1], learning_rate=1e-2,
                                 adam_epsilon=1e-3, keep_gradients=True, **options)
with slidedp.Trainer(model=checkpoint, args=args) as trainer:
    results = []
    for step in range(len(rows)):
        own = slice(shares[rank - 1] if rank else 0, shares[rank])
        x, y = rows[step][own], labels[step][own]
        parts = np.array_split(np.arange(len(x)), micro) if len(x) else []
        batches = [{"input_ids": x[p], "labels": y[p]} for p in parts if len(p)]
        result = trainer.train_step(batches)
        results.append([result.loss, result.grad_norm, result.num_targets, result.skipped])
    if rank == 0:
        names = [name for name, _ in trainer.named_tensors()]
        np.savez(out + ".npz", **{n: trainer.tensor(n) for n in names})
        json.dump(results, open(out + ".json", "w"))
    trainer.evaluate({"input_ids": rows[0][:1], "labels": labels[0][:1]})
"""


def run(
    checkpoint: Path, folder: Path, world: int, options: dict[str, Any], **env: str
) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    out = folder / f"out{world}-{len(list(folder.iterdir()))}"
    command = [sys.executable, "-m", "slidedp", "run", "-n", str(world), str(script)]
    result = subprocess.run(
        [*command, str(checkpoint), str(out), json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )
    result.args = out
    return result


def outcome(result: subprocess.CompletedProcess[str]) -> tuple[dict[str, np.ndarray], list[Any]]:
    assert result.returncode == 0, result.stdout + result.stderr
    with np.load(f"{result.args}.npz") as file:
        masters = {name: file[name] for name in file.files}
    return masters, json.loads(Path(f"{result.args}.json").read_text())


@pytest.fixture
def rows(tmp_path: Path) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 64, (3, 8, 13))
    labels = ids.copy()
    labels[:, 1::3, :6] = -100
    np.save(tmp_path / "rows.npy", ids)
    np.save(tmp_path / "labels.npy", labels)
    return {"rows": str(tmp_path / "rows.npy"), "labels": str(tmp_path / "labels.npy")}


def close(a: dict[str, np.ndarray], b: dict[str, np.ndarray], bound: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        worst = float(np.abs(a[name] - b[name]).max())
        assert worst <= bound, (name, worst)


@pytest.mark.parametrize(("world", "micro"), [(1, 4), (2, 1), (2, 4), (4, 1), (4, 2)])
def test_same_update(
    tiny_llama: Path, tmp_path: Path, rows: dict[str, Any], world: int, micro: int
) -> None:
    """The same global batch on other numbers of ranks and micro-batches: FP32 rounding apart."""
    alone, told = outcome(run(tiny_llama, tmp_path, 1, rows))
    other, again = outcome(run(tiny_llama, tmp_path, world, {**rows, "micro": micro}))
    # epsilon keeps the update smooth: with 1e-8 an element whose gradient is all rounding moves
    # by the whole learning rate, either way.
    close(alone, other, 2e-6)
    for a, b in zip(told, again, strict=True):
        assert a[0] == pytest.approx(b[0], rel=1e-5) and a[1] == pytest.approx(b[1], rel=1e-4)
        assert a[2:] == b[2:]


def test_same_bits_again(tiny_llama: Path, tmp_path: Path, rows: dict[str, Any]) -> None:
    """Two ranks, twice; with sleeps in every queue, other chunks and without overlap: same bits."""
    first, _ = outcome(run(tiny_llama, tmp_path, 2, rows))
    variants: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({}, {}),
        ({}, {"SLIDE_JITTER": "5"}),
        ({"chunk_bytes": 1000}, {}),
        ({"overlap": False}, {}),
        ({"threads": 3}, {}),
        ({"activations": "keep"}, {}),
        ({}, {"SLIDE_ISA": "base"}),
    ]
    for options, env in variants:
        other, _ = outcome(run(tiny_llama, tmp_path, 2, {**rows, **options}, **env))
        close(first, other, 0.0)


def test_uneven_ranks(tiny_llama: Path, tmp_path: Path, rows: dict[str, Any]) -> None:
    """One row on rank 0, seven on rank 1, and a rank with none: the mean is over targets, not of
    means, so it is one rank's with all eight."""
    alone, told = outcome(run(tiny_llama, tmp_path, 1, rows))
    other, again = outcome(run(tiny_llama, tmp_path, 3, {**rows, "shares": [1, 8, 8]}))
    close(alone, other, 2e-6)
    assert [a[2] for a in told] == [b[2] for b in again]


def test_masked_ranks(tiny_llama: Path, tmp_path: Path, rows: dict[str, Any]) -> None:
    """All labels of rank 1 masked: no NaN, rank 0 counts. All of both: no update at all."""
    labels = np.load(rows["labels"])
    labels[:, 4:] = -100
    labels[1] = -100
    np.save(rows["labels"], labels)
    masters, told = outcome(run(tiny_llama, tmp_path, 2, rows))
    assert [t[3] for t in told] == [False, True, False]
    assert np.isfinite([t[0] for t in told if not t[3]]).all()
    assert all(np.isfinite(m).all() for m in masters.values())
    two = {k: str(tmp_path / f"two-{k}.npy") for k in ("rows", "labels")}
    np.save(two["rows"], np.load(rows["rows"])[[0, 2]])
    np.save(two["labels"], labels[[0, 2]])
    without, _ = outcome(run(tiny_llama, tmp_path, 2, two))
    close(masters, without, 0.0)  # no decay, no step of the moments either


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("learning_rate", [1e-2, 2e-2]),
        ("adam_beta2", [0.999, 0.99]),
        ("max_steps", [5, 6]),
        ("gradient_accumulation_steps", [1, 2]),
    ],
)
def test_disagreement(
    tiny_llama: Path, tmp_path: Path, rows: dict[str, Any], name: str, values: list[Any]
) -> None:
    script_options = {**rows, "by_rank": {name: values}}
    if name == "learning_rate":
        source = SCRIPT.replace("learning_rate=1e-2,", "")
    else:
        source = SCRIPT
    (tmp_path / "own").mkdir()
    script = tmp_path / "own" / "script.py"
    script.write_text(source)
    command = [sys.executable, "-m", "slidedp", "run", "-n", "2", str(script)]
    result = subprocess.run(
        [*command, str(tiny_llama), str(tmp_path / "out"), json.dumps(script_options)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    text = result.stdout + result.stderr
    assert result.returncode != 0
    assert name in text and "rank 1" in text and "rank 0" in text, text


def test_other_checkpoint(tiny_llama: Path, tiny_llama_tied: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, slidedp\n"
        "args = slidedp.TrainingArguments(output_dir=sys.argv[3], device='cpu',"
        " max_seq_length=8)\n"
        "slidedp.Trainer(model=sys.argv[1 + int(os.environ['RANK'])], args=args)\n"
    )
    command = [sys.executable, "-m", "slidedp", "run", "-n", "2", str(script)]
    result = subprocess.run(
        [*command, str(tiny_llama), str(tiny_llama_tied), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode != 0
    assert "checkpoint" in result.stderr or "config." in result.stderr, result.stderr


def test_torchrun(tiny_llama: Path, tmp_path: Path, rows: dict[str, Any]) -> None:
    """Real torchrun sets the variables; the result is that of our launcher, bit for bit."""
    pytest.importorskip("torch", reason="torchrun comes with torch")
    mine, _ = outcome(run(tiny_llama, tmp_path, 2, rows))
    script = tmp_path / "script.py"
    out = tmp_path / "torchrun"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*command, str(script), str(tiny_llama), str(out), json.dumps(rows)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    result.args = out
    theirs, _ = outcome(result)
    close(mine, theirs, 0.0)


def test_several_machines_are_refused(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="one machine"):
        slidedp.Trainer(model=tiny_llama)


def test_a_hundred_trainers(tiny_llama: Path, tmp_path: Path) -> None:
    """100 starts and stops in one process: no descriptor, thread or memory stays."""
    args = slidedp.TrainingArguments(
        output_dir=tmp_path / "out", device="cpu", max_seq_length=8, per_device_train_batch_size=1
    )
    ids = np.arange(8)[None]

    def one() -> None:
        with slidedp.Trainer(model=tiny_llama, args=args) as trainer:
            trainer.train_step({"input_ids": ids, "labels": ids})

    def state() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    for _ in range(10):
        one()
    before = state()
    memory = int(Path("/proc/self/statm").read_text().split()[1])
    for _ in range(90):
        one()
    assert state() == before
    grown = (int(Path("/proc/self/statm").read_text().split()[1]) - memory) * 4096
    assert grown < 4 << 20


def test_rank_that_leaves(tiny_llama: Path, tmp_path: Path) -> None:
    """A rank that ends in good order while another still wants it: an error, not a wait."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, numpy as np, slidedp\n"
        "args = slidedp.TrainingArguments(output_dir=sys.argv[2], device='cpu',"
        " max_seq_length=8)\n"
        "with slidedp.Trainer(model=sys.argv[1], args=args) as trainer:\n"
        "    ids = np.zeros((1, 8), int)\n"
        "    for _ in range(2 - int(os.environ['RANK'])):\n"
        "        trainer.train_step({'input_ids': ids, 'labels': ids})\n"
    )
    command = [sys.executable, "-m", "slidedp", "run", "-n", "2", str(script)]
    result = subprocess.run(
        [*command, str(tiny_llama), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode != 0
    assert "rank 1 has closed its trainer" in result.stderr, result.stderr


@pytest.mark.parametrize(
    "calls", [("evaluate", "step"), ("step", "evaluate"), ("evaluate", "save")]
)
def test_ranks_at_different_calls(tiny_llama: Path, tmp_path: Path, calls: tuple[str, str]) -> None:
    """One rank evaluates while the other trains or saves: an error on both, never a number."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, numpy as np, slidedp\n"
        "args = slidedp.TrainingArguments(output_dir=sys.argv[2], device='cpu',"
        " max_seq_length=8)\n"
        "ids = np.arange(8)[None]\n"
        "batch = {'input_ids': ids, 'labels': ids}\n"
        "call = sys.argv[3 + int(os.environ['RANK'])]\n"
        "with slidedp.Trainer(model=sys.argv[1], args=args) as trainer:\n"
        "    try:\n"
        "        result = (trainer.evaluate(batch) if call == 'evaluate' else\n"
        "                  trainer.train_step(batch) if call == 'step' else\n"
        "                  trainer.save_model())\n"
        "        sys.stdout.write(f'got {result}' + chr(10))\n"
        "    except RuntimeError as error:\n"
        "        sys.stdout.write(f'refused {error}' + chr(10))\n"
    )
    command = [sys.executable, "-m", "slidedp", "run", "-n", "2", str(script)]
    result = subprocess.run(
        [*command, str(tiny_llama), str(tmp_path / "out"), *calls],
        capture_output=True,
        text=True,
        timeout=60,
    )
    text = result.stdout
    assert "got" not in text and text.count("refused") == 2, text + result.stderr
    assert "different calls" in text and "evaluate" in text, text
