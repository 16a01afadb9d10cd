"""Tokens on their way past the coroutines: while the reader of a stream waits, its *taker* may have them.

    ControllerLink ──push──► Stream.offer ──► Taker.take   a stream's tokens become bytes
          ├─ then, for all streams ─────────► Taker.write  the bytes leave
          └─ then, for all streams ─────────► Taker.count  what no client waits for

A step brings tokens for many streams in one message. Their writes follow each other without a pause: a reader that
goes to sleep between two of them must be woken, which takes longer than a write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from trunkline.router.streams.generation import Delta, Generation, TextAssembler
    from trunkline.router.streams.streams import Stream


class Outlet(Protocol):
    """Where the parts of an answer's body go without a coroutine."""

    @property
    def is_open(self) -> bool:
        """Whether parts can be written now; not while the client reads too slowly, and once it has left."""

    def write(self, part: bytes) -> None:
        """Write a part, if the outlet is open."""


class Taker(Protocol):
    """Takes tokens in place of a stream's reader."""

    def take(self, tokens: list[int]) -> bool:
        """Make bytes of all tokens that have arrived since the last ones. Return whether that was possible; if
        not, the reader gets them."""

    def write(self) -> None:
        """Write the bytes of the tokens taken last. Raises nothing: other streams write next."""

    def count(self, now: float) -> None:
        """Count the tokens taken last. `now`: loop time in seconds."""


class PlainWriter:
    """Writes plain tokens of a generation's only choice to an outlet (a `Taker`)."""

    __slots__ = ("_delta", "_encode", "_generation", "_outlet", "_part", "_text")

    def __init__(
        self, generation: Generation, text: TextAssembler, outlet: Outlet, encode: Callable[[Delta], bytes]
    ) -> None:
        """`encode`: returns the bytes for a delta; b"": there is nothing to write."""
        self._generation = generation
        self._text = text
        self._outlet = outlet
        self._encode = encode
        self._delta: Delta | None = None
        self._part = b""

    def take(self, tokens: list[int]) -> bool:
        """Take tokens if the outlet is open and they end nothing."""
        delta = self._delta = self._text.plain(tokens) if self._outlet.is_open else None
        if delta is None:
            return False
        self._part = self._encode(delta)
        return True

    def write(self) -> None:
        """Write the bytes of the tokens taken last."""
        if self._part:
            try:
                self._outlet.write(self._part)
            except Exception as error:  # noqa: BLE001 (raised by the reader)
                self._generation.fail(error)

    def count(self, now: float) -> None:
        """Count the tokens taken last."""
        if self._delta is not None:
            self._generation.taken(self._delta, now)


def pass_to_takers(streams: Iterable[Stream], clock: Callable[[], float]) -> None:
    """Let the tokens leave that the takers of streams take.

    Args:
        clock: the loop's time, in seconds, when all have left.
    """
    taken: list[Taker] = []
    for stream in streams:
        stream.offer(taken)
    for taker in taken:
        taker.write()
    now = clock()
    for taker in taken:
        taker.count(now)
