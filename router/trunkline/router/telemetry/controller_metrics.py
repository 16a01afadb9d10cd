"""Metrics of controllers and of the connections to them, made of each controller's last `State` at every scrape.

The label `controller` is the group's name, which stays the same when the group is started again. The series of a
group that has left the cluster end.

All routers have the same values of `ControllerCollector`: when several router processes answer one scrape
together, only one of them reports these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from trunkline.kvstore.tier import TierKind
from trunkline.router.messages import State, TierState
from trunkline.router.telemetry.metric_families import Family, FamilyCollector

if TYPE_CHECKING:
    from trunkline.router.streams.link import ControllerLink


_GAUGES: Final = (
    ("running", "requests_running", "Requests in the controller's batch."),
    ("waiting", "requests_waiting", "Requests waiting for admission."),
    ("queued_tokens", "queued_tokens", "Prompt tokens of all requests that have still to be computed."),
    ("blocks_total", "blocks_total", "Device blocks of the KV pool."),
    ("blocks_free", "blocks_free", "Device blocks that hold nothing."),
    (
        "blocks_cached",
        "blocks_cached",
        "Device blocks with reusable KV that no running request holds; an idle group has free + cached = total.",
    ),
    ("blocks_logical", "blocks_logical", "Device blocks that running sequences would hold if they shared none."),
    ("host_slots", "host_slots", "Blocks that the host pool holds."),
    ("host_slots_free", "host_slots_free", "Of these, slots that hold nothing."),
    ("texts_encoding", "texts_encoding", "Texts of modules that are being computed, or wait for it."),
    ("chunks_pinned", "chunks_pinned", "Chunks of schemas that are pinned."),
    ("max_rows", "max_rows", "Sequences that can decode at once."),
    ("max_context", "max_context_tokens", "Longest prompt + output this group can hold, in tokens."),
)
_COUNTERS: Final = (
    ("prompt_tokens", "prompt_tokens", "Prompt tokens admitted, health probes included."),
    ("cached_tokens", "cached_tokens", "Prompt tokens whose KV was found."),
    ("output_tokens", "output_tokens", "Tokens sampled."),
    ("drafted_tokens", "drafted_tokens", "Drafts of next tokens that steps tried (`--speculation`)."),
    ("accepted_drafts", "accepted_drafts", "Of these, drafts that were right: each saved a step of its sequence."),
    ("preemptions", "preemptions", "Requests that lost their blocks for a while."),
    ("steps", "steps", "Forward passes."),
    (
        "plan_copies",
        "plan_copies",
        "Forward passes before which rows or block tables of the decode plan changed; others use it as it is.",
    ),
    (
        "replayed_steps",
        "replayed_steps",
        "Forward passes that were graphs on GPUs; others ran op by op, or on CPUs.",
    ),
    ("kv_bytes_read", "kv_read_bytes", "KV read by decode attention on rank 0, shared chunks once."),
    ("forks", "forks", "Samples and beams that came out of another's prompt."),
    ("swapped", "swapped", "Preemptions that chose the host pool."),
    ("blocks_saved", "blocks_saved", "Device blocks copied to the host pool."),
    ("texts_encoded", "texts_encoded", "Texts of modules that were computed."),
    ("text_tokens_encoded", "text_tokens_encoded", "Their tokens."),
    ("blocks_loaded", "blocks_loaded", "Device blocks copied back from the host pool."),
    ("evicted_blocks", "evicted_blocks", "Cached blocks given up for others, or flushed."),
)
_TIER_GAUGES: Final[tuple[tuple[str, str, Callable[[State, TierState], float]], ...]] = (
    ("up", "1 if the tier is used at present.", lambda state, tier: not tier.problem),
    ("slots", "Chunks that the tier can hold; 0: not known.", lambda state, tier: tier.slots),
    ("slots_used", "Chunks that it holds.", lambda state, tier: tier.used),
    (
        "size_bytes",
        "Bytes that the tier can hold, of all ranks together; 0: not known.",
        lambda state, tier: tier.slots * state.block_bytes,
    ),
    ("used_bytes", "Bytes that it holds.", lambda state, tier: tier.used * state.block_bytes),
)
_TIER_COUNTERS: Final[tuple[tuple[str, str, Callable[[State, TierState], float]], ...]] = (
    ("hit_tokens", "Prompt tokens found there when the request came.", lambda state, tier: tier.hit_tokens),
    ("writes", "Chunks moved into it.", lambda state, tier: tier.writes),
    ("reads", "Chunks moved out of it towards the device.", lambda state, tier: tier.reads),
    ("written_bytes", "Bytes moved into it.", lambda state, tier: tier.writes * state.block_bytes),
    (
        "read_bytes",
        "Bytes moved out of it towards the device.",
        lambda state, tier: tier.reads * state.block_bytes,
    ),
    ("evictions", "Chunks that made room or whose time was over.", lambda state, tier: tier.evictions),
    ("failures", "Moves that failed, and reads that did not verify.", lambda state, tier: tier.failures),
)
_PEER: Final = TierKind.PEER.name.lower()
_READY: Final = Family(
    "trunkline_controller_ready", "gauge", "1 if the controller takes requests.", ("controller",)
)
_KV_USED: Final = Family(
    "trunkline_controller_kv_used_ratio",
    "gauge",
    "Part of the device's blocks that running requests hold, from 0 to 1.",
    ("controller",),
)
_MISSES: Final = Family(
    "trunkline_prefix_miss",
    "counter",
    "Requests part of whose prompt was in no tier, by the reason.",
    ("controller", "reason"),
)
_GIVEN_UP: Final = Family(
    "trunkline_pulls_given_up",
    "counter",
    "Chunks that a peer was said to have and that requests had to do without: slow (they did not wait any "
    "longer), lost (the peer did not have them), gone (the peer did not answer).",
    ("controller", "reason"),
)
_SAVED: Final = Family(
    "trunkline_pulls_saved_seconds",
    "gauge",
    "Estimate of the time that pulling has saved since the start: prompt tokens found at peers, times the "
    "difference between computing and pulling one, as measured now.",
    ("controller",),
)
_INFLIGHT: Final = Family(
    "trunkline_controller_inflight", "gauge", "Requests of this router at the controller.", ("controller",)
)
_CONNECTIONS: Final = Family(
    "trunkline_controller_connections",
    "counter",
    "Connections to the controller that this router has made, and worker groups that it has met behind them; more "
    "than one: something died or was restarted.",
    ("controller",),
)


def _family(part: str, kind: str, text: str) -> Family:
    return Family(f"trunkline_controller_{part}", kind, text, ("controller",))


def _tier_family(part: str, kind: str, text: str) -> Family:
    return Family(f"trunkline_tier_{part}", kind, text, ("controller", "tier"))


def metric_of(family: Family) -> GaugeMetricFamily | CounterMetricFamily:
    """Return a metric of a family, without samples."""
    kind = GaugeMetricFamily if family.kind == "gauge" else CounterMetricFamily
    return kind(family.name, family.text, labels=family.labels)


class ControllerCollector(FamilyCollector):
    """The contents of each controller's last `State`."""

    def __init__(self, links: Callable[[], Collection[ControllerLink]]) -> None:
        self._links = links

    def families(self) -> Iterable[Family]:
        """Return all families that `collect` may give."""
        yield _READY
        yield _KV_USED
        yield from (_family(name, "gauge", text) for _, name, text in _GAUGES)
        yield from (_family(name, "counter", text) for _, name, text in _COUNTERS)
        yield from (_tier_family(name, "gauge", text) for name, text, _ in _TIER_GAUGES)
        yield from (_tier_family(name, "counter", text) for name, text, _ in _TIER_COUNTERS)
        yield from (_MISSES, _GIVEN_UP, _SAVED)

    def collect(self) -> Iterable[Metric]:
        """Yield the present values of these metrics for Prometheus."""
        ready = metric_of(_READY)
        links = self._links()
        for link in links:
            ready.add_metric([link.name], float(link.ready))
        yield ready
        states = [(link.name, link.state) for link in links if link.state is not None]
        used = metric_of(_KV_USED)
        for controller, state in states:
            held = state.blocks_total - state.blocks_free - state.blocks_cached
            used.add_metric([controller], held / max(1, state.blocks_total))
        yield used
        for field, name, text in _GAUGES:
            yield _filled(_family(name, "gauge", text), field, states)
        for field, name, text in _COUNTERS:
            yield _filled(_family(name, "counter", text), field, states)
        for name, text, value in _TIER_GAUGES:
            yield _of_tiers(_tier_family(name, "gauge", text), value, states)
        for name, text, value in _TIER_COUNTERS:
            yield _of_tiers(_tier_family(name, "counter", text), value, states)
        misses, given_up, saved = metric_of(_MISSES), metric_of(_GIVEN_UP), metric_of(_SAVED)
        for controller, state in states:
            for reason, count in sorted(state.misses.items()):
                misses.add_metric([controller, reason], float(count))
            for reason, count in sorted(state.pulls_given_up.items()):
                given_up.add_metric([controller, reason], float(count))
            saved.add_metric([controller], saved_seconds(state))
        yield from (misses, given_up, saved)


def saved_seconds(state: State) -> float:
    """Return how long computing what was pulled would have taken longer than pulling it, in seconds."""
    tokens = sum(tier.hit_tokens for tier in state.tiers if tier.name == _PEER)
    pull_us = state.load_us[TierKind.PEER] if len(state.load_us) > TierKind.PEER else 0.0
    return tokens * max(0.0, state.prefill_us - pull_us) / 1e6 if pull_us and state.prefill_us else 0.0


def _filled(family: Family, field: str, states: Iterable[tuple[str, State]]) -> Metric:
    metric = metric_of(family)
    for controller, state in states:
        metric.add_metric([controller], float(getattr(state, field)))
    return metric


def _of_tiers(
    family: Family, value: Callable[[State, TierState], float], states: Iterable[tuple[str, State]]
) -> Metric:
    metric = metric_of(family)
    for controller, state in states:
        for tier in state.tiers:
            metric.add_metric([controller, tier.name], float(value(state, tier)))
    return metric


class LinkCollector(FamilyCollector):
    """This router's connections to the controllers."""

    def __init__(self, links: Callable[[], Collection[ControllerLink]]) -> None:
        self._links = links

    def families(self) -> Iterable[Family]:
        """Return all families that `collect` may give."""
        return (_INFLIGHT, _CONNECTIONS)

    def collect(self) -> Iterable[Metric]:
        """Yield the present values of these metrics for Prometheus."""
        inflight, connections = metric_of(_INFLIGHT), metric_of(_CONNECTIONS)
        for link in self._links():
            inflight.add_metric([link.name], float(link.inflight))
            connections.add_metric([link.name], float(link.connections))
        yield inflight
        yield connections
