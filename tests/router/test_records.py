"""The record store of a router: a store that is away, what `/health` and the metrics say, and tending."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from router.harness import (
    DEMO_MODEL,
    MESSAGES,
    STORES,
    RunningRouter,
    free_port,
    running,
    shared_records,
    wait_until,
)
from router.schema_calls import TRIP, complete, post
from router.session_calls import error_of

from trunkline.kvstore.records import Change, MissingError, RecordKey
from trunkline.router import service
from trunkline.router.config import RouterConfig
from trunkline.router.stores import record_tender
from trunkline.router.text.tokenizer import Tokenizer

CHAT = {"messages": MESSAGES}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers soon give up on a store that does not answer, and often tend it."""
    monkeypatch.setattr(service, "RECORDS_PATIENCE_S", 0.05)
    monkeypatch.setattr(record_tender, "PERIOD_SECONDS", 0.05)


@pytest.fixture
def without_store(place: Path, tokenizer: Tokenizer, quick: None) -> Iterator[tuple[RunningRouter, httpx.Client]]:
    records = f"redis://127.0.0.1:{free_port()}"
    with running(place, tokenizer, records=records) as (router, _), router.client() as http:
        yield router, http


def test_plain_requests_need_no_store(without_store: tuple[RunningRouter, httpx.Client]) -> None:
    _, http = without_store
    for stream in (False, True):
        assert http.post("/v1/chat/completions", json={**CHAT, "stream": stream}).status_code == 200
    assert http.post("/v1/chat/completions", json={**CHAT, "session_id": "a label"}).status_code == 200


def test_requests_with_records_are_refused(without_store: tuple[RunningRouter, httpx.Client]) -> None:
    _, http = without_store
    answers = [
        http.post("/v1/sessions", json={}),
        http.get("/v1/sessions"),
        http.get("/v1/sessions/sess_1"),
        http.post("/v1/chat/completions", json={**CHAT, "session_id": "sess_1"}),
        http.post("/v1/schemas", json={"pml": TRIP}),
        http.get("/v1/schemas"),
        http.get("/v1/schemas/trip"),
        http.patch("/v1/schemas/trip", json={"ttl": 5}),
        http.delete("/v1/schemas/trip"),
        complete(http),
    ]
    for answer in answers:
        assert error_of(answer)[:2] == (503, "records_unavailable"), answer.request.url
        assert answer.headers["retry-after"]


def test_health_says_that_the_store_is_away(without_store: tuple[RunningRouter, httpx.Client]) -> None:
    _, http = without_store
    wait_until(lambda: http.get("/health").json()["records"] == "away")
    answer = http.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (200, "ok")
    assert answer.json()["records_reason"]
    counted = 'trunkline_record_failures_total{operation="tend",reason="away"}'
    assert counted in http.get("/metrics").text


def test_health_and_metrics_of_a_store_that_answers(place: Path, tokenizer: Tokenizer, quick: None) -> None:
    with running(place, tokenizer) as (router, _), router.client() as http:
        post(http)
        health = http.get("/health").json()
        assert health["records"] == "ok"
        assert "records_reason" not in health
        wait_until(lambda: "trunkline_records 1.0" in http.get("/metrics").text)
        text = http.get("/metrics").text
        size = router.call(router.service.records.usage()).bytes
        assert f"trunkline_record_bytes {float(size)}" in text
        assert "trunkline_record_limit_bytes 8.589934592e+09" in text
        assert 'trunkline_record_operation_seconds_count{operation="create"} 1.0' in text


def test_expired_records_go(place: Path, tokenizer: Tokenizer, quick: None) -> None:
    with running(place, tokenizer) as (router, _):
        records = router.service.records

        async def make() -> None:
            changes = (Change(b"", ttl) for ttl in [0.01] * 300 + [0.0])
            await asyncio.gather(
                *(records.create(RecordKey("x", "", str(i)), change) for i, change in enumerate(changes))
            )

        router.call(make())
        wait_until(lambda: router.call(records.usage()).records == 1)
        router.call(records.get(RecordKey("x", "", "300")))
        with pytest.raises(MissingError):
            router.call(records.get(RecordKey("x", "", "0")))


def test_the_store_is_tended_after_an_error(
    place: Path, tokenizer: Tokenizer, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(place, tokenizer) as (router, _):
        records, tries = router.service.records, []
        tend = records.tend

        async def broken() -> object:
            tries.append(1)
            if len(tries) < 3:
                raise RuntimeError("a test")
            return await tend()

        monkeypatch.setattr(records, "tend", broken)
        wait_until(lambda: len(tries) > 3)


def test_beyond_the_limit_what_was_used_least_goes(place: Path, tokenizer: Tokenizer, quick: None) -> None:
    with running(place, tokenizer, records_bytes_max=20_000) as (router, _):
        records = router.service.records
        for number in range(10):
            router.call(records.create(RecordKey("x", "", str(number)), Change(bytes(5000))))
        wait_until(lambda: router.call(records.usage()).bytes <= 20_000)
        router.call(records.get(RecordKey("x", "", "9")))


@pytest.mark.parametrize("store", STORES)
def test_sessions_of_one_router_are_another_routers(place: Path, tokenizer: Tokenizer, store: str) -> None:
    """Routers that share a store share its sessions, also while they have other controllers."""
    with shared_records(store) as records:
        for name in ("one", "two"):
            (place / name).mkdir()
        with (
            running(place / "one", tokenizer, records=records) as (one, _),
            running(place / "two", tokenizer, records=records) as (two, _),
            one.client() as first,
            two.client() as second,
        ):
            session = first.post("/v1/sessions", json=CHAT).json()["id"]
            turn = {"session_id": session, "messages": [{"role": "user", "content": "And then?"}]}
            for http in (second, first, second):
                assert http.post("/v1/chat/completions", json=turn).status_code == 200
            for http in (first, second):
                assert http.get(f"/v1/sessions/{session}").json()["turns"] == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("records", "ftp://somewhere"),
        ("records", ""),
        ("records_bytes_max", -1),
        ("records_tenant_bytes", -1),
        ("prompt_memory_bytes", -1),
    ],
)
def test_wrong_settings(field: str, value: Any) -> None:
    config = RouterConfig(**{"model_path": str(DEMO_MODEL), "controllers": ["ipc:///x"], field: value})
    with pytest.raises(ValueError, match=field):
        config.validate()
