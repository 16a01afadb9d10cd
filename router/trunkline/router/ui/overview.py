"""The dashboard's view of the present: groups with loads and tiers, running requests, routing decisions.

All of it is the router's own data: the last reports of the controllers, its generations and its decision log.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import asdict
from typing import Any, Final

import msgspec

from trunkline.kvstore.tier import TierKind
from trunkline.router.messages import State
from trunkline.router.routing.decision_log import Logged
from trunkline.router.service import RouterService
from trunkline.router.streams.generation import Generation
from trunkline.router.streams.link import ControllerLink
from trunkline.router.streams.live import LiveRequest
from trunkline.router.telemetry.controller_metrics import saved_seconds

REQUESTS_MAX: Final = 2000
"""Largest number of requests that are listed, the oldest first. A router may work on more."""
GROUPS_MAX: Final = 16
"""Largest number of groups that are listed for a decision: those with the lowest costs, as there may be
hundreds."""


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
            "draining": service.live.draining,
            "requests": len(service.live),
            "waiting": service.dispatcher.waiting_count,
            "handovers": {
                occasion: asdict(totals) for occasion, totals in service.metrics.routing.handovers.totals.items()
            },
        },
        "auth": {"required": service.tenants.needs_keys, "problem": service.tenants.file_problem},
        "max_context": service.limits.max_context,
        "groups": [group(service, link) for link in service.links],
    }


def group(service: RouterService, link: ControllerLink) -> dict[str, Any]:
    """Return a group as its controller describes it; only the router's own data while it is not connected."""
    state = link.state
    known: dict[str, Any] = {
        "group": link.index,
        "name": link.name,
        "endpoint": link.endpoint,
        "ready": link.ready,
        "status": "disconnected" if state is None else state.status,
        "detail": link.down_reason if state is None else link.problem or state.detail,
        "model": link.standing.model,
        "events": service.groups.events_status(link.index),
        "inflight": link.inflight,
    }
    return known if state is None else known | _measures(state)


def _measures(state: State) -> dict[str, Any]:
    return {
        "role": state.role,
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
        "pulls": _pulls(state),
    }


def _pulls(state: State) -> dict[str, Any] | None:
    """Return what a group has taken from other groups since its start; None if it takes and gives nothing."""
    peer = next((tier for tier in state.tiers if tier.name == TierKind.PEER.name.lower()), None)
    if peer is None:
        return None
    return {
        "exports": bool(state.exports),
        "tokens": peer.hit_tokens,
        "chunks": peer.reads,
        "bytes": peer.reads * state.block_bytes,
        "saved_s": saved_seconds(state),
        "given_up": state.pulls_given_up,
    }


def wall_clock() -> float:
    """Return the seconds to add to a time of the event loop to get seconds since the epoch."""
    return time.time() - asyncio.get_running_loop().time()


def requests(service: RouterService) -> list[dict[str, Any]]:
    """Return the generations that run or wait, in the order of their arrival."""
    now = asyncio.get_running_loop().time()
    live = list(service.live.items())[:REQUESTS_MAX]
    return [_request(service, generation, about, now) for generation, about in live]


def _request(service: RouterService, generation: Generation, about: LiveRequest, now: float) -> dict[str, Any]:
    job, started = generation.job, about.stream.started
    link = service.dispatcher.link_of(about.stream)
    first = generation.first_token_at
    state = "running" if started is not None else "waiting"
    if link is None and started is not None:
        state = "resuming"
    return {
        "id": about.origin.request,
        "tenant": about.origin.tenant,
        "session": about.origin.session,
        "group": None if link is None else link.index,
        "state": state,
        "prompt_tokens": job.seen_tokens,
        "cached_tokens": about.stream.cached_tokens,
        "cached_by_tier": [] if started is None else list(started.tier_tokens),
        "module_tokens": job.module_tokens,
        "dropped_tokens": job.cut.dropped_tokens,
        "output_tokens": sum(map(len, about.stream.outputs)),
        "max_tokens": job.max_tokens,
        "samples": about.stream.samples,
        "priority": job.priority,
        "age_s": round(now - about.arrived_at, 3),
        "ttft_s": None if first is None else round(first - about.arrived_at, 4),
    }


def decisions(service: RouterService, after: int, limit: int) -> dict[str, Any]:
    """Return the decisions with numbers above `after`, newest last. `next` is the `after` for the next call."""
    log, offset = service.dispatcher.core.log, wall_clock()
    found = log.after(after, limit)
    return {"next": log.count, "decisions": [_decision(each, offset) for each in found]}


def _decision(logged: Logged, offset: float) -> dict[str, Any]:
    return {
        "n": logged.number,
        "t": logged.at + offset,
        "request": logged.origin.request,
        "tenant": logged.origin.tenant,
        "session": logged.origin.session,
        "group": logged.controller,
        "name": logged.name,
        "reason": logged.reason,
        "prompt_tokens": logged.prompt_tokens,
        "match": _match(logged),
        "retried": logged.is_again,
    }


def _match(logged: Logged) -> list[dict[str, Any]]:
    weighed = logged.weighed
    if weighed is None:
        return []
    candidates = set(weighed.candidates.tolist())
    costs = weighed.costs.tolist()
    known = [index for index, name in enumerate(weighed.names) if name]
    shown = sorted(known, key=lambda index: (index != logged.controller, costs[index]))[:GROUPS_MAX]
    found = []
    for index in sorted(shown):
        device, host, disk, expected = weighed.tiers[index].tolist()
        found.append(
            {
                "group": index,
                "name": weighed.names[index],
                "device": device,
                "host": host,
                "disk": disk,
                "expected": expected,
                "cost": round(costs[index], 1),
                "available": index in candidates,
            }
        )
    return found
