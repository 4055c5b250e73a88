"""The extension module: arguments and their errors, life, batches, files, signals, and that nothing
leaks. Loops and kernels: test_kernels.py; what a training computes is tested elsewhere."""

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
from isolated.extension_tools import make_model, make_spec

from slidedp import _slidedp

ISOLATED = Path(__file__).parent / "isolated"
VOCAB, SEQ = 67, 8
IDS = (np.arange(2 * SEQ, dtype=np.int32) * 7 % VOCAB).reshape(2, SEQ)
BATCH: dict[str, Any] = {"input_ids": IDS, "labels": np.roll(IDS, -1, axis=1)}
ISAS = ["base", "avx2", "avx512"]


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
    engine.flush()
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
        "import signal\n"
        "import numpy as np\n"
        "from extension_tools import make_spec\n"
        "from slidedp import _slidedp\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
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
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, text = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == -signal.SIGINT, text
    assert text.rstrip().endswith("KeyboardInterrupt")
