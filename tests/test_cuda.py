"""The CUDA backend where there is no GPU: parts of the suite again, in the emulator (emulated.py),
each in a process of its own, for a process looks for NVIDIA's libraries once. `make emulated` runs
all of it. And what a build, or a machine, without CUDA says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import emulated
import numpy as np
import pytest

import slidedp
from slidedp import _slidedp
from slidedp.libraries import nvidia_path

TESTS = Path(__file__).resolve().parent
WITHOUT = "this build of slidedp is without CUDA"


@pytest.fixture
def emulator(request: pytest.FixtureRequest) -> dict[str, str]:
    if request.config.getoption("--device") != "cpu":
        pytest.skip("runs beside the CPU's tests")
    if WITHOUT in _slidedp.env("", nvidia_path())["cuda"]:
        pytest.skip("this build is without CUDA: it needs nvcc and the headers")
    if emulated.why_not():
        pytest.skip(emulated.why_not())
    return {**os.environ, **emulated.environment()}


@pytest.mark.parametrize(
    "part",
    [
        ["test_cuda_kernels.py"],
        ["test_device_calls.py"],
        ["test_parity.py", "-k", "recompute and (llama3 or qwen) or bf16 and qwen3"],
        ["test_equivalence.py", "-k", "offloaded or budget or selective-qwen3"],
    ],
    ids=lambda part: part[0],
)
def test_emulated(emulator: dict[str, str], part: list[str]) -> None:
    name, *options = part
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--device",
        "emulated",
        "-p",
        "no:cacheprovider",
    ]
    ran = subprocess.run(
        [*command, str(TESTS / name), *options], capture_output=True, text=True, env=emulator
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout


SCRIPT = """
import sys
import numpy as np, slidedp
args = slidedp.TrainingArguments(output_dir=sys.argv[2], device=sys.argv[3], max_seq_length=8,
                                 per_device_train_batch_size=1, pin_memory=sys.argv[4])
with slidedp.Trainer(sys.argv[1], args) as trainer:
    ids = np.arange(8)[None]
    print(trainer.plan["device"], trainer.plan["host pinned"] > 0,
          trainer.train_step({"input_ids": ids, "labels": ids}).loss)
"""


def run_script(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, env=env
    )


def test_auto_takes_a_gpu(emulator: dict[str, str], tiny_llama: Path, tmp_path: Path) -> None:
    ran = run_script(emulator, str(tiny_llama), str(tmp_path / "out"), "auto", "auto")
    assert ran.returncode == 0, ran.stderr
    assert "\nemulated GPU True " in ran.stdout, ran.stdout


def test_pinning_that_fails(emulator: dict[str, str], tiny_llama: Path, tmp_path: Path) -> None:
    """One warning with the size, then training with the same loss; or an error, by option."""
    where = (str(tiny_llama), str(tmp_path / "out"), "cuda")
    good = run_script(emulator, *where, "auto")
    # What the pipeline itself pins is a few pages and must work; only large pieces fail.
    env = {**emulator, "FAKE_CUDA_REGISTER_MAX": "16384"}
    ran = run_script(env, *where, "auto")
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("warning") == 1 and "pinning" in ran.stderr, ran.stderr
    assert ran.stdout.split()[-1] == good.stdout.split()[-1]
    ran = run_script(env, *where, "always")
    assert ran.returncode != 0 and "MemoryError" in ran.stderr and "host: pinning" in ran.stderr
    assert "False" in run_script(emulator, *where, "never").stdout


def test_a_gpu_that_is_too_small(
    emulator: dict[str, str], tiny_llama: Path, tmp_path: Path
) -> None:
    env = {**emulator, "FAKE_CUDA_MEMORY": "100000"}
    ran = run_script(env, str(tiny_llama), str(tmp_path / "out"), "cuda", "auto")
    assert ran.returncode != 0
    assert "MemoryError: emulated GPU: the plan takes" in ran.stderr, ran.stderr
    assert "activations='offload'" in ran.stderr


def test_without_a_driver(tiny_llama: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """device='cuda' says what is missing; "auto" goes to the CPU."""
    if request.config.getoption("--device") != "cpu" or _slidedp.devices(nvidia_path())["cuda"]:
        pytest.skip("there is a GPU")
    args = slidedp.TrainingArguments(output_dir=tmp_path, device="cuda")
    with pytest.raises((RuntimeError, OSError), match=r"libcuda\.so\.1|without CUDA|no GPU"):
        slidedp.Trainer(tiny_llama, args)
    args = slidedp.TrainingArguments(output_dir=tmp_path, max_seq_length=8)
    with slidedp.Trainer(tiny_llama, args) as trainer:
        assert trainer.plan["device"].startswith("CPU")
        ids = np.arange(8)[None]
        assert np.isfinite(trainer.train_step({"input_ids": ids, "labels": ids}).loss)
