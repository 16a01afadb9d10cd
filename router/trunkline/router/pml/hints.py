"""Warn about probable mistakes in a schema (`lint`), and predict which texts come next (`likely_texts`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from trunkline.router.pml.compiled import CompiledPrompt, CompiledSchema
from trunkline.router.pml.pml_error import Mark
from trunkline.router.pml.roles import PmlTokenizer
from trunkline.router.pml.tree import (
    Item,
    Module,
    Param,
    RoleItem,
    Scaffold,
    SchemaDocument,
    Text,
    Union,
    join_path,
    modules_below,
)

CHUNK_TOKENS: Final = 64
"""Number of tokens of a chunk, the unit in which KV is stored and shared."""
_CHARACTERS_PER_TOKEN: Final = 4
"""Estimated number of characters of a token, used without a tokenizer."""

_Warning: TypeAlias = tuple[Mark | None, str]


def lint(document: SchemaDocument, tokenizer: PmlTokenizer | None = None) -> list[str]:
    """Return warnings about parts of a schema that are allowed but probably mistakes, with line and column if
    known.

    Without a tokenizer, lengths are estimated.
    """
    found = [*_item_warnings(document.items), *_module_warnings(document, tokenizer)]
    modules = dict(modules_below(document.items))
    for scaffold in document.scaffolds:
        found += _scaffold_warnings(scaffold, modules)
    found.sort(key=lambda warning: warning[0] or Mark(0, 0))
    return [f"{mark.line}:{mark.column}: {text}" if mark else text for mark, text in found]


def _item_warnings(items: Sequence[Item], path: str = "") -> Iterator[_Warning]:
    """Yield warnings about items. `path`: path of the module around."""
    for item in items:
        match item:
            case Text():
                if not item.text.strip():
                    where = f'the module "{path}"' if path else "the schema"
                    yield (
                        item.mark,
                        f"a text of {where} is only white space; begin a new line if it is not meant",
                    )
            case Param():
                if not item.required and item.default is None and item.length >= CHUNK_TOKENS:
                    what = f'the parameter "{item.name}" of "{path}"'
                    text = f"{what} leaves {item.length} positions empty where no argument is given"
                    yield item.mark, text
            case Union():
                if len(item.members) == 1:
                    name = item.members[0].name
                    yield item.mark, f'the union has only one module, "{name}"; it does nothing'
                yield from _item_warnings(item.members, path)
            case Module():
                yield from _item_warnings(item.items, join_path(path, item.name))
            case RoleItem():
                if not item.items and not item.open:
                    yield item.mark, f"<{item.role}> is empty"
                yield from _item_warnings(item.items, path)


def _own_texts(items: Sequence[Item]) -> Iterator[str]:
    for item in items:
        if isinstance(item, Text):
            yield item.text
        elif isinstance(item, RoleItem):
            yield from _own_texts(item.items)


def _module_warnings(document: SchemaDocument, tokenizer: PmlTokenizer | None) -> Iterator[_Warning]:
    for path, module in modules_below(document.items):
        texts = list(_own_texts(module.items))
        if not texts:
            if not any(isinstance(item, Module | Union) for item in module.items):
                yield module.mark, f'the module "{path}" has no text'
            continue
        if not module.cache:
            continue
        if tokenizer is None:
            tokens, about = sum(map(len, texts)) // _CHARACTERS_PER_TOKEN, "about "
        else:
            tokens, about = sum(len(tokenizer.encode_plain(text)) for text in texts), ""
        if tokens < CHUNK_TOKENS:
            rest = f"it shares its KV, but fills less than a chunk of {CHUNK_TOKENS}"
            yield module.mark, f'the module "{path}" has {about}{tokens} tokens; {rest}'


def _scaffold_warnings(scaffold: Scaffold, modules: Mapping[str, Module]) -> Iterator[_Warning]:
    if len(scaffold.modules) == 1:
        yield scaffold.mark, f'the scaffold "{scaffold.name}" has only one module; it has no other member to see'
    for path in scaffold.modules:
        if not any(_own_texts(modules[path].items)):
            text = f'the scaffold "{scaffold.name}" has the module "{path}", which has no text of its own'
            yield scaffold.mark, text
        nested = [name for name, _ in modules_below(modules[path].items, path) if name not in scaffold.modules]
        if nested:
            text = (
                f'the scaffold "{scaffold.name}" has "{path}" without "{nested[0]}" in it, which stays on its own'
            )
            yield scaffold.mark, text


def likely_texts(
    schema: CompiledSchema, prompt: CompiledPrompt, uses: Mapping[str, int], limit: int
) -> tuple[int, ...]:
    """Return indexes into `schema.texts` that are worth prefetching when a prompt comes.

    First come modules that the prompt could have imported instead of one that it has (other members of its
    unions), most used first; then the most used of all other modules.

    Args:
        schema: The schema of the prompt.
        prompt: The current prompt; its own texts are left out.
        uses: Number of uses of each module, by path.
        limit: Largest number of texts.
    """
    selected = set(prompt.modules)
    there = {text.index for text in prompt.texts}
    siblings = [
        member
        for index in prompt.modules
        for union in schema.modules[index].unions
        if not selected.isdisjoint(union.members)
        for member in union.members
        if member not in selected
    ]
    counts = Counter({schema.by_path[path]: count for path, count in uses.items() if path in schema.by_path})
    siblings.sort(key=lambda index: -counts[index])
    used = [index for index, count in counts.most_common() if count > 0 and index not in selected]
    modules = dict.fromkeys((*siblings, *used))
    texts = [text for index in modules for text in schema.modules[index].texts if text not in there]
    return tuple(texts[:limit])
