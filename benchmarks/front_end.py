"""What a turn of a conversation costs the router before the controller gets it, by the length of its history.

    python benchmarks/front_end.py [--quick] [--json PATH]

A `whole` client keeps nothing at the server: each request has the whole conversation, as chat clients and coding
agents send it; a `messages` client does the same at `/v1/messages`, and marks its last message with
`cache_control`. The answers end with white space that the client trims, so that they come back otherwise than
they were written. A `stored` one has a session, in memory, and sends what is new. An `items` client sends the
whole conversation to `/v1/responses`, a `continued` one what is new, with `previous_response_id`. A `tools` client
is one of `/v1/messages` whose users' messages are results of tools; an `edited` one lets old ones be cleared, but
for the last three. All parts are the router's own, called in the order in which a request meets them: JSON,
validation, the prompt (template and tokenizer, or what is remembered of it), the choice among two controllers by
the names of its chunks, the message to the controller; behind it the answer is remembered, and the turn of a
session stored. Sockets are left out.

`remembers` says whether the router remembers prompts. Times are CPU times of the process, of all its threads, the
median of some turns in one conversation.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import random
import time
from collections import defaultdict
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final, TypeVar

import msgspec
from report import Report, parse_arguments

from trunkline.router.api.anthropic import MESSAGES, MessagesRequest, as_conversation
from trunkline.router.api.anthropic_content import Warnings
from trunkline.router.api.blocks import as_chat
from trunkline.router.api.context_edits import read_edits
from trunkline.router.api.document_prompts import marks_of
from trunkline.router.api.edited_prompts import edited_prompt
from trunkline.router.api.openai_items import RESPONSES, ResponsesRequest
from trunkline.router.api.prompting import chat_job
from trunkline.router.api.response_input import to_items, to_messages
from trunkline.router.api.response_turn import ResponseTurn, open_response_turn
from trunkline.router.api.responses import ChatMessage
from trunkline.router.api.turn import SessionTurn, open_turn
from trunkline.router.config import RouterConfig
from trunkline.router.http.body import validate
from trunkline.router.http.continued_bodies import parse_body
from trunkline.router.jobs.job import Job
from trunkline.router.jobs.request_models import CHAT, ChatRequest
from trunkline.router.request_context import current, known
from trunkline.router.routing.core import RoutingCore
from trunkline.router.routing.names import KvIdentity
from trunkline.router.routing.request import RouteRequest
from trunkline.router.service import RouterService
from trunkline.router.stores.session_history import History
from trunkline.router.stores.session_state import SessionState
from trunkline.router.streams.submissions import submission
from trunkline.router.text.edits import Edit
from trunkline.router.text.tokenizer import Tokenizer
from trunkline.router.tools.plan import ToolPlan, prepare_tools

DEMO_MODEL: Final = Path(__file__).resolve().parents[1] / "deploy/trunkline/deploy/demo_model"
IDENTITY: Final = KvIdentity(b"model", "bfloat16", 64)
STEPS: Final = ("json", "validate", "prompt", "route", "submit", "remember")
SHORT: Final = ("stored", "continued")
"""Kinds of clients that send only what is new."""
ITEMS: Final = ("items", "continued")
"""Kinds of clients of `/v1/responses`."""
LOOK: Final = {"name": "look", "description": "Reads.", "input_schema": {"type": "object"}}
_CLEAR: Final = {"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 1}}
TOOLS: Final[dict[str, dict[str, Any]]] = {"tools": {}, "edited": {"context_management": {"edits": [_CLEAR]}}}
"""Kinds of clients of `/v1/messages` that use tools, with their further fields."""
_T = TypeVar("_T")
WORDS: Final = (
    "the file has a function that reads lines and returns them as a list of strings so we test it with none"
).split()


class Client:
    """A conversation that is sent whole with each turn."""

    def __init__(self, tokenizer: Tokenizer, history: int) -> None:
        """`history`: tokens of the conversation before the first turn that is measured, about."""
        self._rng = random.Random(history)
        self._tokenizer = tokenizer
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": self.text(800)}]
        a_turn = len(tokenizer.encode(self.text(240), add_special_tokens=False))
        for _ in range(history // a_turn):
            self.messages += [
                {"role": "user", "content": self.text(200)},
                {"role": "assistant", "content": self.text(40)},
            ]

    def text(self, words: int) -> str:
        """Return any text."""
        return " ".join(self._rng.choice(WORDS) for _ in range(words))

    def ask(self, kind: str, previous: str = "") -> bytes:
        """Return the body of the next turn of a client of this kind. `previous`: id of the last response."""
        self.messages.append({"role": "user", "content": self.text(200)})
        messages = self.messages[-1:] if kind in SHORT else self.messages
        body: dict[str, Any] = {"model": "demo", "messages": messages, "max_tokens": 200}
        if kind == "messages":
            system, *turns = messages
            text = {"type": "text", "text": turns[-1]["content"], "cache_control": {"type": "ephemeral"}}
            body |= {"messages": [*turns[:-1], {"role": "user", "content": [text]}], "system": system["content"]}
        if kind in TOOLS:
            body |= {"messages": with_calls(messages[1:]), "tools": [LOOK], **TOOLS[kind]}
        if kind in ITEMS:
            stored = {"previous_response_id": previous} if kind == "continued" else {"store": False}
            body = {"model": "demo", "input": messages, "max_output_tokens": 200, **stored}
        return json.dumps(body).encode()

    def answer(self) -> list[int]:
        """Return the tokens of an answer; the client keeps its text, trimmed."""
        said = self.text(40)
        self.messages.append({"role": "assistant", "content": said})
        return self._tokenizer.encode(said + " \n\n", add_special_tokens=False)


def with_calls(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation in which all messages of the user but the first are results of a tool."""
    found = turns[:1]
    for number, (said, asked) in enumerate(zip(turns[1::2], turns[2::2], strict=True)):
        call = {"type": "tool_use", "id": f"t{number}", "name": "look", "input": {"path": f"a/{number}"}}
        result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": asked["content"]}
        found.append({"role": "assistant", "content": [{"type": "text", "text": said["content"]}, call]})
        found.append({"role": "user", "content": [result]})
    return found


class FrontEnd:
    """The parts of a router that a request meets."""

    def __init__(self, tokenizer: Tokenizer, kind: str, *, remembers: bool, history: list[dict[str, Any]]) -> None:
        """
        Args:
            kind: That of the client.
            history: Messages of the session that all turns of a `stored` client belong to, or of the response that
                a `continued` one begins with.
        """
        config = RouterConfig(
            model_path=str(DEMO_MODEL),
            controllers=["ipc:///nowhere"],
            max_context=1 << 20,
            prompt_memory_bytes=RouterConfig(model_path="", controllers=[]).prompt_memory_bytes * remembers,
        )
        self._service = RouterService(config, tokenizer)
        self._core = RoutingCore(("0", "1"), "prefix")
        for controller in range(2):
            self._core.traits.set_identity(controller, IDENTITY)
            self._core.set_available(controller, True)
        self._loop = asyncio.new_event_loop()
        self._turns = 0
        self._edits: tuple[Edit, ...] = ()
        self._kind = kind
        self._session = self._run(self._stored(history)) if kind == "stored" else ""
        self.previous = self._run(self._response(history)) if kind == "continued" else ""
        self.times: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def _timed(self, step: str) -> Iterator[None]:
        began = time.process_time()
        yield
        self.times[step].append(time.process_time() - began)

    def turn(self, body: bytes, answer: list[int]) -> Job:
        """Take a request and its answer, and return its job."""
        with known(conversations=self._service.models.conversations):
            return self._turn(body, answer)

    def _turn(self, body: bytes, answer: list[int]) -> Job:
        with self._timed("json"):
            fields = parse_body(body)
        turn: SessionTurn | None = None
        with self._timed("validate"):
            if self._kind in ITEMS:
                request, plan, turn = self._read_items(fields)
            else:
                request, plan = self._read(fields)
        with self._timed("prompt"):
            if self._session:
                turn = self._run(open_turn(self._service, request, self._session, "chat"))
            edited = self._run(edited_prompt(self._service, request, plan, self._edits, turn))
            job = self._run(chat_job(self._service, request, plan, turn, edited))
        with self._timed("route"):
            begun = None if job.remembered is None else job.remembered.names
            route = RouteRequest(job.packed_prompt(), session="s", begun=begun, drops=job.cut.drops)
            decision = self._core.route(route, float(self._turns))
            self._core.sent(self._turns, decision, route, float(self._turns))
        with self._timed("submit"):
            msgspec.msgpack.encode(submission(job, self._turns))
        with self._timed("remember"):
            if job.remembered is not None:
                job.remembered.answered(answer, job.eos_ids)
            if turn is not None:
                self._run(self._store(turn, answer))
                turn.close()
        self._core.started(self._turns, float(self._turns))
        self._core.index.apply(decision.controller, b"".join(decision.names), b"\1" * len(decision.names))
        self._core.ended(self._turns, float(self._turns))
        self._turns += 1
        return job

    def _read(self, fields: dict[str, Any]) -> tuple[ChatRequest, ToolPlan]:
        if self._kind == "messages" or self._kind in TOOLS:
            MESSAGES.read(fields)
            body = validate(MessagesRequest, fields)
            marks_of(body)
            self._edits = read_edits(body.context_management, ["look"])
            request, plan, _ = as_conversation(self._service, body, {}, Warnings(), None)
            return request, plan
        CHAT.read(fields)
        tokenizer = self._service.tokenizer
        plan = prepare_tools(None, None, None, tokenizer.tool_style, tokenizer.reasoning)
        return validate(ChatRequest, fields), plan

    def _read_items(self, fields: dict[str, Any]) -> tuple[ChatRequest, ToolPlan, ResponseTurn | None]:
        RESPONSES.read(fields)
        body = validate(ResponsesRequest, fields)
        tokenizer, memory = self._service.tokenizer, current().conversations
        plan = prepare_tools(None, None, None, tokenizer.tool_style, tokenizer.reasoning)
        turn = self._run(open_response_turn(self._service, body)) if self.previous else None
        history = [] if turn is None else turn.items
        known = None if memory is None else memory.turns
        messages = to_messages(body.input, None, history, memory=known)
        chat = as_chat(body, {"messages": messages, "max_completion_tokens": body.max_output_tokens})
        if turn is not None:
            turn.add(to_items(body.input, [item["id"] for item in history], lambda: f"{self._turns}"))
        return chat, plan, turn

    async def _store(self, turn: SessionTurn, answer: list[int]) -> None:
        text = self._service.tokenizer.decode(answer)
        if not isinstance(turn, ResponseTurn):
            await turn.store_chat(ChatMessage(content=text), answer)
            return
        self.previous = f"resp_{self._turns:032x}"
        output = to_items([{"role": "assistant", "content": text}], (), lambda: f"a{self._turns}")
        await turn.store({"id": self.previous, "output": output}, answer)

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return self._loop.run_until_complete(work)

    async def _stored(self, messages: list[dict[str, Any]]) -> str:
        """Make a session of a conversation, and return its id."""
        sessions = self._service.sessions
        state = SessionState(model=self._service.model_name, history=History(form="chat", messages=messages))
        return (await sessions.create(sessions.draw_id(), state)).record.key.id

    async def _response(self, messages: list[dict[str, Any]]) -> str:
        """Make a stored response of a conversation, and return its id."""
        numbers = itertools.count()
        items = to_items(messages, (), lambda: f"h{next(numbers)}")
        state = SessionState(model=self._service.model_name, history=History(form="items", messages=items))
        await self._service.histories.responses.create("resp_" + 32 * "f", state)
        return "resp_" + 32 * "f"

    def close(self) -> None:
        """Stop its threads."""
        self._run(self._service.close())
        self._loop.close()


def measure(kind: str, history: int, turns: int, *, remembers: bool) -> tuple[int, dict[str, float]]:
    """Return the tokens of the last prompt, and the median of each step's seconds, by its name."""
    tokenizer = Tokenizer(DEMO_MODEL)
    client = Client(tokenizer, history)
    front = FrontEnd(tokenizer, kind, remembers=remembers, history=client.messages[:])
    for number in range(turns + 1):
        gc.collect()
        if number == 1:  # the first turn is the one in which nothing is known
            front.times.clear()
        job = front.turn(client.ask(kind, front.previous), client.answer())
    front.close()
    return len(job.prompt), {step: median(front.times[step]) for step in STEPS}


def main() -> None:
    """Measure and print."""
    arguments = parse_arguments(__doc__)
    report = Report("front_end")
    turns = 5 if arguments.quick else 15
    kinds = ("whole", "messages", *TOOLS, "items", "stored", "continued")
    for kind, remembers in (("whole", False), *((kind, True) for kind in kinds)):
        for history in (10_000, 50_000, 200_000):
            tokens, seconds = measure(kind, history, turns, remembers=remembers)
            case = {"client": kind, "remembers": remembers, "history": history}
            report.add(case, "length", tokens, "tokens", turns)
            for step, value in {**seconds, "all": sum(seconds.values())}.items():
                report.add(case, step, value * 1e6, "us", turns)
    report.finish(arguments.json, wide=True)


if __name__ == "__main__":
    main()
