"""Find the KV of a prompt that is made of modules, and lay out its block table (Prompt Cache §3.3, §3.4).

Each text of a schema has its own radix tree. The root is named after everything that the text sees before itself
and after its own first tokens. So a text is found at any position and in any schema, if the texts above it are the
same; where it stands at another position than that at which it was computed, its keys are shifted. Below such a
root are ordinary chunks, except that the last chunk of a text may be partial and still shared.

      root of a text      [64]─[64]─[17]          "miami", behind the schema's first text
      root of a text      [64]─[9]                the schema's first text
      root of a prompt    [64]─[64]─…             own tokens of requests that see these two there, and their output

      table   |first text: 64, 9 of 64|miami: 64, 64, 17 of 64|own: 64, 64, …|

A request's block table has the chunks of the texts that it sees, one text behind the other, and then its own
tokens. As behind a cut (`trunkline.kvstore.cuts`), tokens of the table that it does not see (placeholders, the
empty rest of a chunk) are *holes*; all of them come before its own tokens.

To *encode* a text means to compute it as the own tokens of a sequence that sees the texts above it.
"""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from typing import NamedTuple

import numpy as np

from trunkline.controller.allocation.window_match import whole_part
from trunkline.controller.cache.radix_cache import RadixCache
from trunkline.controller.cache.radix_tree import Match, Node
from trunkline.controller.cache.thin_cache import ThinCache
from trunkline.controller.messages import ModuleText, PromptLayout
from trunkline.controller.sequences.module_prompt import CachedText, ModulePrompt
from trunkline.controller.sequences.sequence import PrefixMatch, Sequence, SequenceGroup, Stem, TokenBuffer
from trunkline.kvstore.chunks import OPEN_COUNT, TOKEN_BYTES, Extent, Int32Array
from trunkline.kvstore.module_names import Ranges, RelocationRule, modules_root, pairs, prompt_root, text_names
from trunkline.kvstore.root_keys import position_of
from trunkline.kvstore.tier import TierKind


def name_texts(
    tree: RadixCache,
    salt: bytes,
    texts: AbstractSequence[ModuleText],
    rule: RelocationRule,
    named: list[CachedText],
) -> None:
    """Append texts with their cache names to `named`; each text's parent comes before it.

    Args:
        named: the texts before `texts`, with their names.
    """
    base = modules_root(tree.root_name(salt))
    for text in texts:
        parent = (named[text.parent].content, named[text.parent].position) if text.parent >= 0 else None
        names = text_names(text.position, text.tokens, parent, base, rule, tree.chunk_bytes)
        named.append(CachedText(text.tokens, text.position, text.parent, pairs(text.seen), *names, text.holders))


def chain_of(texts: AbstractSequence[CachedText], index: int) -> list[int]:
    """Return the indices of the texts that a text sees besides itself, the topmost first."""
    chain: list[int] = []
    parent = texts[index].parent
    while parent >= 0:
        chain.append(parent)
        parent = texts[parent].parent
    return chain[::-1]


def prompt_of(tree: RadixCache, salt: bytes, layout: PromptLayout, rule: RelocationRule) -> ModulePrompt:
    """Return a request's layout in the form that the engine uses, with the names of its texts."""
    texts: list[CachedText] = []
    name_texts(tree, salt, layout.texts, rule, texts)
    shown = sorted((i for i, text in enumerate(texts) if text.seen), key=lambda i: texts[i].position)
    runs = pairs(layout.runs)
    seen = [(texts[i].content, texts[i].position, texts[i].seen) for i in shown]
    name = prompt_root(modules_root(tree.root_name(salt)), seen, runs)
    ranges = [texts[i].seen for i in shown]
    prompt = ModulePrompt(texts, shown, ranges, runs, name, tree.chunk_size)
    prompt.ttl = layout.ttl
    return prompt


def encoding_of(texts: list[CachedText], index: int, chunk_size: int) -> ModulePrompt:
    """Return the layout in which a text is encoded, so that it sees all of the texts above it."""
    shown = chain_of(texts, index)
    text = texts[index]
    ranges: list[Ranges] = [((0, texts[i].token_count),) for i in shown]
    return ModulePrompt(
        texts, shown, ranges, ((text.position, text.token_count),), text.place, chunk_size, target=index
    )


def lay_out(group: SequenceGroup, prompt: ModulePrompt, max_context: int) -> None:
    """Set the block table and the limit of a new group of one sequence; both count tokens of the table from now
    on.

    Args:
        max_context: number of the model's positions.
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
    """The chunks of a text that the radix tree has."""

    nodes: list[Node]
    """All chunks of the text, in whichever tier; empty if a chunk is missing."""
    pending: Node | None
    """The first chunk of the text that is being computed now, if any."""
    base: int
    """Position at which the text's first token was computed."""


def find_text(tree: RadixCache, text: CachedText, stop: int, step: int) -> FoundText:
    """Return the chunks of the first `stop` tokens of a text that step `step` can use. What only a peer has is
    missing: the job that encodes the text pulls it. So is what has become thin and has no copy: the job computes
    it again in its place."""
    root = tree.find_text_root(text.place)
    if root is None:
        return FoundText([], None, text.position)
    base, size = position_of(root.key), tree.chunk_bytes
    nodes: list[Node] = []
    node = root
    for at in range(0, stop * TOKEN_BYTES, size):
        child = _child(tree, node, text.tokens[at : at + size])
        if child is None or tree.tiers.tier_of(child) in (None, TierKind.PEER):
            return FoundText([], None, base)
        if child.ready_step >= step:
            return FoundText([], child, base)
        nodes.append(child)
        node = child
    return FoundText(nodes, None, base)


def _child(tree: RadixCache, node: Node, key: bytes) -> Node | None:
    """Return the chunk of a text's next tokens; for the text's end, any chunk that begins with these tokens."""
    child = node.children.get(key)
    if child is None and len(key) < tree.chunk_bytes:
        child = tree.covered_by_sibling(node, key)
    return child


def match_modules(
    tree: RadixCache, sequence: Sequence, prompt: ModulePrompt, stop: int, step: int
) -> PrefixMatch | None:
    """Return the chunks of the texts that a sequence sees, and what is cached of its own tokens.

    Args:
        stop: how many of its tokens to look for, counted in its block table.

    Returns:
        None if a text, or a part of one, is missing.
    """
    path: list[Node] = []
    ends: list[Node] = []
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
        ends.append(found.nodes[-1])
    if prompt.target >= 0:
        root = tree.text_root(prompt.name, prompt.texts[prompt.target].position)
        base = position_of(root.key)
    else:
        root, base = tree.prompt_root(prompt.name), prompt.runs[0][0]
    match = tree.match(root, sequence.tokens.to_bytes(len(path) * tree.chunk_size, stop), step)
    if isinstance(tree, ThinCache) and match.pending is None:
        match, _ = whole_part(tree, sequence, match)
    match.path = path + match.path
    extents += _own_extents(prompt, len(path), base, tree.chunk_size)
    return PrefixMatch(Stem(root, len(path), tuple(ends), root.name, tuple(extents)), match)


def _root_of(node: Node) -> Node:
    while node.parent is not None:
        node = node.parent
    return node


def _own_extents(prompt: ModulePrompt, entries: int, base: int, chunk_size: int) -> list[Extent]:
    """Return the positions of a request's own tokens.

    Args:
        base: the position at which the first own token is computed.
    """
    shift = prompt.runs[0][0] - base
    extents, index = [], 0
    for run, (position, count) in enumerate(prompt.runs):
        entry, first = divmod(index, chunk_size)
        is_open = run == len(prompt.runs) - 1
        extents.append(Extent(entries + entry, first, OPEN_COUNT if is_open else count, position - shift, shift))
        index += count
    return extents


def seen_tokens(prompt: ModulePrompt, table: Int32Array) -> Int32Array:
    """Return the tokens that a sequence sees, its own included, from the tokens of its table."""
    return np.concatenate([table[prompt.seen_indices], table[prompt.entries * prompt.chunk_size :]])
