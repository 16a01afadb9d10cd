"""`/v1/responses` through OpenAI's client and as raw events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pydantic
import pytest
from router.api_calls import BROKEN_CALL, CITY, TWO_CALLS, Say, last_prompt, named_events, say, without_repeats
from router.fake_controller import FakeController, prompt_of
from router.harness import ANSWER, RunningRouter, running
from router.model_folders import write_family

from trunkline.router.text.tokenizer import Tokenizer

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a place.",
    "parameters": CITY,
    "strict": False,
}


def events_of(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    """A stream's payloads; their numbers must be consecutive."""
    events = named_events(http.post("/v1/responses", json={"model": "demo", "stream": True, **fields}))
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
    assert answer.to_dict()["store"] is True
    assert answer.usage is not None
    submit = fake.behaviour.submits[-1]
    prompt = prompt_of(submit)
    assert (answer.usage.input_tokens, answer.usage.input_tokens_details.cached_tokens) == (len(prompt), 3)
    assert answer.usage.total_tokens == len(prompt) + answer.usage.output_tokens
    assert (submit.max_tokens, submit.sampling.temperature, submit.sampling.top_k) == (50, 0.5, 4)
    assert submit.sampling.seed == 7
    same = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert last_prompt(fake, tokenizer) == tokenizer.render_chat(same)


def test_items_become_the_conversation_that_a_chat_completion_has(
    client: openai.OpenAI, fake: FakeController, tokenizer: Tokenizer, say: Say
) -> None:
    say(TWO_CALLS)
    first = client.responses.create(model="demo", input="Weather?", tools=[WEATHER])
    kinds = [(item.type, getattr(item, "name", "")) for item in first.output]
    assert kinds == [("message", ""), ("function_call", "get_weather"), ("function_call", "get_weather")]
    given: list[Any] = [{"role": "developer", "content": [{"type": "input_text", "text": "Short!"}]}]
    given += [{"role": "user", "content": "Weather?"}]
    given += [item.to_dict() for item in first.output]
    calls = [item for item in first.output if item.type == "function_call"]
    given += [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"} for call in calls]
    client.responses.create(model="demo", input=given, instructions="Be kind.", tools=[WEATHER])
    prompt = last_prompt(fake, tokenizer)
    turns: list[dict[str, Any]] = [
        {"role": "system", "content": "Be kind.\n\nShort!"},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "Let me see.\n",
            "tool_calls": [
                {"id": c.call_id, "function": {"name": c.name, "arguments": c.arguments}} for c in calls
            ],
        },
        *({"role": "tool", "tool_call_id": call.call_id, "content": "rain"} for call in calls),
    ]
    tool = {"type": "function", "function": {k: WEATHER[k] for k in ("name", "description", "parameters")}}
    assert prompt == tokenizer.render_chat(turns, tools=[tool])
    assert TWO_CALLS in prompt, "as the model has seen it"
    assert prompt.count("<tool_response>\nrain\n</tool_response>") == 2


def test_order_of_the_events(http: httpx.Client, say: Say) -> None:
    say(TWO_CALLS)
    events = events_of(http, input="Weather?", tools=[WEATHER])
    kinds = [event["type"].removeprefix("response.") for event in events]
    arguments = "function_call_arguments"
    call = ["output_item.added", f"{arguments}.delta", f"{arguments}.done", "output_item.done"]
    assert without_repeats(kinds) == [
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
        mine = [event for event in events if event.get("output_index") == index]
        assert {event["item_id"] for event in mine if "item_id" in event} == {item["id"]}
    assert over["output"][1]["arguments"] == '{"city": "Köln"}'
    assert over["usage"]["output_tokens"] > 0


def test_the_clients_stream_helper(client: openai.OpenAI, say: Say) -> None:
    say(TWO_CALLS)
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
    assert (grammar.kind, json.loads(grammar.text)["required"]) == ("json_schema", ["city"])
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
    say(BROKEN_CALL)
    [call, rest] = client.responses.create(model="demo", input="Hi", tools=[WEATHER]).output
    assert call.to_dict()["status"] == "incomplete"
    assert rest.to_dict()["content"][0]["text"] == "oops"  # type: ignore[index]
    say("")
    empty = client.responses.create(model="demo", input="Hi")
    assert ([item.type for item in empty.output], empty.output_text) == (["message"], "")


def test_a_failure_on_the_way(
    router: RunningRouter, http: httpx.Client, client: openai.OpenAI, fake: FakeController
) -> None:
    fake.behaviour.fail_after, fake.behaviour.fail_when = 3, router.has_begun
    events = events_of(http, input="Hi")
    last = events[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "server_error", "message": "worker 1 died"}
    assert last["response"]["output"][0]["status"] == "incomplete"
    with pytest.raises(openai.InternalServerError) as caught:
        client.responses.create(model="demo", input="Hi")
    assert caught.value.status_code == 503


def test_what_asks_for_nothing_is_taken(http: httpx.Client) -> None:
    neutral = {
        "background": False, "reasoning": {"effort": None}, "truncation": "disabled", "store": True, "user": "u",
        "previous_response_id": None, "include": ["reasoning.encrypted_content"], "top_logprobs": 0, "tools": [],
    }  # fmt: skip
    assert http.post("/v1/responses", json={"input": "Hi", **neutral}).status_code == 200


@pytest.mark.parametrize("asked", [{"summary": "concise"}, {"generate_summary": "auto"}])
def test_summaries_of_thoughts(place: Path, tokenizer: Tokenizer, asked: dict[str, str]) -> None:
    model = str(write_family(place, "qwen3"))
    with running(place, tokenizer, model_path=model) as (router, [fake]), router.client() as http:
        say(fake, Tokenizer(model), "<think>Hm, well.</think>Yes.")
        plain = http.post("/v1/responses", json={"input": "Hi"}).json()["output"][0]
        assert (plain["summary"], plain["content"][0]["text"]) == ([], "Hm, well.")
        with openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
            reasoning: Any = asked
            with client.responses.create(model="demo", input="Hi", reasoning=reasoning, stream=True) as stream:
                events = [event.to_dict(warnings=False) for event in stream]
        kinds = without_repeats([str(event["type"]).removeprefix("response.") for event in events])
        begin = kinds.index("output_item.added") + 1
        assert kinds[begin : begin + 2] == ["reasoning_summary_part.added", "content_part.added"]
        end = kinds.index("reasoning_summary_text.done")
        assert kinds[end : end + 5] == [
            *("reasoning_summary_text.done", "reasoning_summary_part.done"),
            *("reasoning_text.done", "content_part.done", "output_item.done"),
        ]
        mine = [event for event in events if "summary_index" in event]
        assert {(event["output_index"], event["summary_index"]) for event in mine} == {(0, 0)}
        assert "".join(str(event.get("delta", "")) for event in mine) == "Hm, well."
        last: Any = events[-1]
        thought = last["response"]["output"][0]
        assert thought["summary"] == [{"type": "summary_text", "text": "Hm, well."}]
        assert thought["content"] == plain["content"]
        assert last["response"]["reasoning"]["summary"] == next(iter(asked.values()))
        refused = http.post("/v1/responses", json={"input": "Hi", "reasoning": {"summary": "short"}})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "reasoning.summary")
        told = http.post("/v1/responses", json={"input": "Hi", "reasoning": {"context": "all_turns"}}).json()
        assert told["warnings"] == ["`reasoning.context` is not applied"]
