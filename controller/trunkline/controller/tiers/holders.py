"""What peers have of a prompt: the router's holders become chunks of the radix tree that only a peer has. Pure.

      chunks of the prompt    0   1   2   3   4   5   6   7   8
      the tree has            ████████████
      holders                         └── A ──┘   └── B ──┘
      noted as A's                        ████
      of no use                                   ░░░░░░░░        a prefix has no gaps

The names of these chunks follow from the root and the tokens, so a router only says *where* a chunk may be, never
what it is. From here on such a chunk is like one in any other tier: a waiting request wants it, it is pulled in
the order of the queue, and the request computes it if that is faster.

For a request, a peer is of no use if a pull is known to take longer than computing the chunk. Then nothing is
noted, and the estimate is lowered a little, because only a pull can correct it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from trunkline.controller.cache.radix_cache import RadixCache
from trunkline.controller.cache.radix_tree import SALT_ROOT, TEXT_ROOT, Node
from trunkline.controller.messages import Holder
from trunkline.controller.sequences.sequence import SequenceGroup
from trunkline.controller.tiers.costs import StepCosts
from trunkline.kvstore.chunks import NO_PEER
from trunkline.kvstore.peers import PEER_READ_US, Peer

NOTED_MAX: Final = 4096
"""Largest number of chunks of one prompt that are noted as a peer's."""
_TRANSPORTS: Final = ("ipc://", "tcp://")


class Trail(NamedTuple):
    """Successive chunks of a prompt below one root."""

    root: Node
    marker: bytes
    """Name of what the chunks see (`trunkline.controller.sequences.sequence.Stem.marker`)."""
    keys: list[bytes]


class Holders:
    """Notes which chunks of prompts peers have."""

    def __init__(self, tree: RadixCache, costs: StepCosts) -> None:
        self._tree = tree
        self._costs = costs

    @property
    def _is_on(self) -> bool:
        return self._tree.tiers.config.peers

    def learn(self, group: SequenceGroup, now: float, *, is_announced: bool = False) -> list[Node]:
        """Note what the holders of a request have of its prompt; return the chunks that only peers have, in order.

        The caller makes the request want them.

        Args:
            is_announced: whether the request is only expected, so that its chunks may be pulled slowly.
        """
        holders = group.request.submit.holders
        if not (holders and self._is_on and group.prompt_scored):
            return []
        if not (is_announced or self._costs.load_pays(self._tree.chunk_size)):
            return []
        trail = self._trail_of(group)
        if trail is None:
            return []
        path = self._follow(trail, self._peers(holders, now, is_announced=is_announced), now)
        self._tree.prune_root(trail.root)
        return [node for node in path if node.peer != NO_PEER]

    def learn_path(self, root_key: bytes, tokens: bytes, holders: Sequence[Holder], now: float) -> list[Node]:
        """Note what holders have of a path below a root; return its chunks that some tier or a peer has, in order.

        Args:
            root_key: key of the root (`RadixTree.restore_root`).
            tokens: int32 token ids of the path's chunks. The last chunk of a module's text may be partial.
        """
        root = self._tree.restore_root(root_key) if self._is_on else None
        if root is None:
            return []
        size, path = self._tree.chunk_bytes, list[Node]()
        stop = len(tokens) if root_key.startswith(TEXT_ROOT) else len(tokens) - len(tokens) % size
        keys = [tokens[at : min(at + size, stop)] for at in range(0, stop, size)]
        marker = b"" if root_key.startswith(SALT_ROOT) else root.name
        if root.key == root_key:  # else this group has computed the text at another position
            path = self._follow(Trail(root, marker, keys), self._peers(holders, now, is_announced=True), now)
        self._tree.prune_root(root)
        return path

    def _trail_of(self, group: SequenceGroup) -> Trail | None:
        """Return the chunks that the indices of a request's holders count: the whole chunks of its own tokens;
        with a cut, of what is left as a plain prompt."""
        tree, tokens, prompt = self._tree, group.members[0].tokens, group.modules
        if prompt is not None:
            if prompt.target >= 0 or not prompt.runs:
                return None
            root, own = tree.prompt_root(prompt.name), tokens.to_bytes(prompt.entries * tree.chunk_size)
            return Trail(root, root.name, _whole_chunks(own, tree.chunk_bytes))
        seen = tokens.view() if group.cut is None else group.cut.cut.seen(tokens.view())
        packed = seen.astype("<i4", copy=False).tobytes()
        return Trail(tree.root(group.request.submit.salt), b"", _whole_chunks(packed, tree.chunk_bytes))

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
                peer.health.doubt(PEER_READ_US)
                continue
            found.append((holder, peer))
        return found

    def _follow(self, trail: Trail, peers: list[tuple[Holder, Peer]], now: float) -> list[Node]:
        """Return the chunks of a trail up to the first one that is nowhere, also those that are being computed."""
        path: list[Node] = []
        node, noted = trail.root, 0
        for index, key in enumerate(trail.keys):
            child = node.children.get(key)
            peer = next((peer for holder, peer in peers if holder.start <= index < holder.stop), None)
            if peer is not None and noted < NOTED_MAX and not (child is not None and child.is_loadable):
                noted += 1
                child = self._tree.add_peer(node, key, peer, now, trail.marker)
            if child is None or not (child.on_device or child.is_stored):
                break
            path.append(child)
            node = child
        return path


def _whole_chunks(tokens: bytes, size: int) -> list[bytes]:
    return [tokens[at : at + size] for at in range(0, len(tokens) - size + 1, size)]
