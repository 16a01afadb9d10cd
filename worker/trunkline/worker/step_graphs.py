"""Decode steps as graphs: the whole program of a step in one launch, with plan, ids and sampler on the device.

      first node      ids, positions, slots and how rows draw, from plan, step counter and table (`cuda_steps`)
      program         what every other way of running a step runs (`trunkline.kernels.program`), op by op
      draw            a token for each row
      last node       tokens into the table and into the results; the step counter goes on

A graph is of a *bucket*: a number of rows, the least that has room for the step's. Rows beyond the step's store
nothing. Graphs hold addresses only, and what lies there may change: rows join and leave, tails go on in other
blocks, plans are patched. So before a replay the plan's changed words are sent, in steady decoding none. Where an
address changes after all (a plan larger than any that was reserved for), all graphs are captured again.

All graphs share one pool of memory, since only one runs at a time. The largest is captured first, so that the
others find room in what it took.

A step whose rows need more than the drawn token (beams, grammars, penalties, reported probabilities) is replayed,
too: its logits are there, the ordinary selection goes on from them, and what was drawn is not used.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import structlog
import torch
from torch import Tensor

from trunkline.kernels.adapters import AdapterRows
from trunkline.kernels.cuda import CudaKernels
from trunkline.kernels.cuda_steps import StepBuffers
from trunkline.kernels.cuda_work import DeviceWork
from trunkline.kernels.experts import Experts
from trunkline.kernels.live_plan import AnyDecodePlan, LiveDecodePlan
from trunkline.kernels.plan import PrefillPlan, WritePlan
from trunkline.kernels.program import Attend, Program
from trunkline.kernels.reference_sampling import largest_sums, token_keys
from trunkline.kernels.sampling import Draws
from trunkline.kvstore.chunks import Int32Array, pack_int32
from trunkline.worker.batch.batch import ForwardBatch
from trunkline.worker.batch.decode_planner import LivePlanner
from trunkline.worker.batch.row_places import RowPlaces
from trunkline.worker.batch.sequences import BatchSequence
from trunkline.worker.messages import Join, Sampling
from trunkline.worker.model.decoder import Decoder
from trunkline.worker.tensor_parallel import TensorParallel

RING: Final = 4
"""Number of steps whose tokens have room on the host at once."""
RESERVED_WORDS_MAX: Final = 1 << 22
"""Largest room for the plan's words that is reserved from the start (16 MiB). Plans beyond make graphs be captured
again."""

log = structlog.get_logger()


def buckets(rows_max: int) -> list[int]:
    """Return the numbers of rows that there are graphs for: 1, 2, 4, 8, 16, then every eighth, up to one that has
    room for the largest step."""
    sizes = [1, 2, 4, 8, 16]
    while sizes[-1] < rows_max:
        sizes.append(sizes[-1] + 8)
    return sizes[: next(i for i, size in enumerate(sizes) if size >= rows_max) + 1]


class Replay(Protocol):
    """A captured graph."""

    def replay(self) -> None: ...


class GraphMaker(Protocol):
    """Captures graphs; all that one captures share their memory."""

    def capture(self, run: Callable[[], None]) -> Replay:
        """Return what `run` launches, as a graph. What is launched is not executed."""
        ...

    def forget(self) -> None:
        """Note that none of the graphs is used any more, so that the next ones have memory of their own."""
        ...


class CudaGraphs:
    """Graphs of the current CUDA device."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # One for all captures: cuBLAS keeps a workspace for each stream that it is captured on.
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(self, run: Callable[[], None]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        # Not `torch.cuda.graph`: it empties torch's cache each time, and what `run` raises is lost behind what
        # ends the capture.
        with torch.cuda.stream(self._stream):
            # Other threads copy KV meanwhile: only this one's calls are held to the rules of a capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph

    def forget(self) -> None:
        torch.cuda.synchronize()
        self._pool = torch.cuda.graph_pool_handle()


def why_not(program: Program, group: TensorParallel) -> str:
    """Return why steps of this program cannot be graphs; empty if they can."""
    if group.backend not in ("none", "nccl"):
        return f"sums over ranks go through {group.backend}, which no graph holds"
    if any(isinstance(op, Experts) and op.stack is None for op in program.ops):
        return (
            "the host waits to hear how many tokens each expert has; products are grouped on the device for "
            "models in bfloat16 and float16, with such weights, fp8 or int8, without biases"
        )
    return ""


_NO_NUMBERS: Final = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True)
class _CapturedBatch:
    """What a program reads of a step in a graph (`op_by_op.StepBatch`)."""

    ids: Tensor
    positions: Tensor
    num_rows: int
    write: WritePlan
    decode: AnyDecodePlan
    numbers: tuple[Int32Array, Int32Array] = (_NO_NUMBERS, _NO_NUMBERS)
    """Empty: the tokens are on the device."""
    prefill: PrefillPlan | None = None
    adapters: AdapterRows | None = None
    state_rows: Tensor | None = None

    @property
    def logits_rows(self) -> int:
        return self.num_rows


@dataclass(frozen=True)
class ReplayedStep:
    """A step that a graph runs: its logits, and the tokens that it draws."""

    logits: Tensor
    """float32 `[rows, columns of this rank]`. Valid until the next step is launched."""
    tokens: Tensor
    """int32 `[rows]`, in host memory; valid when `is_done`."""
    copied: torch.cuda.Event | None
    """The event behind the copy of the tokens; None: they are there already."""

    @property
    def is_done(self) -> bool:
        """Whether the tokens are in host memory."""
        return self.copied is None or bool(self.copied.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait until they are."""
        if self.copied is not None:
            self.copied.synchronize()


class _TokenRing:
    """Host memory for the tokens of a few steps, pinned where there is a GPU."""

    def __init__(self, rows: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._tokens = torch.zeros(RING, rows, dtype=torch.int32, pin_memory=on_gpu)
        self._copied = [torch.cuda.Event() for _ in range(RING)] if on_gpu else []  # type: ignore[no-untyped-call]
        self._turn = 0

    def send(self, drawn: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """Enqueue the copy of a step's tokens; return where they will be, and the event behind the copy."""
        self._turn = (self._turn + 1) % RING
        tokens = self._tokens[self._turn, : len(drawn)]
        tokens.copy_(drawn, non_blocking=True)
        if not self._copied:
            return tokens, None
        self._copied[self._turn].record()
        return tokens, self._copied[self._turn]


class StepGraphs:
    """The graphs of one rank's decode steps. Not thread-safe; call under `torch.inference_mode`."""

    def __init__(
        self, decoder: Decoder, kernels: CudaKernels, group: TensorParallel, maker: GraphMaker, rows_max: int
    ) -> None:
        """
        Args:
            rows_max: The largest number of rows of a step.
        """
        self._decoder = decoder
        self._kernels = kernels
        self._group = group
        self._maker = maker
        self.buckets = buckets(rows_max)
        pool = decoder.pool
        self._buffers: StepBuffers = kernels.step_buffers(self.buckets[-1], pool)
        self._places = RowPlaces(self.buckets[-1])
        # Each kind of attention and the number of its layers; plans are cut for each kind.
        specs = [op.spec for op in decoder.program.ops if isinstance(op, Attend)]
        distinct = {id(spec): spec for spec in specs}.values()
        self._layers = [(spec, sum(other is spec for other in specs)) for spec in distinct]
        self._graphs: dict[int, Replay] = {}
        self._generation = (-1, -1)
        self.captures = 0
        """Number of graphs captured so far."""
        device, start = pool.data.device, decoder.shard.vocab_start
        # Of the latest replay, whichever graph it is of: logits of each graph would stay allocated in their pool.
        self._logits = torch.empty(self.buckets[-1], decoder.program.logits.width, device=device)
        self._keys = token_keys(torch.arange(start, start + decoder.program.logits.width, device=device))
        self._sampling = kernels.sampling()
        self._ring = _TokenRing(self.buckets[-1], device)

    @property
    def uploaded_words(self) -> int:
        """Number of int32 words of plans and tables that were sent to the device so far."""
        return self._buffers.uploaded_words + self._kernels.uploaded_words

    @property
    def _addresses(self) -> tuple[int, int]:
        """Numbers that change when an address changes that graphs hold."""
        return self._kernels.graph_generation, self._sampling.graph_generation

    def capture_all(self, longest: int) -> None:
        """Capture a graph for each bucket, the largest first.

        Args:
            longest: Tokens of the longest sequence, for the room that plans get.
        """
        plan = self._stand_in()
        for spec, _ in self._layers:
            work = self._kernels.prepare_replay(plan, self._decoder.pool, spec)
            work.reserve(_words(self.buckets[-1], longest, self._decoder.pool.chunk_size))
        for rows in reversed(self.buckets):
            # Once as it is: what CUDA and cuBLAS load at the first use must not be loaded during a capture.
            works = list(self._prepare(plan))
            self._step(rows, plan, works)()
            for work in works:
                work.replayed()
            self._capture(rows, plan)

    def has_room(self, rows: int) -> bool:
        """Return whether there is a graph for a step of so many rows."""
        return 0 < rows <= self.buckets[-1]

    def forget_tokens(self) -> None:
        """Note that rows got tokens which no graph drew."""
        self._places.forget_tokens()

    def launch(self, batch: ForwardBatch) -> ReplayedStep:
        """Launch a step of decode rows; nothing waits for it."""
        plan = batch.decode
        assert isinstance(plan, LiveDecodePlan)
        changes = self._places.changes(batch.samples, plan.steps, batch.guesses, changed=batch.samples_changed)
        self._buffers.patch(changes)
        works = self._prepare(plan)
        graph = self._graph(batch.num_rows, plan)
        graph.replay()
        for work, layers in works.items():
            self._count(plan, work, layers)
            work.replayed()
        tokens = self._buffers.tokens[: batch.num_rows]
        return ReplayedStep(self._logits[: batch.num_rows], *self._ring.send(tokens))

    def _count(self, plan: LiveDecodePlan, work: DeviceWork, layers: int) -> None:
        """Count what the attention of so many layers reads in a replay."""
        assert work.resident is not None
        tokens = layers * (work.resident.tokens + plan.steps * plan.num_rows)
        counters = self._kernels.counters
        counters.decode_tokens_read += tokens
        counters.decode_bytes_read += tokens * self._decoder.pool.format.layer_token_bytes

    def _prepare(self, plan: LiveDecodePlan) -> dict[DeviceWork, int]:
        """Bring the plan to the device; return its buffers there and the number of layers that read each."""
        works: dict[DeviceWork, int] = {}
        for spec, layers in self._layers:
            work = self._kernels.prepare_replay(plan, self._decoder.pool, spec)
            works[work] = works.get(work, 0) + layers
        return works

    def _graph(self, rows: int, plan: LiveDecodePlan) -> Replay:
        """Return the graph for so many rows, of a plan that is on the device."""
        if self._generation != self._addresses and self._graphs:
            log.warning("graphs are captured again: a plan has outgrown the memory that they hold", rows=rows)
            self._graphs.clear()
            self._maker.forget()
        bucket = next(size for size in self.buckets if size >= rows)
        return self._graphs.get(bucket) or self._capture(bucket, plan)

    def _capture(self, rows: int, plan: LiveDecodePlan) -> Replay:
        """Capture the graph of a bucket.

        Args:
            plan: Any of at most so many rows. Its step is on the device, or will be.
        """
        works = list(self._prepare(plan))
        run = self._step(rows, plan, works)
        self._generation = self._addresses
        graph = self._graphs[rows] = self._maker.capture(run)
        self.captures += 1
        return graph

    def _step(self, rows: int, plan: LiveDecodePlan, works: list[DeviceWork]) -> Callable[[], None]:
        """Return what launches a step of a bucket."""
        inputs, decoder = self._buffers.inputs(rows), self._decoder
        write = WritePlan(decoder.pool.chunk_size, np.zeros(rows, dtype=np.int32))
        write.state = inputs.slots
        batch = _CapturedBatch(inputs.ids, inputs.positions, rows, write, plan)

        def run() -> None:
            self._buffers.begin(rows, works[0])
            decoder.runner.begin(batch)
            decoder.runner.run(0, len(decoder.program.ops))
            logits = decoder.runner.value(decoder.program.logits)
            self._logits[:rows].copy_(logits)
            self._buffers.end(rows, works[0], self._draw(logits, inputs.draws))
            for work in works[1:]:
                self._buffers.count(work)

        return run

    def _draw(self, logits: Tensor, draws: Draws) -> Tensor:
        """Draw a token for each row, the same on every rank: int64 `[rows]`."""
        if self._group.size == 1:
            # Each row's limits are in its draws; where there are none they cost nothing.
            vocabulary = logits[:, : self._decoder.shard.config.vocab_size]
            return self._sampling.draw(vocabulary, draws._replace(limited=True))
        sums, columns = largest_sums(logits, draws, self._keys)
        # float64 holds a token exactly, too.
        pair = torch.stack([sums, (columns + self._decoder.shard.vocab_start).double()])
        return first_largest(self._group.all_gather(pair))

    def _stand_in(self) -> LiveDecodePlan:
        """Return a plan of one row in block 0, which is never executed."""
        rows = LivePlanner(self._decoder.pool.chunk_size)
        join = Join(0, pack_int32([0]), 0, 1, pack_int32([0]), Sampling(temperature=0.0))
        rows.step([BatchSequence(join)], np.zeros((0, 4), dtype=np.int32), None)
        return rows.plan


def capture_steps(
    decoder: Decoder,
    kernels: CudaKernels,
    group: TensorParallel,
    graphs: Callable[[], GraphMaker],
    rows_max: int,
    longest: int,
) -> StepGraphs | None:
    """Return the graphs of a decoder's steps; None, with a warning, if its steps cannot be graphs.

    Args:
        graphs: Makes what captures them.
        rows_max: As `StepGraphs`.
        longest: As `StepGraphs.capture_all`.
    """
    if reason := why_not(decoder.program, group):
        log.warning("steps run op by op, which takes the host longer", reason=reason)
        return None
    made = StepGraphs(decoder, kernels, group, graphs(), rows_max)
    made.capture_all(longest)
    kernels.counters.reset()
    return made


def first_largest(pairs: Tensor) -> Tensor:
    """Return the tokens of the ranks with the largest sums, on a tie those of the first.

    Args:
        pairs: float64 `[ranks, 2, rows]`: sums, and the tokens that have them.
    """
    sums, tokens = pairs.unbind(1)
    ranks = torch.arange(len(pairs), device=pairs.device)[:, None]
    owner = torch.where(sums == sums.amax(dim=0), ranks, len(pairs)).amin(dim=0)
    return tokens.gather(0, owner[None]).squeeze(0).long()


def _words(rows: int, longest: int, chunk_size: int) -> int:
    """Return the words of the largest plan: items of as many rows, all of the longest context, and as much again
    for regions that are free (`live_pieces.cc`)."""
    segments = -(-longest // chunk_size) + 1
    region = max(16, 1 << (segments + segments // 8 - 1).bit_length())
    return min(2 * 8 * rows * region, RESERVED_WORDS_MAX)
