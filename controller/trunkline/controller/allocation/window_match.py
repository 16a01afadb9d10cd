"""Find what is cached of a prompt whose queries see a window only (`trunkline.controller.cache.window_cache`), and
what of a match can be used now.

A hit of n chunks needs those that a query behind them sees; chunks before them may be gone. Where one in the
window is missing, the longest shorter hit counts whose own window is there. Pure."""

from __future__ import annotations

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
        return PrefixMatch(Stem(root), match)
    if sequence.is_windowed:
        usable, behind = tree.usable_length(
            match.path, lambda n: sequence.first_query(n * tree.chunk_size), lambda _, node: not tree.is_thin(node)
        )
    else:
        usable = next((i for i, node in enumerate(match.path) if tree.is_thin(node)), len(match.path))
        behind = 0
    if usable < len(match.path):
        match = Match(match.path[:usable], None, None, 0)
    elif match.partial is not None and tree.is_thin(match.partial):
        match.partial, match.partial_tokens = None, 0
    return PrefixMatch(Stem(root, behind=behind), match)


def split_at_far(
    tree: RadixCache, sequence: Sequence, found: PrefixMatch, load_entries: int, step: int
) -> tuple[PrefixMatch, list[Node]]:
    """Return the part of a match that can be used now, and chunks behind it that could still be fetched.

    Args:
        load_entries: chunks that are only in host memory are loaded up to this block-table entry.
        step: the step that would use them.
    """
    stem, match = found
    entries = len(match.path)
    if load_entries <= entries and match.partial is not None and not match.partial.on_device:
        match.partial, match.partial_tokens = None, 0

    def is_near(index: int, node: Node) -> bool:
        # Before what can be used with a window, others may be computing chunks that are not seen from there.
        return node.ready_step < step and (node.is_loadable if index < load_entries else node.on_device)

    if isinstance(tree, WindowCache) and sequence.is_windowed:
        near, behind = tree.usable_length(match.path, lambda n: sequence.first_query(n * tree.chunk_size), is_near)
        if near == entries:
            return found, []
        wanted = enumerate(match.path[stem.behind : load_entries], stem.behind)
        far = [node for index, node in wanted if not is_near(index, node)]
        return PrefixMatch(Stem(stem.root, behind=behind), Match(match.path[:near], None, None, 0)), far
    near = next((i for i, node in enumerate(match.path) if not is_near(i, node)), entries)
    if near == entries:
        return found, []
    return PrefixMatch(stem, Match(match.path[:near], None, None, 0)), match.path[near:load_entries]
