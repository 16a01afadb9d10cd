"""`/v1/responses` with `background: true`: asked for later, streamed, cancelled, finished by another router."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import ResponseCompletedEvent
from router.fake_controller import FakeController
from router.harness import ANSWER, STORES, RunningRouter, make_answer, running, shared_records, wait_until
from router.process_calls import SHORT_LEASES, router_process

from trunkline.router.api import response_turn
from trunkline.router.messages import FinishReason
from trunkline.router.stores import background_store
from trunkline.router.tasks import runner
from trunkline.router.text.tokenizer import Tokenizer

LATER: dict[str, Any] = {"model": "demo", "input": "Hi", "background": True}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers look for tasks more often."""
    monkeypatch.setattr(runner, "PERIOD_SECONDS", 0.1)


def begin(http: httpx.Client, **fields: Any) -> str:
    answer = http.post("/v1/responses", json={**LATER, **fields})
    assert (answer.status_code, answer.json()["status"]) == (200, "queued"), answer.text
    return str(answer.json()["id"])


def get(http: httpx.Client, response: str) -> dict[str, Any]:
    answer = http.get(f"/v1/responses/{response}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    assert (found["id"], found["background"]) == (response, True)
    return found


def finished(http: httpx.Client, response: str) -> dict[str, Any]:
    wait_until(lambda: get(http, response)["status"] not in ("queued", "in_progress"))
    return get(http, response)


def streamed(http: httpx.Client, path: str = "", **fields: Any) -> Generator[dict[str, Any], None, None]:
    """The events of a new response in the background or, with a path, of one that there is."""
    begun = (
        http.stream("GET", f"/v1/responses/{path}")
        if path
        else http.stream("POST", "/v1/responses", json={**LATER, "stream": True, **fields})
    )
    with begun as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


def check_whole(events: list[dict[str, Any]]) -> None:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "queued", "in_progress", "output_item.added"]
    assert (kinds[-1], kinds.count("output_text.done")) == ("completed", 1)
    assert "".join(event.get("delta", "") for event in events) == ANSWER
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == ANSWER


def nothing_left(router: RunningRouter) -> bool:
    records = router.service.records
    return not router.call(router.service.tasks.all()) and not router.call(records.page("background", ""))


def test_through_the_client(client: openai.OpenAI, router: RunningRouter, fake: FakeController) -> None:
    made = client.responses.create(model="demo", input="Hi", background=True, metadata={"a": "b"})
    assert (made.status, made.background, made.output, made.metadata) == ("queued", True, [], {"a": "b"})
    wait_until(lambda: client.responses.retrieve(made.id).status == "completed")
    done = client.responses.retrieve(made.id)
    assert (done.output_text, done.id, done.created_at) == (ANSWER, made.id, made.created_at)
    assert (done.background, done.metadata) == (True, {"a": "b"})
    assert fake.behaviour.submits[-1].priority == 0, "a client waits for it, only not on a connection"
    next_one = client.responses.create(model="demo", input="And?", previous_response_id=made.id)
    assert next_one.output_text == ANSWER
    assert client.responses.cancel(made.id).status == "completed"
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(next_one.id)
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    wait_until(lambda: nothing_left(router))


def test_a_response_is_cancelled(http: httpx.Client, fake: FakeController) -> None:
    fake.behaviour.hold = True
    response = begin(http)
    wait_until(lambda: fake.live == 1)
    assert get(http, response)["status"] == "in_progress"
    assert http.delete(f"/v1/responses/{response}").json()["error"]["code"] == "response_busy"
    cancelled = http.post(f"/v1/responses/{response}/cancel")
    assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")
    wait_until(lambda: fake.live == 0)
    assert http.post(f"/v1/responses/{response}/cancel").json()["status"] == "cancelled"
    wait_until(lambda: http.delete(f"/v1/responses/{response}").status_code == 200)
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
        assert http.request(method, f"/v1/responses/{response}{path}").status_code == 404


def test_a_response_fails(http: httpx.Client, router: RunningRouter) -> None:
    done = finished(http, begin(http, input="long " * 4000))
    assert (done["status"], done["error"]["code"], done["output"]) == ("failed", "context_length_exceeded", [])
    assert done["error"]["message"]
    done = finished(http, begin(http, previous_response_id="resp_none"))
    assert done["error"]["code"] == "previous_response_not_found"
    wait_until(lambda: not router.call(router.service.tasks.all()))


def test_what_never_finds_room_fails_after_its_time(
    http: httpx.Client, fake: FakeController, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.behaviour.refuse = FinishReason.QUEUE_FULL
    with monkeypatch.context() as patch:
        patch.setattr(background_store, "TRIED_S", 0.5)
        response = begin(http)
        done = finished(http, response)
    assert (done["status"], done["output"]) == ("failed", [])
    assert "it was tried for 0 hours without success: " in done["error"]["message"]
    fake.behaviour.refuse = None
    assert finished(http, begin(http))["status"] == "completed"
    assert get(http, response)["status"] == "failed"


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"store": False}, "background"), ({"input": 5}, "input")],
)
def test_what_cannot_be_made_in_the_background(fields: dict[str, Any], param: str, http: httpx.Client) -> None:
    answer = http.post("/v1/responses", json={**LATER, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_a_request_that_is_too_large_to_be_kept_is_refused(http: httpx.Client, router: RunningRouter) -> None:
    answer = http.post("/v1/responses", json={**LATER, "instructions": "x" * (9 << 20)})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "response_too_long"), answer.text[:500]
    assert nothing_left(router)


def test_a_response_that_is_deleted_as_it_is_stored_is_not_made_again(
    http: httpx.Client, router: RunningRouter, fake: FakeController, monkeypatch: pytest.MonkeyPatch
) -> None:
    responses = router.service.histories.responses
    create = responses.create

    async def create_and_delete(response: str, *args: Any, **options: Any) -> Any:
        stored = await create(response, *args, **options)
        await responses.delete(response)
        return stored

    monkeypatch.setattr(responses, "create", create_and_delete)
    begin(http)
    wait_until(lambda: nothing_left(router))
    assert len(fake.behaviour.submits) == 1


def test_a_repeated_request_is_made_once(http: httpx.Client, fake: FakeController) -> None:
    headers = {"Idempotency-Key": "again"}
    ids = {http.post("/v1/responses", json=LATER, headers=headers).json()["id"] for _ in range(3)}
    assert len(ids) == 1
    assert finished(http, ids.pop())["status"] == "completed"
    assert len(fake.behaviour.submits) == 1


def test_a_stream_through_the_client(client: openai.OpenAI, router: RunningRouter) -> None:
    events = list(client.responses.create(model="demo", input="Hi", background=True, stream=True))
    check_whole([event.model_dump() for event in events])
    assert isinstance(events[-1], ResponseCompletedEvent)
    response = events[-1].response.id
    assert client.responses.retrieve(response).output_text == ANSWER
    for number in range(len(events)):
        rest = list(client.responses.retrieve(response, stream=True, starting_after=number))
        assert rest == events[number + 1 :]
    client.responses.delete(response)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response, stream=True)
    wait_until(lambda: nothing_left(router))


def test_streams_that_end_otherwise(http: httpx.Client, fake: FakeController) -> None:
    *_, last = streamed(http, input="long " * 4000)
    assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", "context_length_exceeded")
    fake.behaviour.refuse = FinishReason.QUEUE_FULL
    before = len(fake.behaviour.submits)
    events = streamed(http)
    begun = [next(events) for _ in range(2)]
    wait_until(lambda: len(fake.behaviour.submits) > before)
    fake.behaviour.refuse = None
    check_whole([*begun, *events])
    fake.behaviour.hold = True
    events = streamed(http)
    response = next(events)["response"]["id"]
    wait_until(lambda: fake.live == 1)
    assert http.post(f"/v1/responses/{response}/cancel").json()["status"] == "cancelled"
    *_, last = events
    assert (last["type"], last["response"]["status"]) == ("response.failed", "cancelled")


def test_what_continues_a_response_waits_for_it(
    http: httpx.Client, fake: FakeController, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.behaviour.hold = True
    response = begin(http)
    wait_until(lambda: fake.live == 1)
    body = {"model": "demo", "input": "And?", "previous_response_id": response}
    with monkeypatch.context() as patched:
        patched.setattr(response_turn, "BACKGROUND_PATIENCE_S", 0.0)
        refused = http.post("/v1/responses", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "response_busy")
    answers: list[httpx.Response] = []
    waiting = threading.Thread(target=lambda: answers.append(http.post("/v1/responses", json=body)))
    waiting.start()
    waiting.join(0.05)
    assert not answers
    fake.behaviour.hold = False
    waiting.join(20)
    assert (answers[0].status_code, answers[0].json()["previous_response_id"]) == (200, response)
    failed = begin(http, input="long " * 4000)
    finished(http, failed)
    lost = http.post("/v1/responses", json={**body, "previous_response_id": failed})
    assert (lost.status_code, lost.json()["error"]["code"]) == (404, "previous_response_not_found")


def test_streams_that_there_are_not(http: httpx.Client) -> None:
    response = begin(http)
    finished(http, response)
    plain = http.post("/v1/responses", json={"model": "demo", "input": "Hi"}).json()["id"]
    for asked, status, param in (
        (f"{response}?stream=true", 400, "stream"),
        (f"{plain}?stream=true&starting_after=1", 400, "stream"),
        (f"{plain}?starting_after=1", 400, "starting_after"),
        (f"{plain}?stream=maybe", 400, "stream"),
        (f"{plain}?stream=true&starting_after=-1", 400, "starting_after"),
        ("resp_none?stream=true", 404, "response_id"),
    ):
        answer = http.get(f"/v1/responses/{asked}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), asked


@pytest.mark.parametrize("kind", STORES)
def test_two_routers(kind: str, place: Path, tokenizer: Tokenizer) -> None:
    """Any router tells how far a response is, and cancels it."""
    other = place / "b"
    other.mkdir()
    with (
        shared_records(kind) as url,
        running(place, tokenizer, records=url) as (first, [one]),
        running(other, tokenizer, records=url) as (second, [two]),
        first.client() as here,
        second.client() as there,
    ):
        response = begin(here)
        assert finished(there, response)["output"] == finished(here, response)["output"]
        one.behaviour.hold = two.behaviour.hold = True
        events = streamed(here)
        begun = [next(events) for _ in range(3)]
        events.close()
        rest = streamed(there, f"{begun[0]['response']['id']}?stream=true&starting_after=2")
        wait_until(lambda: one.live + two.live == 1)
        one.behaviour.hold = two.behaviour.hold = False
        check_whole([*begun, *rest])
        one.behaviour.hold = two.behaviour.hold = True
        response = begin(here)
        wait_until(lambda: one.live + two.live == 1)
        assert there.post(f"/v1/responses/{response}/cancel").json()["status"] == "cancelled"
        assert get(here, response)["status"] == "cancelled"


def test_a_router_without_the_model_leaves_a_response_to_others(
    place: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But it ends those that are cancelled, or whose time is over."""
    other = place / "b"
    other.mkdir()
    with (
        shared_records() as url,
        running(place, tokenizer, records=url, resume_seconds=30.0) as (first, [fake]),
        running(other, tokenizer, records=url, served_model_name="other") as (second, [_]),
        first.client() as here,
        second.client() as there,
    ):
        fake.stop()
        wait_until(lambda: not first.ready)
        named, unnamed, cancelled = begin(here), begin(here, model=None), begin(here)
        assert finished(there, begin(there, model="other"))["model"] == "other"  # it has looked at all of them
        assert {get(there, each)["status"] for each in (named, unnamed, cancelled)} == {"queued"}
        assert here.post(f"/v1/responses/{cancelled}/cancel").json()["status"] == "cancelled"
        monkeypatch.setattr(background_store, "TRIED_S", 0.0)
        late = finished(here, begin(here))
        assert (late["status"], late["error"]["code"]) == ("failed", "model_not_found")
        again = FakeController(fake.endpoint, make_answer(tokenizer)).start()
        assert [finished(there, each)["status"] for each in (named, unnamed)] == ["completed", "completed"]
        assert len(again.behaviour.submits) == 2
        again.stop()


@pytest.mark.processes
def test_another_router_goes_on_when_one_is_killed(place: Path, tokenizer: Tokenizer) -> None:
    controller = FakeController(f"ipc://{place}/c", make_answer(tokenizer)).start()
    other = place / "b"
    other.mkdir()
    try:
        with shared_records() as url:
            options = {"records": url, "served_model_name": "demo", "log_level": "error", "prelude": SHORT_LEASES}
            with (
                router_process(place, controller, **options) as (process, address),
                httpx.Client(base_url=address, timeout=60) as http,
            ):
                controller.behaviour.hold = True
                response = begin(http)
                wait_until(lambda: controller.live == 1)
                events = streamed(http)
                begun = [next(events) for _ in range(3)]
                process.kill()
            with running(other, tokenizer, records=url) as (second, _), second.client() as http:
                assert finished(http, response)["output"][0]["content"][0]["text"] == ANSWER
                streaming = begun[0]["response"]["id"]
                check_whole([*begun, *streamed(http, f"{streaming}?stream=true&starting_after=2")])
    finally:
        controller.stop()
