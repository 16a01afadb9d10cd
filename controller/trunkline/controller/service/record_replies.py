"""Answer routers' calls on records. A change is answered only when it is in the file: so a controller that is
killed loses no change that a router has been told of. A change that cannot be written is undone.

    call ──► RecordStore ──► changed? ──no──► reply
                               └─yes─► held ──committed──────────────► settle, reply
                                         └────failed, or HELD_S_MAX──► undo, reply "failed"

While a change of a record waits for its commit, later calls on that record wait, too; they keep their order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import msgspec

from trunkline.controller.messages import RecordCall
from trunkline.controller.service.routers import Routers
from trunkline.controller.storage.persistence import Persistence
from trunkline.controller.storage.records import Change
from trunkline.router.messages import RecordReply

HELD_S_MAX: Final = 5.0
"""Longest wait of a call for a disk that stalls: half of the time that routers wait for an answer."""


@dataclass(slots=True)
class _Held:
    """An answer that waits for a commit."""

    router: int
    reply: RecordReply
    change: Change
    until: float
    waiting: list[tuple[int, RecordCall]] = field(default_factory=list)
    """Later calls about the same record, with their routers."""


class RecordReplies:
    """Carries out record calls and answers them in time."""

    def __init__(self, routers: Routers, persistence: Persistence) -> None:
        self._routers = routers
        self._persistence = persistence
        self._held: dict[tuple[str, str], _Held] = {}
        """Answers that wait for their commits, by the record's kind and id; the oldest first."""

    def handle(self, router: int, call: RecordCall, now: float) -> None:
        """Carry out a call of the router with this index."""
        key = call.kind, call.id
        if call.op != "list" and key in self._held:
            self._held[key].waiting.append((router, call))
            return
        reply, change = self._persistence.records.handle(call, 0, self._persistence.wall(now))
        if change is None:
            self._routers.send(router, reply)
        else:
            self._held[key] = _Held(router, reply, change, now + HELD_S_MAX)

    def turn(self, now: float) -> None:
        """Send the answers whose time has come."""
        over = [key for key, held in self._held.items() if held.change.outcome.is_known or now >= held.until]
        for key in over:
            held = self._held.pop(key)
            self._routers.send(held.router, self._decided(held))
            for router, call in held.waiting:
                self.handle(router, call, now)

    @property
    def next_deadline(self) -> float:
        """Time at which `turn` should be called at the latest."""
        return next((held.until for held in self._held.values()), float("inf"))

    def _decided(self, held: _Held) -> RecordReply:
        records, outcome = self._persistence.records, held.change.outcome
        problem = outcome.problem if outcome.is_known else f"the disk has not answered for {HELD_S_MAX:g} s"
        if not problem:
            records.settle(held.change)
            return held.reply
        records.undo(held.change)
        detail = f"{problem}; nothing was changed"
        return msgspec.structs.replace(held.reply, status="failed", records=[], detail=detail)
