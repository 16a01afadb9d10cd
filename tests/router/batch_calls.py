"""Files and batches of tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx
from router.harness import wait_until

OVER = ("completed", "failed", "expired", "cancelled")


def chat_line(number: int | str, content: str, **fields: Any) -> dict[str, Any]:
    """A request of a batch."""
    body = {"model": "demo", "messages": [{"role": "user", "content": content}], **fields}
    return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def form_of(content: bytes, **fields: str) -> dict[str, Any]:
    """The body and the type of a form with a file, as arguments of a request."""
    made = httpx.Request("POST", "http://x", data=fields, files={"file": ("in.jsonl", content)})
    return {"content": made.read(), "headers": {"Content-Type": made.headers["content-type"]}}


def upload(http: httpx.Client, content: bytes, *, purpose: str = "batch", **fields: str) -> str:
    """Store a file, and return its id."""
    answer = http.post("/v1/files", **form_of(content, purpose=purpose, **fields))
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def begin(http: httpx.Client, lines: Sequence[dict[str, Any]], **fields: Any) -> str:
    """Make a batch of lines, and return its id."""
    content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    body = {
        "input_file_id": upload(http, content),
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
        **fields,
    }
    answer = http.post("/v1/batches", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["status"] == "validating"
    return str(answer.json()["id"])


def get(http: httpx.Client, batch_id: str) -> dict[str, Any]:
    """A batch as it is now."""
    found: dict[str, Any] = http.get(f"/v1/batches/{batch_id}").json()
    return found


def finished(http: httpx.Client, batch_id: str) -> dict[str, Any]:
    """A batch when it is over."""
    wait_until(lambda: get(http, batch_id)["status"] in OVER)
    return get(http, batch_id)


def lines_of(http: httpx.Client, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of a result file; none: there is no file."""
    if file_id is None:
        return []
    answer = http.get(f"/v1/files/{file_id}/content")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-length"] == str(len(answer.content))
    return [json.loads(line) for line in answer.content.splitlines()]
