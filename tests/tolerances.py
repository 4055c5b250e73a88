"""The one table of bounds against references. Everything that is the same maths is compared exactly
elsewhere; these are for other implementations of it. Relative to the largest element."""

from __future__ import annotations

from typing import NamedTuple


class Fp32(NamedTuple):
    logits: float = 1e-5
    far_logits: float = 3e-3  # positions in the thousands: see test_parity.test_long_positions
    loss: float = 1e-5
    gradients: float = 1e-4
    norms: float = 1e-4  # of all gradients, relative, at each of 50 steps
    reordered: float = 1e-5  # ours against ours, with sums in another order
    trajectory: float = 1e-4  # of the loss, absolute, at each of 20 or 50 steps


class Bf16(NamedTuple):
    factor: float = 2.0  # our distance to FP32 over that of transformers in BF16
    unit: float = 2.0**-8  # a rounding
    loss: float = 1e-2
    trajectory: float = 1e-2  # of the loss, relative, at each of 20 steps


FP32, BF16 = Fp32(), Bf16()
