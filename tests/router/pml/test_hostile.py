"""Documents that are meant to hurt: each is refused with a clear error, or costs what its size allows."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router.pml.documents import ODD_TEXTS, Maker, seeds
from router.pml.words import PLAIN, Words

from trunkline.router.pml import (
    CompiledSchema,
    PmlError,
    compile_prompt,
    compile_schema,
    parse_prompt,
    parse_schema,
    prompt_from_json,
    schema_from_json,
    schema_to_xml,
)
from trunkline.router.pml.compiled import Scope
from trunkline.router.pml.tree import DEPTH_MAX, NAME_CHARACTERS_MAX, NODES_MAX, SOURCE_BYTES_MAX


def refused(source: str | bytes, message: str, code: str = "E_XML") -> PmlError:
    with pytest.raises(PmlError, match=message) as caught:
        parse_schema(source)
    assert caught.value.code == code
    assert len(str(caught.value)) < 500
    return caught.value


def refused_json(message: str, **fields: Any) -> None:
    with pytest.raises(PmlError, match=message):
        (prompt_from_json if "modules" in fields else schema_from_json)({"schema": "s", **fields})


def compiled(source: str, context: int, scope: Scope = "ancestors") -> CompiledSchema:
    return compile_schema(parse_schema(source), Words(PLAIN), scope=scope, context=context)


def test_depth_bombs() -> None:
    for depth in (DEPTH_MAX, 10**5):
        error = refused('<schema name="s">' + '<module name="m">' * depth, "nested too deep")
        assert (error.line, error.column) == (1, 18 + 17 * (DEPTH_MAX - 1))
    value: dict[str, Any] = {"module": "m"}
    for _ in range(DEPTH_MAX - 1):
        value = {"module": "m", "items": [value]}
    refused_json("nested too deep", items=[value])
    assert schema_from_json({"schema": "s", "items": value["items"]})
    refused_json("nested too deep", modules=["/".join(["m"] * DEPTH_MAX)])


def test_more_than_is_allowed() -> None:
    error = refused('<schema name="s">' + '<module name="m"/>\n' * 10**5, f"more than {NODES_MAX}")
    assert error.line is not None
    assert error.line < NODES_MAX
    refused_json(f"allowed are {NODES_MAX}", items=[{"module": "m"}] * 10**6)
    refused_json(f"allowed are {NODES_MAX}", modules=[f"m{n}" for n in range(NODES_MAX)])
    refused(b" " * (SOURCE_BYTES_MAX + 1), f"allowed are {SOURCE_BYTES_MAX}")
    refused_json(f"allowed are {SOURCE_BYTES_MAX}", items=["x" * SOURCE_BYTES_MAX, "xxxxxxxx"])
    assert parse_schema('<schema name="s">' + "\n" * 8_000_000 + "</schema>").items == ()


@pytest.mark.parametrize("length", ["100", "2147483648", "9" * 5000])
def test_huge_parameters(length: str) -> None:
    with pytest.raises(PmlError) as caught:
        compiled(f'<schema name="s"><module name="m"><param name="p" len="{length}"/></module></schema>', 100)
    assert (caught.value.code, caught.value.column) == ("E_SCHEMA_TOO_LONG", 35)


def test_alternatives_and_scaffolds_that_add_up() -> None:
    """Alternatives share their positions, so the limit of the context lets them through."""
    member = '<module name="m{}"><param name="p" len="10000"/></module>'
    alternatives = f"<union>{''.join(map(member.format, range(1000)))}</union>"
    texts = "".join(f'text<module name="m{n}"/>' for n in range(1100))
    texts += "".join(f'<scaffold name="s{n}" modules="m{n}"/>' for n in range(1000))
    big = "".join(f'{"word " * 15_000}<module name="m{n}">x</module>' for n in range(40))
    big += "".join(f'<scaffold name="s{n}" modules="m{n}"/>' for n in range(40))
    for body, scope, message in (
        (alternatives, "ancestors", "in all; split it"),
        (texts, "ancestors", "scaffolds have more than"),
        (big, "self", "with its modules more than"),
    ):
        with pytest.raises(PmlError, match=message) as caught:
            compiled(f'<schema name="s">{body}</schema>', 10**6 if body is big else 20_000, scope)  # type: ignore[arg-type]
        assert caught.value.code == "E_SCHEMA_TOO_LONG"


@pytest.mark.parametrize("name", ["x" * (NAME_CHARACTERS_MAX + 1), "é" * 10**6])
def test_names_that_are_very_long(name: str) -> None:
    """Each of the modules within has it in its path."""
    inner = '<module name="m"/>' * 10_000
    refused(f'<schema name="s"><module name="{name}">{inner}</module></schema>', "a name of", "E_NAME")
    refused(f'<schema name="{name}"/>', "a name of", "E_NAME")
    with pytest.raises(PmlError, match="an import has a name of"):
        parse_prompt(f'<prompt schema="s"><{name}>{"<m/>" * 10_000}</{name}></prompt>')
    refused_json("an import has a name of", modules=[f"{name}/m{n}" for n in range(3)])


def test_paths_that_are_very_long() -> None:
    name = "x" * NAME_CHARACTERS_MAX
    inner = "".join(f'<module name="m{n}"/>' for n in range(10_000))
    nested = f'<module name="{name}">' * 4 + inner + "</module>" * 4
    refused(f'<schema name="{name}">{nested}</schema>', "the path of a module has", "E_NAME")
    with pytest.raises(PmlError, match="the path of a module has"):
        parse_prompt(f'<prompt schema="{name}">{f"<{name}>" * 5}{f"</{name}>" * 5}</prompt>')
    schema = compiled(f'<schema name="{name}"><module name="{name}"><module name="m"/></module></schema>', 9)
    prompt = parse_prompt(f'<prompt schema="{name}"><{name}><{name}/></{name}></prompt>')
    with pytest.raises(PmlError, match="has no module") as caught:
        compile_prompt(schema, prompt, Words(), context=9, add_generation_prompt=True)
    assert len(caught.value.message) + len(caught.value.path) < 1500


@settings(max_examples=100, deadline=None)
@given(seed=seeds)
def test_damaged_documents_are_refused_or_read(seed: int) -> None:
    """Never anything but a `PmlError`."""
    rng = random.Random(seed)
    tree = Maker(rng, ODD_TEXTS, roles=True).schema()
    source = bytearray(schema_to_xml(tree).encode())
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(source))
        if rng.random() < 0.5:
            damage = [b"<", b">", b"&", b"\xff", b"</", b"x", b" ", b'"']
            source[place : place + rng.randint(0, 3)] = rng.choice(damage)
        else:
            other = rng.randrange(len(source))
            source[place:place] = source[other : other + rng.randint(1, 30)]
    with suppress(PmlError):
        document = parse_schema(bytes(source))
        schema = compile_schema(document, Words(PLAIN), scope="ancestors", context=200)
        prompt = Maker(rng, ODD_TEXTS).prompt(document, gaps=True)
        compile_prompt(schema, prompt, Words(PLAIN), context=200, add_generation_prompt=True)


KEYS = "schema items module union param len role open scaffolds default ref args".split()
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["m", "user", "", "text", "\ud800"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=100, deadline=None)
@given(value=json_values)
def test_any_json_is_refused_or_read(value: Any) -> None:
    value = {"schema": "s", **value} if isinstance(value, dict) else value
    for read in (schema_from_json, prompt_from_json):
        with suppress(PmlError):
            read(value)
