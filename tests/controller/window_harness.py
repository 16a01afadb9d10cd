"""A manager of the blocks of a model with windows, without an engine, to try things on."""

from __future__ import annotations

from controller.kv_harness import CHUNK, make_sequence

from trunkline.controller.allocation.kv_manager import Admission, KVCacheManager
from trunkline.controller.cache.block_pool import BlockPool
from trunkline.controller.cache.radix_cache import RadixCache
from trunkline.controller.cache.radix_tree import Node
from trunkline.controller.cache.window_cache import make_cache, make_pool
from trunkline.controller.engine.integrity import check_kv_cache
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.sequences.plan_builder import PlanBuilder
from trunkline.controller.sequences.sequence import Sequence


class WindowBench:
    """One plan after the other for single sequences; a plan computes all that was admitted in it."""

    def __init__(self, config: EngineConfig) -> None:
        self.pool: BlockPool = make_pool(config)
        self.tree: RadixCache = make_cache(self.pool, config, 0, None)
        self.kv = KVCacheManager(self.pool, self.tree, prefix_cache=True)
        self.step = 0

    def admit(self, tokens: list[int], request: int = 1) -> Sequence:
        self.step += 1
        sequence = make_sequence(tokens, request=request)
        plan = PlanBuilder(self.step, CHUNK, float(self.step))
        assert self.kv.admit(sequence, 0, plan) is Admission.ADMITTED
        sequence.computed = sequence.tokens.count
        self.kv.mark_ready(sequence, plan)
        for source in plan.copy_sources:
            self.tree.release(source, self.step, 1)
        return sequence

    def leave(self, sequence: Sequence) -> None:
        self.kv.leave(sequence, sequence.computed, float(self.step))
        check_kv_cache(self.kv, [], [])

    def cache(self, tokens: list[int], request: int = 1) -> list[Node]:
        """Compute a prompt and leave; return its chunks."""
        sequence = self.admit(tokens, request)
        self.kv.move_window(sequence, len(tokens))
        path = list(sequence.path)
        self.leave(sequence)
        return path
