"""`/v1/responses` through OpenAI's client and as raw events."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pydantic
import pytest
from router.fake_controller import FakeController, prompt_of
from router.harness import ANSWER, EOS, RunningRouter, wait_until

from trunkline.router.text.tokenizer import Tokenizer

Say = Callable[[str], None]
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a place.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
)


@pytest.fixture
def say(fake: FakeController, tokenizer: Tokenizer) -> Say:
    """Sets what the model answers next."""

    def set_answer(text: str) -> None:
        ids = [*tokenizer.encode(text, add_special_tokens=False), EOS]
        fake.behaviour.script = lambda _: ids

    return set_answer


def asked(fake: FakeController, tokenizer: Tokenizer) -> str:
    """The last prompt."""
    return tokenizer.decode(prompt_of(fake.behaviour.submits[-1]), skip_special_tokens=False)


def events_of(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    """A stream's payloads; their names must be their types and their numbers consecutive."""
    answer = http.post("/v1/responses", json={"model": "demo", "stream": True, **fields})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for part in answer.text.strip().split("\n\n"):
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_a_text(client: openai.OpenAI, fake: FakeController, tokenizer: Tokenizer) -> None:
    fake.behaviour.cached_tokens = 3
    answer = client.responses.create(
        model="demo", input="Hi", instructions="Be brief.", temperature=0.5, max_output_tokens=50,
        metadata={"a": "b"}, extra_body={"top_k": 4, "seed": 7},
    )  # fmt: skip
    assert answer.output_text == ANSWER
    assert (answer.status, answer.object, answer.model, answer.error) == ("completed", "response", "demo", None)
    assert answer.id.startswith("resp_")
    assert answer.metadata == {"a": "b"}
    assert answer.to_dict()["store"] is False
    assert answer.usage is not None
    submit = fake.behaviour.submits[-1]
    prompt = prompt_of(submit)
    assert (answer.usage.input_tokens, answer.usage.input_tokens_details.cached_tokens) == (len(prompt), 3)
    assert answer.usage.total_tokens == len(prompt) + answer.usage.output_tokens
    assert (submit.max_tokens, submit.sampling.temperature, submit.sampling.top_k) == (50, 0.5, 4)
    assert submit.sampling.seed == 7
    same = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert asked(fake, tokenizer) == tokenizer.render_chat(same)


def test_items_become_the_conversation_that_a_chat_completion_has(
    client: openai.OpenAI, fake: FakeController, tokenizer: Tokenizer, say: Say
) -> None:
    say(CALLS)
    first = client.responses.create(model="demo", input="Weather?", tools=[WEATHER])
    kinds = [(item.type, getattr(item, "name", "")) for item in first.output]
    assert kinds == [("message", ""), ("function_call", "get_weather"), ("function_call", "get_weather")]
    given: list[Any] = [{"role": "developer", "content": [{"type": "input_text", "text": "Short!"}]}]
    given += [{"role": "user", "content": "Weather?"}]
    given += [item.to_dict() for item in first.output]
    given += [
        {"type": "function_call_output", "call_id": item.call_id, "output": "rain"}
        for item in first.output
        if item.type == "function_call"
    ]
    client.responses.create(model="demo", input=given, instructions="Be kind.", tools=[WEATHER])
    prompt = asked(fake, tokenizer)
    calls = [item for item in first.output if item.type == "function_call"]
    turns: list[dict[str, Any]] = [
        {"role": "system", "content": "Be kind.\n\nShort!"},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "Let me see.\n",
            "tool_calls": [
                {"id": call.call_id, "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ],
        },
        *({"role": "tool", "tool_call_id": call.call_id, "content": "rain"} for call in calls),
    ]
    tool = {"type": "function", "function": {k: WEATHER[k] for k in ("name", "description", "parameters")}}
    assert prompt == tokenizer.render_chat(turns, tools=[tool])
    assert CALLS.replace("\n<tool_call>", "\n\n<tool_call>", 1) in prompt
    assert prompt.count("<tool_response>\nrain\n</tool_response>") == 2


def test_order_of_the_events(http: httpx.Client, say: Say) -> None:
    say(CALLS)
    events = events_of(http, input="Weather?", tools=[WEATHER])
    kinds = [event["type"].removeprefix("response.") for event in events]
    without_repeats = [kind for at, kind in enumerate(kinds) if at == 0 or kinds[at - 1] != kind]
    call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert without_repeats == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", *call, *call, "completed"),
    ]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["usage"] is None
    over = events[-1]["response"]
    assert over["output"] == [event["item"] for event in events if event["type"].endswith("item.done")]
    for index, item in enumerate(over["output"]):
        deltas = "".join(e["delta"] for e in events if "delta" in e and e["output_index"] == index)
        assert deltas == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        assert item["status"] == "completed"
        assert {
            event["item_id"] for event in events if event.get("output_index") == index and "item_id" in event
        } == {item["id"]}
    assert over["output"][1]["arguments"] == '{"city": "Köln"}'
    assert over["usage"]["output_tokens"] > 0


def test_the_clients_stream_helper(client: openai.OpenAI, say: Say) -> None:
    say(CALLS)
    with client.responses.stream(model="demo", input="Weather?", tools=[WEATHER]) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(texts) == final.output_text == "Let me see.\n"
    assert [item.type for item in final.output] == ["message", "function_call", "function_call"]
    with client.responses.create(model="demo", input="Hi", stream=True) as plain:
        assert [event.type for event in plain][-1] == "response.completed"


def test_structured_output_and_the_parse_helper(client: openai.OpenAI, fake: FakeController, say: Say) -> None:
    class Place(pydantic.BaseModel):
        city: str

    say('{"city": "Bonn"}')
    parsed = client.responses.parse(model="demo", input="Where?", text_format=Place)
    assert parsed.output_parsed == Place(city="Bonn")
    grammar = fake.behaviour.submits[-1].grammar
    assert grammar is not None
    assert grammar.kind == "json_schema"
    assert json.loads(grammar.text)["required"] == ["city"]
    client.responses.create(model="demo", input="Where?", text={"format": {"type": "json_object"}})
    grammar = fake.behaviour.submits[-1].grammar
    assert grammar is not None
    assert (grammar.kind, grammar.param) == ("json_object", "response_format")


def test_a_demanded_call_comes_with_a_grammar(client: openai.OpenAI, fake: FakeController, say: Say) -> None:
    say('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm"}}\n</tool_call>')
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        made: Any = client.responses.create(model="demo", input="?", tools=[WEATHER], tool_choice=choice)  # type: ignore[call-overload]
        [item] = made.output
        assert json.loads(item.arguments) == {"city": "Ulm"}
        grammar = fake.behaviour.submits[-1].grammar
        assert grammar is not None
        assert (grammar.kind, grammar.param) == ("structural_tag", "tools")
        assert '"star"' not in grammar.text
        assert made.parallel_tool_calls is False, "one call, unless more are asked for"
    made = client.responses.create(
        model="demo", input="?", tools=[WEATHER], tool_choice="required", parallel_tool_calls=True
    )
    grammar = fake.behaviour.submits[-1].grammar
    assert grammar is not None
    assert '"star"' in grammar.text
    assert made.parallel_tool_calls is True
    client.responses.create(model="demo", input="?", tools=[WEATHER], tool_choice="none")
    assert fake.behaviour.submits[-1].grammar is None


def test_an_answer_that_is_cut_off(http: httpx.Client, client: openai.OpenAI, say: Say) -> None:
    cut = client.responses.create(model="demo", input="Hi", max_output_tokens=2)
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    assert cut.output[0].to_dict()["status"] == "incomplete"
    events = events_of(http, input="Hi", max_output_tokens=2)
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["output"][0]["status"] == "incomplete"
    say('<tool_call>\n{"name": "get_weather", "arguments": {"city": oops')
    [call, rest] = client.responses.create(model="demo", input="Hi", tools=[WEATHER]).output
    assert call.to_dict()["status"] == "incomplete"
    assert rest.to_dict()["content"][0]["text"] == "oops"  # type: ignore[index]


def test_an_empty_answer_is_an_empty_text(client: openai.OpenAI, say: Say) -> None:
    say("")
    answer = client.responses.create(model="demo", input="Hi")
    assert [item.type for item in answer.output] == ["message"]
    assert answer.output_text == ""


def test_a_failure_on_the_way(http: httpx.Client, client: openai.OpenAI, fake: FakeController) -> None:
    fake.behaviour.fail_after, fake.behaviour.seconds_per_token = 3, 0.05
    events = events_of(http, input="Hi")
    last = events[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "server_error", "message": "worker 1 died"}
    assert last["response"]["output"][0]["status"] == "incomplete"
    with pytest.raises(openai.InternalServerError) as caught:
        client.responses.create(model="demo", input="Hi")
    assert caught.value.status_code == 503


def test_a_client_that_leaves(router: RunningRouter, http: httpx.Client, fake: FakeController) -> None:
    fake.behaviour.seconds_per_token = 0.02
    body = {"input": "Hi", "stream": True}
    with http.stream("POST", "/v1/responses", json=body) as answer:
        next(answer.iter_lines())
    wait_until(lambda: bool(fake.behaviour.aborts))
    assert router.inflight == 0


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": ["x"]}, "input[0]"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": ["x"]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"role": "user", "content": [{"type": "input_text", "text": 3}]}]}, "input[0].content[0].text"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
    ({"input": [{"type": 3}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "none", "output": "x"}]}, "input"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 100_000}, "max_output_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"input": "word " * 30_000}, "input"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_object"}}, "tools": [WEATHER], "tool_choice": "required"}, "text.format"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "c"}, "conversation"),
    ({"background": True}, "background"),
    ({"truncation": "sometimes"}, "truncation"),
    ({"reasoning": {"effort": "high"}}, "reasoning"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"stream": "yes"}, "stream"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_bad_requests(http: httpx.Client, fake: FakeController, fields: dict[str, Any], param: str) -> None:
    answer = http.post("/v1/responses", json={"input": "Hi", **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert error["message"]
    assert fake.behaviour.submits == []


def test_what_asks_for_nothing_is_taken(http: httpx.Client) -> None:
    neutral = {
        "background": False, "reasoning": {"effort": None}, "truncation": "disabled", "store": True, "user": "u",
        "previous_response_id": None, "include": ["reasoning.encrypted_content"], "top_logprobs": 0, "tools": [],
    }  # fmt: skip
    assert http.post("/v1/responses", json={"input": "Hi", **neutral}).status_code == 200


def test_other_models_and_methods(http: httpx.Client) -> None:
    answer = http.post("/v1/responses", json={"input": "Hi", "model": "other"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert http.get("/v1/responses").status_code == 405
    assert http.get("/v1/responses/resp_1").status_code == 404


def test_the_schema_describes_it(http: httpx.Client) -> None:
    schema = http.get("/openapi.json").json()
    for path in ("/v1/responses", "/v1/messages", "/v1/messages/count_tokens"):
        body = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body["$ref"].rsplit("/", 1)[1] in schema["components"]["schemas"]
