"""Requests to route, made from the statistics of published traces, from a seed.

A prompt is a chain of chunk names: whoever shares a prefix shares the names of its full chunks. A session is a
list of turns, each with all that was said before in its prompt. In an *open* session turns come at set times,
answered or not, as when a trace is replayed; in a *closed* one the next comes some time after the last answer, as
from people.

- `conversation`: Mooncake's chat trace (3.4 requests/s; prompts of 6.9k, 27k and 85k tokens at p50, p90 and p99;
  343 tokens of output; with an infinite cache 37 % of blocks hit; 76 % of blocks are used once; half of the reuse
  within 114 s, 90 % within 519 s), 1.4 times as fast. Here 63 % of blocks are used once, half of the reuse comes
  within 99 s and 90 % within 386 s; the rest agrees.
- `synthetic`: like Mooncake's synthetic trace (prompts of 15k tokens, two thirds of which repeat, 149 tokens of
  output), 1.2 times as fast: agents with a tool's long instructions, a document of their own, and short turns.
- `groups`: 40 requests/s, each with one of 150 prefixes of 6k tokens, all alike popular. All of them do not fit
  into one cache, an eighth of them does.
- `zipf`: the same at 30/s, with few prefixes that are popular and many that are not.
- `chat`: people who talk, 2 to 15 turns with a system prompt that hundreds share, and think between turns.
- `bursts`: API calls that come in flocks of siblings within a second, each flock with a prefix never seen before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Final

CHUNK: Final = 512
"""Tokens of a chunk, Mooncake's block. Larger than the engine's 64 so that thousands of prompts take seconds: more
of a tail is rounded off, nothing else."""
_PROMPT_MAX: Final = 120_000
_HOST_CHUNKS: Final = 1600
"""800k tokens in 128 GB of host memory for each GPU. Mooncake's traces are about such a cache; the other workloads
are about the little that fits beside the model."""


@dataclass(slots=True)
class Turn:
    """One request."""

    at: float
    """Seconds: when it comes (open session, and any first turn), or how long after the last answer."""
    prompt: int
    """Tokens."""
    output: int
    """Tokens, at least 1."""
    names: list[bytes]
    """Of the full chunks of prompt and output."""


@dataclass(slots=True)
class Session:
    """Turns of one conversation."""

    key: str
    """"": whoever sends these requests names no session."""
    turns: list[Turn]
    is_closed: bool = False


@dataclass(slots=True)
class Workload:
    """What clients send."""

    sessions: list[Session]
    seconds: float
    """Nothing comes later."""
    warmup: float
    """Requests that come before are not counted: caches are cold."""
    host_chunks: int = 0
    """Of each controller's host tier."""


class Chains:
    """Hands out names that nobody has."""

    def __init__(self) -> None:
        self._count = 0

    def extend(self, names: list[bytes], tokens: int) -> None:
        """Names for the full chunks of `tokens`, of which `names` are the first."""
        for _ in range(len(names), tokens // CHUNK):
            self._count += 1
            names.append(self._count.to_bytes(16, "big"))

    def chain(self, tokens: int) -> list[bytes]:
        """A prefix of its own."""
        names: list[bytes] = []
        self.extend(names, tokens)
        return names


def lognormal(rng: Random, median: float, sigma: float, low: float = 1, high: float = math.inf) -> int:
    return int(min(high, max(low, median * math.exp(sigma * rng.gauss(0, 1)))))


def _poisson(rng: Random, rate: float, start: float, stop: float) -> list[float]:
    times, now = [], start + rng.expovariate(rate)
    while now < stop:
        times.append(now)
        now += rng.expovariate(rate)
    return times


def _zipf(count: int, exponent: float) -> list[float]:
    """Cumulative weights of ranks."""
    return list(accumulate(1 / rank**exponent for rank in range(1, count + 1)))


@dataclass(slots=True)
class _Talk:
    """A session being drawn: its context grows turn by turn."""

    chains: Chains
    names: list[bytes]
    context: int
    turns: list[Turn]

    def turn(self, at: float, user: int, output: int) -> bool:
        """Append a turn of `user` new tokens; False: the context is full."""
        prompt = self.context + user
        if prompt + output > _PROMPT_MAX:
            return False
        self.context = prompt + output
        self.chains.extend(self.names, self.context)
        self.turns.append(Turn(at, prompt, output, self.names[: self.context // CHUNK]))
        return True


def conversation(seed: int, scale: float = 1.0, load: float = 1.0) -> Workload:
    """Mooncake's chat trace, 1.4 times as fast."""
    rng, chains = Random(f"conversation {seed}"), Chains()
    seconds, past = 600 * scale, 1200.0
    system = chains.chain(CHUNK)
    sessions = []
    # Sessions that began before the start are under way, or the share of later turns would grow all the time.
    for number, start in enumerate(_poisson(rng, 1.78 * 1.4 * load, -past, seconds)):
        talk, now = _Talk(chains, list(system), CHUNK, []), start
        first = lognormal(rng, 3300, 1.35, 50, 90_000)
        while now < seconds:
            if not talk.turn(now, first, lognormal(rng, 230, 0.9, 1, 2000)):
                break
            if rng.random() > 0.52:
                break
            first = lognormal(rng, 2000, 1.3, 20, 40_000)
            now += lognormal(rng, 220, 1.35, 2)
        turns = [turn for turn in talk.turns if turn.at >= 0]
        if turns:
            sessions.append(Session(f"c{number}", turns))
    return Workload(sessions, seconds, seconds / 5, _HOST_CHUNKS)


def synthetic(seed: int, scale: float = 1.0, load: float = 1.0) -> Workload:
    """Agents with tools: long shared prefixes, a document, many short turns; 1.2 times as fast."""
    rng, chains = Random(f"synthetic {seed}"), Chains()
    seconds, past = 450 * scale, 300.0
    tools = [chains.chain(lognormal(rng, 4000, 0.5, 1024, 12_000)) for _ in range(30)]
    weights = _zipf(len(tools), 1.0)
    sessions = []
    for number, start in enumerate(_poisson(rng, 2.8 * 1.2 * load, -past, seconds)):
        tool = rng.choices(tools, cum_weights=weights)[0]
        talk, now = _Talk(chains, list(tool), len(tool) * CHUNK, []), start
        user = lognormal(rng, 6500, 0.7, 200, 60_000)
        for _ in range(1 + int(rng.expovariate(1 / 1.8))):
            if now >= seconds or not talk.turn(now, user, lognormal(rng, 120, 0.7, 1, 1000)):
                break
            user = lognormal(rng, 800, 1.0, 20, 10_000)
            now += lognormal(rng, 25, 1.0, 1)
        turns = [turn for turn in talk.turns if turn.at >= 0]
        if turns:
            sessions.append(Session(f"a{number}", turns))
    return Workload(sessions, seconds, seconds / 5, _HOST_CHUNKS)


def _grouped(label: str, seed: int, seconds: float, rate: float, exponent: float) -> Workload:
    rng, chains = Random(f"{label} {seed}"), Chains()
    prefixes = [chains.chain(6144) for _ in range(150)]
    weights = _zipf(len(prefixes), exponent)
    sessions = []
    for now in _poisson(rng, rate, 0, seconds):
        prefix = rng.choices(prefixes, cum_weights=weights)[0]
        talk = _Talk(chains, list(prefix), len(prefix) * CHUNK, [])
        talk.turn(now, lognormal(rng, 1000, 0.7, 20, 6000), lognormal(rng, 100, 0.7, 1, 800))
        sessions.append(Session("", talk.turns))
    return Workload(sessions, seconds, seconds / 4)


def groups(seed: int, scale: float = 1.0, load: float = 1.0) -> Workload:
    """150 prefixes, alike popular."""
    return _grouped("groups", seed, 120 * scale, 40 * load, 0.0)


def zipf(seed: int, scale: float = 1.0, load: float = 1.0) -> Workload:
    """150 prefixes, the first a fifth of all requests."""
    return _grouped("zipf", seed, 150 * scale, 30 * load, 1.0)


def chat(seed: int, scale: float = 1.0, load: float = 1.0) -> Workload:
    """People; 4.5 sessions begin each second."""
    rng, chains = Random(f"chat {seed}"), Chains()
    seconds = 300 * scale
    systems = [chains.chain(lognormal(rng, 1500, 0.6, 512, 6000)) for _ in range(12)]
    weights = _zipf(len(systems), 1.0)
    sessions = []
    for number, start in enumerate(_poisson(rng, 4.5 * load, 0, seconds)):
        system = rng.choices(systems, cum_weights=weights)[0]
        talk, gap = _Talk(chains, list(system), len(system) * CHUNK, []), start
        for _ in range(2 + int(rng.expovariate(1 / 3.5))):
            user = lognormal(rng, 300, 1.2, 10, 8000)
            if not talk.turn(gap, user, lognormal(rng, 220, 0.8, 1, 1500)):
                break
            gap = lognormal(rng, 20, 0.9, 2)
        sessions.append(Session(f"t{number}", talk.turns, is_closed=True))
    return Workload(sessions, seconds, seconds / 4)


def bursts(seed: int, scale: float = 1.0, load: float = 1.0) -> Workload:
    """Flocks of siblings; 0.9 flocks come each second."""
    rng, chains = Random(f"bursts {seed}"), Chains()
    seconds = 200 * scale
    sessions = []
    for start in _poisson(rng, 0.9 * load, 0, seconds):
        prefix = chains.chain(lognormal(rng, 8000, 0.5, 2048, 30_000))
        for _ in range(lognormal(rng, 20, 0.7, 4, 100)):
            talk = _Talk(chains, list(prefix), len(prefix) * CHUNK, [])
            talk.turn(start + rng.random(), lognormal(rng, 250, 0.7, 20, 2000), lognormal(rng, 80, 0.7, 1, 500))
            sessions.append(Session("", talk.turns))
    return Workload(sessions, seconds, seconds / 5)


WORKLOADS: Final[dict[str, Callable[[int, float, float], Workload]]] = {
    "conversation": conversation,
    "synthetic": synthetic,
    "groups": groups,
    "zipf": zipf,
    "chat": chat,
    "bursts": bursts,
}
"""By name: a seed, a factor of the duration and one of the rate."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of an open workload, as traces are described."""

    requests: int
    per_s: float
    prompt_mean: float
    prompt_p50: int
    prompt_p90: int
    prompt_p99: int
    output_mean: float
    ideal_hits: float
    """Share of prompt tokens that a cache which is infinite and always warm would find."""
    used_once: float
    """Share of distinct chunks that only one request has in its prompt."""
    reuse_p50_s: float
    reuse_p90_s: float


def statistics(workload: Workload) -> Statistics:
    """Of all turns, in order of time; of closed sessions as if every answer came at once."""
    requests: list[tuple[float, Turn]] = []
    for session in workload.sessions:
        now = 0.0
        for turn in session.turns:
            now = now + turn.at if session.is_closed else turn.at
            requests.append((now, turn))
    requests.sort(key=lambda request: request[0])
    last: dict[bytes, float] = {}
    uses: dict[bytes, int] = {}
    gaps, hits = [], 0
    for now, turn in requests:
        names = turn.names[: turn.prompt // CHUNK]
        for name in names:
            if name in last:
                hits += CHUNK
                gaps.append(now - last[name])
            last[name] = now
            uses[name] = uses.get(name, 0) + 1
        for name in turn.names[len(names) :]:
            last[name] = now
    prompts = sorted(turn.prompt for _, turn in requests)
    gaps.sort()
    count = len(prompts)
    return Statistics(
        requests=count,
        per_s=count / requests[-1][0],
        prompt_mean=sum(prompts) / count,
        prompt_p50=prompts[count // 2],
        prompt_p90=prompts[count * 9 // 10],
        prompt_p99=prompts[count * 99 // 100],
        output_mean=sum(turn.output for _, turn in requests) / count,
        ideal_hits=hits / sum(prompts),
        used_once=sum(1 for count in uses.values() if count == 1) / len(uses),
        reuse_p50_s=gaps[len(gaps) // 2],
        reuse_p90_s=gaps[len(gaps) * 9 // 10],
    )
