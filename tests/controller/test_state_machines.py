"""Hypothesis drives tree, pool and scheduler through random lives; invariants are checked after every step."""

from __future__ import annotations

from typing import Any, Unpack

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)
from simulation.driver import Simulation
from simulation.streams import Options, verify
from simulation.traffic import fits

from trunkline.controller.cache.block_pool import BlockPool
from trunkline.controller.cache.radix_cache import RadixCache
from trunkline.controller.cache.radix_tree import SALT_ROOT, TOKEN_BYTES, Node
from trunkline.controller.engine.integrity import check_integrity
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import BeamSearch, Grammar
from trunkline.kvstore.int32_codec import pack_int32

CHUNK = 3
CONTEXT = 48
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=30)
STOPS = st.sampled_from([(), (1, 2), tuple(range(12))])
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


class EngineMachine(RuleBasedStateMachine):
    """Requests of every kind, aborts, steps, results and grammars in any order; the pool is too small for all."""

    requests: Bundle[int] = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.config = EngineConfig(num_blocks=14, chunk_size=4, max_context=CONTEXT, token_budget=12, max_rows=5)
        self.simulation: Simulation

    @initialize(
        preemption=st.sampled_from(["recompute", "swap", "auto"]),
        host_slots=st.sampled_from([1, 5, 30]),
        inflight=st.integers(1, 2),
    )
    def configure(self, preemption: str, host_slots: int, inflight: int) -> None:
        changes = {"preemption": preemption, "host_slots": host_slots, "max_inflight_steps": inflight}
        self.config = msgspec.structs.replace(self.config, **changes)
        self.simulation = Simulation(self.config)

    def send(self, prompt: list[int], max_tokens: int, **options: Unpack[Options]) -> Any:
        request = self.simulation.submit(prompt, max_tokens, **options)
        beam = options.get("beam")
        width = beam.width if beam else options.get("n", 1)
        possible = fits(self.config, len(prompt), max_tokens, width)
        assert (self.simulation.streams[request].reason == "invalid") == (not possible)
        return multiple(request)

    @rule(
        target=requests,
        prompt=PROMPTS,
        max_tokens=st.integers(1, 20),
        seed=st.integers(0, 2),
        stop=STOPS,
        n=st.sampled_from([1, 1, 2, 3]),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
    )
    def submit(
        self, prompt: list[int], max_tokens: int, seed: int, stop: tuple[int, ...], n: int, priority: int
    ) -> Any:
        return self.send(prompt, max_tokens, seed=seed, stop_ids=stop, n=n, priority=priority)

    @rule(
        target=requests,
        prompt=PROMPTS,
        max_tokens=st.integers(1, 12),
        width=st.integers(1, 4),
        early_stopping=st.sampled_from([True, False, None]),
        stop=STOPS,
    )
    def submit_beams(
        self, prompt: list[int], max_tokens: int, width: int, early_stopping: bool | None, stop: tuple[int, ...]
    ) -> Any:
        beam = BeamSearch(width, 1.0, early_stopping)
        return self.send(prompt, max_tokens, beam=beam, n=width, stop_ids=stop)

    @rule(target=requests, prompt=PROMPTS, scored=st.integers(-1, 1), text=st.sampled_from([None, "a", "b"]))
    def submit_special(self, prompt: list[int], scored: int, text: str | None) -> Any:
        grammar = Grammar("regex", text) if text else None
        return self.send(prompt, 6, prompt_logprobs=scored, grammar=grammar)

    @precondition(lambda self: self.simulation.grammars)
    @rule()
    def compile_grammar(self) -> None:
        self.simulation.compiled(next(iter(self.simulation.grammars)))

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
        self.simulation.flush_cache()

    @rule(data=st.data())
    def preempt(self, data: Any) -> None:
        scheduler = self.simulation.scheduler
        groups = {sequence.request: sequence.group for sequence in scheduler.running()}
        if groups:
            scheduler.preempt(groups[data.draw(st.sampled_from(sorted(groups)))], self.simulation.now)

    @invariant()
    def engine_is_sound(self) -> None:
        check_integrity(self.simulation.scheduler)

    def teardown(self) -> None:
        if not hasattr(self, "simulation"):
            return
        self.simulation.run()
        for stream in self.simulation.streams.values():
            verify(stream, CONTEXT)
        self.simulation.flush_cache()
        scheduler = self.simulation.scheduler
        assert scheduler.kv.pool.free_count == self.config.num_blocks
        assert not scheduler.forks.searches


CHECKS = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


@pytest.mark.parametrize(("machine", "examples"), [(TreeMachine, 50), (EngineMachine, 16)])
def test_machine(machine: type[RuleBasedStateMachine], examples: int) -> None:
    """Thousands of steps each; `derandomize` makes a failure repeat. It is not shrunk: that takes longer than a
    test may."""
    case = machine.TestCase
    case.settings = settings(
        max_examples=examples,
        stateful_step_count=80,
        deadline=None,
        derandomize=True,
        suppress_health_check=CHECKS,
        phases=[Phase.generate],
    )
    case("runTest").debug()
