"""The client against a scripted server, and what it hands to OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from prompts import programs

from trunkline.prompts import Client, PmlRequestError, RequestError, UnreachableError, extra_body
from trunkline.prompts.client import PROGRAM_TTL_S

SCHEMA = {
    "id": "s",
    "object": "schema",
    "name": "s",
    "version": 3,
    "status": "ready",
    "extent": 40,
    "modules": [{"path": "a", "start": 0, "length": 9, "tokens": 9, "params": [], "bytes": 1, "tier": "device"}],
    "expires_at": None,
    "usage": {"computed_tokens": 9},
    "warnings": ["module a is short"],
}
CHUNKS: list[dict[str, Any]] = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}, "text": ""}]},
    {"choices": [{"delta": {"content": "One"}}]},
    {"choices": [{"text": " two."}]},
    {"choices": [{"finish_reason": "stop"}]},
    {"choices": [], "usage": {"prompt_tokens": 9}, "cache": {"status": "hit", "exact": False}},
]
CALL = programs.trip("Bern")


class Server:
    """Answers from a list of schemas that it has."""

    def __init__(self) -> None:
        self.schemas: set[str] = set()
        self.seen: list[tuple[str, str, Any]] = []
        self.answer: Callable[[], httpx.Response] = lambda: streamed(events(CHUNKS))

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body: Any = json.loads(request.content) if request.content else None
        self.seen.append((request.method, request.url.raw_path.decode(), body))
        if not request.url.path.startswith("/v1/schemas"):
            return self.complete(body)
        if request.method == "POST":
            self.schemas.add(body["pml"].split('"')[1] if "pml" in body else body["json"]["schema"])
            return httpx.Response(201, json=SCHEMA)
        name = request.url.path.removeprefix("/v1/schemas/")
        return httpx.Response(200, json=SCHEMA) if name in self.schemas else unknown(name)

    def complete(self, body: dict[str, Any]) -> httpx.Response:
        named = body["prompt"]["schema"] if body.get("prompt") else None
        return self.answer() if named is None or named in self.schemas else unknown(named)

    def client(self, **options: Any) -> Client:
        return Client("http://server/v1/", transport=httpx.MockTransport(self), **options)

    @property
    def requests(self) -> list[tuple[str, str]]:
        return [(method, path) for method, path, _ in self.seen]


def unknown(name: str) -> httpx.Response:
    error = {"message": f"schema {name!r} does not exist", "type": "not_found_error", "code": "E_SCHEMA_UNKNOWN"}
    return httpx.Response(404, json={"error": error})


def streamed(text: str) -> httpx.Response:
    return httpx.Response(200, headers={"Content-Type": "text/event-stream"}, text=text)


def events(chunks: list[dict[str, Any]], *, end: bool = True) -> str:
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return ": a comment\n\n" + "".join(lines) + ("data: [DONE]\n\n" if end else "")


def test_an_answer_has_text_usage_cache_and_times() -> None:
    server = Server()
    pieces: list[str] = []
    with server.client(model="m") as client:
        answer = client.chat(CALL, "Plan a Sunday.", max_tokens=5, on_text=pieces.append)
    assert (answer.text, pieces, answer.finish_reason) == ("One two.", ["One", " two."], "stop")
    assert (answer.usage, answer.cache["status"]) == ({"prompt_tokens": 9}, "hit")
    assert answer.first_token_s is not None
    assert 0 < answer.first_token_s <= answer.seconds
    assert server.seen[-1][1:] == (
        "/v1/chat/completions",
        {
            "model": "m",
            "prompt": CALL.to_json(),
            "messages": [{"role": "user", "content": "Plan a Sunday."}],
            "max_tokens": 5,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    )


def test_a_schema_is_sent_with_its_first_use_only() -> None:
    server = Server()
    with server.client() as client:
        for _ in range(2):
            client.complete(CALL)
        assert client.extra_body(CALL) == extra_body(CALL)
    name = CALL.program.schema_name
    assert server.requests == [
        ("GET", f"/v1/schemas/{name}"),
        ("POST", "/v1/schemas"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/completions"),
    ]
    assert server.seen[1][2] == {"pml": CALL.program.to_pml(), "ttl": PROGRAM_TTL_S}
    server.seen.clear()
    with server.client() as other:  # it finds what the first has sent
        other.complete(CALL)
    assert server.requests == [("GET", f"/v1/schemas/{name}"), ("POST", "/v1/completions")]


def test_a_schema_with_a_name_of_its_own_is_always_sent() -> None:
    server = Server()
    for _ in range(2):
        with server.client() as client:
            client.chat(programs.conversation("Bo"))
    assert server.requests == [("POST", "/v1/schemas"), ("POST", "/v1/chat/completions")] * 2


def test_a_schema_that_was_forgotten_is_sent_again_once() -> None:
    server = Server()
    with server.client() as client:
        client.complete(CALL, cache_salt="a b")
        server.schemas.clear()
        server.seen.clear()
        assert client.complete(CALL, cache_salt="a b").text == "One two."
        found = f"/v1/schemas/{CALL.program.schema_name}?cache_salt=a%20b"
        assert [path.replace("+", "%20") for _, path in server.requests] == [
            "/v1/completions",
            found,
            "/v1/schemas",
            "/v1/completions",
        ]
        assert server.seen[2][2]["cache_salt"] == "a b"
        server.answer = lambda: unknown("gone")
        with pytest.raises(PmlRequestError, match="'gone' does not exist"):
            client.complete(CALL)


def test_lists_are_asked_for_page_by_page() -> None:
    pages = {None: (["a", "b"], True), "b": (["c"], False)}

    def handle(request: httpx.Request) -> httpx.Response:
        names, more = pages[request.url.params.get("after")]
        data = [{"id": name, "object": "schema", "version": 1} for name in names]
        return httpx.Response(200, json={"data": data, "has_more": more})

    with Client(transport=httpx.MockTransport(handle)) as client:
        assert [entry.id for entry in client.schemas.list()] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("response", "kind", "message"),
    [
        (
            httpx.Response(503, json={"error": {"message": "draining", "code": "draining"}}),
            RequestError,
            "draining",
        ),
        (httpx.Response(502, text="bad gateway"), RequestError, r"bad gateway \(HTTP 502\)"),
        (streamed(events([{"error": {"message": "engine died"}}])), RequestError, "engine died"),
        (streamed(events(CHUNKS[:1], end=False)), UnreachableError, "before its end"),
        (streamed("data: {nonsense\n\n"), UnreachableError, "expected protocol"),
        (streamed('data: {"choices": [3]}\n\n'), UnreachableError, "expected protocol"),
    ],
)
def test_failures_are_clear(response: httpx.Response, kind: type[Exception], message: str) -> None:
    server = Server()
    server.answer = lambda: response
    with server.client() as client, pytest.raises(kind, match=message):
        client.complete("<prompt schema='s'/>")


def test_answers_that_are_no_schemas_are_refused() -> None:
    for answer in ({"id": 3}, ["x"]):
        transport = httpx.MockTransport(lambda request, answer=answer: httpx.Response(200, json=answer))
        with Client(transport=transport) as client, pytest.raises(UnreachableError, match="expected protocol"):
            client.schemas.get("s")


def test_no_server_is_said_so() -> None:
    with Client("http://127.0.0.1:9") as client, pytest.raises(UnreachableError, match="no server answers at"):
        client.schemas.get("s")
    with Client("nonsense") as client, pytest.raises(UnreachableError, match="no address of a server"):
        client.schemas.get("s")


def test_an_error_while_text_is_shown_ends_the_request() -> None:
    server = Server()

    def stop(text: str) -> None:
        raise KeyboardInterrupt

    with server.client() as client, pytest.raises(KeyboardInterrupt):
        client.complete("<prompt schema='s'/>", on_text=stop)
