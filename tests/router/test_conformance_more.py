"""What the suites of other servers (vLLM, SGLang) expect of tools, thoughts, forms of answers, token ids, errors
and small routes, against a scripted engine. Cases whose answer differs on purpose are marked, as in
`test_conformance.py`."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any, Final

import openai
import pytest
from router import test_conformance
from router.api_calls import TWO_CALLS, last_prompt, named_events
from router.conformance import CASES, CHAT, PROMPT, TALK, TEXT, Case, Server, case, differs, text_of
from router.harness import ANSWER, MESSAGES, VOCAB_SIZE

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


@differs("log-probabilities of tokens that the client chooses are refused: the device reports the likeliest only")
def logprobs_of_chosen_tokens(server: Server) -> None:
    assert server.answer(CHAT, logprobs=True, top_logprobs=3, logprob_token_ids=[100, 1000, 5000])["choices"]


@case
def offsets_of_tokens_in_streams_with_text_held_back(server: Server) -> None:
    fields: dict[str, Any] = {"logprobs": 0, "stop": ["here!!"], "max_tokens": 100}
    whole = server.answer(TEXT, **fields)["choices"][0]["logprobs"]["text_offset"]
    parts = [part["choices"][0]["logprobs"] for part in server.parts(TEXT, **fields)]
    assert [offset for part in parts if part for offset in part["text_offset"]] == whole


@case
def stop_strings_that_stay(server: Server) -> None:
    for path in (CHAT, TEXT):
        [choice] = server.answer(path, stop="STOP", no_stop_trim=True, max_tokens=100)["choices"]
        assert text_of(choice).endswith("STOP")


@case
def penalties_and_other_sampling_parameters(server: Server) -> None:
    fields: dict[str, Any] = {"frequency_penalty": 1.0, "presence_penalty": -0.5, "repetition_penalty": 1.1}
    fields |= {"top_k": 40, "min_p": 0.05, "top_p": 0.9, "seed": 3, "bad_words": ["word"]}
    for path in (CHAT, TEXT):
        server.answer(path, **fields)
        sampling = server.fake.behaviour.submits[-1].sampling
        for name in fields:
            if name != "bad_words":
                assert getattr(sampling, name) == fields[name], name
        for no_limit in (-1, 0):
            server.answer(path, top_k=no_limit)
            assert server.fake.behaviour.submits[-1].sampling.top_k == 0


@case
def allowed_tokens(server: Server) -> None:
    for path in (CHAT, TEXT):
        assert server.answer(path, allowed_token_ids=[5, 6])["choices"]
        server.refused(path, allowed_token_ids=[])
        server.refused(path, allowed_token_ids=[VOCAB_SIZE])
        server.refused(path, "min_tokens", min_tokens=20, max_tokens=10)


@case
def null_in_place_of_every_parameter(server: Server) -> None:
    names = "temperature top_p top_k min_p seed stop stop_token_ids logit_bias max_tokens n stream logprobs user "
    names += "presence_penalty frequency_penalty response_format stream_options ignore_eos min_tokens metadata"
    for path in (CHAT, TEXT):
        assert server.answer(path, **dict.fromkeys(names.split()))["choices"]


@case
def unknown_parameters_are_let_through(server: Server) -> None:
    for path in (CHAT, TEXT):
        assert server.answer(path, unheard_of=5)["choices"]


@case
def prompt_logprobs_do_not_go_with_streams(server: Server) -> None:
    for path in (CHAT, TEXT):
        server.refused(path, "prompt_logprobs", prompt_logprobs=1, stream=True)


# -- messages


@case
def system_messages_of_parts(server: Server) -> None:
    prompts = set()
    for content in ("Be helpful.", [{"type": "text", "text": "Be helpful."}]):
        server.answer(CHAT, messages=[{"role": "system", "content": content}, *MESSAGES])
        prompts.add(last_prompt(server.fake, server.tokenizer))
    assert len(prompts) == 1


@case
def messages_that_are_none(server: Server) -> None:
    wrong: list[Any] = [[], None, [{}], [{"role": "user"}], ["Hello"], "Hello", [{"content": "Hello"}]]
    for messages in wrong:
        answer = server.http.post(CHAT, json={"messages": messages})
        assert answer.status_code == 400, messages


@case
def a_conversation_that_ends_with_a_prefix(server: Server) -> None:
    server.say(' "name": "Mini"}')
    begun = [*TALK, {"role": "assistant", "content": "{"}]
    [choice] = server.answer(CHAT, messages=begun, continue_final_message=True)["choices"]
    assert choice["message"]["content"].strip().startswith('"name"')
    assert last_prompt(server.fake, server.tokenizer).endswith("{")


# -- token ids


@case
def token_ids_of_texts_with_emoji(server: Server) -> None:
    [choice] = server.answer(TEXT, prompt="I love coding 🚀", return_token_ids=True, max_tokens=100)["choices"]
    decode = server.tokenizer.decode
    assert "I love coding 🚀" in decode(choice["prompt_token_ids"])
    assert decode(choice["token_ids"]).startswith(choice["text"])
    assert choice["text"] == ANSWER
    [without] = server.answer(TEXT, max_tokens=5, return_token_ids=False)["choices"]
    assert without.get("token_ids") is None
    assert without.get("prompt_token_ids") is None


@case
def token_ids_and_log_probabilities_agree(server: Server) -> None:
    fields: dict[str, Any] = {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": 1}
    [choice] = server.answer(TEXT, **fields, echo=True, prompt_logprobs=1, max_tokens=8)["choices"]
    told = [int(name.removeprefix("token_id:")) for name in choice["logprobs"]["tokens"]]
    assert told == choice["prompt_token_ids"] + choice["token_ids"]
    assert len(choice["prompt_logprobs"]) == len(choice["prompt_token_ids"])
    parts = [part["choices"][0] for part in server.parts(TEXT, **fields, max_tokens=8)]
    assert parts[0]["prompt_token_ids"]
    names = [name for part in parts if part["logprobs"] for name in part["logprobs"]["tokens"]]
    ids = [token for part in parts for token in part.get("token_ids", [])]
    assert names == [f"token_id:{token}" for token in ids]


@case
def token_ids_of_prompts_come_once_in_streams(server: Server) -> None:
    first, *others = server.parts(CHAT, return_token_ids=True, max_completion_tokens=5)
    assert "Be helpful." in server.tokenizer.decode(first["prompt_token_ids"])
    assert not any("prompt_token_ids" in part for part in others)


@differs("a conversation is given as messages; token ids are for /v1/completions")
def token_ids_in_place_of_messages(server: Server) -> None:
    tokens = server.http.post("/tokenize", json={"messages": TALK}).json()["tokens"]
    made = server.answer(CHAT, messages=[], prompt_token_ids=tokens, return_token_ids=True)
    assert made["prompt_token_ids"] == tokens


@case
def token_ids_of_a_conversation_continue_it(server: Server) -> None:
    tokens = server.http.post("/tokenize", json={"messages": TALK}).json()["tokens"]
    made = server.answer(TEXT, prompt=tokens, return_token_ids=True)
    assert made["choices"][0]["prompt_token_ids"] == tokens
    assert server.answer(CHAT, return_token_ids=True)["prompt_token_ids"] == tokens


@case
def tokens_of_conversations(server: Server) -> None:
    """As the template writes them, with every combination of its switches."""
    tokenizer = server.tokenizer
    for begins, continues, special, tools in itertools.product(
        (False, True), (False, True), (False, True), (0, 1)
    ):
        if begins and continues:
            continue
        said = [*TALK, {"role": "assistant", "content": "Sure,"}] if continues else TALK
        made = server.http.post(
            "/tokenize",
            json={
                "messages": said,
                "add_generation_prompt": begins,
                "continue_final_message": continues,
                "add_special_tokens": special,
                "tools": [WEATHER] * tools,
            },
        )
        assert made.status_code == 200, made.text
        tokens = made.json()["tokens"]
        text = tokenizer.decode(tokens, skip_special_tokens=False)
        assert text.endswith("Sure,") == continues
        assert text.rstrip().endswith("<|assistant|>") == begins
        assert ("get_weather" in text) == bool(tools)
        body = {
            "add_generation_prompt": begins,
            "continue_final_message": continues,
            "add_special_tokens": special,
        }
        chat = server.answer(CHAT, messages=said, tools=[WEATHER] * tools or None, return_token_ids=True, **body)
        assert chat["prompt_token_ids"] == tokens


@case
def strings_of_tokens(server: Server) -> None:
    made = server.http.post("/tokenize", json={"prompt": PROMPT, "return_token_strs": True}).json()
    assert made["token_strs"] == [server.tokenizer.token_string(token) for token in made["tokens"]]
    plain = server.http.post("/tokenize", json={"prompt": PROMPT}).json()
    assert (plain["tokens"], plain["token_strs"]) == (made["tokens"], None)
    back = server.http.post("/detokenize", json={"tokens": made["tokens"]}).json()
    assert list(back) == ["prompt"]
    assert back["prompt"].endswith(PROMPT)


@case
def the_tokenizers_configuration(server: Server) -> None:
    told = server.http.get("/tokenizer_info").json()
    assert told["tokenizer_class"]
    assert isinstance(told["tokenizer_class"], str)
    assert told["model_max_length"] >= server.http.post("/tokenize", json={"prompt": "x"}).json()["max_model_len"]
    assert told["chat_template"].strip()
    assert all(isinstance(told[name], str) for name in ("bos_token", "eos_token") if told.get(name) is not None)


# -- errors


@case
def engines_that_fail(server: Server) -> None:
    for path in (CHAT, TEXT):
        server.fake.behaviour.fail_after = 0
        body = {"prompt": PROMPT} if path == TEXT else {"messages": TALK}
        answer = server.http.post(path, json=body)
        assert answer.status_code >= 500
        assert answer.json()["error"]["message"]
        *_, last = failed_stream(server, path)
        assert json.loads(last.removeprefix("data: "))["error"]["message"]


def failed_stream(server: Server, path: str) -> list[str]:
    """The events of a stream whose engine fails behind two tokens."""
    server.fake.behaviour.fail_after = 2
    body = {"prompt": PROMPT, "messages": TALK, "stream": True, "max_tokens": 10}
    if path == CHAT:
        del body["prompt"]
    else:
        del body["messages"]
    return [line for line in server.http.post(path, json=body).text.split("\n\n") if line]


@differs("a stream that fails ends with the error, so that `[DONE]` always means a whole answer")
def the_end_of_streams_that_fail(server: Server) -> None:
    assert failed_stream(server, CHAT)[-1] == "data: [DONE]"


@case
def errors_of_token_ids_name_them(server: Server) -> None:
    body = {"messages": TALK, "stop_token_ids": [VOCAB_SIZE + 1]}
    error = server.http.post(CHAT, json=body).json()["error"]
    assert str(VOCAB_SIZE + 1) in error["message"]
    assert re.search(rf"{VOCAB_SIZE}|{VOCAB_SIZE - 1}", error["message"])


@case
def errors_of_lengths(server: Server) -> None:
    long: list[Any] = [{"role": "user", "content": "hello " * 3000}]
    for messages, count in ((TALK, 5000), (long, 5)):
        with pytest.raises(openai.BadRequestError, match="context"):
            server.client.chat.completions.create(model="demo", messages=messages, max_tokens=count)


@case
def other_kinds_of_content(server: Server) -> None:
    for path in (CHAT, TEXT):
        kind = {"content-type": "application/x-www-form-urlencoded"}
        assert 400 <= server.http.post(path, content=b"prompt=x", headers=kind).status_code < 500


@case
def errors_of_responses(server: Server) -> None:
    answer = server.http.post("/v1/responses", json={"input": "Hi", "previous_response_id": "bad"})
    assert answer.status_code in (400, 404)
    assert {"message", "type", "code"} <= answer.json()["error"].keys()


# -- others


@case
def events_of_responses(server: Server) -> None:
    server.say("Hello there.")
    events = named_events(server.http.post("/v1/responses", json={"input": "Hi", "stream": True, "user": "me"}))
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    texts = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(texts) == "Hello there."
    assert kinds[-1] == "response.completed"
    assert {"input_tokens", "output_tokens", "total_tokens"} <= events[-1]["response"]["usage"].keys()
    whole = server.http.post("/v1/responses", json={"input": "Hi", "frequency_penalty": 1.0}).json()
    assert (whole["object"], whole["status"], whole["error"]) == ("response", "completed", None)
    assert whole["created_at"]


@case
def tokens_that_were_cached(server: Server) -> None:
    server.fake.behaviour.cached_tokens = 4
    for path in (CHAT, TEXT):
        assert server.answer(path)["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
        *_, last = server.parts(path, stream_options={"include_usage": True})
        assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 4


@case
def usage_of_several_choices_in_a_stream(server: Server) -> None:
    for path in (CHAT, TEXT):
        *_, last = server.parts(path, n=2, max_tokens=5, stream_options={"include_usage": True})
        assert last["usage"]["completion_tokens"] == 10


@case
def cards_of_models(server: Server) -> None:
    [card, *_] = server.client.models.list().data
    assert isinstance((card.model_extra or {})["max_model_len"], int)
    found = server.client.models.retrieve("demo")
    assert (found.id, (found.model_extra or {})["root"]) == ("demo", "demo")
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("non-existent-model")


@case
def small_routes(server: Server) -> None:
    for path in ("/health", "/ping", "/version", "/load", "/metrics"):
        assert server.http.get(path).status_code == 200, path
    assert isinstance(server.http.get("/version").json()["version"], str)
    assert server.http.get("/load").json()["server_load"] == 0


@case
def a_request_that_is_given_up(server: Server) -> None:
    server.fake.behaviour.hold = True
    with pytest.raises(openai.APITimeoutError):
        server.client.with_options(timeout=0.1).chat.completions.create(model="demo", messages=TALK)
    server.fake.behaviour.hold = False
    assert server.answer(CHAT, max_tokens=5)["choices"]


@pytest.mark.parametrize("check", CASES[__name__])
def test_as_other_servers_answer(server: Server, check: Case) -> None:
    check(server)


def test_the_documentation_counts_the_cases() -> None:
    every = [*CASES[test_conformance.__name__], *CASES[__name__]]
    otherwise = [each for each in every if each.marks]
    page = (Path(__file__).parents[2] / "docs/api.md").read_text(encoding="utf-8")
    section = page.split("### As other servers\n")[1].split("\n## ")[0]
    assert f"{len(every)} cases, of which {len(otherwise)} are answered" in section
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(otherwise)
    assert len(otherwise) <= len(every) // 20
