"""Log lines of a process: what each has, for people and for a log collector; and warnings that peers can cause."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from contextvars import ContextVar

import pytest
import structlog

from trunkline.runtime.process import (
    SHORT_SLICES_NS,
    USUAL_SLICES,
    RareLog,
    _SchedAttr,
    ask_for_slices,
    configure_logging,
)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Afterwards, logging is configured as it was."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


Capture = pytest.CaptureFixture[str]


def lines_of(log_format: str, capsys: Capture) -> list[str]:
    request = ContextVar("request", default="")

    def context() -> dict[str, str]:
        return {"request_id": request.get()} if request.get() else {}

    configure_logging("worker", "info", log_format, context=context, group=1, rank=0)
    log = structlog.get_logger()
    token = request.set("r1")
    log.info("here", request=2)
    request.reset(token)
    thread = threading.Thread(target=lambda: log.warning("elsewhere"))
    thread.start()
    thread.join()
    log.debug("not shown")
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        log.exception("failed")
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("log_format", ["json", "auto"])  # no terminal here
def test_lines_are_objects_that_say_whose_they_are(log_format: str, capsys: Capture) -> None:
    here, elsewhere, failed = map(json.loads, lines_of(log_format, capsys))
    assert list(here)[:3] == ["time", "level", "event"]
    del here["time"]
    own = {"role": "worker", "group": 1, "rank": 0}
    assert here == own | {"level": "info", "event": "here", "request_id": "r1", "request": 2}
    assert list(here)[-2:] == ["request", "request_id"], "what the line itself says comes first"
    assert elsewhere.items() >= (own | {"level": "warning", "event": "elsewhere"}).items(), "in any thread"
    assert "request_id" not in elsewhere
    assert "ZeroDivisionError" in failed["exception"]


def test_people_get_text(capsys: Capture) -> None:
    line = lines_of("text", capsys)[0]
    assert "here" in line
    assert "request_id" in line
    assert not line.startswith("{")


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_a_full_disk_ends_nothing(log_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    full = open("/dev/full", "w")  # noqa: SIM115 (closing it fails, too)
    monkeypatch.setattr(sys, "stderr", full)
    configure_logging("worker", "info", log_format)
    log = structlog.get_logger()
    try:
        for write in (log.info, log.warning, log.error, log.critical):
            write("lost", of="x" * 10_000)
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            log.exception("lost, too")
    finally:
        with suppress(OSError):
            full.close()


def test_rare_lines_are_counted() -> None:
    rare = RareLog("test", 10.0)
    with structlog.testing.capture_logs() as written:
        for second in range(25):
            rare.warning("noise", float(second), peer="a")
        rare.warning("other noise", 0.0)
    assert [line.get("not_logged") for line in written] == [None, 9, 9, None]
    assert rare.counts == {"noise": 25, "other noise": 1}
    for kind in range(1000):
        rare.warning(f"kind {kind}", 0.0)
    assert len(rare.counts) <= 65


def own_slice() -> _SchedAttr:
    """How the kernel schedules this thread."""
    found, call = _SchedAttr(), {"x86_64": 315, "aarch64": 275}[platform.machine()]
    assert ctypes.CDLL(None).syscall(call, 0, ctypes.byref(found), ctypes.sizeof(found), 0) == 0
    return found


@pytest.mark.skipif(
    tuple(map(int, os.uname().release.split(".")[:2])) < (6, 12), reason="this kernel has one length of slices"
)
def test_short_slices_are_for_all_threads_to_come() -> None:
    slices = []

    def with_a_child() -> None:
        slices.append(own_slice())
        ask_for_slices(SHORT_SLICES_NS)
        slices.append(own_slice())
        child = threading.Thread(target=lambda: slices.append(own_slice()))
        child.start()
        child.join()
        ask_for_slices(USUAL_SLICES)
        slices.append(own_slice())

    thread = threading.Thread(target=with_a_child)
    thread.start()
    thread.join()
    before, asked, child, after = slices
    assert before.runtime_ns == after.runtime_ns > asked.runtime_ns == child.runtime_ns == SHORT_SLICES_NS
    assert (asked.policy, asked.nice) == (child.policy, child.nice) == (before.policy, before.nice)
    assert own_slice().runtime_ns == before.runtime_ns, "other threads have the slices that they had"
