"""The extension module: arguments and their errors, the loops on NumPy arrays, kernels against
NumPy, signals, and that nothing leaks. What a training computes is tested elsewhere."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import UserDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from isolated.extension_tools import make_model, make_spec
from numpy.typing import NDArray

from slidedp import _slidedp

ISOLATED = Path(__file__).parent / "isolated"
VOCAB, SEQ = 67, 8
IDS = (np.arange(2 * SEQ, dtype=np.int32) * 7 % VOCAB).reshape(2, SEQ)
BATCH: dict[str, Any] = {"input_ids": IDS, "labels": np.roll(IDS, -1, axis=1)}
ISAS = ["base", "avx2", "avx512"]
HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-8, "weight_decay": 0.1, "step": 3}


def here(isa: str) -> bool:
    return ISAS.index(isa) <= ISAS.index(_slidedp.env()["isa_best"])


def rng(seed: int) -> np.random.Generator:
    print(f"seed {seed}")
    return np.random.default_rng(seed)


@pytest.fixture
def engine() -> Iterator[_slidedp.Engine]:
    engine = _slidedp.Engine(make_spec())
    engine.init(5, 0.1)
    yield engine
    engine.close()


# ---- the spec ----


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"colour": 1}, TypeError, "spec: unknown key 'colour'"),
        ({5: 1}, TypeError, "spec: a str as key is wanted, not int"),
        ({"rank": True}, TypeError, "spec: rank: an int is wanted, not bool"),
        ({"rank": np.True_}, TypeError, "spec: rank: an int is wanted"),
        ({"rank": 1.0}, TypeError, "spec: rank: an int is wanted, not float"),
        ({"rank": "1"}, TypeError, "spec: rank: an int is wanted, not str"),
        ({"rank": -1}, ValueError, "spec: rank: -1 is not in 0 to"),
        ({"rank": 2**70}, ValueError, "spec: rank: 1180591620717411303424 is not in"),
        ({"world": 0}, ValueError, "spec: world: 0 is not in"),
        ({"world": 2}, ValueError, "rendezvous"),
        ({"max_tokens": 2**31}, ValueError, "spec: max_tokens: 2147483648"),
        ({"max_seq": 65}, ValueError, "max_seq"),
        ({"bf16": 1}, TypeError, "spec: bf16: a bool is wanted, not int"),
        ({"device": None}, TypeError, "spec: device: a str is wanted, not NoneType"),
        ({"device": "cpu\0"}, ValueError, "spec: device: 'cpu\\x00' has a NUL"),
        ({"device": "abacus"}, ValueError, "abacus"),
        ({"gradient_dtype": "fp8"}, ValueError, 'none of "float32", "bfloat16"'),
        ({"activations": "drop"}, ValueError, "spec: activations: 'drop'"),
        ({"timeout": "1"}, TypeError, "spec: timeout: a float is wanted, not str"),
        ({"timeout": float("nan")}, ValueError, "spec: timeout: a finite number"),
        ({"beta1": 1.5}, ValueError, "spec: beta1: 1.5 is not in 0 to 1"),
        ({"beta2": 10**400}, ValueError, "spec: beta2: a finite number"),
        ({"slots": 1}, ValueError, "spec: slots: 1"),
        ({"model": []}, TypeError, "spec: model: a dict is wanted, not list"),
        ({"model": make_model(hidden="24")}, TypeError, "spec: model: hidden: an int"),
        ({"model": make_model(tied=0)}, TypeError, "spec: model: tied: a bool"),
        ({"model": make_model(rope="yarn")}, ValueError, "spec: model: rope: 'yarn'"),
        ({"model": make_model(layer_slides=b"\1")}, ValueError, "1 bytes for 3 layers"),
        ({"model": make_model(layer_slides=b"\1\2\0")}, ValueError, "byte 1"),
        ({"model": make_model(layer_slides=[1, 0, 1])}, TypeError, "bytes or None"),
        ({"model": make_model(model_type="x" * 40)}, ValueError, "too long"),
        ({"model": make_model(model_type="gpt9")}, ValueError, "gpt9"),
        ({"model": make_model(heads=3)}, ValueError, "kv_heads"),
        ({"model": {**make_model(), "moe": 1}}, TypeError, "spec: model: unknown key 'moe'"),
    ],
)
def test_spec_is_refused(change: dict[Any, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        _slidedp.Engine({**make_spec(), **change})  # type: ignore[typeddict-item]
    assert text in str(caught.value)
    assert type(caught.value) is error


@pytest.mark.parametrize("key", ["model", "max_tokens", "max_seq"])
def test_spec_needs(key: str) -> None:
    spec = make_spec()
    del spec[key]
    with pytest.raises(TypeError, match=f"spec: '{key}' is missing"):
        _slidedp.Engine(spec)


@pytest.mark.parametrize("key", sorted(make_model()))
def test_model_needs(key: str) -> None:
    model = make_model()
    del model[key]
    with pytest.raises(TypeError, match=f"spec: model: '{key}' is missing"):
        _slidedp.Engine(make_spec() | {"model": model})


def test_spec_takes_index_objects() -> None:
    spec = make_spec(
        threads=np.int64(1), max_tokens=np.uint16(32), beta1=np.float32(0.5), timeout=9
    )
    engine = _slidedp.Engine(spec)
    assert engine.plan()["threads"] == 1
    engine.close()


def test_spec_that_changes_while_it_is_read() -> None:
    spec = make_spec(agreement="a=1\n")

    class Nasty:
        def __index__(self) -> int:
            spec.clear()
            return 1

    spec["threads"] = Nasty()
    with pytest.raises(TypeError, match="is missing"):
        _slidedp.Engine(spec)


def test_memory_that_is_not_there_is_refused() -> None:
    with pytest.raises(MemoryError, match="free"):
        _slidedp.Engine(make_spec({"vocab": 1 << 30, "hidden": 1024, "head_dim": 8}))


# ---- life ----


def test_engine_is_neither_pickled_nor_copied(engine: _slidedp.Engine) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError, match="pickle"):
            pickle.dumps(engine, protocol)
    with pytest.raises(TypeError, match="pickle"):
        copy.copy(engine)


def test_type_is_immutable_and_final(engine: _slidedp.Engine) -> None:
    with pytest.raises(TypeError):
        _slidedp.Engine.step = None  # type: ignore[assignment,method-assign]
    with pytest.raises(TypeError):
        type("Mine", (_slidedp.Engine,), {})
    with pytest.raises(AttributeError):
        engine.colour = 1  # type: ignore[attr-defined]


def test_closed_engine() -> None:
    engine = _slidedp.Engine(make_spec())
    engine.close()
    engine.close()
    engine.abort("nobody hears this")
    calls: list[Callable[[], object]] = [
        lambda: engine.load([]),
        lambda: engine.store([]),
        lambda: engine.init(1, 0.1),
        lambda: engine.step([BATCH], 1e-3),
        lambda: engine.evaluate([]),
        lambda: engine.logits(BATCH),
        lambda: engine.tensor("norm.weight", "master"),
        lambda: engine.tensors(),
        lambda: engine.gather([]),
        lambda: engine.plan(),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="the engine is closed"):
            call()


def test_no_weights_yet() -> None:
    engine = _slidedp.Engine(make_spec())
    with pytest.raises(RuntimeError, match="no weights"):
        engine.step([BATCH], 1e-3)
    engine.close()


def test_fork_leaves_the_engine_to_the_parent(engine: _slidedp.Engine) -> None:
    before = engine.tensor("norm.weight", "master")
    pid = os.fork()
    if pid == 0:  # no pytest in the child
        code = 1
        try:
            engine.step([BATCH], 1e-3)
        except RuntimeError as error:
            code = 0 if "fork" in str(error) else 2
        try:
            engine.close()
            x = np.ones(200_000, np.float32)
            _slidedp.triad(x.copy(), x, x, 2)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert engine.step([BATCH], 0.0)["step"] == 1
    np.testing.assert_array_equal(engine.tensor("norm.weight", "master"), before)


# ---- batches ----


def with_first(**arrays: Any) -> dict[str, Any]:
    return {"input_ids": IDS, **arrays}


@pytest.mark.parametrize(
    ("batch", "error", "text"),
    [
        ([], TypeError, "micro-batch 1: a dict is wanted, not list"),
        ({}, TypeError, "micro-batch 1: 'input_ids' is missing"),
        ({"labels": IDS}, TypeError, "'input_ids' is missing"),
        (with_first(weights=IDS), TypeError, "micro-batch 1: unknown key 'weights'"),
        ({"input_ids": IDS.tolist()}, TypeError, "micro-batch 1: input_ids: a NumPy array"),
        ({"input_ids": IDS.astype(np.int64)}, TypeError, "int32 is wanted, not of int64"),
        (with_first(labels=IDS.astype(np.float32)), TypeError, "labels: an array of int32"),
        ({"input_ids": IDS.astype(">i4")}, ValueError, "byte order"),
        ({"input_ids": IDS.T}, ValueError, "C-contiguous"),
        ({"input_ids": IDS[:, ::2]}, ValueError, "C-contiguous"),
        ({"input_ids": IDS[0]}, ValueError, "2 dimensions are wanted, not 1"),
        ({"input_ids": IDS[:0]}, ValueError, "the shape is [0, 8]"),
        (with_first(labels=IDS[:1]), ValueError, "labels: the shape is [1, 8]"),
        (with_first(positions=IDS.reshape(4, 4)), ValueError, "positions: the shape is [4, 4]"),
        (with_first(first=None), TypeError, "first: a NumPy array is wanted, not NoneType"),
        (
            with_first(labels=np.where(np.arange(SEQ) == 3, 67, IDS).astype(np.int32)),
            ValueError,
            "label 67",
        ),
        (with_first(positions=IDS - 5), ValueError, "negative"),
        (with_first(first=np.full_like(IDS, 1)), ValueError, "first is 1"),
    ],
)
def test_batch_is_refused(
    engine: _slidedp.Engine, batch: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        engine.step([BATCH, batch], 1e-3)
    assert text in str(caught.value)
    with pytest.raises(error):
        engine.evaluate([batch])
    with pytest.raises(error):
        engine.logits(batch)
    assert engine.step([BATCH], 1e-3)["step"] == 1, "an argument error changes nothing"


@pytest.mark.parametrize("bad", [-1, VOCAB, 2**31 - 1, -(2**31)])
def test_token_outside_the_vocabulary(engine: _slidedp.Engine, bad: int) -> None:
    ids = IDS.copy()
    ids[1, 5] = bad
    with pytest.raises(ValueError, match=f"micro-batch 1, row 1, column 5: token id {bad} is"):
        engine.step([BATCH, {"input_ids": ids}], 1e-3)
    with pytest.raises(ValueError, match="token id"):
        engine.logits({"input_ids": ids})


@pytest.mark.parametrize("batches", [BATCH, None, 3, "abc"])
def test_batches_must_be_a_sequence(engine: _slidedp.Engine, batches: Any) -> None:
    with pytest.raises(TypeError, match="batches: a sequence of dicts"):
        engine.step(batches, 1e-3)


@pytest.mark.parametrize(
    ("lr", "error"),
    [(True, TypeError), ("1", TypeError), (None, TypeError), (float("inf"), ValueError)],
)
def test_learning_rate(engine: _slidedp.Engine, lr: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="lr"):
        engine.step([BATCH], lr)


def step_keys() -> set[str]:
    """The keys of StepOut in the stub."""
    lines = (ISOLATED.parents[1] / "slidedp" / "_slidedp.pyi").read_text().splitlines()
    start = lines.index("class StepOut(TypedDict):")
    return {line.split(":")[0].strip() for line in lines[start + 1 : lines.index("", start)]}


def test_any_mapping_is_a_batch(engine: _slidedp.Engine) -> None:
    expected = engine.evaluate([BATCH])
    assert engine.evaluate((UserDict(BATCH),)) == expected
    assert engine.evaluate([MappingProxyType(BATCH)]) == expected


def test_step_and_readers(engine: _slidedp.Engine) -> None:
    logits = engine.logits({"input_ids": IDS})
    assert (logits.shape, logits.dtype) == ((2, SEQ, VOCAB), np.float32)
    loss, targets = engine.evaluate([BATCH])
    shifted = np.exp(logits.astype(np.float64))
    picked = np.take_along_axis(shifted, BATCH["labels"][..., None], axis=2)[..., 0]
    assert targets == 2 * SEQ
    assert loss == pytest.approx(float(-np.log(picked / shifted.sum(2)).sum()), rel=2e-2)
    out = engine.step([BATCH, BATCH], 1e-3)
    assert out.keys() == step_keys()
    assert (out["targets"], out["tokens"], out["step"]) == (4 * SEQ, 4 * SEQ, 1)
    assert (out["skipped"], out["nonfinite"], out["nonfinite_unit"]) == (False, 0, -1)
    assert out["loss"] == pytest.approx(loss / targets, rel=1e-5)
    assert out["grad_norm"] > 0
    assert 0 <= out["exposed_update_seconds"] <= out["seconds"]
    empty = engine.step([], 1e-3)
    assert empty["skipped"] is True
    assert (empty["targets"], empty["step"]) == (0, 1)
    assert engine.evaluate([]) == (0.0, 0)
    assert engine.gather([1, -2.5, float("inf")]) == [[1.0, -2.5, float("inf")]]
    assert engine.gather([]) == [[]]


def test_tensors(engine: _slidedp.Engine) -> None:
    tensors = {name: (shape, decays) for name, shape, decays in engine.tensors()}
    assert tensors["embed_tokens.weight"] == ((VOCAB, 24), True)
    assert tensors["norm.weight"] == ((24,), False)
    assert tensors["layers.2.mlp.up_proj.weight"] == ((40, 24), True)
    for name, (shape, decays) in tensors.items():
        master = engine.tensor(name, "master")
        assert master.shape == shape
        assert master.dtype == np.float32
        assert decays or np.all(master == 1)
    assert not engine.tensor("norm.weight", "exp_avg").any()
    with pytest.raises(ValueError, match=r"no tensor layers\.9"):
        engine.tensor("layers.9.x", "master")
    with pytest.raises(ValueError, match="colour"):
        engine.tensor("norm.weight", "colour")
    with pytest.raises(ValueError, match="keep_gradients"):
        engine.tensor("norm.weight", "grad")
    with pytest.raises(TypeError, match="name: a str"):
        engine.tensor(b"norm.weight", "master")  # type: ignore[arg-type]


def test_gather_limits(engine: _slidedp.Engine) -> None:
    with pytest.raises(ValueError, match="at most 16"):
        engine.gather([0.0] * 17)
    with pytest.raises(TypeError):
        engine.gather(["x"])  # type: ignore[list-item]
    assert engine.gather([0.5] * 16) == [[0.5] * 16]


@pytest.mark.parametrize(
    ("seed", "std", "error"),
    [(-1, 0.1, ValueError), (2**64, 0.1, ValueError), (1.0, 0.1, TypeError), (1, -1, ValueError)],
)
def test_init_arguments(seed: Any, std: Any, error: type[Exception]) -> None:
    engine = _slidedp.Engine(make_spec())
    with pytest.raises(error):
        engine.init(seed, std)
    engine.init(2**64 - 1, 0.0)
    engine.close()


def test_plan_has_plain_values(engine: _slidedp.Engine) -> None:
    plan = engine.plan()
    assert plan["world"] == 1
    assert plan["vocab"] == VOCAB
    assert {type(value) for value in plan.values()} <= {int, float, str}


# ---- parts and progress ----


def make_parts(engine: _slidedp.Engine, path: Path, dtype: str = "F32") -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    offset = 8
    for name, shape, _ in engine.tensors():
        count = int(np.prod(shape))
        parts.append(
            {"name": name, "path": str(path), "offset": offset, "dtype": dtype, "count": count}
        )
        offset += count * (4 if dtype == "F32" else 2)
    path.write_bytes(bytes(offset))
    return parts


def test_store_and_load(engine: _slidedp.Engine, tmp_path: Path) -> None:
    parts = make_parts(engine, tmp_path / "wëights \udcff.bin")
    seen: list[tuple[int, int]] = []
    engine.store(parts, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == sum(part["count"] for part in parts) * 4
    other = _slidedp.Engine(make_spec())
    other.load(tuple(parts))
    for name, _, _ in engine.tensors():
        np.testing.assert_array_equal(other.tensor(name, "master"), engine.tensor(name, "master"))
    other.close()


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"path": 3}, TypeError, "part 1: path: a path is wanted, not int"),
        ({"path": "a\0b"}, ValueError, "null"),
        ({"offset": -1}, ValueError, "part 1: offset: -1"),
        ({"offset": 2**63}, ValueError, "part 1: offset"),
        ({"count": 1.0}, TypeError, "part 1: count: an int"),
        ({"count": 3}, ValueError, "3 elements"),
        ({"dtype": "I8"}, ValueError, "part 1: dtype: 'I8' is none of"),
        ({"name": "nothing"}, ValueError, "nothing"),
        ({"colour": 1}, TypeError, "part 1: unknown key 'colour'"),
    ],
)
def test_part_is_refused(
    tmp_path: Path, change: dict[str, Any], error: type[Exception], text: str
) -> None:
    engine = _slidedp.Engine(make_spec())
    parts = make_parts(engine, tmp_path / "w")
    parts[1] = {**parts[1], **change}  # type: ignore[typeddict-item]
    with pytest.raises(error) as caught:
        engine.load(parts)
    assert text in str(caught.value)
    engine.close()


def test_file_errors_carry_errno(tmp_path: Path) -> None:
    engine = _slidedp.Engine(make_spec())
    parts = make_parts(engine, tmp_path / "w")
    (tmp_path / "w").unlink()
    with pytest.raises(FileNotFoundError) as caught:
        engine.load(parts)
    assert caught.value.errno == 2
    assert str(tmp_path / "w") in str(caught.value)
    assert "while loading" in caught.value.__notes__
    engine.close()


def test_progress_that_raises(engine: _slidedp.Engine, tmp_path: Path) -> None:
    class Mine(Exception):
        pass

    def progress(done: int, total: int) -> None:
        raise Mine("enough")

    with pytest.raises(Mine, match="enough"):
        engine.store(make_parts(engine, tmp_path / "w"), progress)
    with pytest.raises(TypeError, match="progress: a callable or None"):
        engine.store([], progress=3)  # type: ignore[arg-type]


def test_engine_is_busy_in_its_own_progress(engine: _slidedp.Engine, tmp_path: Path) -> None:
    errors: list[str] = []

    def progress(done: int, total: int) -> None:
        calls: list[Callable[[], object]] = [
            engine.close,
            engine.plan,
            lambda: engine.step([BATCH], 1e-3),
        ]
        for call in calls:
            with pytest.raises(RuntimeError, match="busy") as caught:
                call()
            errors.append(str(caught.value))

    engine.store(make_parts(engine, tmp_path / "w"), progress)
    assert len(errors) >= 3
    assert engine.step([BATCH], 1e-3)["step"] == 1


def test_two_threads(engine: _slidedp.Engine) -> None:
    """Each call is done or refused; at least one is refused, and nothing is lost."""
    refused, done = [], []
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        for _ in range(30):
            try:
                done.append(engine.step([BATCH] * 4, 1e-3)["step"])
            except RuntimeError as error:
                assert "busy" in str(error)
                refused.append(error)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(done) + len(refused) == 120
    assert sorted(done) == list(range(1, len(done) + 1))
    assert refused


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


# ---- the module ----


def test_env() -> None:
    facts = _slidedp.env()
    assert facts["isa"] in ISAS
    assert facts["cpus"] == len(os.sched_getaffinity(0))
    assert facts["backends"]["cpu"] == ""
    assert "OpenBLAS" in facts["blas"]
    assert facts["memory_free"] > 0
    assert facts["memory_source"]
    assert {name for name, _, _ in facts["variables"]} >= {"SLIDE_ISA", "SLIDE_LOG"}
    assert {"llama", "mistral", "qwen2", "qwen3"} <= set(_slidedp.model_types())


def isolated(script: str, mode: str, seconds: float = 120) -> str:
    """What the script printed; it must end well."""
    result = subprocess.run(
        [sys.executable, str(ISOLATED / script), mode],
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("mode", ["engines", "errors", "results", "modules"])
def test_nothing_leaks(mode: str) -> None:
    assert mode in isolated("extension_leaks.py", mode)


@pytest.mark.parametrize(
    ("mode", "name"), [("interrupt", "KeyboardInterrupt"), ("handler", "Stop")]
)
def test_signal_ends_a_long_step(mode: str, name: str) -> None:
    """What the handler raised comes out, within a second; the bound leaves room for a busy
    machine."""
    ended, refused = isolated("extension_signals.py", mode).splitlines()
    found, seconds = ended.split()
    assert found == name
    assert float(seconds) < 5
    assert "failed before" in refused


def test_step_in_another_thread_leaves_signals_to_the_main_thread() -> None:
    main, step = isolated("extension_signals.py", "thread").splitlines()
    assert main.startswith("KeyboardInterrupt")
    assert step.startswith("RuntimeError")


def test_interrupt_key_by_key() -> None:
    """Ctrl-C as a terminal sends it: to the process, from outside."""
    code = (
        "import numpy as np\n"
        "from extension_tools import make_spec\n"
        "from slidedp import _slidedp\n"
        "engine = _slidedp.Engine(make_spec())\n"
        "engine.init(1, 0.1)\n"
        "ids = np.ones((1, 32), np.int32)\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    engine.step([{'input_ids': ids, 'labels': ids}], 1e-3)\n"
    )
    path = os.pathsep.join(filter(None, [str(ISOLATED), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, text = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT, text
    assert text.rstrip().endswith("KeyboardInterrupt")
