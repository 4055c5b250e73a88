"""Ranks that die, stand still or fail: every other rank ends within seconds, names rank and cause,
and leaves nothing behind; a run right after works. One stage, action and rank at a time, three
ranks; `--slow` runs all combinations."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

STAGES = ["load", "forward", "backward", "reduce", "update", "save"]
ACTIONS = ["kill", "stop", "error"]
WORLD = 3
SCRIPT = Path(__file__).parent / "isolated" / "train_rank.py"
# Seconds from the start of the launcher: interpreter start, the fault, and at most 10 s after it.
LIMIT = 40.0


def combinations() -> Iterator[object]:
    for n, (stage, action) in enumerate(itertools.product(STAGES, ACTIONS)):
        for rank in range(WORLD):
            marks = () if rank == (n + n // WORLD) % WORLD else (pytest.mark.slow,)
            yield pytest.param(stage, action, rank, marks=marks)


def launch(checkpoint: Path, output: Path, **env: str) -> subprocess.Popen[str]:
    marked = {**os.environ, "SLIDE_TEST_MARK": str(output), "OMP_NUM_THREADS": "1", **env}
    command = [sys.executable, "-m", "slidedp", "run", "-n", str(WORLD), str(SCRIPT)]
    return subprocess.Popen(
        [*command, str(checkpoint), str(output), "3"],
        env=marked,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def processes(output: Path) -> list[int]:
    """Processes that still carry the run's mark in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if f"SLIDE_TEST_MARK={output}\0".encode() in environment:
                found.append(int(entry.name))
    return found


def wait_gone(output: Path, seconds: float) -> list[int]:
    """A killed process may take a moment to be reaped by init."""
    end = time.monotonic() + seconds
    while (left := processes(output)) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def sockets() -> list[str]:
    return [line for line in Path("/proc/net/unix").read_text().splitlines() if "@slidedp" in line]


def finish(process: subprocess.Popen[str], output: Path) -> str:
    try:
        text, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        for pid in processes(output):
            os.kill(pid, signal.SIGKILL)
        text, _ = process.communicate()
        pytest.fail(f"the launcher still ran after {LIMIT} s:\n{text}")
    return text


@pytest.mark.parametrize(("stage", "action", "rank"), list(combinations()))
def test_fault(tiny_llama: Path, tmp_path: Path, stage: str, action: str, rank: int) -> None:
    shm = sorted(os.listdir("/dev/shm"))
    output = tmp_path / "out"
    number = "1" if stage in ("load", "save") else "2"
    fault = f"{stage}:{rank}:{action}:{number}"
    process = launch(tiny_llama, output, SLIDE_FAULT=fault, SLIDE_STALL="2")
    text = finish(process, output)
    assert process.returncode != 0, text
    assert "reached the end" not in text, text
    assert f"rank {rank}" in text, text
    cause = {"kill": "died", "stop": "no sign of life", "error": stage}[action]
    assert cause in text, text
    assert "Traceback (most recent call last)" not in text or "rank" in text
    assert wait_gone(output, 5.0) == [], "orphans"
    assert sorted(os.listdir("/dev/shm")) == shm
    assert sockets() == []
    assert not (output / "model.safetensors").exists(), "a save that failed must not look whole"


def test_restart_after_kill(tiny_llama: Path, tmp_path: Path) -> None:
    first = tmp_path / "first"
    process = launch(tiny_llama, first, SLIDE_FAULT="backward:0:kill:2")
    finish(process, first)
    assert process.returncode != 0
    second = tmp_path / "second"
    process = launch(tiny_llama, second)
    text = finish(process, second)
    assert process.returncode == 0, text
    assert text.count("reached the end") == WORLD
    assert (second / "model.safetensors").exists()


def test_killed_launcher_leaves_no_rank(tiny_llama: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    process = launch(tiny_llama, output, SLIDE_FAULT="forward:1:stop", SLIDE_STALL="0")
    end = time.monotonic() + 20
    while len(processes(output)) < 1 + WORLD and time.monotonic() < end:
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
    left = wait_gone(output, 10.0)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def test_whole_job_stopped_and_continued(tiny_llama: Path, tmp_path: Path) -> None:
    """Ctrl-Z and fg: nobody is accused for the time that all stood still."""
    output = tmp_path / "out"
    process = launch(tiny_llama, output, SLIDE_STALL="1", SLIDE_JITTER="7")
    end = time.monotonic() + 20
    while len(processes(output)) < 1 + WORLD and time.monotonic() < end:
        time.sleep(0.05)
    pids = processes(output)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(3)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    text = finish(process, output)
    assert process.returncode == 0, text
    assert text.count("reached the end") == WORLD


def test_exception_in_the_script_of_one_rank(tiny_llama: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, numpy as np, slidedp\n"
        "args = slidedp.TrainingArguments(output_dir=sys.argv[2], device='cpu',"
        " max_seq_length=8, per_device_train_batch_size=1)\n"
        "trainer = slidedp.Trainer(model=sys.argv[1], args=args)\n"
        "ids = np.zeros((1, 8), dtype=np.int64)\n"
        "trainer.train_step({'input_ids': ids, 'labels': ids})\n"
        "if os.environ['RANK'] == '1':\n"
        "    raise KeyError('my own mistake')\n"
        "trainer.train_step({'input_ids': ids, 'labels': ids})\n"
    )
    output = tmp_path / "out"
    command = [sys.executable, "-m", "slidedp", "run", "-n", "2", str(script)]
    started = time.monotonic()
    result = subprocess.run(
        [*command, str(tiny_llama), str(output)], capture_output=True, text=True, timeout=LIMIT
    )
    text = result.stdout + result.stderr
    assert result.returncode != 0
    assert "my own mistake" in text and "rank 1" in text
    assert time.monotonic() - started < LIMIT
