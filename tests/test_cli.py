"""The command: init, train, run, env; exit statuses and one-line errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import slidedp
from slidedp.cli import main, read_run
from slidedp.launch import run

CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert main(["init", str(tmp_path / "config.json"), str(tmp_path / "fresh")]) == 0
    return tmp_path / "fresh"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_init(tmp_path: Path, dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "config.json"
    source.write_text(json.dumps(CONFIG))
    assert main(["init", str(source), str(tmp_path / "a"), "--dtype", dtype]) == 0
    assert "parameters" in capsys.readouterr().out
    args = slidedp.TrainingArguments(output_dir=tmp_path / "o", device="cpu", max_seq_length=8)
    with slidedp.Trainer(model=tmp_path / "a", args=args) as trainer:
        norms = trainer.tensor("model.norm.weight")
        table = trainer.tensor("model.embed_tokens.weight")
    assert (norms == 1).all()
    assert table.std() == pytest.approx(0.02, rel=0.1) and abs(table.mean()) < 2e-3
    assert main(["init", str(source), str(tmp_path / "b"), "--dtype", dtype]) == 0
    name = "model.safetensors"
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert main(["init", str(source), str(tmp_path / "c"), "--dtype", dtype, "--seed", "1"]) == 0
    assert (tmp_path / "a" / name).read_bytes() != (tmp_path / "c" / name).read_bytes()


def test_init_loads_in_transformers(fresh: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the reference")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(fresh, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.config.model_type == "qwen3"


def test_init_refuses(fresh: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(fresh / "config.json"), str(fresh)]) == 1
    assert "not empty" in capsys.readouterr().err
    assert main(["init", str(fresh / "none.json"), str(fresh / "x")]) == 1
    assert "none.json" in capsys.readouterr().err


def test_train(fresh: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).integers(0, 97, (12, 8)))
    out = tmp_path / "out"
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model: {fresh}\ntrain_dataset: {tmp_path / 'rows.npy'}\n"
        f"eval_dataset: {tmp_path / 'rows.npy'}\noutput_dir: {out}\ndevice: cpu\n"
        "learning_rate: 1e-2\nmax_seq_length: 8\nper_device_train_batch_size: 4\n"
    )
    assert main(["train", str(file), "--max_steps", "4", "--learning-rate=2e-2"]) == 0
    text = capsys.readouterr().out
    assert "training 4/4" in text and "eval_loss" in text and f"saved {out}" in text
    assert (out / "model.safetensors").exists() and (out / "config.json").exists()


def test_train_refuses_output_before_training(
    fresh: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "rows.npy", np.zeros((4, 8), int))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model: {fresh}\ntrain_dataset: {tmp_path / 'rows.npy'}\n"
        f"output_dir: {tmp_path / 'out'}\ndevice: cpu\nmax_seq_length: 8\n"
    )
    assert main(["train", str(file)]) == 1
    told = capsys.readouterr()
    assert "other things" in told.err and "training" not in told.out


@pytest.mark.parametrize(
    ("content", "more", "words"),
    [
        ("model: x\n", [], "train_dataset"),
        ("train_dataset: x\n", [], "model"),
        ("model: x\ntrain_dataset: y\nlearning_rat: 1\n", [], "learning_rate"),
        ("model: x\ntrain_dataset: y\n", ["--learning_rate", "fast"], "learning_rate"),
        ("model: x\ntrain_dataset: y\n", ["--learning_rate"], "no value"),
        ("model: x\ntrain_dataset: y\n", ["learning_rate", "1"], "overrides"),
        ("model: /none\ntrain_dataset: y\n", [], "/none"),
        ("- 1\n", [], "mapping"),
        ("a: [\n", [], "run.yaml"),
    ],
)
def test_train_refuses(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: str,
    more: list[str],
    words: str,
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(content)
    assert main(["train", str(file), *more]) == 1
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error and error.startswith("slidedp: ")


def test_read_run(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: a\nlearning_rate: 1e-5\nbf16: false\n")
    got = read_run(file, ["--max-steps", "3", "--bf16=true", "--adam_beta2", "9.5e-1"])
    assert got == {
        "model": "a", "learning_rate": 1e-5, "bf16": True, "max_steps": 3, "adam_beta2": 0.95,
    }  # fmt: skip


def test_env(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert slidedp.__version__ in text
    for word in ("isa", "threads", "OpenBLAS", "memory", "cpu", "cuda", "SLIDE_ISA"):
        assert word in text, word


def test_wrong_command_line() -> None:
    for arguments in ([], ["fly"], ["env", "--loud"]):
        with pytest.raises(SystemExit) as error:
            main(arguments)
        assert error.value.code == 2


# ---- run ----


def script(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "script.py"
    path.write_text(text)
    return path


def launch(tmp_path: Path, ranks: int, text: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slidedp", "run", "-n", str(ranks)]
    return subprocess.run(
        [*command, str(script(tmp_path, text)), "--flag", "a b"],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_run_sets_torchruns_variables(tmp_path: Path) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    line = f"str([os.environ[n] for n in {names}] + sys.argv[1:]) + chr(10)"
    text = f"import os, sys\nsys.stdout.write({line})"  # one write: lines don't mix
    result = launch(tmp_path, 3, text)
    assert result.returncode == 0, result.stderr
    lines = sorted(result.stdout.splitlines())
    assert len(lines) == 3
    for rank, line in enumerate(lines):
        assert line.startswith(f"['{rank}', '{rank}', '3', '3', '127.0.0.1',")
        assert line.endswith("'--flag', 'a b']")


@pytest.mark.parametrize(
    ("ending", "status"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137)]
)
def test_run_ends_with_the_first_failure(tmp_path: Path, ending: str, status: int) -> None:
    text = f"import os, sys, time\nif os.environ['RANK'] == '1': {ending}\ntime.sleep(60)"
    started = time.monotonic()
    result = launch(tmp_path, 2, text)
    assert result.returncode == status
    assert "rank 1" in result.stderr and "ending rank 0" in result.stderr
    assert time.monotonic() - started < 30


def test_run_forwards_signals(tmp_path: Path) -> None:
    text = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('asked to end', flush=True),"
        " sys.exit(0)))\n"
        "print('ready', flush=True)\ntime.sleep(60)"
    )
    command = [sys.executable, "-m", "slidedp", "run", "-n", "2", str(script(tmp_path, text))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
        assert process.wait(30) == 128 + signal.SIGTERM
    assert rest.count("asked to end") == 2


def test_run_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-n", "0", "x.py"]) == 1
    assert "-n 0" in capsys.readouterr().err
    assert main(["run", "-n", "2"]) == 1
    assert "script" in capsys.readouterr().err


def test_run_from_python(tmp_path: Path) -> None:
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    assert run(1, [str(script(tmp_path, "import os; os._exit(7)"))]) == 7
    assert {s: signal.getsignal(s) for s in before} == before
    assert "RANK" not in os.environ
