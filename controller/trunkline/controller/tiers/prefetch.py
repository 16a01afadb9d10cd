"""Prefetch: bring the chunks of arriving and announced requests near before their turn comes. Pure.

A request's cached prefix is handed to the directory, which fetches chunks that are far away. Where the radix tree
ends, the remote tier is asked for chunks that other controllers have put there (design.md §7).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final, NamedTuple

from trunkline.controller.allocation.prefix_match import expected_chunks
from trunkline.controller.cache.radix_cache import RadixCache
from trunkline.controller.cache.radix_tree import Node
from trunkline.controller.messages import Probed
from trunkline.controller.sequences.sequence import Sequence, SequenceGroup
from trunkline.controller.tiers.fetching import PROBE_PATIENCE_S, Fetching
from trunkline.controller.tiers.tier_orders import TierOrders
from trunkline.kvstore.chunks import ChunkName, chunk_name

PROBED_CHUNKS_MAX: Final = 4096
"""Chunks of one prompt that the remote tier is asked for, at most."""
SILENCE_S: Final = 5.0
"""Seconds for which a remote tier that did not answer is not asked again."""
ANNOUNCED_S: Final = 60.0
"""Seconds for which the chunks of an announced request are kept near."""
ANNOUNCED_MAX: Final = 256
"""Announcements that are kept; beyond that the oldest is forgotten."""


def _entries(group: SequenceGroup) -> int:
    """Return how many block-table entries come before the group's own tokens."""
    return group.modules.entries if group.modules is not None else 0


def _tokens(nodes: list[Node]) -> int:
    return sum(node.token_count for node in nodes)


class _Origin(NamedTuple):
    """Where a path of chunks begins."""

    root: Node | None
    name: ChunkName
    """The root's name, even if there is no root yet."""
    marker: bytes
    """As in `trunkline.controller.sequences.sequence.Stem`."""


@dataclass(slots=True)
class _Probing:
    group: SequenceGroup
    start: int
    """Index of the first chunk that was asked for."""
    above: ChunkName
    """Name of the chunk or root above it."""
    keys: list[bytes]
    asked: float


class Prefetcher:
    """Has the directory and the remote tier look for the chunks of requests."""

    def __init__(self, tree: RadixCache, fetching: Fetching, orders: TierOrders) -> None:
        self._tree = tree
        self._fetching = fetching
        self._orders = orders
        self._probes: dict[int, _Probing] = {}
        self._announced: dict[int, float] = {}
        """When each announcement is forgotten, by job."""
        self._next_job = -1
        self._silent_until = 0.0

    def known_tokens(self, group: SequenceGroup, step: int) -> int:
        """Return how many of a group's own tokens are cached in some tier."""
        path, _ = expected_chunks(self._tree, group.members[0], step)
        return _tokens(path[_entries(group) :])

    def arrived(self, group: SequenceGroup, step: int, now: float) -> int:
        """Fetch what a request that has arrived will use; return its `known_tokens`."""
        sequence = group.members[0]
        path, head = expected_chunks(self._tree, sequence, step)
        self._fetching.expect(group, path + head)
        plain = group.cut is None and group.modules is None
        if self._tree.tiers.config.remote and (plain or group.encodes) and self._may_probe(now):
            self._probe(group, sequence, len(path) - _entries(group) if path else 0, now)
        return _tokens(path[_entries(group) :])

    def _may_probe(self, now: float) -> bool:
        """Return whether to ask the remote tier: not while it does not answer, or every request would wait for
        nothing."""
        if any(now - probing.asked > PROBE_PATIENCE_S for probing in self._probes.values()):
            self._probes.clear()
            self._silent_until = now + SILENCE_S
        return now >= self._silent_until

    def _probe(self, group: SequenceGroup, sequence: Sequence, known: int, now: float) -> None:
        """
        Args:
            known: how many chunks of its own tree are known.
        """
        size, first = self._tree.chunk_size, _entries(group)
        known = max(0, known)
        stop = min(sequence.tokens.count, (first + known + PROBED_CHUNKS_MAX) * size)
        if not group.encodes:
            stop -= stop % size  # a text's last chunk is stored as it is; of other prompts only full chunks are
        keys = [sequence.tokens.to_bytes(at, min(at + size, stop)) for at in range(first * size, stop, size)]
        origin = self._origin(group)
        node, name = origin.root, origin.name
        for key in keys[:known]:
            assert node is not None
            node = node.children[key]
            name = node.name
        keys = keys[known:]
        if not keys or (node is not None and keys[0] in node.children):
            return  # nothing is missing, or it is being computed now
        names, above = [], name
        for key in keys:
            name = chunk_name(name, origin.marker + key)
            names.append(name)
        self._probes[self._orders.probe(names)] = _Probing(group, known, above, keys, now)
        self._fetching.probing(group, now)

    def _origin(self, group: SequenceGroup) -> _Origin:
        """Return where the chunks of a plain request, or of a text to be encoded, begin."""
        salt, prompt = group.request.submit.salt, group.modules
        if prompt is None:
            return _Origin(self._tree.find_root(salt), self._tree.root_name(salt), b"")
        root = self._tree.find_text_root(prompt.name)
        name = root.name if root is not None else self._tree.text_name(prompt.name, prompt.runs[0][0])
        return _Origin(root, name, name)

    def probed(self, report: Probed, step: int, now: float) -> None:
        """Take a rank's answer to what its remote tier has; fetch that with the last rank's answer."""
        answer = self._orders.probed(report)
        probing = self._probes.pop(answer.id, None) if answer is not None else None
        if answer is None or probing is None or not probing.group.members:
            return
        if answer.present < 0:
            self._silent_until = now + SILENCE_S
        waits = probing.group.queued
        if answer.present > 0:
            self._learn(probing, answer.present, now)
        if waits:
            self._fetching.probed(probing.group)
            path, head = expected_chunks(self._tree, probing.group.members[0], step)
            self._fetching.expect(probing.group, path + head)

    def _learn(self, probing: _Probing, present: int, now: float) -> None:
        """Add the chunks that were found to the tree, if the chunks above them are still there."""
        group, size = probing.group, self._tree.chunk_size
        sequence, first = group.members[0], _entries(group)
        if group.modules is None:
            node, marker = self._tree.root(sequence.salt), b""
        else:
            node = self._tree.text_root(group.modules.name, group.modules.runs[0][0])
            marker = node.name
        for index in range(first, first + probing.start):
            child = node.children.get(sequence.tokens.to_bytes(index * size, (index + 1) * size))
            if child is None:
                break
            node = child
        if node.name == probing.above:  # else it is gone, or the text was computed at another position meanwhile
            for key in probing.keys[:present]:
                node = self._tree.add_remote(node, key, now, marker)
        self._tree.prune_root(node)

    def announce(self, group: SequenceGroup, step: int, now: float) -> tuple[int, int]:
        """Fetch the chunks of a request that is expected soon into host memory.

        Returns:
            how many of its tokens are cached, and how many of those are not near yet.
        """
        path, head = expected_chunks(self._tree, group.members[0], step)
        if path:
            job, self._next_job = self._next_job, self._next_job - 1
            # Behind all waiting requests, in order of arrival.
            self._tree.tiers.want(job, (inf, 1.0, float(-job), 0.0), path + head)
            self._announced[job] = now + ANNOUNCED_S
            if len(self._announced) > ANNOUNCED_MAX:
                self._forget(next(iter(self._announced)))
        return _tokens(path), _tokens([node for node in path if not node.is_loadable])

    def forget_old(self, now: float) -> None:
        """Forget announcements that no request has followed up in time."""
        for job in [job for job, until in self._announced.items() if until <= now]:
            self._forget(job)

    def _forget(self, job: int) -> None:
        del self._announced[job]
        self._tree.tiers.unwant(job)
