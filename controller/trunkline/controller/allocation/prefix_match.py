"""Where in the forest a sequence's tokens are: one tree, or several behind a cut or with modules."""

from __future__ import annotations

from trunkline.controller.allocation.cutting import behind_cut
from trunkline.controller.allocation.modules import find_text, place_modules
from trunkline.controller.cache.radix_cache import RadixCache
from trunkline.controller.cache.radix_tree import Node
from trunkline.controller.sequences.sequence import PrefixMatch, Sequence, Stem
from trunkline.kvstore.int32_codec import pack_int32


def locate(tree: RadixCache, sequence: Sequence, stop: int, step: int) -> PrefixMatch | None:
    """Find what the forest has of a sequence's first `stop` tokens (counted in its table).

    A group whose KV before its last cut is not all there is made compact first. None: texts of modules are
    missing.
    """
    if sequence.group.modules is not None:
        return place_modules(tree, sequence, stop, step)
    place = behind_cut(tree, sequence, stop, step)
    if place is None:
        sequence.group.compact()
        root = tree.root(sequence.salt)
        tokens = sequence.tokens.to_bytes(0, min(stop, sequence.tokens.count))
        return PrefixMatch(Stem(root), tree.match(root, tokens, step))
    return place


def expect(tree: RadixCache, sequence: Sequence, step: int) -> tuple[list[Node], list[Node]]:
    """What a waiting sequence will use, as far as is known now: whole chunks (and the last ones of texts), and one
    of which it will use the head, if there is one."""
    prompt = sequence.group.modules
    if prompt is not None:
        # Texts that are announced without a request's tokens have no place of their own.
        place = place_modules(tree, sequence, sequence.tokens.count, step) if prompt.runs else None
        if place is None or place.match.pending is not None:
            return _texts(tree, sequence, step), []
    else:
        place = behind_cut(tree, sequence, sequence.tokens.count, step)
    if place is None:
        return [], []
    path, stem = place.match.path, place.stem
    head = None
    if place.match.pending is None:
        end = path[-1] if len(path) > stem.base else stem.root
        start = len(path) * tree.chunk_size
        rest = sequence.tokens.view(start, min(start + tree.chunk_size, sequence.tokens.count))
        head, _ = tree.likest(end, pack_int32(rest), step)
    tree.prune_root(stem.root)
    return path, [head] if head is not None else []


def _texts(tree: RadixCache, sequence: Sequence, step: int) -> list[Node]:
    """What there is of its texts while others of them are missing."""
    prompt = sequence.group.modules
    assert prompt is not None
    found = [find_text(tree, prompt.texts[part.text], part.tokens(prompt), step) for part in prompt.parts]
    return [node for text in found for node in text.nodes]
