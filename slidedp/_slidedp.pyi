"""The extension module: host state, streaming pipeline, routes, CPU optimizer.

Private: users see `slidedp.Trainer`. Every blocking call releases the GIL, answers Ctrl-C within a
second, and raises the first error of any rank with the rank as a note.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, final, type_check_only

import numpy as np
from numpy.typing import NDArray

__version__: str

@type_check_only
class Spec(TypedDict, total=False):
    """What `Engine` is opened with. Required unless a default stands beside it."""

    model: dict[str, Any]  # slidedp.config.ModelConfig.to_spec()
    rank: int  # 0
    world: int  # 1
    rendezvous: str  # name of the abstract socket; required when world > 1
    agreement: str  # "key=value\n" lines, equal on all ranks; ""
    device: str  # "cpu"; "cuda"
    device_index: int  # 0
    bf16: bool  # True: hi/lo masters and BF16 compute; False: FP32 throughout
    gradient_dtype: str  # "float32" | "bfloat16": on the way to the host
    delivery: str  # "auto" | "full" | "shard": of weights
    reduction: str  # "auto" | "cpu" | "gpu": of gradients
    threads: int  # 0: CPUs of this process / local ranks
    blas: str  # "" searches
    nvidia: str  # the folder of pip's nvidia packages; "" searches
    max_tokens: int  # tokens of the largest micro-batch the plan is made for
    max_seq: int  # its longest row
    micro_batches: int  # 1: per step
    activations: str  # "recompute" | "selective" | "keep" | "offload"
    block_activations: bytes  # a byte a block instead: an index into the four above
    device_budget: int  # 0: bytes of device memory that may be taken; 0: what is free
    slots: int  # 2: weight slots
    chunk_bytes: int  # 4 << 20: of gradient on the way out
    head_rows: int  # 256: rows of logits at a time
    overlap: bool  # True
    keep_gradients: bool  # False
    defer: bool  # True: updates may run on under the next forward
    skip_nonfinite: bool  # False: a step with an Inf or NaN in a gradient is forgotten
    max_grad_norm: float  # 0.0: no clipping; above 0 implies skip_nonfinite
    debug_nonfinite: bool  # False; an error that names the op of the first Inf or NaN
    pinning: str  # "auto" | "always" | "never": of the memory that the device copies from and to
    timeout: float  # 1800.0: seconds that a wait for another rank may last
    beta1: float  # 0.9
    beta2: float  # 0.999
    epsilon: float  # 1e-8
    weight_decay: float  # 0.0

# A tensor's bytes in a file: name (str, without "model." prefix), path (str), offset (int, of the
# first byte in the file), dtype ("F32" | "BF16" | "F16"), count (int, elements).
_Part = Mapping[str, Any]
# int32, C-contiguous [B, T] each: input_ids; optionally labels (shifted already: labels[b, t] is
# the target of position t, -100 for none), positions, and first (the index in the row of the first
# token that t may attend to by its document; the window is added by the engine).
_MicroBatch = Mapping[str, NDArray[np.int32]]

@type_check_only
class StepOut(TypedDict):
    loss: float  # sum over valid targets of all ranks / their number
    targets: int  # valid targets of all ranks
    tokens: int  # tokens of all ranks
    skipped: bool  # nothing was updated: no valid target anywhere, or nonfinite
    nonfinite: int  # gradients that were Inf or NaN, all ranks
    nonfinite_unit: int  # first unit concerned, -1: none
    grad_norm: float  # of the mean gradient over all parameters, before clipping
    seconds: float
    exposed_update_seconds: float  # of them, waiting for reduction and updates
    step: int  # updates done so far

@final
class Engine:
    """One rank of a training: device, share of the host state, schedule."""

    def __new__(cls, spec: Spec) -> Engine: ...
    def load(
        self, parts: Sequence[_Part], progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Reads this rank's slices of `parts` into the planes, then waits for all ranks. Every
        tensor of the model must be covered. `progress(bytes done, bytes in all)` of this rank."""
    def store(
        self, parts: Sequence[_Part], progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Writes this rank's slices into files of full size, then waits for all ranks."""
    def init(self, seed: int, std: float) -> None:
        """Fills the masters: matrices from N(0, std), gains 1, biases 0. Same for any world."""
    def step(self, batches: Sequence[_MicroBatch], lr: float) -> StepOut: ...
    def flush(self) -> None:
        """Until the updates of all steps are done, on all ranks."""
    def evaluate(self, batches: Sequence[_MicroBatch]) -> tuple[float, int]:
        """(sum of the loss over valid targets, their number), of this rank alone."""
    def logits(self, batch: _MicroBatch) -> NDArray[np.float32]:
        """[B, T, V]."""
    def tensor(self, name: str, what: str) -> NDArray[np.float32]:
        """what: "master" | "exp_avg" | "exp_avg_sq" | "grad"; [rows, cols], or [rows]."""
    def tensors(self) -> list[tuple[str, tuple[int, ...], bool]]:
        """(name without prefix, shape, decays) of each checkpoint tensor that the model has."""
    def gather(self, values: Sequence[float], kind: str = "gather") -> list[list[float]]:
        """values (at most 16) of every rank, by rank. Collective; also serves as a barrier. Ranks
        that come with different `kind`s get an error that names both."""
    def abort(self, message: str) -> None:
        """Ends every rank's waits with this message as the cause. Never raises."""
    def device_calls(self, fail_at: int = 0) -> tuple[int, int]:
        """For tests: calls of the device that can fail, and allocations, since it was opened. The
        fail_at-th call from now on fails; 0: none does."""
    def plan(self) -> dict[str, Any]:
        """Bytes by name on host and device, threads, units, slots, chunk and so on."""
    def close(self) -> None: ...

def env(blas: str = "", nvidia: str = "") -> dict[str, Any]:
    """isa, isa_best, cpus, blas and cuda (text or why not), memory_free, memory_source, backends
    {name: "" or why not}, variables [(name, value, meaning)]."""

def devices(nvidia: str = "") -> dict[str, int]:
    """How many devices of each backend can be used; 0 where it can't run."""

def model_types() -> list[str]: ...

# For tests and benchmarks: the C loops on NumPy arrays, in place. isa: "base" | "avx2" | "avx512".
def adamw(
    planes: Sequence[NDArray[Any]],  # (hi uint16, lo int16, m, v) or (master float32, m, v)
    grad: NDArray[np.float32],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    step: int,
    isa: str = "",
    threads: int = 1,
    chunk: int = 0,
) -> int: ...
def triad(
    a: NDArray[np.float32], b: NDArray[np.float32], c: NDArray[np.float32], threads: int = 1
) -> None:
    """a = b + 3 c, the STREAM triad, for floors."""

def kernel(
    name: str, dtype: str, args: dict[str, Any], threads: int = 1, device: str = "cpu"
) -> None:
    """Runs one small kernel, "gemm", "attn_fwd" or "attn_bwd" of a backend on NumPy arrays: args
    by the names of kernel_args.h; arrays of BF16 are uint16."""
