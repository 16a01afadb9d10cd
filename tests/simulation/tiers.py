"""Disk and remote tiers of simulated workers: slow, unreliable, and as honest as checksums make them.

Each rank keeps what it was told under slot, name and generation. Moves end in any order and at any time; a rank
may fail, lose what it had, or find it damaged, each of which it reports. What comes back is therefore either what
was written under that name, or a miss. Copies between device and host come first, as `TierMoves.after` says.

Pulls from peers (`simulation.peers`) fail if nothing answers there, at once or after a while.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from simulation.peers import Network
from simulation.pool import Entry, SimulatedPool, chain_of

from trunkline.controller.reports import MoveOutcome, MovesDone, Probed
from trunkline.kvstore.chunks import NAME_BYTES
from trunkline.kvstore.tier import TierKind
from trunkline.worker.messages import ForgetChunks, PeerAt, Probe, TierMove, TierOrder


@dataclass
class Faults:
    """How often things go wrong, per move and rank."""

    fail: float = 0.0
    lose: float = 0.0
    """What was stored is not there any more, or not whole."""
    dead: set[TierKind] = field(default_factory=set)
    """These fail always."""


class SimulatedTiers:
    """The tiers of all ranks of a group. Host memory is that of `pool`: all ranks' shards of a chunk are alike."""

    def __init__(self, pool: SimulatedPool, ranks: int = 1, seed: int = 0, epoch: int = 1) -> None:
        self.pool = pool
        self.ranks = ranks
        self.faults = Faults()
        self.disk: list[dict[int, tuple[bytes, int, list[Entry | None]]]] = [{} for _ in range(ranks)]
        """By rank: slot → (name, generation, content)."""
        self.remote: list[dict[bytes, list[Entry | None]]] = [{} for _ in range(ranks)]
        self.network = Network()
        """Where peers are; alone in it if no other one is given."""
        self.peers: dict[int, list[str]] = {}
        """Endpoints by the number of the peer, as the controller has told them."""
        self.done = 0
        """Moves that every rank carried out."""
        self._epoch = epoch
        self._random = Random(seed)
        self._waiting: list[tuple[int, int, TierMove]] = []
        """(rank, after, move)."""
        self._fetched: dict[int, list[list[Entry | None] | None]] = {}
        """Reads into host memory by move, the answers so far."""
        self._probes: list[tuple[int, Probe]] = []

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._probes)

    def receive(self, message: TierOrder) -> None:
        if isinstance(message, ForgetChunks):
            for start in range(0, len(message.names), NAME_BYTES):
                for shards in self.remote:
                    shards.pop(message.names[start : start + NAME_BYTES], None)
            return
        if isinstance(message, Probe):
            self._probes += [(rank, message) for rank in range(self.ranks)]
            return
        if isinstance(message, PeerAt):
            assert bool(message.endpoints) != (message.peer in self.peers), "a peer comes or goes twice"
            self.peers[message.peer] = message.endpoints
            if not message.endpoints:
                del self.peers[message.peer]
            return
        for move in message.moves:
            assert move.tier != TierKind.PEER or move.peer in self.peers, "nothing was said of a peer"
            self._waiting += [(rank, message.after, move) for rank in range(self.ranks)]

    def work(self, share: float) -> list[MovesDone | Probed]:
        """Some of what is waiting ends."""
        reports: list[MovesDone | Probed] = []
        self._random.shuffle(self._waiting)
        rest = []
        for rank, after, move in self._waiting:
            if self._random.random() < share * self._speed_of(move):
                status = self._carry_out(rank, after, move)
                reports.append(
                    MovesDone(rank, self._epoch, [MoveOutcome(move.id, status, 5, "broken" * (status == 2))])
                )
            else:
                rest.append((rank, after, move))
        self._waiting = rest
        waiting, self._probes = self._probes, []
        for rank, probe in waiting:
            if self._random.random() < share:
                reports.append(Probed(rank, self._epoch, probe.id, self._present(rank, probe)))
            else:
                self._probes.append((rank, probe))
        return reports

    def _speed_of(self, move: TierMove) -> float:
        """A silent peer is given up some time later."""
        silent = move.tier == TierKind.PEER and self.network.silent.intersection(self.peers.get(move.peer, ()))
        return 0.02 if silent else 1.0

    def _present(self, rank: int, probe: Probe) -> int:
        if TierKind.REMOTE in self.faults.dead:
            return -1
        names = [probe.names[i : i + NAME_BYTES] for i in range(0, len(probe.names), NAME_BYTES)]
        return next((i for i, name in enumerate(names) if name not in self.remote[rank]), len(names))

    def _carry_out(self, rank: int, after: int, move: TierMove) -> int:
        self.pool.settle(after)
        kind = TierKind(move.tier)
        failed = kind in self.faults.dead or self._random.random() < self.faults.fail
        failed |= kind is TierKind.PEER and not self._reaches(rank, move)
        if move.is_write:
            return 2 if failed else self._write(rank, kind, move)
        content = None if failed else self._read(rank, kind, move)
        answers = self._fetched.setdefault(move.id, [])
        answers.append(content)
        if len(answers) == self.ranks:
            del self._fetched[move.id]
            if None not in answers:
                assert answers[0] is not None
                texts = [chain_of(answer) for answer in answers if answer is not None]
                shortest = min(len(text) for text in texts)
                assert all(text[:shortest] == texts[0][:shortest] for text in texts), (
                    "ranks hold shards of different chunks"
                )
                before = self.pool.host.get(move.host_slot, (-1, []))[0]
                assert move.host_generation > before, "a host slot was handed out again under an old generation"
                self.pool.host[move.host_slot] = (move.host_generation, answers[0])
                self.pool.name(move.name, move.host_slot, move.host_generation)
                self.pool.arrived(move.host_slot, move.host_generation)
        return 2 if failed else 1 if content is None else 0

    def _reaches(self, rank: int, move: TierMove) -> bool:
        endpoints = self.peers.get(move.peer, [])
        assert endpoints, "a peer is gone from which something is pulled"
        there = endpoints[rank % len(endpoints)]
        return there in self.network.exports and there not in self.network.silent

    def _write(self, rank: int, kind: TierKind, move: TierMove) -> int:
        held = self.pool.host.get(move.host_slot)
        assert held is not None, "what is written to a lower tier is not in host memory"
        assert held[0] == move.host_generation, "a host slot is written out that holds another generation"
        if kind is TierKind.DISK:
            before = self.disk[rank].get(move.slot)
            assert before is None or before[1] < move.generation, (
                "a disk slot was handed out under an old generation"
            )
            self.disk[rank][move.slot] = (move.name, move.generation, list(held[1]))
        else:
            self.remote[rank][move.name] = list(held[1])
        self.done += 1
        return 0

    def _read(self, rank: int, kind: TierKind, move: TierMove) -> list[Entry | None] | None:
        lost = self._random.random() < self.faults.lose
        if kind is TierKind.DISK:
            held = self.disk[rank].get(move.slot)
            found = held is not None and held[:2] == (move.name, move.generation) and not lost
            content = list(held[2]) if held is not None and found else None
        elif kind is TierKind.PEER:
            endpoints = self.peers[move.peer]
            pulled = self.network.pull(endpoints[rank % len(endpoints)], move.name)
            content = None if lost else pulled
        else:
            stored = self.remote[rank].get(move.name)
            content = list(stored) if stored is not None and not lost else None
        self.done += content is not None
        return content
