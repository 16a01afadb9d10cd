"""Advice on schemas, and which texts will be wanted next."""

from __future__ import annotations

import pytest
from router.pml.words import Words

from trunkline.router import pml
from trunkline.router.pml import compile_prompt, compile_schema, likely_texts, lint, parse_prompt, parse_schema

LONG = "word " * 80


@pytest.mark.parametrize(
    ("body", "warnings"),
    [
        (f'<module name="a">{LONG}</module>', []),
        (f'<module name="a" cache="false">short</module><module name="b">{LONG}</module>', []),
        (
            '\n<module name="a">short</module>',
            ['2:1: the module "a" has about 1 tokens; it shares its KV, but fills '],
        ),
        ('<module name="a"/>', ['1:18: the module "a" has no text']),
        (f'<union><module name="a">{LONG}</module></union>', ['1:18: the union has only one module, "a"']),
        (
            f'<module name="a">{LONG}</module> <user open="true"/>',
            ["1:444: a text of the schema is only white space"],
        ),
        (f'<module name="a">{LONG}</module><user/>', ["1:444: <user> is empty"]),
        (
            f'<module name="a">{LONG}<param name="p" len="64"/></module>',
            ['1:435: the parameter "p" of "a" leaves 64 positions empty'],
        ),
        (
            f'<module name="a">{LONG}<module name="b">{LONG}</module></module><scaffold name="x" modules="a"/>',
            [
                '1:870: the scaffold "x" has only one module',
                '1:870: the scaffold "x" has "a" without "a/b" in it, which stays on its own',
            ],
        ),
        (
            f'<module name="a"><module name="b">{LONG}</module></module><scaffold name="x" modules="a a/b"/>',
            ['1:470: the scaffold "x" has the module "a", which has no text of its own'],
        ),
    ],
)
def test_lint(body: str, warnings: list[str]) -> None:
    found = lint(parse_schema(f'<schema name="s">{body}</schema>'))
    assert len(found) == len(warnings)
    for text, start in zip(found, warnings, strict=True):
        assert text.startswith(start)


def test_lint_counts_tokens_if_it_can() -> None:
    document = parse_schema(f'<schema name="s"><module name="a">{"x" * 1000}</module></schema>')
    assert lint(document) == []
    [warning] = lint(document, Words())
    assert 'the module "a" has 1 tokens' in warning


def test_siblings_are_likelier_than_others_and_the_most_used_come_first() -> None:
    schema = compile_schema(
        parse_schema(
            '<schema name="s">root<union><module name="a">1</module><module name="b">2</module>'
            '<module name="c">3</module></union><module name="d">4<module name="e">5</module></module>'
            '<module name="f" cache="false">6</module><module name="g">7</module></schema>'
        ),
        Words(),
        scope="ancestors",
        context=100,
    )
    prompt = compile_prompt(
        schema,
        parse_prompt('<prompt schema="s"><a/> go</prompt>'),
        Words(),
        context=100,
        add_generation_prompt=True,
    )

    def likely(uses: dict[str, int], limit: int = 9) -> list[str]:
        return [schema.modules[schema.texts[n].module].path for n in likely_texts(schema, prompt, uses, limit)]

    assert likely({}) == ["b", "c"]
    assert likely({"c": 2, "d/e": 5, "d": 1, "a": 9, "f": 7, "gone": 3, "g": 0}) == ["c", "b", "d/e", "d"]
    assert likely({"c": 2}, limit=1) == ["c"]


def test_the_public_names() -> None:
    assert sorted(pml.__all__) == pml.__all__
    assert all(hasattr(pml, name) for name in pml.__all__)
