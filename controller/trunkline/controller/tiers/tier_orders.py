"""Orders to the ranks' lower tiers (moves and probes), and their answers. Pure.

Every rank holds its own shard of a chunk. So a move ends when all ranks have answered, with the worst of their
answers: a chunk is published only if every rank has verified it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from trunkline.controller.cache.radix_cache import RadixCache
from trunkline.controller.cache.radix_tree import Node
from trunkline.controller.reports import MovesDone, Probed
from trunkline.kvstore.chunks import ChunkName
from trunkline.kvstore.tier import TierKind
from trunkline.kvstore.tier_moves import Move, MoveStatus
from trunkline.router.messages import MissReason
from trunkline.worker.messages import ForgetChunks, PeerAt, Probe, TierMove, TierMoves, TierOrder


@dataclass(slots=True)
class _Answers:
    """The ranks' answers to a move or a probe so far."""

    ranks: set[int] = field(default_factory=set)
    worst: int = 0
    elapsed_us: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """The part of a path that the remote tier has, on all ranks."""

    id: int
    present: int
    """Number of the path's first chunks that the remote tier has; -1: it cannot be reached."""
    detail: str


def _kept_s(move: Move[Node], now: float) -> float:
    """Return for how long a written chunk is kept without use; 0: as long as the ranks' configuration says."""
    expires = move.chunk.expires
    return max(1.0, expires - now) if move.is_write and 0.0 < expires < math.inf else 0.0


class TierOrders:
    """Sends moves and probes to the ranks, and collects the ranks' answers."""

    def __init__(self, tree: RadixCache, ranks: int) -> None:
        self._tree = tree
        self._ranks = ranks
        self._moves: dict[int, _Answers] = {}
        self._probes: dict[int, _Answers] = {}
        self._asked: list[TierOrder] = []
        self._next_probe = 1

    @property
    def in_flight(self) -> int:
        """Number of moves that some rank has still to answer."""
        return len(self._moves)

    def next_time(self, now: float) -> float:
        """Return when there will be orders though nothing happens until then; `inf`: never."""
        return self._tree.tiers.mover.behind.next_time(now)

    def messages(self, step: int, now: float, *, is_busy: bool) -> list[TierOrder]:
        """Return the orders for the ranks since the last call.

        Args:
            step: number of the last plan.
            is_busy: whether requests run or wait.
        """
        self._tree.tiers.mover.behind.note_requests(now, is_busy=is_busy)
        messages: list[TierOrder] = list(self._asked)
        self._asked.clear()
        moves = self._tree.tiers.moves(now)
        messages += [PeerAt(peer, list(endpoints)) for peer, endpoints in self._tree.tiers.peers.take_news()]
        if moves:
            for move in moves:
                self._moves[move.id] = _Answers()
            orders = [
                TierMove(
                    move.id,
                    int(move.tier),
                    move.is_write,
                    move.host_slot,
                    move.host_generation,
                    move.slot,
                    move.generation,
                    move.chunk.name,
                    move.peer,
                    _kept_s(move, now),
                )
                for move in moves
            ]
            messages.append(TierMoves(step, orders))
        return messages

    def moved(self, report: MovesDone, now: float) -> None:
        """Note a rank's report on moves. When all ranks have reported on a move, apply its result."""
        for outcome in report.outcomes:
            answers = self._moves.get(outcome.id)
            if answers is None or report.rank in answers.ranks:
                continue
            answers.ranks.add(report.rank)
            answers.worst = max(answers.worst, outcome.status)
            answers.elapsed_us = max(answers.elapsed_us, outcome.elapsed_us)
            answers.detail = answers.detail or outcome.detail
            if len(answers.ranks) == self._ranks:
                self._ended(outcome.id, answers, now)

    def _ended(self, move_id: int, answers: _Answers, now: float) -> None:
        """Apply the result of a move on which all ranks have reported."""
        del self._moves[move_id]
        tree, status = self._tree, MoveStatus(min(answers.worst, int(MoveStatus.FAILED)))
        is_pull = tree.tiers.mover.in_flight[move_id].tier is TierKind.PEER
        node = tree.tiers.done(move_id, status, now, answers.elapsed_us, answers.detail)
        if is_pull and status is not MoveStatus.DONE:
            tree.totals.gave_up_pulls("lost" if status is MoveStatus.MISS else "gone", 1)
        if status is MoveStatus.MISS:
            tree.totals.lost_chunks += 1
        if node is not None and (status is MoveStatus.MISS or (is_pull and status is MoveStatus.FAILED)):
            tree.remember(node, MissReason.LOST)

    def probe(self, names: list[ChunkName]) -> int:
        """Ask which chunks of a path the remote tier has; return the id of the probe."""
        probe, self._next_probe = self._next_probe, self._next_probe + 1
        self._probes[probe] = _Answers(worst=len(names))
        self._asked.append(Probe(probe, b"".join(names)))
        return probe

    def forget(self, names: list[ChunkName]) -> None:
        """Have chunks deleted from the remote tier, if there is one."""
        if names and TierKind.REMOTE in self._tree.tiers.health:
            self._asked.append(ForgetChunks(b"".join(names)))

    def probed(self, report: Probed) -> ProbeAnswer | None:
        """Note a rank's answer to a probe.

        Returns:
            the answer of all ranks together, if this was the last one; else None.
        """
        answers = self._probes.get(report.probe)
        if answers is None or report.rank in answers.ranks:
            return None
        answers.ranks.add(report.rank)
        answers.worst = min(answers.worst, report.present)
        answers.detail = answers.detail or report.detail
        if len(answers.ranks) < self._ranks:
            return None
        del self._probes[report.probe]
        return ProbeAnswer(report.probe, answers.worst, answers.detail)
