"""Prompts made of modules: where their texts' KV is, and the layout that follows (Prompt Cache §3.3, §3.4).

Each text of a schema has a tree of its own in the forest, whose root is named by all that the text sees before
itself and by its own first tokens. So a text is found wherever it stands, in whichever schema, if the texts above
it are the same: it acts at another position than that at which it was computed by a shift (design.md, idea 5).
What hangs below such a root is chunks like all others, but the last of a text may be partial and still shared.

      root of a text      [64]─[64]─[17]          "miami", behind the schema's first text
      root of a text      [64]─[9]                the schema's first text
      root of a prompt    [64]─[64]─…             own tokens of requests that see these two there, and their output

      table   |first text: 64, 9 of 64|miami: 64, 64, 17 of 64|own: 64, 64, …|

A request's table is the chunks of the texts that it sees, one text behind the other, and then its own tokens. As
behind a cut (`trunkline.kvstore.cuts`), tokens of the table that it does not see (placeholders, the empty rest
of a chunk) are *holes*, all of them before its own.

To *encode* a text is to compute it as the own tokens of a sequence that sees the texts above it.
"""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from typing import NamedTuple

import numpy as np

from trunkline.controller.cache.radix_cache import RadixCache
from trunkline.controller.cache.radix_tree import TOKEN_BYTES, Match, Node
from trunkline.controller.messages import ModuleText, PromptLayout
from trunkline.controller.sequences.module_prompt import CachedText, ModulePrompt, Ranges
from trunkline.controller.sequences.sequence import PrefixMatch, Sequence, SequenceGroup, Stem, TokenBuffer
from trunkline.kvstore.extents import OPEN_COUNT, Extent, blocks_for
from trunkline.kvstore.int32_codec import Int32Array
from trunkline.kvstore.module_names import RelocationRule, modules_root, pairs, prompt_root, text_names


def name_texts(
    tree: RadixCache,
    salt: bytes,
    texts: AbstractSequence[ModuleText],
    moves: RelocationRule,
    named: list[CachedText],
) -> None:
    """Name texts whose parents come before them.

    Args:
        named: the texts before these; they come behind them.
    """
    base = modules_root(tree.root_name(salt))
    for text in texts:
        parent = (named[text.parent].content, named[text.parent].position) if text.parent >= 0 else None
        names = text_names(text, parent, base, moves, tree.chunk_bytes)
        named.append(CachedText(text.tokens, text.position, text.parent, pairs(text.seen), *names))


def chain_of(texts: AbstractSequence[CachedText], index: int) -> list[int]:
    """What a text sees besides itself: the texts above it, the first one first."""
    chain: list[int] = []
    parent = texts[index].parent
    while parent >= 0:
        chain.append(parent)
        parent = texts[parent].parent
    return chain[::-1]


def prompt_of(tree: RadixCache, salt: bytes, layout: PromptLayout, moves: RelocationRule) -> ModulePrompt:
    """What the engine has to know of a request's layout."""
    texts: list[CachedText] = []
    name_texts(tree, salt, layout.texts, moves, texts)
    shown = sorted((i for i, text in enumerate(texts) if text.seen), key=lambda i: texts[i].position)
    runs = pairs(layout.runs)
    seen = [(texts[i].content, texts[i].position, texts[i].seen) for i in shown]
    name = prompt_root(modules_root(tree.root_name(salt)), seen, runs)
    ranges = [texts[i].seen for i in shown]
    prompt = ModulePrompt(texts, shown, ranges, runs, name, tree.chunk_size)
    prompt.ttl = layout.ttl
    return prompt


def encoding_of(texts: list[CachedText], index: int, chunk_size: int) -> ModulePrompt:
    """The layout in which a text is computed: it sees all of the texts above it."""
    shown = chain_of(texts, index)
    text = texts[index]
    ranges: list[Ranges] = [((0, texts[i].token_count),) for i in shown]
    return ModulePrompt(
        texts, shown, ranges, ((text.position, text.token_count),), text.place, chunk_size, target=index
    )


def lay_out(group: SequenceGroup, prompt: ModulePrompt, max_context: int) -> None:
    """Give a new group of one sequence its table and its limit: both count in the table from now on.

    Args:
        max_context: positions that there are.
    """
    own = group.members[0].tokens.view()
    table = prompt.table_tokens(own)
    before = len(table) - len(own)
    first, _ = prompt.runs[-1] if prompt.runs else (0, 0)  # texts may be announced without a request's tokens
    open_index = sum(count for _, count in prompt.runs[:-1])
    group.prompt_len += before
    group.limit = before + min(group.limit, open_index + max_context - first)
    group.members[0].tokens = TokenBuffer(table)
    group.modules = prompt


class FoundText(NamedTuple):
    """What the forest has of a text."""

    nodes: list[Node]
    """Its chunks, all of them, wherever they are; empty if some are missing."""
    pending: Node | None
    """The first chunk that is being computed now."""
    base: int
    """The position at which its first token was computed."""


def find_text(tree: RadixCache, text: CachedText, stop: int, step: int) -> FoundText:
    """Look for the first `stop` tokens of a text, for use in step `step`."""
    root = tree.find_text_root(text.place)
    if root is None:
        return FoundText([], None, text.position)
    base, size = tree.base_position(root), tree.chunk_bytes
    nodes: list[Node] = []
    node = root
    for at in range(0, stop * TOKEN_BYTES, size):
        child = _child(tree, node, text.tokens[at : at + size])
        if child is None or tree.tiers.tier_of(child) is None:
            return FoundText([], None, base)
        if child.ready_step >= step:
            return FoundText([], child, base)
        nodes.append(child)
        node = child
    return FoundText(nodes, None, base)


def _child(tree: RadixCache, node: Node, key: bytes) -> Node | None:
    """The chunk of a text's next tokens: for its last ones, any chunk that begins with them."""
    child = node.children.get(key)
    if child is None and len(key) < tree.chunk_bytes:
        child = tree.covered_by_sibling(node, key)
    return child


def place_modules(tree: RadixCache, sequence: Sequence, stop: int, step: int) -> PrefixMatch | None:
    """Find the texts that a sequence sees, and what there is of its first `stop` own tokens (counted in its
    table).

    None: a text is missing, or a part of one.
    """
    prompt = sequence.group.modules
    assert prompt is not None
    path: list[Node] = []
    pins: list[Node] = []
    extents: list[Extent] = []
    for part in prompt.parts:
        text = prompt.texts[part.text]
        found = find_text(tree, text, part.tokens(prompt), step)
        if found.pending is not None:
            return PrefixMatch(Stem(_root_of(found.pending)), Match([], found.pending, None, 0))
        if not found.nodes:
            return None
        shift = text.position - found.base
        for start, end in part.ranges:
            entry, first = divmod(start, tree.chunk_size)
            extents.append(Extent(len(path) + entry, first, end - start, found.base + start, shift))
        path += found.nodes
        pins.append(found.nodes[-1])
    if prompt.target >= 0:
        root = tree.text_root(prompt.name, prompt.texts[prompt.target].position)
        base = tree.base_position(root)
    else:
        root, base = tree.prompt_root(prompt.name), prompt.runs[0][0]
    match = tree.match(root, sequence.tokens.to_bytes(len(path) * tree.chunk_size, stop), step)
    match.path = path + match.path
    extents += _own_extents(prompt, len(path), base, tree.chunk_size)
    return PrefixMatch(Stem(root, len(path), tuple(pins), root.name, tuple(extents)), match)


def _root_of(node: Node) -> Node:
    while node.parent is not None:
        node = node.parent
    return node


def _own_extents(prompt: ModulePrompt, entries: int, base: int, chunk_size: int) -> list[Extent]:
    """
    Args:
        base: the position at which its first own token is computed.
    """
    shift = prompt.runs[0][0] - base
    extents, index = [], 0
    for run, (position, count) in enumerate(prompt.runs):
        entry, first = divmod(index, chunk_size)
        is_open = run == len(prompt.runs) - 1
        extents.append(Extent(entries + entry, first, OPEN_COUNT if is_open else count, position - shift, shift))
        index += count
    return extents


def blocks_of_prompt(prompt: ModulePrompt, own_tokens: int, chunk_size: int) -> int:
    """Table entries with so many own tokens."""
    return prompt.entries + blocks_for(own_tokens, chunk_size)


def widest_encoding(texts: list[CachedText], chunk_size: int) -> tuple[int, int]:
    """The most blocks that encoding one of these texts takes, and the index of that text (0, -1 without texts)."""
    above: list[int] = []
    worst = (0, -1)
    for index, text in enumerate(texts):
        blocks = blocks_for(text.token_count, chunk_size) + (above[text.parent] if text.parent >= 0 else 0)
        above.append(blocks)
        worst = max(worst, (blocks, index))
    return worst


def seen_tokens(prompt: ModulePrompt, table: Int32Array) -> Int32Array:
    """What a sequence sees of its table's tokens, its own included."""
    return np.concatenate([table[prompt.seen_indices], table[prompt.entries * prompt.chunk_size :]])
