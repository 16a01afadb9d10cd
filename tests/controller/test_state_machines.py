"""Hypothesis drives the radix tree and its pool through random lives; invariants are checked after every step."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    rule,
)

from trunkline.controller.cache.block_pool import BlockPool
from trunkline.controller.cache.radix_cache import RadixCache
from trunkline.controller.cache.radix_tree import Node
from trunkline.kvstore.chunks import TOKEN_BYTES, pack_int32
from trunkline.kvstore.root_keys import SALT_ROOT

CHUNK = 3
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=5 * CHUNK)


class TreeMachine(RuleBasedStateMachine):
    """The tree against a naive model: the set of token prefixes that have been inserted and not evicted."""

    nodes: Bundle[Node] = Bundle("nodes")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(24)
        self.tree = RadixCache(self.pool, CHUNK)
        self.held: list[Node] = []
        self.now = 0.0

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    @rule(tokens=TOKENS, salt=st.sampled_from([b"", b"x"]))
    def insert(self, tokens: list[int], salt: bytes) -> None:
        """What a finished sequence does: add what is missing of its path."""
        data = pack_int32(tokens)
        root = self.tree.root(salt)
        match = self.tree.match(root, data, 1)
        node = match.path[-1] if match.path else root
        size = CHUNK * TOKEN_BYTES
        self.tree.hold(node)
        for start in range(len(match.path) * size, len(data), size):
            key = data[start : start + size]
            if self.tree.covered_by_sibling(node, key) or (not self.pool.free_count and not self.tree.evict(1)):
                break
            child = self.tree.insert(node, key, self.pool.allocate(), 0, self.tick())
            self.tree.absorb_prefixes(child)
            self.tree.hold(child)
            self.tree.release(node, self.now)
            node = child
        self.tree.release(node, self.now)
        assert self.naive_match(salt, tokens) == self.tree_match(salt, tokens)

    def naive_match(self, salt: bytes, tokens: list[int]) -> int:
        """Longest prefix of `tokens` that some path of the tree begins with, by comparing all paths."""
        data, best = pack_int32(tokens), 0
        for node in self.tree.nodes():
            parts, current = [], node
            while current.parent is not None:
                parts.append(current.key)
                current = current.parent
            if current.key != SALT_ROOT + salt:
                continue
            path = b"".join(reversed(parts))
            agreed = 0
            while agreed < min(len(path), len(data)) and path[agreed] == data[agreed]:
                agreed += 1
            best = max(best, agreed // TOKEN_BYTES)
        return best

    def tree_match(self, salt: bytes, tokens: list[int]) -> int:
        match = self.tree.match(self.tree.root(salt), pack_int32(tokens), 1)
        return len(match.path) * CHUNK + match.partial_tokens

    @rule(tokens=TOKENS, salt=st.sampled_from([b"", b"x"]))
    def match_is_longest(self, tokens: list[int], salt: bytes) -> None:
        assert self.tree_match(salt, tokens) == self.naive_match(salt, tokens)

    @rule(data=st.data())
    def hold(self, data: Any) -> None:
        nodes = sorted(self.tree.nodes(), key=lambda node: node.name)
        if nodes:
            node = data.draw(st.sampled_from(range(len(nodes))))
            self.tree.hold(nodes[node])
            self.held.append(nodes[node])

    @rule()
    def release(self) -> None:
        if self.held:
            self.tree.release(self.held.pop(0), self.tick())

    @rule(blocks=st.integers(1, 8))
    def evict(self, blocks: int) -> None:
        evictable = self.tree.evictable
        assert self.tree.evict(blocks) == min(blocks, evictable)

    @invariant()
    def blocks_are_in_one_place(self) -> None:
        used = [node.block for node in self.tree.nodes()]
        assert len(set(used)) == len(used) == self.tree.node_count
        assert set(used) | self.pool.free_blocks() == set(range(24))
        assert self.pool.free_count + self.tree.node_count == 24

    @invariant()
    def held_nodes_stay_with_their_ancestors(self) -> None:
        present = {id(node) for node in self.tree.nodes()}
        active = set()
        for node in self.held:
            current: Node | None = node
            while current is not None and current.parent is not None:
                assert id(current) in present
                active.add(id(current))
                current = current.parent
        assert self.tree.active_count == len(active)


CHECKS = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


def test_machine() -> None:
    """Thousands of steps; `derandomize` makes a failure repeat. Shrinking it would take too long."""
    case = TreeMachine.TestCase
    case.settings = settings(
        max_examples=50,
        stateful_step_count=80,
        deadline=None,
        derandomize=True,
        suppress_health_check=CHECKS,
        phases=[Phase.generate],
    )
    case("runTest").debug()
