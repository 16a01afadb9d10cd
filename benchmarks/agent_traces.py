"""Recorded conversations of coding agents: reading them, naming their blocks, and drawing some of the same shape.

A trace is a file of JSON lines, plain or gzipped, one conversation a line, numbers only:

    {"id", "tools", "system", "requests": [row, …],
     "agents": [{"t", "first", "kind", "tools", "system", "requests": [row, …]}, …]}
    row = [t, in, out, think, api, base, keep]

`tools` and `system` are the tokens that all prompts of an agent begin with. `agents` are its sub-agents, if it has
any. Requests are numbered in the order of the recording; a sub-agent's stand from number `first` on. A row says
when the request was sent (seconds since its agent's beginning `t`), the tokens of prompt and answer, the pause
before it and the time of its answer (seconds, null if not recorded), and what its prompt repeats: its first `keep`
blocks of 64 tokens are those of the prompt of request `base` (-1: of none). No block is used again behind a
divergence.

**Names.** A block is known by the request whose prompt brought it and by its place. As prompts diverge once and
for all, a block's name also tells what stands before it, as the names of real chunks do. Two things are not
recorded and are taken to be so:

- *Answers.* If the next prompt repeats all of a prompt and has room for its answer, the answer follows in it
  verbatim: the blocks that the answer filled have the names that they get in that prompt.
- *Clients.* Ids of blocks were local to a conversation. Where two agents have the same number of tokens of tools
  they are taken to have the same tools, and if the tokens of their system prompts agree, too, the same one. Within
  a conversation what was recorded holds.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any, Final

BLOCK: Final = 64
"""Tokens of a block of a trace."""
NONE: Final = -1
NAME_BYTES: Final = 16
_ROW: Final = 7


class TraceError(ValueError):
    """A line that is no conversation of this form."""


@dataclass(frozen=True, slots=True)
class Client:
    """What all prompts of an agent begin with."""

    tools: int
    """Tokens."""
    system: int


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a conversation. Times are seconds since the conversation's beginning."""

    number: int
    agent: int
    """0: the conversation itself; others are its sub-agents."""
    kind: str
    """Of the sub-agent; "": it is none."""
    client: Client
    turn: int
    """Number among the requests of its agent, from 0."""
    is_last: bool
    """Whether its agent sends no other one."""
    at_s: float
    prompt: int
    """Tokens."""
    answer: int
    think_s: float
    """Time of people and tools before it; NaN: not recorded."""
    api_s: float
    """Time that its answer took; NaN: not recorded."""
    base: int
    keep: int

    @property
    def blocks(self) -> int:
        """Whole blocks of its prompt."""
        return self.prompt // BLOCK

    @property
    def all_blocks(self) -> int:
        """Whole blocks of its prompt and its answer."""
        return (self.prompt + self.answer) // BLOCK


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation with its sub-agents, all requests by their numbers."""

    id: str
    requests: tuple[Request, ...]

    @property
    def agents(self) -> int:
        """How many agents it has, itself included."""
        return 1 + max(request.agent for request in self.requests)

    def edited(self, request: Request) -> int:
        """Return how many blocks of a request's prompt may be text that stood in the prompt before it, behind an
        edit: at most, because what was edited is among them. 0 for an agent's first request."""
        if request.base == NONE or not request.turn:
            return 0
        return max(0, min(self.requests[request.base].blocks, request.blocks) - request.keep)


def _number(value: Any, least: float, what: str) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not least <= value < math.inf:
        raise TraceError(f"{what} is {value!r}; it is a number of at least {least:g}")
    return float(value)


def _count(value: Any, least: int, what: str) -> int:
    number = _number(value, least, what)
    if number != int(number):
        raise TraceError(f"{what} is {value!r}; it is a whole number")
    return int(number)


def _rows(agent: Any, index: int, what: str) -> Iterator[Request]:
    """Requests of one agent; numbers count from its `first`, and are set right by the caller for the main one."""
    if not isinstance(agent, dict) or not isinstance(agent.get("requests"), list) or not agent["requests"]:
        raise TraceError(f"{what} has no list of requests")
    client = Client(
        _count(agent.get("tools"), 0, f"{what}: tools"), _count(agent.get("system"), 0, f"{what}: system")
    )
    start_s = _number(agent.get("t"), 0.0, f"{what}: t") if index else 0.0
    first = _count(agent.get("first"), 0, f"{what}: first") if index else 0
    kind = str(agent.get("kind", "")) if index else ""
    last = len(agent["requests"]) - 1
    for turn, row in enumerate(agent["requests"]):
        where = f"{what}, request {turn}"
        if not isinstance(row, list) or len(row) != _ROW:
            raise TraceError(f"{where} is no list of {_ROW} numbers")
        at_s, prompt, answer, think_s, api_s, base, keep = row
        yield Request(
            first + turn,
            index,
            kind,
            client,
            turn,
            turn == last,
            start_s + _number(at_s, 0.0, f"{where}: t"),
            _count(prompt, 1, f"{where}: in"),
            _count(answer, 0, f"{where}: out"),
            math.nan if think_s is None else _number(think_s, 0.0, f"{where}: think"),
            math.nan if api_s is None else _number(api_s, 0.0, f"{where}: api"),
            _count(base, NONE, f"{where}: base"),
            _count(keep, 0, f"{where}: keep"),
        )


def conversation(line: Any) -> Conversation:
    """Return the conversation of one line.

    Raises:
        TraceError: A sentence that says where the line is not of the form.
    """
    if not isinstance(line, dict):
        raise TraceError("a line is no object")
    name = str(line.get("id", ""))
    agents = line.get("agents", [])
    if not isinstance(agents, list):
        raise TraceError(f"{name}: agents is no list")
    by_number: dict[int, Request] = {}
    for index, agent in enumerate(agents, 1):
        for request in _rows(agent, index, f"{name}, agent {index}"):
            if request.number in by_number:
                raise TraceError(f"{name}: two requests have the number {request.number}")
            by_number[request.number] = request
    number = 0
    for request in _rows(line, 0, name):
        while number in by_number:
            number += 1
        by_number[number] = replace(request, number=number)
    requests = tuple(by_number[number] for number in sorted(by_number))
    if requests[-1].number != len(requests) - 1:
        raise TraceError(f"{name}: requests up to number {requests[-1].number}, but {len(requests)} in all")
    for request in requests:
        if not NONE <= request.base < request.number:
            raise TraceError(f"{name}, request {request.number}: base {request.base} is no earlier request")
        most = 0 if request.base == NONE else min(request.blocks, requests[request.base].blocks)
        if request.keep > most:
            raise TraceError(f"{name}, request {request.number}: keeps {request.keep} blocks of {most}")
    return Conversation(name, requests)


def read_traces(path: Path, count: int | None = None) -> list[Conversation]:
    """Return the conversations of a file, gzipped or not; the first `count` of them.

    Raises:
        OSError: The file cannot be read.
        TraceError: It is not of this form; the message begins with the number of the line.
    """
    with path.open("rb") as raw:
        is_gzip = raw.read(2) == b"\x1f\x8b"
    found: list[Conversation] = []
    with gzip.open(path, "rt") if is_gzip else path.open() as lines:
        for at, line in enumerate(lines, 1):
            if count is not None and len(found) >= count:
                break
            try:
                found.append(conversation(json.loads(line)))
            except ValueError as error:
                raise TraceError(f"line {at}: {error}") from error
    return found


class ChunkNames:
    """The names of a conversation's chunks, each of so many blocks. Chunks are whole: a tail has no name."""

    def __init__(self, whole: Conversation, blocks: int, *, clients: bool = True) -> None:
        """
        Args:
            blocks: Of a chunk.
            clients: Whether conversations of a client share tools and system prompt.
        """
        self._requests = whole.requests
        self._blocks = blocks
        self._own = whole.id.encode() + b"\0"
        self._paths: dict[int, list[bytes]] = {}
        self._answers: dict[int, int] = {}
        """By request: the one whose prompt has its answer."""
        self._clients: dict[int, Client] = {}
        """By request: the client whose front it brings."""
        seen: set[Client] = set()
        for request in whole.requests:
            base = None if request.base == NONE else whole.requests[request.base]
            if base is not None and request.keep == base.blocks and request.prompt >= base.prompt + base.answer:
                self._answers.setdefault(base.number, request.number)
            front = request.client.tools + request.client.system
            if clients and request.base == NONE and request.client not in seen and request.prompt >= front:
                self._clients[request.number] = request.client
            seen.add(request.client)

    def prompt(self, number: int) -> list[bytes]:
        """Return the names of the whole chunks of a request's prompt. The list is not to be changed."""
        if (known := self._paths.get(number)) is not None:
            return known
        request, kept = self._requests[number], 0
        path: list[bytes] = []
        if request.base != NONE:
            kept = request.keep // self._blocks
            path = self.prompt(request.base)[:kept]
        path += [self._name(number, at) for at in range(kept, request.blocks // self._blocks)]
        self._paths[number] = path
        return path

    def answer(self, number: int) -> list[bytes]:
        """Return the names of the chunks that a request's answer fills: they follow those of its prompt."""
        request, size = self._requests[number], self._blocks
        owner = self._answers.get(number, number)
        return [self._name(owner, at) for at in range(request.blocks // size, request.all_blocks // size)]

    def _name(self, number: int, chunk: int) -> bytes:
        """Return the name of the chunk at a place of the prompt of that request, which brought its last block."""
        end = (chunk + 1) * self._blocks
        owner = self._own + number.to_bytes(4, "little")
        client = self._clients.get(number)
        if client is not None:
            if end * BLOCK <= client.tools:
                owner = b"tools %d" % client.tools
            elif end * BLOCK <= client.tools + client.system:
                owner = b"system %d %d" % (client.tools, client.system)
        return blake2b(owner + end.to_bytes(4, "little"), digest_size=NAME_BYTES).digest()


# Synthetic conversations

_CLIENTS: Final = ((12_597, 2_134), (10_971, 3_767), (9_568, 2_418))
_SUB_CLIENT: Final = (8_306, 735)
_CONTEXT: Final = 170_000
"""Tokens at which a conversation is compacted."""


class _Agent:
    """Draws the requests of an agent: prompts grow by answers and new text; some are edited, some compacted."""

    def __init__(self, rng: Random, scale: float, client: tuple[int, int]) -> None:
        self.rng = rng
        self.scale = scale
        self.tools, self.system = (int(scale * part) for part in client)
        self.front = self.tools + self.system
        self.rows: list[list[float]] = []
        self.now_s = 0.0
        self.prompt = self.front + self.tokens(3000, 0.8)
        self.base, self.keep = NONE, 0

    def tokens(self, median: float, sigma: float) -> int:
        return max(8, int(self.scale * median * math.exp(self.rng.gauss(0.0, sigma))))

    def ask(self, number: int) -> None:
        """Send the request with that number, and think of the next one."""
        think_s = 0.0
        if self.rows:  # mostly tools, sometimes people, at times a long absence
            median = self.rng.choices((9.0, 90.0, 1500.0), (0.8, 0.18, 0.02))[0]
            think_s = round(median * math.exp(self.rng.gauss(0.0, 0.6)), 3)
        answer = self.tokens(220, 0.9)
        api_s = round(1.5 + answer / self.scale / 60, 3)
        self.now_s += think_s
        self.rows.append([round(self.now_s, 3), self.prompt, answer, think_s, api_s, self.base, self.keep])
        self.now_s += api_s
        self.base, self.keep = number, self.prompt // BLOCK
        grown = self.prompt + answer + self.tokens(1000, 1.0)
        if grown > self.scale * _CONTEXT:
            self.keep = self.front // BLOCK
            grown = self.front + self.tokens(8000, 0.4)
        elif self.rng.random() < 0.02:
            self.keep = self.rng.randrange(self.front // BLOCK, self.keep + 1)
        self.prompt = grown


def synthetic_lines(count: int, seed: int = 0, scale: float = 1.0) -> Iterator[dict[str, Any]]:
    """Draw `count` lines of a trace; see `synthetic`."""
    for at in range(count):
        rng = Random(f"agents {seed} {at}")
        agent = _Agent(rng, scale, rng.choice(_CLIENTS))
        turns = min(400, max(2, round(48 * math.exp(rng.gauss(0.0, 1.0)))))
        forks_at = rng.randrange(1, turns) if rng.random() < 0.1 else -1
        number = 0
        line: dict[str, Any] = {"id": f"synthetic_{seed}_{at}", "tools": agent.tools, "system": agent.system}
        for turn in range(turns):
            if turn == forks_at:
                helper = _Agent(rng, scale, _SUB_CLIENT)
                head = {"t": round(agent.now_s + 0.1, 3), "first": number, "kind": "Explore"}
                for _ in range(rng.randrange(3, 12)):
                    helper.ask(number)
                    number += 1
                agent.now_s += helper.now_s  # a parent waits for its sub-agent
                front = {"tools": helper.tools, "system": helper.system}
                line["agents"] = [{**head, **front, "requests": helper.rows}]
            agent.ask(number)
            number += 1
        yield {**line, "requests": agent.rows}


def synthetic(count: int, seed: int = 0, scale: float = 1.0) -> list[Conversation]:
    """Return `count` conversations whose statistics are near those of recorded ones.

    Args:
        scale: Of all lengths in tokens: 1 for prompts of about 100,000 tokens.
    """
    return [conversation(line) for line in synthetic_lines(count, seed, scale)]
