"""What peers have of a prompt: the router's holders become chunks of the radix tree that only a peer has. Pure.

      chunks of the prompt    0   1   2   3   4   5   6   7   8
      the tree has            ████████████
      holders                         └── A ──┘   └── B ──┘
      noted as A's                        ████
      of no use                                   ░░░░░░░░        a prefix has no gaps

The names of these chunks follow from the root and the tokens, so a router only says *where* a chunk may be, never
what it is. (Chunks that were moved behind a cut keep their old names, on which the names of those behind them
depend. So these names are told, by the router or by the group that hands the chunks over. Only requests that make
the same cut find them, as there.) A text of a module is pulled by the job that would
otherwise encode it (`trunkline.controller.scheduling.module_jobs`), under the name that it has if the peer has
computed it at the same position.

From here on such a chunk is like one in any other tier: a waiting request wants it, it is pulled in the order of
the queue, and the request computes it if that is faster.

For a request, a peer is of no use if a pull is known to take longer than computing the chunk. Then nothing is
noted, and the estimate is lowered a little, because only a pull can correct it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from trunkline.controller.allocation.prefix_match import segment_root
from trunkline.controller.cache.radix_cache import RadixCache
from trunkline.controller.cache.radix_tree import Node
from trunkline.controller.messages import Holder
from trunkline.controller.sequences.sequence import CutPrompt, SequenceGroup
from trunkline.controller.sequences.sequence import Sequence as Grown
from trunkline.controller.tiers.costs import StepCosts
from trunkline.kvstore.chunks import NAME_BYTES, NO_PEER, ChunkName
from trunkline.kvstore.peers import Peer
from trunkline.kvstore.root_keys import CUT_ROOT, SALT_ROOT, TEXT_ROOT

NOTED_MAX: Final = 4096
"""Largest number of chunks of one prompt that are noted as a peer's."""
_TRANSPORTS: Final = ("ipc://", "tcp://")


class KnownPath(NamedTuple):
    """A path as another group offers it (`OfferedPath`)."""

    root: bytes
    """Key of the root (`RadixTree.restore_root`)."""
    tokens: bytes
    """int32 token ids of the path's chunks. Only the last chunk of a module's text may be partial."""
    names: bytes = b""
    """Names of the first chunks, 16 bytes each, that were moved behind the cut."""


class Trail(NamedTuple):
    """Successive chunks of a prompt below one root."""

    root: Node
    marker: bytes
    """Name of what the chunks see (`trunkline.controller.sequences.sequence.Stem.marker`)."""
    keys: list[bytes]
    names: Sequence[ChunkName] = ()
    """Names of the first chunks, if they do not follow from root and keys."""
    first: int = 0
    """Index of the first chunk, as holders count."""
    is_closed: bool = False
    """Whether chunks of further trails are of no use if one of these is missing."""


def kept_trails(
    tree: RadixCache, sequence: Grown, cut: CutPrompt, names: list[ChunkName], step: int
) -> Iterator[Trail]:
    """Yield the chunks of the block table of a prompt with a cut, run by run. Those behind a cut have the names
    that are given for them, by their index in the table."""
    size, first = tree.chunk_bytes, 0
    for number, segment in enumerate(cut.cut.segments):
        is_closed = segment.stop >= 0
        if is_closed:
            tokens = cut.history[segment.start * size : segment.stop * size]
        else:
            tokens = sequence.tokens.to_bytes(first * tree.chunk_size, sequence.tokens.count)
        keys = _whole(tokens, size)
        if keys:
            root = segment_root(tree, sequence, cut, number, step)
            marker, told = (root.name, names[first : first + len(keys)]) if segment.drops else (b"", [])
            yield Trail(root, marker, keys, told, first, is_closed)
        first += len(keys)


class Holders:
    """Notes which chunks of prompts peers have."""

    def __init__(self, tree: RadixCache, costs: StepCosts) -> None:
        self._tree = tree
        self._costs = costs

    @property
    def _is_on(self) -> bool:
        return self._tree.tiers.config.peers

    def learn(self, group: SequenceGroup, step: int, now: float, *, is_announced: bool = False) -> list[Node]:
        """Note what the holders of a request have of its prompt; return the chunks that only peers have, in order.

        The caller makes the request want them.

        Args:
            step: number of the next step.
            is_announced: whether the request is only expected, so that its chunks may be pulled slowly.
        """
        if not (self._is_on and group.prompt_scored):
            return []
        if not (is_announced or self._costs.load_pays(self._tree.chunk_size)):
            return []
        found: list[Node] = []
        for trail, holders in self._trails(group, step, is_announced=is_announced):
            path = self._follow(trail, self._peers(holders, now, is_announced=is_announced), now)
            self._tree.prune_root(trail.root)
            found += [node for node in path if node.peer != NO_PEER]
            if trail.is_closed and len(path) < len(trail.keys):
                break
        return found

    def learn_path(self, known: KnownPath, holders: Sequence[Holder], now: float) -> list[Node]:
        """Note what holders have of a path below a root; return its chunks that some tier or a peer has, in
        order."""
        root = self._tree.restore_root(known.root) if self._is_on else None
        if root is None:
            return []
        size, path, tokens = self._tree.chunk_bytes, list[Node](), known.tokens
        stop = len(tokens) if known.root.startswith(TEXT_ROOT) else len(tokens) - len(tokens) % size
        marker = b"" if known.root.startswith(SALT_ROOT) else root.name
        names = _names_of(known)
        if root.key == known.root and len(names) * size <= stop:  # else the text is here at another position
            trail = Trail(root, marker, _chunks(tokens[:stop], size), names)
            path = self._follow(trail, self._peers(holders, now, is_announced=True), now)
        self._tree.prune_root(root)
        return path

    def _trails(
        self, group: SequenceGroup, step: int, *, is_announced: bool
    ) -> Iterator[tuple[Trail, Sequence[Holder]]]:
        """Yield the chunks that the indices of holders count, with the holders: the whole chunks of a request's
        own tokens (with a cut, of what was kept behind it, or of what is left as a plain prompt), and all chunks
        of a text for the job that encodes it. A request that is only announced has no jobs."""
        tree, tokens, prompt = self._tree, group.members[0].tokens, group.modules
        holders, kept = group.request.submit.holders, group.request.submit.kept
        if kept is not None and group.cut is not None:
            for trail in kept_trails(tree, group.members[0], group.cut, _split(kept.names), step):
                yield trail, kept.holders
            return
        if prompt is None:
            if holders:
                seen = tokens.view() if group.cut is None else group.cut.cut.seen(tokens.view())
                packed = seen.astype("<i4", copy=False).tobytes()
                yield Trail(tree.root(group.request.submit.salt), b"", _whole(packed, tree.chunk_bytes)), holders
            return
        wanted = [prompt.texts[part.text] for part in prompt.parts] if is_announced else []
        for text in [prompt.texts[prompt.target]] if prompt.target >= 0 else wanted:
            if text.holders:
                root = tree.text_root(text.place, text.position)
                yield Trail(root, root.name, _chunks(text.tokens, tree.chunk_bytes)), text.holders
        if holders and prompt.target < 0 and prompt.runs:
            root, own = tree.prompt_root(prompt.name), tokens.to_bytes(prompt.entries * tree.chunk_size)
            yield Trail(root, root.name, _whole(own, tree.chunk_bytes)), holders

    def _peers(self, holders: Sequence[Holder], now: float, *, is_announced: bool) -> list[tuple[Holder, Peer]]:
        """Return the holders from which chunks can be pulled; for a request that waits, only those from which that
        is faster than computing."""
        found, compute_us = [], self._tree.chunk_size * self._costs.token_us
        for holder in holders:
            if not all(endpoint.startswith(_TRANSPORTS) for endpoint in holder.endpoints):
                continue  # of a later version, maybe; the request is computed
            peer = self._tree.tiers.peers.meet(holder.member, tuple(holder.endpoints), now)
            if peer is None or peer.health.is_paused:
                continue
            if not is_announced and peer.health.read_us >= compute_us:
                peer.health.doubt()
                continue
            found.append((holder, peer))
        return found

    def _follow(self, trail: Trail, peers: list[tuple[Holder, Peer]], now: float) -> list[Node]:
        """Return the chunks of a trail up to the first one that is nowhere, also those that are being computed."""
        path: list[Node] = []
        node, noted = trail.root, 0
        for index, key in enumerate(trail.keys):
            name = trail.names[index] if index < len(trail.names) else None
            child = node.children.get(key)
            if child is not None and name is not None and child.name != name:
                break  # it was computed behind the cut, and does not go on as the peer's does
            place = trail.first + index
            peer = next((peer for holder, peer in peers if holder.start <= place < holder.stop), None)
            if peer is not None and noted < NOTED_MAX and not (child is not None and child.is_loadable):
                noted += 1
                marker = trail.marker if name is None else b""
                child = self._tree.add_peer(node, key, peer, now, marker, name)
            if child is None or not (child.on_device or child.is_stored):
                break
            path.append(child)
            node = child
        return path


def _names_of(known: KnownPath) -> list[ChunkName]:
    """Return the names that a path tells; none of other chunks than those behind a cut."""
    return _split(known.names if known.root.startswith(CUT_ROOT) else b"")


def _split(packed: bytes) -> list[ChunkName]:
    return [ChunkName(packed[at : at + NAME_BYTES]) for at in range(0, len(packed), NAME_BYTES)]


def _chunks(tokens: bytes, size: int) -> list[bytes]:
    return [tokens[at : at + size] for at in range(0, len(tokens), size)]


def _whole(tokens: bytes, size: int) -> list[bytes]:
    return _chunks(tokens[: len(tokens) - len(tokens) % size], size)
