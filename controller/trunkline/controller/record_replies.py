"""Answers to record calls: a change is answered when it is in the file, so that no router has been told of one
that a killed controller does not know any more.

    call ──► RecordStore ──► changed? ──no──► reply
                               └─yes─► Database.hurry ──► held ──next commit, or HELD_S_MAX──► reply
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

import msgspec

from trunkline.controller.clients import Clients
from trunkline.controller.messages import RecordCall
from trunkline.controller.persistence import Persistence
from trunkline.router.messages import RecordReply

HELD_S_MAX: Final = 1.0
"""A disk that stalls, or takes nothing, keeps nobody waiting for longer; then the change is in memory only."""
_CHANGES: Final = ("create", "put", "delete")


@dataclass(frozen=True, slots=True)
class _Held:
    """An answer that waits for a commit."""

    client: int
    reply: RecordReply
    round: int
    until: float


class RecordReplies:
    """Carries out record calls and answers them in time."""

    def __init__(self, clients: Clients, persistence: Persistence) -> None:
        self._clients = clients
        self._persistence = persistence
        self._held: deque[_Held] = deque()

    def handle(self, client: int, call: RecordCall, now: float) -> None:
        """Carry out a call of the router with this index."""
        reply = self._persistence.records.handle(call, 0, self._persistence.wall(now))
        database = self._persistence.database
        if database is None or call.op not in _CHANGES or reply.status != "ok":
            self._send(client, reply)
        else:
            self._held.append(_Held(client, reply, database.hurry(), now + HELD_S_MAX))

    def turn(self, now: float) -> None:
        """Send the answers whose time has come."""
        database = self._persistence.database
        while self._held and database is not None:
            first = self._held[0]
            if database.rounds < first.round and now < first.until:
                return
            self._held.popleft()
            self._send(first.client, first.reply)

    @property
    def next_deadline(self) -> float:
        """When `turn` should be called at the latest."""
        return self._held[0].until if self._held else float("inf")

    def _send(self, index: int, reply: RecordReply) -> None:
        client = self._clients.find(index)
        if client is not None:  # else nobody waits any more
            self._clients.send(client, msgspec.structs.replace(reply, seq=client.next_seq()))
