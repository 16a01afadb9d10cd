"""Names of models, lists of them in two forms, and the small endpoints beside those that generate."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from fastapi import APIRouter, Depends
from router.fake_controller import FakeController
from router.harness import ADMIN, DEMO_MODEL, MESSAGES, RunningRouter, running, wait_until
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.testclient import TestClient

from trunkline.router.app import Application, add_shortcuts, create_app
from trunkline.router.config import ModelConfig, RouterConfig
from trunkline.router.http.middleware import is_metered
from trunkline.router.streams.served_models import ServedModels
from trunkline.router.tenancy.auth import Access, access_needed, hash_key
from trunkline.router.text.tokenizer import Tokenizer

CHAT: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 5}


@pytest.fixture(scope="module")
def named(module_place: Path, tokenizer: Tokenizer) -> Iterator[tuple[RunningRouter, FakeController]]:
    """A router whose model has several names."""
    aliases = ["gpt-4o", "claude-*", "claude-opus-*"]
    with running(module_place, tokenizer, served_model_aliases=aliases) as (router, [fake]):
        yield router, fake


def test_a_name_stands_for_many(named: tuple[RunningRouter, FakeController]) -> None:
    with named[0].client() as http:
        for name in ("demo", "gpt-4o", "claude-sonnet-4-5-20250929", "claude-*", "claude-"):
            answer = http.post("/v1/chat/completions", json={**CHAT, "model": name})
            assert (answer.status_code, answer.json()["model"]) == (200, name)
            assert http.get(f"/v1/models/{name}").json()["root"] == "demo"
        for name in ("claude", "gpt-4o-mini", "xclaude-1", ""):
            answer = http.post("/v1/chat/completions", json={**CHAT, "model": name})
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        listed = http.get("/v1/models").json()["data"]
        assert [(card["id"], card["display_name"]) for card in listed] == [
            ("demo", "demo"),
            ("gpt-4o", "demo (gpt-4o)"),
        ]
        assert http.get("/").json()["models"] == ["demo", "gpt-4o", "claude-*", "claude-opus-*"]


def test_the_longest_beginning_counts(tokenizer: Tokenizer) -> None:
    second = ModelConfig(model_path=str(DEMO_MODEL), names=["second", "claude-opus-*", "*"])
    config = RouterConfig(
        model_path=str(DEMO_MODEL),
        members="static:members.json",
        controllers=[],
        served_model_name="first",
        served_model_aliases=["claude-*", "claude-opus-1"],
        models=[second],
    )
    config.validate()
    models = ServedModels(config, tokenizer)
    try:
        for name, of in (
            ("first", "first"),
            ("claude-x", "first"),
            ("claude-opus-2", "second"),
            ("claude-opus-1", "first"),
            ("gpt", "second"),
        ):
            found = models.find(name)
            assert found is not None
            assert found.name == of, name
    finally:
        for model in list(models)[1:]:
            model.tokenizer.close()
    with pytest.raises(ValueError, match="stands for many names"):
        RouterConfig(model_path=str(DEMO_MODEL), controllers=["ipc://a"], served_model_name="a*").validate()


def test_models_in_anthropics_form(named: tuple[RunningRouter, FakeController]) -> None:
    url = named[0].url
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=20) as claude:
        first, second = claude.models.list()
        assert (first.id, first.display_name, first.type, first.lifecycle) == ("demo", "demo", "model", "active")
        assert (second.id, second.display_name) == ("gpt-4o", "demo (gpt-4o)")
        assert first.created_at.year >= 2024
        assert first.max_input_tokens == first.max_tokens == 2048
        assert [model.id for model in claude.models.list(limit=1)] == ["demo", "gpt-4o"], "page by page"
        assert [model.id for model in claude.models.list(before_id="gpt-4o")] == ["demo"]
        assert claude.models.retrieve("claude-3-haiku").display_name == "demo (claude-3-haiku)"
        with pytest.raises(anthropic.NotFoundError):
            claude.models.retrieve("other")
        with pytest.raises(anthropic.BadRequestError, match="limit"):
            claude.models.list(limit=0)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        assert [model.object for model in client.models.list()] == ["model", "model"]


def test_the_clients_find_the_requests_id(named: tuple[RunningRouter, FakeController]) -> None:
    with anthropic.Anthropic(base_url=named[0].url, api_key="none", max_retries=0, timeout=20) as claude:
        answer = claude.messages.create(model="demo", max_tokens=5, messages=MESSAGES)
        assert answer._request_id is not None
        assert len(answer._request_id) == 32
        with pytest.raises(anthropic.NotFoundError) as caught:
            claude.messages.create(model="other", max_tokens=5, messages=MESSAGES)
        assert isinstance(caught.value.body, dict)
        assert caught.value.body["request_id"] == caught.value.request_id


def test_load_and_ping(http: httpx.Client, router: RunningRouter, fake: FakeController) -> None:
    assert http.get("/ping").status_code == http.head("/ping").status_code == 200
    idle = {"server_load": 0, "running": 0, "waiting": 0}
    wait_until(lambda: http.get("/load").json() == idle)
    fake.behaviour.hold = True
    with http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}):
        wait_until(lambda: http.get("/load").json()["server_load"] == 1)
        fake.behaviour.hold = False
    wait_until(lambda: http.get("/load").json()["server_load"] == 0)


def test_what_is_known_of_the_tokenizer(http: httpx.Client, tokenizer: Tokenizer) -> None:
    info = http.get("/tokenizer_info").json()
    assert info["chat_template"] == tokenizer.files.chat_template
    assert info["vocab_size"] == tokenizer.vocab_size
    assert info["eos_token"] == tokenizer.files.special_tokens["eos_token"]
    config = json.loads((DEMO_MODEL / "tokenizer_config.json").read_text())
    assert info["tokenizer_class"] == config["tokenizer_class"]
    assert http.get("/tokenizer_info", params={"model": "org/demo-alias"}).json() == info
    assert http.get("/tokenizer_info", params={"model": "other"}).status_code == 404


def test_the_page_about_the_api(http: httpx.Client) -> None:
    page = http.get("/docs")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'self'" in page.headers["content-security-policy"], "nothing comes from elsewhere"
    for line in page.text.splitlines():
        for name in ('href="', 'src="'):
            if name in line:
                address = line.split(name)[1].split('"')[0]
                assert http.get(f"/{address}").status_code == 200, address
    index = http.get("/").json()
    assert http.get(index["docs"]).status_code == http.get(index["ui"]).status_code == 200


def test_who_may_ask(place: Path, tokenizer: Tokenizer) -> None:
    with (
        running(place, tokenizer, needs_keys=True, api_key_digest=hash_key("key")) as (router, _),
        router.client() as http,
    ):
        for path in ("/ping", "/load", "/docs"):
            assert http.get(path).status_code == 200, path
        for path in ("/tokenizer_info", "/v1/models"):
            assert http.get(path).status_code == 401, path
            assert http.get(path, headers=ADMIN).status_code == 200, path
    assert access_needed("/docs/x") is Access.UNKNOWN
    assert not is_metered("/load")


def test_generating_endpoints_are_reached_past_fastapi_and_answer_as_before(
    named: tuple[RunningRouter, FakeController],
) -> None:
    app = create_app(named[0].service)
    direct = app.straight.keys()
    assert {"/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"} <= direct
    with named[0].client() as http:
        listed = http.get("/openapi.json").json()["paths"]
        for path in sorted(direct):
            assert "post" in listed[path]
            refused = http.get(path)
            status = 404 if path.startswith("/v1/responses/") else 405  # to GET it is the id of a response
            assert (path, refused.status_code, "error" in refused.json()) == (path, status, True)
            refused = http.post(path, json={"model": 5})
            assert (refused.status_code, "error" in refused.json()) == (400, True)


def test_endpoints_with_a_dependency_are_reached_through_fastapi() -> None:
    """Past it, nothing would call the dependency."""
    called: list[str] = []

    async def answer(request: Request) -> JSONResponse:
        return JSONResponse(request.url.path)

    def note(request: Request) -> None:
        called.append(request.url.path)

    routes = APIRouter()
    routes.post("/plain")(answer)
    routes.post("/guarded", dependencies=[Depends(note)])(answer)
    app = Application()
    add_shortcuts(app, routes)
    app.include_router(routes)
    assert app.straight.keys() == {"/plain"}
    http = TestClient(app)
    for path in ("/plain", "/guarded"):
        assert http.post(path).json() == path
    assert called == ["/guarded"]
