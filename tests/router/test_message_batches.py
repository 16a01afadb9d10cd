"""`/v1/messages/batches` through Anthropic's client."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pytest
from router.batch_calls import begin, chat_line, finished, lines_of
from router.fake_controller import FakeController
from router.harness import ANSWER, wait_until

from trunkline.router.api import message_batches
from trunkline.router.api.prompting import LAST_PRIORITY
from trunkline.router.stores.batch_store import BatchState, ResultFile, StoredBatch
from trunkline.router.tasks import batch_run, runner

HI: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers look for tasks more often, and store answers sooner."""
    monkeypatch.setattr(runner, "PERIOD_SECONDS", 0.1)
    monkeypatch.setattr(batch_run, "COMMIT_SECONDS", 0.05)


def entry(name: str, **params: Any) -> Any:
    """A request of a batch."""
    return {"custom_id": name, "params": {"model": "demo", "max_tokens": 50, "messages": HI, **params}}


def ended(claude: anthropic.Anthropic, batch_id: str) -> anthropic.types.messages.MessageBatch:
    """A batch when it is over."""
    batches = claude.messages.batches
    wait_until(lambda: batches.retrieve(batch_id).processing_status == "ended")
    return batches.retrieve(batch_id)


def test_a_batch_from_its_beginning_to_its_end(
    claude: anthropic.Anthropic, http: httpx.Client, fake: FakeController
) -> None:
    batches = claude.messages.batches
    entries = [entry(f"good-{index}") for index in range(5)]
    entries += [entry("wrong", temperature=3), entry("streamed", stream=True), entry("other", model="other")]
    made = batches.create(requests=entries)
    assert (made.type, made.processing_status, made.results_url, made.ended_at) == (
        "message_batch", "in_progress", None, None)  # fmt: skip
    assert made.request_counts.to_dict() == {
        "processing": 8, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0}  # fmt: skip
    assert (made.expires_at - made.created_at).total_seconds() == pytest.approx(24 * 3600, abs=2)
    done = ended(claude, made.id)
    assert done.request_counts.to_dict() == {
        "processing": 0, "succeeded": 5, "errored": 3, "canceled": 0, "expired": 0}  # fmt: skip
    assert done.ended_at is not None
    assert done.results_url is not None
    results = {line.custom_id: line.result for line in batches.results(made.id)}
    assert len(results) == 8
    for index in range(5):
        result = results[f"good-{index}"]
        assert result.type == "succeeded"
        assert result.message.content[0].to_dict()["text"] == ANSWER
    for name, kind, word in (
        ("wrong", "invalid_request_error", "temperature"),
        ("streamed", "invalid_request_error", "stream"),
        ("other", "not_found_error", "other"),
    ):
        failed = results[name]
        assert failed.type == "errored"
        assert failed.error.type == "error"
        assert (failed.error.error.type, word in failed.error.error.message) == (kind, True)
    assert {submit.priority for submit in fake.behaviour.submits} == {LAST_PRIORITY}
    same = http.get(f"/v1/batches/{made.id}").json()
    assert (same["endpoint"], same["request_counts"]["completed"]) == ("/v1/messages", 5)
    assert len(http.get("/v1/files").json()["data"]) == 3
    assert batches.delete(made.id).type == "message_batch_deleted"
    assert http.get("/v1/files").json()["data"] == [], "its input and its results are deleted, too"
    with pytest.raises(anthropic.NotFoundError):
        batches.retrieve(made.id)


def test_what_was_not_answered(claude: anthropic.Anthropic, http: httpx.Client, fake: FakeController) -> None:
    batches = claude.messages.batches
    fake.behaviour.hold = True
    made = batches.create(requests=[entry(f"r{index}") for index in range(3)])
    wait_until(lambda: bool(fake.behaviour.submits))
    assert http.get(f"/v1/messages/batches/{made.id}/results").status_code == 409
    with pytest.raises(anthropic.ConflictError, match="not over"):
        batches.delete(made.id)
    assert batches.cancel(made.id).processing_status == "canceling"
    done = ended(claude, made.id)
    assert done.cancel_initiated_at is not None
    assert done.request_counts.to_dict() == {
        "processing": 0, "succeeded": 0, "errored": 0, "canceled": 3, "expired": 0}  # fmt: skip
    assert [line.result.type for line in batches.results(made.id)] == ["canceled"] * 3
    with pytest.raises(anthropic.ConflictError):
        batches.cancel(made.id)


def test_lists_have_batches_of_messages_only(claude: anthropic.Anthropic, http: httpx.Client) -> None:
    batches = claude.messages.batches
    names = [batches.create(requests=[entry("a")]).id for _ in range(3)]
    other = begin(http, [chat_line(0, "Hi")])
    for name in names:
        ended(claude, name)
    assert [batch.id for batch in batches.list()] == names[::-1]
    assert [batch.id for batch in batches.list(limit=1)] == names[::-1], "page by page"
    first = batches.list(limit=2)
    assert (first.has_more, first.first_id, first.last_id) == (True, names[2], names[1])
    before = batches.list(before_id=names[0], limit=1)
    assert ([batch.id for batch in before.data], before.has_more) == ([names[1]], True)
    for call in (batches.retrieve, batches.cancel, batches.delete, batches.results):
        with pytest.raises(anthropic.NotFoundError):
            call(other)
    finished(http, other)


def test_messages_in_a_file(claude: anthropic.Anthropic, http: httpx.Client) -> None:
    body = {"model": "demo", "max_tokens": 50, "messages": HI}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/messages", "body": body}
    made = begin(http, [line], endpoint="/v1/messages")
    [answer] = lines_of(http, finished(http, made)["output_file_id"])
    assert answer["response"]["body"]["content"][0]["text"] == ANSWER
    [result] = claude.messages.batches.results(made)
    assert (result.custom_id, result.result.type) == ("a", "succeeded")
    claude.messages.batches.delete(made)
    assert len(http.get("/v1/files").json()["data"]) == 1, "a client's own file stays"


@pytest.mark.parametrize(
    ("requests", "param"),
    [
        (None, "requests"),
        ([], "requests"),
        ([5], "requests[0]"),
        ([{"params": {}}], "requests[0].custom_id"),
        ([entry("a b")], "requests[0].custom_id"),
        ([entry("a"), entry("a")], "requests[1].custom_id"),
        ([{"custom_id": "a", "params": []}], "requests[0].params"),
    ],
)
def test_wrong_batches(http: httpx.Client, requests: Any, param: str) -> None:
    answer = http.post("/v1/messages/batches", json={} if requests is None else {"requests": requests})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], f"`{param}`" in error["message"]) == (
        400, "invalid_request_error", True), error  # fmt: skip
    assert http.get("/v1/files").json()["data"] == []


def test_a_batch_that_has_expired() -> None:
    file = ResultFile(id="file-x")
    state = BatchState(
        tenant="", endpoint="/v1/messages", input_file_id="file-y", window="24h", expires=0.0, outputs=file,
        errors=file, status="expired", times={"expired": 5}, total=4, completed=1, failed=3, unanswered=2,
    )  # fmt: skip
    shown = message_batches._object(StoredBatch("batch_x", 1.0, state))
    assert shown["request_counts"] == {"processing": 0, "succeeded": 1, "errored": 1, "canceled": 0, "expired": 2}
    assert (shown["processing_status"], shown["ended_at"]) == ("ended", "1970-01-01T00:00:05Z")
    for code, kind in (("batch_expired", "expired"), ("batch_cancelled", "canceled")):
        line = f'{{"custom_id": "a", "response": null, "error": {{"code": "{code}", "message": ""}}}}\n'
        found = json.loads(message_batches._result_lines(line.encode()))
        assert found == {"custom_id": "a", "result": {"type": kind}}
