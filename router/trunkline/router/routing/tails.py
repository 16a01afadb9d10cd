"""The open tails of prompts: the tokens behind a prompt's last full chunk, and which controller has computed them.

      conversation, chunks of 64 tokens

      turn 1   ├─ 23 ┤                              tail below the root: 23 tokens
      turn 2   ├─ 23 ┼ answer ┼ 9 ┤                 finds it: its tokens begin with that tail
      turn 3   ├──────── chunk ────────┼─ 12 ┤      tail below the chunk: 12 tokens

Controllers publish full chunks only, but they keep the last, open chunk of a request, too, and the next turn goes
on with it (`RadixTree.best_partial`). So a router remembers the tails of the prompts that it has sent. Without
them, a conversation that is shorter than a chunk would begin anew wherever the load is lowest. Pure.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from typing import Final, NamedTuple

TAILS_BYTES_MAX: Final = 16 << 20
"""Memory that tails may take, about."""
TAIL_SECONDS: Final = 600.0
"""Seconds for which a tail is remembered without use. Controllers do not tell when they evict one."""
_ENTRY_BYTES: Final = 400
"""Memory that an entry takes besides its tokens, about."""


class Tail(NamedTuple):
    """An open tail."""

    parent: bytes
    """Name of the full chunk before the tail, or of the root of the prompt's chunks."""
    tokens: bytes
    """int32 ids of the tail's tokens, fewer than a chunk has."""


class _Known(NamedTuple):
    controller: str
    at: float


class Tails:
    """The open tails that controllers have computed; a bounded number, the most recently used ones."""

    def __init__(self, bytes_max: int = TAILS_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._known: OrderedDict[Tail, _Known] = OrderedDict()
        self._below: dict[bytes, list[bytes]] = {}
        """The tokens of the tails below each parent, ascending."""
        self._expected: dict[int, tuple[Tail, str]] = {}
        """The tails of requests that have not ended, by ticket, and their controllers' names."""
        self.bytes = 0
        """Memory that the tails take, about."""

    def __len__(self) -> int:
        return len(self._known)

    def expect(self, ticket: int, tail: Tail, controller: str) -> None:
        """Note that a controller was sent a prompt that ends with a tail."""
        if tail.tokens:
            self._expected[ticket] = tail, controller

    def ended(self, ticket: int, now: float, *, is_kept: bool) -> None:
        """Note that a request has ended. Only then does its controller keep the tail for others.

        Args:
            is_kept: whether the controller has computed the prompt and is still there.
        """
        expected = self._expected.pop(ticket, None)
        if expected is None or not is_kept:
            return
        tail, controller = expected
        if tail in self._known:
            self._forget(tail)
        keys = self._below.setdefault(tail.parent, [])
        keys.insert(bisect_left(keys, tail.tokens), tail.tokens)
        self._known[tail] = _Known(controller, now)
        self.bytes += _size(tail)
        while self._known and (self.bytes > self._bytes_max or self._oldest.at + TAIL_SECONDS < now):
            self._forget(next(iter(self._known)))

    def find(self, parent: bytes, tokens: bytes, now: float) -> tuple[str, int]:
        """Return the name of the controller that has the longest tail with which `tokens` begin, and the number of
        the tail's tokens; ("", 0): none is known.

        The largest key that is not larger than `tokens` is the longest prefix; or all prefixes are also prefixes
        of what the two have in common.
        """
        keys = self._below.get(parent, ())
        while keys and tokens:
            at = bisect_right(keys, tokens)
            if not at:
                break
            key = keys[at - 1]
            if tokens.startswith(key):
                tail = Tail(parent, key)
                known = self._known[tail]
                if known.at + TAIL_SECONDS < now:
                    break
                return known.controller, len(key) // 4
            tokens = tokens[: _common(key, tokens)]
        return "", 0

    @property
    def _oldest(self) -> _Known:
        return next(iter(self._known.values()))

    def _forget(self, tail: Tail) -> None:
        del self._known[tail]
        self.bytes -= _size(tail)
        keys = self._below[tail.parent]
        del keys[bisect_left(keys, tail.tokens)]
        if not keys:
            del self._below[tail.parent]


def _size(tail: Tail) -> int:
    return len(tail.tokens) + _ENTRY_BYTES


def _common(a: bytes, b: bytes) -> int:
    """Return how many first bytes of two strings agree."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
