"""What the suites of other servers (vLLM, SGLang) expect of tools, thoughts and forms of answers, against a
scripted engine. Cases whose answer differs on purpose are marked, as in `test_conformance.py`."""

from __future__ import annotations

import itertools
import json
from typing import Any, Final

import pytest
from router.api_calls import TWO_CALLS, last_prompt
from router.conformance import CASES, CHAT, PROMPT, TALK, TEXT, Case, Server, case, differs, text_of

from trunkline.router.text.chat_template import ChatRenderer
from trunkline.router.text.reasoning_styles import THINK
from trunkline.router.text.tool_styles import ToolStyle

WEATHER: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL: Final = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
NAMED: Final = {"type": "function", "function": {"name": "get_weather"}}
VERBATIM: Final = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def template(server: Server, text: str) -> None:
    """Serve a model with another chat template."""
    server.patch.setattr(server.service.tokenizer, "_chat", ChatRenderer(text, {}, ToolStyle()))


def called(choices: list[Any]) -> list[dict[str, Any]]:
    """The calls of a stream's choice, put together by their indices."""
    calls: dict[int, dict[str, Any]] = {}
    for part in (part for choice in choices for part in choice["delta"].get("tool_calls", [])):
        whole = calls.setdefault(part["index"], {"arguments": "", "id": part.get("id"), "names": []})
        whole["arguments"] += part["function"].get("arguments", "")
        whole["names"] += [part["function"]["name"]] if "name" in part["function"] else []
    return [calls[index] for index in sorted(calls)]


# -- tools


@case
def forced_and_demanded_calls_in_streams(server: Server) -> None:
    for choice in (NAMED, "required"):
        server.say(CALL)
        parts = [part["choices"][0] for part in server.parts(CHAT, tools=[WEATHER], tool_choice=choice)]
        assert not any(part["delta"].get("content") for part in parts)
        [call] = called(parts)
        assert (call["names"], json.loads(call["arguments"])) == (["get_weather"], {"city": "Köln"})
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["tool_calls"]


@case
def forced_calls_have_a_grammar(server: Server) -> None:
    for choice in (NAMED, "required"):
        server.say(CALL)
        server.answer(CHAT, tools=[WEATHER], tool_choice=choice)
        assert server.fake.behaviour.submits[-1].grammar is not None
    server.answer(CHAT, tools=[WEATHER], tool_choice="auto")
    assert server.fake.behaviour.submits[-1].grammar is None


@case
def a_message_of_calls_has_no_content(server: Server) -> None:
    server.say(CALL)
    [choice] = server.answer(CHAT, tools=[WEATHER])["choices"]
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["id"]


@case
def text_before_calls_is_kept(server: Server) -> None:
    server.say(TWO_CALLS)
    [choice] = server.answer(CHAT, tools=[WEATHER])["choices"]
    assert choice["message"]["content"].strip() == "Let me see."
    assert len({call["id"] for call in choice["message"]["tool_calls"]}) == 2


@case
def calls_at_once_in_a_stream(server: Server) -> None:
    server.say(TWO_CALLS)
    parts = [part["choices"][0] for part in server.parts(CHAT, tools=[WEATHER])]
    calls = called(parts)
    assert [json.loads(call["arguments"])["city"] for call in calls] == ["Köln", "Bonn"]
    assert [call["names"] for call in calls] == [["get_weather"]] * 2
    assert len({call["id"] for call in calls}) == 2


@case
def a_call_without_arguments_and_its_result(server: Server) -> None:
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    for arguments, result in itertools.product(("{}", ""), ("12:00", [{"type": "text", "text": "12:00"}])):
        call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": arguments}}
        said = [
            {"role": "user", "content": "What time is it?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": result},
        ]
        assert text_of(server.answer(CHAT, messages=said, tools=[tool])["choices"][0])
        assert "12:00" in last_prompt(server.fake, server.tokenizer)


@case
def tools_without_parameters_and_with_references(server: Server) -> None:
    server.say('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    linked = {"$defs": {"Unit": {"enum": ["C", "F"]}}, "properties": {"unit": {"$ref": "#/$defs/Unit"}}}
    for function in ({"name": "now"}, {"name": "now", "parameters": {"type": "object", **linked}}):
        [choice] = server.answer(CHAT, tools=[{"type": "function", "function": function}])["choices"]
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}


@case
def choices_of_tools_that_make_no_sense(server: Server) -> None:
    server.refused(CHAT, "tool_choice", tool_choice=NAMED)
    for choice in ({}, 123, "sometimes", {"type": "function"}):
        answer = server.http.post(CHAT, json={"messages": TALK, "tools": [WEATHER], "tool_choice": choice})
        assert answer.status_code == 400, choice


@case
def a_call_that_is_cut_off(server: Server) -> None:
    for choice in (NAMED, "required"):
        server.say(CALL)
        [made] = server.answer(CHAT, tools=[WEATHER], tool_choice=choice, max_completion_tokens=1)["choices"]
        assert made["finish_reason"] == "length"
        assert not made["message"]["content"]
        assert not made["message"].get("tool_calls")


@differs("a demanded call is a single one, unless `parallel_tool_calls` is true: weak models never stop calling")
def demanded_calls_may_be_several(server: Server) -> None:
    server.answer(CHAT, tools=[WEATHER], tool_choice="required", parallel_tool_calls=True)
    several = server.fake.behaviour.submits[-1].grammar
    server.answer(CHAT, tools=[WEATHER], tool_choice="required")
    assert server.fake.behaviour.submits[-1].grammar == several


@case
def demanded_calls_may_be_bounded_to_one(server: Server) -> None:
    grammars = []
    for parallel in (False, True):
        server.answer(CHAT, tools=[WEATHER], tool_choice="required", parallel_tool_calls=parallel)
        grammars.append(server.fake.behaviour.submits[-1].grammar)
    assert None not in grammars
    assert grammars[0] != grammars[1]


@case
def a_function_that_is_not_offered(server: Server) -> None:
    server.say('<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>')
    [choice] = server.answer(CHAT, tools=[WEATHER])["choices"]
    assert choice["finish_reason"] in ("stop", "tool_calls")


# -- thoughts


@case
def thoughts_apart_from_the_answer(server: Server) -> None:
    server.patch.setattr(server.service.tokenizer, "reasoning", THINK)
    server.say("<think>\nWell.\n</think>\n\nYes.")
    message = server.answer(CHAT)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Well.", "Yes.")
    deltas = [part["choices"][0]["delta"] for part in server.parts(CHAT)]
    for name, text in (("reasoning_content", "Well."), ("reasoning", "Well."), ("content", "Yes.")):
        assert "".join(delta.get(name, "") for delta in deltas) == text
    together = server.answer(CHAT, separate_reasoning=False)["choices"][0]["message"]
    assert together["content"].startswith("<think>")
    assert "reasoning_content" not in together
    assert "reasoning_content" not in server.answer(CHAT, include_reasoning=False)["choices"][0]["message"]


@case
def thoughts_before_a_call(server: Server) -> None:
    server.patch.setattr(server.service.tokenizer, "reasoning", THINK)
    for stream in (False, True):
        server.say(f"<think>\nWell.\n</think>\n\n{CALL}")
        if stream:
            parts = [part["choices"][0] for part in server.parts(CHAT, tools=[WEATHER])]
            assert "".join(part["delta"].get("reasoning_content", "") for part in parts) == "Well."
            [call] = called(parts)
            assert call["names"] == ["get_weather"]
        else:
            message = server.answer(CHAT, tools=[WEATHER])["choices"][0]["message"]
            assert message["reasoning_content"] == "Well."
            assert message["tool_calls"][0]["function"]["name"] == "get_weather"


@case
def switches_of_the_template(server: Server) -> None:
    template(server, VERBATIM + "{{ enable_thinking }} {{ custom }}")
    for fields, told in (
        ({"reasoning_effort": "none"}, "False"),
        ({"chat_template_kwargs": {"enable_thinking": False, "custom": "x"}}, "False x"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "True"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"custom": "value"}}, "False value"),
        ({"reasoning": {"enabled": True, "effort": "high"}}, "True"),
    ):
        server.answer(CHAT, **fields)
        assert last_prompt(server.fake, server.tokenizer).strip().endswith(told), fields
    server.refused(CHAT, reasoning_effort="enormous")


@case
def budgets_of_thoughts(server: Server) -> None:
    for wrong in (-2, 0.6, 10.5):
        server.refused(CHAT, thinking_token_budget=wrong)
        server.refused(TEXT, thinking_token_budget=wrong)
    assert server.answer(CHAT, thinking_token_budget=10)["choices"]
    for path in (CHAT, TEXT):
        assert server.answer(path, thinking_token_budget=-1)["choices"]


@differs("texts that are continued have no thoughts that could be told apart, so a budget for them is refused")
def budgets_of_thoughts_in_completions(server: Server) -> None:
    assert server.answer(TEXT, thinking_token_budget=5)["choices"]


# -- forms of answers


@case
def forms_without_their_schema(server: Server) -> None:
    for path in (CHAT, TEXT):
        server.refused(path, "response_format.json_schema", response_format={"type": "json_schema"})
        server.refused(path, "response_format.type", response_format={"type": "unheard-of"})
        assert server.answer(path, response_format={"type": "text"})["choices"]


@case
def forms_under_the_names_of_both_servers(server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        {"structured_outputs": {"json": schema}},
        {"json_schema": json.dumps(schema)},
    ]
    for path in (CHAT, TEXT):
        grammars = set()
        for fields in wanted:
            server.answer(path, **fields)
            grammar = server.fake.behaviour.submits[-1].grammar
            assert grammar is not None
            grammars.add((grammar.kind, grammar.text))
        assert len(grammars) == 1
        for fields in ({"regex": "a+"}, {"ebnf": 'root ::= "a"'}, {"structured_outputs": {"choice": ["a", "b"]}}):
            server.answer(path, **fields)
            assert server.fake.behaviour.submits[-1].grammar is not None


@case
def forms_of_a_wrong_type(server: Server) -> None:
    for path in (CHAT, TEXT):
        for wrong in ({"regex": {"1": "Python"}}, {"choice": "a"}, {"regex": "a", "choice": ["a"]}):
            answer = server.http.post(path, json={"prompt": PROMPT, "messages": TALK, "structured_outputs": wrong})
            assert answer.status_code == 400, wrong


@case
def forms_that_cannot_be_compiled(server: Server) -> None:
    for wrong in ({"regex": "unsatisfiable"}, {"grammar": "unsatisfiable"}, {"json": {"enum": ["unsatisfiable"]}}):
        server.refused(TEXT, f"structured_outputs.{next(iter(wrong))}", structured_outputs=wrong)
        for path in (CHAT, TEXT):
            body = {"prompt": PROMPT, "messages": TALK, "structured_outputs": wrong, "stream": True}
            assert server.http.post(path, json=body).status_code == 400


@case
def logprobs_of_what_a_grammar_rules_out(server: Server) -> None:
    server.fake.behaviour.token_logprob = lambda sample: float("-inf")
    [choice] = server.answer(CHAT, logprobs=True, top_logprobs=5)["choices"]
    for entry in choice["logprobs"]["content"]:
        assert entry["logprob"] >= -9999.0
        assert all(top["logprob"] >= -9999.0 for top in entry["top_logprobs"])


@pytest.mark.parametrize("check", CASES[__name__])
def test_as_other_servers_answer(server: Server, check: Case) -> None:
    check(server)
