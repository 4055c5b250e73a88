"""The sampler: each sample once an epoch, the same global batches on any number of ranks."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slidedp import sampler


@given(
    samples=st.integers(1, 200),
    world=st.integers(1, 9),
    micro=st.integers(1, 4),
    rows=st.integers(1, 5),
    seed=st.integers(0, 2**31),
)
def test_each_sample_once(samples: int, world: int, micro: int, rows: int, seed: int) -> None:
    size = world * micro * rows
    order = sampler.order(samples, seed, 0)
    steps = sampler.batches_per_epoch(samples, size, drop_last=False)
    seen: list[int] = []
    for step in range(steps):
        batch = order[step * size : (step + 1) * size]
        dealt = []
        for rank in range(world):
            parts = sampler.micro_batches(batch, world, rank, micro, rows)
            assert len(parts) <= micro and all(1 <= len(p) <= rows for p in parts)
            dealt += [int(i) for part in parts for i in part]
        assert dealt == batch.tolist()  # rank by rank it is the batch itself
        seen += dealt
    assert sorted(seen) == list(range(samples))


def test_drop_last() -> None:
    assert sampler.batches_per_epoch(10, 4, drop_last=True) == 2
    assert sampler.batches_per_epoch(10, 4, drop_last=False) == 3
    assert sampler.batches_per_epoch(8, 4, drop_last=False) == 2
    assert sampler.batches_per_epoch(3, 4, drop_last=True) == 0


def test_order_depends_on_seed_and_epoch_alone() -> None:
    first = sampler.order(100, 7, 0)
    assert (first == sampler.order(100, 7, 0)).all()
    assert (first != sampler.order(100, 7, 1)).any()
    assert (first != sampler.order(100, 8, 0)).any()
    # Fixed for ever: a resumed run must find its place again.
    assert sampler.order(8, 42, 0).tolist() == [7, 0, 4, 2, 1, 3, 5, 6]


@pytest.mark.parametrize("count", [0, 1, 5, 13])
def test_share(count: int) -> None:
    for parts in (1, 2, 3, 8):
        edges = [sampler.share(count, parts, p) for p in range(parts)]
        assert edges[0][0] == 0 and edges[-1][1] == count
        assert all(a[1] == b[0] for a, b in itertools.pairwise(edges))
        sizes = [b - a for a, b in edges]
        assert max(sizes) - min(sizes) <= 1
