"""A rank's device: which one, the kernels that run on it, and how much of its memory KV can have.

On a GPU the KV pool gets what weights and the largest step leave:

      total memory of the GPU
      ├── what `gpu_memory_fraction` allows this rank ───────────────────────────┐ rest: other processes,
      │   weights │ largest step │ graphs │ outside (NCCL, kernels) │ KV pool    │ the CUDA context, reserve

So the largest steps that a controller may send are run once, before the rank is ready. They show how much memory a
step takes, and they load everything that CUDA, cuBLAS, NCCL and our own kernels would otherwise load in the first
request that needs it: prefill behind a context, decoding over chunks that rows share, merges, the sampler with and
without limits, log-probabilities, penalties, scored prompts, copies of blocks.

The plans are real ones, executed by `Runner.execute`. Their sequences have block 0 wherever they read and block 1
wherever they write, so that a pool of two blocks is enough; what is computed is of no interest.

Only `CudaMemory` asks a device for its memory; tests put other numbers in its place.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Final, ParamSpec, Protocol, TypeVar

import numpy as np
import structlog
import torch

from trunkline.kernels.cpu import CpuKernels
from trunkline.kernels.cpu_sampling import CpuSampling
from trunkline.kernels.cuda import CudaKernels
from trunkline.kernels.load import KernelsUnavailableError, load_kernels
from trunkline.kernels.ops import Kernels
from trunkline.kernels.reference_sampling import ReferenceSampling
from trunkline.kernels.sampling import SamplingOps
from trunkline.kvstore.chunks import blocks_for, pack_int32
from trunkline.worker.collective_errors import words_of
from trunkline.worker.config import WorkerConfig
from trunkline.worker.errors import WorkerConfigError, WorkerError
from trunkline.worker.messages import Join, Sampling, StepPlan

TORCH_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_GENERATORS: Final = "torch._prims.rng_prims"
"""In torch 2.13 no `torch.Generator` can be made before it is imported. `light_torch` leaves it out."""
_P = ParamSpec("_P")
_T = TypeVar("_T")


def in_inference_mode(call: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return a function that runs in torch's inference mode.

    A thread that is in it already, as a rank's main thread always is, does not enter it again: that takes 0.1 ms
    behind a step, when the processor's caches hold weights.
    """

    @wraps(call)
    def wrapped(*args: _P.args, **keywords: _P.kwargs) -> _T:
        if torch.is_inference_mode_enabled():
            return call(*args, **keywords)
        with torch.inference_mode():
            return call(*args, **keywords)

    return wrapped


def choose_device(config: WorkerConfig) -> torch.device:
    """Return the compute device that the configuration gives this rank.

    Raises:
        WorkerConfigError: There is no such GPU.
    """
    if config.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise WorkerConfigError("device is 'cuda', but torch finds no CUDA device")
    count = torch.cuda.device_count()
    if config.gpu is None or config.gpu >= count:
        raise WorkerConfigError(f"gpu is {config.gpu}, but torch sees {count}; allowed: 0 to {count - 1}")
    with suppress(ImportError):  # other versions of torch may do without
        importlib.import_module(_GENERATORS)
    device = torch.device("cuda", config.gpu)
    torch.cuda.set_device(device)
    return device


def choose_kernels(config: WorkerConfig, threads: int) -> Kernels:
    """Return a new instance of the kernels that the configuration names.

    Raises:
        WorkerConfigError: They are not installed, or do not run on this machine.
    """
    try:
        return load_kernels(config.kernels, config.device, threads, invariant=config.invariant_rows)
    except KernelsUnavailableError as error:
        raise WorkerConfigError(str(error)) from error


def choose_sampling(kernels: Kernels) -> SamplingOps:
    """Return the ops of sampling that go with these kernels."""
    if isinstance(kernels, CpuKernels):
        return CpuSampling(kernels.context)
    if isinstance(kernels, CudaKernels):
        return kernels.sampling()
    return ReferenceSampling()


BLOCKS_MIN: Final = 2
"""Smallest number of blocks that a controller can work with."""
OUTSIDE_BYTES_MAX: Final = 2 << 30
"""Largest amount of memory outside torch that counts as this rank's own (NCCL, kernels): more is another
process's."""


class MemoryMeter(Protocol):
    """Reads how much of a device's memory is in use. Numbers are bytes."""

    def total_and_free(self) -> tuple[int, int]:
        """Return total and free memory of the whole device, all its processes together."""

    def held(self) -> int:
        """Return the bytes that torch holds in this process, after it gave back all that it does not need."""

    def begin_peak(self) -> None:
        """Begin the measurement of a new peak: the next `peak` counts from now on."""

    def peak(self) -> int:
        """Return the largest number of bytes that torch has held since `begin_peak`; wait for the device."""


class CudaMemory:
    """The memory of a CUDA device, as torch and the driver report it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total_and_free(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self._device)
        return total, free

    def held(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device)

    def begin_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device)


@dataclass(frozen=True)
class MemoryUse:
    """The use of a GPU's memory, in bytes, after the largest step was run with hardly any KV pool."""

    total: int
    free: int
    """Free memory of the device now."""
    weights: int
    step: int
    """Bytes that the largest step takes beside the weights, at its peak: activations, logits, partial results."""
    kept: int
    """The part of `step` that torch still holds after the step."""
    outside: int
    """Bytes that this rank has taken outside torch while it loaded: NCCL, loaded kernels."""
    graphs: int = 0
    """Bytes of the graphs of decode steps, which are captured again beside the pool."""

    def left(self, fraction: float) -> int:
        """Return the bytes that are left for KV within a fraction of the total; negative if weights and step
        exceed the fraction."""
        return int(self.total * fraction) - self.weights - self.step - self.outside - self.graphs

    @property
    def available(self) -> int:
        """The bytes that other processes leave free for KV."""
        return self.free - (self.step - self.kept) - self.graphs


def measured(meter: MemoryMeter, free_at_start: int, weights: int, peak: int) -> MemoryUse:
    """Return the use of memory, from earlier readings of the meter and from last readings, which are taken now.

    Args:
        free_at_start: free bytes before this rank had taken any.
        weights: the result of `held` when the weights had been loaded.
        peak: of the largest step.
    """
    held = meter.held()
    total, free = meter.total_and_free()
    outside = min(max(0, free_at_start - free - held), OUTSIDE_BYTES_MAX)
    return MemoryUse(total, free, weights, max(0, peak - weights), max(0, held - weights), outside)


def blocks_that_fit(use: MemoryUse, config: WorkerConfig, block_bytes: int) -> int:
    """Return the blocks of the KV pool: as many as the configuration asks for, or as many as fit.

    Raises:
        WorkerConfigError: too few fit this GPU, so there will never be enough memory.
        WorkerError: other processes take the memory now.
    """
    asked = config.pool_blocks * block_bytes or config.kv_memory_bytes
    limit = use.left(1.0) if asked else use.left(config.gpu_memory_fraction)
    wanted = asked or limit
    needed = max(asked, BLOCKS_MIN * block_bytes)
    if limit < needed:
        raise WorkerConfigError(_too_little(use, config, block_bytes, asked))
    if use.available < needed:
        raise WorkerError(
            f"KV needs {gib(needed)} GiB, but other processes have left {gib(max(0, use.available))} GiB of this "
            f"GPU's {gib(use.total)}; this rank has {gib(use.weights + use.kept + use.outside)} and needs "
            f"{gib(use.step - use.kept)} more for its largest step. End what else uses the GPU, or give a smaller "
            "--gpu-memory-fraction or --kv-memory"
        )
    return min(wanted, max(use.available, asked)) // block_bytes


def _too_little(use: MemoryUse, config: WorkerConfig, block_bytes: int, asked: int) -> str:
    allowed = 1.0 if asked else config.gpu_memory_fraction
    left = gib(max(0, use.left(allowed)))
    taken = (
        f"this GPU has {gib(use.total)} GiB"
        + ("" if asked else f", of which --gpu-memory-fraction {allowed:g} allows {gib(int(use.total * allowed))}")
        + f"; the weights take {gib(use.weights)}, the largest step ({config.token_budget} tokens, "
        f"{config.max_rows} rows) {gib(use.step)}, graphs of steps {gib(use.graphs)}, NCCL and kernels "
        f"{gib(use.outside)}, so {left} are left"
    )
    cures = "more GPUs for each group (--tp), --quantization int8, a smaller --token-budget or --max-batch"
    if asked:
        return f"the KV pool is to have {gib(asked)} GiB, but {taken}. Give a smaller --kv-memory, or {cures}"
    need = f"{BLOCKS_MIN} blocks of {config.chunk_size} tokens take {gib(BLOCKS_MIN * block_bytes)}"
    return f"there is no room for KV: {taken}, and {need}. Give a larger --gpu-memory-fraction, {cures}"


def gib(count: int) -> str:
    """Return bytes as GiB, for messages."""
    return f"{count / (1 << 30):.2f}"


if TYPE_CHECKING:
    from trunkline.worker.runner import Runner

log = structlog.get_logger()

POOL_BLOCKS: Final = 2
_CONTEXT_CHUNKS: Final = 8
"""Number of chunks in front of what is computed, as far as sequences may be so long: enough for shared reads and
merges."""
_REPORTED: Final = 20
"""Number of most likely tokens that are reported beside each token."""

_SAMPLED: Final = Sampling(temperature=1.0, seed=1)
_GREEDY: Final = Sampling(temperature=0.0)
_EVERYTHING: Final = Sampling(
    temperature=0.8,
    top_p=0.9,
    top_k=50,
    min_p=0.01,
    seed=1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    repetition_penalty=1.1,
    logit_bias={0: 0.5},
    logprobs=_REPORTED,
    min_tokens=1000,
    stop_ids=pack_int32([0]),
)


@dataclass(frozen=True)
class StepLimits:
    """The largest step that a controller sends."""

    token_budget: int
    """Tokens of a step, those of decoding rows included."""
    max_rows: int
    """Sequences that decode in a step."""
    longest: int
    """Tokens of the longest sequence."""
    chunk_size: int


def rehearsal(limits: StepLimits, epoch: int) -> Iterator[StepPlan]:
    """Yield the step plans of the rehearsal, from step 1 on. First a full batch decodes beside a prefill that uses
    the whole budget, every prompt token of which is scored; then the same rows make one more step; then come rows
    of other kinds."""
    size = limits.chunk_size
    rows = max(1, min(limits.max_rows, limits.token_budget - 1))
    # Decoding goes on for two tokens behind the context.
    context = max(0, min(_CONTEXT_CHUNKS, (limits.longest - 2) // size)) * size
    decoding = [_decoding(number, context, size, _EVERYTHING) for number in range(1, rows + 1)]
    prompts = list(_prompts(rows + 1, limits.token_budget - rows, context, limits))
    entries = [
        (join.sequence, join.prompt_len - count, count, join.prompt_len, int(index == 0))
        for index, (join, count) in enumerate(prompts)
    ]
    everyone = [join.sequence for join in decoding]
    run = [[0, rows, 0, context // size]] if rows > 1 and context else []
    yield StepPlan(
        1,
        epoch,
        joins=decoding + [join for join, _ in prompts],
        prefill=pack_int32(np.array(entries, dtype=np.int32)),
        rows=pack_int32(everyone),
        runs=pack_int32(np.array(run, dtype=np.int32)),
    )
    yield StepPlan(2, epoch, copies=pack_int32([0, 1, 0, 1]))
    number = rows + len(prompts) + 1
    for step, sampling in enumerate((_SAMPLED, _GREEDY), 3):
        join = _decoding(number, context, size, sampling)
        yield StepPlan(step, epoch, joins=[join], rows=pack_int32([number]), runs=b"")
        number += 1


def _decoding(number: int, context: int, chunk_size: int, sampling: Sampling) -> Join:
    """Return a sequence whose first output token has been drawn already; its input is that token, behind a
    context."""
    table = [0] * (context // chunk_size) + [1] * blocks_for(2, chunk_size)
    return Join(number, pack_int32([0]), context, context, pack_int32(table), sampling)


def _prompts(first: int, tokens: int, context: int, limits: StepLimits) -> Iterator[tuple[Join, int]]:
    """Yield sequences that together have this many prompt tokens to compute, none of them stored; each with its
    number of tokens."""
    while tokens > 0:
        count = min(tokens, max(1, limits.longest - 1 - context))
        length = context + count
        sampling = Sampling(temperature=0.8, top_p=0.9, seed=1, prompt_logprobs=_REPORTED)
        table = pack_int32([0] * blocks_for(length, limits.chunk_size))
        yield Join(first, pack_int32([0] * length), 0, length, table, sampling), count
        first, tokens = first + 1, tokens - count


def longest_sequence(config: WorkerConfig, max_positions: int) -> int:
    """Return the tokens of the longest sequence of a model that takes so many positions."""
    return min(filter(None, (config.max_context, max_positions)))


def measure_largest_step(
    make: Callable[[int], Runner],
    capture: Callable[[Runner], None],
    config: WorkerConfig,
    longest: int,
    block_bytes: int,
    meter: MemoryMeter,
    free_at_start: int,
) -> int:
    """Run the largest steps with hardly any pool; return how many blocks fit beside them, and beside the graphs of
    decode steps. All ranks do so at once.

    Args:
        make: Makes a runner with a pool of so many blocks.
        capture: Captures its graphs.
        longest: Tokens of the longest sequence.
        block_bytes: Bytes of a block on this rank.
        meter: Measures the device's memory.
        free_at_start: Bytes of the device that were free before this rank had taken any.

    Raises:
        WorkerConfigError: Too few blocks fit this GPU.
        WorkerError: The steps, or the blocks, do not fit what other processes leave free now.
    """
    weights = meter.held()
    meter.begin_peak()
    limits = StepLimits(config.token_budget, config.max_rows, longest, config.chunk_size)
    try:
        runner = make(POOL_BLOCKS)
        runner.pool.data.zero_()  # what is read is of no interest, but should be numbers
        for plan in rehearsal(limits, config.epoch):
            runner.execute(plan)
        peak = meter.peak()
        graphs = graph_bytes(partial(capture, runner), meter)
    except torch.OutOfMemoryError as error:
        raise WorkerError(
            f"a step of {limits.token_budget} tokens and {limits.max_rows} rows does not fit the GPU beside the "
            f"weights, which take {gib(weights)} GiB; give a smaller --token-budget or --max-batch, or more GPUs "
            f"(--tp). The error was: {words_of(error)}"
        ) from error
    del runner
    gc.collect()  # a pool that is in a cycle of references would still take its memory
    use = replace(measured(meter, free_at_start, weights, peak), graphs=graphs)
    blocks = blocks_that_fit(use, config, block_bytes)
    _log_memory(use, config, blocks * block_bytes)
    return blocks


def graph_bytes(capture: Callable[[], None], meter: MemoryMeter) -> int:
    """Return the bytes that graphs take while they are there, in torch's pools and outside."""
    meter.held()
    before = meter.total_and_free()[1]
    capture()
    meter.held()
    return max(0, before - meter.total_and_free()[1])


def _log_memory(use: MemoryUse, config: WorkerConfig, kv_bytes: int) -> None:
    fraction = config.gpu_memory_fraction
    log.info(
        "GPU memory in GiB",
        total=gib(use.total),
        fraction=fraction,
        weights=gib(use.weights),
        largest_step=gib(use.step),
        step_tokens=config.token_budget,
        step_rows=config.max_rows,
        graphs=gib(use.graphs),
        nccl_and_kernels=gib(use.outside),
        kv=gib(kv_bytes),
        free_beside_kv=gib(use.available - kv_bytes),
    )
    if not config.pool_blocks and not config.kv_memory_bytes and use.available < use.left(fraction):
        log.warning("other processes use memory of this GPU that was meant for KV", available=gib(use.available))
