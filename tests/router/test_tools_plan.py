"""Tools are checked before anything runs, and what the grammar lets through is what the parser takes for calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tokenizers
from router.harness import DEMO_MODEL, EOS

from trunkline.controller.messages import Grammar
from trunkline.deploy.config import settings
from trunkline.router.config import TOOL_CALL_PARSERS
from trunkline.router.errors import ApiError
from trunkline.router.text.reasoning_styles import REASONING_PARSERS
from trunkline.router.text.tool_styles import MARKERS, STYLE_NAMES, StyleName, ToolStyle, calls_text, detect_style
from trunkline.router.tools.parsers import parse
from trunkline.router.tools.pieces import CallArguments, CallStart, Piece, TextPiece, joined
from trunkline.router.tools.plan import (
    TOOLS_BYTES_MAX,
    TOOLS_MAX,
    ToolPlan,
    prepare_tools,
    read_chat_tools,
    read_choice,
)
from trunkline.router.tools.response_tools import read_response_tools
from trunkline.worker.grammar.automaton import Vocabulary

Accepts = Callable[..., bool]
SCHEMA = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "string", "enum": ["up", "down"]}},
    "required": ["x"],
    "additionalProperties": False,
}


def tool(name: str = "add", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": SCHEMA, **fields}}


STYLES = {name: ToolStyle(name) for name in STYLE_NAMES} | {
    f"{name} special": ToolStyle(name, frozenset(MARKERS[name])) for name in STYLE_NAMES
}
STYLES["mistral newer"] = ToolStyle("mistral", frozenset(MARKERS["mistral"]), newer=True)


@pytest.fixture(scope="module")
def accepts(tmp_path_factory: pytest.TempPathFactory) -> Accepts:
    """Whether the engine lets a model write a text, and the end token after it, under a plan's grammar."""
    made: dict[frozenset[str], tuple[tokenizers.Tokenizer, Vocabulary]] = {}

    def setup(special: frozenset[str]) -> tuple[tokenizers.Tokenizer, Vocabulary]:
        if special not in made:
            folder = tmp_path_factory.mktemp("model")
            tokenizer = tokenizers.Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
            tokenizer.add_special_tokens(sorted(special))
            tokenizer.save(str(folder / "tokenizer.json"))
            made[special] = tokenizer, Vocabulary(folder, tokenizer.get_vocab_size())
        return made[special]

    def check(plan: ToolPlan, text: str, *, wanted: Grammar | None = None, spaced: bool = False) -> bool:
        tokenizer, vocabulary = setup(plan.style.special)
        found = plan.grammar(wanted)
        assert found is not None
        assert found.param == ("tools" if wanted is None or plan.demanded else wanted.param)
        grammar = vocabulary.compile(found.kind, found.text, spaced=spaced)
        matcher = grammar.matcher([EOS])
        allowed = np.zeros(-(-vocabulary.size // 32), np.int32)
        for token in [*tokenizer.encode(text, add_special_tokens=False).ids, EOS]:
            matcher.fill(allowed)
            if not allowed.view(np.uint8)[token // 8] >> token % 8 & 1:
                return False
            matcher.accept([token])
        return True

    return check


def written(style: ToolStyle, *calls: tuple[str, str]) -> str:
    """Calls as a model writes them."""
    text = calls_text(style, calls)
    return text.removesuffix("<|call|>")  # an end token, which the engine takes from the output


def calls_of(plan: ToolPlan, text: str) -> list[tuple[str, Any]]:
    """(name, parsed arguments) of the calls; there must be nothing else."""
    parser = plan.make_parser()
    assert parser is not None
    pieces: list[Piece] = parse(parser, text)
    starts = [piece for piece in pieces if isinstance(piece, CallStart)]
    arguments = [json.loads(piece.text) for piece in pieces if isinstance(piece, CallArguments)]
    assert len(pieces) == len(starts) + len(arguments)
    return [(start.name, values) for start, values in zip(starts, arguments, strict=True)]


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
def test_demanded_calls(style: ToolStyle, accepts: Accepts) -> None:
    tools = [tool(), tool("sub"), tool("now", parameters=None)]
    one, two = ("add", '{"x": 1, "y": "up"}'), ("sub", '{"x": -3}')
    verbatim = style.form.body in ("object", "json")
    any_of_them = prepare_tools(tools, "required", True, style)
    for calls in ([one], [one, two], [("now", "{}")]):
        if style.form.single and len(calls) > 1:
            assert not accepts(any_of_them, written(style, *calls))
            continue
        text = written(style, *calls)
        assert accepts(any_of_them, text)
        assert calls_of(any_of_them, text) == [(name, json.loads(arguments)) for name, arguments in calls]
    for text in (
        "",
        "No.",
        written(style, ("mul", "{}")),
        written(style, ("add", '{"y": "up"}')),
        written(style, ("add", '{"x": 1, "y": "left"}')),
        written(style, one) + " and more",
        written(style, ("add", '{"x":   1}')) if verbatim else "",
        written(style, one)[:-1],
    ):
        assert not accepts(any_of_them, text), text
    for parallel in (False, None):  # a weak model would call on and on
        single = prepare_tools(tools, "required", parallel, style)
        assert accepts(single, written(style, one))
        assert not accepts(single, written(style, one, two))
        assert not single.parallel
    if verbatim:
        several_lines = written(style, ("add", '{ \n  "x": 1\n}'))
        assert accepts(any_of_them, several_lines, spaced=True)
        assert not accepts(any_of_them, several_lines)
    for parallel in (None, True):  # a named function is called once
        certain = prepare_tools(tools, {"type": "function", "function": {"name": "sub"}}, parallel, style)
        assert accepts(certain, written(style, two))
        assert not accepts(certain, written(style, one))
        assert not accepts(certain, written(style, two, two))


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
def test_strict_functions_where_the_model_is_free(style: ToolStyle, accepts: Accepts) -> None:
    tools = [tool(strict=True), tool("loose"), tool("free")]
    plan = prepare_tools(tools, "auto", None, style)
    one, two = ("add", '{"x": 1}'), ("loose", '{"whatever": [1, {}]}')
    assert accepts(plan, "Just text.")
    both = () if style.form.single else (written(style, one, two),)
    for text in (written(style, one), written(style, two), written(style, ("free", "{}")), *both):
        assert accepts(plan, text)
        assert accepts(plan, "First: " + text)
    for text in both:
        assert calls_of(plan, text) == [("add", {"x": 1}), ("loose", {"whatever": [1, {}]})]
    assert not accepts(plan, written(style, ("add", '{"x": "one"}')))
    if style.form.body != "python":  # where it is not certain that a bracket begins calls
        assert not accepts(plan, written(style, ("other", "{}")))
    single = prepare_tools(tools, "auto", False, style)
    assert accepts(single, "First: " + written(style, one))
    assert not accepts(single, written(style, one, two))


FORMAT = Grammar(
    "json_schema",
    json.dumps({"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}),
    "response_format.json_schema.schema",
)


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
def test_a_call_or_a_form(style: ToolStyle, accepts: Accepts) -> None:
    tools = [tool(strict=True), tool("loose"), tool("other-loose")]
    plan = prepare_tools(tools, "auto", None, style)
    header = "<|channel|>final<|message|>" if style.name == "harmony" else ""
    one, two = written(style, ("add", '{"x": 1}')), written(style, ("loose", '{"whatever": [1, {}]}'))
    both = written(style, ("add", '{"x": 1}'), ("loose", '{"y": ["up"]}'))
    form = header + '{"name": "add"}'
    third = written(style, ("other-loose", "{}"))
    for text in (one, two, third, form, *([] if style.form.single else [both])):
        assert accepts(plan, text, wanted=FORMAT), text
    for text in (
        "",
        "Just text.",
        header + '{"name": 1}',
        header + '{"name":   "add"}',
        one + form,
        form + one,
        written(style, ("add", '{"x": "one"}')),
        written(style, ("other", "{}")),
    ):
        assert not accepts(plan, text, wanted=FORMAT), text
    single = prepare_tools(tools, "auto", False, style)
    assert accepts(single, one, wanted=FORMAT)
    assert not accepts(single, both, wanted=FORMAT)
    loose = prepare_tools([tool()], "auto", None, style)
    assert accepts(loose, written(style, ("add", '{"z": 1}')), wanted=FORMAT)
    assert accepts(loose, form, wanted=FORMAT)
    assert not accepts(loose, "Just text.", wanted=FORMAT)
    demanded = prepare_tools(tools, "required", None, style)
    assert accepts(demanded, one, wanted=FORMAT)
    assert not accepts(demanded, form, wanted=FORMAT)
    assert prepare_tools(tools, "none", None, style).grammar(Grammar("regex", "a", "guided_regex")) is not None


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
def test_what_looks_like_a_call_in_a_form_is_none(style: ToolStyle) -> None:
    plan = prepare_tools([tool()], "auto", None, style)
    call = written(style, ("add", '{"x": 1}'))
    inner = {"name": "add", "arguments": {}, "parameters": {}}
    for text in (
        json.dumps({"say": call}, ensure_ascii=False),
        json.dumps({"n": inner}),
        json.dumps([inner, inner]),
    ):
        form = f"<|channel|>final<|message|>{text}" if style.name == "harmony" else text
        for size in range(1, len(form) + 1):
            parser = plan.make_parser(formed=True)
            assert parser is not None
            pieces = [piece for at in range(0, len(form), size) for piece in parser.feed(form[at : at + size])]
            pieces += parser.finish()
            if style.name == "harmony" and "<|" in text:
                continue  # its markers are tokens that JSON cannot write
            assert joined(pieces) == [TextPiece(text)]
            assert parser.calls == 0
    for size in range(1, len(call) + 1):
        parser = plan.make_parser(formed=True)
        assert parser is not None
        pieces = [piece for at in range(0, len(call), size) for piece in parser.feed(call[at : at + size])]
        first, *arguments = joined([*pieces, *parser.finish()])
        assert isinstance(first, CallStart)
        assert [json.loads(piece.text) for piece in arguments if isinstance(piece, CallArguments)] == [{"x": 1}]


def test_only_some_tools_are_allowed(accepts: Accepts) -> None:
    style = STYLES["hermes"]
    tools = [tool(), tool("sub"), tool("now")]
    entries = [{"type": "function", "function": {"name": "add"}}, {"type": "function", "name": "sub"}]
    nested = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": entries}}
    flat = {"type": "allowed_tools", "mode": "required", "tools": [*entries, {"type": "web_search"}]}
    free, demanded = (prepare_tools(tools, choice, None, style) for choice in (nested, flat))
    for plan in (free, demanded):
        assert plan.template_tools == tools, "the prompt stays as it is, and so does its KV"
        for name in ("add", "sub"):
            assert accepts(plan, written(style, (name, '{"x": 1}')))
        assert not accepts(plan, written(style, ("now", '{"x": 1}')))
    assert accepts(free, "Just text.")
    assert not accepts(demanded, "Just text.")
    assert accepts(free, '{"name": "x"}', wanted=FORMAT)
    foreign = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}
    nothing = prepare_tools(tools, foreign, None, style)
    assert (nothing.active, nothing.template_tools) == (False, tools)


def test_a_structural_tag_says_itself_where_calls_stand() -> None:
    tag = Grammar("structural_tag", '{"format": {"type": "any_text"}}', "response_format")
    assert prepare_tools([tool()], "auto", None, ToolStyle()).grammar(tag) == tag
    with pytest.raises(ApiError) as caught:
        prepare_tools([tool(strict=True)], "auto", None, ToolStyle()).grammar(tag)
    assert (caught.value.status, caught.value.param) == (400, "response_format")


def test_plans() -> None:
    style = STYLES["mistral special"]
    free = prepare_tools([tool()], None, None, style)
    assert free.active
    assert free.grammar(None) is None
    assert free.needs_special_tokens
    assert free.template_tools == [tool()]
    assert re.fullmatch("[A-Za-z0-9]{9}", free.draw_id())
    for plan in (prepare_tools([tool()], "none", None, style), prepare_tools(None, "auto", True, style)):
        assert not plan.active
        assert not plan.needs_special_tokens
        assert (plan.template_tools, plan.grammar(None), plan.make_parser()) == (None, None, None)
    assert not prepare_tools([tool()], None, None, STYLES["hermes"]).needs_special_tokens
    assert prepare_tools([tool()], None, None, STYLES["hermes"]).draw_id().startswith("call_")
    bare = prepare_tools([{"type": "function", "function": {"name": "now"}}], None, None, style)
    function = {"name": "now", "parameters": {"type": "object", "properties": {}}}
    assert bare.template_tools == [{"type": "function", "function": function}]


BAD_TOOLS: list[tuple[Any, str]] = [
    ("x", "tools"),
    ({}, "tools"),
    (["x"], "tools[0]"),
    ([{}], "tools[0]"),
    ([{"type": "web_search"}], "tools[0].type"),
    ([{"type": "function"}], "tools[0].function"),
    ([tool(), tool("")], "tools[1].function.name"),
    ([tool("a b")], "tools[0].function.name"),
    ([tool("é")], "tools[0].function.name"),
    ([tool("a" * 65)], "tools[0].function.name"),
    ([tool("a\n")], "tools[0].function.name"),
    ([{"type": "function", "function": {}}], "tools[0].function.name"),
    ([tool(), tool()], "tools[1]"),
    ([tool(description=3)], "tools[0].function.description"),
    ([tool(strict="yes")], "tools[0].function.strict"),
    ([tool(parameters=[])], "tools[0].function.parameters"),
    ([tool(parameters={"type": "array"})], "tools[0].function.parameters.type"),
    ([tool(parameters={"properties": []})], "tools[0].function.parameters.properties"),
    ([tool(parameters={"required": "x"})], "tools[0].function.parameters.required"),
    ([tool(f"f{number}") for number in range(TOOLS_MAX + 1)], "tools"),
    ([tool(description="d" * TOOLS_BYTES_MAX)], "tools"),
]


@pytest.mark.parametrize(("tools", "param"), BAD_TOOLS)
def test_bad_tools(tools: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        prepare_tools(tools, None, None, ToolStyle())
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param in caught.value.message


def test_bad_choices() -> None:
    wrong: list[Any] = [
        *("any", 7, [], {}, {"type": "function"}, {"type": "function", "function": "add"}),
        {"type": "function", "function": {"name": "rm"}},
        {"type": "allowed_tools", "tools": []},
        {"type": "allowed_tools", "mode": "any", "tools": [{"type": "function", "name": "add"}]},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "rm"}]},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]},
    ]
    for choice in wrong:
        with pytest.raises(ApiError) as caught:
            prepare_tools([tool()], choice, None, ToolStyle())
        assert (caught.value.status, caught.value.param) == (400, "tool_choice")
    with pytest.raises(ApiError, match="no `tools`"):
        prepare_tools([], "required", None, ToolStyle())


def test_tools_of_responses_have_no_inner_object() -> None:
    flat = read_response_tools([{"type": "function", **tool()["function"]}]).functions
    assert flat == read_chat_tools([tool()])
    assert read_choice({"type": "function", "name": "add"}, flat).name == "add"
    with pytest.raises(ApiError) as caught:
        read_response_tools([{"type": "function", "name": ""}])
    assert caught.value.param == "tools[0].name"


@pytest.mark.parametrize(
    ("option", "template", "tokens", "expected"),
    [
        ("auto", "{% if tools %}<tool_call>", ["<|python_tag|>"], "hermes"),
        ("auto", "{% if tools %}[AVAILABLE_TOOLS]{{ '[TOOL_CALLS]' }}", [], "mistral"),
        ("auto", '{{ \'{"name": "\' + f.name + \'", "parameters": \' }}', [], "llama3_json"),
        ("auto", "{{ tools | tojson }}", ["<|python_tag|>"], "llama3_json"),
        ("auto", "{{ messages }}", ["[TOOL_CALLS]"], "hermes"),
        ("auto", None, [], "hermes"),
        ("mistral", "{{ '<tool_call>' }}", [], "mistral"),
        ("auto", "{{ '<tool_call>\\n<function=' + f.name }}{{ '<parameter=' }}", ["<tool_call>"], "qwen3_coder"),
        ("auto", "{{ '<tool_call>' + f.name }}{{ '<arg_key>' }}", [], "glm45"),
        ("auto", "<|header_start|>{{ '[func_name(a=1)]' }}", ["<|python_start|>"], "pythonic"),
        ("auto", "{{ '<|python_start|>' }}{{ '\"parameters\": ' }}", ["<|python_start|>"], "llama3_json"),
        ("auto", "<|start|>{{ role }}<|channel|>final<|message|>", [], "harmony"),
        ("auto", "{{ 'function<｜tool▁sep｜>' + n + '\\n```json' }}", [], "deepseek_v3"),
        ("auto", "{{ n + '<｜tool▁sep｜>' + a }}", [], "deepseek_v31"),
        ("auto", "{{ call.id + '<|tool_call_argument_begin|>' + a }}", [], "kimi_k2"),
        ("auto", "<|start_of_role|>{{ '<|tool_call|>' }}", [], "granite"),
        ("auto", "<|start_of_role|><tool_call></tool_call>", [], "hermes"),
        ("auto", "{{ '<|tool|>' + tools + '<|/tool|>' }}", [], "phi4_mini"),
        ("auto", "<start_of_turn>model", [], "pythonic"),
    ],
)
def test_telling_styles_apart(option: str, template: str | None, tokens: list[str], expected: StyleName) -> None:
    assert detect_style(option, template, tokens, []).name == expected
    marks = detect_style("auto", "{{ tools }}", ["[TOOL_CALLS]", "[ARGS]", "<s>"], ["[TOOL_CALLS]", "<s>"])
    assert marks == ToolStyle("mistral", frozenset({"[TOOL_CALLS]"}), newer=True)


def test_every_name_of_a_style_is_an_option() -> None:
    assert TOOL_CALL_PARSERS == settings.TOOL_CALL_PARSERS
    assert REASONING_PARSERS == settings.REASONING_PARSERS
    for option, expected in (("openai", "harmony"), ("phi4_mini_json", "phi4_mini"), ("qwen3_xml", "qwen3_coder")):
        assert detect_style(option, "{{ '[TOOL_CALLS]' }}", [], []).name == expected
