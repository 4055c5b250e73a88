"""Loops that must leave nothing behind: `extension_leaks.py engines|errors|results|modules`.

Each runs its loop to warm up, then again, and fails when memory, Python blocks,
threads or file descriptors grow with the number of rounds.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.machinery
import importlib.util
import sys
import weakref
from collections.abc import Callable

import numpy as np
from extension_tools import descriptors, make_spec, resident, threads

from slidedp import _slidedp

IDS = np.arange(16, dtype=np.int32).reshape(2, 8)
BATCH = {"input_ids": IDS, "labels": IDS}


def engines() -> None:
    """Opened, used, closed or dropped; and one that fails to open."""
    for close in (True, False):
        engine = _slidedp.Engine(make_spec())
        engine.init(3, 0.1)
        engine.step([BATCH], 1e-3)
        if close:
            engine.close()
            engine.close()
        del engine
    with contextlib.suppress(ValueError):
        _slidedp.Engine(make_spec({"heads": 3}))


def errors(engine: _slidedp.Engine) -> None:
    bad: list[Callable[[], object]] = [
        lambda: _slidedp.Engine({**make_spec(), "colour": "red"}),
        lambda: _slidedp.Engine(make_spec(threads=True)),
        lambda: engine.step([{"input_ids": IDS, "labels": IDS[:1]}], 1e-3),
        lambda: engine.step([{"input_ids": IDS + 100}], 1e-3),
        lambda: engine.tensor("norm.weight", "colour"),
        lambda: engine.tensor("nothing", "master"),
        lambda: engine.load([{"name": "x"}]),  # type: ignore[typeddict-item]
        lambda: engine.gather([0.0] * 17),
        lambda: _slidedp.kernel("swiglu_fwd", "F32", {"gu": IDS}),
    ]
    for call in bad:
        try:
            call()
        except (TypeError, ValueError, RuntimeError):
            continue
        raise AssertionError("no error")


def results(engine: _slidedp.Engine) -> None:
    engine.step([BATCH, BATCH], 1e-3)
    engine.evaluate([BATCH])
    engine.logits({"input_ids": IDS})
    engine.tensors()
    engine.tensor("norm.weight", "master")
    engine.plan()
    engine.gather([1.0, 2.0])
    _slidedp.env()
    x = np.ones(100, np.float32)
    _slidedp.triad(x.copy(), x, x)


def modules() -> None:
    """The module a second time: an independent one, that goes when nobody has it."""
    loader = importlib.machinery.ExtensionFileLoader("slidedp._slidedp", _slidedp.__file__)
    spec = importlib.util.spec_from_file_location("slidedp._slidedp", loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    assert module is not _slidedp
    assert module.Engine is not _slidedp.Engine
    x = np.ones(100000, np.float32)
    module.triad(x.copy(), x, x, 2)  # leaves a pool to the module
    gone = weakref.ref(module)
    del module, spec, loader
    gc.collect()
    assert gone() is None


def main() -> None:
    mode = sys.argv[1]
    rounds = {"engines": 50, "modules": 400}.get(mode, 200)  # importing fills caches for a while
    engine = _slidedp.Engine(make_spec())
    engine.init(3, 0.1)
    work: dict[str, Callable[[], None]] = {
        "engines": engines,
        "errors": lambda: errors(engine),
        "results": lambda: results(engine),
        "modules": modules,
    }

    def measure() -> tuple[int, int, int, int]:
        gc.collect()
        return resident(), sys.getallocatedblocks(), threads(), descriptors()

    for _ in range(rounds):
        work[mode]()
    before = measure()
    for _ in range(rounds):
        work[mode]()
    after = measure()
    grown, blocks, more_threads, more_files = (b - a for a, b in zip(before, after, strict=True))
    print(f"{mode}: {rounds} rounds, {grown} bytes resident, {blocks} Python blocks")
    assert (more_threads, more_files) == (0, 0), "threads, file descriptors"
    assert blocks < rounds // 2, "a Python object a round"
    assert grown < 3 << 20, "resident memory"
    engine.close()


if __name__ == "__main__":
    main()
