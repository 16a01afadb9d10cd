"""Choose the grammar to compile next: fair shares between tenants, short trials before long ones. Pure.

    add ──► FIRST line ──take──► a trial of at most one slice ──► compiled, or refused
                                        │ late
                                        ▼
            LONG line ──take──► a trial with the whole limit

Each line has a worker of its own, so a grammar that takes long holds up others that take long, and nothing else.
In a line tenants take turns, one grammar at a time; a tenant's own come in the order of their arrival. So the
first grammar of a tenant waits for one slice of every other tenant at most, however many these have sent.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum, auto


class Line(Enum):
    """The line in which a grammar waits."""

    FIRST = auto()
    """For a first, short trial."""
    LONG = auto()
    """For a long trial: the short one was not enough."""


class GrammarQueue:
    """Grammars that are to be compiled, by id."""

    def __init__(self) -> None:
        self._lines: dict[Line, OrderedDict[bytes, OrderedDict[int, None]]] = {
            line: OrderedDict() for line in Line
        }
        """What waits, by tenant; the tenant whose turn it is comes first."""
        self._tenants: dict[int, dict[bytes, None]] = {}
        """Who wants a grammar, also of those that are being tried."""
        self._waits: dict[int, Line] = {}

    def __contains__(self, grammar: int) -> bool:
        return grammar in self._tenants

    def __len__(self) -> int:
        return len(self._tenants)

    def add(self, grammar: int, tenant: bytes) -> None:
        """Note that a tenant wants a grammar. If several do, it comes with the first of their turns."""
        if grammar not in self._tenants:
            self._tenants[grammar] = {}
            self._waits[grammar] = Line.FIRST
        self._tenants[grammar][tenant] = None
        line = self._waits.get(grammar)
        if line is not None:
            self._lines[line].setdefault(tenant, OrderedDict())[grammar] = None

    def take(self, line: Line) -> int | None:
        """Return the next grammar to try, None if none waits. It stays known until `late` or `remove`."""
        waiting = self._lines[line]
        if not waiting:
            return None
        tenant, own = next(iter(waiting.items()))
        waiting.move_to_end(tenant)
        grammar = next(iter(own))
        self._leave(grammar)
        return grammar

    def late(self, grammar: int) -> None:
        """Let a grammar wait for a long trial: it took more than a slice. Nothing happens if it was removed."""
        if grammar in self._tenants:
            self._waits[grammar] = Line.LONG
            for tenant in self._tenants[grammar]:
                self._lines[Line.LONG].setdefault(tenant, OrderedDict())[grammar] = None

    def remove(self, grammar: int) -> None:
        """Forget a grammar that is compiled, refused, or not wanted any more."""
        self._leave(grammar)
        self._tenants.pop(grammar, None)

    def _leave(self, grammar: int) -> None:
        line = self._waits.pop(grammar, None)
        if line is None:
            return
        waiting = self._lines[line]
        for tenant in self._tenants[grammar]:
            waiting[tenant].pop(grammar, None)
            if not waiting[tenant]:
                del waiting[tenant]
