"""Ranks in processes of their own that train a step at a time, and what came of each step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROWS, T = 4, 13

# Trains on this rank's rows of [steps, rows, T] ids; rank 0 writes what steps said and the state
# after each of them.
SCRIPT = """
import json, os, sys
import numpy as np
import slidedp

checkpoint, data, out, options = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
steps = np.load(data)
micro, states = options.pop("micro", 1), options.pop("states", True)
args = slidedp.TrainingArguments(output_dir=out + ".d", device="cpu", max_seq_length=steps.shape[2],
                                 per_device_train_batch_size=steps.shape[1], weight_decay=0.1,
                                 adam_beta1=0.9, adam_beta2=0.95, **options)
told = []
with slidedp.Trainer(model=checkpoint, args=args) as trainer:
    for step, ids in enumerate(steps):
        own = np.array_split(ids, world)[rank]
        parts = [{"input_ids": part, "labels": part} for part in np.array_split(own, micro)]
        r = trainer.train_step(parts, lr=1e-3 * min(1.0, (step + 1) / 5))
        told.append({"loss": r.loss, "norm": r.grad_norm, "skipped": r.skipped, "step": r.step,
                     "nonfinite": r.nonfinite, "unit": r.nonfinite_unit})
        if rank == 0 and states:
            state = {f"{what} {name}": trainer.tensor(name, what)
                     for name, _ in trainer.named_tensors()
                     for what in ("master", "exp_avg", "exp_avg_sq")}
            np.savez(f"{out}.{step}.npz", **state)
if rank == 0:
    json.dump(told, open(out, "w"))
"""


class Run:
    """Ranks that train on `data`, and what came of it."""

    def __init__(
        self,
        checkpoint: Path,
        folder: Path,
        data: np.ndarray,
        world: int = 1,
        fault: str = "",
        **options: Any,
    ) -> None:
        folder.mkdir()
        script, self.out = folder / "script.py", folder / "out"
        script.write_text(SCRIPT)
        np.save(folder / "data.npy", data)
        command = [sys.executable, "-m", "slidedp", "run", "-n", str(world), str(script)]
        command += [str(checkpoint), str(folder / "data.npy"), str(self.out), json.dumps(options)]
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=240,
            env={**os.environ, "OMP_NUM_THREADS": "1", "SLIDE_FAULT": fault},
        )
        self.failed, self.text = result.returncode != 0, result.stdout + result.stderr

    def told(self) -> list[dict[str, Any]]:
        assert not self.failed, self.text
        told: list[dict[str, Any]] = json.loads(self.out.read_text())
        return told

    def state(self, step: int) -> dict[str, bytes]:
        with np.load(f"{self.out}.{step}.npz") as file:
            return {name: file[name].tobytes() for name in file.files}


def learnable(steps: int, vocab: int) -> np.ndarray:
    """Tokens of which each follows from the one before, mostly: the norm falls as it is learnt."""
    rng = np.random.default_rng(11)
    follow = rng.permutation(vocab)
    ids = rng.integers(0, vocab, (steps, ROWS, T))
    for t in range(1, T):
        keep = rng.random((steps, ROWS)) < 0.8
        ids[:, :, t] = np.where(keep, follow[ids[:, :, t - 1]], ids[:, :, t])
    return ids
