"""Calls of the sessions API that several tests make."""

from __future__ import annotations

from typing import Any

import httpx
from router.harness import RunningRouter

from trunkline.kvstore.records import Reading, RecordKey


def create(http: httpx.Client, **fields: Any) -> Any:
    answer = http.post("/v1/sessions", json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def get(http: httpx.Client, session: str, **query: str) -> Any:
    answer = http.get(f"/v1/sessions/{session}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def chat(http: httpx.Client, session: str, text: str = "And then?", **fields: Any) -> httpx.Response:
    body = {"session_id": session, "messages": [{"role": "user", "content": text}], **fields}
    return http.post("/v1/chat/completions", json=body)


def error_of(answer: httpx.Response) -> tuple[int, str | None, str]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


def key_of(session: str, owner: str = "") -> RecordKey:
    return RecordKey("session", owner, session)


def reading_of(router: RunningRouter, session: str) -> Reading:
    """The session's record with all its segments; reading it is no use of it."""
    return router.call(router.service.records.get(key_of(session), use=False))


def is_free(http: httpx.Client, session: str) -> bool:
    """Whether no request holds the session's lease."""
    return http.patch(f"/v1/sessions/{session}", json={}).status_code == 200
