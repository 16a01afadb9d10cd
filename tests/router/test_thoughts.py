"""What a model thinks before it answers comes out apart from its answer, in every API, however it is cut."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest
from router.api_calls import last_prompt, named_events, payloads, say, without_repeats
from router.fake_controller import FakeController
from router.harness import EOS, running
from router.model_folders import write_family
from seeds import seeds

from trunkline.controller.messages import Grammar
from trunkline.router.text.reasoning_styles import HARMONY as CHANNELS
from trunkline.router.text.reasoning_styles import THINK, ReasoningStyle, ThoughtState, detect_reasoning
from trunkline.router.text.tokenizer import Tokenizer
from trunkline.router.text.tool_styles import MARKERS, ToolStyle
from trunkline.router.tools.pieces import CallArguments, CallStart, Piece, TextPiece, ThoughtPiece, joined
from trunkline.router.tools.plan import ToolPlan, prepare_tools
from trunkline.worker.grammar.automaton import Vocabulary

TOOLS: Final[list[Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        },
    }
]
CALL: Final = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
HI: Final = [{"role": "user", "content": "Hi"}]
STRICT: Final[list[Any]] = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
HARMONY: Final = (
    "<|channel|>analysis<|message|>Hm <b>.<|end|><|start|>assistant<|channel|>final<|message|>Two < three."
)


def plan(reasoning: ReasoningStyle | None = THINK, style: ToolStyle = ToolStyle(), choice: Any = None) -> ToolPlan:  # noqa: B008 (frozen)
    return prepare_tools(TOOLS, choice, None, style, reasoning)


def told(pieces: list[Piece]) -> list[str]:
    """Thoughts in brackets, names of calls with their arguments, texts."""
    result: list[str] = []
    for piece in pieces:
        if isinstance(piece, CallArguments):
            result[-1] += piece.text
        else:
            result.append(f"({piece.text})" if isinstance(piece, ThoughtPiece) else getattr(piece, "text", "add|"))
    return result


CASES: Final[list[tuple[ThoughtState, str, list[str]]]] = [
    ("possible", "<think>\nWell, 1 < 2.\n\n</think>\n\nYes. ", ["(Well, 1 < 2.)", "Yes. "]),
    ("inside", "\nWell </thin </think>Yes", ["(Well </thin)", "Yes"]),
    ("inside", "<think>\nagain</think> Yes", ["(again)", "Yes"]),
    ("inside", "no end </thi", ["(no end </thi)"]),
    ("possible", " Yes <think>no</think>", [" Yes <think>no</think>"]),
    ("possible", "<thi", ["<thi"]),
    ("possible", "<think>\n\n</think>\n\nYes", ["Yes"]),
    ("closed", "Yes</think>", ["Yes</think>"]),
    ("inside", f"Call {CALL} it.\n</think>\n\n{CALL}", [f"(Call {CALL} it.)", 'add|{"a": 1}']),
    (
        "possible",
        f"<think>x</think>So:\n{CALL}\nDone </think>",
        ["(x)", "So:\n", 'add|{"a": 1}', "\nDone </think>"],
    ),
    ("inside", "", []),
    ("possible", "  ", ["  "]),
]


@pytest.mark.parametrize(("state", "text", "expected"), CASES)
def test_thoughts_are_told_apart_however_they_are_cut(state: ThoughtState, text: str, expected: list[str]) -> None:
    for size in (len(text) or 1, 1, 2, 3, 5):
        parser = plan().make_parser(state=state)
        assert parser is not None
        pieces = [piece for at in range(0, len(text), size) for piece in parser.feed(text[at : at + size])]
        assert told(joined([*pieces, *parser.finish()])) == expected, size


MARKED: Final[list[tuple[ThoughtState, str, list[str]]]] = [
    ("possible", "<think>\nHm.</think>\n<response>\nYes. </response>\n", ["(Hm.)", "Yes."]),
    (
        "possible",
        "<think>Hm.</think><response>a </resp b</response> c</response>",
        ["(Hm.)", "a </resp b</response> c"],
    ),
    ("inside", f"Hm.</think><response>So: {CALL}</response>", ["(Hm.)", "So: ", 'add|{"a": 1}']),
    ("inside", "Hm.</think>\n<resp", ["(Hm.)", "<resp"]),
    ("possible", "Yes </response>", ["Yes </response>"]),
    ("closed", "<response>Yes</response>", ["<response>Yes</response>"]),
]


@pytest.mark.parametrize(("state", "text", "expected"), MARKED)
def test_marks_around_answers_are_dropped(state: ThoughtState, text: str, expected: list[str]) -> None:
    style = detect_reasoning("auto", "<think></think><response></response>", [], [])
    for size in (len(text), 1, 2, 3, 5):
        parser = plan(style).make_parser(state=state)
        assert parser is not None
        pieces = [piece for at in range(0, len(text), size) for piece in parser.feed(text[at : at + size])]
        assert told(joined([*pieces, *parser.finish()])) == expected, size


@pytest.mark.parametrize(
    "text", ["<thi", "<think>x</think><respo", "<think>x</think><response>y</respon", "<think>x</thi"]
)
def test_half_a_mark_is_no_text(text: str) -> None:
    style = detect_reasoning("auto", "<think></think><response></response>", [], [])
    parser = plan(style).make_parser()
    assert parser is not None
    pieces = joined([*parser.feed(text), *parser.finish(cut=True)])
    assert "".join(piece.text for piece in pieces if isinstance(piece, TextPiece)) == ("y" if "y" in text else "")


@pytest.mark.parametrize("seed", seeds(3))
def test_any_cut_gives_the_same(seed: int) -> None:
    draw = random.Random(seed)
    fragments = ["<think>", "</think>", "<thi", "</", "nk>", " ", "\n", "é", "x", CALL, "<tool_call>", "{"]
    for _ in range(300):
        text = "".join(draw.choices(fragments, k=draw.randint(0, 9)))
        state: ThoughtState = draw.choice(("inside", "possible", "closed"))
        results = []
        for cut in (len(text) + 1, 1, draw.randint(1, 7)):
            numbers = itertools.count()
            parser = plan().make_parser(lambda: f"id{next(numbers)}", state)  # noqa: B023 (used in this turn)
            assert parser is not None
            pieces = [piece for at in range(0, len(text), cut) for piece in parser.feed(text[at : at + cut])]
            results.append(joined([*pieces, *parser.finish()]))
        assert results[0] == results[1] == results[2], (state, text)


@pytest.mark.parametrize(
    ("option", "template", "tokens", "expected"),
    [
        ("auto", "{{ '<think>' }}", [], "</think>"),
        ("auto", "{{ content.split('</think>') }}", [], "</think>"),
        ("auto", "{{ messages }}", ["<think>", "</think>"], "</think>"),
        ("auto", "{{ messages }}", [], None),
        ("auto", None, ["<think>", "</think>"], None),
        ("auto", "[THINK]", [], "[/THINK]"),
        ("auto", "<|channel|>final<|message|>", [], ""),
        ("auto", "Here is my thought process: … Here is my response:", [], "Here is my response:"),
        ("none", "{{ '<think>' }}", [], None),
        ("qwen3", "{{ messages }}", [], "</think>"),
    ],
)
def test_a_style_is_found_by_itself(option: str, template: str | None, tokens: list[str], expected: str) -> None:
    found = detect_reasoning(option, template, tokens, tokens)
    assert (found and found.end) == expected
    if found is not None and tokens:
        assert found.special == {"<think>", "</think>"}


def test_where_an_answer_begins() -> None:
    assert THINK.state("<|assistant|><think>\n") == "inside"
    assert THINK.state("<|assistant|><think>\n\n</think>\n\n") == "closed"
    assert THINK.state("<|assistant|>") == "possible"
    assumed = detect_reasoning("deepseek_r1", "", [], [])
    assert assumed is not None
    assert assumed.state("<|assistant|>") == "inside"


# -- whole requests, with tokenizers and templates in the forms of two families


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_family(tmp_path_factory.mktemp(name), name) for name in ("qwen3", "gpt-oss")}


@pytest.fixture
def served(request: pytest.FixtureRequest, families: dict[str, Path], place: Path) -> Iterator[Any]:
    """A router with the family's model, its controller, its tokenizer, and a client."""
    tokenizer = Tokenizer(families[request.param])
    path = str(families[request.param])
    with running(place, tokenizer, model_path=path) as (router, [fake]), router.client() as http:
        yield http, fake, tokenizer
    tokenizer.close()


Served = tuple[httpx.Client, FakeController, Tokenizer]
qwen3 = pytest.mark.parametrize("served", ["qwen3"], indirect=True)
gpt_oss = pytest.mark.parametrize("served", ["gpt-oss"], indirect=True)


@qwen3
@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_with_a_thought_and_a_call(served: Served, stream: bool) -> None:
    http, fake, tokenizer = served
    [ids] = say(fake, tokenizer, f"<think>\nHm, é.\n</think>\n\nSo:\n{CALL}")
    body = {"messages": HI, "tools": TOOLS, "stream": stream}
    if not stream:
        answer = http.post("/v1/chat/completions", json=body).json()
        message = answer["choices"][0]["message"]
        assert (message["reasoning_content"], message["reasoning"]) == ("Hm, é.", "Hm, é.")
        assert (message["content"], len(message["tool_calls"])) == ("So:\n", 1)
        usage = answer["usage"]
    else:
        parts = payloads(
            http.post("/v1/chat/completions", json=body | {"stream_options": {"include_usage": True}})
        )
        deltas = [choice["delta"] for part in parts for choice in part["choices"]]
        kinds = [
            name for delta in deltas for name in ("reasoning_content", "content", "tool_calls") if delta.get(name)
        ]
        assert without_repeats(kinds) == ["reasoning_content", "content", "tool_calls"]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm, é."
        assert "".join(delta.get("reasoning", "") for delta in deltas) == "Hm, é."
        usage = parts[-1]["usage"]
    end = tokenizer.encode("</think>", add_special_tokens=False)
    assert len(end) == 1
    assert usage["completion_tokens_details"] == {"reasoning_tokens": ids.index(end[0]) + 1}


@qwen3
def test_what_a_request_says_about_thoughts(served: Served) -> None:
    http, fake, tokenizer = served

    def ask(text: str, **fields: Any) -> dict[str, Any]:
        say(fake, tokenizer, text)
        answer = http.post("/v1/chat/completions", json={"messages": HI, **fields})
        assert answer.status_code == 200, answer.text
        message: dict[str, Any] = answer.json()["choices"][0]["message"]
        return message

    assert ask("<think>x</think>y", include_reasoning=False).keys() >= {"content"}
    assert "reasoning_content" not in ask("<think>x</think>y", include_reasoning=False)
    assert "reasoning_content" not in ask("<think>x</think>y", reasoning={"exclude": True})
    assert "reasoning_content" in ask("<think>x</think>y", reasoning={"exclude": True}, include_reasoning=True)
    assert ask("<think>x</think>y", separate_reasoning=False)["content"] == "<think>x</think>y"
    for fields in (
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
        {"reasoning": {"effort": "none"}},
        {"reasoning": {"enabled": False, "effort": "high"}},
        {"reasoning": {"enabled": True}, "reasoning_effort": "none"},
    ):
        assert ask("y</think>", **fields)["content"] == "y</think>"
        assert last_prompt(fake, tokenizer).endswith("<think>\n\n</think>\n\n")
    history = [*HI, {"role": "assistant", "content": "y", "reasoning_content": "why"}, *HI]
    ask("z", messages=history)
    assert "<think>\nwhy\n</think>\n\ny" in last_prompt(fake, tokenizer)


@qwen3
@pytest.mark.parametrize("stream", [False, True])
def test_thinking_blocks_of_messages(served: Served, stream: bool) -> None:
    http, fake, tokenizer = served
    say(fake, tokenizer, "<think>\nHm.\n</think>\n\nYes.")
    body = {
        "max_tokens": 90,
        "messages": HI,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "stream": stream,
    }
    answer = http.post("/v1/messages", json=body)
    if not stream:
        thought, text = answer.json()["content"]
        assert (thought["type"], thought["thinking"]) == ("thinking", "Hm.")
        assert thought["signature"]
        assert text == {"type": "text", "text": "Yes."}
        again = [*HI, {"role": "assistant", "content": [thought, text]}, *HI]
        assert http.post("/v1/messages", json=body | {"messages": again}).status_code == 200
        assert "<think>\nHm.\n</think>\n\nYes." in last_prompt(fake, tokenizer)
        return
    events = named_events(answer)
    kinds = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
    assert without_repeats(kinds) == ["thinking_delta", "signature_delta", "text_delta"]
    starts = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert starts == ["thinking", "text"]


@qwen3
@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_thinking_in_ollamas_api(served: Served, path: str) -> None:
    http, fake, tokenizer = served
    body: dict[str, Any] = {"messages": HI} if path == "/api/chat" else {"prompt": "Hi"}
    say(fake, tokenizer, "<think>\nHm.\n</think>\n\nYes.")
    parts = [json.loads(line) for line in http.post(path, json=body | {"think": "low"}).text.splitlines()]
    parts.append(http.post(path, json=body | {"stream": False}).json())
    told = [part.get("message", part) for part in parts]
    key = "content" if path == "/api/chat" else "response"
    assert (told[-1]["thinking"], told[-1][key]) == ("Hm.", "Yes.")
    assert "".join(part.get("thinking", "") + part[key] for part in told[:-1]) == "Hm.Yes."
    http.post(path, json=body | {"think": False})
    assert last_prompt(fake, tokenizer).endswith("<think>\n\n</think>\n\n")


@qwen3
@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_items_of_responses(served: Served, stream: bool) -> None:
    http, fake, tokenizer = served
    say(fake, tokenizer, "<think>\nHm.\n</think>\n\nYes.")
    body = {"input": "Hi", "reasoning": {"effort": "high"}, "include": ["reasoning.encrypted_content"]}
    answer = http.post("/v1/responses", json=body | {"stream": stream})
    if stream:
        events = named_events(answer)
        kinds = without_repeats([event["type"] for event in events])
        assert kinds.index("response.reasoning_text.delta") < kinds.index("response.output_text.delta")
        response = events[-1]["response"]
    else:
        response = answer.json()
    thought, message = response["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["content"][0]["text"] == "Yes."
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 3
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": thought["encrypted_content"]}
    for item in (thought, sealed):
        given = [{"role": "user", "content": "Hi"}, item, {"role": "assistant", "content": "Yes."}, *HI]
        assert http.post("/v1/responses", json={"input": given}).status_code == 200
        assert "<think>\nHm.\n</think>\n\nYes." in last_prompt(fake, tokenizer)
    stored = http.post("/v1/responses", json={"input": "And?", "previous_response_id": response["id"]})
    assert stored.status_code == 200, stored.text
    assert "<think>\nHm.\n</think>\n\nYes." in last_prompt(fake, tokenizer)


@gpt_oss
def test_channels(served: Served) -> None:
    http, fake, tokenizer = served
    say(fake, tokenizer, HARMONY)
    message = http.post("/v1/chat/completions", json={"messages": HI}).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm <b>.", "Two < three.")
    call = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'
    say(fake, tokenizer, call)
    choice = http.post("/v1/chat/completions", json={"messages": HI, "tools": TOOLS}).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}


def accepts(folder: Path, tokenizer: Tokenizer, grammar: Grammar, text: str) -> bool:
    """Whether the engine lets a model write a text, and the end token after it."""
    vocabulary = Vocabulary(folder, tokenizer.vocab_size)
    matcher = vocabulary.compile(grammar.kind, grammar.text, spaced=grammar.spaced).matcher([EOS])
    allowed = np.zeros(-(-vocabulary.size // 32), np.int32)
    for token in [*tokenizer.encode(text, add_special_tokens=False), EOS]:
        matcher.fill(allowed)
        if not allowed.view(np.uint8)[token // 8] >> token % 8 & 1:
            return False
        matcher.accept([token])
    return True


SCHEMA: Final = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
GRAMMARS: Final = [
    ({"type": "json_object"}, '{"n": 1}', "1"),
    ({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, '{"n": 1}', '{"n": "one"}'),
]


@qwen3
@pytest.mark.parametrize(("form", "right", "wrong"), GRAMMARS)
def test_a_grammar_begins_behind_the_thought(
    served: Served, families: dict[str, Path], form: Any, right: str, wrong: str
) -> None:
    http, fake, tokenizer = served

    def grammar(**fields: Any) -> Grammar:
        assert http.post("/v1/chat/completions", json={"messages": HI, **fields}).status_code == 200
        found = fake.behaviour.submits[-1].grammar
        assert found is not None
        return found

    def check(found: Grammar, text: str) -> bool:
        return accepts(families["qwen3"], tokenizer, found, text)

    free = grammar(response_format=form)
    assert check(free, right)
    assert check(free, f"<think>\nany {{ text\n</think>\n\n{right}")
    assert not check(free, wrong)
    assert not check(free, f"<think>\nx\n</think>\n\n{wrong}")
    closed = grammar(response_format=form, chat_template_kwargs={"enable_thinking": False})
    assert check(closed, right)
    assert not check(closed, f"<think>\nx\n</think>\n\n{right}")
    demanded = grammar(tools=TOOLS, tool_choice="required")
    assert check(demanded, f"<think>\nx\n</think>\n\n{CALL}")
    assert not check(demanded, "<think>\nx\n</think>\n\nNo.")
    choice = grammar(guided_choice=["yes", "no"])
    assert check(choice, "<think>x</think>no")
    assert not check(choice, "<think>x</think>maybe")
    unseparated = grammar(response_format=form, separate_reasoning=False)
    assert check(unseparated, f"<think>any {{ text</think>{right}")
    assert not check(unseparated, f"<think>x</think>{wrong}")
    regex = grammar(guided_regex="[a-c]+")
    assert check(regex, "<think>x</think>abc")
    assert not check(regex, "<think>x</think>d")


@qwen3
def test_a_call_or_json_behind_the_thought(served: Served, families: dict[str, Path]) -> None:
    http, fake, tokenizer = served
    body = {"messages": HI, "tools": TOOLS, "response_format": GRAMMARS[1][0]}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    grammar = fake.behaviour.submits[-1].grammar
    assert grammar is not None
    for text in (CALL, '{"n": 1}', f"\n<think>\n{CALL} {{\n</think>\n\n{CALL}", '<think>x</think>{"n": 1}'):
        assert accepts(families["qwen3"], tokenizer, grammar, text), text
    for text in ("No.", "<think>x</think>No.", f'<think>x</think>{{"n": 1}}{CALL}', f'{CALL}{{"n": 1}}'):
        assert not accepts(families["qwen3"], tokenizer, grammar, text), text


GPT_OSS: Final = ToolStyle("harmony", frozenset(MARKERS["harmony"]))
CHANNEL: Final = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")
BUDGETED: Final[list[tuple[str, ToolPlan, str, str]]] = [
    ("qwen3", plan(), "<think>", "</think>"),
    ("qwen3", prepare_tools(STRICT, None, None, ToolStyle(), THINK), "<think>", "</think>"),
    (
        "gpt-oss",
        plan(CHANNELS, ToolStyle("harmony", frozenset(MARKERS["harmony"]))),
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant",
    ),
]


@pytest.mark.parametrize(("family", "told_plan", "begin", "end"), BUDGETED)
@pytest.mark.parametrize("wanted", [None, Grammar("json_schema", json.dumps(SCHEMA), "response_format")])
def test_a_thought_keeps_to_its_budget(
    families: dict[str, Path], family: str, told_plan: ToolPlan, begin: str, end: str, wanted: Grammar | None
) -> None:
    tokenizer = Tokenizer(families[family])
    answer = '{"n": 1}' if wanted is not None else "Free text < of any { kind."
    if family == "gpt-oss":
        answer = f"<|channel|>final<|message|>{answer}"
    for thought in ("", "Hm", "Well, 1 < 2 { and so on.\n\nI think that is it"):
        count = len(tokenizer.encode(thought, add_special_tokens=False))
        for budget in (0, count - 1, count, count + 1):
            if budget < 0:
                continue
            grammar = told_plan.grammar(wanted, "possible", budget)
            assert grammar is not None
            text = f"{begin}{thought}{end}{answer}"
            assert accepts(families[family], tokenizer, grammar, text) == (budget >= count), (thought, budget)
            if begin == "<think>":
                inside = told_plan.grammar(wanted, "inside", budget)
                assert inside is not None
                text = f"{thought}{end}{answer}"
                assert accepts(families[family], tokenizer, inside, text) == (budget >= count), (thought, budget)
    tokenizer.close()
    closed = told_plan.grammar(wanted, "closed", 5)
    if begin == "<think>" and wanted is None:
        assert (closed is None) == (told_plan.functions[0].strict is False)


@qwen3
def test_budgets_in_every_api(served: Served) -> None:
    http, fake, _ = served
    chat, messages = {"messages": HI}, {"messages": HI, "max_tokens": 64}
    for path, body in (
        ("/v1/chat/completions", chat | {"thinking_budget": 7}),
        ("/v1/chat/completions", chat | {"thinking_token_budget": 7}),
        ("/v1/chat/completions", chat | {"thinking": {"type": "enabled", "budget_tokens": 7}}),
        ("/v1/chat/completions", chat | {"reasoning": {"max_tokens": 7}}),
        ("/v1/chat/completions", chat | {"reasoning": {"max_tokens": 9}, "thinking_budget": 7}),
        ("/v1/messages", messages | {"thinking": {"type": "enabled", "budget_tokens": 7}}),
        ("/v1/responses", {"input": "Hi", "reasoning": {"max_tokens": 7}}),
        ("/v1/responses", {"input": "Hi", "thinking_budget": 7}),
    ):
        assert http.post(path, json=body).status_code == 200
        grammar = fake.behaviour.submits[-1].grammar
        assert grammar is not None
        assert '"max_tokens":7' in grammar.text
    for fields in ({"thinking_budget": 8, "max_tokens": 8}, {"thinking_budget": 7, "enable_thinking": False}):
        assert http.post("/v1/chat/completions", json=chat | fields).status_code == 200
        assert fake.behaviour.submits[-1].grammar is None
    refused = http.post("/v1/completions", json={"prompt": "Hi", "thinking_budget": 7})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "thinking_budget")


@gpt_oss
def test_a_grammar_holds_on_the_final_channel(served: Served, families: dict[str, Path]) -> None:
    http, fake, tokenizer = served
    analysis = "<|channel|>analysis<|message|>x<|end|><|start|>assistant"
    final = '<|channel|>final<|message|>{"n": 1}'
    call = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'
    for fields, right in (
        ({"response_format": {"type": "json_object"}}, final),
        ({"tools": TOOLS, "tool_choice": "required"}, call),
    ):
        assert http.post("/v1/chat/completions", json={"messages": HI, **fields}).status_code == 200
        grammar = fake.behaviour.submits[-1].grammar
        assert grammar is not None
        for text in (right, analysis + right):
            assert accepts(families["gpt-oss"], tokenizer, grammar, text)
        for text in ("No.", analysis + "No.", json.dumps({"n": 1})):
            assert not accepts(families["gpt-oss"], tokenizer, grammar, text)


def test_a_text_and_a_start_are_pieces() -> None:
    assert told([TextPiece("a"), CallStart(0, "i", "add"), CallArguments(0, "{}")]) == ["a", "add|{}"]
