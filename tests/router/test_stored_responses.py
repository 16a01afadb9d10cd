"""Stored responses: `store`, `previous_response_id`, and `/v1/responses/{id}`, mostly through OpenAI's client."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from router.api_calls import CITY, TWO_CALLS, last_prompt, named_events, say
from router.fake_controller import FakeController, prompt_of
from router.harness import EOS, STORES, RunningRouter, free_port, running, shared_records, two_routers, wait_until
from router.idempotency_calls import ask, forget, name_of
from router.session_calls import error_of

from trunkline.kvstore.records import RecordKey, StoreAwayError
from trunkline.router import service
from trunkline.router.tenancy.auth import hash_key
from trunkline.router.text.tokenizer import Tokenizer

PATH = "/v1/responses"
TOOLS: Any = [{"type": "function", "name": "get_weather", "parameters": CITY, "strict": False}]


def respond(http: httpx.Client, text: Any = "Hi", previous: str | None = None, **fields: Any) -> Any:
    answer = http.post(PATH, json={"input": text, "previous_response_id": previous, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def stored(http: httpx.Client, response: str) -> Any:
    answer = http.get(f"{PATH}/{response}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def count(router: RunningRouter) -> int:
    """Records of all kinds."""
    return router.call(router.service.records.usage()).records


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers soon give up on a store that does not answer."""
    monkeypatch.setattr(service, "RECORDS_PATIENCE_S", 0.05)


def test_a_response_is_stored_and_deleted(client: openai.OpenAI, router: RunningRouter) -> None:
    made = client.responses.create(model="demo", input="Hi", instructions="Be brief.", metadata={"a": "b"})
    found = client.responses.retrieve(made.id)
    assert found.to_dict() == made.to_dict()
    assert made.to_dict()["store"] is True
    [item] = client.responses.input_items.list(made.id).data
    assert (item.type, item.to_dict()["role"]) == ("message", "user"), "instructions are no items"
    client.responses.delete(made.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError) as caught:
            call(made.id)
        assert (caught.value.param, caught.value.code) == ("response_id", "response_not_found")
    assert count(router) == 0


def test_store_false_stores_nothing(http: httpx.Client, router: RunningRouter) -> None:
    for stream in (False, True):
        answer = http.post(PATH, json={"input": "Hi", "store": False, "stream": stream})
        told = named_events(answer)[-1]["response"] if stream else answer.json()
        assert told["store"] is False
        assert error_of(http.get(f"{PATH}/{told['id']}"))[0] == 404
    first = respond(http)["id"]
    assert respond(http, "And?", first, store=False)["store"] is False
    assert count(router) == 1


def test_a_chain(client: openai.OpenAI, http: httpx.Client, fake: FakeController, tokenizer: Tokenizer) -> None:
    """Each prompt begins with the tokens that the engine saw and chose before."""
    letters = [token for letter in "Hello" for token in tokenizer.encode(letter, add_special_tokens=False)]
    fake.behaviour.script = lambda submit: [*letters, EOS]
    ids: list[Any] = [openai.omit]
    for number in range(3):
        ids.append(client.responses.create(model="demo", input=f"Turn {number}", previous_response_id=ids[-1]).id)
    one, two, three = map(prompt_of, fake.behaviour.submits)
    assert two[: len(one) + 6] == [*one, *letters, EOS], "not as a tokenizer would write it"
    assert three[: len(two) + 6] == [*two, *letters, EOS]
    told = stored(http, ids[-1])
    assert told["previous_response_id"] == ids[-2]
    items = client.responses.input_items.list(ids[-1], order="asc").data
    texts = [item.to_dict()["content"][0]["text"] for item in items]  # type: ignore[index]
    assert texts == ["Turn 0", "Hello", "Turn 1", "Hello", "Turn 2"]
    assert items[3].to_dict() == stored(http, ids[2])["output"][0], "items keep their ids"
    assert [item.id for item in client.responses.input_items.list(ids[-1], limit=2)] == [
        item.id for item in reversed(items)
    ], "page after page, the last first"
    client.responses.delete(ids[1])
    client.responses.delete(ids[2])
    client.responses.create(model="demo", input="Turn 3", previous_response_id=ids[-1])
    four = prompt_of(fake.behaviour.submits[-1])
    assert four[: len(three) + 6] == [*three, *letters, EOS], "it does not need the responses before it"


@pytest.mark.parametrize("kind", STORES)
def test_each_link_of_a_chain_writes_what_it_adds(place: Path, tokenizer: Tokenizer, kind: str) -> None:
    with (
        shared_records(kind) as url,
        running(place, tokenizer, records=url) as (router, _),
        router.client() as http,
    ):
        previous, sizes = None, [0]
        for _ in range(30):
            previous = respond(http, "The same words again", previous)["id"]
            sizes.append(router.call(router.service.records.usage("")).bytes)
        steps = [after - before for before, after in itertools.pairwise(sizes)]
        assert max(steps) - min(steps) < 200
        assert len(http.get(f"{PATH}/{previous}/input_items?limit=100").json()["data"]) == 59


def test_instructions_belong_to_one_request(
    http: httpx.Client, fake: FakeController, tokenizer: Tokenizer
) -> None:
    say(fake, tokenizer, "Yes.")
    said: list[dict[str, Any]] = []
    previous = None
    for instructions in ("Be brief.", "Be brief.", None, "Be kind."):
        told = respond(http, "Hi", previous, instructions=instructions)
        previous = told["id"]
        assert told["instructions"] == instructions
        said.append({"role": "user", "content": "Hi"})
        first = [{"role": "system", "content": instructions}] if instructions else []
        assert last_prompt(fake, tokenizer) == tokenizer.render_chat(first + said)
        said.append({"role": "assistant", "content": "Yes."})
    one, two = map(prompt_of, fake.behaviour.submits[:2])
    assert two[: len(one)] == one


def test_streams_tell_the_end_when_it_is_stored(
    client: openai.OpenAI, http: httpx.Client, router: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = client.responses.create(model="demo", input="Hi", stream=True)
    for event in stream:
        if event.type == "response.completed":
            assert stored(http, event.response.id) == event.response.to_dict()

    async def away(*asked: Any, **also: Any) -> None:
        raise StoreAwayError("it is gone")

    first = respond(http)["id"]
    monkeypatch.setattr(router.service.records, "create", away)
    for fields in ({"store": True}, {"previous_response_id": first}):
        last = named_events(http.post(PATH, json={"input": "Hi", "stream": True, **fields}))[-1]
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        refused = http.post(PATH, json={"input": "Hi", **fields})
        assert error_of(refused)[:2] == (503, "records_unavailable")
    last = named_events(http.post(PATH, json={"input": "Hi", "stream": True}))[-1]["response"]
    assert (last["status"], last["store"]) == ("completed", False), "the client did not ask for it"


def test_tools_over_a_stored_history(http: httpx.Client, fake: FakeController, tokenizer: Tokenizer) -> None:
    say(fake, tokenizer, TWO_CALLS)
    first = respond(http, "Weather?", tools=TOOLS)
    calls = [item for item in first["output"] if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "rain"} for call in calls]
    say(fake, tokenizer, "It rains.")
    last = respond(http, results, first["id"], tools=TOOLS)
    assert last_prompt(fake, tokenizer).count("<tool_response>\nrain\n</tool_response>") == 2
    one, two = map(prompt_of, fake.behaviour.submits)
    assert two[: len(one) + 4] == [*one, *tokenizer.encode(TWO_CALLS, add_special_tokens=False)[:4]]
    items = http.get(f"{PATH}/{last['id']}/input_items?order=asc").json()["data"]
    kinds = ["message", "message", *["function_call"] * 2, *["function_call_output"] * 2]
    assert [item["type"] for item in items] == kinds
    assert len({item["id"] for item in items}) == len(items)


def test_references_to_items(http: httpx.Client, fake: FakeController, tokenizer: Tokenizer) -> None:
    say(fake, tokenizer, "Blue.")
    first = respond(http, "Which colour?")
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    respond(http, [{"id": reference["id"]}, {"role": "user", "content": "Sure?"}], first["id"])
    short = last_prompt(fake, tokenizer)
    again = respond(http, [reference, {"role": "user", "content": "Sure?"}], first["id"])
    assert last_prompt(fake, tokenizer) == short
    assert short.count("Blue.") == 2
    items = http.get(f"{PATH}/{again['id']}/input_items").json()["data"]
    assert len({item["id"] for item in items}) == 4
    for body in (
        {"input": [reference]},
        {"input": [{**reference, "id": "msg_0"}], "previous_response_id": first["id"]},
    ):
        assert error_of(http.post(PATH, json=body)) == (404, "item_not_found", "input[0].id")


def test_ids_that_do_not_exist(http: httpx.Client, fake: FakeController) -> None:
    for name in ("resp_0", "resp_" + "0" * 100_000, "resp_\0", "sess_0", "x\0", ""):
        answer = http.post(PATH, json={"input": "Hi", "previous_response_id": name})
        assert error_of(answer) == (404, "previous_response_not_found", "previous_response_id")
    assert error_of(http.get(f"{PATH}/sess_0")) == (404, "response_not_found", "response_id")
    first = respond(http)["id"]
    for query, param in (("limit=0", "limit"), ("order=up", "order"), ("after=msg_0", "after")):
        assert error_of(http.get(f"{PATH}/{first}/input_items?{query}"))[::2] == (400, param)
    assert error_of(http.get(f"{PATH}/{first}?stream=true"))[::2] == (400, "stream")
    assert len(fake.behaviour.submits) == 1


def test_a_chain_that_outgrows_the_context(http: httpx.Client, fake: FakeController) -> None:
    long, previous = "a1 b2 " * 150, None
    for _ in range(3):
        previous = respond(http, long, previous, max_output_tokens=100)["id"]
    continued = {"input": long, "previous_response_id": previous, "max_output_tokens": 100}
    assert error_of(http.post(PATH, json=continued)) == (400, "context_length_exceeded", "input")
    before = prompt_of(fake.behaviour.submits[-1])
    for _ in range(2):
        cut = respond(http, long, previous, max_output_tokens=100, truncation="auto")
        previous = cut["id"]
        assert cut["truncation_details"]["occurred"] is True
        assert cut["usage"]["input_tokens"] < 2048
    assert prompt_of(fake.behaviour.submits[-1])[: len(before)] == before, "the history has all of it"


@pytest.mark.parametrize("kind", STORES)
def test_routers_share_responses(place: Path, tokenizer: Tokenizer, kind: str) -> None:
    with two_routers(place, tokenizer, kind) as routers:
        previous = ""
        for http, _ in routers * 3:
            previous = respond(http, "And?", previous or None)["id"]
        (here, one), (there, two) = routers
        assert stored(here, previous) == stored(there, previous)
        pairs = zip(one.behaviour.submits, two.behaviour.submits, strict=True)
        prompts = [prompt_of(submit) for pair in pairs for submit in pair]
        for before, after in itertools.pairwise(prompts):
            assert after[: len(before)] == before
        branches = {respond(http, "Branch", previous)["id"] for http in (here, there)}
        assert len(branches) == 2
        assert here.delete(f"{PATH}/{previous}").status_code == 200
        assert error_of(there.get(f"{PATH}/{previous}"))[0] == 404
        for branch in branches:
            assert respond(there, "Go on", branch)["status"] == "completed"


def test_the_same_request_again(http: httpx.Client, router: RunningRouter) -> None:
    first = respond(http)["id"]
    fields = {"input": "And?", "previous_response_id": first}
    answers = [ask(http, "k", PATH, **fields) for _ in range(2)]
    assert answers[0].json() == answers[1].json()
    name = name_of("k", PATH, **fields)
    forget(router, name)  # the router died when it had stored the response, before it could say so
    again = ask(http, "k", PATH, **fields).json()
    assert (again["id"], again["output"]) == (answers[0].json()["id"], answers[0].json()["output"])
    assert stored(http, again["id"])["output"] == again["output"]
    responses = router.call(router.service.records.page("response", ""))
    assert {record.key for record in responses} == {
        RecordKey("response", "", each) for each in (first, again["id"])
    }


def test_without_a_store(place: Path, tokenizer: Tokenizer, quick: None) -> None:
    records = f"redis://127.0.0.1:{free_port()}"
    with running(place, tokenizer, records=records) as (router, [fake]), router.client() as http:
        refused = [
            http.post(PATH, json={"input": "Hi", "store": True}),
            http.post(PATH, json={"input": "Hi", "previous_response_id": "resp_1"}),
            http.post(PATH, json={"input": "Hi", "conversation": "conv_1"}),
            http.get(f"{PATH}/resp_1"),
            http.delete(f"{PATH}/resp_1"),
            http.get(f"{PATH}/resp_1/input_items"),
            http.post("/v1/conversations", json={}),
            http.get("/v1/conversations/conv_1"),
        ]
        for answer in refused:
            assert error_of(answer)[:2] == (503, "records_unavailable"), answer.request.url
        assert not fake.behaviour.submits
        assert respond(http)["store"] is False
        assert respond(http, store=False)["store"] is False


def test_a_tenant_with_too_many_records(place: Path, tokenizer: Tokenizer) -> None:
    with running(place, tokenizer, records_tenant_bytes=600) as (router, [fake]), router.client() as http:
        first = respond(http)
        assert first["store"] is True
        for fields in ({"store": True}, {"previous_response_id": first["id"]}):
            assert error_of(http.post(PATH, json={"input": "Hi", **fields}))[:2] == (429, "records_quota")
        assert len(fake.behaviour.submits) == 1, "no token was generated"
        assert respond(http)["store"] is False
        assert respond(http, "And?", first["id"], store=False)["output"]
        assert http.delete(f"{PATH}/{first['id']}").status_code == 200
        assert respond(http, store=True)["store"] is True


def test_what_runs_already_is_stored(place: Path, tokenizer: Tokenizer) -> None:
    """A quota that is used up meanwhile takes no answer away that was generated."""
    with running(place, tokenizer, records_tenant_bytes=10_000) as (router, [fake]), router.client() as http:
        first, answers = respond(http)["id"], list[Any]()
        fake.behaviour.hold = True
        threads = [
            threading.Thread(target=lambda fields=fields: answers.append(respond(http, **fields)))
            for fields in ({"store": True}, {"previous": first})
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(fake.behaviour.submits) == 3)
        while http.post("/v1/sessions", json={}).status_code == 200:
            pass
        fake.behaviour.hold = False
        for thread in threads:
            thread.join(20)
        assert [stored(http, answer["id"])["store"] for answer in answers] == [True, True]


@contextmanager
def tenants(place: Path, tokenizer: Tokenizer) -> Iterator[list[httpx.Client]]:
    """Clients of two tenants."""
    path = place / "tenants.json"
    path.write_text(json.dumps({"tenants": {name: {"keys": [hash_key(name)]} for name in ("one", "other")}}))
    path.chmod(0o600)
    with ExitStack() as work:
        router, _ = work.enter_context(running(place, tokenizer, tenants=str(path)))
        yield [work.enter_context(router.client(Authorization=f"Bearer {name}")) for name in ("one", "other")]


def test_tenants_see_their_own_responses(place: Path, tokenizer: Tokenizer) -> None:
    with tenants(place, tokenizer) as (one, other):
        first = respond(one)["id"]
        assert error_of(other.get(f"{PATH}/{first}")) == (404, "response_not_found", "response_id")
        assert error_of(other.delete(f"{PATH}/{first}"))[0] == 404
        continued = {"input": "Hi", "previous_response_id": first}
        assert error_of(other.post(PATH, json=continued))[:2] == (404, "previous_response_not_found")
        assert stored(one, first)["id"] == first


def test_a_client_that_leaves_stores_nothing(
    router: RunningRouter, http: httpx.Client, fake: FakeController
) -> None:
    fake.behaviour.hold = True
    leaving = openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=20)
    stream = leaving.responses.create(model="demo", input="Hi", stream=True)
    begun: Any = next(iter(stream))
    assert begun.response.store is True
    stream.close()
    leaving.close()
    wait_until(lambda: router.inflight == 0)
    assert error_of(http.get(f"{PATH}/{begun.response.id}"))[0] == 404


def test_branches_at_the_same_time(http: httpx.Client, fake: FakeController, tokenizer: Tokenizer) -> None:
    """A response is never in use: any number of requests may continue it at once. All have its very tokens."""
    [answer] = say(fake, tokenizer, "Yes.")
    first = respond(http)["id"]
    made: list[Any] = []
    threads = [
        threading.Thread(target=lambda text=text: made.append(respond(http, text, first))) for text in "abcd"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len({each["id"] for each in made}) == 4
    assert all(each["output"][0]["content"][0]["text"] == "Yes." for each in made)
    parent, *branches = map(prompt_of, fake.behaviour.submits)
    parent += answer
    assert [branch[: len(parent)] for branch in branches] == [parent] * 4


def test_what_is_deleted_is_forgotten_by_the_controllers(place: Path, tokenizer: Tokenizer) -> None:
    with running(place, tokenizer) as (router, [fake]), router.client() as http:
        first = respond(http)["id"]
        second = respond(http, "And?", first)["id"]
        last = fake.behaviour.submits[-1]
        assert http.delete(f"{PATH}/{second}").status_code == 200
        assert http.delete(f"{PATH}/{second}").status_code == 404
        wait_until(lambda: bool(fake.behaviour.forgets))
        [message] = fake.behaviour.forgets
        assert prompt_of(message)[: len(prompt_of(last))] == prompt_of(last)
        assert message.salt == last.salt
        assert respond(http, "What?", first)["output"], "what shares its beginning goes on"
