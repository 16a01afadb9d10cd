"""The state that a controller reports in answer to each ping: load, health and tiers."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from trunkline.controller.engine.engine import Engine
from trunkline.kvstore.tier import TierKind
from trunkline.router.messages import State, TierState

NO_COUNTS: Final[dict[str, Any]] = {
    field.name: 0
    for field in msgspec.structs.fields(State)
    if field.required and field.type is int and field.name != "seq"
}
"""The counts of a `State` before there is an engine."""


def state_of(engine: Engine) -> dict[str, Any]:
    """The fields of `State` that come from a running engine."""
    scheduler, kv, config, counters = (
        engine.scheduler,
        engine.scheduler.kv,
        engine.config,
        engine.counters,
    )
    tree = kv.tree
    requests, queued_tokens = load_of(engine)
    return {
        "running": scheduler.running_count,
        "waiting": scheduler.waiting_count,
        "blocks_total": config.num_blocks,
        "blocks_free": kv.pool.free_count,
        "blocks_cached": tree.evictable,
        "prompt_tokens": counters.prompt_tokens,
        "cached_tokens": counters.cached_tokens,
        "output_tokens": counters.output_tokens,
        "preemptions": scheduler.counters.preemptions,
        "steps": counters.steps,
        "plan_copies": counters.plan_copies,
        "kv_bytes_read": counters.kv_bytes_read,
        "evicted_blocks": tree.evicted_blocks,
        "max_context": config.longest_sequence,
        "blocks_logical": sum(len(s.path) + len(s.private) for s in scheduler.running()),
        "forks": scheduler.forks.count,
        "swapped": scheduler.counters.swapped,
        "blocks_saved": tree.saved_blocks,
        "blocks_loaded": tree.loaded_blocks,
        "host_slots": config.host_slots,
        "host_slots_free": config.host_slots - tree.host_slots_used if config.prefix_cache else 0,
        "max_rows": config.max_rows,
        "tiers": _tiers(engine),
        "misses": dict(counters.misses),
        "positions_shift": config.positions_shift,
        "texts_encoded": scheduler.encoding.jobs.encoded_texts,
        "text_tokens_encoded": scheduler.encoding.jobs.encoded_tokens,
        "texts_encoding": len(scheduler.encoding.jobs),
        "chunks_pinned": scheduler.encoding.calls.pinned_count,
        "epoch": engine.epoch,
        "fingerprint": config.model_fingerprint,
        "dtype": config.dtype,
        "chunk_size": config.chunk_size,
        "prefill_us": scheduler.costs.token_us,
        "load_us": _load_us(engine),
        "requests": requests,
        "queued_tokens": queued_tokens,
    }


def load_of(engine: Engine) -> tuple[int, int]:
    """Return the number of open requests, and of the prompt tokens that have still to be computed for them.

    The tokens are an estimate: those that other requests compute for a waiting request are counted, too."""
    scheduler = engine.scheduler
    begun = sum(sequence.prefill_stop - sequence.computed for sequence in scheduler.prefilling)
    return len(engine.request_ids()), scheduler.queue.tokens + begun


def _load_us(engine: Engine) -> list[float]:
    """Return the time per token that loading a chunk takes, by `TierKind`; 0 if it is not known."""
    scheduler, size = engine.scheduler, engine.config.chunk_size
    move_us = scheduler.costs.move_us
    times = {TierKind.HOST: move_us}
    for tier, health in scheduler.kv.tree.tiers.health.items():
        times[tier] = health.read_us + move_us  # it comes by way of host memory
    return [times.get(tier, 0.0) / size for tier in TierKind]


def _tiers(engine: Engine) -> list[TierState]:
    config, kv, hits = engine.config, engine.scheduler.kv, engine.counters.tier_tokens
    tree = kv.tree
    device = TierState(
        name="device",
        slots=config.num_blocks,
        used=config.num_blocks - kv.pool.free_count,
        hit_tokens=hits[TierKind.DEVICE],
        writes=tree.loaded_blocks,
        reads=tree.saved_blocks,
        evictions=tree.evicted_blocks,
        failures=0,
    )
    below = [
        TierState(
            name=kind.name.lower(),
            slots=stats.slots,
            used=stats.used,
            hit_tokens=hits[kind],
            writes=stats.writes,
            reads=stats.reads,
            evictions=stats.evictions,
            failures=stats.failures,
            problem=stats.problem,
        )
        for kind, stats in tree.tiers.stats().items()
    ]
    return [device, *below]
