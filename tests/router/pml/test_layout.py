"""Where a schema's tokens stand and what its texts see, against definitions that know nothing of the compiler."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from hypothesis import given, settings
from router.pml.documents import WORD_TEXTS, Maker, own_items, seeds
from router.pml.words import PLAIN, Words

from trunkline.router.pml import CompiledSchema, SchemaDocument, compile_schema, parse_schema
from trunkline.router.pml.compiled import Scope
from trunkline.router.pml.tree import Item, Module, Param, RoleItem, Text, Union, modules_below

quick = settings(max_examples=50, deadline=None)
LONG = 1 << 20


def compiled(document: SchemaDocument | str, scope: Scope = "ancestors", *, bos: bool = False) -> CompiledSchema:
    tree = parse_schema(document) if isinstance(document, str) else document
    return compile_schema(tree, Words(bos=bos), scope=scope, context=LONG)


def random_schema(seed: int, *, scaffolds: bool = False) -> SchemaDocument:
    return Maker(random.Random(seed), WORD_TEXTS).schema(scaffolds=scaffolds)


class Run(NamedTuple):
    """A segment as the specification defines it."""

    path: str
    number: int
    """In document order."""
    position: int
    tokens: int
    cached: bool


def runs_of(items: Sequence[Item], start: int = 0) -> tuple[list[Run], int]:
    """All segments, and where the cursor ends: the definition, without regard to cost."""
    tokenizer = Words()
    runs: list[Run] = []

    def walk(items: Sequence[Item], path: str, cached: bool, cursor: int) -> int:
        begin = None
        for item in (*items, None):
            if isinstance(item, Text | Param):
                begin = cursor if begin is None else begin
                cursor += item.length if isinstance(item, Param) else len(tokenizer.encode_plain(item.text))
                continue
            if begin is not None:
                runs.append(Run(path, len(runs), begin, cursor - begin, cached))
                begin = None
            if isinstance(item, Module | Union):
                members = item.members if isinstance(item, Union) else (item,)
                cursor = max(
                    walk(m.items, f"{path}/{m.name}" if path else m.name, cached and m.cache, cursor)
                    for m in members
                )
        return cursor

    return runs, walk(items, "", True, start)


def sees(scope: Scope, one: Run, other: Run) -> bool:
    """Whether a token of `one` sees those of `other`, which is another segment."""
    if other.number >= one.number:
        return False
    if scope == "self":
        return one.path == other.path
    return not other.path or one.path == other.path or one.path.startswith(f"{other.path}/")


@quick
@given(seed=seeds, bos=...)
def test_positions_and_texts_are_as_defined(seed: int, bos: bool) -> None:
    document = random_schema(seed)
    schema = compiled(document, bos=bos)
    runs, extent = runs_of(document.items, start=int(bos))
    assert schema.extent == extent
    found = sorted(
        (module.path, segment.position, len(segment.tokens), module.cached)
        for module in schema.modules
        for segment in module.segments
    )
    expected = [(run.path, run.position, run.tokens, run.cached) for run in runs]
    if bos and document.items and isinstance(document.items[0], Text):
        expected[0] = ("", 0, expected[0][2] + 1, True)
    elif bos:
        expected.insert(0, ("", 0, 1, True))
    assert found == sorted(expected)
    assert [text.position for text in schema.texts] == [run[1] for run in expected if run[3]]
    for module in schema.modules:
        assert all(module.start <= segment.position <= segment.end <= module.end for segment in module.segments)
    assert [module.path for module in schema.modules] == ["", *(path for path, _ in modules_below(document.items))]


@quick
@given(seed=seeds, scope=...)
def test_who_sees_whom_is_as_defined(seed: int, scope: Scope) -> None:
    document = random_schema(seed)
    schema = compiled(document, scope)
    runs = [run for run in runs_of(document.items)[0] if run.cached]
    assert len(runs) == len(schema.texts)
    for index, text in enumerate(schema.texts):
        seen = set()
        parent = text.parent
        while parent >= 0:
            assert parent < index
            seen.add(parent)
            parent = schema.texts[parent].parent
        assert seen == {other for other, run in enumerate(runs) if sees(scope, runs[index], run)}


@quick
@given(seed=seeds, scope=...)
def test_scaffolds_are_chains(seed: int, scope: Scope) -> None:
    document = random_schema(seed, scaffolds=True)
    schema = compiled(document, scope)
    runs = [run for run in runs_of(document.items)[0] if run.cached]
    for scaffold, source in zip(schema.scaffolds, document.scaffolds, strict=True):
        around = {"", *source.modules}
        around |= {path[:cut] for path in source.modules for cut in range(len(path)) if path[cut] == "/"}
        chain = [index for index, run in enumerate(runs) if run.path in around]
        versions = {**{index: index for index in chain}, **scaffold.ancestor_texts, **scaffold.member_texts}
        assert set(versions) == set(chain)
        last = -1
        for index in chain:
            version = schema.texts[versions[index]]
            assert version.segment is schema.texts[index].segment
            assert version.parent == last
            last = versions[index]
        assert {schema.modules[schema.texts[index].module].path for index in scaffold.member_texts} <= set(
            source.modules
        )
    pairs = [(text.segment.index, text.parent) for text in schema.texts]
    assert len(set(pairs)) == len(pairs), "a version was made twice"


def test_what_is_seen_of_a_segment_is_all_but_parameters() -> None:
    schema = compiled(
        '<schema name="s"><module name="m"><param name="a" len="2" fill="x y"/>one two<param name="b" len="1"/>'
        '<param name="c" len="3" default="d e"/> three</module></schema>'
    )
    [text] = schema.texts
    assert text.segment.seen == ((2, 4), (8, 9))
    assert len(text.tokens) == 9
    x, y = text.tokens[:2]
    assert x != y
    module = schema.module("m")
    assert module is not None
    assert [(slot.name, slot.position, slot.length) for slot in module.params] == [
        ("a", 0, 2),
        ("b", 4, 1),
        ("c", 5, 3),
    ]
    assert module.params[2].default_ids == tuple(Words().encode_plain("d e"))
    assert module.tokens == 9
    assert schema.module("n") is None


def test_a_bos_is_the_schemas_first_token() -> None:
    schema = compiled('<schema name="s"><module name="m">one</module></schema>', bos=True)
    assert [text.tokens.tolist() for text in schema.texts] == [[0], Words().encode_plain("one")]
    alone = compiled('<schema name="s"><module name="m">one</module></schema>', "self", bos=True)
    assert [text.parent for text in alone.texts] == [-1, -1]


@quick
@given(seed=seeds)
def test_roles_change_no_ones_place(seed: int) -> None:
    """A schema with roles has the same own texts in the same order as without."""
    document = Maker(random.Random(seed), WORD_TEXTS, roles=True).schema(scaffolds=False)
    schema = compile_schema(document, Words(PLAIN), scope="ancestors", context=LONG)
    parts = dict(modules_below(document.items))
    for module in schema.modules[1:]:
        own = [piece for segment in module.segments for piece in segment.pieces if piece.kind != "role"]
        items = own_items(parts[module.path].items)
        assert [piece.text for piece in own] == [i.text if isinstance(i, Text) else i.name for i in items]
    assert sum(len(module.roles) for module in schema.modules) == count_roles(document.items)


def count_roles(items: Sequence[Item]) -> int:
    total = 0
    for item in items:
        match item:
            case RoleItem():
                total += 1 + count_roles(item.items)
            case Module():
                total += count_roles(item.items)
            case Union():
                total += count_roles(item.members)
            case _:
                pass
    return total
