"""Find what of a prompt is cached: the longest prefix that the radix tree has (ChunkAttention §3.1).

plain prompt                 one walk down its salt's tree
prompt with parts cut off    the pieces that are left, each in a tree of its own (`cuts.py`)
prompt with modules          each text in a tree of its own (`modules.py`), then the request's own tokens
"""

from __future__ import annotations

from trunkline.controller.allocation.cuts import match_behind_cut
from trunkline.controller.allocation.modules import find_text, match_modules
from trunkline.controller.cache.radix_cache import RadixCache
from trunkline.controller.cache.radix_tree import Node
from trunkline.controller.sequences.sequence import PrefixMatch, Sequence, Stem
from trunkline.kvstore.chunks import pack_int32


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
    return PrefixMatch(Stem(root), tree.match(root, sequence.tokens.to_bytes(0, stop), step))


def expected_chunks(tree: RadixCache, sequence: Sequence, step: int) -> tuple[list[Node], list[Node]]:
    """Return the chunks that a waiting sequence will use, wherever they are, as far as is known now.

    Returns:
        whole chunks (and the last ones of texts), in order; and the chunk behind them of which only the beginning
        will be used, if there is one.
    """
    group, stop = sequence.group, sequence.tokens.count
    if group.modules is not None:
        # Texts that are announced without a request's tokens have no tree for own tokens.
        found = match_modules(tree, sequence, group.modules, stop, step) if group.modules.runs else None
        if found is None or found.match.pending is not None:
            return _present_texts(tree, sequence, step), []
    elif group.cut is not None:
        found = match_behind_cut(tree, sequence, group.cut, stop, step)
        if found is None:
            return [], []
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
    return path, [partial] if partial is not None else []


def _present_texts(tree: RadixCache, sequence: Sequence, step: int) -> list[Node]:
    """Return the chunks of those texts that are complete, while other texts are missing."""
    prompt = sequence.group.modules
    assert prompt is not None
    found = [find_text(tree, prompt.texts[part.text], part.tokens(prompt), step) for part in prompt.parts]
    return [node for text in found for node in text.nodes]
