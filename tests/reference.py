"""What training should give, in PyTorch: plain AdamW in FP32, and the semantics of BF16 weights
cast from FP32 masters. Used by the trajectory tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch


def decays(name: str) -> bool:
    """Hugging Face's rule: no weight decay on biases and norms."""
    return not (name.endswith("bias") or "norm" in name)


def loss_of(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the cross-entropy over valid targets (labels shifted here, -100 masked) / number."""
    logits = model(input_ids=ids).logits.float()
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), ignore_index=-100
    )


def make_optimizer(parameters: dict[str, torch.Tensor], lr: float, **hyper: Any) -> Any:
    """torch.optim.AdamW with decay by `decays`. hyper: weight_decay, betas, eps."""
    decay = hyper.pop("weight_decay", 0.0)
    groups = [
        {"params": [p for n, p in parameters.items() if decays(n)], "weight_decay": decay},
        {"params": [p for n, p in parameters.items() if not decays(n)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, **hyper)


def train_clipped(
    model: Any,
    batches: np.ndarray,
    rates: Callable[[int], float],
    max_norm: float = math.inf,
    **hyper: Any,
) -> Iterator[tuple[float, float]]:
    """(loss, norm before clipping) of each step of clip_grad_norm_ and AdamW on [steps, B, T] token
    ids, labels equal to them."""
    optimizer = make_optimizer(dict(model.named_parameters()), rates(0), **hyper)
    model.train()
    for step, ids in enumerate(torch.tensor(batches)):
        for group in optimizer.param_groups:
            group["lr"] = rates(step)
        loss = loss_of(model, ids, ids)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item(), norm.item()


def train_fp32(
    model: Any, batches: np.ndarray, rates: Callable[[int], float], **hyper: Any
) -> Iterator[float]:
    """The losses of train_clipped without clipping."""
    return (loss for loss, _ in train_clipped(model, batches, rates, **hyper))


def train_baseline(
    model: Any, batches: np.ndarray, rates: Callable[[int], float], **hyper: Any
) -> Iterator[float]:
    """The semantics of streaming from host states, written down: the weights that a pass computes
    with are BF16 casts of FP32 masters; gradients leave in BF16; each parameter (and so each unit)
    has its own FP32 AdamW update, applied when its gradient is there; nothing is clipped."""
    masters = {n: p.detach().clone().float() for n, p in model.named_parameters()}
    model.to(torch.bfloat16).train()
    parameters = dict(model.named_parameters())
    optimizers = {n: make_optimizer({n: m}, rates(0), **hyper) for n, m in masters.items()}
    for step, ids in enumerate(torch.tensor(batches)):
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(masters[name])
        loss = loss_of(model, ids, ids)
        loss.backward()
        for name in reversed(list(parameters)):
            gradient = parameters[name].grad
            assert gradient is not None and gradient.dtype == torch.bfloat16
            masters[name].grad = gradient.float()
            for group in optimizers[name].param_groups:
                group["lr"] = rates(step)
            optimizers[name].step()
            parameters[name].grad = None
        yield loss.item()
