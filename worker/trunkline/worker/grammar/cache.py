"""Grammars that were compiled or refused lately: the next request with the same one has its answer at once. Pure.

Refusals are kept, too, since they cost most: a client that sends the same hostile grammar again and again gets the
same sentence without a trial. They are kept for a while only, because how long a compilation takes also
depends on what else the machine does.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Final, Generic, Protocol, TypeVar

import msgspec

KEPT_MAX: Final = 64
KEPT_BYTES_MAX: Final = 64 << 20
"""Compiled grammars kept for the next request with the same one."""
REFUSALS_MAX: Final = 1024
REFUSED_S: Final = 600.0
_DIGEST_BYTES: Final = 16


class Wanted(msgspec.Struct, frozen=True):
    """A grammar as a request asks for it (`CompileGrammar`)."""

    kind: str
    text: str
    spaced: bool = False

    def digest(self) -> bytes:
        """Return a name that only the same grammar has."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=_DIGEST_BYTES).digest()


class _Sized(Protocol):
    @property
    def bytes(self) -> int: ...


_Grammar = TypeVar("_Grammar", bound=_Sized)


class GrammarCache(Generic[_Grammar]):
    """Compiled grammars and refusals by content, the least recently used first."""

    def __init__(self) -> None:
        self._compiled: OrderedDict[bytes, _Grammar] = OrderedDict()
        self._refused: OrderedDict[bytes, tuple[str, float]] = OrderedDict()

    def find(self, wanted: Wanted, now: float) -> _Grammar | str | None:
        """Return the compiled grammar, or its problem; None if it has to be tried. `now` is in seconds."""
        digest = wanted.digest()
        compiled = self._compiled.get(digest)
        if compiled is not None:
            self._compiled.move_to_end(digest)
            return compiled
        problem, until = self._refused.get(digest, ("", now))
        if now < until:
            self._refused.move_to_end(digest)
            return problem
        self._refused.pop(digest, None)
        return None

    def keep(self, wanted: Wanted, grammar: _Grammar) -> None:
        """Keep a compiled grammar."""
        self._compiled[wanted.digest()] = grammar
        while len(self._compiled) > KEPT_MAX or sum(g.bytes for g in self._compiled.values()) > KEPT_BYTES_MAX:
            self._compiled.popitem(last=False)

    def refuse(self, wanted: Wanted, problem: str, now: float) -> None:
        """Keep a refusal for a while."""
        self._refused[wanted.digest()] = problem, now + REFUSED_S
        while len(self._refused) > REFUSALS_MAX:
            self._refused.popitem(last=False)
