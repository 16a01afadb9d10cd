"""What a turn of a conversation costs the router before the controller gets it, by the length of its history.

    python benchmarks/front_end.py [--quick] [--json PATH]

The client keeps nothing at the server: each request has the whole conversation, as chat clients and coding agents
send it. The answers end with white space that the client trims, so that they come back otherwise than they were
written. All parts are the router's own, called in the order in which a request meets them: JSON, validation, the
prompt (template and tokenizer, or what is remembered of it), the choice among two controllers by the names of its
chunks, the message to the controller; behind it the answer is remembered. Sockets are left out.

`remembers` says whether the router remembers prompts. Times are CPU times of the process, of all its threads, the
median of some turns in one conversation.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec
from report import Report, parse_arguments

from trunkline.router.api.prompting import chat_job
from trunkline.router.config import RouterConfig
from trunkline.router.http.body import parse_json_object, validate
from trunkline.router.jobs.job import Job
from trunkline.router.jobs.request_models import CHAT, ChatRequest
from trunkline.router.request_context import known
from trunkline.router.routing.core import RoutingCore
from trunkline.router.routing.names import KvIdentity
from trunkline.router.routing.request import RouteRequest
from trunkline.router.service import RouterService
from trunkline.router.streams.streams import submission
from trunkline.router.text.tokenizer import Tokenizer
from trunkline.router.tools.plan import prepare_tools

DEMO_MODEL: Final = Path(__file__).resolve().parents[1] / "deploy/trunkline/deploy/demo_model"
IDENTITY: Final = KvIdentity(b"model", "bfloat16", 64)
STEPS: Final = ("json", "validate", "prompt", "route", "submit", "remember")
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

    def ask(self) -> bytes:
        """Return the body of the next turn."""
        self.messages.append({"role": "user", "content": self.text(200)})
        return json.dumps({"model": "demo", "messages": self.messages, "max_tokens": 200}).encode()

    def answer(self) -> list[int]:
        """Return the tokens of an answer; the client keeps its text, trimmed."""
        said = self.text(40)
        self.messages.append({"role": "assistant", "content": said})
        return self._tokenizer.encode(said + " \n\n", add_special_tokens=False)


class FrontEnd:
    """The parts of a router that a request meets."""

    def __init__(self, tokenizer: Tokenizer, *, remembers: bool) -> None:
        config = RouterConfig(
            model_path=str(DEMO_MODEL),
            controllers=["ipc:///nowhere"],
            max_context=1 << 20,
            prompt_memory_bytes=RouterConfig(model_path="", controllers=[]).prompt_memory_bytes * remembers,
        )
        self._service = RouterService(config, tokenizer)
        self._core = RoutingCore(("0", "1"), "prefix")
        for controller in range(2):
            self._core.set_identity(controller, IDENTITY)
            self._core.set_available(controller, True, 0.0)
        self._loop = asyncio.new_event_loop()
        self._turns = 0
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
            fields = parse_json_object(body)
        with self._timed("validate"):
            CHAT.read(fields)
            request = validate(ChatRequest, fields)
            tokenizer = self._service.tokenizer
            plan = prepare_tools(None, None, None, tokenizer.tool_style, tokenizer.reasoning)
        with self._timed("prompt"):
            job = self._loop.run_until_complete(chat_job(self._service, request, plan))
        with self._timed("route"):
            begun = None if job.remembered is None else job.remembered.names
            route = RouteRequest(job.packed_prompt(), session="s", begun=begun)
            decision = self._core.route(route, float(self._turns))
            self._core.sent(self._turns, decision, route, float(self._turns))
        with self._timed("submit"):
            msgspec.msgpack.encode(submission(job, self._turns))
        with self._timed("remember"):
            if job.remembered is not None:
                job.remembered.answered(answer, job.eos_ids)
        self._core.started(self._turns, float(self._turns))
        self._core.index.apply(decision.controller, b"".join(decision.names), b"\1" * len(decision.names))
        self._core.ended(self._turns, float(self._turns))
        self._turns += 1
        return job

    def close(self) -> None:
        """Stop its threads."""
        self._loop.run_until_complete(self._service.close())
        self._loop.close()


def measure(history: int, turns: int, *, remembers: bool) -> tuple[int, dict[str, float]]:
    """Return the tokens of the last prompt, and the median of each step's seconds, by its name."""
    tokenizer = Tokenizer(DEMO_MODEL)
    client, front = Client(tokenizer, history), FrontEnd(tokenizer, remembers=remembers)
    for number in range(turns + 1):
        gc.collect()
        if number == 1:  # the first turn is the one in which nothing is known
            front.times.clear()
        job = front.turn(client.ask(), client.answer())
    front.close()
    return len(job.prompt), {step: median(front.times[step]) for step in STEPS}


def main() -> None:
    """Measure and print."""
    arguments = parse_arguments(__doc__)
    report = Report("front_end")
    turns = 5 if arguments.quick else 15
    for remembers in (False, True):
        for history in (10_000, 50_000, 200_000):
            tokens, seconds = measure(history, turns, remembers=remembers)
            case = {"remembers": remembers, "history": history}
            report.add(case, "length", tokens, "tokens", turns)
            for step, value in {**seconds, "all": sum(seconds.values())}.items():
                report.add(case, step, value * 1e6, "us", turns)
    report.finish(arguments.json, wide=True)


if __name__ == "__main__":
    main()
