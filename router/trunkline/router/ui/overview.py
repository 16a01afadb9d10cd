"""Describe the cluster as a whole for the dashboard: groups, loads and tiers, from the router's own data."""

from __future__ import annotations

import os
import time
from typing import Any

import msgspec

from trunkline.router.messages import State
from trunkline.router.service import RouterService
from trunkline.router.streams.link import ControllerLink


def overview(service: RouterService) -> dict[str, Any]:
    """Return the dashboard's overview of the cluster; times are seconds since the epoch."""
    config = service.config
    return {
        "version": service.version,
        "model": config.model_name,
        "now": time.time(),
        "router": {
            "name": f"router-{os.getpid()}",
            "pid": os.getpid(),
            "started": service.created,
            "routers": config.routers,
            "policy": config.policy,
            "draining": service.draining,
            "requests": service.live_count,
            "waiting": service.dispatcher.waiting_count,
        },
        "auth": {"required": service.tenants.needs_keys},
        "max_context": service.limits.max_context,
        "groups": [group(service, link) for link in service.links],
    }


def group(service: RouterService, link: ControllerLink) -> dict[str, Any]:
    """Return a group as its controller describes it; only the router's own data while it is not connected."""
    state = link.state
    known: dict[str, Any] = {
        "group": link.index,
        "endpoint": link.endpoint,
        "ready": link.ready,
        "status": "disconnected" if state is None else state.status,
        "detail": link.down_reason if state is None else state.detail,
        "events": service.events_status(link.index),
        "inflight": link.inflight,
    }
    return known if state is None else known | _measures(state)


def _measures(state: State) -> dict[str, Any]:
    return {
        "running": state.running,
        "waiting": state.waiting,
        "requests": state.requests,
        "queued_tokens": state.queued_tokens,
        "max_context": state.max_context,
        "max_rows": state.max_rows,
        "chunk_size": state.chunk_size,
        "blocks": {"total": state.blocks_total, "free": state.blocks_free, "cached": state.blocks_cached},
        "tiers": [msgspec.structs.asdict(tier) for tier in state.tiers],
        "prompt_tokens": state.prompt_tokens,
        "cached_tokens": state.cached_tokens,
        "output_tokens": state.output_tokens,
        "preemptions": state.preemptions,
        "chunks_pinned": state.chunks_pinned,
        "texts_encoding": state.texts_encoding,
        "misses": state.misses,
        "epoch": state.epoch,
        "prefill_us": state.prefill_us,
        "load_us": state.load_us,
    }
