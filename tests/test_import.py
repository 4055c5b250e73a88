"""What `import slidedp` pulls in, and what the installed package says of itself."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys

import pytest

import slidedp
from slidedp import _slidedp

# Heavy, or of no use before something is trained: each is imported where it is used.
LATER = {"torch", "transformers", "rich", "tokenizers", "yaml", "matplotlib", "gguf", "scipy"}


def loaded(code: str) -> set[str]:
    """Top packages in sys.modules after `code`, in a fresh interpreter."""
    code += "\nimport json, sys\nprint(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return set(json.loads(result.stdout))


@pytest.mark.parametrize("name", ["slidedp", "slidedp.cli", "slidedp.launch"])
def test_import_is_light(name: str) -> None:
    """Counted in modules: a time would depend on the machine. NumPy is most of what there is."""
    before, after = loaded("pass"), loaded(f"import {name}")
    assert {"slidedp", "numpy"} <= after
    assert (after - before) & LATER == set()


def test_import_leaves_the_process_alone() -> None:
    """No thread of ours, no handler, no descriptor, no warning, no output."""
    code = (
        "import os, signal, numpy\n"
        "def state():\n"
        "    handlers = [str(signal.getsignal(s)) for s in sorted(signal.valid_signals())]\n"
        "    counts = [len(os.listdir('/proc/self/' + x)) for x in ('task', 'fd')]\n"
        "    return counts, handlers\n"
        "before = state()\n"
        "import slidedp\n"
        "assert state() == before\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_version() -> None:
    assert slidedp.__version__ == _slidedp.__version__
    try:
        metadata = importlib.metadata.version("slidedp")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("slidedp runs from its sources here: there is no metadata")
    assert slidedp.__version__ == metadata


def test_metadata() -> None:
    """Run-time requirements, the command, and no torch among them."""
    try:
        package = importlib.metadata.distribution("slidedp")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("slidedp runs from its sources here: there is no metadata")
    always = [text for text in package.requires or [] if "extra ==" not in text]
    assert not any(text.startswith(("torch", "transformers")) for text in always)
    commands = {e.name: e for e in package.entry_points if e.group == "console_scripts"}
    assert commands["slidedp"].value == "slidedp.cli:main"
    assert callable(commands["slidedp"].load())
