"""Agents before a cluster in simulated time: the real router core, and a real `Directory` per group, no model.

Conversations (agent_traces.py) begin in a Poisson process; each request arrives when it was recorded, but not
before its agent has the answer to the one before it. The router core chooses a group by the names of the prompt's
chunks. A group computes one prompt after the other (FCFS) and decodes beside that. What it has of a prompt when it
begins is a hit; the rest is computed, and at the end of the answer all of it is given to the directory, which
decides what stays. A group's directory has host memory only: room is what is studied, not how it is divided among
tiers. What a request under way uses stays on the device besides.

*Ideal* is what a single cache without limits would have: the longest prefix of a prompt that stood in a prompt
that arrived earlier, anywhere, or in its answer. Each ideal chunk that was not found has a cause: it is at another
group, it was evicted, or it was not computed yet.

Eviction policies are in agent_policies.py.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Final

import numpy as np
from agent_policies import Chunk, Foresight, Talk, Turn
from agent_traces import BLOCK, ChunkNames, Conversation, Request

from trunkline.kvstore.chunks import NAME_BYTES, ChunkName, TieredChunk
from trunkline.kvstore.directory import Directory
from trunkline.kvstore.tier_policy import DirectoryConfig
from trunkline.router.routing.core import RoutingCore
from trunkline.router.routing.names import KvIdentity
from trunkline.router.routing.request import RouteRequest

DEVICE: Final = 1
HOST: Final = 2
"""Tiers of a chunk, as in `KvEvents`."""
CAUSES: Final = ("other group", "evicted", "not ready")
"""Why a chunk was not found that a single cache without limits would have had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The cluster. It is fast, so that it is room and not time that is short: a prompt of 100,000 tokens takes
    1.5 s to compute and 0.1 s to load."""

    groups: int = 4
    room: int = 1 << 20
    """Chunks that the directories of all groups hold together."""
    blocks: int = 4
    """Blocks of 64 tokens in a chunk. The engine's chunks have one; larger ones take less time to simulate."""
    clients: bool = True
    """Whether the conversations of a client share tools and system prompt."""
    labels: bool = False
    """Whether requests name their conversation, so that the router knows it as a session."""
    per_hour: float = 60.0
    """Conversations that begin."""
    seed: int = 0
    prefill_us: float = 10.0
    """Of each computed token …"""
    attention_us: float = 0.0001
    """… and of each token before it."""
    load_us: float = 1.0
    """Of each token found in host memory …"""
    pull_us: float = 2.5
    """… or pulled from another group's."""
    pulls: bool = True
    """Whether groups pull from each other what they lack."""
    token_s: float = 0.012
    """Of each token of an answer."""

    @property
    def tokens(self) -> int:
        """Of a chunk."""
        return self.blocks * BLOCK

    def shared_by(self, groups: int, most: int) -> Setting:
        """Return so many groups that have the speed of `most` together."""
        times = most / groups
        return replace(
            self,
            groups=groups,
            prefill_us=self.prefill_us / times,
            attention_us=self.attention_us / times,
            load_us=self.load_us / times,
            pull_us=self.pull_us / times,
        )

    def prefill_s(self, loaded: int, pulled: int, found: int, prompt: int) -> float:
        """Return the time until a prompt is computed; of the tokens found some are loaded, some pulled."""
        new = prompt - found
        computing_us = new * (self.prefill_us + self.attention_us * (found + new / 2))
        return 1e-6 * (loaded * self.load_us + pulled * self.pull_us + computing_us)


@dataclass(slots=True)
class Figures:
    """What was seen, in tokens of prompts but for the times."""

    prompt: int = 0
    ideal: int = 0
    found: int = 0
    pulled: int = 0
    """Those of `found` that came from other groups."""
    lost: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    """Ideal tokens that were not found, by cause."""
    losers: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    """Requests that lost some, by the cause of the first chunk that they lacked."""
    edited: int = 0
    """Tokens that are not ideal because they stand behind an edit, at most."""
    edits: int = 0
    """Requests with an edit behind which a tenth of the prompt before, or more, was lost."""
    requests: int = 0
    ttft_s: list[float] = field(default_factory=list)

    @property
    def of_ideal(self) -> float:
        return self.found / self.ideal if self.ideal else math.nan

    def ttft(self, share: float) -> float:
        return float(np.quantile(self.ttft_s, share))


class Group:
    """One group: its directory, its tree of chunks by name, and its queue."""

    def __init__(self, room: int, foresight: Foresight) -> None:
        self.directory: Directory[Chunk] = Directory(DirectoryConfig(host_slots=room, policy=foresight.policy))
        foresight.prepare(self.directory)
        self.directory.changed.start()
        self.chunks: dict[bytes, Chunk] = {}
        self.queue: deque[Turn] = deque()
        self.is_busy = False
        self._root = TieredChunk(None, ChunkName(b""))
        self._step = 0

    def find(self, names: Sequence[bytes]) -> list[Chunk]:
        """Return the first chunks of a prompt, as far as they are here."""
        found: list[Chunk] = []
        for name in names:
            chunk = self.chunks.get(name)
            if chunk is None:
                break
            found.append(chunk)
        return found

    def begin(self, path: list[Chunk], now: float) -> int:
        """Take what was found of a prompt to the device; return how many chunks come from host memory."""
        self.directory.used(path, now)
        loaded = sum(not chunk.running for chunk in path)
        for chunk in path:
            chunk.running += 1
        return loaded

    def grow(self, path: list[Chunk], names: Sequence[bytes]) -> None:
        """Compute the chunks of these names behind a path."""
        parent: TieredChunk = path[-1] if path else self._root
        for name in names:
            chunk = self.chunks.get(name)
            if chunk is None:
                chunk = self.chunks[name] = Chunk(parent, ChunkName(name))
            chunk.running += 1
            self.directory.changed.note(chunk)
            path.append(chunk)
            parent = chunk

    def end(self, path: list[Chunk], now: float) -> None:
        """Store what the directory takes of a path, and leave the device."""
        directory = self.directory
        directory.used(path, now)
        for chunk in path:
            self._step += 1
            if not chunk.host_ready and directory.save(chunk, self._step) is None:
                break
        for chunk in reversed(path):
            chunk.running -= 1
            if not chunk.is_stored:
                directory.changed.note(chunk)
                if not chunk.running:
                    self._forget(chunk)
            elif not chunk.stored_below:
                directory.left_device(chunk)  # those above can go only after this one, and are offered then
        for chunk in directory.lost():
            if not chunk.running:
                self._forget(chunk)

    def _forget(self, chunk: Chunk) -> None:
        if not chunk.is_forgotten:
            self.directory.forget(chunk)
            del self.chunks[chunk.name]

    def changes(self) -> tuple[bytes, bytes]:
        """Return the names and the tiers of all chunks that have changed since the last call."""
        changed = self.directory.changed.take()
        names = b"".join(chunk.name for chunk in changed)
        return names, bytes(HOST if chunk.host_ready else DEVICE * chunk.on_device for chunk in changed)


class Simulation:
    """Run it once with `run`."""

    def __init__(self, setting: Setting, foresight: Foresight) -> None:
        self.setting = setting
        self.foresight = foresight
        self.figures = Figures()
        self.groups = [Group(setting.room // setting.groups, foresight) for _ in range(setting.groups)]
        self.core = _core(setting)
        self._seen: set[bytes] = set()
        """What stood in a prompt or in an answer; …"""
        self._born: set[bytes] = set()
        """… what was computed somewhere."""
        self._events: list[tuple[float, int, Callable[..., None], Any]] = []
        self._serials = itertools.count(1)
        self._now = 0.0

    def run(self, talks: Sequence[Talk]) -> Figures:
        """Until all has been answered."""
        for talk in talks:
            for request in talk.whole.requests:
                if not request.turn:
                    self._at(talk.due_s(request), self._arrive, (talk, request))
        while self._events:
            self._now, _, call, argument = heapq.heappop(self._events)
            call(argument)
        assert not any(group.queue for group in self.groups), "requests wait for ever"
        return self.figures

    def _at(self, time_s: float, call: Callable[..., None], argument: Any) -> None:
        heapq.heappush(self._events, (time_s, next(self._serials), call, argument))

    def _arrive(self, what: tuple[Talk, Request]) -> None:
        talk, request = what
        names = talk.names.prompt(request.number)
        ideal = next((at for at, name in enumerate(names) if name not in self._seen), len(names))
        self._seen.update(names)
        self._seen.update(talk.names.answer(request.number))
        turn = Turn(next(self._serials), talk, request, self._now, names, ideal)
        label = talk.whole.id if self.setting.labels else ""
        asked = RouteRequest(b"", session=label, names=names, token_count=request.prompt)
        decision = self.core.route(asked, self._now)
        self.core.sent(turn.ticket, decision, asked, self._now)
        turn.group, turn.holders, turn.left = decision.controller, decision.holders, decision.left
        group = self.groups[turn.group]
        group.queue.append(turn)
        if self.foresight.wants and group.is_busy:
            group.directory.want(turn.ticket, (1.0, float(turn.ticket)), group.find(names))
        self._next(group)

    def _next(self, group: Group) -> None:
        """Begin the prompt at the head of the queue, if none is being computed."""
        if group.is_busy or not group.queue:
            return
        group.is_busy = True
        turn = group.queue.popleft()
        turn.path = group.find(turn.names)
        here = len(turn.path)
        self.foresight.started(group.directory, turn, self._now)
        loaded = self.setting.tokens * group.begin(turn.path, self._now)
        group.directory.unwant(turn.ticket)
        group.grow(turn.path, self._given(turn))
        pulled = self.setting.tokens * (len(turn.path) - here)
        self._count(turn, pulled)
        prompt = turn.request.prompt
        found = min(self.setting.tokens * len(turn.path), prompt - 1)
        self._at(self._now + self.setting.prefill_s(loaded, pulled, found, prompt), self._computed, turn)

    def _given(self, turn: Turn) -> list[bytes]:
        """Return the names of the chunks behind a turn's path that other groups give."""
        given: list[bytes] = []
        for at in range(len(turn.path), len(turn.names)):
            holders = [holder for holder in turn.holders if holder.start <= at < holder.stop]
            if not any(self._holds(int(holder.member), turn.names[at]) for holder in holders):
                break
            given.append(turn.names[at])
        return given

    def _holds(self, group: int, name: bytes) -> bool:
        chunk = self.groups[group].chunks.get(name)
        return chunk is not None and chunk.host_ready

    def _computed(self, turn: Turn) -> None:
        group = self.groups[turn.group]
        group.grow(turn.path, turn.names[len(turn.path) :])
        self._born.update(turn.names)
        self.core.started(turn.ticket, self._now)
        if turn.left is not None:
            names = [turn.left.names[at : at + NAME_BYTES] for at in range(0, len(turn.left.names), NAME_BYTES)]
            self.foresight.went_on(self.groups[int(turn.left.member)].directory, names, turn, self._now)
        self.figures.ttft_s.append(self._now - turn.arrived_s)
        self._publish(turn.group)
        self._at(self._now + self.setting.token_s * turn.request.answer, self._answered, turn)
        group.is_busy = False
        self._next(group)

    def _answered(self, turn: Turn) -> None:
        group, talk, request = self.groups[turn.group], turn.talk, turn.request
        answer = talk.names.answer(request.number)
        group.grow(turn.path, answer)
        self._born.update(answer)
        self.foresight.ended(group.directory, turn, self._now)
        group.end(turn.path, self._now)
        self.core.ended(turn.ticket, self._now)
        self._publish(turn.group)
        if not request.is_last:
            later = talk.whole.requests[request.number + 1 :]
            following = next(each for each in later if each.agent == request.agent)
            self._at(max(self._now, talk.due_s(following)), self._arrive, (talk, following))

    def _count(self, turn: Turn, pulled: int) -> None:
        figures, size, found = self.figures, self.setting.tokens, len(turn.path)
        figures.requests += 1
        figures.prompt += turn.request.prompt
        figures.ideal += size * turn.ideal
        figures.found += size * min(found, turn.ideal)
        figures.pulled += pulled
        edited = turn.talk.whole.edited(turn.request)
        figures.edited += BLOCK * edited
        figures.edits += bool(edited) and edited >= turn.talk.whole.requests[turn.request.base].blocks / 10
        cause = ""
        for name in turn.names[found : turn.ideal]:
            why = self._why(name)
            figures.lost[why] += size
            cause = cause or why
        if cause:
            figures.losers[cause] += 1

    def _why(self, name: bytes) -> str:
        if name not in self._born:
            return "not ready"
        return "other group" if any(name in group.chunks for group in self.groups) else "evicted"

    def _publish(self, group: int) -> None:
        names, tiers = self.groups[group].changes()
        self.core.index.apply(group, names, tiers)
        turns = self.groups[group].queue
        self.core.loads.report(
            group,
            requests=len(turns),
            queued_tokens=sum(turn.request.prompt for turn in turns),
            kv_used=0.0,
            running=0,
            room=self.setting.tokens * self.groups[group].directory.copies.host.free_count,
        )


def _core(setting: Setting) -> RoutingCore:
    core = RoutingCore(map(str, range(setting.groups)), replica_seed=setting.seed)
    identity = KvIdentity(fingerprint=b"model", dtype="bfloat16", chunk_size=setting.tokens)
    for group in range(setting.groups):
        core.traits.set_identity(group, identity)
        core.traits.set_costs(group, setting.prefill_us, [0.0, setting.load_us, 0.0, 0.0, setting.pull_us])
        if setting.pulls:
            core.traits.set_exports(group, [f"inproc://{group}"])
        core.set_available(group, True)
    return core


def talks_of(conversations: Sequence[Conversation], setting: Setting) -> list[Talk]:
    """Return the conversations with the times at which they begin, and the names of their chunks."""
    rng, now, talks = Random(f"arrivals {setting.seed}"), 0.0, []
    for whole in conversations:
        now += rng.expovariate(setting.per_hour / 3600)
        talks.append(Talk(whole, now, ChunkNames(whole, setting.blocks, clients=setting.clients)))
    return talks


def footprint(talks: Sequence[Talk], tokens: int) -> int:
    """Return the peak of the contexts of all agents under way, in chunks of so many tokens.

    An agent has the prompt and the answer of its last request, from its first one to the end of its last.
    """
    changes: list[tuple[float, int]] = []
    for talk in talks:
        held: dict[int, int] = {}
        for request in talk.whole.requests:
            now = -(-(request.prompt + request.answer) // tokens)
            changes.append((talk.due_s(request), now - held.get(request.agent, 0)))
            held[request.agent] = now
            if request.is_last:
                over_s = 0.0 if math.isnan(request.api_s) else request.api_s
                changes.append((talk.due_s(request) + over_s, -now))
    return max(itertools.accumulate(change for _, change in sorted(changes)))
