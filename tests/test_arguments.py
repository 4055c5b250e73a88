"""TrainingArguments: a name or value is carried out or refused; schedules are transformers'."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from slidedp import TrainingArguments


def test_defaults_and_all_names() -> None:
    args = TrainingArguments()
    again = TrainingArguments(**{f.name: getattr(args, f.name) for f in dataclasses.fields(args)})
    assert args == again
    assert args.per_device_train_batch_size == 8 and args.learning_rate == 5e-5


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("learning_rat", "learning_rate"),
        ("fp16", "bf16"),
        ("gradient_checkpointing", "activations"),
        ("save_steps", "not available yet"),
        ("resume_from_checkpoint", "not available yet"),
        ("zzz", "learning_rate"),
    ],
)
def test_unknown_names(name: str, hint: str) -> None:
    with pytest.raises(TypeError) as error:
        TrainingArguments(**{name: 1})
    assert name in str(error.value) and hint in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", -1e-5),
        ("learning_rate", math.nan),
        ("learning_rate", math.inf),
        ("adam_beta1", 1.0),
        ("adam_beta2", -0.1),
        ("adam_epsilon", 0.0),
        ("weight_decay", -1.0),
        ("max_grad_norm", -1.0),
        ("max_grad_norm", math.nan),
        ("max_skipped_steps", 0),
        ("per_device_train_batch_size", 0),
        ("gradient_accumulation_steps", 0),
        ("max_seq_length", 0),
        ("warmup_ratio", 1.5),
        ("slots", 1),
        ("chunk_bytes", 3),
        ("chunk_bytes", 1 << 31),
        ("head_rows", 0),
        ("threads", -1),
        ("seed", -1),
        ("lr_scheduler_type", "cosin"),
        ("device", "gpu"),
        ("gradient_dtype", "float16"),
        ("activations", "drop"),
        ("activations", ["keep", "drop"]),
        ("gpu_memory_budget", -1),
        ("pin_memory", "yes"),
        ("eval_strategy", "sometimes"),
        ("ddp_timeout", 0),
    ],
)
def test_values_out_of_range(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        TrainingArguments(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", "1e-5"),
        ("learning_rate", True),
        ("max_steps", 1.5),
        ("max_steps", True),
        ("bf16", 1),
        ("overlap", "no"),
        ("output_dir", 3),
        ("device", None),
    ],
)
def test_wrong_types(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=name):
        TrainingArguments(**{name: value})


def test_combinations() -> None:
    with pytest.raises(ValueError, match="gradient_dtype"):
        TrainingArguments(bf16=False, gradient_dtype="bfloat16")
    with pytest.raises(ValueError, match="num_train_epochs"):
        TrainingArguments(num_train_epochs=0)
    assert TrainingArguments(num_train_epochs=0, max_steps=3).max_steps == 3
    with pytest.raises(ValueError, match="did you mean 'cosine'"):
        TrainingArguments(lr_scheduler_type="cosin")


@pytest.mark.parametrize("kind", ["constant", "constant_with_warmup", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_schedules_are_transformers(kind: str, warmup: int) -> None:
    torch = pytest.importorskip("torch", reason="the reference is transformers'")
    transformers = pytest.importorskip("transformers", reason="the reference")
    total = 23
    args = TrainingArguments(lr_scheduler_type=kind, warmup_steps=warmup, learning_rate=3e-4)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=3e-4)
    schedule = transformers.get_scheduler(kind, optimizer, warmup, total)
    for step in range(total):
        want = optimizer.param_groups[0]["lr"]
        assert args.rate(step, total) == pytest.approx(want, rel=1e-12, abs=1e-18), step
        optimizer.step()
        schedule.step()


def test_warmup_ratio() -> None:
    args = TrainingArguments(warmup_ratio=0.1)
    assert [args.warmup(n) for n in (1, 10, 11, 100)] == [1, 1, 2, 10]
    assert TrainingArguments(warmup_ratio=0.1, warmup_steps=3).warmup(100) == 3
