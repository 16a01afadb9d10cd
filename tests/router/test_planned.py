"""Prompts that one group computes for another: what is sent where, and what clients see if something happens."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq
from router.fake_controller import FakeController
from router.harness import ANSWER, EOS, RunningRouter, asking, running, wait_until
from seeds import seeds

from trunkline.controller.messages import Holder, Submit
from trunkline.router.messages import FinishReason, KvEvents
from trunkline.router.routing.names import KvIdentity, prompt_names
from trunkline.router.routing.request import RouteRequest
from trunkline.router.streams.planned import PIECES_MAX
from trunkline.router.text.tokenizer import Tokenizer

pytestmark = pytest.mark.processes

CHUNK = 16
IDENTITY = KvIdentity(b"f" * 16, "float32", CHUNK)
IN_HOST = 1 << 1
PROMPT = "Say it again. " * 220
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 60}


@contextmanager
def cluster(
    place: Path, tokenizer: Tokenizer, *roles: str, token_s: float = 0.0
) -> Iterator[tuple[RunningRouter, list[FakeController], httpx.Client]]:
    """A router that knows the roles of its groups, which exchange chunks."""
    events = [f"ipc://{place}/events-{index}" for index in range(len(roles))]
    with (
        running(place, tokenizer, controllers=len(roles), events=events, resume_seconds=20.0) as (router, fakes),
        httpx.Client(base_url=router.url, timeout=60, trust_env=False) as http,
    ):
        for role, fake in zip(roles, fakes, strict=True):
            fake.behaviour.seconds_per_token = token_s
            fake.behaviour.told = {
                "role": role,
                "exports": [fake.endpoint],
                "fingerprint": IDENTITY.fingerprint,
                "dtype": IDENTITY.dtype,
                "chunk_size": CHUNK,
            }
        core = router.service.dispatcher.core
        wait_until(lambda: all(core.traits.exports(index) for index in range(len(roles))))
        yield router, fakes, http
        wait_until(lambda: router.inflight == router.service.dispatcher.waiting_count == 0)
        wait_until(lambda: not any(router.service.dispatcher._planned._plans.values()))


def outcomes(http: httpx.Client) -> dict[str, int]:
    start = "trunkline_planned_continuations_total{outcome="
    found = (line.split() for line in http.get("/metrics").text.splitlines() if line.startswith(start))
    return {name.split('"')[1]: int(float(value)) for name, value in found}


def expected_tokens(http: httpx.Client) -> int:
    """How many prompt tokens routing has counted, wherever they were."""
    start = "trunkline_routing_expected_tokens_total{"
    lines = [line for line in http.get("/metrics").text.splitlines() if line.startswith(start)]
    return sum(int(float(line.split()[1])) for line in lines)


def submits(fake: FakeController) -> list[Submit]:
    return fake.behaviour.submits


def text_of(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    if not reply.text.startswith("data:"):
        return str(reply.json()["choices"][0]["text"])
    parts = [part.removeprefix("data: ") for part in reply.text.split("\n\n") if part]
    assert parts.pop() == "[DONE]"
    return "".join(json.loads(part)["choices"][0]["text"] for part in parts)


@pytest.mark.parametrize("stream", [False, True])
def test_a_long_prompt_is_computed_by_the_prefill_group(place: Path, tokenizer: Tokenizer, stream: bool) -> None:
    with cluster(place, tokenizer, "prefill", "decode") as (_, [prefill, decode], http):
        prefill.behaviour.cached_tokens, decode.behaviour.cached_tokens = 3, 700
        reply = http.post("/v1/completions", json=BODY | {"stream": stream, "seed": 7, "temperature": 0.5})
        assert text_of(reply) == ANSWER
        [first], [rest] = submits(prefill), submits(decode)
        assert (first.max_tokens, first.n, first.holders) == (1, 1, [])
        assert rest.max_tokens == BODY["max_tokens"]
        assert rest.prompt_len == first.prompt_len == len(first.tokens) // 4
        assert rest.tokens[: len(first.tokens)] == first.tokens
        assert len(rest.tokens) == len(first.tokens) + 4
        assert rest.sampling == first.sampling
        assert rest.holders == [Holder("0", [prefill.endpoint], 0, first.prompt_len // CHUNK)]
        assert outcomes(http) == {"went_on": 1}
        assert expected_tokens(http) == first.prompt_len, "the prompt counts once"
        assert "trunkline_dispatches_total{" not in http.get("/metrics").text, "nothing was lost"
        if not stream:
            assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
        assert [each["role"] for each in http.get("/health").json()["controllers"]] == ["prefill", "decode"]


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": "Short."},
        {"max_tokens": 1},
        {"n": 2},
        {"use_beam_search": True, "n": 2, "temperature": 0},
        {"echo": True, "logprobs": 1},
    ],
    ids=["short", "one token", "samples", "beams", "scores"],
)
def test_some_requests_are_never_parted(place: Path, tokenizer: Tokenizer, change: dict[str, Any]) -> None:
    with cluster(place, tokenizer, "prefill", "decode") as (_, [prefill, decode], http):
        reply = http.post("/v1/completions", json=BODY | change)
        assert reply.status_code == 200, reply.text
        assert not submits(prefill)
        assert [submit.max_tokens for submit in submits(decode)] == [(BODY | change)["max_tokens"]]
        assert not outcomes(http)


@pytest.mark.parametrize(
    "change",
    [
        {"logprobs": 2},
        {"presence_penalty": 0.5, "repetition_penalty": 1.1},
        {"stop": ["STOP"]},
        {"response_format": {"type": "json_object"}},
        {"session_id": "s"},
    ],
    ids=["logprobs", "penalties", "stop", "grammar", "session"],
)
def test_answers_are_the_same_as_without_roles(place: Path, tokenizer: Tokenizer, change: dict[str, Any]) -> None:
    answers = []
    for folder, roles in (("a", ("both",)), ("b", ("prefill", "decode"))):
        (place / folder).mkdir()
        with cluster(place / folder, tokenizer, *roles) as (_, fakes, http):
            reply = http.post("/v1/completions", json=BODY | {"seed": 5} | change)
            assert reply.status_code == 200, reply.text
            [*firsts, last] = [submit for fake in fakes for submit in submits(fake)]
            assert outcomes(http) == ({"went_on": 1} if firsts else {})
            answers.append((reply.json()["choices"], reply.json()["usage"], last.grammar, last.sampling))
    assert answers[0][0][0].get("logprobs") or "logprobs" not in change
    assert answers[0] == answers[1]


@pytest.mark.parametrize("how", ["end token", "stop string"])
def test_the_first_token_may_be_the_last(place: Path, tokenizer: Tokenizer, how: str) -> None:
    with cluster(place, tokenizer, "prefill", "decode") as (_, [prefill, decode], http):
        if how == "end token":
            prefill.behaviour.script = lambda submit: [EOS]
        reply = http.post("/v1/completions", json=BODY | {"stop": ["Hello"]})
        assert (text_of(reply), reply.json()["choices"][0]["finish_reason"]) == ("", "stop")
        if how == "end token":
            assert outcomes(http) == {"ended": 1}
            assert not submits(decode)
        else:  # the stream may have gone on before its token was read
            wait_until(lambda: decode.live == 0)
            assert sum(outcomes(http).values()) == 1


@pytest.mark.parametrize("how", ["dies", "engine_failed", "draining", "queue_full"])
def test_the_prefill_group_gives_the_prompt_up(place: Path, tokenizer: Tokenizer, how: str) -> None:
    with (
        cluster(place, tokenizer, "prefill", "prefill", "decode") as (_, [*prefills, decode], http),
        ThreadPoolExecutor(1) as pool,
    ):
        for prefill in prefills:
            prefill.behaviour.hold = how == "dies"
            prefill.behaviour.fail_after = 0 if how == "engine_failed" else None
            if how in ("draining", "queue_full"):
                prefill.behaviour.refuse = FinishReason(how)
        answer = pool.submit(http.post, "/v1/completions", json=BODY)
        if how == "dies":
            wait_until(lambda: any(prefill.live for prefill in prefills))
            next(prefill for prefill in prefills if prefill.live).stop()
        assert text_of(answer.result()) == ANSWER
        assert [submit.max_tokens for submit in submits(decode)] == [60], "only one group is asked for the prompt"
        assert outcomes(http) == {"engine_failed" if how == "dies" else how: 1}


@pytest.mark.parametrize("others", [(), ("decode",)])
def test_the_group_where_the_stream_was_to_go_on_dies(
    place: Path, tokenizer: Tokenizer, others: tuple[str, ...]
) -> None:
    roles = ("prefill", "decode", *others)
    with cluster(place, tokenizer, *roles) as (router, [prefill, *decodes], http), ThreadPoolExecutor(1) as pool:
        prefill.behaviour.hold = True
        answer = pool.submit(http.post, "/v1/completions", json=BODY)
        planned = router.service.dispatcher._planned._plans
        wait_until(lambda: prefill.live == 1 and any(planned.values()))
        [plan] = planned[0].values()
        doomed = next(fake for fake in decodes if fake.endpoint == plan.goes_on.endpoint)
        doomed.stop()
        wait_until(lambda: router.ready == len(roles) - 1)
        prefill.behaviour.hold = False
        assert text_of(answer.result()) == ANSWER
        assert outcomes(http) == {"elsewhere": 1}
        others_got = [submit for fake in decodes if fake is not doomed for submit in submits(fake)]
        [rest] = others_got or submits(prefill)[1:]
        assert [holder.member for holder in rest.holders] == ["0"] * len(others)


def test_the_group_where_the_stream_has_gone_on_dies(place: Path, tokenizer: Tokenizer) -> None:
    roles = ("prefill", "decode")
    with (
        cluster(place, tokenizer, *roles) as (_, [prefill, decode], http),
        ThreadPoolExecutor(1) as pool,
    ):
        decode.behaviour.pause_after = 3
        answer = pool.submit(http.post, "/v1/completions", json=BODY)
        wait_until(lambda: decode.paused == 1)
        decode.stop()
        assert text_of(answer.result()) == ANSWER
        assert submits(prefill)[-1].max_tokens == 60, "not parted again"
        assert outcomes(http) == {"went_on": 1}


def test_a_client_that_leaves_while_its_prompt_is_computed(place: Path, tokenizer: Tokenizer) -> None:
    with cluster(place, tokenizer, "prefill", "decode") as (router, [prefill, decode], http):
        prefill.behaviour.hold = True
        with asking(router, "/v1/completions", BODY):
            wait_until(lambda: prefill.live == 1)
        wait_until(lambda: router.inflight == 0)
        wait_until(lambda: len(prefill.behaviour.aborts) == 1)
        assert not submits(decode)
        assert outcomes(http) == {"ended": 1}


def test_the_other_group_pulls_while_the_prompt_is_computed(place: Path, tokenizer: Tokenizer) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    publisher = context.socket(zmq.PUB)
    publisher.bind(f"ipc://{place}/events-0")
    try:
        with (
            cluster(place, tokenizer, "prefill", "decode") as (router, [prefill, decode], http),
            ThreadPoolExecutor(1) as pool,
        ):
            prefill.behaviour.hold = True
            answer = pool.submit(http.post, "/v1/completions", json=BODY | {"cache_salt": "pepper"})
            wait_until(lambda: prefill.live == 1)
            [submit] = submits(prefill)
            names = prompt_names(RouteRequest(submit.tokens, submit.salt), IDENTITY).chains[0].names
            sent = threading.Event()
            for seq, name in enumerate(names, 1):
                publisher.send(msgspec.msgpack.encode(KvEvents(b"stream00", seq, name, bytes([IN_HOST]))))
            sent.set()
            index = router.service.dispatcher.core.index
            wait_until(lambda: int(index.match(list(names), 0.0)[0].sum()) == len(names))
            wait_until(lambda: len(decode.behaviour.prefetches) >= PIECES_MAX - 1)
            prefill.behaviour.hold = False
            assert text_of(answer.result()) == ANSWER
            pieces = decode.behaviour.prefetches
            assert len(pieces) <= PIECES_MAX
            at = 0
            for piece in pieces:
                [holder] = piece.holders
                assert (holder.member, holder.endpoints, holder.start) == ("0", [prefill.endpoint], at)
                assert piece.tokens == submit.tokens[: 4 * CHUNK * holder.stop]
                assert piece.salt == submit.salt
                at = holder.stop
            assert at > len(names) // 2
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize("seed", seeds(3))
def test_whatever_happens_the_text_is_the_same(place: Path, tokenizer: Tokenizer, seed: int) -> None:
    """Groups fail, drain, refuse and change their roles while prompts come."""
    rng = random.Random(seed)
    with cluster(place, tokenizer, "prefill", "decode", "both", token_s=0.001) as (router, fakes, http):

        def ask(number: int) -> tuple[str, dict[str, Any]]:
            body = BODY | {"prompt": f"{number} {PROMPT}", "max_tokens": rng.choice((1, 2, 5, 60))}
            return text_of(http.post("/v1/completions", json=body | {"stream": rng.random() < 0.5})), body

        with ThreadPoolExecutor(6) as pool:
            asked = [pool.submit(ask, number) for number in range(60)]
            while not all(each.done() for each in asked):
                for fake in fakes:
                    calm = fake is fakes[-1]  # one of them does what it is asked for, or all would fail at once
                    what = rng.choice(("well", "well", "fail", "refuse", "role"))
                    fake.behaviour.fail_after = rng.randrange(4) if what == "fail" and not calm else None
                    reasons = (FinishReason.DRAINING, FinishReason.QUEUE_FULL)
                    fake.behaviour.refuse = rng.choice(reasons) if what == "refuse" and not calm else None
                    if what == "role":
                        role = rng.choice(("both", "prefill", "decode"))
                        fake.behaviour.told = fake.behaviour.told | {"role": role}
                router.forgive()
                threading.Event().wait(0.02)
            for fake in fakes:
                fake.behaviour.fail_after = fake.behaviour.refuse = None
        tokens = tokenizer.encode(ANSWER, add_special_tokens=False)
        for text, body in (each.result() for each in asked):
            assert text == tokenizer.decode(tokens[: body["max_tokens"]]).rstrip("\ufffd")
        assert sum(outcomes(http).values()) > 0
