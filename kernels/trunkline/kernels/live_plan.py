"""The decode plan that goes on from step to step: it is told what changed, and plans that (`live_plan.h`).

`plan.DecodePlan` is made from nothing and defines what a plan computes; the reference kernels execute it. A
`LiveDecodePlan` is told of rows that join, leave, grow or are cut, as a few int32 words; the native planner
patches its buffer. Sharing follows from the block tables: no runs are given, and rows may be in any order.

The plan keeps no state of rows by itself. Each set of options (layers may differ, and so may kernels) has a native
planner, which follows the changes of each step, or is given all rows where it has missed some.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
import tvm_ffi

from trunkline.kernels.native import NativeLibraryError, library
from trunkline.kernels.plan import DecodePlan, WorkOptions, option_values
from trunkline.kvstore.chunks import Int32Array

# Kinds of changes (csrc/common/live_plan.h, LiveChange).
ROWS: Final = 1
ROW: Final = 2
BLOCKS: Final = 3
LENGTH: Final = 4
LIKE: Final = 5

# Words of the header (csrc/common/work_plan.h, WorkHeader).
WORK_SHIFTED: Final = 21
WORK_LAST_BLOCK: Final = 22
WORK_MADE: Final = 23


class LiveWork:
    """The pieces of a live plan for certain options: a native planner and its buffer."""

    def __init__(self, options: WorkOptions, chunk_size: int, keep_changes: bool) -> None:
        """
        Args:
            keep_changes: Whether `take_changes` tells which words were written.

        Raises:
            NativeLibraryError: The library is not installed.
        """
        module: Any = library()
        if module is None:
            raise NativeLibraryError("the compiled CPU kernels, which hold the planner, are not installed")
        self.handle: int = module.live_plan_new([*map(int, option_values(options)), chunk_size, int(keep_changes)])
        weakref.finalize(self, module.live_plan_delete, self.handle)
        self._apply, self._words, self._changes = (
            module.live_plan_apply,
            module.live_plan_words,
            module.live_plan_changes,
        )
        self.version = -1
        """The version of the plan that the words are of."""
        self.generation = 0
        """Number of times that the words were moved to another place."""
        self.words = torch.empty(0, dtype=torch.int32)
        """int32 words, the buffer that `WorkView` reads. Later changes are written into it."""
        self.array = self.words.numpy()
        """The words as an array, over the same memory."""
        self.state: object = None
        """The data that kernels derive from the words; private to them."""
        self.growth: Int32Array = np.zeros(1, dtype=np.int32)
        """The changes of `LiveDecodePlan.grow`: the number of the step, and nothing else."""

    def apply(self, changes: Int32Array) -> None:
        """Carry out changes.

        Raises:
            ValueError: They contradict the plan, which is unusable from then on.
        """
        self.take_words(self._apply(self.handle, tvm_ffi.from_dlpack(changes)))

    def take_words(self, generation: int) -> None:
        """Take the words from where they are now, if that is another place."""
        if generation != self.generation:
            self.generation = generation
            self.words = torch.from_numpy(np.from_dlpack(self._words(self.handle)))
            self.array = self.words.numpy()

    def take_changes(self) -> Int32Array:
        """Return index and value, int32 `[n, 2]`, of each word that was written since the last call, or since the
        words were moved."""
        changes: Int32Array = np.asarray(np.from_dlpack(self._changes(self.handle)), dtype=np.int32).reshape(-1, 2)
        return changes

    @property
    def made(self) -> int:
        """Number of times that the pieces were made: with every change that is more than growth."""
        return int(self.array[WORK_MADE])

    @property
    def is_shifted(self) -> bool:
        return bool(self.array[WORK_SHIFTED])

    @property
    def last_block(self) -> int:
        """A bound of the blocks that the plan reads."""
        return int(self.array[WORK_LAST_BLOCK])


class LiveDecodePlan:
    """One query per row against its whole context, from step to step."""

    def __init__(
        self, chunk_size: int, whole: Callable[[], Int32Array], rebuilt: Callable[[], DecodePlan]
    ) -> None:
        """Make a plan of no rows.

        Args:
            whole: Returns the changes that make a new plan what this one is now.
            rebuilt: Makes the plan of the present rows from nothing.
        """
        self.chunk_size = chunk_size
        self.steps = 0
        """Number of the step, from 1 on: tails grow with it."""
        self.num_rows = 0
        self._whole = whole
        self._rebuild = rebuilt
        self._rebuilt: tuple[int, DecodePlan] | None = None
        self._changes: Int32Array = np.zeros(0, dtype=np.int32)
        self._works: dict[tuple[WorkOptions, object], LiveWork] = {}

    def go_on(self, changes: list[int], num_rows: int) -> None:
        """Go on to the next step: each row sees one token more, except for what the changes say."""
        self.steps += 1
        self.num_rows = num_rows
        self._changes = np.array([self.steps, *changes], dtype=np.int32)

    def grow(self, work: LiveWork) -> None:
        """Go on to a step that changes nothing. These pieces, which must be at the present one, are brought there
        by the library, together with what it computes (`CpuProgram.go_on`)."""
        self.steps += 1
        self._changes = work.growth
        work.growth[0] = work.version = self.steps

    def work(self, options: WorkOptions, user: object = None) -> LiveWork:
        """Return the pieces at the present step.

        Args:
            user: Who takes the changes of its own pieces (`LiveWork.take_changes`); None: they are not kept.

        Raises:
            ValueError: The changes contradict the plan.
        """
        key = (options, user)
        work = self._works.get(key)
        if work is not None and work.version == self.steps:
            return work
        if work is not None and work.version == self.steps - 1:
            work.apply(self._changes)
        else:
            work = self._works[key] = LiveWork(options, self.chunk_size, user is not None)
            work.apply(self._whole())
        work.version = self.steps
        return work

    def rebuilt(self) -> DecodePlan:
        """Return the plan of the present step made from nothing, for kernels that execute such plans only."""
        if self._rebuilt is None or self._rebuilt[0] != self.steps:
            self._rebuilt = (self.steps, self._rebuild())
        return self._rebuilt[1]


AnyDecodePlan = DecodePlan | LiveDecodePlan
