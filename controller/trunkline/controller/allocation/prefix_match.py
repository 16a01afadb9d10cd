"""Find the part of a prompt that is cached: the longest prefix that the radix tree has (ChunkAttention §3.1).

      plain prompt                 one walk down its salt's tree
      prompt with parts cut off    the pieces that are left, each in a tree of its own
      prompt with modules          each text in a tree of its own (`modules.py`), then the request's own tokens

**Cuts** (CachedAttention §3.4). What is left of a history behind a cut has its own
root, named after the history and after the dropped ranges. The first request with that cut *grafts* the chunks
there: the first kept chunk moves, with everything below it, from the tree in which it was computed to the new
root. Nothing is computed, copied or rotated. The part that was cut off stays behind; as nothing hangs from it any
more, it is evicted first.

      before  root─[0]─[1]─[2]─[3]─[4]               a session
      after   root─[0]─[1]        cut─[2]─[3]─[4]─…  chunks 0 (kept head) and 2… are in its table, chunk 1 is idle

Where that is not possible, because another request holds these chunks or because they were evicted, the prompt is
computed again as a plain prompt of what is left (`SequenceGroup.compact`). That is token truncation, as engines
without decoupled positions do it. A later request that drops more is cut out of that prompt (`shorten_history`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from msgspec import structs

from trunkline.controller.allocation.modules import find_text, match_modules
from trunkline.controller.allocation.window_match import match_thin, match_window
from trunkline.controller.cache.radix_cache import RadixCache
from trunkline.controller.cache.radix_tree import PENDING, Match, Node
from trunkline.controller.cache.thin_cache import ThinCache
from trunkline.controller.cache.window_cache import WindowCache
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.sequences.sequence import (
    CutPrompt,
    PrefixMatch,
    Request,
    Sequence,
    SequenceGroup,
    Stem,
    TokenBuffer,
)
from trunkline.kvstore.chunks import ChunkName, Int32Array, blocks_for, pack_int32
from trunkline.kvstore.cuts import PACKED_RANGE_BYTES, ContextCut, drops_within
from trunkline.kvstore.root_keys import drops_of


def match_prefix(tree: RadixCache, sequence: Sequence, stop: int, step: int) -> PrefixMatch | None:
    """Return what the tree has of a sequence's first `stop` tokens (counted in its block table).

    A group whose KV before its last cut is incomplete becomes a plain prompt here (`SequenceGroup.compact`).

    Returns:
        None if a text of a module is missing: it must be encoded first.
    """
    group = sequence.group
    if group.modules is not None:
        return match_modules(tree, sequence, group.modules, stop, step)
    if group.cut is not None:
        match = match_behind_cut(tree, sequence, group.cut, stop, step)
        if match is not None:
            return match
        group.compact()
        stop = min(stop, sequence.tokens.count)
    return _match_plain(tree, sequence, stop, step)


def _match_plain(tree: RadixCache, sequence: Sequence, stop: int, step: int) -> PrefixMatch:
    root = tree.root(sequence.salt)
    if isinstance(tree, WindowCache) and sequence.is_windowed:
        return match_window(tree, root, sequence, stop, step)
    if isinstance(tree, ThinCache):
        return match_thin(tree, root, sequence, stop, step)
    return PrefixMatch(Stem(root), tree.match(root, sequence.tokens.to_bytes(0, stop), step))


class ExpectedChunks(NamedTuple):
    """The chunks that a waiting sequence will use, wherever they are, as far as is known now."""

    path: list[Node]
    """Whole chunks, and the last ones of texts, in order."""
    read: list[Node]
    """Those of them whose KV will be read, and the chunk behind them of which only the beginning will be used, if
    there is one."""
    behind: int = 0
    """How many of the first chunks of `read` will be read in layers without a window only."""


def expected_chunks(tree: RadixCache, sequence: Sequence, step: int) -> ExpectedChunks:
    """Return the chunks that a waiting sequence will use."""
    group, stop = sequence.group, sequence.tokens.count
    if group.modules is not None:
        # Texts that are announced without a request's tokens have no tree for own tokens.
        found = match_modules(tree, sequence, group.modules, stop, step) if group.modules.runs else None
        if found is None or found.match.pending is not None:
            path = _present_texts(tree, sequence, step)
            return ExpectedChunks(path, path)
    elif group.cut is not None:
        found = match_behind_cut(tree, sequence, group.cut, stop, step)
        if found is None:
            return ExpectedChunks([], [])
    else:
        found = _match_plain(tree, sequence, stop, step)
    path, stem = found.match.path, found.stem
    partial = None
    if found.match.pending is None:
        end = path[-1] if len(path) > stem.base else stem.root
        start = len(path) * tree.chunk_size
        rest = sequence.tokens.view(start, min(start + tree.chunk_size, stop))
        partial, _ = tree.most_similar_child(end, pack_int32(rest), step)
    tree.prune_root(stem.root)
    read = stem.used(path)
    behind = len(read) - (len(path) - stem.behind)
    return ExpectedChunks(path, read + ([partial] if partial is not None else []), behind)


def _present_texts(tree: RadixCache, sequence: Sequence, step: int) -> list[Node]:
    """Return the chunks of a sequence's complete texts, while other texts are missing."""
    prompt = sequence.group.modules
    assert prompt is not None
    found = [find_text(tree, prompt.texts[part.text], part.tokens(prompt), step) for part in prompt.parts]
    return [node for text in found for node in text.nodes]


def cut_group(group: SequenceGroup, tree: RadixCache, config: EngineConfig) -> None:
    """Set the block table and the limit of a new group of one sequence that drops parts of its prompt.

    Where KV cannot be kept behind a cut, the group becomes a plain prompt of what is left at once.
    """
    history = group.members[0].tokens.view()
    cut = ContextCut(group.request.drops, config.chunk_size)
    table = cut.table_tokens(history)
    group.members[0].tokens = TokenBuffer(table)
    group.prompt_len += len(table) - len(history)
    group.limit += cut.holes
    packed = history.astype("<i4", copy=False).tobytes()
    root = tree.root_name(group.request.submit.salt)
    chain = cut.chain(root, history)
    group.cut = CutPrompt(cut, packed, chain, cut.root_names(root, chain))
    blocks, shared = blocks_for(group.limit, config.chunk_size), group.prompt_len // config.chunk_size
    needed = shared + group.request.width * (blocks - shared)
    fits = blocks <= config.max_table_blocks and needed <= config.num_blocks
    # What is seen before the last cut may be in a tail, which only one of several resumed samples would find.
    in_tail = group.request.width > 1 and cut.closed_end > cut.table_start * config.chunk_size
    may_keep = config.positions_shift and config.prefix_cache and not config.whole_blocks
    if not (may_keep and fits) or in_tail:
        group.compact()


def shorten_history(request: Request, tree: RadixCache) -> Request | None:
    """Return the request as if its history had never had the first ranges that it drops; None if nothing suggests
    that the tree knows it so.

    Where KV behind a prompt's cut was gone or in use, what was left has been computed as a plain prompt. An edit
    that drops more is a cut of that plain prompt.
    """
    root = tree.find_root(request.submit.salt)
    if root is None or len(request.drops) < 2 or request.submit.kept is not None:
        return None  # what another group has kept has the names of the whole history
    starts, stops = np.array(request.drops, dtype=np.int64).T
    lengths = stops - starts
    left = _without(request.tokens, request.drops)
    matched = _tokens(tree, tree.match(root, pack_int32(left), PENDING))
    # A range was left out before if the prompt without it is known beyond its place.
    known = int((starts - np.cumsum(lengths) + lengths < matched).sum())
    if not 0 < known < len(request.drops):
        return None
    removed = int(lengths[:known].sum())
    tokens = _without(request.tokens, request.drops[:known])
    drops = tuple((start - removed, stop - removed) for start, stop in request.drops[known:])
    submit = structs.replace(
        request.submit,
        tokens=pack_int32(tokens),
        prompt_len=request.submit.prompt_len - removed,
        drops=pack_int32([end for drop in drops for end in drop]),
    )
    return replace(request, submit=submit, tokens=tokens, drops=drops)


def _without(tokens: Int32Array, drops: tuple[tuple[int, int], ...]) -> Int32Array:
    left = np.ones(len(tokens), dtype=bool)
    for start, stop in drops:
        left[start:stop] = False
    return tokens[left]


def known_tokens(tree: RadixCache, group: SequenceGroup) -> int:
    """Return how many tokens that a new group of one sequence sees are cached, or are being computed."""
    sequence = group.members[0]
    if group.cut is None:
        root = tree.find_root(sequence.salt)
        return _tokens(tree, tree.match(root, sequence.tokens.to_bytes(), PENDING)) if root is not None else 0
    found = match_behind_cut(tree, sequence, group.cut, sequence.tokens.count, PENDING)
    if found is None:
        return 0
    tree.prune_root(found.stem.root)
    return _tokens(tree, found.match) - group.holes


def keep_or_compact(tree: RadixCache, sequence: Sequence, step: int) -> None:
    """Decide before an admission how a group with a cut goes on: with the KV kept behind the cut, or as a plain
    prompt of what is left, if the tree has more of that (because it was computed so before)."""
    group = sequence.group
    if group.cut is None:
        return
    found = match_behind_cut(tree, sequence, group.cut, sequence.tokens.count, step)
    if found is not None and found.match.pending is not None:
        return
    kept = _tokens(tree, found.match) - group.holes if found is not None else 0
    plain = group.cut.cut.seen(sequence.tokens.view()).astype("<i4", copy=False).tobytes()
    root = tree.find_root(sequence.salt)
    again = _tokens(tree, tree.match(root, plain, step)) if root is not None else 0
    if kept <= again:
        if found is not None:
            tree.prune_root(found.stem.root)
        group.compact()


def _tokens(tree: RadixCache, match: Match) -> int:
    return len(match.path) * tree.chunk_size + match.partial_tokens


def match_behind_cut(
    tree: RadixCache, sequence: Sequence, group_cut: CutPrompt, stop: int, step: int
) -> PrefixMatch | None:
    """Return the chunks of the first `stop` tokens of a sequence whose prompt has cuts.

    Returns:
        None if a chunk before the last piece is missing.
    """
    cut, size = group_cut.cut, tree.chunk_bytes
    path: list[Node] = []
    ends: list[Node] = []
    last = len(cut.segments) - 1
    for number, segment in enumerate(cut.segments[:last]):
        count = segment.stop - segment.start
        if not count:
            continue
        root = segment_root(tree, sequence, group_cut, number, step)
        tokens = group_cut.history[segment.start * size : segment.stop * size]
        match = tree.match(root, tokens, step)
        if match.pending is not None:
            return PrefixMatch(Stem(root), Match([], match.pending, None, 0))
        if len(match.path) < count:
            tree.prune_root(root)
            return None
        path += match.path
        ends.append(match.path[-1])
    root = segment_root(tree, sequence, group_cut, last, step)
    match = tree.match(root, sequence.tokens.to_bytes(cut.table_start * tree.chunk_size, stop), step)
    match.path = path + match.path
    if match.pending is None and _tokens(tree, match) < cut.closed_end:
        tree.prune_root(root)
        return None
    return PrefixMatch(Stem(root, len(path), tuple(ends), root.name), match)


def segment_root(tree: RadixCache, sequence: Sequence, cut: CutPrompt, number: int, step: int) -> Node:
    """Return the root of the chunks of a run; make it if need be, and move there what the tree has of them.

    Args:
        number: index of the run in `ContextCut.segments`.
    """
    segment = cut.cut.segments[number]
    if not segment.drops:
        return tree.root(sequence.salt)
    root = tree.find_cut(cut.roots[number])
    if root is None:
        after = cut.chain[segment.start - 1] if segment.start else tree.root_name(sequence.salt)
        drops = cut.cut.packed[: segment.drops * PACKED_RANGE_BYTES]
        root = tree.cut_root(after, drops)
        source = _source(tree, sequence, cut, segment.start, drops, step)
        if source is not None:
            tree.graft(source, root)
    return root


def _source(
    tree: RadixCache, sequence: Sequence, cut: CutPrompt, chunk: int, drops: bytes, step: int
) -> Node | None:
    """Return the chunk of the history whose KV is to be moved behind the cut; None if there is none to move.

    It stands behind the latest earlier cut that dropped nothing but what this cut drops, too, or in the plain
    tree: KV that was computed without tokens that are visible now is of no use.

    Args:
        chunk: index of the chunk in the history.
        drops: the ranges that the cut drops, packed.
    """
    for start in range(chunk, -1, -1):
        after: ChunkName = cut.chain[start - 1] if start else tree.root_name(sequence.salt)
        roots = [root for root in tree.cuts_after(after) if drops_within(drops_of(root.key), drops)]
        if not start and (plain := tree.find_root(sequence.salt)) is not None:
            roots.append(plain)
        for root in roots:
            node = _walk(tree, root, cut.history, start, chunk, step)
            if node is not None and not (node.active or node.claims):
                return node
    return None


def _walk(tree: RadixCache, root: Node, history: bytes, start: int, chunk: int, step: int) -> Node | None:
    """Return the node of chunk `chunk`, going down from `root`, which stands before chunk `start`."""
    node, size = root, tree.chunk_bytes
    for index in range(start, chunk + 1):
        child = node.children.get(history[index * size : (index + 1) * size])
        if child is None or child.ready_step >= step:
            return None
        node = child
    return node
