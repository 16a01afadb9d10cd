"""What a rank says of adapters that it cannot read: the reason, in a report that a controller takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from deploy.waiting import wait_for

from trunkline.controller.reports import AdapterReady
from trunkline.controller.service.workers import problem_of_report
from trunkline.worker.messages import LoadAdapter
from trunkline.worker.model import adapter_store
from trunkline.worker.model.adapter_store import AdapterStore


def refused(path: str) -> AdapterReady:
    """The report of a rank that is to load an adapter from this path, and cannot."""
    taken: list[bytes] = []
    shard = cast(Any, SimpleNamespace(config=None, rank=0))
    store = AdapterStore(
        shard, torch.float32, torch.device("cpu"), cast(Any, None), lambda key, _: taken.append(key)
    )
    found: list[AdapterReady] = []
    try:
        store.load(LoadAdapter(1, "mine", path, 64))
        assert store.is_loading
        wait_for(lambda: found.__iadd__(store.poll()))
        assert not store.is_loading
        assert (taken, store.keys) == ([], set())
    finally:
        store.close()
    (report,) = found
    assert report.problem
    assert problem_of_report(report, 1, 0) == "", "a controller gives up workers that report nonsense"
    return report


@pytest.mark.parametrize("path", ["/nowhere", "/" + "a/" * 2047, "/" + "a" * 4095])
def test_a_folder_that_is_not_there(path: str) -> None:
    assert refused(path).problem.startswith(f"adapter 'mine' ({path[:200]}")


@pytest.mark.parametrize("error", [KeyError("x" * 10_000), ValueError("surprise"), MemoryError()])
def test_whatever_reading_raises_is_the_reason(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: object) -> None:
        raise error

    monkeypatch.setattr(adapter_store, "read_adapter", explode)
    assert refused("/somewhere").problem.startswith(f"adapter 'mine' cannot be loaded: {type(error).__name__}: ")
