"""Requests with an `Idempotency-Key` that several tests make."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
from router.fake_controller import FakeController
from router.harness import JSON, MESSAGES, RunningRouter, running, wait_until

from trunkline.kvstore.records import BusyError, Change, MissingError, RecordKey
from trunkline.router.http.idempotency import RequestName, Result, name_request
from trunkline.router.tenancy.auth import ANONYMOUS
from trunkline.router.text.tokenizer import Tokenizer

PATH = "/v1/chat/completions"
REPLAYED = "idempotent-replayed"
CHAT: dict[str, Any] = {"messages": MESSAGES}


def ask(http: httpx.Client, key: str, path: str = PATH, /, *, tenant: str = "", **fields: Any) -> httpx.Response:
    headers = JSON | {"Idempotency-Key": key} | ({"x-api-key": tenant} if tenant else {})
    body = fields if "prompt" in fields or path != PATH else CHAT | fields
    return http.post(path, content=json.dumps(body), headers=headers)


def name_of(key: str, path: str = PATH, /, **fields: Any) -> RequestName:
    """Of such a request."""
    body = fields if "prompt" in fields or path != PATH else CHAT | fields
    return name_request(ANONYMOUS, key, b"POST", path.encode(), b"", b"", json.dumps(body).encode())


def key_of(name: RequestName) -> RecordKey:
    """Of the record with a request's answer."""
    return RecordKey("answer", "", name.record)


def kept(router: RunningRouter, name: RequestName) -> Result:
    reading = router.call(router.service.records.get(key_of(name)))
    return msgspec.msgpack.decode(reading.record.header, type=Result)


def forget(router: RunningRouter, name: RequestName) -> None:
    """As if the router had died before it could record its answer."""

    def deleted() -> bool:
        try:
            router.call(router.service.records.delete(key_of(name)))
        except (BusyError, MissingError):
            return False
        return True

    wait_until(deleted)


def leave_unfinished(router: RunningRouter, name: RequestName, lease_s: float) -> None:
    """What a router that died at work leaves behind."""
    records, header = router.service.records, msgspec.msgpack.encode(Result(name.request, 1234567890))
    router.call(records.create(key_of(name), Change(header, 600.0)))
    router.call(records.acquire(key_of(name), "of the dead", lease_s))


def seeds(fake: FakeController) -> list[int]:
    return [submit.sampling.seed for submit in fake.behaviour.submits]


def essence(answer: httpx.Response) -> tuple[set[str], str]:
    """Ids and text, however the events of a stream are cut."""
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    ids: set[str] = set()
    text = ""
    parts: list[Any] = [json.loads(line) for line in lines or [answer.text]][::-1]
    while parts:
        part = parts.pop()
        for key, value in part.items() if isinstance(part, dict) else ():
            if key in ("id", "item_id"):
                ids.add(value)
            elif key in ("text", "content", "delta") and isinstance(value, str):
                text += value
        parts += (
            list(part.values() if isinstance(part, dict) else part)[::-1] if isinstance(part, dict | list) else []
        )
    return ids, text


@contextmanager
def one_router(
    place: Path, tokenizer: Tokenizer, **options: Any
) -> Iterator[tuple[RunningRouter, httpx.Client, FakeController]]:
    with (
        running(place, tokenizer, **options) as (router, [fake]),
        httpx.Client(base_url=router.url, timeout=20, trust_env=False) as http,
    ):
        yield router, http, fake


def patiently(make: Callable[[], httpx.Response]) -> httpx.Response:
    """The first good answer: after failures a controller gets a pause."""
    answers: list[httpx.Response] = []

    def good() -> bool:
        answers.append(make())
        return answers[-1].status_code == 200

    wait_until(good)
    return answers[-1]
