"""`/v1/batches`: every request of a file is answered once, whatever happens to the routers."""

from __future__ import annotations

import itertools
import json
import random
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from router.batch_calls import OVER, begin, chat_line, finished, get, lines_of, upload
from router.fake_controller import FakeController, prompt_of
from router.harness import ANSWER, STORES, RunningRouter, make_answer, running, shared_records, wait_until
from router.process_calls import SHORT_LEASES, router_process
from seeds import seeds

from trunkline.controller.messages import Submit
from trunkline.router.api.prompting import LAST_PRIORITY
from trunkline.router.messages import Finished, FinishReason
from trunkline.router.tasks import batch_run, runner
from trunkline.router.tenancy.auth import hash_key
from trunkline.router.text.tokenizer import Tokenizer


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers look for tasks more often, and store answers sooner."""
    monkeypatch.setattr(runner, "PERIOD_SECONDS", 0.1)
    monkeypatch.setattr(batch_run, "COMMIT_SECONDS", 0.05)


def contents_of(lines: list[dict[str, Any]]) -> dict[str, str]:
    """The answers of result lines by the names of their requests; each name must be there once."""
    found = {line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"] for line in lines}
    assert len(found) == len(lines), "a request was answered twice"
    return found


def test_a_batch_through_the_client(client: openai.OpenAI, fake: FakeController) -> None:
    content = b"\n".join(json.dumps(chat_line(i, f"Question {i}")).encode() for i in range(20))
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    made = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"a": "b"}
    )
    assert (made.object, made.status, made.input_file_id) == ("batch", "validating", file.id)
    assert made.expires_at is not None
    assert made.expires_at - made.created_at == pytest.approx(24 * 3600, abs=2)
    wait_until(lambda: client.batches.retrieve(made.id).status in OVER)
    done = client.batches.retrieve(made.id)
    assert (done.status, done.metadata, done.errors) == ("completed", {"a": "b"}, None)
    assert done.request_counts is not None
    assert done.request_counts.to_dict() == {"total": 20, "completed": 20, "failed": 0}
    assert done.error_file_id is None
    assert done.in_progress_at is not None
    assert done.completed_at is not None
    assert done.output_file_id is not None
    lines = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
    assert contents_of(lines) == {f"line-{i}": ANSWER for i in range(20)}
    assert {line["response"]["status_code"] for line in lines} == {200}
    assert len({line["id"] for line in lines} | {line["response"]["body"]["id"] for line in lines}) == 40
    output = client.files.retrieve(done.output_file_id)
    assert (output.purpose, output.filename) == ("batch_output", f"{made.id}_output.jsonl")
    assert [batch.id for batch in client.batches.list()] == [made.id]
    assert {submit.priority for submit in fake.behaviour.submits} == {LAST_PRIORITY}


@pytest.mark.parametrize(
    ("path", "body", "text_of"),
    [
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 50}, lambda body: body["choices"][0]["text"]),
        ("/v1/responses", {"input": "Hi"}, lambda body: body["output"][0]["content"][0]["text"]),
    ],
)
def test_other_endpoints(path: str, body: dict[str, Any], text_of: Any, http: httpx.Client) -> None:
    line = {"custom_id": "a", "method": "POST", "url": path, "body": body}
    done = finished(http, begin(http, [line], endpoint=path))
    [answer] = lines_of(http, done["output_file_id"])
    assert text_of(answer["response"]["body"]) == ANSWER


def test_requests_that_fail_are_in_the_error_file(http: httpx.Client) -> None:
    lines = [
        chat_line(0, "good"),
        chat_line(1, "bad", temperature=-1),
        chat_line(2, "whose model", model="other"),
        chat_line(3, "streamed", stream=True),
        chat_line(4, "long " * 4000),
    ]
    done = finished(http, begin(http, lines))
    assert done["status"] == "completed"
    assert done["request_counts"] == {"total": 5, "completed": 1, "failed": 4}
    assert list(contents_of(lines_of(http, done["output_file_id"]))) == ["line-0"]
    errors = {line["custom_id"]: line["response"] for line in lines_of(http, done["error_file_id"])}
    assert {name: answer["status_code"] for name, answer in errors.items()} == {
        "line-1": 400, "line-2": 404, "line-3": 400, "line-4": 400,
    }  # fmt: skip
    assert errors["line-2"]["body"]["error"]["code"] == "model_not_found"


def test_a_wrong_input_is_refused_with_its_lines(http: httpx.Client) -> None:
    good = chat_line(0, "x")
    wrong: list[Any] = [
        good,
        good,
        {**good, "custom_id": "b", "method": "GET"},
        {**good, "custom_id": "c", "url": "/v1/completions"},
        {**good, "custom_id": "d", "body": []},
        {**good, "custom_id": ""},
        [1],
    ]
    done = finished(http, begin(http, wrong))
    assert (done["status"], done["output_file_id"], done["error_file_id"]) == ("failed", None, None)
    assert done["failed_at"] >= done["created_at"]
    found = [(problem["line"], problem["code"]) for problem in done["errors"]["data"]]
    assert found == [
        (2, "duplicate_custom_id"), (3, "invalid_method"), (4, "mismatched_endpoint"), (5, "invalid_body"),
        (6, "invalid_custom_id"), (7, "invalid_json_line"),
    ]  # fmt: skip
    [problem] = finished(http, begin(http, []))["errors"]["data"]
    assert problem["code"] == "empty_file"


@pytest.mark.parametrize("depth", [300, 950, 100_000])
def test_a_line_that_is_too_deep_fails_its_batch(depth: int, http: httpx.Client) -> None:
    body = b'{"messages": ' + b"[" * depth + b"]" * depth + b"}"
    line = b'{"custom_id": "a", "url": "/v1/chat/completions", "body": ' + body + b"}"
    request = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    made = http.post("/v1/batches", json={**request, "input_file_id": upload(http, line)}).json()
    [problem] = finished(http, made["id"])["errors"]["data"]
    assert (problem["code"], problem["line"]) == ("invalid_json_line", 1)


def test_a_line_that_is_too_long_is_not_read_whole(
    place: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trunkline.router.api.upload.PART_BYTES", 1000)
    with running(place, tokenizer, max_body_bytes=4000) as (router, _), router.client() as http:
        done = finished(http, begin(http, [chat_line(0, "x"), chat_line(1, "long " * 4000)]))
    assert done["status"] == "failed"
    assert [(each["code"], each["line"]) for each in done["errors"]["data"]] == [("line_too_long", 2)]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"input_file_id": None}, "input_file_id"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after"),
    ],
)
def test_wrong_batches(fields: dict[str, Any], param: str, http: httpx.Client) -> None:
    body = {"input_file_id": upload(http, b"x"), "endpoint": "/v1/completions", "completion_window": "24h"}
    answer = http.post("/v1/batches", json={**body, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    other = upload(http, b"x", purpose="user_data")
    assert http.post("/v1/batches", json={**body, "input_file_id": other}).status_code == 400
    assert http.post("/v1/batches", json={**body, "input_file_id": "file-x"}).status_code == 404
    assert http.get("/v1/batches/batch_x").status_code == 404
    assert http.get("/v1/batches").json()["data"] == []


@pytest.mark.parametrize("seed", seeds(2))
def test_prompts_with_equal_beginnings_are_sent_together(
    seed: int, http: httpx.Client, fake: FakeController, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of a walk through the tree of prompts: each branch is finished before the next one begins."""
    monkeypatch.setattr(batch_run.BatchHandler, "width", lambda self, tenant: 1)
    rng = random.Random(seed)
    texts = [f"{group} " * 200 + f"{half} " * 200 + str(i) for group in "abcde" for half in "xy" for i in range(4)]
    rng.shuffle(texts)
    done = finished(http, begin(http, [chat_line(i, text) for i, text in enumerate(texts)]))
    assert done["request_counts"]["completed"] == len(texts)
    prompts = [prompt_of(submit) for submit in fake.behaviour.submits]
    for length in (150, 350):
        groups = [key for key, _ in itertools.groupby(tuple(prompt[:length]) for prompt in prompts)]
        assert len(groups) == len(set(groups)) > 1


def test_a_cancelled_batch_keeps_its_answers(
    http: httpx.Client, fake: FakeController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_run.BatchHandler, "width", lambda self, tenant: 1)
    answer = fake.behaviour.script

    def script(submit: Submit) -> list[int]:
        fake.behaviour.hold = len(fake.behaviour.submits) > 5
        return list(answer(submit))

    fake.behaviour.script = script
    batch = begin(http, [chat_line(i, f"Question {i}") for i in range(30)])
    wait_until(lambda: get(http, batch)["request_counts"]["completed"] >= 1 and fake.behaviour.hold)
    assert http.post(f"/v1/batches/{batch}/cancel").json()["status"] in ("cancelling", "cancelled")
    done = finished(http, batch)
    assert (done["status"], done["cancelled_at"] is None) == ("cancelled", False)
    counts = done["request_counts"]
    assert counts["completed"] + counts["failed"] == 30
    answers, errors = lines_of(http, done["output_file_id"]), lines_of(http, done["error_file_id"])
    assert (len(answers), len(errors)) == (counts["completed"], counts["failed"])
    assert {line["custom_id"] for line in answers + errors} == {f"line-{i}" for i in range(30)}
    assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}
    refused = http.post(f"/v1/batches/{batch}/cancel")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "batch_not_cancellable")


def test_a_batch_expires(http: httpx.Client, fake: FakeController, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.behaviour.hold = True
    batch = begin(http, [chat_line(i, "x") for i in range(3)])
    wait_until(lambda: fake.live == 3)
    monkeypatch.setattr(time, "time", lambda: 1e11)
    done = finished(http, batch)
    assert (done["status"], done["request_counts"]["failed"]) == ("expired", 3)
    assert {line["error"]["code"] for line in lines_of(http, done["error_file_id"])} == {"batch_expired"}
    wait_until(lambda: fake.live == 0)


def test_what_fails_for_a_while_is_tried_again(http: httpx.Client, fake: FakeController) -> None:
    refused: list[int] = []

    def problem(submit: Submit) -> Finished | None:
        if len(refused) >= 3:
            return None
        refused.append(submit.request)
        return Finished(submit.request, FinishReason.QUEUE_FULL, "full")

    fake.behaviour.problem_of = problem
    done = finished(http, begin(http, [chat_line(i, "x") for i in range(4)]))
    assert (done["status"], done["request_counts"]["completed"], len(refused)) == ("completed", 4, 3)


def test_limits_of_a_tenant_are_waited_for(place: Path, tokenizer: Tokenizer) -> None:
    tenants = place / "tenants.json"
    tenants.write_text(
        json.dumps(
            {
                "tenants": {
                    "ann": {"requests": 4, "priority": 3, "keys": [{"sha256": hash_key("ann")}]},
                    "bob": {"keys": [{"sha256": hash_key("bob")}]},
                }
            }
        )
    )
    with (
        running(place, tokenizer, tenants=str(tenants)) as (router, [fake]),
        router.client(Authorization="Bearer ann") as ann,
        router.client(Authorization="Bearer bob") as bob,
    ):
        most = [0]

        def problem(submit: Submit) -> None:
            most[0] = max(most[0], fake.live)

        fake.behaviour.problem_of = problem
        batch = begin(ann, [chat_line(i, f"Question {i}") for i in range(20)])
        assert finished(ann, batch)["request_counts"]["completed"] == 20
        assert most[0] <= 2, "half of the tenant's requests"
        assert {submit.priority for submit in fake.behaviour.submits} == {LAST_PRIORITY}
        assert {submit.salt for submit in fake.behaviour.submits} != {b""}, "the tenant's own"
        assert bob.get(f"/v1/batches/{batch}").status_code == 404
        assert bob.post(f"/v1/batches/{batch}/cancel").status_code == 404
        assert bob.get("/v1/batches").json()["data"] == []


@pytest.mark.parametrize("kind", STORES)
def test_results_become_parts(
    kind: str, place: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_run, "PART_BYTES", 3000)
    with shared_records(kind) as url, running(place, tokenizer, records=url) as (router, [fake]):
        fake.behaviour.max_rows = 2
        with router.client() as http:
            done = finished(http, begin(http, [chat_line(i, f"Question {i}") for i in range(60)]))
            assert len(contents_of(lines_of(http, done["output_file_id"]))) == 60
            parts = router.call(router.service.records.page("file-part", "", "", 1000))
            assert len(parts) > 8
            for file in (done["output_file_id"], done["input_file_id"]):
                http.delete(f"/v1/files/{file}")
            assert router.call(router.service.records.page("file-part", "", "", 1000)) == []
            assert router.call(router.service.tasks.all()) == []
    assert isinstance(router, RunningRouter)


@pytest.mark.parametrize("kind", STORES)
def test_another_router_goes_on_when_one_leaves(kind: str, place: Path, tokenizer: Tokenizer) -> None:
    """With the answers that are stored; every request is answered once, with the text that it would have had."""
    other = place / "b"
    other.mkdir()
    with shared_records(kind) as url:
        with running(place, tokenizer, records=url) as (first, [fake]):
            fake.behaviour.max_rows, fake.behaviour.seconds_per_token = 2, 0.002
            with first.client() as http:
                batch = begin(http, [chat_line(i, f"Question {i}") for i in range(40)])
                wait_until(lambda: get(http, batch)["request_counts"]["completed"] >= 4)
        with running(other, tokenizer, records=url) as (second, [fake]), second.client() as http:
            began = get(http, batch)["request_counts"]["completed"]
            done = finished(http, batch)
            assert done["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
            assert contents_of(lines_of(http, done["output_file_id"])) == {f"line-{i}": ANSWER for i in range(40)}
            assert 4 <= began <= 40
            assert len(fake.behaviour.submits) <= 40 - began, "what is stored is not answered again"


def test_a_router_with_another_model_leaves_a_batch_to_others(place: Path, tokenizer: Tokenizer) -> None:
    """But it ends one that is cancelled. Requests that name no model mean that of the router that was asked."""
    other = place / "b"
    other.mkdir()
    lines = [chat_line(0, "x"), chat_line(1, "x", model=None)]
    with (
        shared_records() as url,
        running(place, tokenizer, records=url, wait=False) as (first, [fake]),
        running(other, tokenizer, records=url, served_model_name="other") as (second, [_]),
        first.client() as here,
        second.client() as there,
    ):
        batch, cancelled = begin(here, lines), begin(here, lines)
        own = finished(there, begin(there, [chat_line(0, "x", model="other")]))  # it has looked at all of them
        assert own["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
        assert {get(there, each)["status"] for each in (batch, cancelled)} == {"validating"}
        assert here.post(f"/v1/batches/{cancelled}/cancel").json()["status"] == "cancelling"
        assert finished(here, cancelled)["status"] == "cancelled"
        fake.start()
        done = finished(there, batch)
        assert done["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
        answered = lines_of(there, done["output_file_id"])
        assert {line["response"]["body"]["model"] for line in answered} == {"demo"}
        fake.stop()


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
                controller.behaviour.max_rows, controller.behaviour.seconds_per_token = 2, 0.005
                batch = begin(http, [chat_line(i, f"Question {i}") for i in range(60)])
                wait_until(lambda: get(http, batch)["request_counts"]["completed"] >= 4)
                process.kill()
            with running(other, tokenizer, records=url) as (second, _), second.client() as http:
                done = finished(http, batch)
                assert done["request_counts"] == {"total": 60, "completed": 60, "failed": 0}
                found = contents_of(lines_of(http, done["output_file_id"]))
                assert found == {f"line-{i}": ANSWER for i in range(60)}
    finally:
        controller.stop()
