"""AdamW on the host against its floor (STREAM triad) and against torch's fused AdamW.

    python benchmarks/bench_adamw.py [--threads 1,2] [--params 64Mi] [--json FILE]

All contenders work on the same pages with the same number of threads, in turns within each round,
and the table gives medians over the rounds: on a shared machine only the ratios of one run mean
something. Bytes are those that the algorithm has to move:

    split planes   hi 2+2, lo 2+2, m 4+4, v 4+4, gradient 4 = 28 bytes a parameter
    FP32 masters   master 4+4, m 4+4, v 4+4, gradient 4     = 28
    torch, fused   the same as FP32 masters                 = 28
    triad          a = b + 3 c: 4 + 4 + 4                   = 12 bytes an element, as STREAM counts

The triad uses ordinary stores, so the processor also reads each line of `a` before it is written
(write-allocate). STREAM does not count that; AdamW has no such traffic, since it reads what it
writes. The ratio to a triad counted at 16 bytes, the traffic itself, stands in a column of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from slidedp import _slidedp

HYPER = {"lr": 1e-5, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.01}
STEP = 1000  # any step past the first ones: only the scalars depend on it
ADAMW_BYTES = 28
TRIAD_BYTES = 12
TRIAD_TRAFFIC = 16


def machine() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def parse_count(text: str) -> int:
    """`1000`, `64Mi` or `1Gi` -> a number."""
    for suffix, factor in (("Ki", 1 << 10), ("Mi", 1 << 20), ("Gi", 1 << 30)):
        if text.endswith(suffix):
            return int(text[: -len(suffix)]) * factor
    return int(text)


def parse_threads(text: str) -> list[int]:
    threads = [int(part) for part in text.split(",")]
    if min(threads) < 1:
        raise argparse.ArgumentTypeError("a number of threads is at least 1")
    return threads


def make_arrays(count: int) -> dict[str, np.ndarray]:
    """The planes of `count` parameters, 20 bytes each: every page touched, no subnormal value."""
    generator = np.random.default_rng(0)
    block = generator.standard_normal(min(count, 1 << 20), dtype=np.float32)

    def fill(scale: float) -> np.ndarray:
        return np.resize(block, count) * np.float32(scale)

    arrays = {"master": fill(0.02), "m": fill(1e-4), "v": fill(1e-4), "grad": fill(1e-3)}
    arrays["v"] *= arrays["v"]
    bits = arrays["master"].view(np.uint32)
    arrays["hi"] = ((bits + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)
    low = bits - (arrays["hi"].astype(np.uint32) << np.uint32(16))
    arrays["lo"] = low.astype(np.uint16).view(np.int16)
    return arrays


def make_torch(arrays: dict[str, np.ndarray]) -> Callable[[], None]:
    """A step of torch.optim.AdamW(fused=True) on the very pages of the FP32 masters."""
    parameter = torch.nn.Parameter(torch.from_numpy(arrays["master"]))
    parameter.grad = torch.from_numpy(arrays["grad"])
    optimizer = torch.optim.AdamW(
        [parameter],
        lr=HYPER["lr"],
        betas=(HYPER["beta1"], HYPER["beta2"]),
        eps=HYPER["epsilon"],
        weight_decay=HYPER["weight_decay"],
        fused=True,
    )
    optimizer.state[parameter] = {
        "step": torch.tensor(float(STEP)),
        "exp_avg": torch.from_numpy(arrays["m"]),
        "exp_avg_sq": torch.from_numpy(arrays["v"]),
    }

    def step() -> None:
        optimizer.step()

    return step


def measure(contenders: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each contender in each round. The order turns from round to round, so that no
    one always runs after the same neighbour."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for turn in range(-1, rounds):  # round -1 warms up
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            start = time.perf_counter()
            contenders[name]()
            if turn >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def run(arrays: dict[str, np.ndarray], threads: int, rounds: int, isa: str) -> dict[str, Any]:
    split = (arrays["hi"], arrays["lo"], arrays["m"], arrays["v"])
    full = (arrays["master"], arrays["m"], arrays["v"])
    grad = arrays["grad"]
    torch.set_num_threads(threads)
    adamw = {"step": STEP, "isa": isa, "threads": threads, **HYPER}
    contenders: dict[str, Callable[[], Any]] = {
        "triad": lambda: _slidedp.triad(arrays["scratch"], arrays["m"], arrays["v"], threads),
        "split planes": lambda: _slidedp.adamw(split, grad, **adamw),
        "FP32 masters": lambda: _slidedp.adamw(full, grad, **adamw),
        "torch fused": make_torch(arrays),
    }
    seconds = measure(contenders, rounds)
    count = grad.size
    result: dict[str, Any] = {}
    for name, times in seconds.items():
        median = statistics.median(times)
        size = TRIAD_BYTES if name == "triad" else ADAMW_BYTES
        result[name] = {
            "seconds": median,
            "fastest": min(times),
            "slowest": max(times),
            "bytes": size,
            "gb_per_s": count * size / median / 1e9,
            "g_elements_per_s": count / median / 1e9,
        }
    triad, fused = result["triad"]["gb_per_s"], result["torch fused"]["gb_per_s"]
    for entry in result.values():
        entry["of_triad"] = entry["gb_per_s"] / triad
        entry["of_triad_traffic"] = entry["of_triad"] * TRIAD_BYTES / TRIAD_TRAFFIC
        entry["of_torch"] = entry["gb_per_s"] / fused if entry["bytes"] == ADAMW_BYTES else None
    return result


def show(threads: int, result: dict[str, Any]) -> None:
    print(f"\n{threads} thread{'s' if threads > 1 else ''}")
    print(
        f"{'':14}{'ms':>9}{'min..max':>16}{'G/s':>8}{'bytes':>7}{'GB/s':>8}"
        f"{'of triad':>10}{'at 16 B':>9}{'of torch':>10}"
    )
    for name, entry in result.items():
        spread = f"{entry['fastest'] * 1e3:.1f}..{entry['slowest'] * 1e3:.1f}"
        ratio = "" if entry["of_torch"] is None else f"{entry['of_torch']:.2f}"
        print(
            f"{name:14}{entry['seconds'] * 1e3:9.1f}{spread:>16}{entry['g_elements_per_s']:8.3f}"
            f"{entry['bytes']:7d}{entry['gb_per_s']:8.1f}{entry['of_triad']:10.2f}"
            f"{entry['of_triad_traffic']:9.2f}{ratio:>10}"
        )


def main() -> int:
    cpus = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", type=parse_count, default=1 << 26, help="default 64Mi")
    parser.add_argument("--threads", type=parse_threads, default=sorted({1, cpus}), help="1,2,..")
    parser.add_argument("--rounds", type=int, default=9, help="at least 7")
    parser.add_argument("--isa", default="", help="base, avx2 or avx512; default: the one in use")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    args = parser.parse_args()
    if args.rounds < 7:
        parser.error("--rounds: medians of fewer than 7 rounds say little")

    isa = args.isa or _slidedp.env()["isa"]
    print(f"{machine()} · {cpus} CPUs · {isa} · torch {torch.__version__}")
    print(f"{args.params:,} parameters, medians of {args.rounds} rounds, contenders in turns")
    print("triad: ordinary stores, 12 bytes an element, write-allocate not counted")
    arrays = make_arrays(args.params)
    arrays["scratch"] = np.zeros_like(arrays["master"])
    results = {}
    for threads in args.threads:
        results[threads] = run(arrays, threads, args.rounds, isa)
        show(threads, results[threads])
    if args.json:
        report = {
            "machine": machine(),
            "cpus": cpus,
            "isa": isa,
            "torch": torch.__version__,
            "params": args.params,
            "rounds": args.rounds,
            "triad": "ordinary stores, 12 bytes an element, write-allocate not counted",
            "threads": results,
        }
        with open(args.json, "w") as file:
            json.dump(report, file, indent=2)
            file.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
