"""Who this process is among the ranks: torchrun's environment variables, or `slidedp run`'s."""

import itertools
import os
from dataclasses import dataclass

_trainers = itertools.count()  # trainers of this process, which meet in the order they are made


@dataclass(frozen=True)
class Rank:
    """A process's place. `local_*` equal the others: there is one machine."""

    rank: int
    world: int

    @property
    def first(self) -> bool:
        return self.rank == 0


def read_rank() -> Rank:
    """From RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; a lone process without them.

    Raises RuntimeError when they contradict each other or speak of several machines.
    """
    world = _number("WORLD_SIZE", 1)
    rank = _number("RANK", 0)
    local_world = _number("LOCAL_WORLD_SIZE", world)
    local_rank = _number("LOCAL_RANK", rank)
    if local_world != world or local_rank != rank:
        raise RuntimeError(
            f"WORLD_SIZE={world} and LOCAL_WORLD_SIZE={local_world}, RANK={rank} and "
            f"LOCAL_RANK={local_rank}: slidedp trains on one machine"
        )
    if not 0 <= rank < world:
        raise RuntimeError(f"RANK={rank} is not in [0, WORLD_SIZE={world})")
    return Rank(rank, world)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise RuntimeError(f"{name}={text!r} is not a number") from None


def rendezvous_name() -> str:
    """A name that the ranks of this run share, and that no other run has at the same time."""
    run = os.environ.get("SLIDE_RUN_ID") or os.environ.get("TORCHELASTIC_RUN_ID") or "none"
    address = os.environ.get("MASTER_ADDR", "localhost")
    port = os.environ.get("MASTER_PORT", "29500")
    return f"slidedp-{os.getuid()}-{run}-{address}-{port}-{next(_trainers)}"[:100]
