"""Loops that must leave nothing behind: `extension_leaks.py engines|errors|results|modules`.

Each runs its loop once to warm up, then again and again, and fails when memory, Python blocks,
threads or file descriptors grow with the number of rounds.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.machinery
import importlib.util
import sys
import tracemalloc
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
    rounds = 50 if mode == "engines" else 200
    engine = _slidedp.Engine(make_spec())
    engine.init(3, 0.1)
    work: dict[str, Callable[[], None]] = {
        "engines": engines,
        "errors": lambda: errors(engine),
        "results": lambda: results(engine),
        "modules": modules,
    }

    def measure() -> tuple[int, int, int]:
        gc.collect()
        return resident(), threads(), descriptors()

    for _ in range(20):
        work[mode]()
    before = measure()
    for _ in range(rounds):
        work[mode]()
    after = measure()
    # Python's own blocks, apart: tracemalloc slows the loop down and uses memory itself.
    tracemalloc.start()
    for _ in range(5):
        work[mode]()
    gc.collect()
    traced = tracemalloc.get_traced_memory()[0]
    for _ in range(20):
        work[mode]()
    gc.collect()
    growth = tracemalloc.get_traced_memory()[0] - traced
    print(f"{mode}: {rounds} rounds, {after[0] - before[0]} bytes resident, {growth} traced")
    assert after[1:] == before[1:], f"threads, descriptors: {before[1:]} before, {after[1:]} after"
    assert after[0] - before[0] < 3 << 20, "resident memory"
    assert growth < 20 * 64, "Python memory"  # less than one small object a round
    engine.close()


if __name__ == "__main__":
    main()
