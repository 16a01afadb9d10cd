"""A controller and its GPU in simulated time: continuous batching with chunked prefill over a prefix cache.

Requests wait in one FCFS queue. A step computes one token for each running row and, with what is left of the
token budget, prompts in the order of their admission. Admission needs blocks for all that a request will ever
hold, so nothing is preempted. What a request refers to stays on the device until it ends; after that the least
recently used chunk makes room (the end of a chain before its beginning) and, where there is a host tier, goes
there. A chunk that somebody computes already is not computed twice.

Steps without prefill are taken many at a time, up to the next end of a row or the next arrival.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any, Final

from routing_workloads import CHUNK

DEVICE: Final = 1
HOST: Final = 2
"""Tiers of a chunk, as in `KvEvents`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One H100 (80 GB, 3.35 TB/s, 400 of 990 Tflop/s reached) that serves a 14B model in bfloat16 (40 layers, 8 KV
    heads of 128, hidden size 5,120), 2,048 tokens a step."""

    step_us: float = 10_000.0
    """28 GB of weights read (8.4 ms), and what launching costs."""
    prefill_us: float = 70.0
    """Each prompt token: 28 Gflop."""
    attention_us: float = 0.002
    """Each prompt token and token before it: 0.8 Mflop."""
    row_us: float = 30.0
    """Each row that decodes: sampling, and the host's part."""
    kv_read_us: float = 0.05
    """Each token of a row's context: 160 KiB."""
    load_us: float = 8.0
    """Each token that comes from host memory: 20 GB/s."""
    pull_us: float = 21.0
    """Each token that comes from another controller's host memory: 12.5 GB/s, then as from the own one."""
    budget_tokens: int = 2048
    rows_max: int = 256
    waiting_max: int = 1024
    """More are refused."""
    device_chunks: int = 480
    """240k tokens: 40 GB."""
    host_chunks: int = 0

    @property
    def prefill_mean_us(self) -> float:
        """What a controller would have measured: with its share of a full step, and 8k tokens before it."""
        return self.prefill_us + self.step_us / self.budget_tokens + self.attention_us * 8192


class Job:
    """A request at one controller."""

    __slots__ = (
        "cached", "estimate", "finish_step", "givers", "names", "output", "owner", "private", "prompt",
        "prompt_chunks", "pulled", "remaining", "ticket",
    )  # fmt: skip

    def __init__(self, ticket: int, prompt: int, output: int, names: list[bytes], owner: Any) -> None:
        self.ticket = ticket
        self.prompt = prompt
        self.output = output
        self.names = names
        """Of prompt and output."""
        self.owner = owner
        """Of the driver."""
        self.prompt_chunks = prompt // CHUNK
        self.remaining = prompt
        """Prompt tokens that have to be computed."""
        self.estimate = prompt
        """The same, as it seemed when the request came."""
        self.cached = 0
        """Prompt tokens that were found."""
        self.pulled = 0
        """Those of them that came from other controllers."""
        self.givers: list[tuple[Server, int, int]] = []
        """Controllers that are said to have chunks of the prompt, from the first one up to the second."""
        self.private = 0
        """Blocks for what has no name yet."""
        self.finish_step = 0


class Clock:
    """Where a controller is in time."""

    def __init__(self) -> None:
        self.steps = 0
        self.begun_s = 0.0
        """Begin of the steps under way."""
        self.step_s = 0.0
        """Length of one of them."""


class Server:
    """One controller. The driver calls `begin` to start a step and `end` at the time that it gave."""

    def __init__(self, gpu: Gpu, *, exports: bool = False) -> None:
        """`exports`: it saves chunks to host memory as they fill, and gives them to others from there."""
        self.gpu = gpu
        self.exports = exports and gpu.host_chunks > 0
        self._saved: set[bytes] = set()
        """Chunks on the device that are in host memory, too."""
        self.cache: dict[bytes, int] = {}
        """Chunks on the device (or being computed), and how many requests refer to them."""
        self.idle: OrderedDict[bytes, None] = OrderedDict()
        """Those that nobody refers to, the least recently used first."""
        self.host: OrderedDict[bytes, None] = OrderedDict()
        self.waiting: deque[Job] = deque()
        self.prefilling: list[Job] = []
        self.rows: list[tuple[int, int, Job]] = []
        """Heap by the step in which they end."""
        self.changed: dict[bytes, int] = {}
        """Chunks by the tiers they are in now; the driver takes them away."""
        self.queued_tokens = 0
        self._clock = Clock()
        self._private = 0
        self._context = 0
        """Tokens that all rows together see."""
        self._taken: list[tuple[Job, int]] = []

    @property
    def requests(self) -> int:
        return len(self.waiting) + len(self.prefilling) + len(self.rows)

    @property
    def kv_used(self) -> float:
        """Share of the device's blocks that running requests hold."""
        return (len(self.cache) - len(self.idle) + self._private) / self.gpu.device_chunks

    def jobs(self) -> list[Job]:
        return [*self.waiting, *self.prefilling, *(job for _, _, job in self.rows)]

    def generated(self, job: Job) -> int:
        """Tokens that a job has brought so far."""
        return job.output - (job.finish_step - self._clock.steps) if job.finish_step else 0

    def submit(self, job: Job) -> bool:
        """False: too many wait."""
        if len(self.waiting) >= self.gpu.waiting_max:
            return False
        job.estimate = max(1, job.prompt - sum(self._match(job)) * CHUNK)
        self.queued_tokens += job.estimate
        self.waiting.append(job)
        return True

    def begin(self, now: float) -> float:
        """Plan the next step (or several); when it ends; infinity: there is nothing to do."""
        gpu = self.gpu
        budget = gpu.budget_tokens - len(self.rows)
        taken: list[tuple[Job, int]] = []
        spent_us = gpu.step_us + gpu.row_us * len(self.rows) + gpu.kv_read_us * self._context
        for job in self.prefilling:
            if budget <= 0:
                break
            budget -= self._take(job, budget, taken)
        while budget > 0 and self.waiting and len(self.rows) + len(self.prefilling) < gpu.rows_max:
            job = self.waiting[0]
            loaded_us = self._admit(job)
            if loaded_us < 0:
                break
            self.waiting.popleft()
            self.prefilling.append(job)
            spent_us += loaded_us
            budget -= self._take(job, budget, taken)
        self._taken = taken
        self._clock.begun_s = now
        if taken:
            for job, tokens in taken:
                before = job.prompt - job.remaining
                spent_us += tokens * (gpu.prefill_us + gpu.attention_us * (before + tokens / 2))
            self._clock.step_s = spent_us * 1e-6
            return now + self._clock.step_s
        if not self.rows:
            return math.inf
        steps = self.rows[0][0] - self._clock.steps
        spent_us += gpu.kv_read_us * len(self.rows) * (steps - 1) / 2
        self._clock.step_s = spent_us * 1e-6
        return now + steps * self._clock.step_s

    def interrupted(self, now: float) -> float:
        """Something has arrived at `now`: when the step under way ends; infinity: it has to finish as planned."""
        if self._taken or len(self.waiting) > 1 or not self.rows:
            return math.inf
        steps = max(1, math.ceil((now - self._clock.begun_s) / self._clock.step_s))
        return (
            self._clock.begun_s + steps * self._clock.step_s
            if steps < self.rows[0][0] - self._clock.steps
            else math.inf
        )

    def end(self, now: float) -> tuple[list[Job], list[Job]]:
        """The step is over: jobs that have brought their first token, and jobs that have ended."""
        steps = 1 if self._taken else round((now - self._clock.begun_s) / self._clock.step_s)
        self._clock.steps += steps
        self._context += steps * len(self.rows)
        started = []
        for job, tokens in self._taken:
            job.remaining -= tokens
            self.queued_tokens -= tokens
            if job.remaining == 0:
                job.finish_step = self._clock.steps + job.output - 1
                self._save(job.names[: job.prompt_chunks])
                self._context += job.prompt + 1
                heapq.heappush(self.rows, (job.finish_step, job.ticket, job))
                started.append(job)
        if started:
            self.prefilling = [job for job in self.prefilling if job.remaining]
        self._taken = []
        ended = []
        while self.rows and self.rows[0][0] <= self._clock.steps:
            job = heapq.heappop(self.rows)[2]
            self._finish(job)
            ended.append(job)
        return started, ended

    def _take(self, job: Job, budget: int, taken: list[tuple[Job, int]]) -> int:
        tokens = min(budget, job.remaining)
        taken.append((job, tokens))
        return tokens

    def gives(self, name: bytes) -> bool:
        """Whether another controller can have a chunk."""
        return self.exports and (name in self._saved or name in self.host)

    def _save(self, names: list[bytes]) -> None:
        """Chunks are computed, and saved to host memory."""
        if self.exports:
            for name in names:
                if name in self.cache and name not in self._saved:
                    self._saved.add(name)
                    self.changed[name] = DEVICE | HOST

    def _match(self, job: Job) -> tuple[int, int, int]:
        """Chunks of the longest known prefix that are on the device, only in host memory, and only elsewhere."""
        cache, host = self.cache, self.host
        device = loaded = pulled = 0
        for index, name in enumerate(job.names[: job.prompt_chunks]):
            if name in cache:
                device += 1
            elif name in host:
                loaded += 1
            elif any(start <= index < stop and giver.gives(name) for giver, start, stop in job.givers):
                pulled += 1
            else:
                break
        return device, loaded, pulled

    def _admit(self, job: Job) -> float:
        """Give a request its blocks; how long loading its chunks takes, in us; -1: there are too few blocks."""
        cache, idle = self.cache, self.idle
        device, loaded, pulled = self._match(job)
        found = device + loaded + pulled
        total = -(-(job.prompt + job.output) // CHUNK)
        names = job.names[: job.prompt_chunks]
        unused = self.gpu.device_chunks - len(cache) - self._private
        lack = total - device - unused
        if lack > len(idle) - sum(1 for name in names[:found] if name in idle):
            return -1
        for index, name in enumerate(names):
            if name in cache:
                cache[name] += 1
                idle.pop(name, None)
            elif index < found and name in self.host:
                self.host.move_to_end(name)
        for _ in range(lack):
            self._evict()
        for name in names:
            if name not in cache:
                cache[name] = 1
                # Told as soon as it has a block: who needs it waits, rather than compute it again.
                self.changed[name] = DEVICE | (HOST if name in self.host else 0)
        job.private = total - len(names)
        self._private += job.private
        job.cached = min(found * CHUNK, job.prompt - 1)
        job.pulled = min(pulled * CHUNK, job.cached)
        job.remaining = job.prompt - job.cached
        self.queued_tokens += job.remaining - job.estimate
        return CHUNK * (loaded * self.gpu.load_us + pulled * self.gpu.pull_us)

    def _evict(self) -> None:
        name, _ = self.idle.popitem(last=False)
        del self.cache[name]
        self._saved.discard(name)
        host = self.host
        if not self.gpu.host_chunks:
            self.changed[name] = 0
            return
        self.changed[name] = HOST
        host[name] = None
        host.move_to_end(name)
        if len(host) > self.gpu.host_chunks:
            gone, _ = host.popitem(last=False)
            on_device = (DEVICE | HOST if gone in self._saved else DEVICE) if gone in self.cache else 0
            self.changed[gone] = on_device

    def _finish(self, job: Job) -> None:
        cache, idle = self.cache, self.idle
        self._context -= job.prompt + job.output
        self._private -= job.private
        for name in job.names[job.prompt_chunks :]:
            if name not in cache:
                cache[name] = 1
                self.changed[name] = DEVICE | (HOST if name in self.host else 0)
            else:
                cache[name] += 1
        for name in reversed(job.names):
            cache[name] -= 1
            if not cache[name]:
                idle[name] = None
                idle.move_to_end(name)
        self._save(job.names)
