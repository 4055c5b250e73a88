"""What the scripts of this folder that drive the extension share; tests/test_extension.py too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slidedp import _slidedp
from slidedp.libraries import blas_path

BLAS = blas_path()
_slidedp.env(BLAS)  # opens it for kernel() too: there is one a process


def make_model(**changes: Any) -> dict[str, Any]:
    """A model that a step takes a millisecond with."""
    model: dict[str, Any] = {
        "model_type": "llama",
        "hidden": 24,
        "layers": 3,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 6,
        "inter": 40,
        "vocab": 67,
        "rms_eps": 1e-5,
        "tied": False,
        "padding_idx": -1,
        "qkv_bias": False,
        "o_bias": False,
        "mlp_bias": False,
        "sliding_window": 0,
        "layer_slides": None,
        "rope": "default",
        "rope_theta": 10000.0,
        "rope_factor": 1.0,
        "rope_low": 0.0,
        "rope_high": 0.0,
        "rope_original": 0,
    }
    assert changes.keys() <= model.keys()
    return {**model, **changes}


def make_spec(model: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    spec = {
        "model": make_model(**(model or {})),
        "max_tokens": 64,
        "max_seq": 32,
        "threads": 2,
        "blas": BLAS,
    }
    return {**spec, **changes}


def resident() -> int:
    """Bytes of memory of this process that are in use now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
