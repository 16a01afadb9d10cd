"""Every parameter of every endpoint that generates has an effect or is refused; unknown ones are named."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import httpx
import msgspec
import pytest
from router.api_calls import named_events, payloads
from router.harness import MESSAGES, wait_until
from router.schema_calls import PLAN, PLAN_OBJECT, post

from trunkline.router.api import requests
from trunkline.router.api.anthropic import MESSAGES as MESSAGES_TABLE
from trunkline.router.api.openai_items import RESPONSES
from trunkline.router.api.requests import SEEN_MAX, SeenNames
from trunkline.router.jobs.job import Job
from trunkline.router.jobs.known_parameters import KNOWN
from trunkline.router.jobs.parameter_table import UNKNOWN_CHARACTERS_MAX, UNKNOWN_MAX, Endpoint
from trunkline.router.jobs.request_models import CHAT, COMPLETIONS
from trunkline.router.service import RouterService
from trunkline.router.text.tokenizer import Tokenizer

BODIES: Final[dict[str, dict[str, Any]]] = {
    "chat": {"messages": MESSAGES, "seed": 7},
    "completions": {"prompt": "Once upon a time", "seed": 7},
    "responses": {"input": "Hello", "seed": 7, "store": False},
    "messages": {"messages": MESSAGES, "max_tokens": 50, "seed": 7},
}
PATHS: Final = {name: f"/v1/{'chat/completions' if name == 'chat' else name}" for name in BODIES}
TABLE: Final[dict[str, Endpoint[Any]]] = {
    each.name: each for each in (CHAT, COMPLETIONS, RESPONSES, MESSAGES_TABLE)
}
each_endpoint = pytest.mark.parametrize("name", sorted(TABLE))


class Probe(NamedTuple):
    """A value of a parameter, and what else is in the request, with it and without it."""

    value: Any
    beside: dict[str, Any] = {}  # noqa: RUF012 (a NamedTuple's default, never changed)


ADD: Final = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
FUNCTION: Final = {"type": "function", "function": ADD}
BEAMS: Final = {"use_beam_search": True, "n": 2}
ANSWERED: Final = [*MESSAGES, {"role": "assistant", "content": "It joins."}, *MESSAGES]
CUT: Final = {"type": "retention_ratio", "retention_ratio": 0.4}
SHARED: Final[dict[str, Probe]] = {
    "model": Probe("none"),
    "temperature": Probe(0.25),
    "top_p": Probe(0.5),
    "top_k": Probe(3),
    "min_p": Probe(0.5),
    "seed": Probe(8),
    "presence_penalty": Probe(0.5),
    "frequency_penalty": Probe(0.5),
    "repetition_penalty": Probe(1.5),
    "logit_bias": Probe({"5": 1}),
    "bad_words": Probe(["word"]),
    "allowed_token_ids": Probe([5, 6]),
    "min_tokens": Probe(2),
    "stop": Probe("STOP"),
    "stop_sequences": Probe(["STOP"]),
    "stop_regex": Probe("[A-Z]{4}"),
    "stop_token_ids": Probe([9]),
    "include_stop_str_in_output": Probe(True, {"stop": "STOP"}),
    "ignore_eos": Probe(True),
    "skip_special_tokens": Probe(False),
    "structured_outputs": Probe({"regex": "a+"}),
    "guided_json": Probe({"type": "object"}),
    "guided_regex": Probe("a+"),
    "guided_choice": Probe(["a", "b"]),
    "guided_grammar": Probe('root ::= "a"'),
    "whitespace": Probe("any", {"guided_json": {"type": "object"}}),
    "truncate_prompt_tokens": Probe(2),
    "truncation_side": Probe("right", {"truncate_prompt_tokens": 2}),
    "truncation": Probe(CUT),
    "priority": Probe(5),
    "nvext": Probe({"agent_hints": {"iat": 250}}),
    "agent_hints": Probe({"priority": 5}),
    "agent_hint": Probe({"last": True}),
    "cache_salt": Probe("s"),
    "session_id": Probe("label"),
    "prompt_cache_key": Probe("label"),
    "stream": Probe(True),
    "chat_template_kwargs": Probe({"x": 1}),
    "enable_thinking": Probe(False),
    "max_tokens": Probe(3),
    "n": Probe(2),
    "use_beam_search": Probe(True, {"n": 2}),
    "beam_width": Probe(3, BEAMS),
    "length_penalty": Probe(2.0, BEAMS),
    "early_stopping": Probe("never", BEAMS),
    "response_format": Probe({"type": "json_object"}),
    "prompt_logprobs": Probe(1),
    "prediction": Probe({"type": "content", "content": "A text."}),
    "speculation": Probe(False),
    "return_token_ids": Probe(True),
    "return_tokens_as_token_ids": Probe(True, {"logprobs": 1}),
    "return_timings": Probe(True),
    "pml": Probe(PLAN),
    "trailing": Probe("compact", {"pml": PLAN, "prompt": None}),
    "stream_options": Probe({"include_usage": True}, {"stream": True}),
}
PROBES: Final[dict[str, dict[str, Probe]]] = {
    "chat": {
        "messages": Probe([{"role": "user", "content": "Other"}]),
        "prompt": Probe(PLAN_OBJECT),
        "tools": Probe([FUNCTION]),
        "tool_choice": Probe("required", {"tools": [FUNCTION]}),
        "parallel_tool_calls": Probe(True, {"tools": [FUNCTION], "tool_choice": "required"}),
        "max_completion_tokens": Probe(3),
        "logprobs": Probe(True),
        "top_logprobs": Probe(2, {"logprobs": True}),
        "add_generation_prompt": Probe(False),
        "add_special_tokens": Probe(True),
        "continue_final_message": Probe(True, {"messages": [*MESSAGES, {"role": "assistant", "content": "So"}]}),
        "echo": Probe(
            True, {"messages": [*MESSAGES, {"role": "assistant", "content": "So"}], "continue_final_message": True}
        ),
        "drop": Probe([{"from": 0, "to": 2}], {"messages": ANSWERED}),
        "documents": Probe([{"title": "a", "text": "b"}]),
        "reasoning_effort": Probe("none"),
        "reasoning": Probe({"effort": "low"}),
        "return_tokens_as_token_ids": Probe(True, {"logprobs": True}),
        "thinking": Probe({"type": "disabled"}),
    },
    "completions": {
        "drop": Probe([{"from": 0, "to": 1}]),
        "prompt": Probe("Other"),
        "pml": Probe(PLAN, {"prompt": None}),
        "logprobs": Probe(1),
        "best_of": Probe(2),
        "echo": Probe(True),
        "add_special_tokens": Probe(False),
    },
    "responses": {
        "drop": Probe([{"from": 0, "to": 2}], {"input": ANSWERED}),
        "input": Probe("Other"),
        "instructions": Probe("Be brief."),
        "max_output_tokens": Probe(3),
        "text": Probe({"format": {"type": "json_object"}}),
        "tools": Probe([{"type": "function", **ADD}]),
        "tool_choice": Probe("required", {"tools": [{"type": "function", **ADD}]}),
        "parallel_tool_calls": Probe(True, {"tools": [{"type": "function", **ADD}], "tool_choice": "required"}),
        "metadata": Probe({"a": "b"}),
        "store": Probe(True),
        "previous_response_id": Probe("resp_none"),
        "conversation": Probe("conv_none"),
        "background": Probe(True),
        "include": Probe(["message.output_text.logprobs"]),
        "top_logprobs": Probe(2),
        "reasoning": Probe({"effort": "none"}),
        "context_management": Probe(
            [{"type": "compaction", "compact_threshold": 1}],
            {"input": [*MESSAGES, {"role": "assistant", "content": "It joins."}, *MESSAGES]},
        ),
    },
    "messages": {
        "messages": Probe([{"role": "user", "content": "Other"}]),
        "system": Probe("Be brief."),
        "tools": Probe([{"name": "add", "input_schema": ADD["parameters"]}]),
        "tool_choice": Probe({"type": "any"}, {"tools": [{"name": "add", "input_schema": ADD["parameters"]}]}),
        "thinking": Probe({"type": "disabled"}),
        "output_config": Probe({"effort": "low"}),
        "cache_control": Probe({"type": "ephemeral"}),
        "context_management": Probe({"edits": []}),
        "drop": Probe([{"from": 0, "to": 2}], {"messages": ANSWERED}),
        "mcp_servers": Probe([{"name": "x"}]),
        "container": Probe({"id": "x"}),
        "metadata": Probe({"user_id": "session_" + "0" * 36}),
        "output_format": Probe({"type": "json_schema", "schema": {"type": "object"}}),
    },
}
REFUSED_VALUES: Final = ("model", "previous_response_id", "conversation", "background", "documents")
"""Parameters whose probe is refused: what it names does not exist, or is not available beside the rest."""
ELSEWHERE: Final = {
    "exact": "test_edited_prompts.py",
    "include_reasoning": "test_thoughts.py",
    "separate_reasoning": "test_thoughts.py",
    "thinking_budget": "test_thoughts.py",
    "document_modules": "test_document_modules.py",
}
"""Parameters that need a model which thinks, or long documents, with the tests that prove their effect."""


class Seen(NamedTuple):
    """What comes of a request."""

    status: int
    reply: str
    jobs: list[Job]
    options: list[Any]
    """Further arguments of the chat template and of the tokenizer."""


@pytest.fixture
def spied(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Jobs and options of the requests from now on."""
    seen = Seen(0, "", [], [])
    generate, render, encode = RouterService.generate, Tokenizer.rendered_chat, Tokenizer.encode_async

    def generated(service: RouterService, job: Job) -> Any:
        seen.jobs.append(msgspec.structs.replace(job, remembered=None))  # what was asked before is no parameter
        return generate(service, job)

    def rendered(tokenizer: Tokenizer, *given: Any, **options: Any) -> Any:
        seen.options.append({**options, "before": None})  # what was asked before is no parameter
        return render(tokenizer, *given, **options)

    def encoded(tokenizer: Tokenizer, *given: Any, **options: Any) -> Any:
        seen.options.append(options)
        return encode(tokenizer, *given, **options)

    monkeypatch.setattr(Tokenizer, "encode_async", encoded)
    monkeypatch.setattr(RouterService, "generate", generated)
    monkeypatch.setattr(Tokenizer, "rendered_chat", rendered)
    return seen


_NAMES: Final = re.compile(r'"(\w+)":')
_CHANGING: Final = re.compile(r'"(id|item_id|created|created_at|completed_at|call_id)":\s*("[^"]*"|\d+)')


def send(http: httpx.Client, spied: Seen, name: str, fields: dict[str, Any]) -> Seen:
    spied.jobs.clear()
    spied.options.clear()
    answer = http.post(PATHS[name], json={key: value for key, value in fields.items() if value is not None})
    reply = _CHANGING.sub("", answer.text)
    if answer.headers["content-type"].startswith("text/event-stream"):  # how it is cut into events varies
        reply = " ".join(sorted(set(_NAMES.findall(reply))))
    return Seen(answer.status_code, reply, list(spied.jobs), list(spied.options))


def error_of(answer: httpx.Response, name: str) -> str:
    """The message, with the parameter's name."""
    error = answer.json()["error"]
    return str(error["message"]) if name == "messages" else f"{error['message']} `{error['param']}`"


@each_endpoint
def test_each_parameter_has_an_effect(http: httpx.Client, spied: Seen, name: str) -> None:
    post(http)
    probes = SHARED | PROBES[name]
    assert send(http, spied, name, BODIES[name]) == send(http, spied, name, BODIES[name]), "nothing is drawn"
    for parameter in TABLE[name].parameters:
        if parameter.name in ELSEWHERE:
            continue
        assert parameter.name in probes, f"{parameter.name} needs a probe: a value that has an effect"
        probe = probes[parameter.name]
        body = BODIES[name] | probe.beside
        without = send(http, spied, name, body)
        assert without.status == 200 or parameter.name == "pml", (parameter.name, without.reply)
        if probe.beside:
            assert send(http, spied, name, body) == without, f"nothing is drawn beside {parameter.name}"
        with_it = send(http, spied, name, body | {parameter.name: probe.value})
        assert with_it != without, f"{parameter.name} has no effect at {PATHS[name]}"
        if with_it.status != 200:
            assert parameter.name in REFUSED_VALUES, with_it


def test_parameters_that_are_proven_elsewhere_are_mentioned_there(request: pytest.FixtureRequest) -> None:
    for parameter, file in ELSEWHERE.items():
        if any(parameter in (row.name for row in endpoint.parameters) for endpoint in TABLE.values()):
            assert parameter in (request.path.parent / file).read_text(encoding="utf-8"), parameter


@each_endpoint
def test_each_parameter_has_a_row_in_the_documentation(name: str) -> None:
    for parameter in TABLE[name].parameters:
        assert parameter.meaning or parameter.allowed, parameter


@each_endpoint
def test_what_is_known_at_one_endpoint_is_known_at_all(name: str) -> None:
    names = {spelling for each in TABLE.values() for row in each.parameters for spelling in (row.name, *row.also)}
    names |= {spelling for entry in KNOWN for spelling in entry.names}
    assert not [spelling for spelling in sorted(names) if TABLE[name].read({spelling: None}).unknown]


@each_endpoint
def test_other_spellings_mean_the_same_and_errors_name_them(http: httpx.Client, spied: Seen, name: str) -> None:
    probes = SHARED | PROBES[name]
    for spelling, key in TABLE[name].spellings.items():
        if key in ELSEWHERE:
            continue
        probe = probes[key]
        body = BODIES[name] | probe.beside
        body.pop(key, None)
        assert send(http, spied, name, body | {spelling: probe.value}) == send(
            http, spied, name, body | {key: probe.value}
        ), (spelling, key)
        bad = http.post(PATHS[name], json=body | {spelling: [{}]})
        assert (bad.status_code, f"`{spelling}`" in error_of(bad, name)) == (400, True), (spelling, bad.text)
        both = http.post(PATHS[name], json=body | {key: probe.value, spelling: probe.value})
        assert (both.status_code, f"`{spelling}`" in error_of(both, name)) == (400, True), (spelling, both.text)
        neither = http.post(PATHS[name], json=BODIES[name] | {spelling: None})
        assert neither.status_code == 200, (spelling, neither.text)


def test_errors_of_the_engine_and_of_translations_name_the_clients_spelling(http: httpx.Client) -> None:
    for name, body, told in (
        ("chat", {"max_new_tokens": 100_000}, "max_new_tokens"),
        ("completions", {"min_new_tokens": 30, "max_new_tokens": 20}, "min_new_tokens"),
        ("responses", {"max_tokens": 100_000}, "max_tokens"),
        ("responses", {"regex": "a", "text": {"format": {"type": "json_object"}}}, "regex"),
        ("messages", {"stop_words": [""]}, "stop_words"),
        ("messages", {"stop": ["x"] * 99}, "stop"),
        ("messages", {"stop_sequences": [""]}, "stop_sequences"),
        ("messages", {"ebnf": "unsatisfiable"}, "ebnf"),
        ("chat", {"regex": "unsatisfiable"}, "regex"),
    ):
        answer = http.post(PATHS[name], json=BODIES[name] | body)
        assert (answer.status_code, f"`{told}`" in error_of(answer, name)) == (400, True), (body, answer.text)


@each_endpoint
def test_hints_change_nothing(http: httpx.Client, spied: Seen, name: str) -> None:
    without = send(http, spied, name, BODIES[name])
    for spelling, entry in TABLE[name].known:
        if entry.neutral is None:
            assert send(http, spied, name, BODIES[name] | {spelling: {"a": [1]}}) == without, spelling


@each_endpoint
def test_what_is_refused(http: httpx.Client, spied: Seen, name: str) -> None:
    without = send(http, spied, name, BODIES[name])
    for spelling, entry in TABLE[name].known:
        if entry.neutral is None:
            continue
        answer = http.post(PATHS[name], json=BODIES[name] | {spelling: {"a": 1}})
        assert (answer.status_code, f"`{spelling}`" in error_of(answer, name)) == (400, True), (
            spelling,
            answer.text,
        )
        if name != "messages":
            assert answer.json()["error"]["code"] == "unsupported_parameter", spelling
        for neutral in (None, [], *entry.neutral):
            assert send(http, spied, name, {**BODIES[name], spelling: neutral}) == without, (spelling, neutral)


@each_endpoint
def test_unknown_parameters_are_named(http: httpx.Client, name: str) -> None:
    body = BODIES[name] | {"frobnicate": 1, "max_tokns": 5}
    told = [f"`{key}` is not a known parameter and was ignored" for key in ("frobnicate", "max_tokns")]
    assert http.post(PATHS[name], json=body).json()["warnings"] == told
    assert "warnings" not in http.post(PATHS[name], json=BODIES[name]).json()
    stream = http.post(PATHS[name], json=body | {"stream": True})
    assert list(_warnings(stream)) == [told]
    many = {f"{'x' * 100}{number}": 1 for number in range(100)} | {f"y{number}": 1 for number in range(100)}
    warnings = http.post(PATHS[name], json=BODIES[name] | many).json()["warnings"]
    assert len(warnings) == UNKNOWN_MAX
    assert all(len(warning) < UNKNOWN_CHARACTERS_MAX + 50 for warning in warnings)


EDIT: Final = {
    "context_management": {
        "edits": [
            {
                "type": "clear_tool_uses_20250919",
                "exclude_tool": ["read"],
                "trigger": {"type": "tool_uses", "value": 3},
                "clear_at_least": None,
            }
        ]
    }
}


def test_unknown_fields_of_objects_are_named(http: httpx.Client) -> None:
    for name, fields, told in (
        ("chat", {"thinking": {"type": "disabled", "budget": 5}}, "thinking.budget"),
        ("chat", {"stream_options": {"include_obfuscation": False, "usage": None}, "stream": True}, None),
        ("completions", {"stream_options": {"include_usge": True}, "stream": True}, "stream_options.include_usge"),
        ("messages", {"output_config": {"efort": "low"}}, "output_config.efort"),
        ("responses", {"reasoning": {"effort": "low", "sumary": "auto"}}, "reasoning.sumary"),
        ("messages", {"context_management": {"edit": []}}, "context_management.edit"),
        ("messages", EDIT | {"tools": []}, "context_management.edits[0].exclude_tool"),
    ):
        answer = http.post(PATHS[name], json=BODIES[name] | fields)
        assert answer.status_code == 200, answer.text
        found = list(_warnings(answer)) if "stream" in fields else [answer.json().get("warnings", [])]
        sentence = f"`{told}` is not a known parameter and was ignored"
        assert found == ([] if told is None else [[sentence]]), name


def test_what_a_response_says_of_verbosity(http: httpx.Client) -> None:
    for verbosity, told in (("low", ["`text.verbosity` is not applied"]), ("medium", None), (None, None)):
        body = BODIES["responses"] | {"text": {"verbosity": verbosity}}
        assert http.post(PATHS["responses"], json=body).json().get("warnings") == told
    bad = http.post(PATHS["responses"], json=BODIES["responses"] | {"text": {"verbosity": "huge"}})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "text.verbosity")


def test_a_background_response_names_unknown_parameters_when_it_is_queued(http: httpx.Client) -> None:
    body = {"input": "Hi", "background": True, "frobnicate": 1}
    queued = http.post(PATHS["responses"], json=body).json()
    assert queued["warnings"] == ["`frobnicate` is not a known parameter and was ignored"]
    http.post(f"{PATHS['responses']}/{queued['id']}/cancel")
    wait_until(lambda: http.delete(f"{PATHS['responses']}/{queued['id']}").status_code == 200)


def _warnings(stream: httpx.Response) -> Iterator[Any]:
    """The lists of warnings in a stream's events, wherever they are."""
    for payload in named_events(stream) if stream.text.startswith("event:") else payloads(stream):
        for part in (payload, payload.get("response"), payload.get("message")):
            if isinstance(part, dict) and "warnings" in part:
                yield part["warnings"]


def test_unknown_parameters_are_logged_once_and_not_without_end(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = SeenNames(limit=3)
    assert [seen.add(name) for name in "aabcd"] == [True, False, True, True, False]
    assert not seen.add("d")
    assert SEEN_MAX <= 1000
    logged: list[str] = []
    monkeypatch.setattr(requests._log, "warning", lambda event, parameter, endpoint: logged.append(parameter))
    for _ in range(3):
        http.post(PATHS["chat"], json=BODIES["chat"] | {"an_unheard_of_key": 1})
    assert logged == ["an_unheard_of_key"]


def test_which_end_of_a_prompt_is_kept(http: httpx.Client, spied: Seen) -> None:
    ids = list(range(20, 40))
    for side, kept in (("left", ids[-5:]), ("right", ids[:5]), (None, ids[-5:])):
        fields = {"truncate_prompt_tokens": 5, "truncation_side": side}
        assert send(http, spied, "completions", {"prompt": ids, **fields}).jobs[0].prompt == kept
        several = send(http, spied, "completions", {"prompt": [ids, ids[::-1]], **fields})
        assert sorted(several.jobs[1].prompt) == sorted(ids[-5:] if side == "right" else ids[:5])
        whole = send(http, spied, "chat", BODIES["chat"]).jobs[0].prompt
        cut = send(http, spied, "chat", BODIES["chat"] | fields).jobs[0].prompt
        assert cut == (whole[:5] if side == "right" else whole[-5:])


def test_an_endpoint_has_each_name_once() -> None:
    for endpoint in TABLE.values():
        names = [row.name for row in endpoint.parameters] + list(endpoint.spellings)
        names += [spelling for spelling, _ in endpoint.known]
        assert sorted(names) == sorted(set(names)), endpoint.name


def test_warnings_do_not_outlive_their_request(http: httpx.Client) -> None:
    body = BODIES["chat"] | {"frobnicate": 1}
    assert "warnings" in http.post(PATHS["chat"], json=body).json()
    assert "warnings" not in msgspec.json.decode(http.post(PATHS["chat"], json=BODIES["chat"]).content)
    assert json.dumps(CHAT.model.model_validate(BODIES["chat"]).model_dump()).count("unknown") == 0
