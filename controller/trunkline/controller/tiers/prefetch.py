"""Prefetch: bring the chunks of waiting and announced requests near before their turn comes. Pure.

When a request arrives, the chunks that it will use are known. The directory fetches those that are far away into
host memory while the request waits (CachedAttention §3.3.1), and keeps chunks that other requests would evict.
Where the radix tree ends, the router says which peers have chunks (`holders.py`), and the remote tier is asked for
chunks that other controllers have put there. How long a request waits for them is said in `fetching.py`.
"""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from math import inf
from typing import Final, NamedTuple

from trunkline.controller.allocation.prefix_match import expected_chunks
from trunkline.controller.cache.radix_cache import RadixCache
from trunkline.controller.cache.radix_tree import Node
from trunkline.controller.cache.reader_cache import ReaderCache
from trunkline.controller.messages import Holder
from trunkline.controller.reports import Probed
from trunkline.controller.sequences.sequence import Sequence, SequenceGroup
from trunkline.controller.tiers.fetching import PROBE_PATIENCE_S, Fetching
from trunkline.controller.tiers.holders import Holders, KnownPath
from trunkline.controller.tiers.kept_probe import KeptProbe, enter_kept, kept_probe
from trunkline.controller.tiers.tier_orders import TierOrders
from trunkline.kvstore.chunks import NO_BLOCK, NO_PEER, ChunkName, chunk_name
from trunkline.kvstore.root_keys import text_root_name

PROBED_CHUNKS_MAX: Final = 4096
"""Largest number of chunks of one prompt that the remote tier is asked for."""
SILENCE_S: Final = 5.0
"""Seconds for which a remote tier that did not answer is not asked again."""
ANNOUNCED_S: Final = 60.0
"""Seconds for which the chunks of an announced request are kept near."""
ANNOUNCED_MAX: Final = 256
"""Largest number of announcements that are kept; beyond that the oldest is forgotten."""


def _entries(group: SequenceGroup) -> int:
    """Return how many block-table entries come before the group's own tokens."""
    return group.modules.entries if group.modules is not None else 0


def _tokens(nodes: AbstractSequence[Node]) -> int:
    return sum(node.token_count for node in nodes)


def _beyond(held: list[Node], path: AbstractSequence[Node]) -> list[Node]:
    """Return the chunks of `held` that are not in `path`: another request computes those between them now."""
    if not held:
        return []
    known = set(path)
    return [node for node in held if node not in known]


class _Origin(NamedTuple):
    """The root from which a path of chunks begins."""

    root: Node | None
    name: ChunkName
    """Name of the root, even if there is no root yet."""
    marker: bytes
    """Name of what the path's chunks see (`trunkline.controller.sequences.sequence.Stem.marker`)."""


class _Part(NamedTuple):
    """Successive chunks of a group's own tokens, for which the remote tier is asked."""

    start: int
    """Index of the first chunk."""
    above: ChunkName
    """Name of the chunk or root above the first chunk."""
    keys: list[bytes]


class _Probing(NamedTuple):
    group: SequenceGroup
    part: _Part | KeptProbe
    asked: float


class Prefetcher:
    """Finds the chunks that coming requests will use, in the tree, at peers and in the remote tier, and fetches
    them."""

    def __init__(self, tree: RadixCache, fetching: Fetching, orders: TierOrders, holders: Holders) -> None:
        self._tree = tree
        self._holders = holders
        self._fetching = fetching
        self._orders = orders
        self._probes: dict[int, _Probing] = {}
        self._announced: dict[int, float] = {}
        """Time at which each announcement is forgotten, by job."""
        self._near: list[SequenceGroup] = []
        """Requests that came since the last plan, and whose prompts were all on the device."""
        self._next_job = -1
        self._silent_until = 0.0

    def known_tokens(self, group: SequenceGroup, step: int) -> int:
        """Return how many of a group's own tokens are cached in some tier."""
        tree = self._tree
        if group.cut is None and group.modules is None and not isinstance(tree, ReaderCache):
            sequence = group.members[0]
            root = tree.find_root(sequence.salt)
            return 0 if root is None else tree.whole_tokens(root, sequence.tokens.to_bytes(), step)
        path = expected_chunks(tree, group.members[0], step).path
        return _tokens(path[_entries(group) :])

    def fetch_unless_near(self, group: SequenceGroup, step: int, now: float) -> int:
        """As `fetch`; but if all of a request's prompt is on the device, put that off until the next plan is made
        (`settle`): most such requests do not wait then, and nothing has to be done."""
        known = self._near_tokens(group, step)
        if not known:
            return self.fetch(group, step, now)
        self._near.append(group)
        return known

    def settle(self, step: int, now: float) -> None:
        """Fetch for the requests that `fetch_unless_near` has put off, and which still wait."""
        for group in self._near:
            if group.queued:
                self.fetch(group, step, now)
        self._near.clear()

    def _near_tokens(self, group: SequenceGroup, step: int) -> int:
        """Return how many tokens of a request's prompt are on the device, if the prompt is a plain one and these
        are all but the last, so that nothing can be fetched for it; else 0."""
        sequence, tree = group.members[0], self._tree
        root = tree.find_root(sequence.salt)
        if root is None or group.cut is not None or group.modules is not None or isinstance(tree, ReaderCache):
            return 0
        match = tree.match(root, sequence.tokens.to_bytes(), step)
        known = len(match.path) * tree.chunk_size + match.partial_tokens
        if match.pending is not None or known < sequence.tokens.count - 1:
            return 0
        for node in match.path if match.partial is None else [*match.path, match.partial]:
            if node.block == NO_BLOCK:
                return 0
        return known

    def fetch(self, group: SequenceGroup, step: int, now: float) -> int:
        """Fetch what a waiting request will use into host memory, from tiers that are known to have it; ask the
        remote tier for the rest. Return the request's `known_tokens`."""
        sequence = group.members[0]
        path = self._expect(group, step, now)
        if self._tree.tiers.config.remote and self._may_probe(now):
            if group.cut is None:
                self._probe(group, sequence, len(path) - _entries(group) if path else 0, now)
            elif (kept := kept_probe(self._tree, group, path, PROBED_CHUNKS_MAX)) is not None:
                self._ask(group, kept, kept.names[kept.start :], now)
        return _tokens(path[_entries(group) :])

    def _expect(self, group: SequenceGroup, step: int, now: float) -> AbstractSequence[Node]:
        """Fetch what a waiting request will use, as far as it is known where that is; return its whole chunks."""
        held = self._holders.learn(group, step, now)
        path, wanted, behind = expected_chunks(self._tree, group.members[0], step)
        self._fetching.expect(group, [*wanted, *_beyond(held, path)], behind)
        return path

    def _may_probe(self, now: float) -> bool:
        """Return whether to ask the remote tier. While it does not answer it is not asked, or each request would
        wait in vain."""
        if any(now - probing.asked > PROBE_PATIENCE_S for probing in self._probes.values()):
            self._probes.clear()
            self._silent_until = now + SILENCE_S
        return now >= self._silent_until

    def _probe(self, group: SequenceGroup, sequence: Sequence, known: int, now: float) -> None:
        """Ask the remote tier for the chunks of a request that the radix tree does not know.

        Args:
            known: how many chunks of the request's own tokens are known.
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
        self._ask(group, _Part(known, above, keys), names, now)

    def _ask(self, group: SequenceGroup, part: _Part | KeptProbe, names: list[ChunkName], now: float) -> None:
        self._probes[self._orders.probe(names)] = _Probing(group, part, now)
        self._fetching.probing(group, now)

    def _origin(self, group: SequenceGroup) -> _Origin:
        """Return where the chunks of a plain request, of a text to be encoded, or of a prompt's own tokens behind
        modules begin."""
        salt, prompt = group.request.submit.salt, group.modules
        if prompt is None:
            return _Origin(self._tree.find_root(salt), self._tree.root_name(salt), b"")
        if not group.encodes:
            return _Origin(self._tree.find_prompt_root(prompt.name), prompt.name, prompt.name)
        root = self._tree.find_text_root(prompt.name)
        name = root.name if root is not None else text_root_name(prompt.name, prompt.runs[0][0])
        return _Origin(root, name, name)

    def probed(self, report: Probed, step: int, now: float) -> None:
        """Note a rank's answer to a probe. When all ranks have answered, fetch what all of them have."""
        answer = self._orders.probed(report)
        probing = self._probes.pop(answer.id, None) if answer is not None else None
        if answer is None or probing is None or not probing.group.members:
            return
        if answer.present < 0:
            self._silent_until = now + SILENCE_S
        group, part = probing.group, probing.part
        waits, following = group.queued, None
        if isinstance(part, KeptProbe):
            enter_kept(self._tree, group, part, max(0, answer.present), step, now)
            if waits and answer.present >= 0 and group.cut is not None:
                following = part.following(answer.present, PROBED_CHUNKS_MAX)
        elif answer.present > 0:
            self._learn(group, part, answer.present, now)
        if waits:
            self._fetching.probed(group)
            self._expect(group, step, now)
        if following is not None:
            self._ask(group, following, following.names[following.start :], now)

    def _learn(self, group: SequenceGroup, part: _Part, present: int, now: float) -> None:
        """Add the chunks that were found to the tree, if the chunks above them are still there."""
        size = self._tree.chunk_size
        sequence, first = group.members[0], _entries(group)
        if group.modules is None:
            node, marker = self._tree.root(sequence.salt), b""
        else:
            prompt = group.modules
            node = (
                self._tree.text_root(prompt.name, prompt.runs[0][0])
                if group.encodes
                else self._tree.prompt_root(prompt.name)
            )
            marker = node.name
        for index in range(first, first + part.start):
            child = node.children.get(sequence.tokens.to_bytes(index * size, (index + 1) * size))
            if child is None:
                break
            node = child
        if node.name == part.above:  # else it is gone, or the text was computed at another position meanwhile
            for key in part.keys[:present]:
                node = self._tree.add_remote(node, key, now, marker)
        self._tree.prune_root(node)

    def announce(self, group: SequenceGroup, step: int, now: float) -> tuple[int, int]:
        """Fetch the chunks of a request that is expected soon into host memory.

        Returns:
            how many of its tokens are cached, and how many of those are not near yet.
        """
        held = self._holders.learn(group, step, now, is_announced=True)
        path, wanted, behind = expected_chunks(self._tree, group.members[0], step)
        if path or held:
            self._want([*wanted, *_beyond(held, path)], now, behind)
        return _tokens(path), _tokens([node for node in path if not node.is_loadable])

    def announce_path(
        self, known: KnownPath, holders: AbstractSequence[Holder], now: float, ttl: float
    ) -> tuple[int, int]:
        """Fetch the chunks of a path that other groups offer into host memory, where they stay as cached chunks.

        Args:
            ttl: seconds for which chunks that peers give are kept; 0: no limit.

        Returns:
            how many tokens of the path are cached or at peers, and how many of those are not near yet.
        """
        path = self._holders.learn_path(known, holders, now)
        if path:
            self._want(path, now)
        if ttl:
            self._tree.tiers.keep([node for node in path if node.peer != NO_PEER], now + ttl)
        return _tokens(path), _tokens([node for node in path if not node.is_loadable])

    def _want(self, nodes: list[Node], now: float, behind: int = 0) -> None:
        """Want chunks behind all waiting requests, in order of arrival, for a while (`behind` as in `expect`)."""
        job, self._next_job = self._next_job, self._next_job - 1
        self._tree.tiers.want(job, (inf, inf, 1.0, float(-job), 0.0), nodes, behind)
        self._announced[job] = now + ANNOUNCED_S
        if len(self._announced) > ANNOUNCED_MAX:
            self._forget(next(iter(self._announced)))

    def forget_old(self, now: float) -> None:
        """Forget announcements that no request has followed up in time."""
        for job in [job for job, until in self._announced.items() if until <= now]:
            self._forget(job)

    def _forget(self, job: int) -> None:
        del self._announced[job]
        self._tree.tiers.unwant(job)
