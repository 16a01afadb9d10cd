"""Writes docs/metrics.md from what a router registers: `python docs/generate_metrics.py` (`--check`: only look).

Names, kinds, labels and meanings are the code's. Here are the sections, and what to watch and to ask.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from trunkline.router.telemetry.metric_families import Family
from trunkline.router.telemetry.metrics import LATENCY_BUCKETS, TENANT_SERIES_MAX, TOKEN_TIME_BUCKETS, Metrics
from trunkline.router.telemetry.metrics_page import UP

PAGE: Final = Path(__file__).with_name("metrics.md")

_HEAD: Final = """# Metrics

<!-- Written by docs/generate_metrics.py from what a router registers. Change the code, then run it. -->

`GET /metrics` of a router, in Prometheus' text form; with API keys it needs one of role `metrics` or `admin`
([security](security.md)). Names, labels and units are stable: what changes is said in the changelog.

- **Several routers on one port** (`--routers N`): whichever answers tells of all. Series of a router process then
  have the label `router`, its number; what all of them tell alike (`trunkline_controller_…`, `trunkline_tier_…`,
  but for those that are marked below) is there once. Sum with `sum(rate(…))`, as always: a process that was
  replaced begins at 0. One that does not answer within two seconds is left out, and its `trunkline_router_up`
  is 0.
- **Several router pods**: each tells of its own requests, and of all controllers. So add up the former
  (`sum(rate(trunkline_requests_total[5m]))`), and take the latter once: `max by (controller) (…)`.
- The label `controller` is the group's name: its number, or its id as a member. Its series are as of its last
  report (one each second), and are missing while it is not connected.
- Times are in seconds, sizes in bytes, and names of counters end in `_total`.

"""


class Section(NamedTuple):
    """A table of metrics."""

    title: str
    prefixes: tuple[str, ...]
    """The first section with one of a metric's gets it."""


_SECTIONS: Final = (
    Section("Tiers and cache", ("trunkline_tier_", "trunkline_prefix_miss", "trunkline_pulls_")),
    Section("Groups", ("trunkline_controller_",)),
    Section("Routing", ("trunkline_routing_", "trunkline_dispatches")),
    Section("Record store", ("trunkline_record",)),
    Section("Groups that leave and groups that are new", ("trunkline_handover_",)),
    Section("Prompts made of modules", ("trunkline_module_", "trunkline_pml_", "trunkline_schemas_")),
    Section(
        "Keys, tenants, limits, retries",
        ("trunkline_tenant_", "trunkline_rate_", "trunkline_idem", "trunkline_access_"),
    ),
    Section("Processes", ("trunkline_build_", "trunkline_router_", "trunkline_spans_", "process_")),
    Section("Requests", ("trunkline_",)),
)
_ORDER: Final = ("Requests", "Tiers and cache", "Groups", "Routing", "Keys, tenants, limits, retries")
_PER_ROUTER: Final = ("trunkline_controller_inflight", "trunkline_controller_connections")

_ALERTS: Final = (
    (
        "no group takes requests",
        "max by (controller) (trunkline_controller_ready) == 0",
        "one minute: longer than a restart of its workers takes with your weights",
    ),
    ("a router does not answer", "trunkline_router_up == 0 or up == 0", "two scrapes"),
    (
        "requests fail",
        'sum(rate(trunkline_requests_total{status=~"5.."}[5m])) / sum(rate(trunkline_requests_total[5m])) > 0.01',
        "status 499 is a client that left, 429 a limit or a full queue",
    ),
    (
        "queues are full",
        'sum(rate(trunkline_generations_finished_total{reason="queue_full"}[5m])) > 0',
        "clients get 429: more groups are needed, or fewer clients",
    ),
    (
        "requests wait",
        "histogram_quantile(0.95, sum by (le) (rate(trunkline_request_queue_seconds_bucket[5m]))) > 5",
        "what you promise; `max by (controller) (trunkline_controller_requests_waiting)` says where",
    ),
    (
        "streams lose their group",
        'sum(rate(trunkline_dispatches_total{event=~"resumed|gave_up"}[10m])) > 0',
        "`resumed`: clients saw a pause; `gave_up`: an error",
    ),
    (
        "something dies again and again",
        "increase(trunkline_controller_connections_total[15m]) > 3",
        "controllers or workers; the supervisor's log says which",
    ),
    ("a tier is not used", "max by (controller, tier) (trunkline_tier_up) == 0", "the controller's log says why"),
    (
        "a tier's data are bad",
        "max by (controller, tier) (rate(trunkline_tier_failures_total[15m])) > 0",
        "moves that fail, reads that do not verify: the disk, the network",
    ),
    (
        "requests push each other out",
        "max by (controller) (rate(trunkline_controller_preemptions_total[10m])) > 0.1",
        "KV memory is too small for what runs at once",
    ),
    (
        "the record store is away",
        'sum(rate(trunkline_record_failures_total{reason="away"}[5m])) > 0',
        "requests with stored sessions and schemas get 503; `/health` of a router says why",
    ),
    (
        "spans are lost",
        "sum(rate(trunkline_spans_dropped_total[10m])) > 0",
        "the collector is slow or away; requests are not affected",
    ),
)
_QUERIES: Final = (
    (
        "time to first token, 95 %",
        "histogram_quantile(0.95, sum by (le) (rate(trunkline_time_to_first_token_seconds_bucket[5m])))",
    ),
    (
        "time between tokens, 95 %",
        "histogram_quantile(0.95, sum by (le) (rate(trunkline_inter_token_latency_seconds_bucket[5m])))",
    ),
    ("output tokens per second", "sum(rate(trunkline_output_tokens_total[1m]))"),
    (
        "part of prompts that was in the cache",
        "sum(rate(trunkline_cached_prompt_tokens_total[5m])) / sum(rate(trunkline_prompt_tokens_total[5m]))",
    ),
    (
        "where it was found",
        "sum by (tier) (max by (controller, tier) (rate(trunkline_tier_hit_tokens_total[5m])))",
    ),
    (
        "why the rest was not",
        "sum by (reason) (max by (controller, reason) (rate(trunkline_prefix_miss_total[5m])))",
    ),
    (
        "bytes per second from other groups",
        'sum(max by (controller) (rate(trunkline_tier_read_bytes_total{tier="peer"}[5m])))',
    ),
    (
        "chunks that could not be pulled",
        "sum by (reason) (max by (controller, reason) (rate(trunkline_pulls_given_up_total[5m])))",
    ),
    ("KV memory in use", "max by (controller) (trunkline_controller_kv_used_ratio)"),
    (
        "blocks saved by sharing",
        "max by (controller) (trunkline_controller_blocks_logical - (trunkline_controller_blocks_total "
        "- trunkline_controller_blocks_free - trunkline_controller_blocks_cached))",
    ),
    (
        "requests that wait, for scaling",
        "sum(max by (controller) (trunkline_controller_requests_waiting)) + sum(trunkline_generations_waiting)",
    ),
    (
        "bytes per second to disk",
        'sum(max by (controller) (rate(trunkline_tier_written_bytes_total{tier="disk"}[5m])))',
    ),
    (
        "time of an operation of the record store, 99 %",
        "histogram_quantile(0.99, sum by (le, operation) (rate(trunkline_record_operation_seconds_bucket[5m])))",
    ),
    ("tokens by tenant", "sum by (tenant, kind) (rate(trunkline_tenant_tokens_total[5m]))"),
)


def families() -> list[Family]:
    """All that a router registers."""
    metrics = Metrics(list)
    return [*metrics.shared.families(), *metrics.registry.families(), UP]


def section_of(family: Family) -> str:
    """The title of the table in which a metric stands."""
    return next(section.title for section in _SECTIONS if family.name.startswith(section.prefixes))


def unit_of(family: Family) -> str:
    """What its values are."""
    name = family.name
    for ending, unit in (("seconds", "s"), ("bytes", "bytes"), ("tokens", "tokens"), ("ratio", "0 to 1")):
        if name.endswith(f"_{ending}"):
            return unit
    for part, unit in (("blocks", "blocks"), ("slots", "chunks"), ("chunks", "chunks")):
        if part in name:
            return unit
    return {"trunkline_tier_writes": "chunks", "trunkline_tier_reads": "chunks"}.get(name, "")


def table(of: list[Family]) -> Iterator[str]:
    """Lines of Markdown."""
    yield "| metric | kind | unit | meaning |"
    yield "|---|---|---|---|"
    for family in of:
        labels = "{" + ",".join(family.labels) + "}" if family.labels else ""
        note = " Of each router." if family.name in _PER_ROUTER else ""
        text = family.text.replace("|", "\\|")
        yield f"| `{family.series}{labels}` | {family.kind} | {unit_of(family)} | {text}{note} |"


def page() -> str:
    """The whole page."""
    known = families()
    titles = [*_ORDER, *(section.title for section in _SECTIONS if section.title not in _ORDER)]
    lines = []
    for title in titles:
        lines += [f"## {title}", "", *table([family for family in known if section_of(family) == title]), ""]
        if title == "Requests":
            lines += [
                _buckets("Times of requests", LATENCY_BUCKETS),
                "",
                _buckets("Times of tokens", TOKEN_TIME_BUCKETS),
                "",
            ]
        if title.startswith("Keys"):
            lines += [
                f"Tenants that the key file or a gateway names are counted by name, {TENANT_SERIES_MAX} of them; "
                "tenants that are known by nothing but a key are `unnamed`.",
                "",
            ]
    lines += ["## What to watch", "", "| | expression | |", "|---|---|---|"]
    lines += [f"| {what} | `{_cell(query)}` | {note} |" for what, query, note in _ALERTS]
    lines += ["", "The rules in `deploy/prometheus/` are made of these ([Kubernetes](kubernetes.md)).", ""]
    lines += ["## What to ask", "", "| | expression |", "|---|---|"]
    lines += [f"| {what} | `{_cell(query)}` |" for what, query in _QUERIES]
    return _HEAD + "\n".join(lines) + "\n"


def _buckets(what: str, ends: tuple[float, ...]) -> str:
    return f"{what} have buckets up to {', '.join(f'{end:g}' for end in ends)} s."


def _cell(query: str) -> str:
    return query.replace("|", "\\|")


def main() -> int:
    """Write the page, or say whether it is up to date."""
    text = page()
    if "--check" in sys.argv[1:]:
        if PAGE.read_text() == text:
            return 0
        print("docs/metrics.md is not what the code says; run python docs/generate_metrics.py", file=sys.stderr)
        return 1
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
