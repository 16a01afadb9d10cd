"""What `/metrics` says, of one router process and of several; and that docs/metrics.md says the same."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import generate_metrics
import pytest
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from trunkline.router.telemetry import metrics_page
from trunkline.router.telemetry.metric_families import FamilyRegistry, exposition, joined
from trunkline.router.telemetry.metrics import OTHER, UNNAMED, LiveGauges, Metrics, TenantLabels
from trunkline.router.telemetry.metrics_page import MetricsPage

DOCS = Path(__file__).resolve().parents[2] / "docs"
NAME = re.compile(r"\b(?:trunkline|process)_\w+")

Key = tuple[str, tuple[tuple[str, str], ...]]


def values_of(text: bytes) -> dict[Key, float]:
    """Samples by name and labels; fails if a sample or a family comes twice."""
    found: dict[Key, float] = {}
    names = []
    for family in text_string_to_metric_families(text.decode()):
        names.append(family.name)
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found
            found[key] = sample.value
    assert len(names) == len(set(names))
    return found


def run(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


# -- documentation


def test_the_page_is_what_the_code_says() -> None:
    assert (DOCS / "metrics.md").read_text() == generate_metrics.page(), "run python docs/generate_metrics.py"


def test_names_follow_the_rules() -> None:
    for family in generate_metrics.families():
        assert family.name.startswith(("trunkline_", "process_")), family.name
        assert not family.name.endswith(("_total", "_count", "_sum", "_bucket")) or family.kind == "gauge", (
            family.name
        )
        assert family.text.endswith("."), family.name
        assert not set(family.labels) & {"le", "router"} or family.name == "trunkline_router_up"


def test_what_is_told_is_documented() -> None:
    """Kinds and labels of what comes out are those that are told of."""
    known = {family.name: family for family in generate_metrics.families()}
    metrics = Metrics(list)
    metrics.requests.labels("/v1/models", "200").inc()
    metrics.phases.queued.observe(1.0)
    text = metrics.scrape().decode()
    for family in text_string_to_metric_families(text):
        assert known[family.name].kind == family.type
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(known[family.name].labels)
    told = re.findall(r"^# HELP (\w+) ", text, re.MULTILINE)
    assert sorted([*told, "trunkline_router_up"]) == sorted(family.series for family in known.values())


def test_queries_name_metrics_that_there_are() -> None:
    series = set()
    for family in generate_metrics.families():
        series.add(family.series)
        if family.kind == "histogram":
            series |= {f"{family.name}_bucket", f"{family.name}_sum", f"{family.name}_count"}
    text = (DOCS / "metrics.md").read_text().partition("## What to watch")[2]
    assert not set(NAME.findall(text)) - series


# -- one process


def test_expositions_are_joined_family_by_family() -> None:
    parts = []
    for number in ("0", "1"):
        registry = FamilyRegistry()
        registry.counter("trunkline_a", 'Says "a\\b".', ["x"]).labels('quo"te\n# HELP no').inc(int(number) + 1)
        registry.histogram("trunkline_b_seconds", "B.", (1.0, 2.0)).observe(1.5)
        registry.counter("trunkline_c", "Nothing yet.", ["x"])
        parts.append(exposition(registry, {"router": number}))
    values = values_of(joined(parts))
    assert values["trunkline_a_total", (("router", "1"), ("x", 'quo"te\n# HELP no'))] == 2.0
    assert values["trunkline_b_seconds_bucket", (("le", "2.0"), ("router", "0"))] == 1.0
    assert not [name for name, _ in values if name.endswith("_created")]
    assert len(values) == 2 * (1 + 5)


def test_tenants_are_a_bounded_number_of_series() -> None:
    labels = TenantLabels(series_max=2)
    assert [labels.of(name) for name in ("a", "b", "c", "a", "key-0123")] == ["a", "b", OTHER, "a", UNNAMED]


def test_live_numbers_are_asked_for_at_each_scrape() -> None:
    running = [3]
    metrics = Metrics(list, LiveGauges(running=lambda: running[0]), version="1.2", models=["demo", "other"])
    assert values_of(metrics.scrape())["trunkline_generations_running", ()] == 3.0
    running[0] = 4
    values = values_of(metrics.scrape())
    assert values["trunkline_generations_running", ()] == 4.0
    for model in ("demo", "other"):
        assert any(name == "trunkline_build_info" and ("model", model) in labels for name, labels in values)
    assert values["process_resident_memory_bytes", ()] > 1 << 20


# -- several


@contextlib.asynccontextmanager
async def pages(folder: Path, count: int) -> AsyncIterator[list[tuple[MetricsPage, Metrics]]]:
    """So many processes' pages, all open."""
    async with contextlib.AsyncExitStack() as stack:
        made = []
        for number in range(count):
            metrics = Metrics(list)
            metrics.requests.labels("/v1/models", "200").inc(10 * (number + 1))
            page = MetricsPage(metrics, str(folder / "metrics"), number, count)
            await stack.enter_async_context(page.open())
            made.append((page, metrics))
        yield made


def requests_of(values: dict[Key, float]) -> dict[str, float]:
    return {
        dict(labels)["router"]: value
        for (name, labels), value in values.items()
        if name == "trunkline_requests_total"
    }


def up_of(values: dict[Key, float]) -> dict[str, float]:
    return {
        dict(labels)["router"]: value for (name, labels), value in values.items() if name == "trunkline_router_up"
    }


def test_whoever_is_asked_tells_of_all(tmp_path: Path) -> None:
    async def work() -> None:
        async with pages(tmp_path, 3) as made:
            for page, _ in made:
                values = values_of(await page.scrape())
                assert requests_of(values) == {"0": 10.0, "1": 20.0, "2": 30.0}
                assert up_of(values) == {"0": 1.0, "1": 1.0, "2": 1.0}
                assert [labels for name, labels in values if name == "trunkline_build_info"] != []
                assert not [
                    labels
                    for name, labels in values
                    if name == "trunkline_build_info" and "router" in dict(labels)
                ]

    run(work())


def test_who_is_not_there_or_talks_nonsense_is_left_out(tmp_path: Path) -> None:
    async def work() -> None:
        async with pages(tmp_path, 2) as made:
            page = MetricsPage(made[0][1], str(tmp_path / "metrics"), 0, 4)

            async def nonsense(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                writer.write(b"\xc1 this is no MessagePack")
                writer.close()

            server = await asyncio.start_unix_server(nonsense, str(tmp_path / "metrics-3"))
            values = values_of(await page.scrape())
            server.close()
            assert requests_of(values) == {"0": 10.0, "1": 20.0}
            assert up_of(values) == {"0": 1.0, "1": 1.0, "2": 0.0, "3": 0.0}

    run(work())


def test_who_hangs_holds_nobody_up_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_page, "ANSWER_SECONDS_MAX", 0.1)

    async def work() -> None:
        with socket.socket(socket.AF_UNIX) as frozen:
            frozen.bind(str(tmp_path / "metrics-1"))
            frozen.listen(1)
            async with pages(tmp_path, 1) as made:
                page = MetricsPage(made[0][1], str(tmp_path / "metrics"), 0, 2)
                values = values_of(await page.scrape())
                assert up_of(values) == {"0": 1.0, "1": 0.0}

    run(work())


def test_a_process_that_is_replaced_answers_no_more(tmp_path: Path) -> None:
    """Both are there for a while; the old one's end must not take the new one's socket away."""

    async def work() -> None:
        old, new, other = (Metrics(list) for _ in range(3))
        path = str(tmp_path / "metrics")
        asker = MetricsPage(other, path, 1, 2)
        for metrics, count in ((old, 7), (new, 1), (other, 2)):
            metrics.requests.labels("/v1/models", "200").inc(count)
        async with asker.open(), contextlib.AsyncExitStack() as stack:
            async with MetricsPage(old, path, 0, 2).open():
                assert requests_of(values_of(await asker.scrape())) == {"0": 7.0, "1": 2.0}
                await stack.enter_async_context(MetricsPage(new, path, 0, 2).open())
                assert requests_of(values_of(await asker.scrape())) == {"0": 1.0, "1": 2.0}
            assert requests_of(values_of(await asker.scrape())) == {"0": 1.0, "1": 2.0}

    run(work())
