"""Decode plans on the device: where their words lie, and how they follow the plans on the host.

A plan made from nothing is copied whole into a buffer (`cuda_work.DeviceWork`) where another one was. A live plan
has a buffer for each set of options, and is copied once; later only the words that have changed are sent, as pairs
of index and value that one launch writes, and nothing at all where rows only grow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypedDict

import torch

from trunkline.kernels.cuda_library import CudaLibrary
from trunkline.kernels.cuda_work import CudaDecodeWork, DeviceWork, WorkKey, refuse_capture
from trunkline.kernels.live_plan import AnyDecodePlan, LiveDecodePlan
from trunkline.kernels.ops import AttentionSpec, KernelCounters
from trunkline.kernels.plan import DecodePlan, WorkOptions, plan_decode_work

PIECE_TOKENS_MIN: Final = {16: 256, 8: 128}
"""Fewest tokens of a piece that a cut makes, by the bits of KV's numbers. Each further partial result of a row
takes 0.4 µs, which the planner does not count. With 16 bits an H200 did dealt plans of 256 within 1 % of those of
128, or faster; in 8 bits, where tiles take longer, those of 128 were faster."""
PIECES_PER_WORKER: Final = 8
"""The finest cuts that are tried, in units for each thread block."""
UNIT_NS: Final = {16: (3700, 12000), 8: (4300, 16200)}
"""The fixed part of a narrow unit (up to 16 query vectors) and of a wide one (up to 64), besides its tiles, by the
bits of KV's numbers: barriers, and reads of the plan and of queries that wait for each other, four times as many
for 64 vectors as for 16. Fitted, as `TILE_NS`, to what an H200 took (`benchmarks/gpu_unit_fit.py`)."""
TIMED_TILE: Final = 64 * 128
"""Tokens times head size of the tiles that `TILE_NS` is about. Tiles of another size are taken to need as long for
each element."""
TILE_NS: Final = {16: (2100, 1700), 8: (2600, 4700)}
"""What a tile takes in a narrow unit and in a wide one, by the bits of KV's numbers."""
PARTIAL_BYTES_PER_NS: Final = 4000
"""How many bytes of partial results, written and read, make merging a ns longer: an H200 merged 17 partial results
of each of 32 rows and 32 heads (18 MB) in 7.8 µs, and hardly any in 3.5."""
NARROW_LAYOUT: Final = False
"""Whether narrow pieces have a layout of shared memory of their own, with further stages, where these fit. On an
H200 one layout for all pieces took 1 to 5 % less, in each of four cells with head size 128, in two visits."""
DEALT: Final = True
"""Whether plans say which thread block does which pieces, longest first; else thread blocks take turns."""


class UnitTimes(TypedDict, total=False):
    """The fields of `WorkOptions` that say what units take."""

    narrow_unit_ns: int
    wide_unit_ns: int
    tile_tokens: int
    narrow_tile_ns: int
    wide_tile_ns: int
    partial_bytes_per_ns: int


class Units(UnitTimes):
    """And how short they may be."""

    piece_tokens_min: int


def unit_times(tile_tokens: int, head_dim: int, *, in_bytes: bool = False) -> Units:
    """Return what units of work take on a GPU, and how short they may be.

    Args:
        tile_tokens: Tokens of a tile, at most those of a block.
        in_bytes: Whether KV is in 8 bits.
    """
    size = tile_tokens * head_dim
    bits = 8 if in_bytes else 16
    narrow, wide = TILE_NS[bits]
    narrow_unit, wide_unit = UNIT_NS[bits]
    return {
        "piece_tokens_min": PIECE_TOKENS_MIN[bits],
        "narrow_unit_ns": narrow_unit,
        "wide_unit_ns": wide_unit,
        "tile_tokens": tile_tokens,
        "narrow_tile_ns": max(1, narrow * size // TIMED_TILE),
        "wide_tile_ns": max(1, wide * size // TIMED_TILE),
        "partial_bytes_per_ns": PARTIAL_BYTES_PER_NS,
    }


class DecodePlans:
    """The decode plans of one `CudaKernels`."""

    def __init__(
        self,
        library: CudaLibrary,
        counters: KernelCounters,
        stream: Callable[[], int],
        is_capturing: Callable[[], bool],
    ) -> None:
        self._library = library
        self._counters = counters
        self._stream = stream
        self._is_capturing = is_capturing
        self._options: dict[tuple[WorkKey, int, int], WorkOptions] = {}
        self._devices: dict[WorkOptions | None, DeviceWork] = {}

    @property
    def generation(self) -> int:
        """Number of reallocations of buffers: graphs captured before the last one are stale."""
        return sum(device.generation for device in self._devices.values())

    @property
    def uploaded_words(self) -> int:
        """Number of int32 words that were sent to the device so far."""
        return sum(device.uploaded_words for device in self._devices.values())

    def work(self, plan: AnyDecodePlan, key: WorkKey, spec: AttentionSpec, row_bytes: int) -> CudaDecodeWork:
        """Return the words of a plan and what the host knows of them.

        Args:
            row_bytes: Bytes of one token's key, or value, of one head.
        """
        options = self._options.get((key, row_bytes, plan.chunk_size))
        if options is None:
            options = self._options[key, row_bytes, plan.chunk_size] = WorkOptions(
                kv_heads=spec.kv_heads,
                group=spec.queries_per_kv,
                kv_token_bytes=2 * row_bytes,
                partial_bytes=2 * 4 * (spec.head_dim + 2),
                tile_rows=max(key.tile_rows, spec.queries_per_kv),
                workers=key.grid,
                pieces_per_worker=PIECES_PER_WORKER,
                invariant_tokens=key.invariant_tokens,
                share=key.share,
                dealt=DEALT,
                narrow_vectors=key.narrow_rows,
                **unit_times(
                    min(key.tile_tokens, plan.chunk_size), spec.head_dim, in_bytes=row_bytes < 2 * spec.head_dim
                ),
            )
        if isinstance(plan, LiveDecodePlan):
            live = plan.work(options, self)
            work = live.state
            if not isinstance(work, CudaDecodeWork) or work.made != live.made:
                live.state = work = CudaDecodeWork(options, live.words, live.is_shifted, live)
            work.last_block = live.last_block
            return work
        work = plan.state
        if not isinstance(work, CudaDecodeWork) or work.options is not options:
            plan.state = work = CudaDecodeWork(options, plan_decode_work(plan, options), bool(plan.shifts.any()))
            work.last_block = int(plan.block.max(initial=-1))
        return work

    def place(
        self, plan: AnyDecodePlan, work: CudaDecodeWork, device: torch.device, reserve: Callable[[int], object]
    ) -> DeviceWork:
        """Bring the plan and its step to the device, if they are not there ("lazy copy", ChunkAttention §3.3).

        Args:
            reserve: Makes room for so many partial results.

        Raises:
            CudaError: A graph is being captured, and the plan or its step is not on the device.
        """
        if isinstance(plan, DecodePlan) and plan.steps > plan.steps_left:
            raise ValueError(f"decode plan is valid for {plan.steps_left} steps, not for {plan.steps}")
        # Plans made from nothing take turns in one buffer.
        owner = None if work.live is None else work.options
        at = self._devices.get(owner)
        if at is None:
            at = self._devices[owner] = DeviceWork(device)
        if at.resident is work and at.steps == plan.steps and at.is_current:
            return at
        # An upload or a count in the graph would be repeated by every replay.
        refuse_capture(self._is_capturing(), "the plan or its step is not on the device yet")
        if at.resident is not work:
            # Before any capture, and also where this plan needs none: a captured step always merges.
            reserve(work.partials)
            self._counters.decode_plans += 1
        at.follow(work, plan.steps, self._library, self._stream())
        return at
