"""`/v1/conversations`, and responses that belong to one, mostly through OpenAI's client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from router.api_calls import last_prompt, named_events, say
from router.fake_controller import FakeController, prompt_of
from router.harness import EOS, STORES, RunningRouter, held_request, running, two_routers, wait_until
from router.idempotency_calls import ask, forget, name_of
from router.session_calls import error_of

from trunkline.kvstore.records import StoreAwayError
from trunkline.router.text.tokenizer import Tokenizer

PATH = "/v1/conversations"


def create(http: httpx.Client, **fields: Any) -> str:
    answer = http.post(PATH, json=fields)
    assert answer.status_code == 200, answer.text
    made: str = answer.json()["id"]
    return made


def respond(http: httpx.Client, conversation: Any, text: Any = "Hi", **fields: Any) -> httpx.Response:
    return http.post("/v1/responses", json={"input": text, "conversation": conversation, **fields})


def items_of(http: httpx.Client, conversation: str, **query: Any) -> list[Any]:
    answer = http.get(f"{PATH}/{conversation}/items", params={"order": "asc", "limit": 100, **query})
    assert answer.status_code == 200, answer.text
    found: list[Any] = answer.json()["data"]
    return found


def texts_of(http: httpx.Client, conversation: str) -> list[str]:
    return [item["content"][0]["text"] for item in items_of(http, conversation)]


def test_a_conversation_from_its_beginning_to_its_end(client: openai.OpenAI) -> None:
    made = client.conversations.create(metadata={"a": "b"}, items=[{"role": "user", "content": "Hi"}])
    assert made.object == "conversation"
    assert client.conversations.retrieve(made.id) == made
    assert client.conversations.update(made.id, metadata={"c": "d"}).metadata == {"c": "d"}
    added = client.conversations.items.create(
        made.id,
        items=[
            {"role": "assistant", "content": [{"type": "output_text", "text": "Hello."}], "type": "message"},  # type: ignore[list-item,misc]
            {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_1", "output": "done", "id": "fco_1"},
        ],
    )
    assert [item.type for item in added.data] == ["message", "function_call", "function_call_output"]
    assert added.data[2].id == "fco_1"
    listed = list(client.conversations.items.list(made.id, order="asc", limit=3))
    assert [item.to_dict() for item in listed[1:]] == [item.to_dict() for item in added.data], "page after page"
    newest = client.conversations.items.list(made.id, limit=2)
    assert ([item.id for item in newest.data], newest.has_more) == ([item.id for item in listed[:1:-1]], True)
    assert client.conversations.items.retrieve("fco_1", conversation_id=made.id) == listed[3]
    kept = client.conversations.items.delete("fco_1", conversation_id=made.id)
    assert (kept.id, kept.metadata) == (made.id, {"c": "d"})
    assert len(client.conversations.items.list(made.id).data) == 3
    with pytest.raises(openai.NotFoundError) as caught:
        client.conversations.items.retrieve("fco_1", conversation_id=made.id)
    assert (caught.value.param, caught.value.code) == ("item_id", "item_not_found")
    gone = client.conversations.delete(made.id)
    assert (gone.id, gone.object, gone.deleted) == (made.id, "conversation.deleted", True)
    with pytest.raises(openai.NotFoundError) as caught:
        client.conversations.retrieve(made.id)
    assert (caught.value.param, caught.value.code) == ("conversation_id", "conversation_not_found")


def test_responses_of_a_conversation(
    client: openai.OpenAI, http: httpx.Client, fake: FakeController, tokenizer: Tokenizer
) -> None:
    letters = [token for letter in "Hello" for token in tokenizer.encode(letter, add_special_tokens=False)]
    fake.behaviour.script = lambda submit: [*letters, EOS]
    conversation = create(http)
    first = client.responses.create(model="demo", input="One", conversation=conversation)
    assert first.conversation is not None
    assert first.conversation.id == conversation
    stream = client.responses.create(model="demo", input="Two", conversation={"id": conversation}, stream=True)
    for event in stream:
        if event.type == "response.completed":
            assert len(items_of(http, conversation)) == 4, "stored before the end is told"
    third = client.responses.create(model="demo", input="Three", conversation=conversation, store=False)
    one, two, three = map(prompt_of, fake.behaviour.submits)
    assert two[: len(one) + 6] == [*one, *letters, EOS], "not as a tokenizer would write it"
    assert three[: len(two) + 6] == [*two, *letters, EOS]
    assert texts_of(http, conversation) == ["One", "Hello", "Two", "Hello", "Three", "Hello"]
    assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
    assert items_of(http, conversation)[1] == first.output[0].to_dict(), "items keep their ids"
    assert error_of(http.get(f"/v1/responses/{third.id}"))[0] == 404, "the conversation has it, but no record"
    branch = client.responses.create(model="demo", input="Branch", previous_response_id=first.id)
    assert prompt_of(fake.behaviour.submits[-1])[: len(one) + 6] == [*one, *letters, EOS]
    assert len(items_of(http, conversation)) == 6, "it has left the conversation"
    assert http.delete(f"{PATH}/{conversation}").status_code == 200
    assert client.responses.retrieve(branch.id).to_dict() == branch.to_dict()


def test_items_that_are_added_and_removed(http: httpx.Client, fake: FakeController, tokenizer: Tokenizer) -> None:
    say(fake, tokenizer, "Yes.")
    system = {"role": "developer", "content": "Short!"}
    conversation = create(http, items=[system])
    assert respond(http, conversation, "One", instructions="Be kind.").status_code == 200
    first = [{"role": "system", "content": "Be kind.\n\nShort!"}, {"role": "user", "content": "One"}]
    assert last_prompt(fake, tokenizer) == tokenizer.render_chat(first)
    added = http.post(f"{PATH}/{conversation}/items", json={"items": [{"role": "user", "content": "Two"}]})
    assert added.status_code == 200
    removed = items_of(http, conversation)[0]["id"]
    assert http.delete(f"{PATH}/{conversation}/items/{removed}").status_code == 200
    assert respond(http, conversation, "Three").status_code == 200
    said = [("user", "One"), ("assistant", "Yes."), ("user", "Two"), ("user", "Three")]
    rest = [{"role": role, "content": text} for role, text in said]
    assert last_prompt(fake, tokenizer) == tokenizer.render_chat(rest)
    assert texts_of(http, conversation) == ["One", "Yes.", "Two", "Three", "Yes."]


def test_a_conversation_in_use(http: httpx.Client, fake: FakeController) -> None:
    conversation = create(http)
    path = f"{PATH}/{conversation}"
    with held_request(fake, lambda: respond(http, conversation)):
        assert error_of(respond(http, conversation)) == (409, "conversation_locked", "conversation")
        changes = [
            http.post(path, json={"metadata": {}}),
            http.post(f"{path}/items", json={"items": [{"role": "user", "content": "x"}]}),
            http.delete(f"{path}/items/msg_1"),
            http.delete(path),
        ]
        for answer in changes:
            assert error_of(answer) == (409, "conversation_locked", "conversation_id")
        assert (http.get(path).status_code, items_of(http, conversation)) == (200, [])
    assert len(items_of(http, conversation)) == 2


def test_a_failed_response_leaves_the_conversation(
    router: RunningRouter, http: httpx.Client, fake: FakeController, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*asked: Any, **also: Any) -> None:
        raise StoreAwayError("it is gone")

    conversation = create(http)
    fake.behaviour.fail_after = 3
    assert respond(http, conversation).status_code == 503
    fake.behaviour.fail_after = None
    wait_until(lambda: http.post(f"{PATH}/{conversation}", json={"metadata": {}}).status_code == 200)
    with monkeypatch.context() as patch:
        patch.setattr(router.service.records, "put", away)
        assert error_of(respond(http, conversation))[:2] == (503, "conversation_not_stored")
        last = named_events(respond(http, conversation, stream=True))[-1]
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert items_of(http, conversation) == []
    wait_until(lambda: respond(http, conversation).status_code == 200)
    assert len(items_of(http, conversation)) == 2


def test_the_same_request_again(http: httpx.Client, router: RunningRouter) -> None:
    conversation = create(http)
    for path, fields in (
        ("/v1/responses", {"input": "Hi", "conversation": conversation}),
        (f"{PATH}/{conversation}/items", {"items": [{"role": "user", "content": "And?"}]}),
    ):
        answers = [ask(http, "k " + path, path, **fields)]
        expected = items_of(http, conversation)
        answers.append(ask(http, "k " + path, path, **fields))
        forget(router, name_of("k " + path, path, **fields))  # its router died before it could answer
        answers.append(ask(http, "k " + path, path, **fields))
        assert [answer.status_code for answer in answers] == [200] * 3
        assert len({answer.json().get("id", answer.json().get("first_id")) for answer in answers}) == 1
        assert items_of(http, conversation) == expected
    ids = {ask(http, "new", PATH).json()["id"] for _ in range(2)}
    assert len(ids) == 1


@pytest.mark.parametrize("kind", STORES)
def test_routers_share_conversations(place: Path, tokenizer: Tokenizer, kind: str) -> None:
    with two_routers(place, tokenizer, kind) as routers:
        (here, fake), (there, other) = routers
        conversation = create(here, items=[{"role": "user", "content": "Hello!"}])
        for number, (http, _) in enumerate(routers * 2, 1):
            assert respond(http, conversation, f"turn {number}").status_code == 200
        one, two = prompt_of(fake.behaviour.submits[-1]), prompt_of(other.behaviour.submits[-1])
        assert two[: len(one)] == one
        assert items_of(here, conversation) == items_of(there, conversation)
        assert len(items_of(here, conversation)) == 9
        with held_request(fake, lambda: respond(here, conversation)):
            assert error_of(respond(there, conversation))[:2] == (409, "conversation_locked")
        assert there.delete(f"{PATH}/{conversation}").status_code == 200
        assert error_of(respond(here, conversation)) == (404, "conversation_not_found", "conversation")


def test_quotas(place: Path, tokenizer: Tokenizer) -> None:
    with running(place, tokenizer, records_tenant_bytes=600) as (router, [fake]), router.client() as http:
        conversation = create(http)
        for stream in (False, True):
            assert error_of(respond(http, conversation, stream=stream))[:2] == (429, "records_quota")
        assert error_of(http.post(PATH))[:2] == (429, "records_quota")
        assert not fake.behaviour.submits, "no token was generated"
        wait_until(lambda: http.delete(f"{PATH}/{conversation}").status_code == 200)
        create(http)


def test_conversations_stay_until_they_are_deleted(http: httpx.Client, router: RunningRouter) -> None:
    create(http)
    [record] = router.call(router.service.records.page("conversation", ""))
    assert record.ttl == 0
    assert respond(http, record.key.id).status_code == 200
    [response] = router.call(router.service.records.page("response", ""))
    assert response.ttl == 30 * 24 * 3600


def test_bad_requests(http: httpx.Client, fake: FakeController) -> None:
    conversation = create(http)
    said = {"role": "user", "content": "x"}
    refused: list[tuple[str, Any, str]] = [
        (PATH, {"metadata": {"a": 1}}, "metadata"),
        (PATH, {"items": "x"}, "items"),
        (PATH, {"items": [said] * 21}, "items"),
        (PATH, {"items": [{"type": 7}]}, "items[0].type"),
        (PATH, {"items": [said, {"role": "robot", "content": "x"}]}, "items[1].role"),
        (f"{PATH}/{conversation}", {}, "metadata"),
        (f"{PATH}/{conversation}/items", {}, "items"),
        (f"{PATH}/{conversation}/items", {"items": []}, "items"),
        (f"{PATH}/{conversation}/items", {"items": [{"type": "item_reference", "id": "x"}]}, "items[0].type"),
    ]
    for path, body, param in refused:
        assert error_of(http.post(path, json=body))[::2] == (400, param), body
    for name in ("conv_0", "resp_0", "sess_0"):
        assert error_of(respond(http, name)) == (404, "conversation_not_found", "conversation")
        assert error_of(http.get(f"{PATH}/{name}")) == (404, "conversation_not_found", "conversation_id")
    assert error_of(http.get(f"{PATH}/{conversation}/items?after=x"))[::2] == (400, "after")
    assert items_of(http, conversation) == []
    assert not fake.behaviour.submits


def test_what_is_deleted_is_forgotten_by_the_controllers(place: Path, tokenizer: Tokenizer) -> None:
    with running(place, tokenizer) as (router, [fake]), router.client() as http:
        empty, used = create(http), create(http)
        assert respond(http, used).status_code == 200
        last = prompt_of(fake.behaviour.submits[-1])
        for conversation in (empty, used):
            assert http.delete(f"{PATH}/{conversation}").status_code == 200
        wait_until(lambda: bool(fake.behaviour.forgets))
        [message] = fake.behaviour.forgets
        assert prompt_of(message)[: len(last)] == last
