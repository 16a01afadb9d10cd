"""Prompts of several schemas: each lies behind the one before, and is what it is alone, only further on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import pytest
from router.pml.documents import WORD_TEXTS, Maker
from router.pml.words import CHATML, PLAIN, Words
from seeds import seeds

from trunkline.controller.messages import ModuleText
from trunkline.kvstore.chunks import ChunkName
from trunkline.kvstore.module_names import RelocationRule, modules_root, text_names
from trunkline.router.pml import (
    CompiledPrompt,
    CompiledSchema,
    PmlError,
    compile_prompt,
    compile_schema,
    join_schemas,
    parse_prompt,
    parse_schema,
    prompt_from_json,
    texts_message,
    to_layout,
)
from trunkline.router.pml.compiled import Scope
from trunkline.router.pml.tree import PromptDocument, Text

CONTEXT = 1 << 20
SCOPES: Final[tuple[Scope, ...]] = ("ancestors", "self")
TOOLS = """<schema name="tools"><system>You have tools.<module name="hammer"> A hammer hits.</module>
<union default="saw"><module name="saw"> A saw cuts.</module>
<module name="drill"> A drill turns round.</module></union></system></schema>"""
PLACES = """<schema name="places"><system>Places:
<module name="rome"> Rome is warm for <param name="days" len="3"/>.</module>
<module name="oslo"> Oslo is far.</module></system></schema>"""
OPEN = '<schema name="open"><user open="true">Please tell: </user></schema>'
BARE = '<schema name="bare">Some text.<module name="more"> More text.</module></schema>'


def compiled(source: str, tokenizer: Words) -> CompiledSchema:
    return compile_schema(parse_schema(source), tokenizer, scope="ancestors", context=CONTEXT)


def prompt_of(
    sources: list[str], prompt: str | PromptDocument, tokenizer: Words, **fields: object
) -> CompiledPrompt:
    document = parse_prompt(prompt) if isinstance(prompt, str) else prompt
    joined = join_schemas([compiled(source, tokenizer) for source in sources])
    options: dict[str, Any] = {"context": CONTEXT, "add_generation_prompt": True} | fields
    return compile_prompt(joined, document, tokenizer, **options)


def contents(texts: Sequence[ModuleText]) -> list[bytes]:
    """The names of the KV of texts, wherever they stand."""
    base, named = modules_root(b"salt"), list[tuple[ChunkName, int]]()
    for text in texts:
        above = named[text.parent] if text.parent >= 0 else None
        names = text_names(text.position, text.tokens, above, base, RelocationRule.WITH_ITS_PARENT, 256)
        named.append((names.content, text.position))
    return [name for name, _ in named]


def kv_of(prompt: CompiledPrompt) -> list[bytes]:
    return contents(to_layout(prompt).texts)


def tokens_at(prompt: CompiledPrompt) -> dict[int, int]:
    """Position → token of all that the answer sees."""
    found = {
        text.position + at: int(text.tokens[at])
        for text in prompt.texts
        for start, stop in text.seen
        for at in range(start, stop)
    }
    own = iter(prompt.own.tolist())
    for position, count in prompt.runs:
        for at in range(position, position + count):
            assert at not in found
            found[at] = next(own)
    return found


@pytest.mark.parametrize("template", [PLAIN, CHATML])
def test_two_schemas_in_a_conversation(template: str) -> None:
    """Their KV is that of prompts with one of them alone; the model reads what it would read of both."""
    words = Words(template)
    told = [{"role": "user", "content": "What now?"}]
    both = prompt_of(
        [TOOLS, PLACES], '<prompt schema="tools places"><oslo/><hammer/></prompt>', words, messages=told
    )
    known = [contents(texts_message(compiled(source, words))) for source in (TOOLS, PLACES)]
    assert set(kv_of(both)) <= {name for names in known for name in names}
    system = [
        {"role": "system", "content": "You have tools. A hammer hits. A saw cuts."},
        {"role": "system", "content": "Places:  Oslo is far."},
    ]
    expected = words.render_chat([*system, *told], add_generation_prompt=True).removeprefix("<s>")
    assert "".join(piece.text for piece in both.pieces) == expected


def test_messages_are_in_the_order_of_the_schemas() -> None:
    early = "m.role == 'assistant' and messages[loop.index0 - 1].role != 'user'"
    late = "not loop.first and m.role == 'system'"
    strict = f"{{% if {early} or {late} %}}{{{{ raise_exception('not now') }}}}{{% endif %}}"
    words = Words(CHATML.replace("{% for m in messages %}", "{% for m in messages %}" + strict))
    modules = '<module name="a">a</module><module name="b">b</module>'
    first = f'<schema name="first">{modules}<system>Be brief.</system></schema>'
    second = '<schema name="second"><user>Hello.</user></schema>'
    told = [{"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Why?"}]
    prompt = prompt_of([first, second], '<prompt schema="first second"/>', words, messages=told)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."}, *told]
    expected = words.render_chat(messages, add_generation_prompt=True)
    assert "".join(piece.text for piece in prompt.pieces) == expected


def test_only_the_first_has_a_bos() -> None:
    words = Words(bos=True)
    both = prompt_of([BARE, TOOLS.replace("<system>", "").replace("</system>", "")],
                     '<prompt schema="bare tools"><more/><saw/></prompt>', words)  # fmt: skip
    [bos] = words.bos_ids
    assert [token for _, token in sorted(tokens_at(both).items())].count(bos) == 1
    assert tokens_at(both)[0] == bos


def test_texts_arguments_and_messages_stand_where_they_belong() -> None:
    words = Words(PLAIN)
    source = '<prompt schema="tools places"><drill/><rome days="two"/> Where?</prompt>'
    prompt = prompt_of([TOOLS, PLACES], source, words)
    first = compiled(TOOLS, words)
    at = {piece.text: piece.position for piece in prompt.pieces}
    assert first.extent <= at["two"] < at[" Where?"] == first.extent + compiled(PLACES, words).extent
    as_json = {
        "schema": "tools places",
        "modules": ["drill", {"path": "rome", "args": {"days": "two"}}],
        "text": " Where?",
    }
    again = prompt_of([TOOLS, PLACES], prompt_from_json(as_json), words)
    assert (again.runs, again.own.tolist()) == (prompt.runs, prompt.own.tolist())
    gap = prompt_of([OPEN, BARE], '<prompt schema="open bare"><more/> Thanks.</prompt>', words)
    assert "".join(piece.text for piece in gap.pieces).endswith(
        "Please tell: Some text. More text. Thanks.</s><|assistant|>"
    )


@pytest.mark.parametrize(
    ("sources", "prompt", "code"),
    [
        ([TOOLS, TOOLS], '<prompt schema="tools tools"/>', "E_DUP_IMPORT"),
        ([TOOLS, BARE.replace("more", "saw")], '<prompt schema="tools bare"/>', "E_DUP"),
        ([OPEN, TOOLS], '<prompt schema="open tools"/>', "E_ROLE_ORDER"),
        ([TOOLS, PLACES], '<prompt schema="places tools"/>', "E_SCHEMA_UNKNOWN"),
        ([TOOLS, PLACES], '<prompt schema="tools places"><rome/> and <saw/></prompt>', "E_ORDER"),
        ([TOOLS, PLACES], '<prompt schema="tools places"><saw/><drill/></prompt>', "E_UNION_CONFLICT"),
        ([TOOLS, PLACES], '<prompt schema="tools 1"/>', "E_NAME"),
        ([TOOLS, PLACES], '<prompt schema=" "/>', "E_NAME"),
        ([TOOLS], f'<prompt schema="{" ".join(f"s{n}" for n in range(17))}"/>', "E_NAME"),
    ],
)  # fmt: skip
def test_what_is_wrong_has_a_code(sources: list[str], prompt: str, code: str) -> None:
    with pytest.raises(PmlError) as error:
        prompt_of(sources, prompt, Words(PLAIN))
    assert error.value.code == code


@pytest.mark.parametrize("seed", seeds(1))
def test_random_schemas_side_by_side(seed: int) -> None:
    """Of each schema the same is seen as alone, moved by the extents before it, in versions of scaffolds, too."""
    rng, joined = random.Random(seed), 0
    for _ in range(60):
        words = Words(bos=rng.random() < 0.5)
        found = [_random(rng, words, 100 * number) for number in range(rng.randrange(2, 5))]
        alone = [each for each in found if each is not None]
        if len(alone) < 2:
            continue
        joined += 1
        items = tuple(item for _, document, _ in alone for item in document.items)
        whole = PromptDocument(" ".join(schema.name for schema, _, _ in alone), items)
        both = join_schemas([schema for schema, _, _ in alone])
        prompt = compile_prompt(both, whole, words, context=CONTEXT, add_generation_prompt=False)
        expected, position, known = dict[int, int](), 0, set[bytes]()
        for schema, _, own in alone:
            bos = len(words.bos_ids) if position else 0
            expected |= {at + position: token for at, token in tokens_at(own).items() if at >= bos}
            known |= set(contents(texts_message(schema)))
            position += schema.extent
        assert tokens_at(prompt) == expected
        kv = set(kv_of(prompt))
        assert kv <= known, "no KV of its own"
        for _, _, own in alone:
            texts = zip(kv_of(own), own.texts, strict=True)
            # Of a shorter text a BOS and the last token, which is computed, may be all.
            assert kv >= {name for name, text in texts if len(text.tokens) > 2}, "scaffolds are used all the same"
    assert joined > 20


def _random(
    rng: random.Random, words: Words, first: int
) -> tuple[CompiledSchema, PromptDocument, CompiledPrompt] | None:
    """A schema and a prompt of modules alone; None: there is nothing in it."""
    maker, scope = Maker(rng, WORD_TEXTS), rng.choice(SCOPES)
    tree = replace(maker.schema(first=first), name=f"s{first}")
    schema = compile_schema(tree, words, scope=scope, context=CONTEXT)
    made = maker.prompt(tree)
    document = replace(made, items=tuple(item for item in made.items if not isinstance(item, Text)))
    try:
        prompt = compile_prompt(schema, document, words, context=CONTEXT, add_generation_prompt=False)
    except PmlError as error:
        if error.code in ("E_EMPTY", "E_ARG_MISSING"):
            return None
        raise
    return schema, document, prompt
