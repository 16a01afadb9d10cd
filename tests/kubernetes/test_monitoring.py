"""Alerts and dashboard: every query can be parsed, and asks for what there is in the way in which it adds up."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from typing import Any, Final

import jsonschema_rs
import promql_parser
import pytest
import yaml
from kubernetes.rendering import CHART, ROOT, Object, only, render
from kubernetes.schemas import RULE_GROUPS

from trunkline.router.telemetry.metrics import Metrics

ALERTS: Final = ROOT / "deploy" / "prometheus" / "alerts.yaml"
DASHBOARD: Final = ROOT / "deploy" / "grafana" / "trunkline.json"
ADAPTER: Final = ROOT / "deploy" / "prometheus" / "adapter-rules.yaml"

_OWN: Final = ("trunkline_controller_inflight", "trunkline_controller_connections_total")
"""Of a controller, but counted by each router for itself (docs/metrics.md)."""
_OF_ALL: Final = re.compile(r"trunkline_((controller|tier|prefix_miss)_|record_(limit_)?bytes$)")


def _rules() -> list[Object]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def _queries() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def _plain(query: str) -> str:
    """With Grafana's variables filled in."""
    return query.replace("$__rate_interval", "5m").replace("$namespace", "llm").replace("$job", "tl")


@functools.cache
def _known() -> frozenset[str]:
    """All series that a router has."""
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", Metrics(list).scrape().decode(), re.M))
    histograms = [name for name, kind in kinds.items() if kind == "histogram"]
    return frozenset(kinds) | {f"{name}{end}" for name in histograms for end in ("_bucket", "_sum", "_count")}


def _walk(node: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    yield node, above
    for name in ("expr", "lhs", "rhs", "vector_selector", "vs", "args", "param"):
        inner = getattr(node, name, None)
        for child in inner if isinstance(inner, list) else [inner]:
            if child is not None and not isinstance(child, str | int | float):
                yield from _walk(child, (*above, node))


def _selectors(query: str) -> list[tuple[Any, tuple[Any, ...]]]:
    found = [
        (node, above)
        for node, above in _walk(promql_parser.parse(query))
        if isinstance(node, promql_parser.VectorSelector)
    ]
    assert found, f"nothing was selected by {query}"
    return found


def test_there_are_queries() -> None:
    assert len(_rules()) >= 10
    assert len(_queries()) >= 25


@pytest.mark.parametrize("query", [*(rule["expr"] for rule in _rules()), *map(_plain, _queries())])
def test_a_query_asks_for_what_routers_have_in_the_way_in_which_it_adds_up(query: str) -> None:
    """Every router tells the same of a controller and of the record store, so a sum over routers would count it as
    often as there are routers: it is taken once, by `max`. Counters are read as rates, and gauges are not."""
    for selector, above in _selectors(query):
        assert selector.name in _known()
        aggregations = [str(node.op) for node in above if isinstance(node, promql_parser.AggregateExpr)]
        if _OF_ALL.match(selector.name) and selector.name not in _OWN:
            assert aggregations[-1:] == ["max"], selector.name
        elif aggregations:
            assert aggregations[-1] in ("sum", "count"), selector.name
        calls = {node.func.name for node in above if isinstance(node, promql_parser.Call)}
        is_counter = selector.name.endswith(("_total", "_bucket", "_sum", "_count"))
        # A gauge that is called so: all blocks of a pool.
        is_counter = is_counter and selector.name != "trunkline_controller_blocks_total"
        assert bool(calls & {"rate", "increase"}) is is_counter, selector.name


def test_alerts_are_rules_and_say_what_to_do() -> None:
    shape = jsonschema_rs.Draft202012Validator(RULE_GROUPS)
    assert [error.message for error in shape.iter_errors(yaml.safe_load(ALERTS.read_text()))] == []
    names = [rule["alert"] for rule in _rules()]
    assert len(names) == len(set(names))
    for rule in _rules():
        assert rule["labels"]["severity"] in ("critical", "warning"), rule["alert"]
        assert {"summary", "description"} <= rule["annotations"].keys(), rule["alert"]
        given = re.findall(r"\$labels\.(\w+)", rule["annotations"]["description"])
        kept = re.search(r"by \(([^)]*)\)", rule["expr"])
        assert set(given) <= set(re.split(r"[ ,]+", kept[1]) if kept else ()), rule["alert"]


def test_the_dashboard_is_one() -> None:
    board = json.loads(DASHBOARD.read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(places) == len(set(places))
    variables = {variable["name"] for variable in board["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z_]+)", DASHBOARD.read_text())) - {"__rate_interval", "__all"}
    assert used <= variables
    for panel in panels:
        assert panel["type"] == "row" or panel["fieldConfig"]["defaults"]["unit"], panel["title"]


def test_the_chart_has_the_same_files() -> None:
    assert (CHART / "files" / "alerts.yaml").read_text() == ALERTS.read_text()
    assert (CHART / "files" / "dashboard.json").read_text() == DASHBOARD.read_text()


def test_the_chart_installs_them_whole() -> None:
    objects = render({"monitoring": {"rules": {"enabled": True}, "dashboard": {"enabled": True}}})
    assert only(objects, "PrometheusRule")["spec"] == yaml.safe_load(ALERTS.read_text())
    board = only(objects, "ConfigMap", "-dashboard")
    assert json.loads(board["data"]["trunkline.json"]) == json.loads(DASHBOARD.read_text())
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_the_autoscaler_asks_for_what_the_adapter_gives() -> None:
    objects = render({"routers": {"autoscaling": {"enabled": True, "requests": {"enabled": True}}}})
    metric = only(objects, "HorizontalPodAutoscaler")["spec"]["metrics"][1]["pods"]["metric"]["name"]
    (rule,) = yaml.safe_load(ADAPTER.read_text())["rules"]
    assert rule["seriesQuery"].startswith(metric + "{")
    assert metric in _known()
    objects = render({"groups": {"autoscaling": {"enabled": True}}})
    metric = only(objects, "HorizontalPodAutoscaler")["spec"]["metrics"][0]["external"]["metric"]["name"]
    (rule,) = yaml.safe_load(ADAPTER.read_text())["externalRules"]
    assert rule["name"]["as"] == metric
    assert rule["seriesQuery"].partition("{")[0] in _known()
