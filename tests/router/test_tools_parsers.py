"""Calls are found in a model's text, however it is cut into pieces; all other text comes out as it was."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trunkline.router.text.detokenizer import make_detokenizer
from trunkline.router.text.tokenizer import Tokenizer
from trunkline.router.text.tool_styles import STYLE_NAMES, StyleName, ToolStyle, calls_text
from trunkline.router.tools.call_object import ObjectScanner, Progress
from trunkline.router.tools.call_or_text import CallsOnly
from trunkline.router.tools.parsers import make_parser, parse
from trunkline.router.tools.pieces import (
    AnswerParser,
    CallArguments,
    CallStart,
    Piece,
    TextPiece,
    ThoughtPiece,
    joined,
)

NAMES = ("add", "get-weather", "a")
SCHEMA = {"properties": {"text": {"type": "string"}, "way": {"type": "string", "enum": ["up", "7"]}}}


def parser(style: StyleName) -> AnswerParser:
    """With ids that count."""
    numbers = itertools.count()
    return make_parser(style, dict.fromkeys(NAMES, SCHEMA), lambda: f"id{next(numbers)}")


def flat(pieces: Iterable[Piece]) -> list[str]:
    """`text`, or `name(arguments)` of each call."""
    result: list[str] = []
    for piece in pieces:
        if isinstance(piece, TextPiece | ThoughtPiece):
            result.append(piece.text)
        elif isinstance(piece, CallStart):
            result.append(f"{piece.name}|")
        else:
            result[-1] += piece.text
    return result


def whole(style: StyleName, text: str) -> list[str]:
    return flat(parse(parser(style), text))


CASES: dict[StyleName, list[tuple[str, list[str]]]] = {
    "hermes": [
        ("plain <tool text", ["plain <tool text"]),
        ('<tool_call>\n{"name": "add", "arguments": {"x": [1, "}"]}}\n</tool_call>', ['add|{"x": [1, "}"]}']),
        (
            'Let me see.\n<tool_call>{"name":"add","arguments":{}}</tool_call>\n'
            '<tool_call>\n{"arguments": {"a": {"b": null}}, "name": "a"}\n</tool_call>\n bye ',
            ["Let me see.\n", "add|{}", 'a|{"a": {"b": null}}', "\n bye "],
        ),
        ('\n\n<tool_call>{"name": "add"}</tool_call>\n', ["add|{}"]),
        ('<tool_call>{"name": "add", "type": "function", "id": "7", "parameters": {}}', ["add|{}"]),
        ('<tool_call>{"name": "add", "arguments": {}}</tool_', ["add|{}"]),
        ('<tool_call>{"name": "add", "arguments": {"x": "cut o', ['add|{"x": "cut o']),
        ('<tool_call>{"name": "add", "arguments": {"x": oops}}', ['add|{"x": ', "oops}}"]),
        ('<tool_call>{"name": "add", "arguments": {}, "x": 1}', ["add|{}", ', "x": 1}']),
        ('<tool_call>{"name": "rm", "arguments": {}}</tool_call>', []),
        ('<tool_call>{"name": "ad', []),
        ("<tool_call>", []),
        ("<tool_call> what?", []),
        ("<tool_call><tool_call>", []),
        ('<tool_call>{"name": "add", "arguments": "{}"}</tool_call>', []),
        ('<tool_call>{"name": "add", "name": "a", "arguments": {}}</tool_call>', []),
        ('<tool_call><tool_call>{"name": "a", "arguments": {}}</tool_call>', ["<tool_call>", "a|{}"]),
        (
            '<tool_call>{"name": "add", "arguments": {}}\n{"name": "a", "arguments": {}}</tool_call> {"name"',
            ["add|{}", "a|{}", ' {"name"'],
        ),
        ('<tool_call>{"name": "add", "arguments": {}}\n{"name": "rm"}', ["add|{}", '\n{"name": "rm"}']),
        ("  \n", []),
        ("", []),
    ],
    "llama3_json": [
        ('{"name": "add", "parameters": {"x": 1.5e3}}', ['add|{"x": 1.5e3}']),
        ('<|python_tag|>{"name": "add", "parameters": {}}; {"name": "a", "parameters": {}}', ["add|{}", "a|{}"]),
        ('{"type": "function", "name": "a", "parameters": {"s": "\\u00fc\\""}};', ['a|{"s": "\\u00fc\\""}']),
        ('Sure: {"name": "add", "parameters": {"x": {}}} done', ["Sure: ", 'add|{"x": {}}', " done"]),
        ('{"name": "Ada", "parameters": {}}', []),
        ('{"name": "add", "age": 3}', []),
        ("f(x) { return {}; } {{", []),
        ('{{"name": "add", "parameters": {}}}', ["{", "add|{}", "}"]),
        ('<|python_tag|>brave_search.call(query="x")', []),
        ('{"name": "add", "parameters": {}}; and', ["add|{}", "; and"]),
        ('{"name": "add", "parameters": {}}; {"x', ["add|{}", '; {"x']),
    ],
    "mistral": [
        ('[TOOL_CALLS] [{"name": "add", "arguments": {"x": true}}]', ['add|{"x": true}']),
        (
            '[TOOL_CALLS][{"name": "add", "arguments": {}}, {"name": "a", "arguments": {"b": -1}}] ok',
            ["add|{}", 'a|{"b": -1}', " ok"],
        ),
        ('Hm [1] [TOOL_CALLS]add[ARGS]{"x": ""}', ["Hm [1] ", 'add|{"x": ""}']),
        ("[TOOL_CALLS]add[ARGS]{}[TOOL_CALLS]get-weather[CALL_ID]a1B2[ARGS] {}", ["add|{}", "get-weather|{}"]),
        ('[TOOL_CALLS][{"name": "add", "arguments": {}},', ["add|{}"]),
        ("[TOOL_CALLS]rm[ARGS]{}", []),
        ("[TOOL_CALLS]add[CALL_ID]", []),
        ("[TOOL_CALLS]add[NOPE]{}", []),
        ("[TOOL_CALLS]add[ARGS]7", []),
        ("[TOOL_CALLS]{}", []),
        ("a[0] = [TOOL_CALL]", []),
    ],
    "qwen3_coder": [
        (
            "Hm.\n<tool_call>\n<function=add>\n<parameter=x>\n7\n</parameter>\n<parameter=y>\na </parameter> b\n"
            "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=a>\n</function>\n</tool_call>",
            ["Hm.\n", 'add|{"x": 7, "y": "a </parameter> b"}', "a|{}"],
        ),
        ("<function=add><parameter=b>True</parameter></function>.", ['add|{"b": true}', "."]),
        ("<tool_call><function=a><parameter=c>{'k'</parameter></tool_call>", ['a|{"c": "{\'k\'"}']),
        ("<tool_call>\n<function=a><parameter=c>cut </par", ['a|{"c": ']),
        ("<tool_call>\n<function=a><parameter=text>cut </par", ['a|{"text": "cut ']),
        ("<function=add><parameter=way> up\n \n</parameter></function>", ['add|{"way": "up"}']),
        ("<function=add><parameter=way>7</parameter></function>", ['add|{"way": "7"}']),
        ("<tool_call>\n<function=rm>\n</function>", []),
        ("<tool_call>\n<tool_call>\n<function=a></function></tool_call>", ["<tool_call>\n", "a|{}"]),
        ("x < y <functional", []),
        ("<tool_call>", []),
    ],
    "glm45": [
        (
            "<tool_call>add\n<arg_key>x</arg_key>\n<arg_value>[1, 2]</arg_value>\n<arg_key>text</arg_key>\n"
            "<arg_value>7</arg_value>\n</tool_call>\n<tool_call>a\n</tool_call> ok",
            ['add|{"x": [1, 2], "text": "7"}', "a|{}", " ok"],
        ),
        ("<tool_call>get-weather</tool_call>", ["get-weather|{}"]),
        ("<tool_call>rm\n</tool_call>", []),
        ("<tool_call>add me", []),
    ],
    "pythonic": [
        (
            "[add(x=1, y='it\\'s', z=[True, None, {'k': (1,)}]), a()]",
            ['add|{"x": 1, "y": "it\'s", "z": [true, null, {"k": [1]}]}', "a|{}"],
        ),
        ('<|python_start|>[a(b="é\n)")]<|python_end|>', ['a|{"b": "é\\n)"}']),
        ("```tool_code\nadd(x=-2.5)\n```\nDone.", ['add|{"x": -2.5}', "\nDone."]),
        ("a[0] = [1] [add]", []),
        ("[add(7)]", []),
        ("[add(x=y)] z", ['add|{"x": ', ")] z"]),
        ("[add(x=[1, 2", ['add|{"x": ']),
        ("[rm(x=1)]", []),
    ],
    "harmony": [
        (
            "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary "
            'to=functions.add <|constrain|>json<|message|>{"x": "<|"} <|call|>',
            ["Let me see.", 'add|{"x": "<|"}'],
        ),
        ("<|channel|>final<|message|>a < b <|x|><|return|>", ["a < b <|x|>"]),
        ("<|start|>assistant to=functions.a<|channel|>commentary json<|message|>{}", ["a|{}"]),
        (' to=functions.add<|channel|>commentary json<|message|>{"x": 1}<|call|>', ['add|{"x": 1}']),
        ("<|channel|>analysis to=functions.a <|constrain|>json<|message|>{}", ["a|{}"]),
        (
            "to=functions.a<|channel|>commentary json<|message|>{}<|call|><|start|>assistant to=functions.add"
            '<|channel|>commentary json<|message|>{"x": 2}<|call|>',
            ["a|{}", 'add|{"x": 2}'],
        ),
        ("tomorrow", []),
        (" t", []),
        ("<|channel|>commentary to=functions.rm<|message|>{}", ["{}"]),
        ("<|channel|>commentary to=functions.a<|message|>{} x", ["a|{}", "x"]),
        ("<|channel|>commentary to=functions.a<|message|>{x", ["a|{", "x"]),
        ("no channels <|", []),
    ],
    "deepseek_v3": [
        (
            'Ok<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"x": "```"}\n'
            "```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n```json\n{}\n```<｜tool▁call▁end｜>"
            "<｜tool▁calls▁end｜>",
            ["Ok", 'add|{"x": "```"}', "a|{}"],
        ),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>code<｜tool▁sep｜>a", []),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>rm\n```json\n{}", []),
    ],
    "deepseek_v31": [
        (
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"x": {}}<｜tool▁call▁end｜>'
            "<｜tool▁call▁begin｜>a<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>!",
            ['add|{"x": {}}', "a|{}", "!"],
        ),
    ],
    "kimi_k2": [
        (
            "Ok <|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
            '{"x": ":1"}'
            "<|tool_call_end|><|tool_call_begin|>functions.a:12 <|tool_call_argument_begin|> {}<|tool_call_end|>"
            "<|tool_calls_section_end|>!",
            ["Ok ", 'add|{"x": ":1"}', "a|{}", "!"],
        ),
        ("<|tool_calls_section_begin|><|tool_call_begin|>functions.rm:0<|tool_call_argument_begin|>{}", []),
        ("<|tool_calls_section_begin|><|tool_call_begin|>functions.a<|tool_call_argument_begin|>{}", []),
        ("<|tool_calls_section_begin|><|tool_call_begin|>functions.a:x<|tool_call_argument_begin|>{}", []),
    ],
    "granite": [
        ('<|tool_call|>[{"name": "add", "arguments": {"x": "]"}}, {"name": "a"}]', ['add|{"x": "]"}', "a|{}"]),
        ('<tool_call>{"name": "add", "arguments": {}}</tool_call> so', ["add|{}", " so"]),
        ('<tool_call>[{"name": "add", "arguments": {}}]</tool_call> so', ["add|{}", " so"]),
    ],
    "phi4_mini": [
        ('<|tool_call|>[{"name": "add", "arguments": {"x": 1}}]<|/tool_call|>', ['add|{"x": 1}']),
        ('functools[{"name": "a", "arguments": {}}, {"name": "add", "arguments": {}}]', ["a|{}", "add|{}"]),
        ("import functools\n", []),
        ('functools<|tool_call|>[{"name": "a"}]', ["functools", "a|{}"]),
    ],
}
"""(text, what it comes to); nothing: the text itself."""


@pytest.mark.parametrize(
    ("style", "text", "expected"), [(style, *case) for style, cases in CASES.items() for case in cases]
)
def test_what_a_text_comes_to(style: StyleName, text: str, expected: list[str]) -> None:
    assert whole(style, text) == (expected or [text] * bool(text))
    for size in (1, 2, 3, 7):
        cut = parser(style)
        pieces = [piece for at in range(0, len(text), size) for piece in cut.feed(text[at : at + size])]
        assert joined([*pieces, *cut.finish()]) == parse(parser(style), text)


FRAGMENTS = [
    *"<tool_call> </tool_call> <|python_tag|> [TOOL_CALLS] [ARGS] [CALL_ID] add a rm".split(),
    *"<function=add> <parameter=text> </parameter> </function> <arg_key> </arg_key> <arg_value>".split(),
    *"<|channel|> commentary to=functions.add <|message|> <|end|> <|call|> analysis add( x= ) functools".split(),
    *"<｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> function <｜tool▁sep｜> ```json ```".split(),
    *"<|tool_calls_section_begin|> <|tool_call_begin|>functions. :0 <|tool_call_argument_begin|>".split(),
    *"<|tool_call_end|> <|tool_calls_section_end|> { } [ ] , ; : < 1 tru é text n".split(),
    *('{"name": "add", "arguments": {"x": [1, {"y": "z"}]}}', '{"name": "a", "parameters": {}}', '{"name": "'),
    *('"', "\\", " ", "\n", '"arguments": {"'),
]


@settings(max_examples=400, deadline=None)
@given(
    style=st.sampled_from(STYLE_NAMES),
    text=st.lists(st.sampled_from(FRAGMENTS), max_size=24).map("".join),
    seed=st.randoms(use_true_random=False),
)
def test_any_cut_gives_the_same(style: StyleName, text: str, seed: object) -> None:
    cut = parser(style)
    pieces: list[Piece] = []
    position = 0
    while position < len(text):
        size = seed.randint(1, 9)  # type: ignore[attr-defined]
        pieces += cut.feed(text[position : position + size])
        position += size
    pieces = joined([*pieces, *cut.finish()])
    assert pieces == parse(parser(style), text)
    starts = [piece for piece in pieces if isinstance(piece, CallStart)]
    assert [start.index for start in starts] == list(range(cut.calls))
    assert all(start.name in NAMES for start in starts)
    if not starts and style != "harmony":  # whose headers are never text
        assert "".join(flat(pieces)) == text


@settings(max_examples=80, deadline=None)
@given(
    style=st.sampled_from(STYLE_NAMES),
    arguments=st.dictionaries(
        st.from_regex(r"[a-z][a-z_]{0,5}", fullmatch=True),
        st.recursive(
            st.one_of(st.none(), st.booleans(), st.integers(), st.floats(-1e300, 1e300), st.text()),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
            max_leaves=8,
        )
        | st.lists(st.sampled_from(FRAGMENTS), max_size=6).map("".join),
        max_size=4,
    ),
    newer=st.booleans(),
    size=st.integers(1, 9),
)
def test_any_arguments_come_out_as_they_were_written(
    style: StyleName, arguments: dict[str, object], newer: bool, size: int
) -> None:
    types = {name: {"type": "string"} for name, value in arguments.items() if isinstance(value, str)}
    form = ToolStyle(style, newer=newer and style == "mistral")
    plain = json.dumps(arguments, ensure_ascii=False)
    if form.form.tags is not None:  # raw text in tags is ambiguous; CASES has what can be told apart
        assume(form.form.tags.value_end not in plain)
    text = calls_text(form, [("add", plain), ("a", "{}")])
    numbers = itertools.count()
    found = make_parser(style, {"add": {"properties": types}, "a": {}}, lambda: f"id{next(numbers)}")
    if style == "pythonic":  # where two calls in a row are no second list
        found = CallsOnly(found)
    pieces = [piece for at in range(0, len(text), size) for piece in found.feed(text[at : at + size])]
    first, second = flat(joined([*pieces, *found.finish()]))
    assert second == "a|{}"
    assert first.startswith("add|")
    assert json.loads(first.removeprefix("add|")) == arguments
    if form.form.body in ("object", "json"):
        assert first == f"add|{plain}"


@pytest.mark.parametrize("style", STYLE_NAMES)
def test_a_call_that_is_cut_off_is_no_text(style: StyleName) -> None:
    text = calls_text(ToolStyle(style), [("add", '{"x": "é<b>", "y": [1, {"z": null}]}'), ("a", '{"w": 1}')])
    for end in range(1, len(text) + 1):
        found = parser(style)
        pieces = [*found.feed(text[:end]), *found.finish(cut=True)]
        if end >= max(len('{"name": "a'), len(ToolStyle(style).written_begin) // 2 + 1):  # half a marker
            assert not [piece for piece in pieces if isinstance(piece, TextPiece)], text[:end]
    assert [piece.name for piece in parse(parser(style), text) if isinstance(piece, CallStart)] == ["add", "a"]


@pytest.mark.parametrize("style", STYLE_NAMES)
def test_any_cut_between_bytes_gives_the_same(style: StyleName, tokenizer: Tokenizer) -> None:
    """Tokens of single bytes, as models write what their vocabulary has no token for."""
    arguments = [{"text": "é漢😀 <b>\u2028", "way": "up"}, {"text": "ß"}]
    calls = [
        (name, json.dumps(one, ensure_ascii=False)) for name, one in zip(("add", "a"), arguments, strict=True)
    ]
    text = calls_text(ToolStyle(style), calls)
    byte_ids = {tokenizer.vocabulary.token_bytes(token): token for token in range(tokenizer.vocab_size)}
    for size in (1, 2, 3, 5):
        detokenizer, found = make_detokenizer(tokenizer.vocabulary), parser(style)
        pieces: list[Piece] = []
        written = text.encode()
        for at in range(0, len(written), size):
            shown = "".join(detokenizer.feed(byte_ids[bytes([byte])]) for byte in written[at : at + size])
            pieces += found.feed(shown)
        pieces = joined([*pieces, *found.feed(detokenizer.flush()), *found.finish()])
        assert [piece.name for piece in pieces if isinstance(piece, CallStart)] == ["add", "a"]
        assert [json.loads(piece.text) for piece in pieces if isinstance(piece, CallArguments)] == arguments


def test_arguments_stream_and_text_is_not_held_back() -> None:
    hermes = parser("hermes")
    assert hermes.feed("one <b> two <") == [TextPiece("one <b> two ")]
    assert hermes.feed("i>") == [TextPiece("<i>")]
    assert hermes.feed('<tool_call>{"name": "add", ') == []
    assert hermes.feed('"arguments": {"x') == [CallStart(0, "id0", "add"), CallArguments(0, '{"x')]
    assert hermes.feed('": 1') == [CallArguments(0, '": 1')]
    assert hermes.feed("}}") == [CallArguments(0, "}")]
    assert hermes.calls == 1
    for text in ("<tool_call>" + " " * 400, '<tool_call>{"arguments": {"x": "' + "y" * 70_000):
        assert "".join(flat(parser("hermes").feed(text))) == text, "what is held back is bounded"
    bare = parser("llama3_json")
    assert bare.feed('{"') == []
    assert bare.feed('title": ') == [TextPiece('{"title": ')]


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ('{"a": [1, -0.5e-3, true, false, null, {}, [], "\\u00e9\\n"], "b\\"": {"c": 0}}', None),
        ("{}", None),
        ("[1]", 0),
        ('{"a" 1}', 5),
        ('{"a": 01}', 7),
        ('{"a": 1.}', 8),
        ('{"a": -}', 7),
        ('{"a": [1}', 8),
        ('{"a": trup}', 9),
        ('{"a": "\\x"}', 8),
        ('{"a": ]', 6),
        ("{,", 1),
    ],
)
def test_where_json_goes_wrong(text: str, taken: int | None) -> None:
    scanner = ObjectScanner()
    progress = [scanner.feed(character) for character in text]
    if taken is None:
        assert json.loads(text) is not None
        assert progress == [Progress.MORE] * (len(text) - 1) + [Progress.DONE]
    else:
        assert progress.index(Progress.WRONG) == taken
    deep = ObjectScanner()
    assert Progress.WRONG in [deep.feed(character) for character in '{"a":' + "[" * 300]
