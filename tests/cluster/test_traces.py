"""Traces, metrics and log lines of a real cluster: one request, told by every process that worked for it."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator

import httpx
import pytest
from cluster.chaos import frozen
from cluster.harness import Cluster, wait_for
from otlp_collector import Collector, Seen
from trace_stages import STAGES, is_whole, stages

pytestmark = pytest.mark.processes

SECRET = "the color of the harbor is vermilion"
SECONDS_MAX = 30.0
TOKENS = 900
"""Of an answer that must not end before its worker is frozen."""


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


@pytest.fixture(scope="module")
def cluster(collector: Collector) -> Iterator[Cluster]:
    options = ("--groups", "2", "--tp", "1", "--routers", "2", "--disk-tier", "0", "--log-level", "debug")
    with Cluster(*options, "--otlp-endpoint", collector.endpoint, "--trace-sample", "0") as made:
        yield made


def ask(cluster: Cluster, trace: str, max_tokens: int, **more: object) -> httpx.Response:
    """A request whose caller has it traced."""
    caller = f"00-{trace}-{'cd' * 8}-01"
    body = {"model": "trunkline-demo", "messages": [{"role": "user", "content": SECRET}], "max_tokens": max_tokens}
    return httpx.post(
        f"{cluster.url}/v1/chat/completions",
        json=body | {"temperature": 0} | more,
        headers={"traceparent": caller, "x-request-id": f"id-{trace}"},
        timeout=60.0,
    )


def one(spans: list[Seen], name: str) -> Seen:
    [found] = [seen for seen in spans if seen.name == name]
    return found


def test_one_trace_through_all_processes(cluster: Cluster, collector: Collector) -> None:
    trace = secrets.token_hex(16)
    answer = ask(cluster, trace, 12, min_tokens=12)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-request-id"] == f"id-{trace}"
    wait_for(lambda: {"decode", "decode_steps"} <= {seen.name for seen in collector.of(trace)}, SECONDS_MAX)
    wait_for(lambda: "POST /v1/chat/completions" in {seen.name for seen in collector.of(trace)}, SECONDS_MAX)
    spans = collector.of(trace)
    root = one(spans, "POST /v1/chat/completions")
    assert root.parent == bytes.fromhex("cd" * 8)
    dispatch, generate = one(spans, "dispatch"), one(spans, "generate")
    parents = {seen.name: seen.parent for seen in spans}
    assert parents["tokenize"] == parents["route"] == dispatch.parent == root.id
    assert generate.parent == dispatch.id
    assert parents["queue"] == parents["prefill"] == parents["decode"] == generate.id
    assert parents["forward"] == one(spans, "prefill").id
    assert parents["decode_steps"] == one(spans, "decode").id
    services = {seen.name: seen.service for seen in spans}
    assert services["dispatch"] == "trunkline-router"
    assert services["generate"] == "trunkline-controller"
    assert services["forward"] == "trunkline-worker"
    usage = answer.json()["usage"]
    about = root.attributes
    assert about["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert about["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 12
    assert about["http.response.status_code"] == 200
    prefill = one(spans, "prefill").attributes
    assert prefill["trunkline.cached_tokens"] + prefill["trunkline.computed_tokens"] == usage["prompt_tokens"]
    assert one(spans, "forward").attributes["trunkline.tokens"] == prefill["trunkline.computed_tokens"]
    assert is_whole(spans)
    assert not is_whole([seen for seen in spans if seen.name != "forward"])
    begin, end = root.span.start_time_unix_nano, root.span.end_time_unix_nano
    parts = stages(spans, begin, end)
    assert tuple(parts) == STAGES
    assert sum(parts.values()) == pytest.approx((end - begin) / 1e6)
    assert parts["client to router"] == 0
    assert parts["router"] > 0 < parts["worker's step"], "each by the clock of one process"
    assert one(spans, "decode").attributes["trunkline.output_tokens"] == 12
    assert 11 <= one(spans, "decode_steps").attributes["trunkline.steps"] <= 13
    assert not any(seen.is_error for seen in spans)
    for seen in spans:
        assert seen.span.start_time_unix_nano <= seen.span.end_time_unix_nano
        inside = root.span.start_time_unix_nano - 10**9 < seen.span.start_time_unix_nano
        assert inside, f"{seen.name} begins long before the request"
    told = b"".join(seen.span.SerializeToString() for seen in spans)
    assert b"vermilion" not in told, "a span tells what was asked"


def test_who_is_not_traced_leaves_no_span(cluster: Cluster, collector: Collector) -> None:
    """The caller says so, or nobody does and the ratio is 0."""
    body = {"model": "trunkline-demo", "prompt": "import os", "max_tokens": 2}
    trace = secrets.token_hex(16)
    for headers in ({}, {"traceparent": f"00-{trace}-{'cd' * 8}-00"}, {"traceparent": "00-nonsense"}):
        answer = httpx.post(f"{cluster.url}/v1/completions", json=body, headers=headers, timeout=60.0)
        assert answer.status_code == 200
    traced = secrets.token_hex(16)
    ask(cluster, traced, 2)
    wait_for(lambda: any(seen.name.startswith("POST") for seen in collector.of(traced)), SECONDS_MAX)
    assert not collector.of(trace)
    assert not [seen for seen in collector.spans if seen.name == "POST /v1/completions"]


def test_log_lines_name_the_request(cluster: Cluster) -> None:
    trace = secrets.token_hex(16)
    ask(cluster, trace, 3)

    def lines(process: str, part: str = "") -> list[str]:
        """Those of a process about this request."""
        found = [line for line in cluster.log.splitlines() if f"id-{trace}" in line and part in line]
        return [line for line in found if line.startswith(process)]

    wait_for(lambda: bool(lines("router", " request method=POST") and lines("controller")), SECONDS_MAX)
    [access] = lines("router", " request method=POST")
    for part in ("status=200", "endpoint=/v1/chat/completions", "output_tokens=3", "ttft_s=", f"trace_id={trace}"):
        assert part in access
    [over] = lines("controller")
    assert "request_over" in over
    assert f"trace_id={trace}" in over
    assert "vermilion" not in cluster.log


def test_a_trace_goes_on_when_its_controller_is_killed(cluster: Cluster, collector: Collector) -> None:
    """The last test of this cluster."""
    trace = secrets.token_hex(16)
    workers = [pid for name, pid in cluster.pids.items() if name.startswith("worker")]
    body = {
        "model": "trunkline-demo",
        "prompt": SECRET,
        "max_tokens": TOKENS,
        "min_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
    }
    headers = {"traceparent": f"00-{trace}-{'cd' * 8}-01", "x-request-id": "killed"}
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, headers=headers, timeout=90.0) as answer:
        events = (line for line in answer.iter_lines() if line.startswith("data: "))
        for _ in range(5):
            next(events)
        lost = -1

        def busy() -> list[int]:
            return [index for index in (0, 1) if cluster.metric("controller_inflight", controller=str(index))]

        def kill() -> None:
            nonlocal lost
            wait_for(lambda: len(busy()) == 1, SECONDS_MAX)  # a router may miss a scrape
            [lost] = busy()
            os.kill(cluster.pids[f"controller-{lost}"], signal.SIGKILL)

        frozen(workers, kill)  # so that the answer does not end before
        *_, last = events
    assert last == "data: [DONE]"
    wait_for(lambda: any(seen.name == "POST /v1/completions" for seen in collector.of(trace)), SECONDS_MAX)
    wait_for(lambda: {"decode", "forward"} <= {s.name for s in after_loss(collector.of(trace), lost)}, SECONDS_MAX)
    spans = collector.of(trace)
    root = one(spans, "POST /v1/completions")
    first, second = sorted(
        (seen for seen in spans if seen.name == "dispatch"), key=lambda seen: seen.span.start_time_unix_nano
    )
    assert first.parent == second.parent == root.id
    assert first.is_error
    assert first.attributes["trunkline.group"] == str(lost)
    assert [link.span_id for link in second.span.links] == [first.id]
    assert second.attributes["trunkline.continued_tokens"] >= 4
    assert not second.is_error
    other = after_loss(spans, lost)
    assert one(other, "generate").parent == second.id
    assert {seen.parent for seen in other if seen.name == "forward"} == {one(other, "prefill").id}
    assert root.attributes["gen_ai.usage.output_tokens"] == TOKENS
    assert root.attributes["trunkline.attempts"] == 2
    assert "request_id=killed" in next(line for line in cluster.log.splitlines() if "stream_goes_on" in line)


def after_loss(spans: list[Seen], lost: int) -> list[Seen]:
    """Those of the group that went on."""
    names = (f"controller-{1 - lost}", f"group-{1 - lost}/rank-0")
    return [seen for seen in spans if seen.instance in names]
