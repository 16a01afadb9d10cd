"""Hypothesis drives tree, pool and scheduler through random lives; invariants are checked after every step."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule
from simulation.driver import Simulation
from simulation.worker import expected_output

from trunkline.controller.block_pool import BlockPool
from trunkline.controller.config import EngineConfig
from trunkline.controller.integrity import check_integrity
from trunkline.controller.tree import TOKEN_BYTES, ChunkTree, Node
from trunkline.kvstore.layout import pack_int32

CHUNK = 3
CONTEXT = 48
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=5 * CHUNK)


class TreeMachine(RuleBasedStateMachine):
    """The tree against a naive model: the set of token prefixes that have been inserted and not evicted."""

    nodes: Bundle[Node] = Bundle("nodes")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(24)
        self.tree = ChunkTree(self.pool, CHUNK)
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
            if current.key != salt:
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


class EngineMachine(RuleBasedStateMachine):
    """Submits, aborts, steps and results in any order on a pool that is too small for all of them."""

    requests: Bundle[int] = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        config = EngineConfig(num_blocks=14, chunk_size=4, max_context=CONTEXT, token_budget=12, max_rows=4)
        self.simulation = Simulation(config)

    @rule(
        target=requests,
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=30),
        max_tokens=st.integers(1, 20),
        seed=st.integers(0, 2),
        stop=st.sampled_from([(), (1, 2), tuple(range(12))]),
    )
    def submit(self, prompt: list[int], max_tokens: int, seed: int, stop: tuple[int, ...]) -> Any:
        return multiple(self.simulation.submit(prompt, max_tokens, seed=seed, stop_ids=stop))

    @rule(request=consumes(requests))
    def abort(self, request: int) -> None:
        self.simulation.abort(request)

    @rule()
    def plan(self) -> None:
        self.simulation.plan()

    @rule()
    def answer(self) -> None:
        self.simulation.answer()

    @rule(steps=st.integers(2, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.simulation.step()

    @rule()
    def flush(self) -> None:
        self.simulation.engine.flush_cache()

    @rule()
    def preempt_newest(self) -> None:
        scheduler = self.simulation.engine.scheduler
        if scheduler.running_count:
            scheduler.preempt(scheduler._newest(), self.simulation.now)

    @invariant()
    def engine_is_sound(self) -> None:
        check_integrity(self.simulation.engine.scheduler)

    def teardown(self) -> None:
        self.simulation.run()
        for stream in self.simulation.streams.values():
            tokens = min(stream.max_tokens, CONTEXT - len(stream.prompt))
            expected = expected_output(stream.prompt, stream.seed, tokens, stream.stop_ids)
            assert stream.reason in ("stop", "length", "abort")
            assert stream.output == expected[: len(stream.output)]
            assert stream.reason == "abort" or stream.output == expected


CHECKS = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


@pytest.mark.parametrize(("machine", "examples"), [(TreeMachine, 150), (EngineMachine, 130)])
def test_machine(machine: type[RuleBasedStateMachine], examples: int) -> None:
    """Over 10,000 steps each; `derandomize` makes a failure repeat."""
    case = machine.TestCase
    case.settings = settings(
        max_examples=examples,
        stateful_step_count=80,
        deadline=None,
        derandomize=True,
        suppress_health_check=CHECKS,
    )
    case("runTest").debug()
