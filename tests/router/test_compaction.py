"""Compaction of conversations in `/v1/responses`, counts of prompts, and what is sealed for clients."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import httpx
import openai
import pytest
from router.api_calls import CITY, last_prompt, named_events, say, without_repeats
from router.fake_controller import FakeController, prompt_of
from router.harness import EOS, RunningRouter, free_port, running, wait_until
from router.schema_calls import post, texts_of
from router.session_calls import error_of
from seeds import seeds

from trunkline.controller.messages import Submit
from trunkline.kvstore.records import StoreAwayError
from trunkline.router import service
from trunkline.router.api.openai_items import thought_part
from trunkline.router.api.response_compaction import INSTRUCTION
from trunkline.router.api.response_input import (
    SUMMARY,
    foreign_items,
    is_compactable,
    is_lasting,
    thought_of,
    to_items,
    to_messages,
)
from trunkline.router.stores.seals import Seal, SealKeys
from trunkline.router.tenancy.auth import hash_key
from trunkline.router.text.tokenizer import Tokenizer

PATH: Final = "/v1/responses"
TOOL: Final[dict[str, Any]] = {"type": "function", "name": "get_weather", "parameters": CITY, "strict": False}
TRIGGER: Final[dict[str, Any]] = {"type": "compaction_trigger"}
SUM: Final = "The user asks for the weather; it rains."
SEAL: Final = Seal((b"k" * 32,), "me")
TALK: Final[list[Any]] = [
    {"role": "user", "content": "Weather?"},
    {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Ulm"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "rain"},
    {"role": "assistant", "content": "It rains."},
]
Ask = Callable[[Submit], bool]


@pytest.fixture
def sums_up(fake: FakeController, tokenizer: Tokenizer) -> Ask:
    """The model answers a request for a summary with `SUM`, others with "Yes."; tells which a request is."""

    def is_asked(submit: Submit) -> bool:
        return INSTRUCTION in tokenizer.decode(prompt_of(submit))

    texts = {
        asked: [*tokenizer.encode(text, add_special_tokens=False), EOS]
        for asked, text in ((True, SUM), (False, "Yes."))
    }
    fake.behaviour.script = lambda submit: texts[is_asked(submit)]
    return is_asked


def window(tokenizer: Tokenizer, *users: str, system: str | None = None, **options: Any) -> str:
    """The prompt of a compacted conversation."""
    told = [{"role": "user", "content": "\n\n".join((SUMMARY + SUM, *users))}]
    before = [{"role": "system", "content": system}] if system else []
    return tokenizer.render_chat(before + told, **options)


def respond(http: httpx.Client, given: Any, **fields: Any) -> Any:
    answer = http.post(PATH, json={"input": given, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_client_counts_tokens(client: openai.OpenAI, http: httpx.Client, fake: FakeController) -> None:
    counts: Any = client.responses.input_tokens
    asked: dict[str, Any] = {"model": "demo", "input": "Hi", "instructions": "Be brief.", "tools": [TOOL]}
    told = counts.count(**asked)
    assert told.object == "response.input_tokens"
    assert not fake.behaviour.submits, "nothing is generated"
    made = client.responses.create(**asked)
    assert made.usage is not None
    assert told.input_tokens == len(prompt_of(fake.behaviour.submits[-1])) == made.usage.input_tokens
    more: dict[str, Any] = {"model": "demo", "input": TALK, "previous_response_id": made.id}
    told = counts.count(**more)
    assert told.input_tokens == client.responses.create(**more).usage.input_tokens
    assert counts.count(model="demo", previous_response_id=made.id).input_tokens > 5
    conversation = client.conversations.create(items=TALK[:1]).id
    assert counts.count(model="demo", conversation=conversation).input_tokens > 5
    assert counts.count(model="demo", input="a1 b2 " * 2000).input_tokens > 4000, "more than the context"
    assert counts.count(model="demo", input="a1 b2 " * 2000, truncation="auto").input_tokens < 2048
    for body, told in (
        ({}, (400, "missing_required_parameter", "input")),
        ({"input": []}, (400, None, "input")),
        ({"input": [{"type": "message"}]}, (400, None, "input[0].role")),
        (
            {"input": "Hi", "previous_response_id": "resp_0"},
            (404, "previous_response_not_found", "previous_response_id"),
        ),
        ({"conversation": "conv_0"}, (404, "conversation_not_found", "conversation")),
    ):
        assert error_of(http.post(f"{PATH}/input_tokens", json=body)) == told


def test_the_client_compacts(
    client: openai.OpenAI, http: httpx.Client, fake: FakeController, tokenizer: Tokenizer, sums_up: Ask
) -> None:
    respond(http, [*TALK, {"role": "user", "content": "And?"}], instructions="Be brief.", tools=[TOOL])
    answered = last_prompt(fake, tokenizer)
    fields = {"extra_body": {"tools": [TOOL]}, "instructions": "Be brief."}
    made = client.responses.compact(model="demo", input=TALK, **fields)  # type: ignore[arg-type]
    asked = last_prompt(fake, tokenizer)
    assert sums_up(fake.behaviour.submits[-1])
    begin = answered.index("And?")
    assert asked[:begin] == answered[:begin], "its prompt is the conversation, tools included"
    assert fake.behaviour.submits[-1].grammar is None
    assert made.object == "response.compaction"
    assert made.usage.input_tokens == len(prompt_of(fake.behaviour.submits[-1]))
    kept: list[Any] = [item.to_dict(warnings=False) for item in made.output]
    assert [item["type"] for item in kept] == ["message", "compaction"]
    assert kept[0]["content"] == [{"type": "input_text", "text": "Weather?"}]
    more = {"role": "user", "content": "And?"}
    prompts = []
    for items in ([*kept, more], [*TALK, *kept[1:], more]):
        respond(http, items, instructions="Be brief.", tools=[TOOL])
        prompts.append(last_prompt(fake, tokenizer))
    function = {"type": "function", "function": {k: TOOL[k] for k in ("name", "parameters")}}
    assert prompts[0] == window(tokenizer, "Weather?", "And?", system="Be brief.", tools=[function])
    assert prompts[1] == prompts[0], "what the summary stands for may be sent or not"


def test_a_compaction_continues_a_stored_response(
    client: openai.OpenAI, http: httpx.Client, fake: FakeController, tokenizer: Tokenizer, sums_up: Ask
) -> None:
    first = respond(http, TALK)
    before = prompt_of(fake.behaviour.submits[-1])
    made = client.responses.compact(model="demo", previous_response_id=first["id"])
    assert prompt_of(fake.behaviour.submits[-1])[: len(before)] == before, "the very tokens that the model saw"
    assert http.get(f"{PATH}/{made.id}").status_code == 404, "it is not stored"
    trigger: Any = [{"role": "user", "content": "And Bonn?"}, TRIGGER]
    events = list(client.responses.create(input=trigger, previous_response_id=first["id"], stream=True))
    kinds = without_repeats([event.type.removeprefix("response.") for event in events])
    item = ["output_item.added", "compaction.compacting", "output_item.done"]
    assert kinds == ["created", "in_progress", *item, "completed"]
    told: Any = events[-1]
    [compaction] = told.response.output
    assert (compaction.type, compaction) == ("compaction", getattr(events[-2], "item", None))
    assert compaction.encrypted_content.startswith("tl1.")
    assert told.response.usage.output_tokens > 5
    assert respond(http, trigger, previous_response_id=first["id"])["output"][0]["type"] == "compaction"
    respond(http, "And?", previous_response_id=told.response.id)
    assert last_prompt(fake, tokenizer) == window(tokenizer, "Weather?", "And Bonn?", "And?")
    items = http.get(f"{PATH}/{told.response.id}/input_items?order=asc").json()["data"]
    assert [each["type"] for each in items] == [
        *(each.get("type", "message") for each in TALK),
        "message",
        "message",
    ]
    again = respond(http, [TRIGGER], previous_response_id=told.response.id)
    respond(http, "Now?", previous_response_id=again["id"])
    assert last_prompt(fake, tokenizer) == window(tokenizer, "Weather?", "And Bonn?", "Now?"), "the new one counts"


@pytest.mark.parametrize("stream", [False, True])
def test_a_long_conversation_is_compacted_before_it_is_answered(
    http: httpx.Client, fake: FakeController, tokenizer: Tokenizer, sums_up: Ask, stream: bool
) -> None:
    given = [*TALK, {"role": "user", "content": "And?"}]
    manage = [{"type": "compaction", "compact_threshold": 20}]
    answer = http.post(
        PATH, json={"input": given, "context_management": manage, "stream": stream, "temperature": 0}
    )
    events = named_events(answer) if stream else []
    told = events[-1]["response"] if stream else answer.json()
    assert [sums_up(submit) for submit in fake.behaviour.submits] == [True, False]
    assert last_prompt(fake, tokenizer) == window(tokenizer, "Weather?", "And?")
    compaction, message = told["output"]
    assert (compaction["type"], message["content"][0]["text"]) == ("compaction", "Yes.")
    assert told["usage"]["input_tokens"] == len(prompt_of(fake.behaviour.submits[1]))
    assert told["compaction"]["usage"]["input_tokens"] == len(prompt_of(fake.behaviour.submits[0]))
    first = without_repeats([event["type"] for event in events if event.get("output_index") == 0])
    item = ("output_item.added", "compaction.compacting", "output_item.done")
    assert first == [f"response.{kind}" for kind in item] * stream
    respond(http, "Really?", previous_response_id=told["id"], context_management=manage[:1])
    manage[0]["compact_threshold"] = 1000
    respond(http, "Really?", previous_response_id=told["id"], context_management=manage)
    prompt = last_prompt(fake, tokenizer)
    assert prompt.startswith(window(tokenizer, "Weather?", "And?", add_generation_prompt=False))
    assert prompt.count("Yes.") == 1, "what comes behind the compaction stays"
    assert len(fake.behaviour.submits) == 5


def test_compactions_in_the_background(http: httpx.Client, sums_up: Ask) -> None:
    manage = {"context_management": [{"type": "compaction", "compact_threshold": 5}]}
    for last, fields, kinds in (
        (TRIGGER, {}, ["compaction"]),
        ({"role": "user", "content": "And?"}, manage, ["compaction", "message"]),
    ):
        queued = respond(http, [*TALK, last], background=True, **fields)
        wait_until(lambda: http.get(f"{PATH}/{queued['id']}").json()["status"] == "completed")  # noqa: B023
        made = http.get(f"{PATH}/{queued['id']}").json()
        assert [item["type"] for item in made["output"]] == kinds
        assert queued.keys() <= made.keys(), "a response has the same fields at any time"


def test_what_does_not_fit_is_compacted(
    client: openai.OpenAI, http: httpx.Client, fake: FakeController, tokenizer: Tokenizer, sums_up: Ask
) -> None:
    long: Any = [*TALK[:3], {"role": "assistant", "content": "a1 b2 " * 1000}, {"role": "user", "content": "And?"}]
    refused = http.post(PATH, json={"input": long})
    assert error_of(refused) == (400, "context_length_exceeded", "input")
    made = client.responses.create(model="demo", input=long, context_management=[{"type": "compaction"}])
    assert last_prompt(fake, tokenizer) == window(tokenizer, "Weather?", "And?")
    assert ([item.type for item in made.output], made.output_text) == (["compaction", "message"], "Yes.")
    client.responses.create(model="demo", input="Sure?", previous_response_id=made.id)
    assert SUM in last_prompt(fake, tokenizer)
    assert "a1 b2" not in last_prompt(fake, tokenizer)
    users = [{"role": "user", "content": "a1 b2 " * 1000}]
    refused = http.post(PATH, json={"input": users, "context_management": [{"type": "compaction"}]})
    assert error_of(refused)[:2] == (400, "context_length_exceeded"), "there is nothing that could be left out"
    told = respond(http, "Hi", context_management=[{"type": "compaction", "compact_threshold": 1}])
    assert [item["type"] for item in told["output"]] == ["message"]
    assert len(fake.behaviour.submits) == 4


@pytest.mark.parametrize("long", [False, True])
def test_a_conversation_behind_modules_is_compacted(
    http: httpx.Client, fake: FakeController, tokenizer: Tokenizer, sums_up: Ask, long: bool
) -> None:
    """The modules stay before the summary, and its prompt goes on from that of the conversation."""
    source = '<schema name="s"><system>You know <module name="places">all places</module>.</system></schema>'
    post(http, source)
    talk = [*TALK, {"role": "user", "content": "And?"}]
    fields = {"pml": '<prompt schema="s"><places/></prompt>', "tools": [TOOL]}
    respond(http, talk, **fields)
    if long:
        talk[3] = {"role": "assistant", "content": "a1 b2 " * 1000}
        assert http.post(PATH, json={"input": talk, **fields}).status_code == 400
    threshold = {} if long else {"compact_threshold": 20}
    made = respond(http, talk, **fields, context_management=[{"type": "compaction", **threshold}])
    assert [item["type"] for item in made["output"]] == ["compaction", "message"]
    plain, summary, answer = fake.behaviour.submits
    assert texts_of(plain) == texts_of(summary) == texts_of(answer)
    assert [sums_up(submit) for submit in (summary, answer)] == [True, False]
    own = [tokenizer.decode(prompt_of(submit)) for submit in (plain, summary, answer)]
    if not long:
        assert own[1].startswith(own[0][: own[0].index("And?")])
    assert SUMMARY + SUM in own[2]
    assert "It rains." not in own[2]
    assert "a1 b2" not in own[2]


def test_bad_requests_for_compactions(http: httpx.Client, fake: FakeController, tokenizer: Tokenizer) -> None:
    hi: Any = {"role": "user", "content": "Hi"}
    for path, body, told in (
        ("", {"input": [TRIGGER, hi]}, "input[0]"),
        ("", {"input": [hi, TRIGGER, TRIGGER]}, "input[1]"),
        ("", {"input": [TRIGGER]}, "input"),
        ("", {"input": [hi], "context_management": [{"type": "clear_tool_uses"}]}, "context_management[0].type"),
        ("", {"input": [hi], "context_management": [{"compact_threshold": 5}]}, "context_management[0].type"),
        (
            "",
            {"input": [hi], "context_management": [{"type": "compaction", "compact_threshold": 0}]},
            "context_management[0].compact_threshold",
        ),
        ("", {"input": [hi], "context_management": [{"type": "compaction"}] * 2}, "context_management"),
        ("", {"input": [hi], "context_management": {"edits": []}}, "context_management"),
        ("/compact", {"input": [hi, {"role": "king"}]}, "input[1].role"),
        ("/compact", {}, "input"),
        ("/compact", {"input": "Hi", "stream": True}, "stream"),
        ("/compact", {"input": "Hi", "background": True}, "background"),
        ("/compact", {"conversation": "conv_0"}, "conversation"),
    ):
        assert error_of(http.post(PATH + path, json=body))[::2] == (400, told), body
    assert not fake.behaviour.submits
    say(fake, tokenizer, " \n")
    asked = {"input": TALK, "context_management": [{"type": "compaction", "compact_threshold": 1}]}
    last = named_events(http.post(PATH, json=asked | {"stream": True}))[-1]
    assert (last["type"], last["response"]["output"]) == ("response.failed", [])
    assert error_of(http.post(f"{PATH}/compact", json={"input": TALK}))[:2] == (503, "no_summary")
    first = respond(http, [hi], store=True)
    assert error_of(http.post(PATH, json={"input": [TRIGGER], "previous_response_id": first["id"]}))[0] == 503


def test_a_wrong_item_before_a_compaction_is_refused(http: httpx.Client, sums_up: Ask) -> None:
    item = http.post(f"{PATH}/compact", json={"input": TALK}).json()["output"][-1]
    bad = {"type": "function_call", "name": "x", "arguments": "{}"}
    assert error_of(http.post(PATH, json={"input": [*TALK, bad, item]}))[::2] == (400, "input[4].call_id")


def test_compactions_of_other_tenants_and_servers(place: Path, tokenizer: Tokenizer, folder: Path) -> None:
    tenants = place / "tenants.json"
    tenants.write_text(json.dumps({"tenants": {name: {"keys": [hash_key(name)]} for name in ("one", "two")}}))
    tenants.chmod(0o600)
    with (
        running(place, tokenizer, tenants=str(tenants)) as (router, [fake]),
        router.client(Authorization="Bearer one") as one,
        router.client(Authorization="Bearer two") as two,
    ):
        say(fake, tokenizer, SUM)
        item = one.post(f"{PATH}/compact", json={"input": TALK}).json()["output"][-1]
        foreign = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}
        for http, told in ((one, ["input[5]"]), (two, ["input[4]", "input[5]"])):
            answer = respond(http, [*TALK, item, foreign, {"role": "user", "content": "And?"}])
            assert [warning.split("`")[1] for warning in answer["warnings"]] == told
            assert (SUM in last_prompt(fake, tokenizer)) == (http is one)
            assert ("It rains." in last_prompt(fake, tokenizer)) == (http is two)


def test_what_does_not_need_the_key_does_without_it(
    place: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "RECORDS_PATIENCE_S", 0.05)
    records = f"redis://127.0.0.1:{free_port()}"
    with running(place, tokenizer, records=records) as (router, [fake]), router.client() as http:
        assert error_of(http.post(f"{PATH}/compact", json={"input": TALK}))[:2] == (503, "records_unavailable")
        told = respond(http, "Hi", include=["reasoning.encrypted_content"])
        assert "is away" in told["warnings"][0]
        assert len(fake.behaviour.submits) == 1


def test_a_key_is_drawn_once(router: RunningRouter, fake: FakeController, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    one, two = (SealKeys(router.service.records, lambda: now[0]) for _ in range(2))
    seals = [router.call(keys.current(required=True)) for keys in (one, two, one)]
    assert seals[0] == seals[1] == seals[2]
    router.forget_records()
    assert router.call(one.current(required=True)) == seals[0], "it is read once an hour"
    now[0] += 4000
    [new, old] = router.call(one.current(required=False)).keys
    assert old == seals[0].keys[0] != new
    sealed = seals[1].seal("reasoning", "Hm.")
    assert router.call(one.current(required=True)).unseal("reasoning", sealed) == "Hm."
    asked: list[float] = []

    async def away(*_: Any, **__: Any) -> None:
        asked.append(now[0])
        raise StoreAwayError("it is gone")

    monkeypatch.setattr(router.service.records, "get", away)
    for now[0] in (9000.0, 9001.0, 9070.0):
        assert router.call(one.current(required=True)).keys == (new, old), "known keys do without the store"
    assert asked == [9000.0, 9070.0], "it is asked once a minute"


@pytest.mark.parametrize("seed", seeds(20))
def test_what_is_sealed_comes_back_or_is_foreign(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        text = "".join(rng.choice("aü🌍\0.\n ") for _ in range(rng.randrange(30)))
        sealed = SEAL.seal("reasoning", text) or ""
        assert Seal((b"new", *SEAL.keys), SEAL.owner).unseal("reasoning", sealed) == text
        for other, kind in (
            (Seal((b"x",), "me"), "reasoning"),
            (Seal(SEAL.keys, "you"), "reasoning"),
            (SEAL, "compaction"),
        ):
            assert other.unseal(kind, sealed) is None  # type: ignore[arg-type]
        place = rng.randrange(len(sealed))
        changed = sealed[:place] + rng.choice("AZaz09-_.=~ü") + sealed[place + 1 :]
        assert SEAL.unseal("reasoning", changed) in (None, text), "bits of base64 that mean nothing may change"
        assert SEAL.unseal("reasoning", sealed[:place]) in (None, text)
    assert (
        SEAL.unseal("reasoning", None) is SEAL.unseal("reasoning", "dGhl") is Seal().seal("reasoning", "x") is None
    )


def draw_items(rng: random.Random, name: str) -> list[Any]:
    """Items of a conversation, all of which are valid; their texts begin with a name."""
    items: list[Any] = []
    for number in range(rng.randrange(1, 12)):
        call = {"call_id": f"c{number}"}
        items.append(
            rng.choice(
                [
                    {"role": "user", "content": f"{name}-u{number}"},
                    {"role": "developer", "content": f"{name}-d{number}"},
                    {"role": "assistant", "content": f"{name}-a{number}"},
                    {"type": "reasoning", "content": [thought_part(f"{name}-t{number}")]},
                    {"type": "reasoning", "encrypted_content": SEAL.seal("reasoning", f"{name}-t{number}")},
                    {"type": "function_call", "name": "f", "arguments": "{}", **call},
                    {"type": "function_call_output", "output": f"{name}-o{number}", **call},
                    {"type": "compaction", "encrypted_content": SEAL.seal("compaction", f"{name}-s{number}")},
                    {"type": "compaction", "encrypted_content": "of another server"},
                ]
            )
        )
    return items


@pytest.mark.parametrize("seed", seeds(10))
def test_a_compaction_stands_for_what_is_before_it(seed: int) -> None:
    """However much of what is before it is sent along, stored or not, the model sees the same."""
    rng = random.Random(seed)
    for _ in range(200):
        before, behind = draw_items(rng, "before"), draw_items(rng, "behind")
        behind = [item for item in behind if item.get("type") != "compaction"]
        item = {"type": "compaction", "encrypted_content": SEAL.seal("compaction", "the summary")}
        whole = [*before, item, *behind]
        told = to_messages(whole, "Be brief.", (), SEAL)
        kept = [each for each in before if is_lasting(each) or rng.random() < 0.5]
        assert to_messages([*kept, item, *behind], "Be brief.", (), SEAL) == told
        stored = to_items([*before, item], (), lambda: str(rng.random()), SEAL)
        assert to_messages(behind, "Be brief.", stored, SEAL) == told or not behind
        text = str(told)
        assert text.count("the summary") == 1
        for each in before:
            shown = each.get("content") if each.get("role") in ("user", "developer") else None
            assert shown is None or shown in text
        assert not [kind for kind in "atso" if f"before-{kind}" in text]
        assert is_compactable(whole, SEAL) == any(not is_lasting(each) for each in behind)
        assert not [warning for warning in foreign_items(whole, SEAL) if f"input[{len(before)}]" in warning]


def test_sealed_items_of_a_conversation(
    http: httpx.Client, fake: FakeController, tokenizer: Tokenizer, router: RunningRouter, sums_up: Ask
) -> None:
    seal = router.call(router.service.histories.seals.current(required=True))
    thought: Any = {"type": "reasoning", "summary": [], "encrypted_content": seal.seal("reasoning", "Hm.")}
    item = http.post(f"{PATH}/compact", json={"input": TALK}).json()["output"][-1]
    made = http.post("/v1/conversations", json={"items": [*TALK, item]}).json()["id"]
    [stored] = http.post(f"/v1/conversations/{made}/items", json={"items": [thought]}).json()["data"]
    assert stored["content"] == [thought_part("Hm.")]
    respond(http, "And?", conversation=made)
    assert last_prompt(fake, tokenizer).startswith(window(tokenizer, "Weather?", add_generation_prompt=False))


def test_thoughts_that_are_only_sealed() -> None:
    assert thought_of({"encrypted_content": SEAL.seal("reasoning", "Hm.")}, SEAL) == "Hm."
    assert thought_of({"encrypted_content": SEAL.seal("reasoning", "Hm.")}, Seal()) == ""
    assert (
        thought_of({"content": [thought_part("a"), thought_part("b")], "encrypted_content": "x"}, SEAL) == "a\nb"
    )
