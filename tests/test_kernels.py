"""The C loops and small kernels on NumPy arrays, through the extension: AdamW to the bit between
instruction sets, threads and chunks and against PyTorch; kernels against NumPy in float64."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from slidedp import _slidedp

ISAS = ["base", "avx2", "avx512"]
HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-8, "weight_decay": 0.1, "step": 3}


def here(isa: str) -> bool:
    return ISAS.index(isa) <= ISAS.index(_slidedp.env()["isa_best"])


def rng(seed: int) -> np.random.Generator:
    print(f"seed {seed}")
    return np.random.default_rng(seed)


# ---- adamw and triad ----


def make_planes(n: int, seed: int, split: bool) -> tuple[list[NDArray[Any]], NDArray[np.float32]]:
    random = rng(seed)
    master = random.standard_normal(n).astype(np.float32)
    m = (random.standard_normal(n) * 0.1).astype(np.float32)
    v = (random.random(n) * 0.01).astype(np.float32)
    grad = random.standard_normal(n).astype(np.float32)
    if not split:
        return [master, m, v], grad
    bits = master.view(np.uint32)
    hi = ((bits.astype(np.uint64) + 0x8000) >> 16).astype(np.uint16)
    lo = (bits - (hi.astype(np.uint32) << 16)).astype(np.uint16).view(np.int16)
    return [hi, lo, m, v], grad


def join(planes: list[NDArray[Any]]) -> NDArray[np.float32]:
    if len(planes) == 3:
        return planes[0]
    high, low = planes[0].astype(np.uint32) << 16, planes[1].astype(np.int32).view(np.uint32)
    return (high + low).view(np.float32)


@pytest.mark.parametrize("n", [1, 17, 64, 65, 1009, 70001])
def test_adamw_bits(n: int) -> None:
    """The same bits from either form, every instruction set, thread count and chunk size."""
    reference: list[NDArray[Any]] | None = None
    for split in (False, True):
        for isa in filter(here, ISAS):
            for threads, chunk in [(1, 0), (3, 0), (2, 1 + n // 7), (1, n), (2, 2**62)]:
                planes, grad = make_planes(n, n, split)
                bad = _slidedp.adamw(planes, grad, isa=isa, threads=threads, chunk=chunk, **HYPER)
                assert bad == 0
                result = [join(planes), *planes[-2:]]
                reference = reference or result
                for one, other in zip(reference, result, strict=True):
                    np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


@pytest.mark.parametrize("split", [False, True])
def test_adamw_against_torch(split: bool) -> None:
    n, steps = 1009, 5
    planes, _ = make_planes(n, 2, split)
    planes[-2][:] = 0
    planes[-1][:] = 0
    parameter = torch.nn.Parameter(torch.from_numpy(join(planes).copy()).double())
    optimizer = torch.optim.AdamW(
        [parameter], lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1
    )
    random = rng(3)
    for step in range(1, steps + 1):
        grad = random.standard_normal(n).astype(np.float32)
        assert _slidedp.adamw(planes, grad, **{**HYPER, "step": step}) == 0
        parameter.grad = torch.from_numpy(grad).double()
        optimizer.step()
    expected = parameter.detach().numpy()
    np.testing.assert_allclose(join(planes), expected, rtol=0, atol=2e-6)


def test_adamw_counts_what_is_not_finite() -> None:
    planes, grad = make_planes(1009, 4, True)
    grad[[0, 63, 64, 1008]] = [np.inf, np.nan, -np.inf, np.nan]
    assert _slidedp.adamw(planes, grad, threads=2, chunk=100, **HYPER) == 4


def frozen(array: NDArray[Any]) -> NDArray[Any]:
    array = array.copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("planes", "change", "error", "text"),
    [
        (lambda p: p[:2], {}, ValueError, "not 2 arrays"),
        (lambda p: [p[1], p[0], *p[2:]], {}, TypeError, "hi: an array of uint16"),
        (lambda p: [*p[:3], p[3].astype(np.float64)], {}, TypeError, "v: an array of float32"),
        (lambda p: [*p[:3], p[3][:-1]], {}, ValueError, "v has 99 elements, grad 100"),
        (lambda p: [*p[:3], frozen(p[3])], {}, ValueError, "writable"),
        (lambda p: [*p[:3], p[2]], {}, ValueError, "m and v overlap"),
        (lambda p: [p[0][None], *p[1:]], {}, ValueError, "hi: 1 dimension is wanted, not 2"),
        (lambda p: p, {"step": 0}, ValueError, "step: 0"),
        (lambda p: p, {"step": True}, TypeError, "step: an int"),
        (lambda p: p, {"beta1": 1.0}, ValueError, "beta1"),
        (lambda p: p, {"lr": -1.0}, ValueError, "lr"),
        (lambda p: p, {"lr": float("nan")}, ValueError, "lr"),
        (lambda p: p, {"threads": 0}, ValueError, "threads"),
        (lambda p: p, {"chunk": -1}, ValueError, "chunk"),
        (lambda p: p, {"isa": "mmx"}, ValueError, "mmx"),
    ],
)
def test_adamw_refuses(
    planes: Callable[[list[Any]], Any], change: dict[str, Any], error: type[Exception], text: str
) -> None:
    arrays, grad = make_planes(100, 5, True)
    before = [array.copy() for array in arrays]
    with pytest.raises(error) as caught:
        _slidedp.adamw(planes(arrays), grad, **{**HYPER, **change})
    assert text in str(caught.value)
    for one, other in zip(before, arrays, strict=True):
        np.testing.assert_array_equal(one, other)


def test_adamw_needs_all_of_its_keywords() -> None:
    arrays, grad = make_planes(10, 6, True)
    for key in HYPER:
        with pytest.raises(TypeError, match=key):
            _slidedp.adamw(arrays, grad, **{k: v for k, v in HYPER.items() if k != key})  # type: ignore[call-arg]


def test_planes_that_a_sequence_makes() -> None:
    """Arrays that nobody else holds live as long as the call."""
    arrays, grad = make_planes(70001, 7, True)
    assert _slidedp.adamw((array.copy() for array in arrays), grad, **HYPER) == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [0, 1, 63, 65, 200003])
@pytest.mark.parametrize("threads", [1, 3])
def test_triad(n: int, threads: int) -> None:
    random = rng(n)
    b = random.standard_normal(n).astype(np.float32)
    c = random.standard_normal(n).astype(np.float32)
    a = np.zeros(n, np.float32)
    _slidedp.triad(a, b, c, threads)
    np.testing.assert_array_equal(a, b + np.float32(3) * c)


def test_triad_refuses() -> None:
    x = np.ones(10, np.float32)
    with pytest.raises(ValueError, match="a and b overlap"):
        _slidedp.triad(x, x, x.copy())
    with pytest.raises(ValueError, match="c has 9 elements"):
        _slidedp.triad(x.copy(), x, x[:9])
    with pytest.raises(ValueError, match="writable"):
        _slidedp.triad(frozen(x), x, x)


def test_loops_from_many_threads() -> None:
    """Pools are not shared between calls that run at the same time."""
    b = np.arange(300_000, dtype=np.float32)
    results = [np.zeros_like(b) for _ in range(6)]

    def work(a: NDArray[np.float32]) -> None:
        for _ in range(20):
            _slidedp.triad(a, b, b, 2)

    workers = [threading.Thread(target=work, args=(a,)) for a in results]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for a in results:
        np.testing.assert_array_equal(a, b + np.float32(3) * b)


# ---- kernels ----


def to_bf16(x: NDArray[Any]) -> NDArray[np.uint16]:
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def widen(x: NDArray[Any]) -> NDArray[np.float64]:
    if x.dtype == np.uint16:
        x = (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float64)


def act(x: NDArray[Any], dtype: str) -> NDArray[Any]:
    return x.astype(np.float32) if dtype == "F32" else to_bf16(x)


TOLERANCE = {"F32": 1e-5, "BF16": 1.6e-2}  # two roundings of BF16 at most, relative to the largest


def close(found: NDArray[Any], expected: NDArray[Any], dtype: str) -> None:
    scale = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(widen(found), expected, rtol=0, atol=TOLERANCE[dtype] * scale)


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("trans_a", [0, 1])
@pytest.mark.parametrize("trans_b", [0, 1])
def test_gemm(dtype: str, trans_a: int, trans_b: int) -> None:
    m, n, k = 17, 65, 31
    random = rng(1)
    a, b, add = (
        act(random.standard_normal(shape), dtype)
        for shape in [(k, m) if trans_a else (m, k), (n, k) if trans_b else (k, n), (m, n)]
    )
    bias = act(random.standard_normal(n), dtype)
    out = np.zeros_like(add)
    args = {"a": a, "b": b, "out": out, "add": add, "bias": bias, "m": m, "n": n, "k": k}
    args |= {"lda": a.shape[1], "ldb": b.shape[1], "ldo": n, "trans_a": trans_a, "trans_b": trans_b}
    _slidedp.kernel("gemm", dtype, args, threads=2)
    left, right = (widen(a).T if trans_a else widen(a)), (widen(b).T if trans_b else widen(b))
    close(out, left @ right + widen(add) + widen(bias), dtype)
    wide = np.zeros((m, n), np.float32)
    args = {**args, "out": wide, "add": None, "bias": None, "out_type": "F32"}
    _slidedp.kernel("gemm", dtype, args)
    close(wide, left @ right, "F32")


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize(("n", "cols"), [(1, 1), (7, 17), (67, 129)])
def test_swiglu(dtype: str, n: int, cols: int) -> None:
    random = rng(n)
    gu, dout = (act(random.standard_normal((n, c)), dtype) for c in (2 * cols, cols))
    out, dgu = np.zeros_like(dout), np.zeros_like(gu)
    shape = {"n": n, "cols": cols}
    _slidedp.kernel("swiglu_fwd", dtype, {"gu": gu, "out": out, **shape}, 2)
    _slidedp.kernel("swiglu_bwd", dtype, {"gu": gu, "dout": dout, "dgu": dgu, **shape}, 2)
    gate, up = np.split(widen(gu), 2, axis=1)
    sigmoid = 1 / (1 + np.exp(-gate))
    close(out, gate * sigmoid * up, dtype)
    dgate = widen(dout) * up * sigmoid * (1 + gate * (1 - sigmoid))
    close(dgu, np.concatenate([dgate, widen(dout) * gate * sigmoid], axis=1), dtype)


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_rmsnorm(dtype: str) -> None:
    n, groups, cols, stride = 67, 3, 17, 60
    random = rng(8)
    x = act(random.standard_normal((n, stride)), dtype)
    w = act(random.standard_normal(cols), dtype)
    y, rstd = np.zeros_like(x), np.zeros((n, groups), np.float32)
    args = {"x": x, "w": w, "y": y, "rstd": rstd, "n": n, "x_stride": stride, "y_stride": stride}
    _slidedp.kernel("rmsnorm_fwd", dtype, {**args, "groups": groups, "cols": cols, "eps": 1e-5}, 2)
    values = widen(x)[:, : groups * cols].reshape(n, groups, cols)
    r = 1 / np.sqrt((values**2).mean(2) + 1e-5)
    close(rstd, r, "F32")
    expected = (values * r[..., None] * widen(w)).reshape(n, -1)
    close(y[:, : groups * cols], expected, dtype)
    assert not y[:, groups * cols :].any(), "beyond the groups"


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_cross_entropy(dtype: str) -> None:
    n, vocab = 7, 131
    random = rng(9)
    z = act(random.standard_normal((n, vocab)) * 3, dtype)
    labels = random.integers(0, vocab, n).astype(np.int32)
    labels[3] = -100
    logits, loss = widen(z), np.zeros(n, np.float32)
    args = {"z": z, "labels": labels, "loss": loss, "n": n, "vocab": vocab, "scale": 0.25}
    _slidedp.kernel("ce", dtype, {**args, "grad": 0})
    top = logits.max(1, keepdims=True)
    total = np.log(np.exp(logits - top).sum(1)) + top[:, 0]
    expected = np.where(labels < 0, 0, total - logits[np.arange(n), labels])
    close(loss, expected, "F32")
    np.testing.assert_array_equal(widen(z), logits)
    _slidedp.kernel("ce", dtype, {**args, "grad": 1})
    grad = np.exp(logits - total[:, None])
    grad[np.arange(n), labels] -= 1
    grad[labels < 0] = 0
    np.testing.assert_allclose(widen(z), grad * 0.25, rtol=0, atol=TOLERANCE[dtype] / 4)


def test_embedding_rows() -> None:
    random = rng(10)
    table = random.standard_normal((11, 5)).astype(np.float32)
    ids = np.array([3, 0, 10, 3], np.int32)
    out = np.zeros((4, 5), np.float32)
    _slidedp.kernel("embed_fwd", "F32", {"ids": ids, "table": table, "out": out, "n": 4, "cols": 5})
    np.testing.assert_array_equal(out, table[ids])
    dtable = np.zeros_like(table)
    args = {"ids": ids, "dout": out, "dtable": dtable, "n": 4, "cols": 5, "vocab": 11, "skip": 10}
    _slidedp.kernel("embed_bwd", "F32", args)
    expected = np.zeros_like(table)
    for row, token in enumerate(ids):
        if token != 10:
            expected[token] += out[row]
    np.testing.assert_array_equal(dtable, expected)


def test_cast() -> None:
    x = rng(11).standard_normal(1009).astype(np.float32)
    narrow, wide = np.zeros(1009, np.uint16), np.zeros(1009, np.float32)
    _slidedp.kernel("cast", "F32", {"in": x, "out": narrow, "n": 1009, "from": "F32", "to": "BF16"})
    np.testing.assert_array_equal(narrow, to_bf16(x))
    args = {"in": narrow, "out": wide, "n": 1009, "from": "BF16", "to": "F32"}
    _slidedp.kernel("cast", "F32", args, threads=3)
    np.testing.assert_array_equal(wide, widen(narrow))


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_accumulate(dtype: str) -> None:
    terms = [act(rng(13 + k).standard_normal(1009), dtype) for k in range(3)]
    out = np.full(1009, np.nan, np.float32)
    for k, term in enumerate(terms):
        args = {"in": term, "out": out, "n": 1009, "add": int(k > 0)}
        _slidedp.kernel("accumulate", dtype, args, threads=2)
    wide = [term if dtype == "F32" else widen(term) for term in terms]
    np.testing.assert_array_equal(out, (wide[0] + wide[1]) + wide[2])


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("seq", [1, 67])
def test_attention(dtype: str, seq: int) -> None:
    rows, heads, kv_heads, size, scale = 2, 4, 2, 6, 0.4
    random = rng(12)
    width, kv = heads * size, kv_heads * size
    stride = width + 2 * kv
    qkv = act(random.standard_normal((rows * seq, stride)), dtype)
    flat = qkv.reshape(-1)
    first = np.zeros((rows, seq), np.int32)
    first[1, seq // 2 :] = seq // 2  # a second document
    o, lse = act(np.zeros((rows * seq, width)), dtype), np.zeros((rows, heads, seq), np.float32)
    d_o, dqkv = act(random.standard_normal(o.shape), dtype), np.zeros_like(qkv)
    args = {"rows": rows, "seq": seq, "heads": heads, "kv_heads": kv_heads, "head_dim": size}
    args |= {"scale": scale, "first": first, "q": flat, "k": flat[width:], "v": flat[width + kv :]}
    args |= {"q_stride": stride, "kv_stride": stride, "o_stride": width, "o": o, "lse": lse}
    _slidedp.kernel("attn_fwd", dtype, args, threads=2)

    tensor = torch.from_numpy(widen(qkv)).requires_grad_()
    parts = tensor.view(rows, seq, heads + 2 * kv_heads, size).transpose(1, 2)
    q = parts[:, :heads]
    k = parts[:, heads : heads + kv_heads].repeat_interleave(heads // kv_heads, 1)
    v = parts[:, heads + kv_heads :].repeat_interleave(heads // kv_heads, 1)
    index = np.arange(seq)
    seen = (index[None, None] <= index[:, None]) & (index[None, None] >= first[:, :, None])
    scores = (q @ k.transpose(2, 3) * scale).masked_fill(
        torch.from_numpy(~seen)[:, None], -torch.inf
    )
    expected = (scores.softmax(3) @ v).transpose(1, 2).reshape(rows * seq, width)
    close(o, expected.detach().numpy(), dtype)
    close(lse, scores.logsumexp(3).detach().numpy(), "F32")

    expected.backward(torch.from_numpy(widen(d_o)))
    out = dqkv.reshape(-1)
    args |= {"d_o": d_o, "dq": out, "dk": out[width:], "dv": out[width + kv :]}
    _slidedp.kernel("attn_bwd", dtype, {**args, "dq_stride": stride, "dkv_stride": stride}, 2)
    assert tensor.grad is not None
    close(dqkv, tensor.grad.numpy(), dtype)


X = np.zeros((4, 6), np.float32)


@pytest.mark.parametrize(
    ("name", "dtype", "args", "error", "text"),
    [
        ("swish", "F32", {}, ValueError, "swiglu_fwd"),
        ("swiglu_fwd", "F64", {}, ValueError, "dtype: 'F64'"),
        ("swiglu_fwd", "F32", [], TypeError, "swiglu_fwd: a dict"),
        ("swiglu_fwd", "F32", {"x": 1}, TypeError, "unknown key 'x'"),
        ("swiglu_fwd", "F32", {"gu": X, "out": X, "n": 4}, TypeError, "'cols' is missing"),
        ("swiglu_fwd", "F32", {"gu": X, "out": X, "n": 0, "cols": 3}, ValueError, "n: 0"),
        ("swiglu_fwd", "F32", {"gu": X, "out": X, "n": 4, "cols": 4}, ValueError, "32 are needed"),
        ("swiglu_fwd", "BF16", {"gu": X, "out": X, "n": 4, "cols": 3}, TypeError, "uint16"),
        (
            "swiglu_fwd",
            "F32",
            {"gu": X, "out": X, "n": 2**31 - 1, "cols": 2**31 - 1},
            ValueError,
            "are needed",
        ),
        (
            "embed_fwd",
            "F32",
            {"ids": np.array([4], np.int32), "table": X, "out": X.copy(), "n": 1, "cols": 6},
            ValueError,
            "index 0 is 4, not in 0 to 3",
        ),
    ],
)
def test_kernel_refuses(
    name: str, dtype: str, args: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        _slidedp.kernel(name, dtype, args)
    assert text in str(caught.value)
