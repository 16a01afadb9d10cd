"""What a prompt reuses and computes, and where all of it stands."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from router.pml.documents import WORD_TEXTS, Maker, seeds
from router.pml.words import Words

from trunkline.router.pml import (
    CompiledPrompt,
    CompiledSchema,
    PmlError,
    PromptDocument,
    compile_prompt,
    compile_schema,
    parse_prompt,
    parse_schema,
    to_layout,
)
from trunkline.router.pml.compiled import Scope, Trailing
from trunkline.router.pml.tree import PromptItem, Ref

quick = settings(max_examples=80, deadline=None)
LONG = 1 << 20


def schema_of(source: str, scope: Scope = "ancestors") -> CompiledSchema:
    return compile_schema(parse_schema(source), Words(), scope=scope, context=LONG)


def prompt_of(
    schema: CompiledSchema, source: str | PromptDocument, trailing: Trailing = "fixed"
) -> CompiledPrompt:
    document = parse_prompt(source) if isinstance(source, str) else source
    return compile_prompt(schema, document, Words(), context=LONG, trailing=trailing, add_generation_prompt=True)


def random_prompt(seed: int, *, gaps: bool = False) -> tuple[CompiledSchema, PromptDocument, CompiledPrompt]:
    """A schema with scaffolds, and a prompt of it in which gap texts may stand wherever there is room."""
    rng = random.Random(seed)
    maker = Maker(rng, WORD_TEXTS)
    tree = maker.schema()
    scope: Scope = rng.choice(["ancestors", "self"])
    schema = compile_schema(tree, Words(bos=rng.random() < 0.5), scope=scope, context=LONG)
    document = maker.prompt(tree, gaps=gaps)
    try:
        return schema, document, prompt_of(schema, document, rng.choice(["fixed", "compact"]))
    except PmlError as error:
        assume(error.code not in ("E_TEXT_OVERFLOW", "E_EMPTY", "E_ARG_MISSING"))
        raise


def seen_positions(prompt: CompiledPrompt) -> dict[int, int]:
    """Position → token of all that is seen of cached texts."""
    found: dict[int, int] = {}
    for text in prompt.texts:
        for start, stop in text.seen:
            for offset in range(start, stop):
                assert text.position + offset not in found
                found[text.position + offset] = int(text.tokens[offset])
    return found


def own_positions(prompt: CompiledPrompt) -> dict[int, int]:
    """Position → token of the request's own tokens."""
    positions = [position + offset for position, count in prompt.runs for offset in range(count)]
    assert positions == sorted(set(positions))
    assert len(positions) == len(prompt.own)
    return dict(zip(positions, prompt.own.tolist(), strict=True))


@quick
@given(seed=seeds, gaps=...)
def test_layouts_of_random_prompts(seed: int, gaps: bool) -> None:
    schema, _, prompt = random_prompt(seed, gaps=gaps)
    seen, own = seen_positions(prompt), own_positions(prompt)
    # Seen and own tokens share no position, and the last token of all is computed.
    assert seen.keys().isdisjoint(own.keys())
    assert max(own) > max(seen, default=-1)
    assert prompt.end == max(own) + 1
    assert (prompt.module_tokens, prompt.prompt_tokens) == (len(seen), len(seen) + len(own))
    assert all(one + count < other for (one, count), (other, _) in pairwise(prompt.runs))
    placeholders = {
        position
        for index in prompt.modules
        for slot in schema.modules[index].params
        for position in range(slot.position, slot.position + slot.length)
    }
    assert placeholders.isdisjoint(seen)
    assert prompt.own.dtype == np.int32
    # Every token of the selected modules stands in its place; all else is the request's own text.
    there = {**seen, **own}
    for index in prompt.modules:
        for segment in schema.modules[index].segments:
            for start, stop in segment.seen:
                for offset in range(start, stop):
                    assert there.pop(segment.position + offset) == segment.tokens[offset]
    kinds = {piece.kind for piece in prompt.pieces if piece.position in there}
    assert kinds <= {"argument", "gap", "trailing"}
    check_texts(schema, prompt)
    check_pieces(prompt, set(seen), set(own))


def check_texts(schema: CompiledSchema, prompt: CompiledPrompt) -> None:
    """Texts come behind their parents, and none comes that is not needed."""
    needed = set()
    for place, text in enumerate(prompt.texts):
        assert text.parent < place
        source = schema.texts[text.index]
        parent = prompt.texts[text.parent].index if text.parent >= 0 else -1
        assert (source.parent, source.position) == (parent, text.position)
        if text.seen:
            while place >= 0:
                needed.add(place)
                place = prompt.texts[place].parent
    assert needed == set(range(len(prompt.texts)))


def check_pieces(prompt: CompiledPrompt, seen: set[int], own: set[int]) -> None:
    """Pieces show every token once, in order."""
    cached: set[int] = set()
    computed: set[int] = set()
    end = 0
    for piece in prompt.pieces:
        assert piece.position >= end
        end = piece.position + piece.count
        if piece.kind != "hole":
            (cached if piece.cached else computed).update(range(piece.position, end))
    assert (cached, computed) == (seen, own)


@quick
@given(seed=seeds)
def test_the_order_of_imports_does_not_matter(seed: int) -> None:
    schema, document, prompt = random_prompt(seed)
    rng = random.Random(seed)
    other = prompt_of(schema, replace(document, items=shuffled(document.items, rng)), trailing="fixed")
    same = prompt_of(schema, document, trailing="fixed")
    assert to_layout(other) == to_layout(same)
    assert np.array_equal(other.own, same.own)
    assert prompt.modules == other.modules


def shuffled(items: tuple[PromptItem, ...], rng: random.Random) -> tuple[PromptItem, ...]:
    """The same imports in another order; texts keep their places."""
    refs = [replace(item, items=shuffled(item.items, rng)) for item in items if isinstance(item, Ref)]
    rng.shuffle(refs)
    return tuple(refs.pop() if isinstance(item, Ref) else item for item in items)


@quick
@given(seed=seeds)
def test_scaffolds_show_the_same_tokens(seed: int) -> None:
    rng = random.Random(seed)
    maker = Maker(rng, WORD_TEXTS)
    tree = maker.schema()
    document = maker.prompt(tree)
    prompts = []
    for schema in (tree, replace(tree, scaffolds=())):
        try:
            prompts.append(prompt_of(compile_schema(schema, Words(), scope="ancestors", context=LONG), document))
        except PmlError as error:
            assume(error.code not in ("E_EMPTY", "E_ARG_MISSING"))
            raise
    with_scaffolds, without = prompts
    assert seen_positions(with_scaffolds) == seen_positions(without)
    assert with_scaffolds.pieces == without.pieces


def test_of_several_scaffolds_the_largest_goes_first() -> None:
    schema = schema_of(
        '<schema name="s">r<module name="a">one</module><module name="b">one two three</module>'
        '<module name="c">one two</module> end'
        '<scaffold name="ab" modules="a b"/><scaffold name="bc" modules="b c"/>'
        '<scaffold name="a" modules="a"/></schema>'
    )
    prompt = prompt_of(schema, '<prompt schema="s"><a/><b/><c/> go</prompt>')
    shown = {(text.path, schema.texts[text.index].scaffold) for text in prompt.texts if text.seen}
    assert shown == {("", ""), ("a", ""), ("b", ""), ("c", "bc"), ("", "bc")}, "a's own scaffold changes no one"
    two = prompt_of(schema, '<prompt schema="s"><a/><b/> go</prompt>')
    assert {schema.texts[text.index].scaffold for text in two.texts if text.path == "b"} == {"ab"}


TRIP = """
<schema name="trip">
  Plan:
  <module name="plan">
    <param name="days" len="3" default="one two"/> long
    <module name="deep">very deep</module>
  </module>
  <union default="miami">
    <module name="miami">hot</module>
    <module name="paris">big and old</module>
  </union>
  <module name="raw" cache="false">not <param name="p" len="2"/> cached</module>
  <module name="end">end of it</module>
</schema>
"""
# " Plan: " 0-1, plan 2-8 (days 2-4, " long " 5-6, deep 7-8), miami 9, paris 9-11, raw 12-16 (p 14-15), end 17-19


def pieces(prompt: CompiledPrompt, *kinds: str) -> list[tuple[str, int, int]]:
    return [(piece.kind, piece.position, piece.count) for piece in prompt.pieces if piece.kind in kinds]


@pytest.mark.parametrize(
    ("source", "argument"),
    [
        ("<plan/>", [("argument", 2, 2), ("hole", 4, 1)]),
        ('<plan days="x"/>', [("argument", 2, 1), ("hole", 3, 2)]),
        ('<plan days="x y z"/>', [("argument", 2, 3)]),
        ('<plan days=""/>', [("hole", 2, 3)]),
        ("<raw/>", [("hole", 14, 2)]),
        ('<raw p="one"/>', [("argument", 14, 1), ("hole", 15, 1)]),
    ],
)
def test_arguments(source: str, argument: list[tuple[str, int, int]]) -> None:
    prompt = prompt_of(schema_of(TRIP), f'<prompt schema="trip">{source} go</prompt>')
    assert pieces(prompt, "argument", "hole") == argument


def test_a_union_has_its_default_where_none_is_imported() -> None:
    schema = schema_of(TRIP)
    for imports, paths in (("<end/>", ["", "miami", "end"]), ("<paris/>", ["", "paris"])):
        prompt = prompt_of(schema, f'<prompt schema="trip">{imports}</prompt>')
        assert [schema.modules[index].path for index in prompt.modules] == paths


def test_a_default_is_selected_with_its_module_and_brings_its_own() -> None:
    schema = schema_of(
        '<schema name="s"><module name="m"><union default="a"><module name="a">x<union default="b">'
        '<module name="b">y</module></union></module></union></module></schema>'
    )
    assert [text.path for text in prompt_of(schema, '<prompt schema="s"><m/> go</prompt>').texts] == [
        "m/a",
        "m/a/b",
    ]
    assert prompt_of(schema, '<prompt schema="s">go</prompt>').texts == ()


@pytest.mark.parametrize(
    ("source", "gaps"),
    [
        # Behind an import: at that module's own end, a short union member's too, …
        ("<plan/>one two<end/>", [("gap", 9, 2)]),
        ("<miami/>one two<end/>", [("gap", 10, 2)]),
        # … that of the last one in the schema, whatever their order.
        ("<miami/><plan><deep/></plan>one two<end/>", [("gap", 10, 2)]),
        # Within an import: behind the import in it, or behind all that is selected of it.
        ("<plan><deep/>one</plan>two<end/>", [("gap", 9, 1), ("gap", 10, 1)]),
        ("<plan>one</plan>two<end/>", [("gap", 7, 1), ("gap", 9, 1)]),
        ("<plan>1 2 3 4</plan>two<end/>", [("gap", 7, 4), ("gap", 11, 1)]),
        # Before the first import: behind what is selected before it, in the same module.
        ("two three<end/>", [("gap", 2, 2)]),
        ("<plan>one<deep/></plan><end/>", None),
        ("<raw>x</raw>one<end/>", None),
        ("<paris/>1 2 3 4 5<end/>", [("gap", 12, 5)]),
        ("<paris/>1 2 3 4 5 6<end/>", None),
    ],
)
def test_gaps(source: str, gaps: list[tuple[str, int, int]] | None) -> None:
    schema = schema_of(TRIP.replace(' default="miami"', ""))
    source = f'<prompt schema="trip">{source} and go</prompt>'
    if gaps is None:
        with pytest.raises(PmlError) as caught:
            prompt_of(schema, source)
        assert caught.value.code == "E_TEXT_OVERFLOW"
        return
    prompt = prompt_of(schema, source)
    assert pieces(prompt, "gap") == gaps
    assert pieces(prompt, "trailing") == [("trailing", schema.extent, 2)]


def test_a_text_runs_on_behind_that_of_the_import_before_it() -> None:
    schema = schema_of(
        '<schema name="s"><module name="a">a<module name="b">b</module></module>'
        '<module name="free">1 2 3 4</module><module name="c">c</module></schema>'
    )
    prompt = prompt_of(schema, '<prompt schema="s"><a><b/>x y</a>z<c/></prompt>')
    assert pieces(prompt, "gap") == [("gap", 2, 2), ("gap", 4, 1)]


@pytest.mark.parametrize(("trailing", "position"), [("fixed", 20), ("compact", 10)])
def test_trailing_text(trailing: Trailing, position: int) -> None:
    prompt = prompt_of(schema_of(TRIP), '<prompt schema="trip"><plan/> what now?</prompt>', trailing)
    assert pieces(prompt, "trailing") == [("trailing", position, 2)]
    assert prompt.end == position + 2


def test_a_prompt_of_modules_computes_the_last_token_only() -> None:
    schema = schema_of(TRIP)
    prompt = prompt_of(schema, '<prompt schema="trip"><end/><raw/></prompt>')
    assert own_positions(prompt).keys() == {12, 13, 16, 19}
    assert prompt.texts[-1].seen == ((0, 2),)
    assert [piece.cached for piece in prompt.pieces if piece.path == "end"] == [True, False]
    hole = schema_of('<schema name="s">x<module name="m"><param name="p" len="3"/></module></schema>')
    prompt = prompt_of(hole, '<prompt schema="s"><m/></prompt>')
    assert (prompt.texts, prompt.runs, prompt.end) == ((), ((0, 1),), 1)
