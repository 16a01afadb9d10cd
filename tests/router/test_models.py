"""Several models behind one router, and groups that are not what their members' list says: fake controllers, real
tokenizers of two models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import msgspec
import pytest
from router.fake_controller import FakeController, prompt_of
from router.harness import ADMIN, ADMIN_KEY, DEMO_MODEL, MESSAGES, RunningRouter, make_answer, wait_until
from router.model_folders import make_second

from trunkline.kvstore.fingerprint import tokenizer_digest
from trunkline.router.config import ModelConfig, RouterConfig
from trunkline.router.membership.member import Member
from trunkline.router.membership.static_source import write_members
from trunkline.router.messages import GroupIdentity, State
from trunkline.router.streams import link
from trunkline.router.tenancy.auth import hash_key
from trunkline.router.text.tokenizer import Tokenizer

FIRST, SECOND = "first", "second"
SCHEMA = '<schema name="s"><module name="m">Some text of a module.</module></schema>'


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Tokenizer]]:
    """The second model's folder and tokenizer."""
    folder = make_second(tmp_path_factory.mktemp("models"))
    tokenizer = Tokenizer(folder)
    yield folder, tokenizer
    tokenizer.close()


def group(fake: FakeController, member: str, model: str, tokenizer: Tokenizer) -> FakeController:
    """Have a fake controller say who it is."""
    fake.behaviour.group = GroupIdentity(member, model, tokenizer.fingerprint)
    return fake


@contextmanager
def two_models(
    place: Path, tokenizer: Tokenizer, second: tuple[Path, Tokenizer], **options: Any
) -> Iterator[tuple[RunningRouter, FakeController, FakeController]]:
    """A router of two models, each with a group."""
    folder, other = second
    fakes = [
        FakeController(f"ipc://{place}/{index}", make_answer(each))
        for index, each in enumerate((tokenizer, other))
    ]
    group(fakes[0], "a", FIRST, tokenizer)
    group(fakes[1], "b", SECOND, other)
    write_members(
        place / "members.json", [Member(name, fake.endpoint) for name, fake in zip("ab", fakes, strict=True)]
    )
    config = RouterConfig(
        **{
            "model_path": str(DEMO_MODEL),
            "served_model_name": FIRST,
            "controllers": [],
            "members": f"static:{place / 'members.json'}",
            "models": [ModelConfig(model_path=str(folder), names=[SECOND, "org/second"])],
            "port": 0,
            "resume_seconds": 0.0,
            "admin_key_digest": hash_key(ADMIN_KEY),
            **options,
        }
    )
    router = RunningRouter(config, Tokenizer(DEMO_MODEL))
    try:
        router.start()
        for fake in fakes:
            fake.start()
        wait_until(lambda: router.ready == 2)
        yield router, fakes[0], fakes[1]
    finally:
        router.stop()
        for fake in fakes:
            if fake.running:
                fake.stop()


def chat(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/chat/completions", json={"messages": MESSAGES, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def test_requests_go_by_model(place: Path, tokenizer: Tokenizer, second: tuple[Path, Tokenizer]) -> None:
    with two_models(place, tokenizer, second) as (router, first_group, second_group), router.client() as http:
        texts = []
        for name, fake, its in ((FIRST, first_group, tokenizer), ("org/second", second_group, second[1])):
            for _ in range(3):
                answer = chat(http, model=name)
                assert answer["model"] == name
                texts.append(text_of(answer))
            assert len(fake.behaviour.submits) == 3
            shown = its.decode(prompt_of(fake.behaviour.submits[-1]), skip_special_tokens=False)
            assert MESSAGES[0]["content"] in shown
        assert len(set(texts)) == 1, "both fakes say the same, each in its own tokens"
        assert answer["system_fingerprint"] != chat(http)["system_fingerprint"]
        assert len(first_group.behaviour.submits) == 4, "who names no model gets the first one"
        body = {"model": SECOND, "max_tokens": 10, "messages": MESSAGES}
        assert http.post("/v1/messages", json=body).json()["model"] == SECOND
        assert http.post("/v1/completions", json={"model": SECOND, "prompt": "a"}).json()["model"] == SECOND
        assert http.post("/v1/responses", json={"model": SECOND, "input": "a"}).json()["model"] == SECOND
        assert len(second_group.behaviour.submits) == 6
        counts = [
            http.post("/tokenize", json={"model": name, "prompt": "os.path.join"}).json()
            for name in (FIRST, SECOND)
        ]
        assert counts[0]["tokens"] == tokenizer.encode("os.path.join", add_special_tokens=True)
        assert (
            counts[1]["tokens"] == second[1].encode("os.path.join", add_special_tokens=True) != counts[0]["tokens"]
        )


def test_models_are_listed(place: Path, tokenizer: Tokenizer, second: tuple[Path, Tokenizer]) -> None:
    with two_models(place, tokenizer, second) as (router, _, _), router.client() as http:
        cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
        assert [(name, card["root"], card["max_model_len"]) for name, card in cards.items()] == [
            (FIRST, FIRST, 2048),
            (SECOND, SECOND, 1024),
            ("org/second", SECOND, 1024),
        ]
        assert http.get("/v1/models/org/second").json() == cards["org/second"]
        assert http.get("/health").json()["models"] == {FIRST: True, SECOND: True}
        for path, body in (
            ("/v1/chat/completions", {"messages": MESSAGES}),
            ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5}),
            ("/v1/sessions", {}),
        ):
            refused = http.post(path, json={"model": "third", **body})
            assert refused.status_code == 404
            error = refused.json()["error"]
            assert error["message"].count("served: first, second, org/second")
            assert error.get("code", error["type"]) in ("model_not_found", "not_found_error")


def test_one_models_group_is_down(place: Path, tokenizer: Tokenizer, second: tuple[Path, Tokenizer]) -> None:
    with two_models(place, tokenizer, second) as (router, first_group, second_group), router.client() as http:
        first_group.stop()
        wait_until(lambda: router.ready == 1)
        refused = http.post("/v1/chat/completions", json={"messages": MESSAGES, "model": FIRST})
        assert refused.status_code == 503
        message = refused.json()["error"]["message"]
        assert "controller a: not connected" in message
        assert "controller b" not in message
        assert text_of(chat(http, model=SECOND))
        assert len(second_group.behaviour.submits) == 1
        health = http.get("/health")  # which submits one more if the last token is older than a second
        assert (health.status_code, health.json()["models"]) == (200, {FIRST: False, SECOND: True})


def test_sessions_keep_their_model(place: Path, tokenizer: Tokenizer, second: tuple[Path, Tokenizer]) -> None:
    with two_models(place, tokenizer, second) as (router, first_group, second_group), router.client() as http:
        session = http.post("/v1/sessions", json={"model": SECOND}).json()
        assert session["model"] == SECOND
        for _ in range(2):
            assert chat(http, session_id=session["id"])["model"] == SECOND
        assert len(second_group.behaviour.submits) == 2
        assert not first_group.behaviour.submits
        shown = http.get(f"/v1/sessions/{session['id']}").json()
        assert (shown["turns"], shown["model"]) == (2, SECOND)
        prefetch = http.post(f"/v1/sessions/{session['id']}/prefetch").json()
        assert prefetch["tokens"] == prefetch["known_tokens"] > 0
        assert second_group.behaviour.prefetches
        chat(http, session_id=session["id"], model=FIRST)
        prompt = tokenizer.decode(prompt_of(first_group.behaviour.submits[0]), skip_special_tokens=False)
        assert prompt.count(MESSAGES[0]["content"]) == 3, "the other model goes on with the whole conversation"
        assert chat(http, session_id=session["id"])["model"] == FIRST


def test_a_schema_belongs_to_a_model(place: Path, tokenizer: Tokenizer, second: tuple[Path, Tokenizer]) -> None:
    with two_models(place, tokenizer, second) as (router, first_group, second_group), router.client() as http:
        made = http.post("/v1/schemas", json={"model": SECOND, "pml": SCHEMA})
        assert made.status_code == 201, made.text
        assert second_group.behaviour.modules.calls
        assert not first_group.behaviour.modules.calls
        assert http.get("/v1/schemas/s").json()["model"] == SECOND
        prompt = {"pml": '<prompt schema="s"><m/></prompt>', "messages": MESSAGES}
        assert http.post("/v1/chat/completions", json={**prompt, "model": SECOND}).status_code == 200
        refused = http.post("/v1/chat/completions", json={**prompt, "model": FIRST})
        assert refused.status_code == 400
        assert "belongs to model 'second'" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"member": "c"}, "is group 'b', but it is 'c'"),
        ({"model": "third"}, "it serves model 'third'; this router has 'first', 'second'"),
        ({"model": ""}, "it does not say which model it serves"),
        ({"tokenizer": "0123456789abcdef"}, "its model 'second' has another tokenizer (0123456789abcdef)"),
        ({"model": FIRST}, "its model 'first' has another tokenizer"),
    ],
)
def test_a_group_that_is_another_is_not_used(
    place: Path,
    tokenizer: Tokenizer,
    second: tuple[Path, Tokenizer],
    said: dict[str, str],
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with two_models(place, tokenizer, second) as (router, _, second_group), router.client() as http:
        log = Mock()
        monkeypatch.setattr(link, "_log", log)
        second_group.behaviour.group = msgspec.structs.replace(second_group.behaviour.group, **said)
        wait_until(lambda: router.ready == 1)
        refused = http.post("/v1/chat/completions", json={"messages": MESSAGES, "model": SECOND})
        assert refused.status_code == 503
        [_, other] = http.get("/health").json()["controllers"]
        assert problem in other["problem"]
        shown = http.get("/ui/api/overview", headers=ADMIN).json()["groups"][1]
        assert (shown["ready"], problem in shown["detail"]) == (False, True)
        [said_once] = log.warning.mock_calls
        assert (said_once.args, said_once.kwargs["group"]) == (("group_refused",), "b")
        assert not second_group.behaviour.submits
        group(second_group, "b", SECOND, second[1])
        wait_until(lambda: router.ready == 2)
        assert chat(http, model=SECOND)
        assert http.get("/health").json()["controllers"][1]["problem"] == ""


def test_the_only_model_may_have_another_name_in_its_groups(place: Path, tokenizer: Tokenizer) -> None:
    """Routers know the names that clients use; groups may know none of them."""
    fake = group(FakeController(f"ipc://{place}/a", make_answer(tokenizer)), "a", "its own", tokenizer).start()
    config = RouterConfig(model_path=str(DEMO_MODEL), served_model_name=FIRST, controllers=[fake.endpoint], port=0)
    router = RunningRouter(config, Tokenizer(DEMO_MODEL))
    router.start()
    try:
        wait_until(lambda: router.ready == 1)  # its id is checked only where the membership tells ids
        fake.behaviour.group = GroupIdentity("a", "its own", "0" * 16)
        wait_until(lambda: router.ready == 0)
    finally:
        router.stop()
        fake.stop()


def test_both_sides_have_the_same_digest(tokenizer: Tokenizer, second: tuple[Path, Tokenizer]) -> None:
    assert tokenizer.fingerprint == tokenizer_digest(DEMO_MODEL)
    assert tokenizer_digest(second[0]) == second[1].fingerprint != tokenizer.fingerprint


def test_states_of_earlier_versions_name_no_group() -> None:
    """They end before the group."""
    fields = [field for field in msgspec.structs.fields(State) if field.name != "group"]
    values = ["state", *(0 if field.required and field.type is int else "" for field in fields if field.required)]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(values), type=State).group == GroupIdentity()


def test_two_models_need_different_names() -> None:
    config = RouterConfig(
        model_path=str(DEMO_MODEL),
        served_model_name="a",
        controllers=["ipc://a"],
        models=[ModelConfig(model_path=str(DEMO_MODEL), names=["b", "a"])],
    )
    with pytest.raises(ValueError, match="two have the name 'a'"):
        config.validate()
