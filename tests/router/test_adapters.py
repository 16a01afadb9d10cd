"""The adapter with which a request is computed, wherever the request comes from: a client, what it continues, a
task. The salts of a request's KV begin with its adapter's key (`trunkline.kvstore.adapters`)."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from router.batch_calls import begin, chat_line, finished, lines_of
from router.fake_controller import FakeController
from router.harness import ADMIN, MESSAGES, RunningRouter, running, wait_until
from router.session_calls import chat, create

from trunkline.kvstore.adapters import KEY_BYTES, adapter_of, adapter_salt
from trunkline.router.messages import LoadedAdapter
from trunkline.router.request_context import choose_adapter
from trunkline.router.streams.adapters import may_have
from trunkline.router.tasks import runner
from trunkline.router.text.tokenizer import Tokenizer

KEY = bytes(range(KEY_BYTES))
NAME = "legal"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers look for tasks more often."""
    monkeypatch.setattr(runner, "PERIOD_SECONDS", 0.1)


@contextmanager
def adapted(
    place: Path, tokenizer: Tokenizer, **told: Any
) -> Iterator[tuple[RunningRouter, FakeController, httpx.Client]]:
    """A router whose controller has an adapter, and tells `told` of itself."""
    with running(place, tokenizer) as (router, [fake]), router.client() as http:
        fake.behaviour.told = {"adapters": [LoadedAdapter(NAME, "/adapters/legal", KEY)], **told}
        wait_until(lambda: router.service.models.adapter(NAME) is not None)
        yield router, fake, http


def respond(http: httpx.Client, **fields: Any) -> str:
    answer = http.post("/v1/responses", json={"input": "Hi", **fields})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def completed(http: httpx.Client, response: str) -> bool:
    return bool(http.get(f"/v1/responses/{response}").json()["status"] == "completed")


def last_key(fake: FakeController) -> bytes:
    return adapter_of(fake.behaviour.submits[-1].salt)


def test_a_request_names_its_adapter_as_the_model(place: Path, tokenizer: Tokenizer) -> None:
    with adapted(place, tokenizer) as (_, fake, http):
        for model, key in ((NAME, KEY), ("demo", b"")):
            answer = http.post("/v1/chat/completions", json={"model": model, "messages": MESSAGES})
            assert (answer.status_code, answer.json()["model"]) == (200, model)
            assert last_key(fake) == key


def test_what_is_stored_goes_on_with_its_adapter(place: Path, tokenizer: Tokenizer) -> None:
    with adapted(place, tokenizer) as (_, fake, http):
        session = create(http, model=NAME)["id"]
        assert chat(http, session).status_code == 200
        assert last_key(fake) == KEY
        first = respond(http, model=NAME)
        second = respond(http, previous_response_id=first)
        assert last_key(fake) == KEY
        respond(http, previous_response_id=second, model="demo")
        assert last_key(fake) == b""
        conversation = http.post("/v1/conversations", json={}).json()["id"]
        for fields in ({"model": NAME}, {}):
            respond(http, conversation=conversation, **fields)
            assert last_key(fake) == KEY


def test_tasks_use_the_adapters_of_their_requests(place: Path, tokenizer: Tokenizer) -> None:
    with adapted(place, tokenizer) as (_, fake, http):
        lines = [chat_line(0, "Hi"), chat_line(1, "Hello", model=NAME)]
        batch = finished(http, begin(http, lines))
        answers = {line["custom_id"]: line["response"]["body"] for line in lines_of(http, batch["output_file_id"])}
        assert {name: body["model"] for name, body in answers.items()} == {"line-0": "demo", "line-1": NAME}
        assert sorted(adapter_of(submit.salt) for submit in fake.behaviour.submits) == [b"", KEY]
        response = respond(http, model=NAME, background=True)
        wait_until(lambda: completed(http, response))
        assert last_key(fake) == KEY
        goes_on = respond(http, previous_response_id=response, background=True)
        wait_until(lambda: completed(http, goes_on))
        assert last_key(fake) == KEY


def test_the_dashboard_finds_what_was_computed_with_an_adapter(place: Path, tokenizer: Tokenizer) -> None:
    naming = {"chunk_size": 16, "fingerprint": b"f" * 16, "dtype": "float32"}
    with adapted(place, tokenizer, **naming) as (_, _, http):
        sessions = set()
        for model in (NAME, "demo"):
            sessions.add(session := create(http, model=model)["id"])
            assert chat(http, session, f"A text for {model}. " * 20).status_code == 200
        shown = {row["id"]: row for row in http.get("/ui/api/sessions", headers=ADMIN).json()}
        assert sessions == shown.keys()
        assert all(row["cached_tokens"] >= 64 for row in shown.values()), shown


def test_no_choice_of_an_adapter_is_lost() -> None:
    with pytest.raises(AssertionError, match="base model"):
        choose_adapter(NAME, KEY)


def test_a_purge_finds_what_was_computed_with_an_adapter_and_without(place: Path, tokenizer: Tokenizer) -> None:
    """Sessions are deleted in the order of their ids, which are random: with and without adapter mixed."""
    with adapted(place, tokenizer) as (router, fake, http):
        salts = set()
        for number in range(6):
            for model in (NAME, "demo"):
                session = create(http, model=model)["id"]
                assert chat(http, session, f"Question {number}").status_code == 200
                salts.add(fake.behaviour.submits[-1].salt)
        assert salts == {b"", adapter_salt(KEY, b"")}
        memory = router.service.models.memory
        assert len(memory) == 12
        purged = http.post("/ui/api/purge", params={"tenant": "default"}, headers=ADMIN).json()
        assert purged["deleted"] == {"session": 12}
        assert len(memory) == 0
        wait_until(lambda: len(fake.behaviour.forgets) == 12)
        forgotten = [message.salt for message in fake.behaviour.forgets]
        assert [forgotten.count(salt) for salt in sorted(salts)] == [6, 6]


def test_a_request_does_not_wait_for_an_adapter_that_no_group_has_any_more(
    place: Path, tokenizer: Tokenizer
) -> None:
    with running(place, tokenizer, resume_seconds=600.0) as (router, [fake]), router.client() as http:
        it = fake.behaviour
        it.told = {"adapters": [LoadedAdapter(NAME, "/adapters/legal", KEY)]}
        wait_until(lambda: router.service.models.adapter(NAME) is not None)
        it.hold = True
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(http.post, "/v1/chat/completions", json={"model": NAME, "messages": MESSAGES})
            wait_until(lambda: fake.live == 1)
            it.status = "starting"  # it has lost its workers
            wait_until(lambda: router.ready == 0)
            it.fail_after, it.hold = 0, False
            wait_until(lambda: router.service.dispatcher.waiting_count == 1)
            it.told, it.status = {}, "ready"
            ended = answer.result(60)
    assert (ended.status_code, ended.json()["error"]["code"]) == (503, "engine_failed")
    assert "worker 1 died" in ended.json()["error"]["message"]  # what the group has said, not that none is ready


def test_which_groups_may_have_an_adapter() -> None:
    def link(*keys: bytes, ready: bool = True) -> Any:
        adapters = [LoadedAdapter(NAME, "/adapters/legal", key) for key in keys]
        return SimpleNamespace(ready=ready, state=SimpleNamespace(adapters=adapters))

    assert may_have(KEY, [])  # all groups are being replaced
    assert may_have(KEY, [link(), link(KEY)])
    assert may_have(KEY, [link(), link(ready=False)])
    assert not may_have(KEY, [link(), link(b"other")])
