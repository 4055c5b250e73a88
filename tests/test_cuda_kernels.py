"""Each kernel of the CUDA backend against its twin on the CPU, at sizes of 1, a prime, one past a
vector, with strides wider than the row and addresses that are not aligned.

    pytest tests/test_cuda_kernels.py --device cuda        # on a GPU
    pytest tests/test_cuda_kernels.py --device emulated    # without one: tests/emulator
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from slidedp import _slidedp
from slidedp.libraries import blas_path, nvidia_path

Array = NDArray[Any]
BLOCK = 16  # SLIDE_NORM_BLOCK


@pytest.fixture(scope="module", autouse=True)
def gpu(device: str) -> None:
    if device != "cuda":
        pytest.skip("needs --device cuda or --device emulated")
    _slidedp.env(blas_path(), nvidia_path())  # opens what the kernels need


def to_bf16(x: Array) -> Array:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def to_f32(x: Array) -> Array:
    return x if x.dtype == np.float32 else (x.astype(np.uint32) << 16).view(np.float32)


class Make:
    """Random arrays in the launch's dtype, `shift` elements past a 64-byte border."""

    def __init__(self, dtype: str, seed: int, shift: int = 0) -> None:
        self.dtype, self.shift = dtype, shift
        self.random = np.random.default_rng(seed)

    def place(self, array: Array) -> Array:
        size = array.itemsize
        room = np.zeros(array.nbytes + 128, np.uint8)
        start = -room.ctypes.data % 64 + self.shift * size
        out = room[start : start + array.nbytes].view(array.dtype)
        out[:] = array.reshape(-1)
        return out

    def act(self, *shape: int, scale: float = 1.0) -> Array:
        x = (self.random.standard_normal(math.prod(shape)) * scale).astype(np.float32)
        return self.place(to_bf16(x) if self.dtype == "BF16" else x)

    def f32(self, *shape: int) -> Array:
        return self.place(self.random.standard_normal(math.prod(shape)).astype(np.float32))

    def zeros(self, n: int, act: bool = False) -> Array:
        bf16 = act and self.dtype == "BF16"
        return self.place(np.zeros(n, np.uint16 if bf16 else np.float32))

    def ids(self, n: int, low: int, high: int) -> Array:
        return self.place(self.random.integers(low, high, n, dtype=np.int32))


def rope_table(m: Make, n: int, cols: int) -> dict[str, Any]:
    return {
        "positions": m.ids(n, 0, 5000),
        "inv_freq": m.place(np.linspace(1, 1e-4, cols).astype(np.float32)),
        "cos": m.zeros(n * cols),
        "sin": m.zeros(n * cols),
        "n": n,
        "half": cols,
        "factor": 1.0,
    }


def embed_fwd(m: Make, n: int, cols: int) -> dict[str, Any]:
    return {
        "ids": m.ids(n, 0, 11),
        "table": m.act(11, cols),
        "out": m.zeros(n * cols, act=True),
        "n": n,
        "cols": cols,
    }


def embed_bwd(m: Make, n: int, cols: int) -> dict[str, Any]:
    return {
        "ids": m.ids(n, 0, 11),
        "dout": m.act(n, cols),
        "dtable": m.zeros(11 * cols),
        "n": n,
        "cols": cols,
        "vocab": 11,
        "skip": 3,
    }


def rmsnorm_fwd(m: Make, n: int, cols: int, groups: int = 1, wider: int = 0) -> dict[str, Any]:
    stride = groups * cols + wider
    return {
        "x": m.act(n, stride),
        "w": m.act(cols),
        "y": m.zeros(n * stride, act=True),
        "rstd": m.zeros(n * groups),
        "n": n,
        "x_stride": stride,
        "y_stride": stride,
        "groups": groups,
        "cols": cols,
        "eps": 1e-5,
    }


def rmsnorm_bwd(
    m: Make, n: int, cols: int, groups: int = 1, wider: int = 0, add: int = 0
) -> dict[str, Any]:
    stride = groups * cols + wider
    x = m.act(n, stride)
    rows = to_f32(x).reshape(n, stride)[:, : groups * cols].reshape(n * groups, cols)
    rstd = (1 / np.sqrt(np.square(rows).mean(1) + 1e-5)).astype(np.float32)
    return {
        "dy": m.act(n, stride),
        "x": x,
        "w": m.act(cols),
        "rstd": m.place(rstd),
        "dx": m.act(n, stride),
        "dw": m.f32(cols),
        "scratch": m.zeros((n + BLOCK - 1) // BLOCK * cols),
        "n": n,
        "dy_stride": stride,
        "x_stride": stride,
        "dx_stride": stride,
        "groups": groups,
        "cols": cols,
        "add": add,
    }


def qk_norm_fwd(m: Make, n: int, cols: int) -> dict[str, Any]:
    return rmsnorm_fwd(m, n, cols, groups=3, wider=5)


def qk_norm_bwd(m: Make, n: int, cols: int) -> dict[str, Any]:
    args = rmsnorm_bwd(m, n, cols, groups=3, wider=5)
    args["dx"] = args["dy"]  # in place, as in the program
    return args


def rmsnorm_bwd_add(m: Make, n: int, cols: int) -> dict[str, Any]:
    return rmsnorm_bwd(m, n, cols, add=1)


def rope(m: Make, n: int, cols: int) -> dict[str, Any]:
    head_dim = 2 * cols + 1  # the last element passes
    angle = m.random.random(n * cols) * 6
    return {
        "x": m.act(n, 3 * head_dim + 2),
        "cos": m.place(np.cos(angle).astype(np.float32)),
        "sin": m.place(np.sin(angle).astype(np.float32)),
        "n": n,
        "stride": 3 * head_dim + 2,
        "heads": 3,
        "head_dim": head_dim,
        "half": cols,
        "sign": -1,
    }


def swiglu_fwd(m: Make, n: int, cols: int) -> dict[str, Any]:
    gu = m.act(n, 2 * cols, scale=3)
    return {"gu": gu, "out": m.zeros(n * cols, act=True), "n": n, "cols": cols}


def swiglu_bwd(m: Make, n: int, cols: int) -> dict[str, Any]:
    gu, dout = m.act(n, 2 * cols, scale=3), m.act(n, cols)
    return {"gu": gu, "dout": dout, "dgu": m.zeros(2 * n * cols, act=True), "n": n, "cols": cols}


def bias_bwd(m: Make, n: int, cols: int) -> dict[str, Any]:
    return {
        "dy": m.act(n, cols + 3),
        "db": m.f32(cols),
        "scratch": m.zeros((n + BLOCK - 1) // BLOCK * cols),
        "n": n,
        "stride": cols + 3,
        "cols": cols,
    }


def ce(m: Make, n: int, cols: int) -> dict[str, Any]:
    return {
        "z": m.act(n, cols, scale=4),
        "labels": m.ids(n, -1, cols),
        "loss": m.zeros(n),
        "n": n,
        "vocab": cols,
        "grad": 1,
        "scale": 0.25,
    }


def cast_down(m: Make, n: int, cols: int) -> dict[str, Any]:
    out = m.place(np.zeros(n * cols, np.uint16))
    return {"in": m.f32(n, cols), "out": out, "n": n * cols, "from": "F32", "to": "BF16"}


def cast_up(m: Make, n: int, cols: int) -> dict[str, Any]:
    x = m.place(to_bf16(m.random.standard_normal(n * cols)))
    return {"in": x, "out": m.zeros(n * cols), "n": n * cols, "from": "BF16", "to": "F32"}


def accumulate(m: Make, n: int, cols: int) -> dict[str, Any]:
    return {"in": m.act(n, cols), "out": m.f32(n, cols), "n": n * cols, "add": 0}


def accumulate_more(m: Make, n: int, cols: int) -> dict[str, Any]:
    return {**accumulate(m, n, cols), "add": 1}


def nonfinite(m: Make, n: int, cols: int) -> dict[str, Any]:
    x = m.act(n, cols)
    if n % 2:  # the last element
        x[-1] = 0x7F80 if m.dtype == "BF16" else np.nan
    return {"x": x, "found": m.place(np.zeros(1, np.int32)), "n": n * cols}


CASES: dict[str, tuple[str, Callable[[Make, int, int], dict[str, Any]]]] = {
    "rope_table": ("rope_table", rope_table),
    "embed_fwd": ("embed_fwd", embed_fwd),
    "embed_bwd": ("embed_bwd", embed_bwd),
    "rmsnorm_fwd": ("rmsnorm_fwd", rmsnorm_fwd),
    "qk_norm_fwd": ("rmsnorm_fwd", qk_norm_fwd),
    "rmsnorm_bwd": ("rmsnorm_bwd", rmsnorm_bwd),
    "rmsnorm_bwd_add": ("rmsnorm_bwd", rmsnorm_bwd_add),
    "qk_norm_bwd": ("rmsnorm_bwd", qk_norm_bwd),
    "rope": ("rope", rope),
    "swiglu_fwd": ("swiglu_fwd", swiglu_fwd),
    "swiglu_bwd": ("swiglu_bwd", swiglu_bwd),
    "bias_bwd": ("bias_bwd", bias_bwd),
    "ce": ("ce", ce),
    "cast_down": ("cast", cast_down),
    "accumulate": ("accumulate", accumulate),
    "accumulate_more": ("accumulate", accumulate_more),
    "nonfinite": ("nonfinite", nonfinite),
    "cast_up": ("cast", cast_up),
}
SIZES = [(1, 1), (3, 17), (67, 64), (130, 67), (5, 1031), (2, 8192 + 8)]


def run_both(
    name: str, dtype: str, make: Callable[[int], dict[str, Any]]
) -> list[tuple[str, Array, Array]]:
    """(field, CPU's, GPU's) of each array after the kernel ran on equal inputs."""
    ours, theirs = make(0), make(0)
    _slidedp.kernel(name, dtype, ours)
    _slidedp.kernel(name, dtype, theirs, device="cuda")
    return [(k, v, theirs[k]) for k, v in ours.items() if isinstance(v, np.ndarray)]


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("case", CASES)
def test_twins(case: str, dtype: str, size: tuple[int, int], shift: int) -> None:
    name, make = CASES[case]
    n, cols = size
    for field, want, got in run_both(
        name, dtype, lambda _: make(Make(dtype, n * cols, shift), n, cols)
    ):
        if field == "scratch":
            continue
        if want.dtype == np.int32 or field == "x":
            np.testing.assert_array_equal(want, got)
            continue
        a, b = to_f32(want).astype(np.float64), to_f32(got).astype(np.float64)
        # A rounding of BF16, of either side; sums in another order for FP32.
        unit = 2.0**-7 if want.dtype == np.uint16 else 4e-6
        size_of = np.abs(a).max(initial=0) if want.dtype != np.uint16 else np.abs(a)
        assert np.all(np.abs(a - b) <= unit * size_of + 1e-6), (field, np.abs(a - b).max())


GEMMS = [
    (m, n, k, trans_a, trans_b)
    for m, n, k in [(1, 1, 1), (3, 17, 5), (64, 65, 66)]
    for trans_a in (0, 1)
    for trans_b in (0, 1)
]


@pytest.mark.parametrize("extra", ["", "add", "bias", "in place"])
@pytest.mark.parametrize(("dtype", "out_type"), [("F32", "F32"), ("BF16", "BF16"), ("BF16", "F32")])
@pytest.mark.parametrize(("m", "n", "k", "trans_a", "trans_b"), GEMMS)
def test_gemm(
    m: int, n: int, k: int, trans_a: int, trans_b: int, dtype: str, out_type: str, extra: str
) -> None:
    def make(_: int) -> dict[str, Any]:
        of, to = Make(dtype, m * n * k), Make(out_type, 7)
        lda, ldb, ldo = (m if trans_a else k) + 2, (k if trans_b else n) + 3, n + 1
        out = to.act(m, ldo)
        args = {
            "a": of.act(k if trans_a else m, lda),
            "b": of.act(n if trans_b else k, ldb),
            "out": out,
            "m": m,
            "n": n,
            "k": k,
            "lda": lda,
            "ldb": ldb,
            "ldo": ldo,
            "trans_a": trans_a,
            "trans_b": trans_b,
            "in_type": dtype,
            "out_type": out_type,
        }
        if extra:
            args["bias" if extra == "bias" else "add"] = {
                "add": to.act(m, ldo),
                "bias": of.act(n),
                "in place": out,
            }[extra]
        return args

    if extra == "bias" and dtype != out_type:
        pytest.skip("no layer has a bias with FP32 sums")
    for _, want, got in run_both("gemm", dtype, make):
        a, b = to_f32(want), to_f32(got)
        unit = 2.0**-7 if want.dtype == np.uint16 else 1e-5
        np.testing.assert_allclose(b, a, rtol=unit, atol=unit * np.abs(a).max())


@pytest.mark.parametrize("kind", ["causal", "window", "documents"])
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize(
    ("rows", "seq", "heads", "kv_heads", "head_dim"),
    [(1, 1, 1, 1, 8), (2, 67, 4, 2, 16), (1, 130, 3, 3, 64), (1, 65, 2, 1, 72), (1, 33, 2, 1, 256)],
)
def test_attention(
    rows: int, seq: int, heads: int, kv_heads: int, head_dim: int, dtype: str, kind: str
) -> None:
    at = np.arange(seq, dtype=np.int32)
    first = {
        "causal": np.zeros(seq, np.int32),
        "window": np.maximum(at - 4, 0).astype(np.int32),
        "documents": (at // 11 * 11).astype(np.int32),
    }[kind]
    stride = (heads + 2 * kv_heads) * head_dim
    q, kv = heads * head_dim, kv_heads * head_dim

    def make(_: int) -> dict[str, Any]:
        m = Make(dtype, seq * heads)
        qkv = m.act(rows * seq, stride)
        return {
            "rows": rows,
            "seq": seq,
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "scale": head_dim**-0.5,
            "q_stride": stride,
            "kv_stride": stride,
            "o_stride": q,
            "window": 5 if kind == "window" else 0,
            "documents": int(kind == "documents"),
            "first": np.tile(first, rows),
            "q": qkv,
            "k": qkv[q:],
            "v": qkv[q + kv :],
            "o": m.zeros(rows * seq * q, act=True),
            "lse": m.zeros(rows * heads * seq),
        }

    forward = make(0)
    _slidedp.kernel("attn_fwd", dtype, forward)
    for field, want, got in run_both("attn_fwd", dtype, make):
        close(field, want, got)

    def make_backward(_: int) -> dict[str, Any]:
        m = Make(dtype, 5)
        d_qkv = m.zeros(rows * seq * stride, act=True)
        args = make(0)
        args.update(o=forward["o"].copy(), lse=forward["lse"].copy())
        args.update(d_o=m.act(rows * seq, q), dq=d_qkv, dk=d_qkv[q:], dv=d_qkv[q + kv :])
        return {**args, "dq_stride": stride, "dkv_stride": stride}

    for field, want, got in run_both("attn_bwd", dtype, make_backward):
        close(field, want, got)


def close(field: str, want: Array, got: Array) -> None:
    """Relative to the array's norm: BF16 rounds P and dS on the way, on the GPU alone."""
    a, b = to_f32(want).astype(np.float64), to_f32(got).astype(np.float64)
    bound = 6e-3 if want.dtype == np.uint16 else (5e-6 if field != "lse" else 1e-5)
    assert np.linalg.norm(a - b) <= bound * np.linalg.norm(a) + 1e-6, field
