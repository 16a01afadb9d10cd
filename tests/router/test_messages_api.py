"""`/v1/messages` through Anthropic's client and as raw events."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pydantic
import pytest
from router.api_calls import BROKEN_CALL, CITY, TWO_CALLS, Say, last_prompt, named_events, without_repeats
from router.fake_controller import FakeController, prompt_of
from router.harness import ANSWER, RunningRouter

from trunkline.controller.messages import Submit
from trunkline.router.messages import FinishReason
from trunkline.router.text.tokenizer import Tokenizer

HI: Any = [{"role": "user", "content": "Hi"}]
WEATHER: Any = {"name": "get_weather", "description": "The weather of a place.", "input_schema": CITY}


def events_of(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "demo", "max_tokens": 200, "messages": HI, "stream": True, **fields}
    return named_events(http.post("/v1/messages", json=body))


def test_a_text(claude: anthropic.Anthropic, fake: FakeController, tokenizer: Tokenizer) -> None:
    fake.behaviour.cached_tokens = 3
    answer = claude.messages.create(
        model="demo", max_tokens=50, messages=HI, system=[{"type": "text", "text": "Be brief."}],
        metadata={"user_id": "u"}, extra_body={"temperature": 0.5, "top_k": 4, "top_p": 0.9},
    )  # fmt: skip
    [block] = answer.content
    assert isinstance(block, anthropic.types.TextBlock)
    assert block.text == ANSWER
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "demo")
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.id.startswith("msg_")
    submit = fake.behaviour.submits[-1]
    assert (answer.usage.input_tokens, answer.usage.cache_read_input_tokens) == (len(prompt_of(submit)) - 3, 3)
    assert answer.usage.output_tokens == len(tokenizer.encode(ANSWER, add_special_tokens=False)) + 1
    assert (submit.max_tokens, submit.sampling.temperature, submit.sampling.top_k) == (50, 0.5, 4)
    same = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert last_prompt(fake, tokenizer) == tokenizer.render_chat(same)


def test_why_an_answer_stopped(claude: anthropic.Anthropic, say: Say) -> None:
    stopped = claude.messages.create(model="demo", max_tokens=50, messages=HI, stop_sequences=["never", "STOP"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "STOP")
    assert stopped.content[0].to_dict()["text"] == ANSWER.partition("STOP")[0]
    cut = claude.messages.create(model="demo", max_tokens=2, messages=HI)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)
    say("")
    empty = claude.messages.create(model="demo", max_tokens=2, messages=HI)
    assert (empty.stop_reason, empty.content) == ("end_turn", [])


def test_tools_there_and_back(
    claude: anthropic.Anthropic, fake: FakeController, tokenizer: Tokenizer, say: Say
) -> None:
    say(TWO_CALLS)
    first = claude.messages.create(model="demo", max_tokens=500, messages=HI, tools=[WEATHER])
    assert first.stop_reason == "tool_use"
    text, *calls = first.content
    assert text.to_dict() == {"type": "text", "text": "Let me see.\n"}
    assert [call.to_dict()["input"] for call in calls] == [{"city": "Köln"}, {"city": "Bonn"}]
    ids = [str(call.to_dict()["id"]) for call in calls]
    assert all(call_id.startswith("toolu_") for call_id in ids)
    assert len(set(ids)) == 2
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": ids[0], "content": [{"type": "text", "text": "rain"}]},
        {"type": "tool_result", "tool_use_id": ids[1], "content": "no such place", "is_error": True},
        {"type": "text", "text": "And?"},
    ]
    thought: Any = {"type": "thinking", "thinking": "hm", "signature": "s"}
    said: Any = {"role": "assistant", "content": [thought, *first.content]}
    given = [*HI, said, {"role": "user", "content": results}]
    claude.messages.create(model="demo", max_tokens=500, messages=given, tools=[WEATHER])
    functions = [
        {
            "id": call_id,
            "function": {"name": "get_weather", "arguments": json.dumps({"city": city}, ensure_ascii=False)},
        }
        for call_id, city in zip(ids, ("Köln", "Bonn"), strict=True)
    ]
    turns: list[dict[str, Any]] = [
        *HI,
        {"role": "assistant", "content": "Let me see.\n", "tool_calls": functions},
        {"role": "tool", "tool_call_id": ids[0], "content": "rain"},
        {"role": "tool", "tool_call_id": ids[1], "content": "Error: no such place"},
        {"role": "user", "content": "And?"},
    ]
    function = {"name": "get_weather", "description": WEATHER["description"], "parameters": CITY}
    shown = tokenizer.render_chat(turns, tools=[{"type": "function", "function": function}])
    assert last_prompt(fake, tokenizer) == shown
    assert "<tool_response>\nrain\n</tool_response>\n<tool_response>\nError: no such place" in shown


def test_a_stream(claude: anthropic.Anthropic, fake: FakeController, say: Say) -> None:
    say(TWO_CALLS)
    fake.behaviour.cached_tokens = 5
    with claude.messages.stream(model="demo", max_tokens=500, messages=HI, tools=[WEATHER]) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "Let me see.\n"
    assert [block.type for block in final.content] == ["text", "tool_use", "tool_use"]
    assert [block.to_dict().get("input") for block in final.content[1:]] == [{"city": "Köln"}, {"city": "Bonn"}]
    assert (final.stop_reason, final.usage.cache_read_input_tokens) == ("tool_use", 5)
    assert final.usage.output_tokens > 10


def test_order_of_the_events(http: httpx.Client, say: Say) -> None:
    say(TWO_CALLS)
    events = events_of(http, tools=[WEATHER])
    kinds = [event["type"] for event in events]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert without_repeats(kinds) == ["message_start", "ping", *block * 3, "message_delta", "message_stop"]
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [start["index"] for start in starts] == [0, 1, 2]
    assert starts[1]["content_block"]["input"] == {}
    deltas = [event for event in events if event["type"] == "content_block_delta"]
    arguments = ["".join(e["delta"]["partial_json"] for e in deltas if e["index"] == at) for at in (1, 2)]
    assert arguments == ['{"city": "Köln"}', '{"city": "Bonn"}']
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["stop_reason"] is None
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    stopped = events_of(http, stop_sequences=["see"])
    assert stopped[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "see"}
    assert stopped[-2]["usage"]["output_tokens"] > 0


def test_calls_that_must_not_be_carried_out(claude: anthropic.Anthropic, say: Say) -> None:
    say(BROKEN_CALL)
    odd = claude.messages.create(model="demo", max_tokens=500, messages=HI, tools=[WEATHER])
    assert odd.stop_reason == "end_turn"
    assert [block.to_dict().get("input") for block in odd.content] == [{}, None]


def test_choices(claude: anthropic.Anthropic, fake: FakeController, tokenizer: Tokenizer) -> None:
    def submit(choice: Any) -> Submit:
        claude.messages.create(model="demo", max_tokens=9, messages=HI, tools=[WEATHER], tool_choice=choice)
        return fake.behaviour.submits[-1]

    assert submit({"type": "auto"}).grammar is None
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        grammar = submit(choice).grammar
        assert grammar is not None
        assert (grammar.kind, grammar.param) == ("structural_tag", "tools")
    for disabled, several in ((None, False), (True, False), (False, True)):
        grammar = submit({"type": "any", "disable_parallel_tool_use": disabled}).grammar
        assert grammar is not None
        assert ('"star"' in grammar.text) == several, "one call, unless more are asked for"
    assert submit({"type": "none"}).grammar is None
    assert "get_weather" not in last_prompt(fake, tokenizer)


def test_structured_output_and_the_parse_helper(
    claude: anthropic.Anthropic, fake: FakeController, say: Say
) -> None:
    class Place(pydantic.BaseModel):
        city: str

    say('{"city": "Bonn"}')
    parsed = claude.messages.parse(model="demo", max_tokens=50, messages=HI, output_format=Place)
    assert parsed.parsed_output == Place(city="Bonn")
    grammar = fake.behaviour.submits[-1].grammar
    assert grammar is not None
    assert (grammar.kind, json.loads(grammar.text)["required"]) == ("json_schema", ["city"])


def test_turns_of_one_role_become_one(http: httpx.Client, fake: FakeController, tokenizer: Tokenizer) -> None:
    turns: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": []},
        {"role": "user", "content": [{"type": "text", "text": "d", "cache_control": {"type": "ephemeral"}}]},
    ]
    assert http.post("/v1/messages", json={"max_tokens": 5, "messages": turns}).status_code == 200
    same = [
        {"role": "user", "content": "a\nb\nc"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "d"},
    ]
    assert last_prompt(fake, tokenizer) == tokenizer.render_chat(same)


def test_counting_tokens(claude: anthropic.Anthropic, fake: FakeController) -> None:
    count = claude.messages.count_tokens(model="demo", messages=HI, system="Be brief.", tools=[WEATHER])
    assert fake.behaviour.submits == []
    claude.messages.create(model="demo", max_tokens=5, messages=HI, system="Be brief.", tools=[WEATHER])
    assert count.input_tokens == len(prompt_of(fake.behaviour.submits[-1]))
    long: Any = [{"role": "user", "content": "word " * 20_000}]
    assert claude.messages.count_tokens(model="demo", messages=long).input_tokens > 20_000
    call: Any = {"type": "tool_use", "id": "c", "name": "f", "input": {"x": "y" * (5 << 20)}}
    with pytest.raises(anthropic.BadRequestError, match="are tokenised at once"):
        claude.messages.count_tokens(model="demo", messages=[{"role": "assistant", "content": [call]}, *HI])


def test_a_failure_on_the_way(
    router: RunningRouter, http: httpx.Client, claude: anthropic.Anthropic, fake: FakeController
) -> None:
    fake.behaviour.fail_after, fake.behaviour.fail_when = 3, router.has_begun
    last = events_of(http)[-1]
    assert last["error"] == {"type": "overloaded_error", "message": "worker 1 died"}
    assert (last["type"], len(last["request_id"])) == ("error", 32)
    with (
        pytest.raises(anthropic.APIStatusError),
        claude.messages.stream(model="demo", max_tokens=50, messages=HI) as stream,
    ):
        stream.get_final_message()


def test_errors_have_anthropics_form(
    http: httpx.Client, claude: anthropic.Anthropic, fake: FakeController, monkeypatch: pytest.MonkeyPatch
) -> None:
    def error(answer: httpx.Response, status: int) -> str:
        body = answer.json()
        assert (answer.status_code, body["type"], set(body["error"])) == (status, "error", {"type", "message"})
        assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
        return str(body["error"]["type"])

    good = {"max_tokens": 5, "messages": HI}
    assert error(http.post("/v1/messages", json={**good, "model": "other"}), 404) == "not_found_error"
    assert error(http.get("/v1/messages"), 405) == "invalid_request_error"
    assert error(http.get("/v1/messages/batches/batch_x"), 404) == "not_found_error"
    assert error(http.post("/v1/messages", content=b"{"), 400) == "invalid_request_error"
    assert error(http.post("/v1/messages", content=b" " * (17 << 20)), 413) == "request_too_large"
    fake.behaviour.refuse = FinishReason.QUEUE_FULL
    assert error(http.post("/v1/messages", json=good), 429) == "rate_limit_error"
    with pytest.raises(anthropic.RateLimitError):
        claude.messages.create(model="demo", max_tokens=5, messages=HI)
    fake.behaviour.refuse = FinishReason.ENGINE_FAILED
    assert error(http.post("/v1/messages", json=good), 503) == "overloaded_error"
    monkeypatch.setattr("trunkline.router.api.anthropic.check_model", lambda *_: 1 / 0)
    assert error(http.post("/v1/messages", json=good), 500) == "api_error"


def block(**fields: Any) -> dict[str, Any]:
    """A conversation of one message with one block."""
    return {"messages": [{"role": "user", "content": [fields]}]}


CALL = {"type": "tool_use", "id": "x", "name": "f", "input": []}
IMAGE = {"type": "image", "source": {}}
CONTENT = "messages[0].content"
BAD: dict[str, list[dict[str, Any]]] = {
    "max_tokens": [{"max_tokens": bad} for bad in (None, 0)],
    "messages": [
        *({"messages": bad} for bad in (None, [], "Hi", [{"role": "user", "content": "word " * 30_000}])),
        {"messages": [*HI, {"role": "assistant", "content": [{**CALL, "input": {}}]}], "tools": [WEATHER]},
        block(type="tool_result", tool_use_id="none", content="x"),
    ],
    "messages[0].role": [{"messages": ["Hi"]}, {"messages": [{"role": "tool", "content": "x"}]}],
    CONTENT: [{"messages": [{"role": "user"}]}],
    f"{CONTENT}[0]": [{"messages": [{"role": "user", "content": ["x"]}]}],
    f"{CONTENT}[0].type": [block(**IMAGE), block(type="tool_use", id="x", name="f", input={})],
    f"{CONTENT}[0].text": [block(type="text")],
    f"{CONTENT}[0].tool_use_id": [block(type="tool_result", content="x")],
    f"{CONTENT}[0].content[0]": [block(type="tool_result", tool_use_id="x", content=[{}])],
    f"{CONTENT}[0].content[0].type": [block(type="tool_result", tool_use_id="x", content=[IMAGE])],
    f"{CONTENT}[0].input": [{"messages": [{"role": "assistant", "content": [CALL]}]}],
    "system": [{"system": 5}],
    "system[0].type": [{"system": [{"type": "image"}]}],
    "temperature": [{"temperature": 1.5}],
    "top_p": [{"top_p": 0}],
    "top_k": [{"top_k": -2}],
    "stop_sequences": [{"stop_sequences": bad} for bad in ([""], ["x"] * 99)],
    "tools": [{"tools": {}}],
    "tools[0].type": [{"tools": [{"type": 5, "name": "web_search"}]}],
    "tools[0].name": [{"tools": [{"name": "a b"}]}],
    "tools[0].input_schema.type": [{"tools": [{"name": "f", "input_schema": {"type": "string"}}]}],
    "tools[1]": [{"tools": [WEATHER, WEATHER]}],
    "tool_choice": [{"tool_choice": bad} for bad in ({"type": "any"}, {"type": "tool", "name": "f"}, "auto")],
    "tool_choice.disable_parallel_tool_use": [{"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}],
    "thinking.type": [{"thinking": {"type": "loud"}}],
    "output_config.effort": [{"output_config": {"effort": "huge"}}],
    "output_config.format.schema": [
        {"output_config": {"format": {"type": "json_schema"}}},
    ],
    "mcp_servers": [{"mcp_servers": {}}],
    "context_management": [{"context_management": []}],
    f"{CONTENT}[0].source.type": [
        block(type="document", source={"type": "base64", "media_type": "application/pdf"})
    ],
    f"{CONTENT}[0].source": [block(type="document")],
    "truncation": [{"truncation": 5}],
    "pml": [{"pml": "<prompt"}],
}


@pytest.mark.parametrize("param", BAD)
def test_bad_requests(http: httpx.Client, fake: FakeController, param: str) -> None:
    for fields in BAD[param]:
        body = {"max_tokens": 5, "messages": HI, **fields}
        answer = http.post("/v1/messages", json={name: value for name, value in body.items() if value is not None})
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), error
        assert f"`{param}" in error["message"], error
    assert fake.behaviour.submits == []
