"""Clients who ask a cluster all the time, while a test does something to it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from itertools import count

from cluster.crowd import Crowd, Script
from cluster.harness import Cluster

CLIENTS = 4


class Traffic(threading.Thread):
    """Clients who play scripts again and again, and never try again what has failed."""

    def __init__(self, cluster: Cluster, scripts: Sequence[Script]) -> None:
        super().__init__(daemon=True)
        self.rounds: list[Crowd] = []
        self._cluster = cluster
        self._scripts = scripts
        self._is_over = False
        self.start()

    def run(self) -> None:
        """Until `stop`: each round to its end."""
        for number in count():
            if self._is_over:
                return
            # Another order each time; the clients keep their connections within a round.
            first = number % len(self._scripts)
            played = [*self._scripts[first:], *self._scripts[:first]]
            crowd = Crowd(self._cluster.url)
            self.rounds.append(crowd)
            asyncio.run(crowd.all(played, CLIENTS))

    @property
    def streams(self) -> int:
        """Answered so far."""
        return sum(crowd.ended for crowd in self.rounds)

    def stop(self) -> None:
        self._is_over = True
        self.join(120)
        assert not self.is_alive()

    def check(self, expected: Crowd) -> None:
        """No client was told anything else than in peace."""
        for crowd in self.rounds:
            for key, answer in crowd.answers.items():
                assert answer.error == "", (key, answer)
                assert answer == expected.answers[key], key
