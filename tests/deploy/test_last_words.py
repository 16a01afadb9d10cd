"""What a dead process's output gives as its reason."""

from __future__ import annotations

import json

import pytest

from trunkline.deploy.supervisor.last_words import last_words


def record(level: str, event: str, **fields: str) -> str:
    return json.dumps({"time": "now", "level": level, "event": event, **fields})


FAILED = record("error", "rank failed", error="NCCL: Duplicate GPU detected", exception="Traceback ...")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], ""),
        ([record("info", "ready")], ""),
        ([record("info", "ready"), FAILED], "NCCL: Duplicate GPU detected"),
        ([FAILED, record("info", "closing"), "[rank0] a library's farewell"], "NCCL: Duplicate GPU detected"),
        ([record("error", "refused", reason="another model")], "another model"),
        ([record("error", "the controller is gone")], "the controller is gone"),
        (["trunkline.worker: gpu is 3, but torch sees 1"], "trunkline.worker: gpu is 3, but torch sees 1"),
        ([FAILED, "Traceback (most recent call last):", '  File "a.py"', "KeyError: 'x'", ""], "KeyError: 'x'"),
        (["Segmentation fault", ""], "Segmentation fault"),
        (["x: " + "y" * 5000], "x: " + "y" * 1997),
    ],
)
def test_last_words(lines: list[str], words: str) -> None:
    assert last_words(lines) == words
