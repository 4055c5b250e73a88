"""Which sample goes where: a fixed function of (samples, seed, epoch, global batch, ranks).

The order of an epoch does not depend on the number of ranks: global batch g is the g-th run of the
epoch's permutation, dealt to ranks, and within a rank to micro-batches, in contiguous runs. So one
rank with 4 rows sees, as a whole, what 4 ranks with 1 row see. Every sample is used exactly once an
epoch; in the last, incomplete batch ranks get fewer samples, or none.
"""

import numpy as np
from numpy.typing import NDArray


def order(samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The epoch's permutation of range(samples)."""
    generator = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    return generator.permutation(samples)


def batches_per_epoch(samples: int, global_batch: int, drop_last: bool) -> int:
    """Steps of an epoch; `global_batch` counts samples of all ranks and micro-batches."""
    whole = samples // global_batch
    return whole if drop_last or samples % global_batch == 0 else whole + 1


def share(count: int, parts: int, part: int) -> tuple[int, int]:
    """[first, end) of the run of `count` things that is `part`'s of `parts`, as equal as can be."""
    return count * part // parts, count * (part + 1) // parts


def micro_batches(
    indices: NDArray[np.int64], world: int, rank: int, micro: int, rows: int
) -> list[NDArray[np.int64]]:
    """This rank's micro-batches of a global batch, at most `micro`, of at most `rows` samples."""
    first, end = share(len(indices), world, rank)
    own = indices[first:end]
    count = min(micro, len(own))
    if len(own) == micro * rows:
        return [own[i * rows : (i + 1) * rows] for i in range(micro)]
    return [own[slice(*share(len(own), count, i))] for i in range(count)]
