"""A request's way in parts, from its spans (benchmarks/trace_stages.py)."""

from __future__ import annotations

from random import Random

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan
from otlp_collector import Seen
from seeds import seeds
from trace_stages import STAGES, is_whole, stages


def seen(name: str, start_ns: int, end_ns: int) -> Seen:
    return Seen("", "", ProtoSpan(name=name, start_time_unix_nano=start_ns, end_time_unix_nano=end_ns))


@pytest.mark.parametrize("seed", seeds(1))
def test_each_part_is_the_time_between_two_marks(seed: int) -> None:
    rng = Random(seed)
    for _ in range(200):
        sent, post, dispatch, generate, step, stepped, prefilled, got = sorted(rng.sample(range(10**9), 8))
        between = rng.randint(step, stepped)
        spans = [
            seen("forward", between, stepped),
            seen("POST /v1/completions", post, got),
            seen("prefill", rng.randint(generate, step), prefilled),
            seen("forward", step, between),
            seen("dispatch", dispatch, got),
            seen("generate", generate, prefilled),
            seen("route", post, dispatch),
        ]
        rng.shuffle(spans)
        parts = [sent, post, dispatch, generate, step, stepped, prefilled, got]
        wanted = [(parts[i + 1] - parts[i]) / 1e6 for i in range(7)]
        assert is_whole(spans)
        assert stages(spans, sent, got) == dict(zip(STAGES, wanted, strict=True))


@pytest.mark.parametrize("missing", ["POST", "dispatch", "generate", "prefill", "forward"])
def test_spans_of_a_process_may_come_later(missing: str) -> None:
    names = ["POST /v1/completions", "dispatch", "generate", "prefill", "forward"]
    assert is_whole([seen(name, 0, 1) for name in names])
    assert not is_whole([seen(name, 0, 1) for name in names if not name.startswith(missing)])
