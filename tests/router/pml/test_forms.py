"""The two written forms: what they are read as, and that each can be written in the other."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from router.pml.documents import ODD_TEXTS, WORD_TEXTS, Maker, seeds

from trunkline.router.pml import (
    PmlError,
    parse_prompt,
    parse_schema,
    prompt_from_json,
    prompt_to_json,
    prompt_to_xml,
    schema_from_json,
    schema_to_json,
    schema_to_xml,
)
from trunkline.router.pml.markup import normalise
from trunkline.router.pml.pml_error import Mark
from trunkline.router.pml.tree import (
    Module,
    Param,
    PromptDocument,
    Ref,
    RoleItem,
    Scaffold,
    SchemaDocument,
    Text,
    Turn,
    Union,
)

quick = settings(max_examples=100, deadline=None)

TRIP = """\
<?xml version="1.0" encoding="UTF-8"?>
<schema name="trip">
  You plan trips. <!-- and nothing
  else -->
  <module name="plan">
    A trip of <param name="days" len="4" default="three" fill=" "/> days,
    with <parameter name="who" length="2" scaffold="x"/>.
  </module>
  <union default="miami">
    <module name="miami"><![CDATA[Hot & <wet>]]></module> <module name="paris" cache="false"/>
  </union>
  <user open="true">Where to&#63; </user>
  <scaffold name="both" modules="plan
    miami"/>
</schema>
"""


def test_a_schema_in_xml() -> None:
    document = parse_schema(TRIP)
    assert document == SchemaDocument(
        "trip",
        (
            Text(" You plan trips. "),
            Module(
                "plan",
                (
                    Text(" A trip of "),
                    Param("days", 4, "three", " "),
                    Text(" days,\n    with "),
                    Param("who", 2, None, "x"),
                    Text(". "),
                ),
            ),
            Union((Module("miami", (Text("Hot & <wet>"),)), Module("paris", cache=False)), "miami"),
            RoleItem("user", (Text("Where to? "),), True),
        ),
        (Scaffold("both", ("plan", "miami")),),
    )
    plan = document.items[1]
    assert isinstance(plan, Module)
    assert plan.mark == Mark(5, 3)
    assert [item.mark for item in plan.items] == [Mark(6, 5), Mark(6, 15), Mark(6, 69), Mark(7, 10), Mark(7, 57)]


def test_the_same_schema_in_json() -> None:
    value = {
        "schema": "trip",
        "items": [
            " You plan",
            " trips. ",
            {
                "module": "plan",
                "items": [
                    " A trip of ",
                    {"param": "days", "len": 4, "default": "three", "fill": " ", "required": False},
                    " days,\n    with ",
                    {"param": "who", "len": 2, "fill": "x"},
                    ". ",
                ],
            },
            {
                "union": [{"module": "miami", "items": ["Hot & <wet>"]}, {"module": "paris", "cache": False}],
                "default": "miami",
            },
            {"role": "user", "open": True, "items": ["Where to? "]},
        ],
        "scaffolds": [{"scaffold": "both", "modules": ["plan", "miami"]}],
    }
    assert schema_from_json(value) == parse_schema(TRIP)


def test_a_prompt_in_xml_and_json() -> None:
    source = """<prompt schema="trip">
  <plan days="two &amp; a half"><deep/> more </plan>
  <user xml:space="preserve"> Now? </user>
</prompt>"""
    document = parse_prompt(source)
    assert document == PromptDocument(
        "trip",
        (Ref("plan", (("days", "two & a half"),), (Ref("deep"), Text(" more "))), Turn("user", (Text(" Now? "),))),
    )
    assert document == prompt_from_json(
        {
            "schema": "trip",
            "items": [
                {"ref": "plan", "args": {"days": "two & a half"}, "items": [{"ref": "deep"}, " more "]},
                {"role": "user", "items": [" Now? "]},
            ],
        }
    )


def test_a_prompt_as_a_list_of_paths() -> None:
    document = prompt_from_json(
        {"schema": "s", "modules": [{"path": "a/b", "args": {"x": "1"}}, "c", {"path": "a"}, "a/d"], "text": "Go."}
    )
    assert document == PromptDocument(
        "s", (Ref("a", (), (Ref("b", (("x", "1"),)), Ref("d"))), Ref("c"), Text("Go."))
    )
    assert prompt_from_json({"schema": "s", "text": ""}) == PromptDocument("s")
    assert prompt_from_json({"schema": "s"}) == PromptDocument("s")


@quick
@given(seed=seeds, gaps=...)
def test_documents_survive_both_forms(seed: int, gaps: bool) -> None:
    maker = Maker(random.Random(seed), (*WORD_TEXTS, *ODD_TEXTS), roles=True)
    document = maker.schema()
    assert parse_schema(schema_to_xml(document)) == document
    value = json.loads(json.dumps(schema_to_json(document)))
    assert schema_from_json(value) == document
    assert schema_to_json(parse_schema(schema_to_xml(schema_from_json(value)))) == value
    prompt = maker.prompt(document, gaps=gaps)
    assert parse_prompt(prompt_to_xml(prompt)) == prompt
    assert prompt_from_json(json.loads(json.dumps(prompt_to_json(prompt)))) == prompt


@pytest.mark.parametrize("text", ["\f", "\x01", "\ufffe"])
def test_characters_that_only_json_can_write(text: str) -> None:
    document = schema_from_json({"schema": "s", "items": [text]})
    with pytest.raises(PmlError, match="XML cannot write U"):
        schema_to_xml(document)
    with pytest.raises(PmlError, match="E_XML"):
        prompt_to_xml(prompt_from_json({"schema": "s", "text": text}))


@pytest.mark.parametrize(
    ("text", "normalised"),
    [
        ("", ""),
        ("\n  \n", ""),
        ("  ", " "),
        ("\t", " "),
        ("\n a\n  b\n\n", " a\n  b "),
        ("a", "a"),
        (" a", " a"),
        ("\u00a0", "\u00a0"),
    ],
)
def test_white_space(text: str, normalised: str) -> None:
    assert normalise(text, False) == normalised
    assert normalise(text, True) == text


def test_white_space_is_kept_where_asked() -> None:
    source = (
        '<schema name="s" xml:space="preserve"> <union>\n <module name="a">\n</module>\n</union>'
        '<module name="b" xml:space="default">\n</module> <scaffold name="x" modules="a"/>\n</schema>'
    )
    items = parse_schema(source).items
    assert items == (Text(" "), Union((Module("a", (Text("\n"),)),)), Module("b"), Text(" "))


SHAPES: list[tuple[Any, str, str]] = [
    ([], "E_XML", ""),
    ({"schema": 1}, "E_XML", "schema"),
    ({"items": []}, "E_TAG", ""),
    ({"schema": "s", "item": []}, "E_TAG", ""),
    ({"schema": "s", "items": "text"}, "E_XML", "items"),
    ({"schema": "s", "items": [None]}, "E_XML", "items[0]"),
    ({"schema": "s", "items": ["a", {"modul": "m"}]}, "E_TAG", "items[1]"),
    ({"schema": "s", "items": [{"module": "m", "union": []}]}, "E_TAG", "items[0]"),
    ({"schema": "s", "items": [{"module": "m", "cache": "no"}]}, "E_XML", "items[0].cache"),
    ({"schema": "s", "items": [{"module": "m", "items": [{"param": "p"}]}]}, "E_TAG", "items[0].items[0]"),
    (
        {"schema": "s", "items": [{"module": "m", "items": [{"param": "p", "len": True}]}]},
        "E_XML",
        "items[0].items[0].len",
    ),
    ({"schema": "s", "items": [{"module": "m", "items": [{"param": "p", "len": 0}]}]}, "E_TAG", "m"),
    ({"schema": "s", "items": [{"role": "tool"}]}, "E_TAG", "items[0]"),
    ({"schema": "s", "items": [{"union": ["text"]}]}, "E_UNION_CONTENT", "items[0].union[0]"),
    ({"schema": "s", "items": ["\ud800"]}, "E_XML", "items[0]"),
    ({"schema": "s", "scaffolds": [{"scaffold": "x", "modules": [1]}]}, "E_XML", "scaffolds[0].modules[0]"),
    ({"schema": "s", "scaffolds": [{"scaffold": "x"}]}, "E_TAG", "scaffolds[0]"),
]


PROMPTS: list[tuple[Any, str, str]] = [
    ({"schema": "s", "modules": [], "items": []}, "E_TAG", "items"),
    ({"schema": "s", "modules": [3]}, "E_XML", "modules[0]"),
    ({"schema": "s", "modules": [{"args": {}}]}, "E_TAG", "modules[0]"),
    ({"schema": "s", "modules": [{"path": "a", "args": {"x": 3}}]}, "E_XML", "modules[0].args.x"),
    ({"schema": "s", "modules": ["a//b"]}, "E_NAME", "a"),
    ({"schema": "s", "modules": ["a/b", "a", "a/b"]}, "E_DUP_IMPORT", "a/b"),
    ({"schema": "s", "items": [{"ref": "union"}]}, "E_NAME", ""),
    ({"schema": "s", "items": [{"ref": "a", "args": {"b c": ""}}]}, "E_NAME", "a"),
    ({"schema": "s", "text": 7}, "E_XML", "text"),
]


@pytest.mark.parametrize(
    ("read", "value", "code", "path"),
    [*((schema_from_json, *row) for row in SHAPES), *((prompt_from_json, *row) for row in PROMPTS)],
)
def test_json_of_another_shape(read: Callable[[Any], object], value: Any, code: str, path: str) -> None:
    with pytest.raises(PmlError) as caught:
        read(value)
    assert (caught.value.code, caught.value.path, caught.value.line) == (code, path, None)
