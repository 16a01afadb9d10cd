"""The memory of decode steps in graphs: what their first node writes, what their last node leaves, and the table.

A graph holds addresses, so everything that a step reads or writes lies at a fixed place, with room for the largest
number of rows. Graphs of fewer rows use the fronts of the same buffers.

      table     [places] place of each row of the plan, or -1; then for each place its words
      place     newest token │ output index at step 0 │ top-k │ seed, two words │ temperature, top-p, log min-p

A sequence keeps its place while it decodes, wherever its row stands. The last node writes each row's newest token
there, and the first node of the next step reads it: ids do not leave the device. The host writes only words that
it changes (`patch`), as pairs of index and value.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref
from typing import Final, NamedTuple

import torch
from torch import Tensor

from trunkline.kernels.cuda_library import CudaLibrary, StepRowsCall
from trunkline.kernels.cuda_work import DeviceWork, Staging
from trunkline.kernels.sampling import Draws
from trunkline.kvstore.chunks import Int32Array

# Words of a place (csrc/cuda/api.h, PlaceWord).
PLACE_TOKEN: Final = 0
PLACE_OUTPUT_INDEX: Final = 1
PLACE_TOP_K: Final = 2
PLACE_SEED: Final = 3
PLACE_FACTORS: Final = 5
PLACE_WORDS: Final = 8


class StepInputs(NamedTuple):
    """What the first node of a graph writes, a row for each row of the graph."""

    ids: Tensor
    """int64 `[rows]`."""
    positions: Tensor
    """int64 `[rows]`."""
    slots: Tensor
    """int32 `[rows]`; -1: the plan has no such row, or nothing is stored."""
    draws: Draws
    """How each row draws; `limited` says nothing here."""


class StepBuffers:
    """The buffers of one rank's decode steps."""

    def __init__(
        self, library: CudaLibrary, stream: Callable[[], int], rows: int, chunk_size: int, device: torch.device
    ) -> None:
        """
        Args:
            rows: The largest number of rows, and of places.
        """
        self.rows = rows
        self.uploaded_words = 0
        """Number of words that were sent to the device so far."""
        self._library = library
        self._stream = stream
        self._chunk_size = chunk_size

        def make(size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self._table = make(rows * (1 + PLACE_WORDS), torch.int32)
        self._table[:rows] = -1
        self._changes = make(2 * len(self._table), torch.int32)
        self._wide = make(4 * rows, torch.int64)
        self._narrow = make(3 * rows, torch.int32)
        self._factors = make(3 * rows, torch.float32)
        self._staging = Staging(len(self._changes), device)

    @property
    def tokens(self) -> Tensor:
        """What the rows of the last step drew, int32 `[rows]`; -1: there was no such row."""
        return self._narrow[2 * self.rows :]

    def inputs(self, rows: int) -> StepInputs:
        """Return the inputs of a graph of so many rows."""
        ids, positions, seeds, output_index = (part[:rows] for part in self._wide.view(4, self.rows))
        slots, top_k, _ = (part[:rows] for part in self._narrow.view(3, self.rows))
        factors = self._factors[: 3 * rows].view(3, rows)
        return StepInputs(ids, positions, slots, Draws(seeds, output_index, top_k, factors, limited=False))

    def patch(self, changes: Int32Array) -> None:
        """Write words of the table, in stream order.

        Args:
            changes: int32 `[n, 2]`: index of a word, its value; no index twice.
        """
        if not len(changes):
            return
        words = self._staging.take()[: changes.size]
        words.numpy()[:] = changes.ravel()
        self._staging.send(words, self._changes)
        self.uploaded_words += changes.size
        self._library.call(
            "patch_words", self._table.data_ptr(), self._changes.data_ptr(), len(changes), self._stream()
        )

    def begin(self, rows: int, work: DeviceWork) -> None:
        """Launch the first node of a graph: derive the inputs from the plan, its step and the table."""
        self._library.call("begin_rows", byref(self._call(rows, work)), self._stream())

    def end(self, rows: int, work: DeviceWork, drawn: Tensor) -> None:
        """Launch the last node: take the drawn tokens, int64 `[rows]`; go on to the next step."""
        call = self._call(rows, work)
        call.drawn = drawn.data_ptr()
        self._library.call("end_rows", byref(call), self._stream())

    def count(self, work: DeviceWork) -> None:
        """Launch a node that lets a further buffer of the plan, of other options, go on to the next step."""
        self._library.call("add_steps", work.steps_address, 1, self._stream())

    def _call(self, rows: int, work: DeviceWork) -> StepRowsCall:
        inputs = self.inputs(rows)
        draws = inputs.draws
        return StepRowsCall(
            work=work.words_address,
            steps=work.steps_address,
            table=self._table.data_ptr(),
            ids=inputs.ids.data_ptr(),
            positions=inputs.positions.data_ptr(),
            slots=inputs.slots.data_ptr(),
            seeds=draws.seeds.data_ptr(),
            output_index=draws.output_index.data_ptr(),
            top_k=draws.top_k.data_ptr(),
            factors=draws.factors.data_ptr(),
            tokens=self.tokens.data_ptr(),
            rows=rows,
            places=self.rows,
            chunk_size=self._chunk_size,
        )
