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
    schema_from_json,
)

CONTEXT: Final = 100


class Bad(NamedTuple):
    """A wrong document, or what is wrong in its root, with `¶` where the mistake is."""

    code: str
    body: str
    path: str = ""
    message: str = "."

    def within(self, root: str) -> Bad:
        """The whole document, if this is what its root holds."""
        known = any(tag in self.body for tag in ("<schema", "<prompt"))
        name = {"schema": "name", "prompt": "schema"}[root]
        return self if known else self._replace(body=f'<{root} {name}="s">{self.body}</{root}>')


SCHEMAS: Final = [
    Bad("E_XML", "a <¶ b", message='write "&lt;"'),
    Bad("E_XML", "¶&nbsp;"),
    Bad("E_XML", '<schema name="s"><module name="a"></¶schema>'),
    Bad("E_XML", '<!-- x -->\n  ¶<!DOCTYPE schema SYSTEM "http://example.org/x"><schema name="s"/>'),
    Bad("E_XML", "\n  ¶<?php echo ?>", message="php"),
    Bad("E_XML", '¶<?xml version="1.0" encoding="latin1"?><schema name="s"/>', message="UTF-8"),
    Bad("E_XML", '¶<?xml version="1.1"?><schema name="s"/>', message=r"1\.1"),
    Bad("E_XML", "é\n€¶\ud800", message="Unicode"),
    Bad("E_XML", "é\n€¶\0", message=r"U\+0000"),
    Bad("E_XML", "<schema>" + "<module>" * 31 + "¶<module>" + "</module>" * 32 + "</schema>", message="32"),
    Bad("E_TAG", '¶<prompt schema="s"/>', message="not a <schema>"),
    Bad("E_TAG", '\n <module name="a">\n  ¶<modul name="b"/>\n </module>', "a", "<modul>"),
    Bad("E_TAG", '¶<module name="a" len="4"/>', message='"len"'),
    Bad("E_TAG", '¶<module name="a" cache="no"/>', "a", '"true" and "false"'),
    Bad("E_TAG", '<module name="a"> ¶<param name="p"/></module>', "a", "no len"),
    Bad("E_TAG", '<module name="a"> ¶<param name="p" len="-1"/></module>', "a", "-1"),
    Bad("E_TAG", '<module name="a">¶<param name="p" len="1">x</param></module>', "a"),
    Bad("E_TAG", '<module name="a">¶<parameter name="p" len="1"/></module>', "a"),
    Bad(
        "E_TAG",
        '<schema name="s"><module name="a">¶<param name="p" len="1" default="" required="true"/></module>'
        "</schema>",
        "a",
    ),
    Bad("E_TAG", '¶<union default="b"><module name="a"/></union>', message='"b"'),
    Bad("E_TAG", '<module name="a">¶<scaffold name="x" modules="a"/></module>', "a"),
    Bad("E_TAG", '<module name="a"/><scaffold name="x" modules="a"/>\n ¶text'),
    Bad("E_TAG", '¶<user xml:space="keep"/>'),
    Bad("E_NAME", "¶<schema/>", message="the schema has no name"),
    Bad("E_NAME", "¶<module/>", message="a module has no name"),
    Bad("E_NAME", '<module name="a">¶<module name="1a"/></module>', "a", "1a"),
    Bad("E_NAME", '¶<module name="union"/>', message="is a tag"),
    Bad("E_NAME", '<module name="a">¶<param name="é" len="1"/></module>', "a"),
    Bad("E_NAME", '<module name="a"/>¶<scaffold modules="a"/>'),
    Bad("E_DUP", '<module name="a"/>\n<union>¶<module name="a"/></union>', "a"),
    Bad("E_DUP", '<module name="a"><module name="b"/>¶<module name="b"/></module>', "a/b"),
    Bad("E_DUP", '<module name="a"><param name="p" len="1"/>¶<param name="p" len="2"/></module>', "a"),
    Bad("E_DUP", '<module name="a"/><scaffold name="x" modules="a"/>¶<scaffold name="x" modules="a"/>'),
    Bad("E_PARAM_ROOT", '\n\n ¶<param name="p" len="3"/>', message='"p"'),
    Bad("E_PARAM_ROOT", '<user>¶<param name="p" len="3"/></user>'),
    Bad("E_UNION_CONTENT", '<union>\n  ¶text<module name="a"/></union>'),
    Bad("E_UNION_CONTENT", '<module name="m"><union>¶<user/></union></module>', "m"),
    Bad("E_UNION_EMPTY", '<module name="m"> ¶<union>\n</union></module>', "m"),
    Bad("E_SCAFFOLD_PATH", '<module name="a"/>¶<scaffold name="x" modules=" "/>'),
    Bad(
        "E_SCAFFOLD_PATH",
        '<module name="maps"/>\n¶<scaffold name="x" modules="map"/>',
        "map",
        'did you mean "maps"',
    ),
    Bad("E_SCAFFOLD_PATH", '<module name="a"/>¶<scaffold name="x" modules="a a"/>', "a"),
    Bad(
        "E_SCAFFOLD_PATH",
        '<module name="a" cache="false"><module name="b"/></module>¶<scaffold name="x" modules="a/b"/>',
        "a/b",
        "not cached",
    ),
    Bad(
        "E_SCAFFOLD_PATH",
        '<union><module name="a"><module name="b"/></module><module name="c"/></union>'
        '¶<scaffold name="x" modules="a/b c"/>',
        "c",
        "union",
    ),
    Bad("E_SCHEMA_TOO_LONG", f'<module name="a">¶<param name="p" len="{2**31}"/></module>', "a"),
    Bad("E_ROLE_ORDER", "<user>a\n ¶<system>b</system></user>"),
    Bad("E_ROLE_ORDER", '<user><module name="a">¶<user/></module></user>', "a"),
    Bad("E_ROLE_ORDER", '¶<system open="true"/><module name="a"><user/></module>'),
]


@pytest.mark.parametrize("bad", SCHEMAS, ids=lambda bad: f"{bad.code}-{bad.body[-60:]}")
def test_schemas(bad: Bad) -> None:
    check(bad.within("schema"), parse_schema)


def check(bad: Bad, read: object) -> None:
    assert callable(read)
    before, behind = bad.body.split("¶")
    with pytest.raises(PmlError, match=bad.message) as caught:
        read(before + behind)
    error = caught.value
    assert (error.code, error.path) == (bad.code, bad.path)
    lines = before.split("\n")
    assert (error.line, error.column) == (len(lines), len(lines[-1]) + 1)
    assert str(error).startswith(f"{bad.code}: ")


COMPILED: Final = [
    Bad("E_SCHEMA_TOO_LONG", f"¶{'word ' * 99}word", message="100"),
    Bad("E_SCHEMA_TOO_LONG", '<module name="a">text¶<param name="p" len="99"/></module>', "a"),
    Bad(
        "E_SCHEMA_TOO_LONG",
        f'<union><module name="a">{"word " * 50}</module><module name="b"/></union>'
        f'<module name="c">¶{"word " * 50}</module>',
        "c",
    ),
    Bad("E_ARG_TOO_LONG", '<module name="a">\n¶<param name="p" len="2" default="one two three"/></module>', "a"),
    Bad("E_TEMPLATE", '<module name="a">¶<user>text</user></module>', "a", "no chat template"),
]


@pytest.mark.parametrize("bad", COMPILED, ids=lambda bad: f"{bad.code}-{bad.body[-60:]}")
def test_schemas_for_a_model(bad: Bad) -> None:
    check(
        bad.within("schema"),
        lambda s: compile_schema(parse_schema(s), Words(), scope="ancestors", context=CONTEXT),
    )


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
    bad = Bad("E_TEMPLATE", roles, "", message).within("schema")
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
    Bad("E_XML", "<a></¶b>"),
    Bad("E_TAG", '¶<schema name="s"/>', message="not a <prompt>"),
    Bad("E_TAG", '\n<a>¶<module name="x"/></a>', "a"),
    Bad("E_TAG", '¶<user name="x"/>'),
    Bad("E_NAME", "¶<prompt/>"),
    Bad("E_NAME", "<a>¶<x:y/></a>", "a"),
    Bad("E_NAME", '¶<a é="x"/>', "a"),
    Bad("E_ROLE_ORDER", "<user><a>¶<user>x</user></a></user>", "a"),
    Bad("E_ROLE_ORDER", '¶<user open="true">x</user> text'),
    Bad("E_ROLE_ORDER", '<a>¶<user open="true">x</user></a>', "a"),
    Bad("E_ROLE_ORDER", "<user>x ¶<talk/></user>", "talk", "of its own"),
    Bad("E_SCHEMA_UNKNOWN", '¶<prompt schema="t"/>', message='"t"'),
    Bad("E_MODULE_UNKNOWN", "\n <a>\n  ¶<iner/></a>", "a/iner", '"inner"'),
    Bad("E_MODULE_UNKNOWN", "¶<inner/>", "inner"),
    Bad("E_MODULE_UNKNOWN", "<z>¶<zz/></z>", "z/zz", "there are none"),
    Bad("E_DUP_IMPORT", "<a/><z/>\n¶<a/>", "a"),
    Bad("E_UNION_CONFLICT", "<y/>¶<x/>", "x", '"y" and "x"'),
    Bad("E_ARG_UNKNOWN", '¶<a q="1"/>', "a", '"p"'),
    Bad("E_ARG_MISSING", "<a/>¶<b/>", "b", '"q"'),
    Bad("E_ARG_TOO_LONG", '¶<a p="one two three four"/>', "a", "4 tokens"),
    Bad("E_TEXT_OVERFLOW", '<a/>¶gap<b q="1"/>'.replace("<a/>", "<a><inner/></a>"), ""),
    Bad("E_TEXT_OVERFLOW", "<x/>\n ¶three whole words <talk/>", ""),
    Bad("E_TEXT_OVERFLOW", "<a>¶one two<inner/></a>", "a"),
    Bad("E_TEXT_OVERFLOW", "¶x<a/>", ""),
    Bad("E_ORDER", "<z/> text ¶<a/>", "a", '"z" and "a"'),
    Bad("E_ORDER", '<a/><z/> text <talk/>¶<b q="1"/>', "b"),
    Bad("E_EMPTY", '¶<prompt schema="s"/>'),
    Bad("E_EMPTY", '¶<prompt schema="s">\n</prompt>'),
    Bad("E_CONTEXT_LENGTH", f'¶<prompt schema="s"><a/>{"word " * 90}</prompt>'),
]


@pytest.mark.parametrize("bad", PROMPTS, ids=lambda bad: f"{bad.code}-{bad.body[-60:]}")
def test_prompts(bad: Bad) -> None:
    tokenizer = Words(PLAIN)
    schema = compile_schema(parse_schema(SCHEMA), tokenizer, scope="ancestors", context=CONTEXT)
    check(
        bad.within("prompt"),
        lambda s: compile_prompt(schema, parse_prompt(s), tokenizer, context=CONTEXT, add_generation_prompt=False),
    )


def test_every_code_has_a_bad_input() -> None:
    tested = {bad.code for bad in (*SCHEMAS, *COMPILED, *PROMPTS)}
    assert tested == {code.value for code in ErrorCode}


def test_numbers_of_an_error() -> None:
    tokenizer = Words()
    source = SCHEMA.replace("<user>", "").replace("</user>", "")
    schema = compile_schema(parse_schema(source), tokenizer, scope="ancestors", context=CONTEXT)
    for body, extra in (
        ('<a p="one two three four"/>', {"len": 3, "got": 4}),
        ("word " * 200, {"context": CONTEXT, "got": 222}),
        ("<x/> one two three four<z/>", {"capacity": 3, "got": 4}),
    ):
        prompt = parse_prompt(f'<prompt schema="s">{body}</prompt>')
        with pytest.raises(PmlError) as caught:
            compile_prompt(schema, prompt, tokenizer, context=CONTEXT, add_generation_prompt=False)
        assert caught.value.extra == extra


def test_open_roles_in_a_union_do_not_follow_one_another() -> None:
    source = (
        '<schema name="s"><union><module name="a"><user open="true">x</user></module>'
        '<module name="b"><user open="true">y</user></module></union></schema>'
    )
    assert lint(parse_schema(source))
    assert schema_from_json({"schema": "s", "items": [{"role": "user", "open": True}]})
