"""`Trainer`: the public object. It reads a checkpoint folder, feeds the engine, and saves."""

from __future__ import annotations

import atexit
import dataclasses
import math
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from slidedp import _slidedp, checkpoint, data, sampler
from slidedp.arguments import TrainingArguments
from slidedp.config import read_config
from slidedp.libraries import blas_path, nvidia_path
from slidedp.ranks import Rank, read_rank, rendezvous_name
from slidedp.report import Report, host_memory, human

# Arguments that may differ between ranks.
_OWN_ARGUMENTS = ("disable_tqdm", "threads")


@dataclass(frozen=True)
class StepResult:
    """What an optimizer step was like. Numbers are of all ranks."""

    loss: float  # mean over the valid targets; NaN without any
    grad_norm: float  # L2 norm of the mean gradient, before clipping
    num_targets: int  # labels that counted
    num_tokens: int  # all tokens, padding included
    skipped: bool  # nothing was updated: no valid target anywhere, or nonfinite
    nonfinite: int  # gradient elements that were Inf or NaN
    nonfinite_unit: int  # first unit of backward with one, -1: none
    learning_rate: float
    seconds: float
    exposed_update_seconds: float  # of them, waiting for gradients and updates
    step: int  # updates done so far

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def targets_per_second(self) -> float:
        return self.num_targets / self.seconds if self.seconds > 0 else 0.0


class Trainer:
    """Fine-tunes a checkpoint: every rank of a run makes one, with the same arguments.

    model: a folder with config.json and safetensors files. args: `TrainingArguments`.
    train_dataset, eval_dataset: see `slidedp.data.open_dataset`.

    Use it as a context manager, so that an exception in one rank ends the others at once. Raises
    ValueError for a config, checkpoint or data that can't be used, MemoryError when the states
    don't fit (before anything is taken), OSError when output_dir can't be written, RuntimeError
    when another rank fails or disagrees.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        args: TrainingArguments | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
    ) -> None:
        self.args = TrainingArguments() if args is None else args
        self.history: list[dict[str, float]] = []
        self._skips = 0  # steps with Inf or NaN in a row
        self._engine: _slidedp.Engine | None = None
        self.rank: Rank = read_rank()
        self.folder = Path(model)
        if not self.folder.is_dir():
            raise checkpoint.CheckpointError(f"there is no checkpoint folder {self.folder}")
        self.config = read_config(self.folder)
        self._checkpoint = checkpoint.open_checkpoint(self.folder)
        needed = sum(t.nbytes for t in self._checkpoint.tensors.values())
        if self.rank.first:
            checkpoint.check_output(Path(self.args.output_dir), needed)
        tokenizer = self.folder / "tokenizer.json"
        self._train = self._open(train_dataset, tokenizer, "train_dataset")
        self._eval = self._open(eval_dataset, tokenizer, "eval_dataset")
        if self._eval is None and self.args.eval_strategy != "no":
            raise ValueError(f"eval_strategy={self.args.eval_strategy!r} needs an eval_dataset")
        self._engine = _slidedp.Engine(self._spec())
        _remember(self)
        try:
            self._load()
        except BaseException as error:
            self._abort(error)
            self.close()
            raise

    def _open(self, source: Any, tokenizer: Path, what: str) -> data.Dataset | None:
        if source is None:
            return None
        return data.open_dataset(source, tokenizer, self.args.max_seq_length, what)

    def _device(self) -> tuple[str, int]:
        """The backend and which of its devices: ranks share GPUs where there are fewer."""
        name = self.args.device
        if name == "cpu":
            return name, 0
        count = _slidedp.devices(nvidia_path())["cuda"]
        if name == "auto" and not count:
            return "cpu", 0
        return "cuda", self.rank.rank % max(count, 1)

    def _spec(self) -> _slidedp.Spec:
        args = self.args
        device, index = self._device()
        gradient = args.gradient_dtype
        if gradient == "auto":
            gradient = "bfloat16" if args.bf16 else "float32"
        rows = max(args.per_device_train_batch_size, 1)
        spec: _slidedp.Spec = {
            "model": self.config.to_spec(),
            "rank": self.rank.rank,
            "world": self.rank.world,
            "device": device,
            "device_index": index,
            "bf16": args.bf16,
            "gradient_dtype": gradient,
            "delivery": args.weight_delivery,
            "reduction": args.gradient_reduction,
            "threads": args.threads,
            "blas": blas_path(),
            "nvidia": nvidia_path(),
            "max_tokens": rows * args.max_seq_length,
            "max_seq": args.max_seq_length,
            "micro_batches": args.gradient_accumulation_steps,
            "block_activations": args.block_activations(self.config.num_layers),
            "device_budget": args.gpu_memory_budget,
            "slots": args.slots,
            "chunk_bytes": args.chunk_bytes,
            "head_rows": args.head_rows,
            "overlap": args.overlap,
            "keep_gradients": args.keep_gradients,
            "defer": args.defer_updates and args.overlap,
            "skip_nonfinite": args.skip_nonfinite,
            "max_grad_norm": args.max_grad_norm,
            "debug_nonfinite": args.debug_nonfinite,
            "pinning": args.pin_memory,
            "timeout": args.ddp_timeout,
            "beta1": args.adam_beta1,
            "beta2": args.adam_beta2,
            "epsilon": args.adam_epsilon,
            "weight_decay": args.weight_decay,
        }
        if self.rank.world > 1:
            spec["rendezvous"] = rendezvous_name()
            spec["agreement"] = self._agreement() + f"backend={device}\n"
        return spec

    def _agreement(self) -> str:
        """Everything that ranks must have in common, a key a line."""
        facts = {"slidedp": _slidedp.__version__, "checkpoint": self._checkpoint.fingerprint()}
        for name, value in self.config.to_spec().items():
            facts[f"config.{name}"] = repr(value)
        for field in dataclasses.fields(self.args):
            if field.name not in _OWN_ARGUMENTS:
                facts[field.name] = repr(getattr(self.args, field.name))
        for name, dataset in (("train_dataset", self._train), ("eval_dataset", self._eval)):
            facts[f"len({name})"] = "none" if dataset is None else str(len(dataset))
        return "".join(f"{k}={str(v).replace(chr(10), ' ')}\n" for k, v in facts.items())

    def _load(self) -> None:
        engine = self._need_engine()
        wanted = [(name, shape) for name, shape, _ in engine.tensors()]
        checkpoint.match(self._checkpoint, wanted, self.config.tie_word_embeddings, self._warn)
        with Report("loading", 1, self.rank.rank, self.args.disable_tqdm) as report:
            engine.load(self._parts(None), report.bytes)

    def _parts(self, folder: Path | None) -> list[dict[str, Any]]:
        return self._checkpoint.parts(folder)

    def _warn(self, text: str) -> None:
        if self.rank.first:
            print(f"slidedp: {text}", file=sys.stderr, flush=True)

    def _need_engine(self) -> _slidedp.Engine:
        if self._engine is None:
            raise RuntimeError("the trainer is closed")
        return self._engine

    # ---- life ----

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._abort(error)
        self.close()

    def _abort(self, error: BaseException) -> None:
        """Tells the other ranks why they end. An error that came from them is known there."""
        if self._engine is not None:
            text = str(error) or type(error).__name__
            self._engine.abort(f"rank {self.rank.rank}: {type(error).__name__}: {text}")

    def close(self) -> None:
        """Gives memory and device back. The states are gone; save first. Twice is fine."""
        if self._engine is not None:
            self._engine.close()  # refused while another thread is in a call
            self._engine = None

    # ---- a step ----

    def train_step(
        self, batch: Mapping[str, Any] | Sequence[Mapping[str, Any]], lr: float | None = None
    ) -> StepResult:
        """One optimizer step over this rank's micro-batches, with those of the other ranks.

        batch: one micro-batch or a list of them, each with `input_ids` and `labels` (unshifted,
        -100 masked), optionally `attention_mask`, `position_ids`, `document_ids`: integers
        [B, T]. The loss is the sum over the valid targets of all ranks divided by their number.
        lr: of this step, default args.learning_rate. Updates may still be under way when it
        returns; whatever reads the states waits for them. Raises ValueError for bad data, before
        anything changes. A gradient with Inf or NaN: see `TrainingArguments.skip_nonfinite`;
        RuntimeError where it can't be skipped, or was too often.
        """
        batches = [batch] if isinstance(batch, Mapping) else list(batch)
        rate = self.args.learning_rate if lr is None else lr
        if isinstance(rate, bool) or not isinstance(rate, int | float):
            raise TypeError(f"lr={rate!r}: float wanted")
        return self._step(
            [
                data.prepare(b, self.config.vocab_size, f"micro-batch {i}")
                for i, b in enumerate(batches)
            ],
            rate,
        )

    def _step(self, batches: list[dict[str, NDArray[np.int32]]], rate: float) -> StepResult:
        out = self._need_engine().step(batches, rate)
        if out["nonfinite"]:
            self._meet_nonfinite(out)
        elif out["skipped"]:
            self._warn("a step had no valid target on any rank: nothing was updated")
        else:
            self._skips = 0
        return StepResult(
            loss=out["loss"] if out["targets"] else math.nan,
            grad_norm=out["grad_norm"],
            num_targets=out["targets"],
            num_tokens=out["tokens"],
            skipped=out["skipped"],
            nonfinite=out["nonfinite"],
            nonfinite_unit=out["nonfinite_unit"],
            learning_rate=rate,
            seconds=out["seconds"],
            exposed_update_seconds=out["exposed_update_seconds"],
            step=out["step"],
        )

    def _meet_nonfinite(self, out: _slidedp.StepOut) -> None:
        what = (
            f"{out['nonfinite']} gradients are Inf or NaN, first in unit {out['nonfinite_unit']} "
            f"of {self.plan['units']}"
        )
        if not out["skipped"]:
            raise RuntimeError(
                f"step {out['step']}: {what}; they have been applied there and in the units above "
                "it, so the states are no longer usable (with max_grad_norm or "
                "skip_nonfinite=True such a step is skipped)"
            )
        self._skips += 1
        if self._skips >= self.args.max_skipped_steps:
            raise RuntimeError(
                f"step {out['step'] + 1} was skipped {self._skips} times in a row "
                f"(max_skipped_steps): {what}; the states are those of step {out['step']}"
            )
        self._warn(f"step {out['step'] + 1} is skipped: {what}")

    # ---- a run ----

    def train(self) -> dict[str, float]:
        """The whole run over train_dataset, with progress. Returns its summary: `train_loss` (mean
        of the steps' losses), `train_runtime` (s), `train_steps`, `tokens_per_second`."""
        if self._train is None:
            raise ValueError("there is no train_dataset")
        args, start = self.args, time.monotonic()
        steps_an_epoch = sampler.batches_per_epoch(
            len(self._train), self._global_batch(), args.dataloader_drop_last
        )
        if steps_an_epoch == 0:
            raise ValueError(
                f"train_dataset has {len(self._train)} samples, a step takes "
                f"{self._global_batch()}: with dataloader_drop_last nothing is left"
            )
        total = args.max_steps
        if total <= 0:
            total = max(1, math.ceil(steps_an_epoch * args.num_train_epochs))
        losses, tokens = [], 0
        with Report("training", total, self.rank.rank, args.disable_tqdm) as report:
            for step in range(total):
                epoch, number = divmod(step, steps_an_epoch)
                result = self._step(self._global_batch_of(epoch, number), args.rate(step, total))
                if not result.skipped:
                    losses.append(result.loss)
                tokens += result.num_tokens
                self._log(report, result, step + 1, total, (step + 1) / steps_an_epoch)
                last_of_epoch = number + 1 == steps_an_epoch or step + 1 == total
                if self._evaluates(step + 1, last_of_epoch):
                    metrics = self.evaluate()
                    self.history.append({"step": step + 1, **metrics})
                    if self.rank.first:
                        print(f"step {step + 1}: eval_loss {metrics['eval_loss']:.4f}", flush=True)
        self._need_engine().flush()
        seconds = time.monotonic() - start
        return {
            "train_loss": float(np.mean(losses)) if losses else math.nan,
            "train_runtime": seconds,
            "train_steps": total,
            "tokens_per_second": tokens / seconds,
        }

    def _global_batch(self) -> int:
        args = self.args
        rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
        return rows * self.rank.world

    def _global_batch_of(self, epoch: int, number: int) -> list[dict[str, NDArray[np.int32]]]:
        assert self._train is not None
        args, size = self.args, self._global_batch()
        seed = args.seed if args.data_seed is None else args.data_seed
        order = sampler.order(len(self._train), seed, epoch)[number * size : (number + 1) * size]
        return [
            self._collate(self._train, "train_dataset", indices)
            for indices in sampler.micro_batches(
                order,
                self.rank.world,
                self.rank.rank,
                args.gradient_accumulation_steps,
                args.per_device_train_batch_size,
            )
        ]

    def _collate(
        self, dataset: data.Dataset, what: str, indices: NDArray[np.int64]
    ) -> dict[str, NDArray[np.int32]]:
        samples = [dataset[int(i)] for i in indices]
        names = [f"{what}, sample {int(i)}" for i in indices]
        for sample, name in zip(samples, names, strict=True):
            self._check_ids(sample, name)
        batch = data.collate(samples, names, self.args.max_seq_length)
        return data.prepare(batch, self.config.vocab_size, f"{what}, samples {indices.tolist()}")

    def _check_ids(self, sample: Any, name: str) -> None:
        """Token ids by sample, so that an error can say which one it is."""
        if isinstance(sample, Mapping) and sample.get("input_ids") is not None:
            ids = np.asarray(sample["input_ids"])
            if ids.dtype.kind in "iu" and ids.size:
                bad = (ids < 0) | (ids >= self.config.vocab_size)
                if bad.any():
                    raise data.DataError(
                        f"{name}: token id {int(ids[bad][0])} is outside the vocabulary of "
                        f"{self.config.vocab_size}"
                    )

    def _log(self, report: Report, result: StepResult, step: int, total: int, epoch: float) -> None:
        due = step % self.args.logging_steps == 0 or step in (1, total)
        text = (
            f"loss {result.loss:.4f}  lr {result.learning_rate:.2e}  "
            f"{result.tokens_per_second:,.0f} tokens/s ({result.targets_per_second:,.0f} valid)  "
            f"{result.seconds:.2f} s/step (updates exposed {result.exposed_update_seconds:.2f})  "
            f"host {human(host_memory())}"
        )
        report.update(step, text, line=due)
        if due:
            self.history.append(
                {
                    "step": step,
                    "epoch": epoch,
                    "loss": result.loss,
                    "grad_norm": result.grad_norm,
                    "learning_rate": result.learning_rate,
                    "num_tokens": result.num_tokens,
                    "num_targets": result.num_targets,
                    "seconds": result.seconds,
                    "exposed_update_seconds": result.exposed_update_seconds,
                }
            )

    def _evaluates(self, step: int, last_of_epoch: bool) -> bool:
        args = self.args
        if self._eval is None or args.eval_strategy == "no":
            return False
        if args.eval_strategy == "epoch":
            return last_of_epoch
        return step % (args.eval_steps or args.logging_steps) == 0

    # ---- looking ----

    def evaluate(self, batch_or_dataset: Any = None) -> dict[str, float]:
        """The mean loss over valid targets of eval_dataset, another dataset, or micro-batches.

        A dataset is shared among the ranks, each sample once; a micro-batch (a mapping, or a list
        of mappings with [B, T] arrays) is this rank's own and is added to the others'. All ranks
        call it. Returns `eval_loss`, `eval_targets`, `eval_runtime` (s).
        """
        start = time.monotonic()
        loss, targets = 0.0, 0
        engine = self._need_engine()
        for batch in self._eval_batches(batch_or_dataset):
            part, count = engine.evaluate([batch])
            loss, targets = loss + part, targets + count
        everyone = engine.gather([loss, float(targets)], "evaluate")
        loss, total = sum(r[0] for r in everyone), sum(r[1] for r in everyone)
        return {
            "eval_loss": loss / total if total else math.nan,
            "eval_targets": total,
            "eval_runtime": time.monotonic() - start,
        }

    def _eval_batches(self, source: Any) -> Iterator[dict[str, NDArray[np.int32]]]:
        if isinstance(source, Mapping):
            source = [source]
        if isinstance(source, list) and source and all(_is_batch(x) for x in source):
            for i, batch in enumerate(source):
                yield data.prepare(batch, self.config.vocab_size, f"micro-batch {i}")
            return
        dataset = self._eval
        if source is not None:
            dataset = self._open(source, self.folder / "tokenizer.json", "eval_dataset")
        if dataset is None:
            raise ValueError("there is no eval_dataset")
        first, end = sampler.share(len(dataset), self.rank.world, self.rank.rank)
        size = self.args.per_device_eval_batch_size
        for at in range(first, end, size):
            indices = np.arange(at, min(at + size, end))
            yield self._collate(dataset, "eval_dataset", indices)

    def logits(
        self, input_ids: Any, position_ids: Any = None, document_ids: Any = None
    ) -> NDArray[np.float32]:
        """Logits [B, T, V] in FP32 of token ids [B, T], by this rank alone."""
        batch = {"input_ids": input_ids, "position_ids": position_ids, "document_ids": document_ids}
        prepared = data.prepare(batch, self.config.vocab_size, "logits")
        return self._need_engine().logits(prepared)

    def tensor(self, name: str, what: str = "master") -> NDArray[np.float32]:
        """A tensor of the states in FP32, by the checkpoint's name and in its shape.

        what: "master" (the weight), "exp_avg", "exp_avg_sq" (Adam's moments), "grad" (the last
        step's mean gradient; needs keep_gradients=True).
        """
        short = checkpoint.normal_name(name)
        if name == self._checkpoint.tied_copy or (
            short == checkpoint.HEAD and self.config.tie_word_embeddings
        ):
            short = checkpoint.TABLE
        return self._need_engine().tensor(short, what)

    def named_tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, shape) of each trained tensor, by the checkpoint's names."""
        for short, name in self._checkpoint.own.items():
            yield name, self._checkpoint.tensors[self._checkpoint.own[short]].shape

    @property
    def plan(self) -> Mapping[str, Any]:
        """What was planned: bytes by name on host and device, threads, units, formats."""
        return MappingProxyType(self._need_engine().plan())

    # ---- saving ----

    def save_model(self, path: str | os.PathLike[str] | None = None) -> None:
        """Saves a folder that transformers loads: the source's names, shapes, dtypes, shards and
        side files. All ranks call it. It appears under its name only when it is whole and has been
        read back; a folder that was there before is replaced then. When it fails, on any rank, it
        raises on all of them and the states are as before. path: default args.output_dir.
        """
        engine = self._need_engine()
        target = Path(self.args.output_dir if path is None else path).resolve()
        draft = checkpoint.draft_of(target)

        def start() -> None:
            checkpoint.check_target(target)
            checkpoint.start_save(self._checkpoint, draft)

        try:
            kind = f"save_model({str(target)[-100:]})"
            self._first_does(start, kind)
            with Report("saving", 1, self.rank.rank, self.args.disable_tqdm) as report:
                engine.store(self._parts(draft), report.bytes)
            self._first_does(
                lambda: checkpoint.finish_save(self._checkpoint, draft, target, self._warn),
                f"the end of {kind}",
            )
        except BaseException:
            if self.rank.first and checkpoint.is_draft(draft):
                checkpoint.discard(draft)
            raise

    def _first_does(self, work: Callable[[], None], kind: str) -> None:
        """Rank 0 does it while the others wait. When it fails it fails on all of them, and the
        states are as before."""
        error: Exception | None = None
        if self.rank.first:
            try:
                work()
            except Exception as caught:
                error = caught
        failed = self._need_engine().gather([0.0 if error is None else 1.0], kind)[0][0]
        if error is not None:
            raise error
        if failed:
            raise RuntimeError("rank 0 could not save")


def _is_batch(value: Any) -> bool:
    return isinstance(value, Mapping) and np.ndim(value.get("input_ids", 0)) == 2


# ---- processes that end without closing ----

_open: weakref.WeakSet[Trainer] = weakref.WeakSet()


def _remember(trainer: Trainer) -> None:
    """Makes sure that a script which ends by an exception, or without close(), tells the others."""
    _open.add(trainer)
    if sys.excepthook is not _tell_others:
        _next_hook.append(sys.excepthook)
        sys.excepthook = _tell_others
        atexit.register(_close_all)


_next_hook: list[Any] = []


def _tell_others(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    for trainer in list(_open):
        trainer._abort(error)
    _next_hook[-1](kind, error, trace)


def _close_all() -> None:
    for trainer in list(_open):
        trainer.close()
