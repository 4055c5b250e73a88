"""A training step on the GPU with random weights made in host memory, beside what bounds it and the
peers' times on the same shapes (docs/design.md says where those are from).

    python benchmarks/bench_step.py [--only REGEX] [--steps 5] [--threads 0] [--json FILE]
    python benchmarks/bench_step.py --shape qwen3-4b --rows 64 --length 1024 [--micro-rows 8]
        [--activations recompute] [--head-rows 4096] ...

Without --shape: the cases of CASES. Each runs in a process of its own, so that its memory is free
before the next. Bounds, measured in the same run: the step's GEMM with torch.matmul, its attention
with torch's fastest SDPA, the copies of weights and gradients at the rate of pinned memory, and
AdamW over planes of this machine's memory. Needs torch for the bounds (--no-bounds: without).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slidedp import _slidedp
from slidedp.config import read_config
from slidedp.libraries import blas_path, nvidia_path

QWEN3 = {"model_type": "qwen3", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "head_dim": 128}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-4b": {
        **QWEN3,
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        **QWEN3,
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "llama3.1-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "model_type": "llama",
        "vocab_size": 1024,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
}


@dataclass(frozen=True)
class Case:
    shape: str
    rows: int  # sequences a step
    length: int
    micro_rows: int  # sequences a micro-batch
    activations: str = "recompute"
    head_rows: int = 4096
    slots: int = 2
    chunk_mib: int = 32
    peer: float = 0.0  # seconds a step of the SlideFormer data-parallel release, one rank
    budget_gib: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.shape} {self.rows}x{self.length} {self.activations}"


CASES = [
    Case("qwen3-4b", 4, 1024, 4, peer=2.31),
    Case("qwen3-4b", 16, 1024, 16, peer=2.32),
    Case("qwen3-4b", 64, 1024, 16, peer=3.69),
    Case("qwen3-4b", 64, 1024, 16, "keep", peer=3.69),
    Case("qwen3-4b", 8, 8192, 2, peer=4.837),
    Case("llama3.1-8b", 32, 1024, 16, peer=3.419),
    Case("qwen3-0.6b", 64, 1024, 16, peer=0.763),
]


def open_engine(case: Case, options: argparse.Namespace) -> tuple[_slidedp.Engine, int]:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "config.json"
        path.write_text(json.dumps(SHAPES[case.shape]))
        config = read_config(Path(scratch))
    engine = _slidedp.Engine(
        {
            "model": config.to_spec(),
            "device": options.device,
            "bf16": True,
            "gradient_dtype": "bfloat16",
            "threads": options.threads,
            "blas": blas_path(),
            "nvidia": nvidia_path(),
            "max_tokens": case.micro_rows * case.length,
            "max_seq": case.length,
            "micro_batches": case.rows // case.micro_rows,
            "activations": case.activations,
            "device_budget": int(case.budget_gib * 2**30),
            "slots": case.slots,
            "chunk_bytes": case.chunk_mib << 20,
            "head_rows": case.head_rows,
            "overlap": not options.no_overlap,
        }
    )
    return engine, config.vocab_size


def run_case(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    start = time.perf_counter()
    engine, vocab = open_engine(case, options)
    engine.init(0, 0.02)
    made = time.perf_counter() - start
    rng = np.random.default_rng(0)
    steps = []
    for number in range(options.warmup + options.steps):
        batches = []
        for _ in range(case.rows // case.micro_rows):
            ids = rng.integers(0, vocab, (case.micro_rows, case.length), dtype=np.int32)
            labels = np.roll(ids, -1, 1)
            labels[:, -1] = -100
            batches.append({"input_ids": ids, "labels": labels})
        out = engine.step(batches, 1e-5)
        assert np.isfinite(out["loss"]), "the loss is not a number"
        note = "" if number >= options.warmup else " (warm-up)"
        print(
            f"  step {number}: {out['seconds']:.3f} s, exposed update "
            f"{out['exposed_update_seconds']:.3f} s, loss {out['loss']:.4f}{note}",
            flush=True,
        )
        if number >= options.warmup:
            steps.append(dict(out))
    plan = engine.plan()
    engine.close()
    seconds = [s["seconds"] for s in steps]
    return {
        "case": asdict(case),
        "name": case.name,
        "seconds": seconds,
        "median": statistics.median(seconds),
        "exposed": statistics.median(s["exposed_update_seconds"] for s in steps),
        "made": made,
        "plan": plan,
        "host_peak": peak_host_bytes(),
    }


def peak_host_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


# ---- bounds ----


def time_on_gpu(work: Any, repeat: int = 5) -> float:
    """Seconds: the median over `repeat` runs between two events, after two to warm up."""
    import torch

    times = []
    for number in range(repeat + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        if number >= 2:
            times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def matrices(shape: dict[str, Any]) -> tuple[list[tuple[int, int]], tuple[int, int]]:
    """(out, in) of a layer's linears as the engine joins them, and of the head."""
    hidden, inter = shape["hidden_size"], shape["intermediate_size"]
    dim = shape.get("head_dim", hidden // shape["num_attention_heads"])
    q, kv = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
    layer = [(q + 2 * kv, hidden), (hidden, q), (2 * inter, hidden), (hidden, inter)]
    return layer, (shape["vocab_size"], hidden)


def parameters(shape: dict[str, Any]) -> int:
    layer, head = matrices(shape)
    matrix = sum(a * b for a, b in layer) * shape["num_hidden_layers"]
    return matrix + head[0] * head[1] * (1 if shape["tie_word_embeddings"] else 2)


def bounds(case: Case, threads: int) -> dict[str, float]:
    """Seconds of the parts of a step alone: gemm and attention without and with the recompute of a
    unit (which stops before the down projection), weights in twice, gradients out, AdamW."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shape = SHAPES[case.shape]
    tokens = case.micro_rows * case.length
    times = case.rows // case.micro_rows
    layers = shape["num_hidden_layers"]
    found = {"gemm": 0.0, "recompute gemm": 0.0}
    layer, head = matrices(shape)

    def triple(rows: int, matrix: tuple[int, int]) -> tuple[float, float]:
        out, inner = matrix
        x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(out, inner, device="cuda", dtype=torch.bfloat16)
        g = torch.randn(rows, out, device="cuda", dtype=torch.bfloat16)
        forward = time_on_gpu(lambda: x @ w.T)
        return forward, forward + time_on_gpu(lambda: g @ w) + time_on_gpu(lambda: g.T @ x)

    for place, matrix in enumerate(layer):
        forward, whole = triple(tokens, matrix)
        found["gemm"] += whole * times * layers
        found["recompute gemm"] += forward * times * layers * (place < 3)
    chunk = min(case.head_rows, tokens)
    found["gemm"] += triple(chunk, head)[1] * (tokens / chunk) * times

    heads, kv = shape["num_attention_heads"], shape["num_key_value_heads"]
    dim = shape.get("head_dim", shape["hidden_size"] // heads)
    q, k, v = (
        torch.randn(
            case.micro_rows, h, case.length, dim, device="cuda", dtype=torch.bfloat16
        ).requires_grad_()
        for h in (heads, kv, kv)
    )
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    with sdpa_kernel(backends, set_priority=True):

        def attend() -> Any:
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )

        forward = time_on_gpu(attend)
        out = attend()
        ones = torch.randn_like(out)
        backward = time_on_gpu(lambda: torch.autograd.grad(out, (q, k, v), ones, retain_graph=True))
    found["attention"] = (forward + backward) * times * layers
    found["recompute attention"] = forward * times * layers

    bytes_moved = parameters(shape) * 2
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    card = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    found["weights in, twice"] = (
        time_on_gpu(lambda: card.copy_(host, non_blocking=True)) / 2**30 * bytes_moved * 2
    )
    found["gradients out"] = (
        time_on_gpu(lambda: host.copy_(card, non_blocking=True)) / 2**30 * bytes_moved
    )
    found["adamw"] = parameters(shape) / adamw_rate(threads)
    return found


def adamw_rate(threads: int, count: int = 1 << 28) -> float:
    """Parameters a second of the engine's AdamW over the four planes, FP32 gradient."""
    rng = np.random.default_rng(0)
    grad = rng.standard_normal(count, dtype=np.float32)
    planes = [
        np.full(count, 0x3C00, np.uint16),
        np.zeros(count, np.int16),
        np.zeros(count, np.float32),
        np.zeros(count, np.float32),
    ]
    times = []
    for step in range(1, 7):
        begin = time.perf_counter()
        _slidedp.adamw(
            planes,
            grad,
            lr=1e-5,
            beta1=0.9,
            beta2=0.999,
            epsilon=1e-8,
            weight_decay=0.0,
            step=step,
            threads=threads or len(os.sched_getaffinity(0)),
        )
        times.append(time.perf_counter() - begin)
    return count / statistics.median(times[1:])


# ---- the table ----


def machine() -> str:
    names = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x]
    cpu = names[0].split(":", 1)[1].strip() if names else "unknown CPU"
    try:
        gpu = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        gpu = "no GPU"
    return f"{gpu}; {cpu}, {len(os.sched_getaffinity(0))} CPUs"


def device_bytes(result: dict[str, Any]) -> int:
    return int(result["plan"]["device_bytes"])


def show(result: dict[str, Any]) -> None:
    case = Case(**result["case"])
    median = result["median"]
    print(f"\n{result['name']}: {median:.3f} s/step (of {len(result['seconds'])})", end="")
    print(f", {case.rows * case.length / median:,.0f} tokens/s", end="")
    if case.peer:
        print(f", peer {case.peer:.2f} s: {case.peer / median:.2f} times its speed", end="")
    print(f"\n  exposed update {result['exposed']:.3f} s, engine made in {result['made']:.1f} s")
    print(f"  device {device_bytes(result) / 2**30:.2f} GiB planned", end="")
    print(f", host peak {result['host_peak'] / 2**30:.1f} GiB")
    for name, seconds in result.get("bounds", {}).items():
        print(f"  {name:<22}{seconds:8.3f} s{seconds / median:8.2f} of the step")
    sys.stdout.flush()


def child(case: Case, options: argparse.Namespace) -> dict[str, Any] | None:
    """The case in a process of its own; None where it failed, which has been printed."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        command = [sys.executable, __file__, "--one", json.dumps(asdict(case)), "--json", file.name]
        for name in ("device", "steps", "warmup", "threads"):
            command += [f"--{name}", str(getattr(options, name))]
        command += ["--no-overlap"] * options.no_overlap
        print(f"\n{case.name}, {case.micro_rows} sequences a micro-batch", flush=True)
        if subprocess.run(command, check=False).returncode:
            return None
        result: dict[str, Any] = json.load(file)
        return result


def child_bounds(case: Case, options: argparse.Namespace) -> dict[str, float]:
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        command = [sys.executable, __file__, "--bounds-of", json.dumps(asdict(case))]
        command += ["--json", file.name, "--threads", str(options.threads)]
        if subprocess.run(command, check=False).returncode:
            return {}
        found: dict[str, float] = json.load(file)
        return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="a regular expression over the cases' names")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--micro-rows", type=int, default=0, help="0: all of --rows")
    parser.add_argument("--activations", default="recompute")
    parser.add_argument("--head-rows", type=int, default=4096)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--chunk-mib", type=int, default=32)
    parser.add_argument("--budget-gib", type=float, default=0.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--no-overlap", action="store_true")
    parser.add_argument("--no-bounds", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--bounds-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        result = run_case(Case(**json.loads(options.one)), options)
        options.json.write_text(json.dumps(result))
        return 0
    if options.bounds_of:
        found = bounds(Case(**json.loads(options.bounds_of)), options.threads)
        options.json.write_text(json.dumps(found))
        return 0
    cases = [case for case in CASES if re.search(options.only, case.name)]
    if options.shape:
        names = ("activations", "head_rows", "slots", "chunk_mib", "budget_gib")
        more = {name: getattr(options, name) for name in names}
        micro = options.micro_rows or options.rows
        cases = [Case(options.shape, options.rows, options.length, micro, **more)]
    print(machine(), flush=True)
    results = []
    for case in cases:
        result = child(case, options)
        if result and not options.no_bounds:
            result["bounds"] = child_bounds(case, options)
        if result:
            results.append(result)
            show(result)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "results": results}, indent=1))
    return 0 if len(results) == len(cases) else 1


if __name__ == "__main__":
    sys.exit(main())
