"""The way of a request from its first byte to its first token, from the spans that the product sends.

```
client   sent                                                              received
router    ├ POST ──┬ dispatch ────────────────────────────────────────────────┤
controller         │        ├ generate = queue + prefill ────────┤
worker             │        │           ├ forward ──┤            │
         └ arrival ┴ router ┴ submit ─ plan ─ step ─ result ─ answer ┘
```

All processes of one machine count time by the same monotonic clock, so their stamps can be compared. A controller
reads the clock once in each turn of its loop: a stage that ends there has what the turn did before.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from otlp_collector import Seen

STAGES: Final = (
    "client to router",
    "router",
    "router to controller",
    "controller's plan, on to the worker",
    "worker's step",
    "worker to controller",
    "controller to client",
)
NEEDED: Final = frozenset({"dispatch", "generate", "prefill", "forward"})


def is_whole(spans: Sequence[Seen]) -> bool:
    """Return whether all spans that `stages` needs have come."""
    names = {seen.name for seen in spans}
    return names >= NEEDED and any(name.startswith("POST ") for name in names)


def stages(spans: Sequence[Seen], sent_ns: int, received_ns: int) -> dict[str, float]:
    """Return the milliseconds of each stage of a request of one token; its prompt may take several steps.

    Args:
        spans: all of its trace.
        sent_ns: Unix time at which the client sent its first byte.
        received_ns: Unix time at which the client had its first token.
    """
    of = {seen.name.partition(" ")[0]: seen.span for seen in spans if seen.name != "forward"}
    steps = [seen.span for seen in spans if seen.name == "forward"]
    marks = (
        sent_ns,
        of["POST"].start_time_unix_nano,
        of["dispatch"].start_time_unix_nano,
        of["generate"].start_time_unix_nano,
        min(step.start_time_unix_nano for step in steps),
        max(step.end_time_unix_nano for step in steps),
        of["prefill"].end_time_unix_nano,
        received_ns,
    )
    return {name: (end - begin) / 1e6 for name, (begin, end) in zip(STAGES, pairwise(marks), strict=True)}
