"""Host memory: one copy of the states for all ranks, 12 bytes a parameter and those of gradients
that wait; no second copy while loading; nothing that grows with the number of steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from slidedp.config import read_config
from slidedp.fresh import shapes

AT_ONCE: dict[str, Any] = {"max_grad_norm": 0, "defer_updates": False}  # no gradient waits
ISOLATED = Path(__file__).parent / "isolated"


def run_ranks(
    world: int, checkpoint: Path, folder: Path, options: dict[str, Any]
) -> list[dict[str, Any]]:
    """What each rank of isolated/memory_rank.py reports."""
    script = ISOLATED / "memory_rank.py"
    command = [sys.executable, "-m", "slidedp", "run", "-n", str(world), str(script)]
    result = subprocess.run(
        [*command, str(checkpoint), str(folder), json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return [json.loads((folder / f"rank{r}.json").read_text()) for r in range(world)]


@pytest.fixture(scope="module")
def sizable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 21 M parameters: large beside the pages that borders waste."""
    folder = tmp_path_factory.mktemp("sizable")
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 4096,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    out = folder / "checkpoint"
    command = [sys.executable, "-m", "slidedp", "init", str(folder / "config.json"), str(out)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return out


@pytest.mark.parametrize(
    ("world", "options", "bytes_each"),
    [
        (1, AT_ONCE, 12),
        (2, AT_ONCE, 12),
        (4, AT_ONCE, 12),
        (1, {}, 14),  # one rank's gradients wait in BF16, as they came
        (1, {"gradient_dtype": "float32"}, 16),
        (1, {**AT_ONCE, "skip_nonfinite": True}, 14),
        (2, {}, 16),  # sums of several ranks, in FP32
        (3, {**AT_ONCE, "max_grad_norm": 0.5}, 16),
    ],
)
def test_states_are_one_copy(
    sizable: Path, tmp_path: Path, world: int, options: dict[str, Any], bytes_each: int
) -> None:
    reports = run_ranks(world, sizable, tmp_path, options)
    plan = reports[0]["plan"]
    states = bytes_each * plan["parameters"]
    waiting = plan.get("host gradient", 0)
    assert abs(waiting - (bytes_each - 12) * plan["parameters"]) <= 0.01 * states
    staging = plan["host staging"]
    for when in ("loaded", "after"):
        segment = sum(report[when]["segment"] for report in reports)
        # Staging is taken with the states but is not theirs.
        assert abs(segment - staging - states) <= 0.01 * states, (when, segment, staging, states)
        assert abs(segment - plan["host_bytes"]) <= 0.01 * plan["host_bytes"]
    # Loading holds no second copy: what a rank has of its own is the printed workspace, the
    # loader's pieces, and the interpreter.
    for report in reports:
        own = report["loaded"]["other"] - report["before"]["other"]
        room = plan["device_bytes"] + 0.05 * states + (24 << 20)
        assert own <= room, (own, room)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 150 M parameters in shards, 0.3 GB. 5 % of its states is far more than the
    libraries and the loader's pieces; with the workspace, which many small layers keep small, it is
    far less than a second copy of the files."""
    folder = tmp_path_factory.mktemp("large")
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 4096,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 50,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    wanted = list(shapes(read_config(folder)).items())
    where = {}
    for i in range(4):
        file = f"model-{i + 1:05d}-of-00004.safetensors"
        shard = {name: np.full(shape, 2**-6, np.float16) for name, shape in wanted[i::4]}
        save_file(shard, folder / file, metadata={"format": "pt"})
        where.update(dict.fromkeys(shard, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


@pytest.mark.parametrize("world", [1, 2])
def test_peak_while_loading(large: Path, tmp_path: Path, world: int) -> None:
    """At no moment until it has loaded does a run hold more than 1.05 x the states and the printed
    workspace, interpreters aside.

    The ranks' peaks are added up: never less than the peak of their sum, and without the gaps of
    sampling. Pages of the segment count once all the same, as a rank that loads touches its own
    slices only.
    """
    reports = run_ranks(world, large, tmp_path, AT_ONCE)
    plan = reports[0]["plan"]
    states = 12 * plan["parameters"]
    peak = sum(report["peak"] for report in reports)
    room = plan["host staging"] + sum(report["plan"]["device_bytes"] for report in reports)
    assert states <= peak <= 1.05 * states + room, (peak, states, room)


def test_steps_do_not_grow(tiny_llama: Path, tmp_path: Path) -> None:
    """500 steps: less than 1 KiB a step."""
    script = tmp_path / "steps.py"
    script.write_text(
        "import sys, numpy as np, slidedp\n"
        "args = slidedp.TrainingArguments(output_dir=sys.argv[2], device='cpu',"
        " max_seq_length=24, per_device_train_batch_size=2)\n"
        "def rss():\n"
        "    return int(open('/proc/self/statm').read().split()[1]) * 4096\n"
        "rng = np.random.default_rng(1)\n"
        "with slidedp.Trainer(model=sys.argv[1], args=args) as trainer:\n"
        "    def step():\n"
        "        shape = (int(rng.integers(1, 3)), int(rng.integers(1, 25)))\n"
        "        ids = rng.integers(0, 64, size=shape)\n"
        "        trainer.train_step({'input_ids': ids, 'labels': ids})\n"
        "    for _ in range(100):\n"
        "        step()\n"
        "    before = rss()\n"
        "    for _ in range(500):\n"
        "        step()\n"
        "    print(rss() - before)\n"
    )
    result = subprocess.run(
        [sys.executable, str(script), str(tiny_llama), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.split()[-1]) < 500 * 1024


def test_too_little_memory_is_refused(sizable: Path, tmp_path: Path) -> None:
    """A limit on the address space below the states: refused before anything is taken, with bytes
    asked, bytes free and the limit's source."""
    script = tmp_path / "limit.py"
    script.write_text(
        "import resource, sys, slidedp\n"
        "args = slidedp.TrainingArguments(output_dir=sys.argv[2], device='cpu',"
        " max_seq_length=8, per_device_train_batch_size=1)\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "limit = used + (150 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "try:\n"
        "    slidedp.Trainer(model=sys.argv[1], args=args)\n"
        "except MemoryError as error:\n"
        "    print('refused:', error)\n"
    )
    result = subprocess.run(
        [sys.executable, str(script), str(sizable), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "refused:" in result.stdout, result.stdout + result.stderr
    assert "host" in result.stdout and "RLIMIT_AS" in result.stdout
