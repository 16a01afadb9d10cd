"""The queue of waiting requests: tenants take turns by the tokens that they use. Pure.

      priority 0   tenant a   ▤ ▤ ▤ ▤ ▤ ▤ ▤ …   used 5,210 ┐
                   tenant b   ▤ ▤               used 4,100 ├─► whose turn comes first ─► the batch
      priority 5   tenant c   ▤ ▤ ▤             used 0     ┘   (priority 5 only when no request of 0 can start)

This is deficit round robin (M. Shreedhar and G. Varghese, "Efficient Fair Queueing Using Deficit Round Robin",
SIGCOMM 1995) for tokens instead of bytes. In each round, a tenant with waiting requests may use a quantum of
tokens. It is charged for each prompt token that is computed for it, and for each output token. How many output
tokens there will be is not known beforehand, so a tenant is charged afterwards: its requests start until its
quantum is used up, and what it uses beyond that counts in later rounds.

For each tenant and priority there is one number, the tokens `used` since round 1. The tenant's next request has
its turn in round `used // quantum + 1`. The *round* of a priority is the last one in which a request has started.
Requests of a better priority are always first; at each priority, tenants take turns separately.

Invariants, for the requests of one priority:

1. Requests of one tenant start in order: preempted before new, then by arrival.
2. When a request starts and another tenant's request could have started instead, the first tenant had used less
   than one quantum more than the other one. So, however many requests wait, a tenant's first request waits for at
   most one quantum of each other tenant, plus the one request that exceeds the quantum.
3. A tenant has at most one quantum to its credit: when its first request comes, and whenever it is charged, `used`
   is raised to what the round began with.
4. While only one tenant has waiting requests, nothing holds them back: the round follows the tenant.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from typing import Final

import numpy as np

from trunkline.controller.messages import Submit
from trunkline.controller.sequences.decode_rows import Int64Array, RowSet
from trunkline.controller.sequences.sequence import Sequence, SequenceGroup

LINES_MAX: Final = 1024
"""Number of tenants of one priority from which on those without waiting requests are forgotten."""
LEVELS_MAX: Final = 64
"""Number of priorities from which on those without waiting requests are forgotten."""


def tokens_to_compute(group: SequenceGroup) -> int:
    """Return how many tokens must be computed for a group if none of them is cached.

    Dropped parts and texts of modules do not count; tokens that its samples share count once.
    """
    if not group.members:
        return 0
    tokens = group.members[0].tokens.count
    if len(group.members) > 1:
        tokens = group.prompt_len + sum(member.tokens.count - group.prompt_len for member in group.members)
    if group.modules is not None:
        return max(0, tokens - group.modules.entries * group.modules.chunk_size)
    return max(0, tokens - group.holes)


class _Line:
    """The waiting requests of one tenant and one priority, and the tokens that the tenant has used there."""

    __slots__ = ("entry", "expected", "place", "tokens", "used", "waiting")

    def __init__(self, used: int) -> None:
        self.used = used
        self.waiting: list[SequenceGroup] = []
        """The requests, by `_place_in_line`."""
        self.tokens = 0
        """Tokens that must be computed for the waiting requests, as far as is known."""
        self.place = 0
        """The tenant's place in each round: the order in which tenants began to wait."""
        self.entry: tuple[int, int, _Line] | None = None
        """The line's entry in `_Level.turns`; None while no request waits."""
        self.expected = 0
        """The largest `SequenceGroup.turn` of the line's requests so far."""


class _Level:
    """The lines of one priority."""

    __slots__ = ("clock", "lines", "places", "quantum", "round", "turns")

    def __init__(self, quantum: int) -> None:
        self.quantum = quantum
        self.lines: dict[str, _Line] = {}
        self.turns: list[tuple[int, int, _Line]] = []
        """(round of the next turn, place, line) of each line that is not empty, ascending."""
        self.round = 1
        self.places = 0
        self.clock = 0
        """The largest `SequenceGroup.turn` of a request that has started."""

    @property
    def floor(self) -> int:
        """The tokens that a tenant without credit or debt has used at the beginning of the round."""
        return (self.round - 1) * self.quantum

    def line(self, tenant: str) -> _Line:
        """Return a tenant's line; a new one has neither credit nor debt."""
        line = self.lines.get(tenant)
        if line is None:
            if len(self.lines) >= LINES_MAX:
                self.lines = {name: line for name, line in self.lines.items() if line.waiting}
            line = self.lines[tenant] = _Line(self.floor)
        return line

    def turn(self, line: _Line) -> int:
        """Return the round in which a line's next request has its turn."""
        return max(self.round, line.used // self.quantum + 1)

    def charge(self, line: _Line, tokens: int) -> None:
        """Count tokens that a tenant uses."""
        line.used = max(line.used, self.floor) + tokens
        if line.entry is not None and line.entry[0] != line.used // self.quantum + 1:
            self.move(line)

    def move(self, line: _Line) -> None:
        """Put a line where its next turn is, or take it out if it is empty."""
        if line.entry is not None:
            del self.turns[bisect_left(self.turns, line.entry[:2])]
            line.entry = None
        if line.waiting:
            line.entry = line.used // self.quantum + 1, line.place, line
            insort(self.turns, line.entry)


class FairQueue:
    """The waiting groups: by priority; within a priority, tenants take turns."""

    def __init__(self, quantum: int) -> None:
        """
        Args:
            quantum: number of tokens that each tenant may use in one round.
        """
        self._quantum = quantum
        self._levels: dict[int, _Level] = {}
        self._tokens: dict[SequenceGroup, int] = {}
        self._turn_holder: SequenceGroup | None = None
        """The group that keeps its turn (`hold_turn`)."""
        self.decoding: Counter[tuple[int, str]] = Counter()
        """Number of decoding sequences by priority and tenant."""
        self._row_ids: Int64Array = np.empty(0, np.int64)
        self._row_lines: list[tuple[int, str] | None] = []
        """The sequences that are counted there: their ids in the batch, and their priorities and tenants."""
        self.tokens = 0
        """Tokens that must be computed for all groups in the queue, as far as is known."""

    def __len__(self) -> int:
        return len(self._tokens)

    def __iter__(self) -> Iterator[SequenceGroup]:
        """Yield the groups in the order in which they would start if each were charged for its prompt only.

        The queue may change during the loop: groups that leave it are left out, and groups that come may be.
        """
        for _, level in sorted(self._levels.items()):
            yield from self._in_order(level)

    def _in_order(self, level: _Level) -> Iterator[SequenceGroup]:
        holder = self._turn_holder
        holder_line = None if holder is None or not self._is_at(holder, level) else self._line(holder)
        heap = level.turns.copy()  # a sorted list is a heap
        if heap and (
            holder_line is not None or heap[0][0] < level.round
        ):  # some were passed over: they could not start
            heap = [
                (0 if line is holder_line else max(turn, level.round), place, line) for turn, place, line in heap
            ]
            heapq.heapify(heap)
        walks: dict[int, _Walk] = {}
        while heap:
            _, place, line = heap[0]
            walk = walks.get(place)
            if walk is None:
                walk = walks[place] = _Walk(line.waiting, max(line.used, level.floor))
            group = next(walk.waiting, None)
            if group is None:
                heapq.heappop(heap)
                continue
            walk.used += self._tokens.get(group, 0)
            if group is holder:
                holder_line = None
            turn = 0 if line is holder_line else walk.used // self._quantum + 1
            heapq.heapreplace(heap, (turn, place, line))
            if group.queued:
                yield group

    def _is_at(self, group: SequenceGroup, level: _Level) -> bool:
        return group.queued and self._levels.get(group.request.submit.priority) is level

    def _line(self, group: SequenceGroup) -> _Line:
        return self._level(group.request.submit.priority).line(group.request.submit.tenant)

    def _level(self, priority: int) -> _Level:
        level = self._levels.get(priority)
        if level is None:
            if len(self._levels) >= LEVELS_MAX:
                self._levels = {number: level for number, level in self._levels.items() if level.turns}
            level = self._levels[priority] = _Level(self._quantum)
        return level

    # Coming and going

    def add(self, group: SequenceGroup) -> None:
        """Let a group wait."""
        assert not group.queued
        level, line = self._level(group.request.submit.priority), self._line(group)
        if not line.waiting:
            level.places += 1
            line.place = level.places
        index = bisect_left(line.waiting, _place_in_line(group), key=_place_in_line)
        if index < len(line.waiting):
            group.turn = line.waiting[index].turn
        else:
            rounds = level.turn(line) - level.round + line.tokens // self._quantum
            group.turn = line.expected = max(line.expected, level.clock + rounds)
        line.waiting.insert(index, group)
        self._tokens[group] = tokens = tokens_to_compute(group)
        self.tokens += tokens
        line.tokens += tokens
        if line.entry is None:
            level.move(line)

    def remove(self, group: SequenceGroup) -> None:
        """Let a group wait no more: it has started or ended."""
        assert group.queued
        level, line = self._level(group.request.submit.priority), self._line(group)
        index = bisect_left(line.waiting, _place_in_line(group), key=_place_in_line)
        assert line.waiting[index] is group, "a group's place changed while it was in the queue"
        del line.waiting[index]
        tokens = self._tokens.pop(group)
        self.tokens -= tokens
        line.tokens -= tokens
        group.turn = -1
        if not line.waiting:
            level.move(line)

    def found(self, group: SequenceGroup, tokens: int) -> None:
        """Note how many tokens of a group are cached; nothing happens if the group is not in the queue."""
        known = self._tokens.get(group)
        if known is not None and group.prompt_scored:  # a scored prompt is computed whole in any case
            self._tokens[group] = rest = max(1, known - tokens)
            self.tokens += rest - known
            self._line(group).tokens += rest - known

    def tokens_of(self, group: SequenceGroup) -> int:
        """Return how many tokens must be computed for a group in the queue."""
        return self._tokens[group]

    # Turns

    def started(self, group: SequenceGroup, tokens: int) -> None:
        """Note that a sequence of a group has entered the batch, and charge the tenant for its prompt.

        Args:
            tokens: number of tokens that will be computed before the sequence decodes.
        """
        level, line = self._level(group.request.submit.priority), self._line(group)
        several = len(group.members) > 1  # its others have their turn with it
        if not several or sum(member.batch_seq_id > 0 for member in group.members) == 1:
            level.round = level.turn(line)
            level.clock = max(level.clock, group.turn)
        level.charge(line, tokens)

    def set_decoding(self, rows: RowSet, sequences: list[Sequence | None]) -> None:
        """Set the sequences that get a token in each step from now on. Rows that only go on are not looked at one
        by one.

        Args:
            sequences: the sequence of each index that a row may have, always as many.
        """
        if not self._row_lines:
            self._row_ids, self._row_lines = np.zeros(len(sequences), np.int64), [None] * len(sequences)
        ids = np.zeros_like(self._row_ids)
        ids[rows.slots] = rows.batch_seq_ids
        for slot in (ids != self._row_ids).nonzero()[0].tolist():
            if (left := self._row_lines[slot]) is not None:
                self.decoding[left] -= 1
                if not self.decoding[left]:
                    del self.decoding[left]
            sequence = sequences[slot] if ids[slot] else None
            if sequence is None:
                self._row_lines[slot] = None
                continue
            submit = sequence.group.request.submit
            line = self._row_lines[slot] = submit.priority, submit.tenant
            self.decoding[line] += 1
        self._row_ids = ids

    def charge_rows(self, steps: int = 1) -> None:
        """Charge tenants for the output tokens of steps, between which no request has started."""
        for (priority, tenant), tokens in self.decoding.items():
            level = self._level(priority)
            level.charge(level.line(tenant), steps * tokens)

    def charge(self, group: SequenceGroup, tokens: int) -> None:
        """Charge a group's tenant for output tokens beyond those of `charge_rows`."""
        submit = group.request.submit
        level = self._level(submit.priority)
        level.charge(level.line(submit.tenant), tokens)

    def hold_turn(self, group: SequenceGroup | None) -> None:
        """Let a group, and those of its tenant before it, keep their turn whatever the tenant is charged for.

        It is the request for which texts of modules are held: if the first request changed with each charge,
        requests could evict each other's texts for ever. None: no group keeps its turn.
        """
        self._turn_holder = group

    def rank(self, group: SequenceGroup) -> tuple[int, int, int]:
        """Return the order among running groups: the group with the largest rank is preempted first.

        That is, of the worst priority, the newest group of the tenant whose next turn comes last.
        """
        priority = group.request.submit.priority
        level = self._level(priority)
        return priority, level.turn(self._line(group)), group.arrival

    def is_before(self, group: SequenceGroup, other: SequenceGroup) -> bool:
        """Return whether a group, waiting or running, has its turn before another one."""
        ours, theirs = group.request.submit, other.request.submit
        if ours.priority != theirs.priority:
            return ours.priority < theirs.priority
        if ours.tenant == theirs.tenant:
            return _place_in_line(group) < _place_in_line(other)
        if not (group.queued and other.queued):
            return self.rank(group) < self.rank(other)
        return next(one for one in self if one is group or one is other) is group

    def makes_way(self, newcomer: Submit) -> SequenceGroup | None:
        """Return the request to refuse instead of a new one while the queue is full; None: refuse the new one.

        It is the newest one of the tenant with most requests among those that have computed nothing yet, if that
        tenant has more of them than the new request's tenant, at the new request's priority or worse ones.
        """
        priority = newcomer.priority
        idle = [
            g for g in self._tokens if g.request.submit.priority >= priority and not (g.encodes or _has_run(g))
        ]
        counts = Counter(group.request.submit.tenant for group in idle)
        most = max(counts, key=counts.__getitem__, default=newcomer.tenant)
        if counts[most] <= counts[newcomer.tenant] + 1:
            return None
        theirs = (group for group in idle if group.request.submit.tenant == most)
        return max(theirs, key=lambda group: (group.request.submit.priority, group.arrival))


class _Walk:
    """A walk along one line, for the order in which its groups would start."""

    __slots__ = ("used", "waiting")

    def __init__(self, waiting: list[SequenceGroup], used: int) -> None:
        self.waiting = iter(waiting.copy())
        self.used = used


def _place_in_line(group: SequenceGroup) -> tuple[bool, int, int]:
    """Return the order within a line; a job that encodes a text for a request (its id is negative) comes before
    that request."""
    return not group.preempted, group.arrival, group.id


def _has_run(group: SequenceGroup) -> bool:
    """Return whether a request has run here or, if its stream was continued, elsewhere."""
    return (
        group.preempted
        or group.runs
        or group.started
        or len(group.request.tokens) > group.request.submit.prompt_len
    )
