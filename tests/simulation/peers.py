"""Groups that pull chunks from each other's simulated host memory: where they export, and what a name stands for.

Every group saves chunks under names, and any other one asks for them by name. What is saved under a name anywhere
is compared with what was saved under it before, and what is pulled is compared with that as well: a wrong name, or
bytes of another chunk, show at once.
"""

from __future__ import annotations

from collections.abc import Callable

from simulation.pool import Entry, SimulatedPool

Content = list[Entry | None]


class Network:
    """What exports where. Endpoints are never used twice."""

    def __init__(self) -> None:
        self.exports: dict[str, Callable[[bytes], Content | None]] = {}
        self.silent: set[str] = set()
        """Endpoints that take questions and do not answer."""
        self.asked: dict[str, list[bytes]] = {}
        """Names that were asked for, by endpoint."""
        self._known: dict[bytes, set[tuple[int, bytes, int]]] = {}
        self._lives = 0

    def export(self, pool: SimulatedPool, member: str, ranks: int) -> list[str]:
        """Export a pool's host memory; return the endpoints, by rank."""
        self._lives += 1
        pool.observer = self.saved
        endpoints = [f"ipc://{member}.{self._lives}.{rank}" for rank in range(ranks)]
        for endpoint in endpoints:
            self.exports[endpoint] = pool.named
        return endpoints

    def leave(self, endpoints: list[str]) -> None:
        """Let a group's exports end."""
        for endpoint in endpoints:
            self.exports.pop(endpoint, None)
            self.silent.discard(endpoint)

    def saved(self, name: bytes, content: Content) -> None:
        """Compare what is saved under a name with what was saved under it before.

        Tokens of a chunk that are dropped, and those behind a text's end, are not computed: a block has remains of
        other chunks there. What both have is the chunk's own.
        """
        found = {(index, entry.after, entry.token) for index, entry in enumerate(content) if entry is not None}
        assert found, "nothing is saved under a name"
        common = self._known.setdefault(name, found) & found
        assert common, "two chunks have one name"
        self._known[name] = common

    def pull(self, endpoint: str, name: bytes) -> Content | None:
        """Return what an endpoint has under a name; None: it does not have it.

        Raises:
            OSError: nothing answers there.
        """
        if endpoint not in self.exports:
            raise OSError(endpoint)
        self.asked.setdefault(endpoint, []).append(name)
        content = self.exports[endpoint](name)
        if content is not None:
            self.saved(name, content)
        return content
