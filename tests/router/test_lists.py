"""What endpoints that list things refuse in their queries: every value that would otherwise be passed over."""

from __future__ import annotations

import httpx
import pytest
from router.harness import MESSAGES

ANTHROPIC = {"anthropic-version": "2023-06-01"}
LISTS = [
    "files",
    "batches",
    "sessions",
    "schemas",
    "responses/{response}/input_items",
    "conversations/{conversation}/items",
]


@pytest.fixture
def paths(http: httpx.Client) -> dict[str, str]:
    """The list endpoints by their patterns, of things that exist."""
    response = http.post("/v1/responses", json={"input": "Hi", "store": True}).json()["id"]
    items = [{"role": "user", "content": "Hi"}]
    conversation = http.post("/v1/conversations", json={"items": items}).json()["id"]
    return {each: f"/v1/{each.format(response=response, conversation=conversation)}" for each in LISTS}


@pytest.mark.parametrize("pattern", LISTS)
def test_limits_orders_and_places(pattern: str, http: httpx.Client, paths: dict[str, str]) -> None:
    path = paths[pattern]
    plain = http.get(path)
    assert plain.status_code == 200, plain.text
    orders = [order for order in ("asc", "desc") if http.get(path, params={"order": order}).status_code == 200]
    assert orders == (
        ["asc", "desc"] if "/" in pattern else ["desc"] if pattern in ("files", "batches") else ["asc"]
    )
    assert http.get(path, params={"order": orders[-1]}).json() == plain.json(), "the default, or the only one"
    wrong = [("order", "up"), ("order", ""), ("after", "no id\n" if pattern == "schemas" else "nonsense")]
    wrong += [("limit", value) for value in ("0", "-1", "101", "1e1", "ten", "", "9" * 5000, "nan", "٣")]
    for name, value in wrong:
        answer = http.get(path, params={name: value})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, name), (name, value, answer.text)
        assert repr(value[:80]) in error["message"], error
    for order in orders:
        assert f'"{order}"' in http.get(path, params={"order": "up"}).json()["error"]["message"]
    assert "1 to 100" in http.get(path, params={"limit": "0"}).json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "name", "value", "allowed"),
    [
        ("files", "purpose", "poetry", '"batch_output"'),
        ("messages/batches", "limit", "000000001234", "1 to 1000"),
        ("messages/batches", "after_id", "msgbatch_1", "'batch_'"),
        ("messages/batches", "before_id", "x", "'batch_'"),
        ("models", "after_id", "gpt-5", "not in the list"),
        ("models", "before_id", "gpt-5", "not in the list"),
        ("models", "limit", "0", "1 to 1000"),
    ],
)
def test_other_parameters(path: str, name: str, value: str, allowed: str, http: httpx.Client) -> None:
    answer = http.get(f"/v1/{path}", params={name: value}, headers=ANTHROPIC if path != "files" else {})
    message = answer.json()["error"]["message"]
    assert (answer.status_code, f"`{name}` is {value!r}" in message, allowed in message) == (400, True, True), (
        message
    )


def test_what_is_included(http: httpx.Client) -> None:
    session = http.post("/v1/sessions", json={"messages": MESSAGES}).json()["id"]
    for path in (f"/v1/sessions/{session}", "/v1/schemas/any"):
        answer = http.get(path, params={"include": "everything"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "include")
    assert "messages" in http.get(f"/v1/sessions/{session}", params={"include": "messages"}).json()


def test_a_page_begins_behind_an_entry_that_is_gone(http: httpx.Client) -> None:
    made = [http.post("/v1/sessions", json={}).json()["id"] for _ in range(3)]
    first, gone, last = sorted(made)
    assert http.delete(f"/v1/sessions/{gone}").status_code == 200
    page = http.get("/v1/sessions", params={"after": gone, "limit": 100}).json()["data"]
    assert last in [each["id"] for each in page]
    assert first not in [each["id"] for each in page]
