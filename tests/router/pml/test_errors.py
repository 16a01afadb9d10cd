"""Every mistake has its code, and its line, column and path."""

from __future__ import annotations

from typing import Final, NamedTuple

import pytest
from router.pml.words import INSTRUCT, PLAIN, SHUFFLED, Words

from trunkline.router.pml import (
    ErrorCode,
    PmlError,
    compile_prompt,
    compile_schema,
    lint,
    parse_prompt,
    parse_schema,
    prompt_from_json,
    schema_from_json,
)

CONTEXT: Final = 100


class Bad(NamedTuple):
    """A wrong document, with `¶` where the mistake is."""

    code: str
    source: str
    path: str = ""
    message: str = "."


SCHEMAS: Final = [
    Bad("E_XML", '<schema name="s">a <¶ b</schema>', message='write "&lt;"'),
    Bad("E_XML", '<schema name="s">¶&nbsp;</schema>'),
    Bad("E_XML", '<schema name="s"><module name="a"></¶schema>'),
    Bad("E_XML", '<!-- x -->\n  ¶<!DOCTYPE schema SYSTEM "http://example.org/x"><schema name="s"/>'),
    Bad("E_XML", '<schema name="s">\n  ¶<?php echo ?></schema>', message="php"),
    Bad("E_XML", '¶<?xml version="1.0" encoding="latin1"?><schema name="s"/>', message="UTF-8"),
    Bad("E_XML", '¶<?xml version="1.1"?><schema name="s"/>', message=r"1\.1"),
    Bad("E_XML", '<schema name="s">é\n€¶\ud800</schema>', message="Unicode"),
    Bad("E_XML", '<schema name="s">é\n€¶\0</schema>', message=r"U\+0000"),
    Bad("E_XML", "<schema>" + "<module>" * 31 + "¶<module>" + "</module>" * 32 + "</schema>", message="32"),
    Bad("E_TAG", '¶<prompt schema="s"/>', message="not a <schema>"),
    Bad(
        "E_TAG", '<schema name="s">\n <module name="a">\n  ¶<modul name="b"/>\n </module></schema>', "a", "<modul>"
    ),
    Bad("E_TAG", '<schema name="s">¶<module name="a" len="4"/></schema>', message='"len"'),
    Bad("E_TAG", '<schema name="s">¶<module name="a" cache="no"/></schema>', "a", '"true" and "false"'),
    Bad("E_TAG", '<schema name="s"><module name="a"> ¶<param name="p"/></module></schema>', "a", "no len"),
    Bad("E_TAG", '<schema name="s"><module name="a"> ¶<param name="p" len="-1"/></module></schema>', "a", "-1"),
    Bad("E_TAG", '<schema name="s"><module name="a"> ¶<param name="p" len="000"/></module></schema>', "a", " 0 "),
    Bad("E_TAG", '<schema name="s"><module name="a">¶<param name="p" len="1">x</param></module></schema>', "a"),
    Bad("E_TAG", '<schema name="s"><module name="a">¶<parameter name="p" len="1"/></module></schema>', "a"),
    Bad(
        "E_TAG",
        '<schema name="s"><module name="a">¶<param name="p" len="1" default="" required="true"/></module>'
        "</schema>",
        "a",
    ),
    Bad("E_TAG", '<schema name="s">¶<union default="b"><module name="a"/></union></schema>', message='"b"'),
    Bad("E_TAG", '<schema name="s"><module name="a">¶<scaffold name="x" modules="a"/></module></schema>', "a"),
    Bad("E_TAG", '<schema name="s"><module name="a"/><scaffold name="x" modules="a"/>\n ¶text</schema>'),
    Bad("E_TAG", '<schema name="s"><module name="a"/><scaffold name="x" modules="a"/>¶<user/></schema>'),
    Bad("E_TAG", '<schema name="s">¶<user xml:space="keep"/></schema>'),
    Bad("E_NAME", "¶<schema/>", message="the schema has no name"),
    Bad("E_NAME", '<schema name="s">¶<module/></schema>', message="a module has no name"),
    Bad("E_NAME", '<schema name="s"><module name="a">¶<module name="1a"/></module></schema>', "a", "1a"),
    Bad("E_NAME", '<schema name="s">¶<module name="union"/></schema>', message="is a tag"),
    Bad("E_NAME", '<schema name="s"><module name="a">¶<param name="é" len="1"/></module></schema>', "a"),
    Bad("E_NAME", '<schema name="s"><module name="a"/>¶<scaffold modules="a"/></schema>'),
    Bad("E_DUP", '<schema name="s"><module name="a"/>\n<union>¶<module name="a"/></union></schema>', "a"),
    Bad("E_DUP", '<schema name="s"><module name="a"/><user>¶<module name="a"/></user></schema>', "a"),
    Bad(
        "E_DUP", '<schema name="s"><module name="a"><module name="b"/>¶<module name="b"/></module></schema>', "a/b"
    ),
    Bad(
        "E_DUP",
        '<schema name="s"><module name="a"><param name="p" len="1"/>¶<param name="p" len="2"/></module></schema>',
        "a",
    ),
    Bad(
        "E_DUP",
        '<schema name="s"><module name="a"/><scaffold name="x" modules="a"/>'
        '¶<scaffold name="x" modules="a"/></schema>',
    ),
    Bad("E_PARAM_ROOT", '<schema name="s">\n\n ¶<param name="p" len="3"/></schema>', message='"p"'),
    Bad("E_PARAM_ROOT", '<schema name="s"><user>¶<param name="p" len="3"/></user></schema>'),
    Bad("E_UNION_CONTENT", '<schema name="s"><union>\n  ¶text<module name="a"/></union></schema>'),
    Bad("E_UNION_CONTENT", '<schema name="s"><module name="m"><union>¶<user/></union></module></schema>', "m"),
    Bad("E_UNION_CONTENT", '<schema name="s"><union>¶<param name="p" len="1"/></union></schema>'),
    Bad("E_UNION_EMPTY", '<schema name="s"><module name="m"> ¶<union>\n</union></module></schema>', "m"),
    Bad("E_SCAFFOLD_PATH", '<schema name="s"><module name="a"/>¶<scaffold name="x" modules=" "/></schema>'),
    Bad(
        "E_SCAFFOLD_PATH",
        '<schema name="s"><module name="maps"/>\n¶<scaffold name="x" modules="map"/></schema>',
        "map",
        'did you mean "maps"',
    ),
    Bad("E_SCAFFOLD_PATH", '<schema name="s"><module name="a"/>¶<scaffold name="x" modules="a a"/></schema>', "a"),
    Bad(
        "E_SCAFFOLD_PATH",
        '<schema name="s"><module name="a" cache="false"><module name="b"/></module>'
        '¶<scaffold name="x" modules="a/b"/></schema>',
        "a/b",
        "not cached",
    ),
    Bad(
        "E_SCAFFOLD_PATH",
        '<schema name="s"><union><module name="a"><module name="b"/></module><module name="c"/></union>'
        '¶<scaffold name="x" modules="a/b c"/></schema>',
        "c",
        "union",
    ),
    Bad(
        "E_SCHEMA_TOO_LONG",
        f'<schema name="s"><module name="a">¶<param name="p" len="{2**31}"/></module></schema>',
        "a",
    ),
    Bad(
        "E_SCHEMA_TOO_LONG",
        f'<schema name="s"><module name="a">¶<param name="p" len="{9**999}"/></module></schema>',
        "a",
    ),
    Bad("E_ROLE_ORDER", '<schema name="s"><user>a\n ¶<system>b</system></user></schema>'),
    Bad("E_ROLE_ORDER", '<schema name="s"><user><module name="a">¶<user/></module></user></schema>', "a"),
    Bad("E_ROLE_ORDER", '<schema name="s">¶<system open="true"/><module name="a"><user/></module></schema>'),
]


@pytest.mark.parametrize("bad", SCHEMAS, ids=lambda bad: f"{bad.code}-{bad.source[-60:]}")
def test_schemas(bad: Bad) -> None:
    check(bad, lambda source: parse_schema(source))


def check(bad: Bad, read: object) -> None:
    assert callable(read)
    before, behind = bad.source.split("¶")
    with pytest.raises(PmlError, match=bad.message) as caught:
        read(before + behind)
    error = caught.value
    assert (error.code, error.path) == (bad.code, bad.path)
    lines = before.split("\n")
    assert (error.line, error.column) == (len(lines), len(lines[-1]) + 1)
    assert str(error).startswith(f"{bad.code}: ")


COMPILED: Final = [
    Bad("E_SCHEMA_TOO_LONG", f'<schema name="s">¶{"word " * 99}word</schema>', message="100"),
    Bad(
        "E_SCHEMA_TOO_LONG",
        '<schema name="s"><module name="a">text¶<param name="p" len="99"/></module></schema>',
        "a",
    ),
    Bad(
        "E_SCHEMA_TOO_LONG",
        f'<schema name="s"><union><module name="a">{"word " * 50}</module><module name="b"/></union>'
        f'<module name="c">¶{"word " * 50}</module></schema>',
        "c",
    ),
    Bad(
        "E_ARG_TOO_LONG",
        '<schema name="s"><module name="a">\n¶<param name="p" len="2" default="one two three"/></module></schema>',
        "a",
    ),
    Bad(
        "E_TEMPLATE",
        '<schema name="s"><module name="a">¶<user>text</user></module></schema>',
        "a",
        "no chat template",
    ),
]


@pytest.mark.parametrize("bad", COMPILED, ids=lambda bad: f"{bad.code}-{bad.source[-60:]}")
def test_schemas_for_a_model(bad: Bad) -> None:
    check(bad, lambda s: compile_schema(parse_schema(s), Words(), scope="ancestors", context=CONTEXT))


def test_a_schema_may_fill_all_but_one_position() -> None:
    document = parse_schema(f'<schema name="s">{"word " * 98}word</schema>')
    assert compile_schema(document, Words(), scope="ancestors", context=CONTEXT).extent == CONTEXT - 1
    with pytest.raises(PmlError, match="must be left"):
        compile_schema(document, Words(bos=True), scope="ancestors", context=CONTEXT)


@pytest.mark.parametrize(
    ("template", "roles", "message"),
    [
        (INSTRUCT, "<user>a</user>¶<user>b</user>", "must alternate"),
        (INSTRUCT, "¶<assistant>a</assistant>", "must alternate"),
        (SHUFFLED, "<system>a</system>¶<user>b</user>", "in this order"),
        (PLAIN, "<user>a</user>" * 128 + "¶<user>b</user>", "more than 128"),
    ],
)
def test_templates_that_refuse(template: str, roles: str, message: str) -> None:
    bad = Bad("E_TEMPLATE", f'<schema name="s">{roles}</schema>', "", message)
    check(bad, lambda s: compile_schema(parse_schema(s), Words(template), scope="ancestors", context=10_000))


SCHEMA: Final = """\
<schema name="s">
  <module name="a">first <param name="p" len="3"/> last <module name="inner">inside</module></module>
  <module name="b">text of b <param name="q" len="2" required="true"/></module>
  <union><module name="x">one</module><module name="y">one two three</module></union>
  <module name="talk"><user>hello</user></module>
  <module name="z">end of it</module>
</schema>
"""

PROMPTS: Final = [
    Bad("E_XML", '<prompt schema="s"><a></¶b></prompt>'),
    Bad("E_TAG", '¶<schema name="s"/>', message="not a <prompt>"),
    Bad("E_TAG", '<prompt schema="s">\n<a>¶<module name="x"/></a></prompt>', "a"),
    Bad("E_TAG", '<prompt schema="s">¶<user name="x"/></prompt>'),
    Bad("E_NAME", "¶<prompt/>"),
    Bad("E_NAME", '<prompt schema="s"><a>¶<x:y/></a></prompt>', "a"),
    Bad("E_NAME", '<prompt schema="s">¶<a é="x"/></prompt>', "a"),
    Bad("E_ROLE_ORDER", '<prompt schema="s"><user><a>¶<user>x</user></a></user></prompt>', "a"),
    Bad("E_ROLE_ORDER", '<prompt schema="s">¶<user open="true">x</user> text</prompt>'),
    Bad("E_ROLE_ORDER", '<prompt schema="s"><a>¶<user open="true">x</user></a></prompt>', "a"),
    Bad("E_ROLE_ORDER", '<prompt schema="s"><user>x ¶<talk/></user></prompt>', "talk", "of its own"),
    Bad("E_SCHEMA_UNKNOWN", '¶<prompt schema="t"/>', message='"t"'),
    Bad("E_MODULE_UNKNOWN", '<prompt schema="s">\n <a>\n  ¶<iner/></a></prompt>', "a/iner", '"inner"'),
    Bad("E_MODULE_UNKNOWN", '<prompt schema="s">¶<inner/></prompt>', "inner"),
    Bad("E_MODULE_UNKNOWN", '<prompt schema="s"><z>¶<zz/></z></prompt>', "z/zz", "there are none"),
    Bad("E_DUP_IMPORT", '<prompt schema="s"><a/><z/>\n¶<a/></prompt>', "a"),
    Bad("E_UNION_CONFLICT", '<prompt schema="s"><y/>¶<x/></prompt>', "x", '"y" and "x"'),
    Bad("E_ARG_UNKNOWN", '<prompt schema="s">¶<a q="1"/></prompt>', "a", '"p"'),
    Bad("E_ARG_MISSING", '<prompt schema="s"><a/>¶<b/></prompt>', "b", '"q"'),
    Bad("E_ARG_TOO_LONG", '<prompt schema="s">¶<a p="one two three four"/></prompt>', "a", "4 tokens"),
    Bad(
        "E_TEXT_OVERFLOW", '<prompt schema="s"><a/>¶gap<b q="1"/></prompt>'.replace("<a/>", "<a><inner/></a>"), ""
    ),
    Bad("E_TEXT_OVERFLOW", '<prompt schema="s"><x/>\n ¶three whole words <talk/></prompt>', ""),
    Bad("E_TEXT_OVERFLOW", '<prompt schema="s"><a>¶one two<inner/></a></prompt>', "a"),
    Bad("E_TEXT_OVERFLOW", '<prompt schema="s">¶x<a/></prompt>', ""),
    Bad("E_ORDER", '<prompt schema="s"><z/> text ¶<a/></prompt>', "a", '"z" and "a"'),
    Bad(
        "E_ORDER",
        '<prompt schema="s"><a/><z/> text <talk/>¶<b q="1"/></prompt>',
        "b",
    ),
    Bad("E_EMPTY", '¶<prompt schema="s"/>'),
    Bad("E_EMPTY", '¶<prompt schema="s">\n</prompt>'),
    Bad("E_CONTEXT_LENGTH", f'¶<prompt schema="s"><a/>{"word " * 90}</prompt>'),
]


@pytest.mark.parametrize("bad", PROMPTS, ids=lambda bad: f"{bad.code}-{bad.source[-60:]}")
def test_prompts(bad: Bad) -> None:
    tokenizer = Words(PLAIN)
    schema = compile_schema(parse_schema(SCHEMA), tokenizer, scope="ancestors", context=CONTEXT)
    check(
        bad,
        lambda s: compile_prompt(schema, parse_prompt(s), tokenizer, context=CONTEXT, add_generation_prompt=False),
    )


def test_every_code_has_a_bad_input() -> None:
    tested = {bad.code for bad in (*SCHEMAS, *COMPILED, *PROMPTS)}
    assert tested == {code.value for code in ErrorCode}


@pytest.mark.parametrize(
    ("modules", "text", "extra"),
    [
        ([{"path": "a", "args": {"p": "one two three four"}}], "", {"len": 3, "got": 4}),
        ([], "word " * 200, {"context": CONTEXT, "got": 222}),
    ],
)
def test_numbers_of_an_error(modules: list[object], text: str, extra: dict[str, int]) -> None:
    tokenizer = Words()
    source = SCHEMA.replace("<user>", "").replace("</user>", "")
    schema = compile_schema(parse_schema(source), tokenizer, scope="ancestors", context=CONTEXT)
    prompt = prompt_from_json({"schema": "s", "modules": modules, "text": text})
    with pytest.raises(PmlError) as caught:
        compile_prompt(schema, prompt, tokenizer, context=CONTEXT, add_generation_prompt=False)
    assert caught.value.extra == extra
    prompt = parse_prompt('<prompt schema="s"><x/> one two three four<z/></prompt>')
    with pytest.raises(PmlError) as caught:
        compile_prompt(schema, prompt, tokenizer, context=CONTEXT, add_generation_prompt=False)
    assert caught.value.extra == {"capacity": 3, "got": 4}


def test_open_roles_in_a_union_do_not_follow_one_another() -> None:
    source = (
        '<schema name="s"><union><module name="a"><user open="true">x</user></module>'
        '<module name="b"><user open="true">y</user></module></union></schema>'
    )
    assert lint(parse_schema(source))
    assert schema_from_json({"schema": "s", "items": [{"role": "user", "open": True}]})
