"""Logits, losses and every gradient against transformers, for each family; bounds: tolerances.py.

Batches have two rows, right padding, masked labels; then packed documents, long positions, BF16.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from tolerances import BF16, FP32

import slidedp

torch = pytest.importorskip("torch", reason="the reference")

T = 23  # no multiple of anything, longer than the windows


def batch(vocab: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    ids = rng.integers(0, vocab, (2, T))
    labels = ids.copy()
    labels[0, :5] = -100
    labels[1, -7:] = -100  # right padding
    mask = np.ones_like(ids)
    mask[1, -7:] = 0
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def reference(model: Any, data: dict[str, np.ndarray], **more: Any) -> tuple[Any, Any]:
    """(logits, loss): the loss is the sum over valid targets after the shift, by their number."""
    model.train()
    model.zero_grad()
    logits = model(input_ids=torch.tensor(data["input_ids"]), **more).logits.float()
    targets = torch.tensor(data["labels"])[:, 1:].reshape(-1)
    flat = logits[:, :-1].reshape(-1, logits.shape[-1])
    loss = torch.nn.functional.cross_entropy(flat, targets, ignore_index=-100)
    loss.backward()
    return logits.detach().numpy(), loss.item()


def open_trainer(folder: Path, device: str, **more: Any) -> slidedp.Trainer:
    options = {
        "output_dir": folder.parent / "out",
        "device": device,
        "max_seq_length": T,
        "per_device_train_batch_size": 2,
        "keep_gradients": True,
        "bf16": False,
        "head_rows": 16,
        **more,
    }
    return slidedp.Trainer(model=folder, args=slidedp.TrainingArguments(**options))


def relative(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(got - want).max() / max(float(np.abs(want).max()), 1e-30))


def check_gradients(trainer: slidedp.Trainer, model: Any, bound: float) -> None:
    names = {name for name, _ in trainer.named_tensors()}
    parameters = dict(model.named_parameters())
    assert names == set(parameters)
    for name, parameter in parameters.items():
        worst = relative(trainer.tensor(name, "grad"), parameter.grad.float().numpy())
        assert worst <= bound, f"{name}: {worst:.2e}"


@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize("case", families.CASES)
def test_fp32(checkpoints: families.Checkpoints, device: str, case: str, activations: str) -> None:
    model = families.make_model(case)
    data = batch(model.config.vocab_size)
    logits, loss = reference(model, data, attention_mask=torch.tensor(data["attention_mask"]))
    with open_trainer(checkpoints(case), device, activations=activations) as trainer:
        got = trainer.logits(data["input_ids"])
        real = data["attention_mask"] == 1
        assert relative(got[real], logits[real]) <= FP32.logits
        assert trainer.evaluate(data)["eval_loss"] == pytest.approx(loss, rel=FP32.loss)
        result = trainer.train_step(data, lr=0.0)
        assert result.loss == pytest.approx(loss, rel=FP32.loss)
        assert result.num_targets == int((data["labels"][:, 1:] != -100).sum())
        check_gradients(trainer, model, FP32.gradients)
        squares = sum(float((p.grad.double() ** 2).sum()) for p in model.parameters())
        assert result.grad_norm == pytest.approx(squares**0.5, rel=FP32.gradients)


@pytest.mark.parametrize("case", ["llama3", "mistral-window", "qwen2-window", "qwen3"])
def test_packed_documents(checkpoints: families.Checkpoints, device: str, case: str) -> None:
    """A packed row is its documents one by one: logits, and gradients of the joint mean loss."""
    model = families.make_model(case).train()
    data = batch(model.config.vocab_size)
    documents = np.zeros((2, T), int)
    documents[0, 9:] = 1
    documents[1, 2:] = 7
    documents[1, 12:] = 3
    losses, logits, count = [], np.zeros((2, T, model.config.vocab_size), np.float32), 0
    for row in range(2):
        for number in np.unique(documents[row]):
            at = documents[row] == number
            ids, labels = (torch.tensor(data[k][row][at])[None] for k in ("input_ids", "labels"))
            out = model(input_ids=ids).logits
            logits[row][at] = out[0].detach().numpy()
            targets = labels[0, 1:]
            losses.append(
                torch.nn.functional.cross_entropy(
                    out[0, :-1], targets, ignore_index=-100, reduction="sum"
                )
            )
            count += int((targets != -100).sum())
    loss = sum(losses) / count
    loss.backward()
    packed = {k: data[k] for k in ("input_ids", "labels")} | {"document_ids": documents}
    with open_trainer(checkpoints(case), device) as trainer:
        got = trainer.logits(data["input_ids"], document_ids=documents)
        assert relative(got, logits) <= FP32.logits
        result = trainer.train_step(packed, lr=0.0)
        assert result.loss == pytest.approx(loss.item(), rel=FP32.loss)
        assert result.num_targets == count
        check_gradients(trainer, model, FP32.gradients)


def test_long_positions(checkpoints: families.Checkpoints, device: str) -> None:
    """Llama 3.1's scaled rotation at positions 1, 8191 and 20000. An angle is position times
    frequency in FP32: one unit in the frequency's last place is 1e-3 at 20000, and torch's powf is
    only that exact, hence the wider bound."""
    model = families.make_model("llama3")
    ids = batch(model.config.vocab_size)["input_ids"]
    with open_trainer(checkpoints("llama3"), device) as trainer:
        for start in (1, 8191 - T + 1, 20000 - T + 1):
            positions = np.broadcast_to(np.arange(start, start + T), ids.shape)
            with torch.no_grad():
                want = model(
                    input_ids=torch.tensor(ids), position_ids=torch.tensor(positions.copy())
                ).logits.numpy()
            got = trainer.logits(ids, position_ids=positions)
            assert relative(got, want) <= (FP32.logits if start == 1 else FP32.far_logits), start


@pytest.mark.parametrize("case", families.CASES)
def test_bf16(checkpoints: families.Checkpoints, device: str, case: str) -> None:
    """BF16 against transformers in BF16: both are roundings of one FP32 model, so each is compared
    with that; ours must not be further from it than a fixed factor of theirs."""
    exact = families.make_model(case)
    rounded = families.make_model(case).to(torch.bfloat16)
    exact.load_state_dict({k: v.float() for k, v in rounded.state_dict().items()})
    data = batch(exact.config.vocab_size)
    mask = torch.tensor(data["attention_mask"])
    want, loss = reference(exact, data, attention_mask=mask)
    theirs, _ = reference(rounded, data, attention_mask=mask)
    real = data["attention_mask"] == 1
    with open_trainer(checkpoints(case), device, bf16=True) as trainer:
        got = trainer.logits(data["input_ids"])
        error, allowed = relative(got[real], want[real]), relative(theirs[real], want[real])
        assert error <= BF16.factor * allowed, (error, allowed)
        result = trainer.train_step(data, lr=0.0)
        assert result.loss == pytest.approx(loss, rel=BF16.loss)
        grads = dict(exact.named_parameters())
        for name, parameter in rounded.named_parameters():
            truth = grads[name].grad.numpy()
            scale = float(np.linalg.norm(truth))
            ours = float(np.linalg.norm(trainer.tensor(name, "grad") - truth)) / scale
            other = float(np.linalg.norm(parameter.grad.float().numpy() - truth)) / scale
            assert ours <= BF16.factor * max(other, BF16.unit), (name, ours, other)
