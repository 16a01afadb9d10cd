"""Engines of every proportion for random traffic, and what is asked of them."""

from __future__ import annotations

from msgspec.structs import replace
from simulation.traffic import Mix

from trunkline.controller.engine_config import EngineConfig

TINY = EngineConfig(num_blocks=24, chunk_size=4, max_context=80, token_budget=24, max_rows=8)
ENGINES = {
    "tiny, swapping": replace(TINY, host_slots=20, preemption="swap"),
    "tiny, recomputing": replace(TINY, host_slots=20, preemption="recompute"),
    "tiny, both": replace(TINY, host_slots=5, swap_us_per_block=90.0, target_itl_ms=0.5),
    "many waiting": EngineConfig(
        num_blocks=60,
        chunk_size=16,
        max_context=160,
        token_budget=64,
        max_rows=16,
        host_slots=40,
        max_waiting=2000,
    ),
    "many rows": EngineConfig(  # so that full chunks wait for each other, and blocks come early
        num_blocks=280, chunk_size=16, max_context=200, token_budget=320, max_rows=48, host_slots=60
    ),
    "long prompts": EngineConfig(
        num_blocks=40, chunk_size=16, max_context=640, token_budget=128, max_rows=16, host_slots=60
    ),
    "one token a chunk": EngineConfig(num_blocks=90, chunk_size=1, max_context=80, token_budget=24, max_rows=8),
    "tiers": replace(TINY, host_slots=20, disk_slots=60, remote=True, ranks=2),
    "little host memory, cuts": replace(TINY, num_blocks=40, host_slots=6, disk_slots=30, session_ttl_s=300.0),
    "modules, device only": TINY,
    "modules, tiers": replace(TINY, host_slots=20, disk_slots=60, remote=True, ranks=2, session_ttl_s=300.0),
    "modules that cannot shift": replace(TINY, num_blocks=30, host_slots=8, positions_shift=False),
    "modules in large chunks": EngineConfig(
        num_blocks=60, chunk_size=16, max_context=300, token_budget=64, max_rows=16, host_slots=40
    ),
    "without a cache": EngineConfig(
        num_blocks=64, chunk_size=8, max_context=96, token_budget=24, max_rows=8, prefix_cache=False
    ),
}
MIXES = {
    "many waiting": Mix(crowd=2100, prompt_max=60),
    "many rows": Mix(crowd=60, output_max=90, beams=0.01),
    "long prompts": Mix(crowd=30, prompt_max=400, output_max=40),
    "tiny, both": Mix(preempts=0.01),
    "tiers": Mix(ttl=0.2),
    "modules, device only": Mix(modules=0.9, calls=0.05, preempts=0.01),
    "modules, tiers": Mix(modules=0.7, calls=0.05, ttl=0.2, preempts=0.01, schemas=12),
    "modules that cannot shift": Mix(modules=0.9, calls=0.02),
    "modules in large chunks": Mix(modules=0.8, calls=0.05, crowd=30),
    "without a cache": Mix(modules=0.2),
    "little host memory, cuts": Mix(cuts=0.5, ttl=0.2, preempts=0.01),
}
