"""Jobs that encode texts of modules which no tier has: each text once, however many requests wait. Pure.

A job is a group that samples nothing (`SequenceGroup.encodes`). It stands in the queue before the requests that
wait for it, and is admitted, computed in chunks, preempted and resumed like any group. When it ends, its text is
in the radix tree.

The first request in the queue *holds* the complete ones of its texts while the others are encoded. Otherwise the
first text could be evicted before the last one is encoded. Only one request holds texts, only while it is the
first, and it releases them if a job before it needs the blocks. So requests never wait for each other's blocks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, runtime_checkable

from msgspec import structs

from trunkline.controller.allocation.modules import encoding_of, find_text, lay_out
from trunkline.controller.cache.radix_cache import RadixCache
from trunkline.controller.cache.radix_tree import Node
from trunkline.controller.messages import Submit
from trunkline.controller.scheduling.fair_queue import FairQueue
from trunkline.controller.sequences.module_prompt import CachedText, ModulePrompt
from trunkline.controller.sequences.sequence import Request, SequenceGroup
from trunkline.controller.tiers.fetching import Fetching
from trunkline.kvstore.chunks import ChunkName
from trunkline.kvstore.root_keys import first_chunk_name
from trunkline.router.messages import MissReason
from trunkline.worker.messages import Sampling

FIRST_JOB_ID: Final = -(1 << 40)
"""Id of the first job. Later ids count down from here, so that they differ from the ids of requests and
announcements."""
_NO_LIMIT: Final = 1 << 40
TEXTS_AT_ONCE: Final = 64
"""Largest number of texts that one request waits for at the same time. A job's block table has all that its text
sees: a chain of a thousand texts, all at once, would take seconds and gigabytes."""
JOBS_MAX: Final = 256
"""Number of jobs from which on only the first request in the queue may add jobs, and a job may add jobs for the
texts above its own."""


@runtime_checkable
class _Call(Protocol):
    """A call that waits for texts."""

    computed_tokens: int


@dataclass(slots=True)
class _Job:
    group: SequenceGroup
    waiters: dict[Hashable, None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Wish:
    """A request (its group) or a call that needs texts, and how urgent they are."""

    waiter: Hashable
    salt: bytes
    priority: int
    preempted: bool
    arrival: int
    ttl: float
    tenant: str = ""

    @property
    def key(self) -> tuple[int, bool, int]:
        """Place of the wish's jobs among the tenant's requests: right before the request."""
        return self.priority, not self.preempted, self.arrival


class ModuleJobs:
    """The jobs that encode texts, by the texts' content."""

    def __init__(self, tree: RadixCache, queue: FairQueue, fetching: Fetching) -> None:
        self._tree = tree
        self._queue = queue
        self._fetching = fetching
        self._jobs: dict[ChunkName, _Job] = {}
        self._waits: dict[Hashable, dict[ChunkName, None]] = {}
        self._next_id = FIRST_JOB_ID
        self._holder: SequenceGroup | None = None
        self._held: list[Node] = []
        self._new: list[SequenceGroup] = []
        self.started_texts = 0
        """Number of jobs started so far."""

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def held(self) -> list[Node]:
        """Chunks that are held for the first request in the queue."""
        return self._held

    def groups(self) -> Iterator[SequenceGroup]:
        """Return the groups of all jobs."""
        return (job.group for job in self._jobs.values())

    def take_new(self) -> list[SequenceGroup]:
        """Return the jobs made since the last call."""
        new, self._new = self._new, []
        return new

    # Waiting

    def encode_missing_texts(self, group: SequenceGroup, step: int, now: float, *, is_first: bool = False) -> bool:
        """Start jobs for the missing texts of a group, as many as allowed; return whether none is missing, and the
        group, if it is a job, does not wait for its own text to come from peers.

        Args:
            is_first: whether the group is the first request in the queue.
        """
        prompt = group.modules
        if prompt is None:
            return True
        if self._waits.get(group) or (group.encodes and self._fetching.awaits_pulls(group, now)):
            return False
        if len(self._jobs) >= JOBS_MAX and not (is_first or group.encodes):
            return False  # searching for the texts of many waiting groups would take too long
        found = {
            part.text: find_text(self._tree, prompt.texts[part.text], part.tokens(prompt), step).nodes
            for part in prompt.parts
        }
        lacking = [text for text, nodes in found.items() if not nodes]
        self._encode_for(group, prompt, lacking[:TEXTS_AT_ONCE], far=False)
        far = {text: sum(not self._tree.tiers.is_near(node) for node in nodes) for text, nodes in found.items()}
        crowd = sum(far.values()) > self._tree.tiers.config.host_slots // 2
        if crowd:
            # Host memory cannot hold all these texts at once, so a job for each brings it to the device by itself.
            wish = _wish_of(group, prompt)
            for text in list(filter(far.__getitem__, far))[:TEXTS_AT_ONCE]:
                self.encode(prompt.texts, text, wish)
        return not (lacking or crowd)

    def encode_far_texts(self, group: SequenceGroup, step: int) -> None:
        """Start jobs for those texts of a group that are in far tiers, from which they would come too late."""
        prompt = group.modules
        assert prompt is not None
        far = []
        for part in prompt.parts:
            found = find_text(self._tree, prompt.texts[part.text], part.tokens(prompt), step)
            if not all(self._tree.tiers.is_near(node) for node in found.nodes):
                far.append(part.text)
        self._encode_for(group, prompt, far[:TEXTS_AT_ONCE], far=True)

    def _encode_for(self, group: SequenceGroup, prompt: ModulePrompt, texts: list[int], *, far: bool) -> None:
        wish = _wish_of(group, prompt)
        for index in texts:
            text = prompt.texts[index]
            if text.content not in self._jobs and not group.encodes and group.found is None:
                prompt.encoded.add(index)
                start = text.tokens[: self._tree.chunk_bytes]
                name = first_chunk_name(text.place, text.position, start)
                prompt.miss = MissReason.SLOW if far else self._tree.departed(name) or MissReason.NEW
            self.encode(prompt.texts, index, wish, far=far)

    def encode(self, texts: list[CachedText], index: int, wish: Wish, *, far: bool = False) -> None:
        """Note that a request or call waits for a text; start a job for the text, unless there is one.

        Args:
            far: whether to compute the text even if it is in a far tier.
        """
        text = texts[index]
        job = self._jobs.get(text.content)
        if job is None:
            job = self._jobs[text.content] = _Job(self._group(texts, index, wish))
            self._queue.add(job.group)
            self.started_texts += 1
            self._new.append(job.group)
        elif self._is_before(wish, job.group):
            self._hurry(job.group, wish)
        if far:
            self._fetching.give_up(job.group)
        job.waiters[wish.waiter] = None
        self._waits.setdefault(wish.waiter, {})[text.content] = None

    def _is_before(self, wish: Wish, job: SequenceGroup) -> bool:
        """Return whether a wish has its turn before a job that computes the same text for other requests."""
        submit = job.request.submit
        if wish.tenant == submit.tenant:
            return wish.key < (submit.priority, not job.preempted, job.arrival)
        if wish.priority != submit.priority or not (isinstance(wish.waiter, SequenceGroup) and job.queued):
            return wish.priority < submit.priority
        return wish.waiter.queued and self._queue.is_before(wish.waiter, job)

    def _hurry(self, group: SequenceGroup, wish: Wish) -> None:
        """Make a job as urgent as a new wish. For a running job, that matters when groups are preempted."""
        queued = group.queued
        if queued:
            self._queue.remove(group)
        submit = structs.replace(group.request.submit, priority=wish.priority, tenant=wish.tenant)
        group.request = replace(group.request, submit=submit)
        group.preempted |= wish.preempted
        group.arrival = wish.arrival
        if queued:
            self._queue.add(group)

    def _group(self, texts: list[CachedText], index: int, wish: Wish) -> SequenceGroup:
        sampling = Sampling(temperature=0.0)
        tokens, count = texts[index].tokens, texts[index].token_count
        submit = Submit(0, tokens, count, 1, sampling, salt=wish.salt, priority=wish.priority, ttl=wish.ttl)
        submit = structs.replace(submit, tenant=wish.tenant)
        request = Request.of(self._next_id, submit)
        self._next_id -= 1
        group = SequenceGroup(request, wish.arrival, _NO_LIMIT, sampling)
        group.preempted = wish.preempted
        prompt = encoding_of(texts, index, self._tree.chunk_size)
        prompt.ttl = wish.ttl
        lay_out(group, prompt, _NO_LIMIT)
        return group

    def waits_of(self, waiter: Hashable) -> int:
        """Return how many texts are being encoded for a request or call."""
        return len(self._waits.get(waiter, ()))

    # Ending

    def found(self, step: int, *, probed: bool) -> list[SequenceGroup]:
        """Return the queued jobs whose text has come from peers or, if `probed`, turned up in any tier; they must
        be ended. The requests that wait for them are told where the text was."""
        found = []
        for group in self.groups():
            if not (group.queued and (probed or self._fetching.has_pulled(group))):
                continue
            text = _target(group)
            if find_text(self._tree, text, text.token_count, step).nodes:
                found.append(group)
                for waiter in self._jobs[text.content].waiters:
                    if isinstance(waiter, SequenceGroup) and waiter.queued:
                        self._fetching.pass_on(group, waiter)
        return found

    def done(self, group: SequenceGroup, step: int, *, computed: bool = True) -> None:
        """Note that a job has ended and its text can be found.

        Args:
            computed: whether the text was computed; else it was found in some tier.
        """
        text = _target(group)
        job = self._jobs.pop(text.content)
        for waiter in job.waiters:
            waits = self._waits[waiter]
            del waits[text.content]
            if not waits:
                del self._waits[waiter]
            if isinstance(waiter, SequenceGroup):
                if not computed and waiter.modules is not None:
                    waiter.modules.not_encoded(text)
            elif not computed and isinstance(waiter, _Call):
                waiter.computed_tokens -= text.token_count
        self._tree.totals.encoded_texts += computed
        self._tree.totals.encoded_tokens += text.token_count * computed
        if self._holder in job.waiters:
            self._hold(text, text.token_count, step)

    def left(self, waiter: Hashable) -> list[SequenceGroup]:
        """Note that a request or call no longer waits for texts.

        Returns:
            the jobs for which no request or call waits now, directly or through other jobs. They must be ended.
        """
        if waiter is self._holder:
            self.let_go()
        orphans: list[SequenceGroup] = []
        leaving = [waiter]
        for one in leaving:  # the list grows in the loop; a chain of texts may be too long for recursion
            for content in self._waits.pop(one, {}):
                job = self._jobs[content]
                del job.waiters[one]
                if not job.waiters:
                    del self._jobs[content]
                    orphans.append(job.group)
                    leaving.append(job.group)
        return orphans

    # Holding

    def hold_for(self, first: SequenceGroup | None, step: int) -> None:
        """Hold the complete texts of the first request in the queue, if it waits for other texts.

        Args:
            first: that request; None if no request waits.
        """
        if first is self._holder:
            return
        self.let_go()
        if first is None or first.modules is None or not self._waits.get(first):
            return
        self._holder = first
        self._queue.hold_turn(first)
        for part in first.modules.parts:
            self._hold(first.modules.texts[part.text], part.tokens(first.modules), step)

    def _hold(self, text: CachedText, stop: int, step: int) -> None:
        nodes = find_text(self._tree, text, stop, step).nodes
        if nodes and all(node.on_device and not self._tree.is_thin(node) for node in nodes):
            self._tree.hold(nodes[-1])
            self._held.append(nodes[-1])

    def let_go(self) -> None:
        """Release everything that is held."""
        for node in self._held:
            self._tree.release(node, node.last_use)
        self._held, self._holder = [], None
        self._queue.hold_turn(None)

    def make_way(self, blocked: SequenceGroup, *, going: bool) -> bool:
        """Release the texts that are held for a request behind a group that lacks blocks; return whether any were.

        A group behind the request that holds texts must wait. Otherwise requests could evict each other's texts
        for ever.

        Args:
            going: whether running sequences make progress.
        """
        if self._holder is None or not self._held:
            return False
        if going and not self._queue.is_before(blocked, self._holder):
            return False
        if blocked.encodes and self._serves(blocked, self._holder):
            return False
        self.let_go()
        return True

    def _serves(self, group: SequenceGroup, waiter: SequenceGroup) -> bool:
        """Return whether a request waits for a job, directly or through other jobs."""
        order, known = [group], {group}
        for one in order:  # the list grows in the loop
            for other in self._jobs[_target(one).content].waiters:
                if other is waiter:
                    return True
                if isinstance(other, SequenceGroup) and other.encodes and other not in known:
                    known.add(other)
                    order.append(other)
        return False


def _wish_of(group: SequenceGroup, prompt: ModulePrompt) -> Wish:
    submit = group.request.submit
    return Wish(group, submit.salt, submit.priority, group.preempted, group.arrival, prompt.ttl, submit.tenant)


def _target(group: SequenceGroup) -> CachedText:
    """Return the text that a job computes."""
    prompt = group.modules
    assert prompt is not None
    return prompt.texts[prompt.target]
