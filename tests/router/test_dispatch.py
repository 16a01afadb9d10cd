"""Streams that lose their controllers and go on: elsewhere, or when there is one again."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from router.fake_controller import FakeController, prompt_of
from router.harness import ANSWER, EOS, MESSAGES, RunningRouter, asking, make_answer, running, wait_until
from runtime.kept_spans import KeptSpans
from seeds import seeds

from trunkline.controller.messages import Submit, WentOn
from trunkline.controller.sequences.beam_search import sample_seed
from trunkline.router.messages import Finished, FinishReason
from trunkline.router.routing.request import Decision, Left, RouteRequest
from trunkline.router.text.tokenizer import Tokenizer
from trunkline.runtime.tracing import Tracer

pytestmark = pytest.mark.processes

CHAT: dict[str, Any] = {"messages": MESSAGES, "stream": True}
SOME = 4
"""Tokens of an answer that its client has when its controller dies."""


def text_of(response: httpx.Response) -> str:
    """The text of a whole stream of chat deltas."""
    parts = [part.removeprefix("data: ") for part in response.text.split("\n\n") if part]
    assert parts.pop() == "[DONE]", response.text[-500:]
    return "".join(json.loads(part)["choices"][0]["delta"].get("content", "") for part in parts)


@contextmanager
def cluster(
    place: Path,
    tokenizer: Tokenizer,
    controllers: int,
    pause_after: int | None = None,
    *,
    resume_seconds: float = 60.0,
) -> Iterator[tuple[RunningRouter, list[FakeController], httpx.Client]]:
    """A router that waits for its controllers to come back, and a client.

    `pause_after`: tokens after which answers wait.
    """
    with (
        running(place, tokenizer, controllers=controllers, resume_seconds=resume_seconds) as (router, fakes),
        httpx.Client(base_url=router.url, timeout=60, trust_env=False) as http,
    ):
        for fake in fakes:
            fake.behaviour.pause_after = pause_after
        yield router, fakes, http
        wait_until(lambda: router.inflight == router.service.dispatcher.waiting_count == 0)


@contextmanager
def back(fake: FakeController, tokenizer: Tokenizer) -> Iterator[FakeController]:
    """A new controller in the place of one that was stopped."""
    again = FakeController(fake.endpoint, make_answer(tokenizer)).start()
    try:
        yield again
    finally:
        again.stop()


def begun(router: RunningRouter, fakes: list[FakeController]) -> tuple[FakeController, FakeController]:
    """The one of two controllers that waits in the middle of an answer, and the other, which will not wait."""
    wait_until(lambda: any(fake.paused and fake.sent == router.tokens for fake in fakes))
    one, other = sorted(fakes, key=lambda fake: -fake.live)
    other.behaviour.pause_after = None
    return one, other


def submits_of(fakes: list[FakeController]) -> list[Submit]:
    """Chats that were submitted, but for probes of /health."""
    return [submit for fake in fakes for submit in fake.behaviour.submits if submit.max_tokens > 1]


def test_a_stream_goes_on_at_another_controller(place: Path, tokenizer: Tokenizer) -> None:
    with cluster(place, tokenizer, 2, SOME) as (router, fakes, http), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(http.post, "/v1/chat/completions", json=CHAT | {"seed": 7})
        first, other = begun(router, fakes)
        first.stop()
        assert text_of(answer.result()) == ANSWER
        start, rest = first.behaviour.submits[-1], other.behaviour.submits[-1]
        assert rest.prompt_len == start.prompt_len
        assert rest.tokens.startswith(start.tokens)
        assert len(rest.tokens) > len(start.tokens), "it was killed in mid-generation"
        assert (rest.sampling, rest.max_tokens, rest.salt) == (start.sampling, start.max_tokens, start.salt)
        lines = http.get("/metrics").text.splitlines()
        assert 'trunkline_dispatches_total{event="resumed"} 1.0' in lines


def test_the_group_that_a_conversation_leaves_is_told_once_it_has_begun_elsewhere(
    place: Path, tokenizer: Tokenizer
) -> None:
    with cluster(place, tokenizer, 2) as (router, fakes, http):
        core = router.service.dispatcher.core
        route = core.route

        def leaving(request: RouteRequest, now: float, *, in_full: bool = False) -> Decision:
            decision = route(request, now)  # in full
            return msgspec.structs.replace(decision, left=Left(core.names[1 - decision.controller], b"x" * 32, 9))

        core.route = leaving  # type: ignore[method-assign]
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
        core.route = route  # type: ignore[method-assign]
        wait_until(lambda: any(fake.behaviour.left for fake in fakes))
        [there] = [fake for fake in fakes if fake.behaviour.left]
        assert there.behaviour.left == [WentOn(b"x" * 32, 9)]
        assert not there.behaviour.submits


@pytest.mark.parametrize("stream", [False, True])
def test_a_stream_waits_for_its_only_controller(place: Path, tokenizer: Tokenizer, stream: bool) -> None:
    with cluster(place, tokenizer, 1, SOME) as (router, [fake], http), ThreadPoolExecutor(2) as pool:
        body = CHAT | {"stream": stream}
        running_one = pool.submit(http.post, "/v1/chat/completions", json=body)
        wait_until(lambda: fake.paused == 1)
        fake.stop()
        wait_until(lambda: router.service.dispatcher.waiting_count == 1)
        new_one = pool.submit(http.post, "/v1/chat/completions", json=body)
        wait_until(lambda: router.service.dispatcher.waiting_count == 2)
        with back(fake, tokenizer):
            for answer in (running_one.result(), new_one.result()):
                assert answer.status_code == 200
                text = text_of(answer) if stream else answer.json()["choices"][0]["message"]["content"]
                assert text == ANSWER


def test_requests_do_not_wait_for_ever(place: Path, tokenizer: Tokenizer) -> None:
    with cluster(place, tokenizer, 1, resume_seconds=0.5) as (_, [fake], http), ThreadPoolExecutor(1) as pool:
        fake.behaviour.hold = True
        answer = pool.submit(http.post, "/v1/chat/completions", json=CHAT | {"stream": False})
        wait_until(lambda: fake.live == 1)
        fake.stop()
        assert answer.result().status_code == 503
        assert "no engine was ready within 0 s" in answer.result().json()["error"]["message"]


def test_a_client_that_leaves_while_its_request_waits(place: Path, tokenizer: Tokenizer) -> None:
    with cluster(place, tokenizer, 1) as (router, [fake], http):
        fake.behaviour.hold = True
        with asking(router, "/v1/chat/completions", CHAT | {"stream": False}):
            wait_until(lambda: fake.live == 1)
            fake.stop()
            wait_until(lambda: router.service.dispatcher.waiting_count == 1)
        wait_until(lambda: router.service.dispatcher.waiting_count == 0)
        with back(fake, tokenizer) as again:
            wait_until(lambda: router.ready == 1)
            assert http.get("/health").status_code == 200
            assert not submits_of([again])


def test_samples_go_on_one_by_one(place: Path, tokenizer: Tokenizer) -> None:
    """Each with its own seed, tokens and end; one had ended before."""
    texts = ["One is short.", "Two goes on for quite a while, it does.", "Three is like two, but not the same."]

    def script(submit: Submit, index: int) -> list[int]:
        seeds = [sample_seed(5, sample) for sample in range(3)]
        sample = index if submit.n == 3 else seeds.index(submit.sampling.seed)
        return [*tokenizer.encode(texts[sample], add_special_tokens=False), EOS]

    some = len(tokenizer.encode(texts[0], add_special_tokens=False)) + 2
    with cluster(place, tokenizer, 2, some) as (router, fakes, http), ThreadPoolExecutor(1) as pool:
        for fake in fakes:
            fake.behaviour.sample_script = script
        body = {"messages": MESSAGES, "n": 3, "seed": 5, "logprobs": True}
        answer = pool.submit(http.post, "/v1/chat/completions", json=body)
        first, other = begun(router, fakes)
        [live] = first._live.values()
        assert [sample.over for sample in live.samples] == [True, False, False]
        first.stop()
        result = answer.result().json()
        assert [choice["message"]["content"] for choice in result["choices"]] == texts
        for choice, text in zip(result["choices"], texts, strict=True):
            tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
            assert "".join(tokens).startswith(text)
        assert [submit.n for submit in other.behaviour.submits] == [1, 1]


def test_samples_that_are_lost_together_are_one_loss(place: Path, tokenizer: Tokenizer) -> None:
    """Each of four goes on for itself; their next controller's death is no four failures of their stream."""
    with cluster(place, tokenizer, 2, SOME) as (router, fakes, http), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(http.post, "/v1/chat/completions", json={"messages": MESSAGES, "n": 4})
        first, other = begun(router, fakes)
        other.behaviour.pause_after = SOME
        first.stop()
        wait_until(lambda: other.paused == 4)
        other.stop()
        wait_until(lambda: router.service.dispatcher.waiting_count == 1)
        with back(other, tokenizer) as again:
            result = answer.result().json()
            assert [choice["message"]["content"] for choice in result["choices"]] == [ANSWER] * 4
            assert [submit.n for submit in again.behaviour.submits] == [1] * 4


def test_a_sample_that_fails_ends_the_others(place: Path, tokenizer: Tokenizer) -> None:
    """They go on for themselves, for a stream that is over."""

    def refusal(submit: Submit) -> Finished | None:
        is_second = submit.sampling.seed == sample_seed(5, 1)
        return Finished(submit.request, FinishReason.INVALID, "this one not") if is_second else None

    with cluster(place, tokenizer, 2, SOME) as (router, fakes, http), ThreadPoolExecutor(1) as pool:
        for fake in fakes:
            fake.behaviour.problem_of = refusal
        body = {"prompt": [50, 51], "max_tokens": 1500, "ignore_eos": True, "n": 2, "seed": 5}
        answer = pool.submit(http.post, "/v1/completions", json=body)
        first, other = begun(router, fakes)
        first.stop()
        assert answer.result().status_code == 400
        wait_until(lambda: other.live == 0 and len(other.behaviour.aborts) == 1)


def test_a_draining_controller_hands_over(place: Path, tokenizer: Tokenizer) -> None:
    with cluster(place, tokenizer, 2) as (_, fakes, http):

        def drained(submit: Submit) -> Finished | None:
            return Finished(submit.request, FinishReason.DRAINING, "the controller is stopping")

        fakes[0].behaviour.problem_of = drained
        for _ in range(4):
            assert text_of(http.post("/v1/chat/completions", json=CHAT)) == ANSWER
        assert len(submits_of(fakes[1:])) == 4
        fakes[1].behaviour.problem_of = drained
        with ThreadPoolExecutor(1) as pool:
            sent = len(submits_of(fakes))
            answer = pool.submit(http.post, "/v1/chat/completions", json=CHAT)
            wait_until(lambda: len(submits_of(fakes)) > sent + 2)
            fakes[0].behaviour.problem_of = lambda submit: None
            assert text_of(answer.result()) == ANSWER


def test_full_queues(place: Path, tokenizer: Tokenizer) -> None:
    with cluster(place, tokenizer, 2) as (_, fakes, http):
        fakes[0].behaviour.refuse = FinishReason.QUEUE_FULL
        for _ in range(4):
            assert text_of(http.post("/v1/chat/completions", json=CHAT)) == ANSWER
        fakes[1].behaviour.refuse = FinishReason.QUEUE_FULL
        full = http.post("/v1/chat/completions", json=CHAT)
        assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
        assert full.headers["retry-after"]


def test_what_was_let_in_before_waits_for_room(place: Path, tokenizer: Tokenizer) -> None:
    """A controller that stops hands over what it had in its queue; nobody has room for it yet."""
    with cluster(place, tokenizer, 2) as (router, fakes, http):
        fakes[0].behaviour.refuse = FinishReason.DRAINING
        fakes[1].behaviour.refuse = FinishReason.QUEUE_FULL
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(http.post, "/v1/chat/completions", json=CHAT) for _ in range(4)]
            wait_until(lambda: len(submits_of(fakes[:1])) > 0)
            wait_until(lambda: router.service.dispatcher.waiting_count > 0)
            fakes[1].behaviour.refuse = None
            results = [answer.result() for answer in answers]
        kept = [result for result in results if result.status_code == 200]
        assert kept
        assert {text_of(result) for result in kept} == {ANSWER}
        # New ones may have come to the full one first.
        assert {result.status_code for result in results} <= {200, 429}


def test_a_group_that_drains_is_not_asked_without_pause_while_the_other_is_full(
    place: Path, tokenizer: Tokenizer
) -> None:
    with cluster(place, tokenizer, 2) as (router, fakes, http):
        session = {"X-Session-ID": "talk-1"}
        assert http.post("/v1/chat/completions", json=CHAT, headers=session).status_code == 200
        home, other = sorted(fakes, key=lambda fake: -len(submits_of([fake])))
        home.behaviour.refuse = FinishReason.DRAINING
        other.behaviour.refuse = FinishReason.QUEUE_FULL
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(http.post, "/v1/chat/completions", json=CHAT, headers=session)
            wait_until(lambda: router.service.dispatcher.waiting_count > 0)
            wait_until(lambda: len(submits_of([other])) >= 3)
            assert len(submits_of([home])) <= len(submits_of([other])) + 2, "one at a time, with pauses"
            other.behaviour.refuse = None
            assert text_of(answer.result()) == ANSWER


def test_what_fails_everywhere_is_not_tried_for_ever(place: Path, tokenizer: Tokenizer) -> None:
    with cluster(place, tokenizer, 2) as (_, fakes, http):
        for fake in fakes:
            fake.behaviour.refuse = FinishReason.ENGINE_FAILED
        failed = http.post("/v1/chat/completions", json=CHAT)
        assert (failed.status_code, failed.json()["error"]["code"]) == (503, "engine_failed")
        assert len(submits_of(fakes)) == 3


@pytest.mark.parametrize("deaths", [4, 9])
def test_who_only_waits_is_hardly_to_blame(place: Path, tokenizer: Tokenizer, deaths: int) -> None:
    """For the deaths of controllers in whose queues it was; but not for ever either."""
    with cluster(place, tokenizer, 1) as (_, [fake], http):
        fake.behaviour.queue = True
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(http.post, "/v1/chat/completions", json=CHAT)
            for death in range(1, deaths + 1):
                wait_until(lambda fake=fake: bool(submits_of([fake])))  # type: ignore[misc]
                assert not answer.done()
                fake.stop()
                fake = FakeController(fake.endpoint, make_answer(tokenizer))
                fake.behaviour.queue = death < deaths
                fake.start()
            try:
                if deaths < 9:
                    assert text_of(answer.result()) == ANSWER
                else:
                    assert answer.result().json()["error"]["code"] == "engine_failed"
            finally:
                fake.stop()


def test_a_wrong_request_is_not_tried_elsewhere(place: Path, tokenizer: Tokenizer) -> None:
    with cluster(place, tokenizer, 2) as (_, fakes, http):
        for fake in fakes:
            fake.behaviour.refuse = FinishReason.INVALID
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 400
        assert len(submits_of(fakes)) == 1


def test_the_last_word_was_lost(place: Path, tokenizer: Tokenizer) -> None:
    """All tokens have come but not why they end: nobody is asked for more."""
    with cluster(place, tokenizer, 2) as (_, fakes, http):
        for fake in fakes:
            fake.behaviour.fail_after = 5
        body = {"prompt": [50, 51], "max_tokens": 5, "ignore_eos": True}
        answer = http.post("/v1/completions", json=body).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 5
        assert len(submits_of(fakes)) == 1


def test_stored_sessions_outlive_their_controller(place: Path, tokenizer: Tokenizer) -> None:
    """A turn that begins while no controller is there is answered when one is back."""
    with cluster(place, tokenizer, 1) as (router, [fake], http):
        session = http.post("/v1/sessions", json={}).json()["id"]
        fake.stop()
        wait_until(lambda: router.ready == 0)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(http.post, "/v1/chat/completions", json=CHAT | {"session_id": session})
            again = FakeController(fake.endpoint, make_answer(tokenizer))
            again.start()
            try:
                assert text_of(answer.result()) == ANSWER
                assert http.get(f"/v1/sessions/{session}").json()["turns"] == 1
            finally:
                again.stop()


@pytest.mark.parametrize("seed", seeds(1))
def test_controllers_die_at_random(place: Path, tokenizer: Tokenizer, seed: int) -> None:
    """Streams, whole answers and samples while controllers die and come back: all texts are right."""
    draw = random.Random(seed)
    done = threading.Event()
    with cluster(place, tokenizer, 3) as (_, fakes, http):

        def behave(fake: FakeController) -> None:
            fake.behaviour.seconds_per_token = 0.01
            fake.behaviour.script = lambda submit: [*([prompt_of(submit)[submit.prompt_len - 1]] * 30), EOS]

        for fake in fakes:
            behave(fake)

        def kill() -> int:
            kills = 0
            while not done.wait(0.25):
                victim = draw.randrange(3)
                kills += fakes[victim].live > 0
                fakes[victim].stop()
                if draw.random() < 0.5:
                    time.sleep(0.1)
                fakes[victim] = FakeController(fakes[victim].endpoint, make_answer(tokenizer))
                behave(fakes[victim])
                fakes[victim].start()
            return kills

        def one(index: int) -> None:
            token = 60 + index % 20
            body = {"prompt": [50, token], "max_tokens": 100, "n": 1 + index % 2, "seed": index}
            if index % 3 == 0:
                body |= {"stream": True}
            response = http.post("/v1/completions", json=body)
            assert response.status_code == 200
            expected = tokenizer.decode([token] * 30)
            if index % 3:
                assert [choice["text"] for choice in response.json()["choices"]] == [expected] * (1 + index % 2)
            else:
                events = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
                choices = [choice for event in events for choice in json.loads(event)["choices"]]
                for sample in range(1 + index % 2):
                    mine = "".join(choice["text"] for choice in choices if choice["index"] == sample)
                    assert mine == expected

        with ThreadPoolExecutor(17) as pool:
            killer = pool.submit(kill)
            try:
                list(pool.map(one, range(60)))
            finally:
                done.set()
            assert killer.result() >= 2


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_a_session_by_header_stays_where_it_was(place: Path, tokenizer: Tokenizer, path: str) -> None:
    body: dict[str, Any] = {"max_tokens": 40, "messages": MESSAGES}
    if path == "/v1/responses":
        body = {"input": "What is a path?"}
    elif path == "/v1/completions":
        body = {"prompt": "What is a path?"}
    elif path == "/v1/messages":
        body["model"] = "demo"
    with cluster(place, tokenizer, 2) as (_, fakes, http):
        for _ in range(4):
            response = http.post(path, json=body, headers={"X-Session-ID": "talk-1"})
            assert response.status_code == 200, response.text
        assert sorted(len(submits_of([fake])) for fake in fakes) == [0, 4]
        if path in ("/v1/responses", "/v1/messages"):
            refused = http.post(path, json=body, headers={"X-Session-ID": "sess_1"})
            assert (refused.status_code, "X-Session-ID" in refused.text) == (400, True)
        else:
            unknown = http.post(path, json=body, headers={"X-Session-ID": "sess_1"})
            assert unknown.status_code == 404
            nulled = http.post(path, json=body | {"session_id": None}, headers={"X-Session-ID": "sess_1"})
            assert nulled.status_code == 404, "null is the same as leaving it out"
            named = http.post(path, json=body | {"session_id": "talk-1"}, headers={"X-Session-ID": "sess_1"})
            assert named.status_code == 200, "the body comes first"
        for bad in ("", "x" * 129):
            refused = http.post(path, json=body, headers={"X-Session-ID": bad})
            assert refused.status_code == 400
            assert f"1 to 128 characters, not {len(bad)}" in refused.text
            assert "header X-Session-ID" in refused.text


def test_spans_name_the_group(place: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptSpans()
    monkeypatch.setattr("trunkline.router.app.start_tracing", lambda *args: Tracer(kept))
    with cluster(place, tokenizer, 2) as (_, _, http):
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
    groups = {
        span.name: span.attributes["trunkline.group"] for span in kept.spans if span.name in ("route", "dispatch")
    }
    assert len(groups) == 2
    assert set(groups.values()) <= {"0", "1"}, "as in logs and metrics"


def test_a_label_is_the_same_in_header_and_body(place: Path, tokenizer: Tokenizer) -> None:
    with cluster(place, tokenizer, 1) as (router, _, http):

        def label(**headers: bytes) -> str:
            body = CHAT if headers else CHAT | {"session_id": "Gespräch 1"}
            answer = http.post(
                "/v1/chat/completions", json=body, headers={k.encode(): v for k, v in headers.items()}
            )
            assert answer.status_code == 200
            return next(router.service.dispatcher.core.log.newest()).origin.session

        assert label() == "Gespräch 1"
        assert label(**{"X-Session-ID": "Gespräch 1".encode()}) == "Gespräch 1"
        assert label(**{"X-Session-ID": "Gespräch 1".encode("latin-1")}) == "Gespräch 1"


def test_a_stream_that_meets_full_queues_does_not_wait_for_ever(place: Path, tokenizer: Tokenizer) -> None:
    """Every try is refused at once, so no single wait is long; all of them together are."""
    with (
        cluster(place, tokenizer, 2, SOME, resume_seconds=3.0) as (router, fakes, http),
        ThreadPoolExecutor(1) as pool,
    ):
        answer = pool.submit(http.post, "/v1/chat/completions", json=CHAT)
        first, other = begun(router, fakes)
        other.behaviour.refuse = FinishReason.QUEUE_FULL
        first.stop()
        assert "no engine was ready within" in answer.result().text
        assert len(submits_of([other])) > 2, "four tries a second"
