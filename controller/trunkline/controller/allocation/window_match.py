"""Find what is cached of a prompt whose queries see a window only (`trunkline.controller.cache.window_cache`), and
what of a match can be used now.

A hit of n chunks needs those that a query behind them sees; chunks before them may be gone. Where one in the
window is missing, the longest shorter hit counts whose own window is there. Pure."""

from __future__ import annotations

from collections.abc import Callable

from trunkline.controller.cache.radix_cache import RadixCache
from trunkline.controller.cache.radix_tree import Match, Node
from trunkline.controller.cache.thin_cache import ThinCache
from trunkline.controller.cache.window_cache import WindowCache
from trunkline.controller.sequences.sequence import PrefixMatch, Sequence, Stem


def match_window(tree: WindowCache, root: Node, sequence: Sequence, stop: int, step: int) -> PrefixMatch:
    """Return what the tree has of a plain sequence's first `stop` tokens, in any tier.

    If a longer hit than that is being computed, the match says for which chunk of it to wait.
    """
    tokens = sequence.tokens.to_bytes(0, stop)
    path = tree.path_of(root, tokens)

    def query(chunks: int) -> int:
        return sequence.first_query(chunks * tree.chunk_size)

    def is_ready(index: int, node: Node) -> bool:
        return node.ready_step < step and (node.on_device or node.is_stored)

    ready, behind = tree.usable_length(path, query, is_ready)
    coming, seen_from = tree.usable_length(path, query, lambda i, n: n.ready_step >= step or is_ready(i, n))
    if coming > ready:
        at = next(i for i in range(seen_from, coming) if path[i].ready_step >= step)
        return PrefixMatch(Stem(root, behind=min(seen_from, at)), Match(path[:at], path[at], None, 0))
    end, at = path[ready - 1] if ready else root, ready * tree.chunk_bytes
    partial, agreed = tree.best_partial(end, tokens[at : at + tree.chunk_bytes], step)
    return PrefixMatch(Stem(root, behind=behind), Match(path[:ready], None, partial, agreed))


def match_thin(tree: ThinCache, root: Node, sequence: Sequence, stop: int, step: int) -> PrefixMatch:
    """Return what the tree has of a plain sequence's first `stop` tokens, where chunks may be thin: the longest
    prefix with all that its next query sees.

    If the next chunk is being computed, the match says so, whatever is thin before it: its producer reads it.
    """
    match = tree.match(root, sequence.tokens.to_bytes(0, stop), step)
    if match.pending is not None:
        return PrefixMatch(Stem(root, keeps_blocks=True), match)
    match, behind = whole_part(tree, sequence, match)
    return PrefixMatch(Stem(root, behind=behind, keeps_blocks=True), match)


def whole_part(tree: ThinCache, sequence: Sequence, match: Match) -> tuple[Match, int]:
    """Return the longest part of a match of which layers with a window have all that a sequence's next query sees,
    in some tier, and how many chunks at its beginning that query does not see."""
    usable, behind = _usable_thin(tree, sequence, match.path, lambda _, node: node.is_stored)
    if usable < len(match.path):
        match = Match(match.path[:usable], None, None, 0)
    elif match.partial is not None and tree.is_thin(match.partial):
        match.partial, match.partial_tokens = None, 0
    return match, behind


def _usable_thin(
    tree: ThinCache, sequence: Sequence, path: list[Node], has_copy: Callable[[int, Node], bool]
) -> tuple[int, int]:
    """Return up to which chunk of a path a sequence can go on, and how many chunks it does not see from there in
    layers with a window. What it sees is whole, or thin with a copy that counts, or, if it is to be fetched, not
    on the device.

    Args:
        has_copy: says of (index, chunk) whether a copy of the chunk counts.
    """

    def is_there(index: int, node: Node) -> bool:
        return not tree.is_thin(node) or has_copy(index, node)

    if sequence.is_windowed:
        return tree.usable_length(path, lambda n: sequence.first_query(n * tree.chunk_size), is_there)
    return next((index for index, node in enumerate(path) if not is_there(index, node)), len(path)), 0


def split_at_far(
    tree: RadixCache, sequence: Sequence, found: PrefixMatch, load_entries: int, step: int
) -> tuple[PrefixMatch, list[Node], int]:
    """Return the part of a match that can be used now, and what could still be fetched so that more can be used.

    Args:
        load_entries: chunks that are only in host memory are loaded up to this block-table entry.
        step: the step that would use them.

    Returns:
        the part; chunks that could be fetched; the number of chunks that need not be computed when all of these
        are there. With a window it may be larger than theirs.
    """
    stem, match = found
    entries = len(match.path)
    if load_entries <= entries and match.partial is not None and not match.partial.on_device:
        match.partial, match.partial_tokens = None, 0

    def is_near(index: int, node: Node) -> bool:
        # Before what can be used with a window, others may be computing chunks that are not seen from there.
        return node.ready_step < step and (node.is_loadable if index < load_entries else node.on_device)

    def is_loaded(index: int, node: Node) -> bool:
        return index < load_entries and node.host_ready

    if isinstance(tree, WindowCache) and sequence.is_windowed:
        near, behind = tree.usable_length(match.path, lambda n: sequence.first_query(n * tree.chunk_size), is_near)
        if near == entries:
            return found, [], 0
        wanted = enumerate(match.path[stem.behind : load_entries], stem.behind)
        far = [node for index, node in wanted if not is_near(index, node)]
        found = PrefixMatch(Stem(stem.root, behind=behind), Match(match.path[:near], None, None, 0))
        return found, far, min(entries, load_entries) - near
    near = 0
    while near < entries and is_near(near, match.path[near]):
        near += 1
    far = match.path[near:load_entries]
    if isinstance(tree, ThinCache):
        seen = enumerate(match.path[stem.behind : near], stem.behind)
        thin = [node for index, node in seen if index < load_entries and not tree.tiers.is_near(node)]
        far = thin + far
        near, behind = _usable_thin(tree, sequence, match.path[:near], is_loaded)
        stem = stem._replace(behind=behind)
    if near == entries:
        return found, [], 0
    return PrefixMatch(stem, Match(match.path[:near], None, None, 0)), far, min(entries, load_entries) - near
