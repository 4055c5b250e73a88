"""`TrainingArguments`: Hugging Face's names with Hugging Face's meanings, and a few of our own.

A name or a value that isn't there (yet) is an error that says so and names the nearest one that is;
nothing is taken and ignored.
"""

import dataclasses
import difflib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Names that Hugging Face users know and that mean something else here, or nothing yet.
ELSEWHERE = {
    "fp16": "the weights are BF16 (bf16=True) or FP32 (bf16=False)",
    "tf32": "the weights are BF16 (bf16=True) or FP32 (bf16=False)",
    "gradient_checkpointing": "use activations='recompute' (the default), 'selective' or 'keep'",
    "optim": "the optimizer is AdamW, on the CPU",
    "save_steps": "checkpoints during a run are not available yet",
    "save_strategy": "checkpoints during a run are not available yet",
    "save_total_limit": "checkpoints during a run are not available yet",
    "resume_from_checkpoint": "resuming is not available yet",
    "deepspeed": "slidedp streams the states itself",
    "fsdp": "slidedp shares one copy of the states itself",
    "use_cpu": "use device='cpu'",
    "no_cuda": "use device='cpu'",
    "per_gpu_train_batch_size": "use per_device_train_batch_size",
    "learning_rate_scheduler": "use lr_scheduler_type",
    "report_to": "metrics are in trainer.history",
    "max_length": "use max_seq_length",
}
# In the order of csrc/model/model.h's enum slide_activations.
ACTIVATIONS = ("recompute", "selective", "keep", "offload")
SCHEDULERS = ("constant", "constant_with_warmup", "linear", "cosine")


def unknown_choice(name: str, value: str, choices: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(value, choices, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{name}={value!r}: one of {', '.join(choices)}{hint}"


@dataclass
class TrainingArguments:
    """How to train. Where a name is Hugging Face's, so is the meaning.

    Counts are per rank unless said otherwise; a rank is a process with one device. Raises TypeError
    for an unknown name, and ValueError or TypeError for a value that can't be.
    """

    output_dir: str = "out"
    per_device_train_batch_size: int = 8  # rows of a micro-batch
    per_device_eval_batch_size: int = 8
    gradient_accumulation_steps: int = 1  # micro-batches a rank and step
    num_train_epochs: float = 3.0
    max_steps: int = -1  # > 0 overrides num_train_epochs
    learning_rate: float = 5e-5
    weight_decay: float = 0.0  # not on biases and norms
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0  # clips the global norm, exactly; 0: no clipping
    lr_scheduler_type: str = "linear"
    warmup_steps: int = 0
    warmup_ratio: float = 0.0  # of all steps; used where warmup_steps is 0
    logging_steps: int = 1
    eval_strategy: str = "no"  # "no" | "steps" | "epoch"
    eval_steps: int | None = None  # None: logging_steps
    seed: int = 42
    data_seed: int | None = None  # of the order of samples; None: seed
    dataloader_drop_last: bool = False  # leave out the last, incomplete global batch of an epoch
    disable_tqdm: bool | None = None  # None: a progress bar on a terminal, lines elsewhere
    ddp_timeout: float = 1800.0  # seconds that a rank waits for another
    # slidedp's own
    max_seq_length: int = 1024  # tokens of a row: text is cut so, longer samples are refused
    device: str = "auto"  # "cpu" | "cuda" | "auto": a GPU where there is one
    bf16: bool = True  # BF16 weights with exact FP32 masters; False: FP32 throughout
    gradient_dtype: str = "auto"  # on the way to the host: "bfloat16" | "float32"
    # How weights reach the devices, "full": each rank copies whole units from host memory, or
    # "shard": its slice of them, and takes the others' from their devices; and where gradients are
    # summed, "cpu" or "gpu": by the devices. The same bits. "auto": full and cpu, which is
    # all that several ranks on GPUs can do so far.
    weight_delivery: str = "auto"
    gradient_reduction: str = "auto"
    # Of blocks, one for all or a list of one each: "recompute" the inside in backward, "selective":
    # keep what matrix products made, "keep" all, "offload": recompute, and inputs in host memory.
    activations: str | Sequence[str] = "recompute"
    gpu_memory_budget: int = 0  # bytes that may be taken of a GPU's memory; 0: what is free
    pin_memory: str = "auto"  # host memory for the GPU: "auto" | "always" | "never"
    # Updates that backward didn't hide run on under the next forward. Gradients wait for it, as
    # for clipping and skipping, in 4 bytes a parameter (2 with one rank and BF16 gradients).
    defer_updates: bool = True
    # A step with Inf or NaN in a gradient is forgotten on all ranks, as it always is with clipping;
    # without either it is an error. So many forgotten steps in a row are an error in any case.
    skip_nonfinite: bool = False
    max_skipped_steps: int = 10
    keep_gradients: bool = False  # trainer.tensor(name, "grad"): they wait as above
    threads: int = 0  # of a rank; 0: the CPUs of this process / local ranks
    slots: int = 2  # weights of so many blocks are on the device at a time
    chunk_bytes: int = 4 << 20  # of gradient on its way to the owners
    head_rows: int = 256  # rows of logits at a time
    debug_nonfinite: bool = False  # look for the op that makes the first Inf or NaN; slow
    overlap: bool = True  # False: one stage after the other, for debugging; the same bits

    def __init__(self, **values: Any) -> None:
        fields = {field.name: field for field in dataclasses.fields(self)}
        for name in values:
            if name not in fields:
                raise TypeError(unknown_argument(name))
        for name, field in fields.items():
            setattr(self, name, values.get(name, field.default))
        self._check()

    def _check(self) -> None:
        for name in ("output_dir", "lr_scheduler_type", "eval_strategy", "device"):
            self._type(name, str)
        for name in ("gradient_dtype", "pin_memory", "weight_delivery", "gradient_reduction"):
            self._type(name, str)
        for name in (
            "dataloader_drop_last",
            "bf16",
            "keep_gradients",
            "defer_updates",
            "skip_nonfinite",
            "overlap",
            "debug_nonfinite",
        ):
            self._type(name, bool)
        if self.disable_tqdm is not None:
            self._type("disable_tqdm", bool)
        for name, low in (
            ("per_device_train_batch_size", 1),
            ("per_device_eval_batch_size", 1),
            ("gradient_accumulation_steps", 1),
            ("warmup_steps", 0),
            ("logging_steps", 1),
            ("seed", 0),
            ("max_seq_length", 1),
            ("threads", 0),
            ("slots", 2),
            ("chunk_bytes", 256),
            ("head_rows", 1),
            ("gpu_memory_budget", 0),
            ("max_skipped_steps", 1),
        ):
            self._int(name, low)
        self._int("max_steps", None)
        if self.eval_steps is not None:
            self._int("eval_steps", 1)
        if self.data_seed is not None:
            self._int("data_seed", 0)
        self._float("num_train_epochs", 0.0, None)
        self._float("learning_rate", 0.0, None)
        self._float("weight_decay", 0.0, None)
        self._float("adam_beta1", 0.0, 1.0)
        self._float("adam_beta2", 0.0, 1.0)
        self._float("adam_epsilon", 0.0, None, open_low=True)
        self._float("warmup_ratio", 0.0, 1.0, open_high=False)
        self._float("ddp_timeout", 0.0, None, open_low=True)
        self._float("max_grad_norm", 0.0, None)
        self._choice("lr_scheduler_type", SCHEDULERS)
        self._choice("eval_strategy", ("no", "steps", "epoch"))
        self._choice("device", ("cpu", "cuda", "auto"))
        self._choice("gradient_dtype", ("auto", "float32", "bfloat16"))
        self._choice("weight_delivery", ("auto", "full", "shard"))
        self._choice("gradient_reduction", ("auto", "cpu", "gpu"))
        self._choice("pin_memory", ("auto", "always", "never"))
        self._check_activations()
        if self.gradient_dtype == "bfloat16" and not self.bf16:
            raise ValueError("gradient_dtype='bfloat16' needs bf16=True")
        if self.chunk_bytes > 1 << 30:
            raise ValueError(f"chunk_bytes={self.chunk_bytes}: at most 2**30")
        if self.max_steps <= 0 and self.num_train_epochs == 0:
            raise ValueError("num_train_epochs=0 without max_steps: there is nothing to train")

    def _check_activations(self) -> None:
        value = self.activations
        if not isinstance(value, str):
            if not isinstance(value, Sequence) or not all(isinstance(one, str) for one in value):
                raise TypeError(f"activations={value!r}: a str, or a list with one for each block")
            value = list(value)
            self.activations = value
        for one in [value] if isinstance(value, str) else value:
            if one not in ACTIVATIONS:
                raise ValueError(unknown_choice("activations", one, ACTIVATIONS))

    def block_activations(self, layers: int) -> bytes:
        """The policy of each block as an index into `ACTIVATIONS`. ValueError: a list of another
        length."""
        value = self.activations
        names = [value] * layers if isinstance(value, str) else list(value)
        if len(names) != layers:
            raise ValueError(f"activations: {len(names)} for the model's {layers} blocks")
        return bytes(ACTIVATIONS.index(name) for name in names)

    def _type(self, name: str, wanted: type) -> None:
        value = getattr(self, name)
        if wanted is str and isinstance(value, os.PathLike):
            value = os.fspath(value)
            setattr(self, name, value)
        if not isinstance(value, wanted):
            raise TypeError(f"{name}={value!r}: {wanted.__name__} wanted")

    def _int(self, name: str, low: int | None) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}={value!r}: int wanted")
        if low is not None and value < low:
            raise ValueError(f"{name}={value}: at least {low}")

    def _float(
        self,
        name: str,
        low: float,
        high: float | None,
        *,
        open_low: bool = False,
        open_high: bool = True,
    ) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name}={value!r}: float wanted")
        below = value <= low if open_low else value < low
        above = high is not None and (value >= high if open_high else value > high)
        if not math.isfinite(value) or below or above:
            bound = f"{'above' if open_low else 'at least'} {low:g}"
            if high is not None:
                bound += f" and {'below' if open_high else 'at most'} {high:g}"
            raise ValueError(f"{name}={value!r}: must be {bound}")
        setattr(self, name, float(value))

    def _choice(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise ValueError(unknown_choice(name, value, choices))

    def warmup(self, total: int) -> int:
        """Steps of warm-up in a run of `total` steps, as transformers counts them."""
        return self.warmup_steps if self.warmup_steps > 0 else math.ceil(total * self.warmup_ratio)

    def rate(self, step: int, total: int) -> float:
        """The learning rate of step `step` (0 is the first) of `total`: transformers' schedules."""
        warmup = self.warmup(total)
        kind = self.lr_scheduler_type
        if kind == "constant":
            return self.learning_rate
        if step < warmup:
            return self.learning_rate * (step / max(1, warmup))
        if kind == "constant_with_warmup":
            return self.learning_rate
        if kind == "linear":
            return self.learning_rate * max(0.0, (total - step) / max(1, total - warmup))
        progress = (step - warmup) / max(1, total - warmup)
        return self.learning_rate * max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))


def unknown_argument(name: str) -> str:
    """What to say about a name that TrainingArguments doesn't have."""
    if name in ELSEWHERE:
        return f"TrainingArguments has no {name!r}: {ELSEWHERE[name]}"
    known = [field.name for field in dataclasses.fields(TrainingArguments)]
    near = difflib.get_close_matches(name, known, 1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"
    return f"TrainingArguments has no {name!r}{hint}"
