"""The memory of a program's buffers and tokens on a CPU. It stays, and grows in powers of two, so that steady
steps allocate nothing and the library's pointers stay right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from trunkline.kernels.program import Buffer, Rows
from trunkline.kvstore.chunks import Int32Array

ROWS_MIN: Final = 16
"""Rows that every buffer has room for; then powers of two."""
LOGITS_KEPT: Final = 256
"""Rows of logits whose memory is kept: a step that scores a prompt may need many more, once."""


class TokenMemory(NamedTuple):
    """A step's tokens in memory that stays: ids, int32, positions, int64, and slots for their KV, int32."""

    number: int
    memory: tuple[Tensor, ...]
    views: tuple[Tensor, ...]
    """The first `number` of `memory`."""
    arrays: tuple[NDArray[Any], ...]
    """The same, to be written."""
    ids: memoryview
    """The ids once more, to be read and written without NumPy, whose code is not in the caches behind a step."""

    @classmethod
    def of(cls, capacity: int, number: int = 0) -> TokenMemory:
        """Return new memory for up to `capacity` tokens."""
        types = (torch.int32, torch.int64, torch.int32)
        memory = tuple(torch.empty(capacity, dtype=own) for own in types)
        return cls(0, memory, (), (), memoryview(b"")).part(number)

    def part(self, number: int) -> TokenMemory:
        """Return the same memory with another number of tokens in it."""
        views = tuple(own[:number] for own in self.memory)
        arrays = tuple(own.numpy() for own in views)
        return TokenMemory(number, self.memory, views, arrays, arrays[0].data)


class ProgramMemory:
    """Where the buffers are: memory that stays, and grows in powers of two."""

    def __init__(self, buffers: tuple[Buffer, ...], bind: Callable[[int, Tensor], None]) -> None:
        """
        Args:
            bind: tells the library where a buffer is, by its index.
        """
        self.rows = dict.fromkeys(Rows, 0)
        self._buffers, self._bind = buffers, bind
        self._of: dict[Buffer, Tensor] = {}
        self._values: dict[Buffer, Tensor] = {}
        """What `value` returns, of buffers that were asked for with the present rows."""
        self._capacity = dict.fromkeys(Rows, 0)
        self._tokens = TokenMemory.of(0)

    def take(self, rows: dict[Rows, int]) -> None:
        """Make room for a step's rows."""
        if rows == self.rows:
            return
        self.rows = rows
        self._values.clear()
        for kind, count in rows.items():
            capacity = self._capacity[kind]
            is_too_large = kind is Rows.LOGITS and capacity > LOGITS_KEPT >= count
            if count <= capacity and capacity and not is_too_large:
                continue
            capacity = self._capacity[kind] = max(ROWS_MIN, 1 << (count - 1).bit_length() if count else 0)
            for index, buffer in enumerate(self._buffers):
                if buffer.rows is kind:
                    memory = self._of[buffer] = torch.empty(capacity, buffer.width, dtype=buffer.dtype)
                    self._bind(index, memory)

    def tokens(self, ids: Int32Array, positions: Int32Array, slots: Int32Array) -> TokenMemory:
        """Return the tokens in memory that stays: the same object as long as their number does.

        Raises:
            ValueError: ids, positions and slots differ in number.
        """
        if not len(ids) == len(positions) == len(slots):
            raise ValueError("ids, positions and slots must be one per token")
        tokens = self._tokens
        if len(ids) != tokens.number:
            is_roomy = len(ids) <= len(tokens.memory[0])
            tokens = tokens.part(len(ids)) if is_roomy else TokenMemory.of(self._capacity[Rows.TOKENS], len(ids))
            self._tokens = tokens
        for array, given in zip(tokens.arrays, (ids, positions, slots), strict=True):
            array[:] = given
        return tokens

    def value(self, buffer: Buffer) -> Tensor:
        value = self._values.get(buffer)
        if value is None:
            value = self._values[buffer] = self._of[buffer][: self.rows[buffer.rows]]
        return value

    def addresses(self) -> list[int]:
        return [self._of[buffer].data_ptr() for buffer in self._buffers]
