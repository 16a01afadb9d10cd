"""Log lines: what each has, and what `--log-format json` makes of a cluster's."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from typing import Any

from trunkline.deploy.supervisor.json_reporter import JsonReporter
from trunkline.deploy.supervisor.lifecycle import Phase

_PROGRAM = """
import sys, threading, structlog
from trunkline.runtime.process import configure_logging
configure_logging("worker", "info", sys.argv[1], group=1, rank=0)
log = structlog.get_logger()
with structlog.contextvars.bound_contextvars(request_id="r1"):
    log.info("here", request=2)
thread = threading.Thread(target=lambda: log.warning("elsewhere"))
thread.start()
thread.join()
log.debug("not shown")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("failed")
"""


def lines_of(log_format: str) -> list[str]:
    command = [sys.executable, "-c", _PROGRAM, log_format]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()


def test_lines_are_objects_that_say_whose_they_are() -> None:
    for log_format in ("json", "auto"):  # no terminal here
        here, elsewhere, failed = map(json.loads, lines_of(log_format))
        assert list(here)[:3] == ["time", "level", "event"]
        del here["time"]
        own = {"role": "worker", "group": 1, "rank": 0}
        assert here == own | {"level": "info", "event": "here", "request_id": "r1", "request": 2}
        assert elsewhere.items() >= (own | {"level": "warning", "event": "elsewhere"}).items(), "in any thread"
        assert "request_id" not in elsewhere
        assert "ZeroDivisionError" in failed["exception"]


def test_people_get_text() -> None:
    lines = lines_of("text")
    assert "here" in lines[0]
    assert "request_id" in lines[0]
    assert not lines[0].startswith("{")


def told(level: str = "warning") -> tuple[JsonReporter, io.StringIO]:
    out = io.StringIO()
    return JsonReporter(out, title="demo · 2 workers", url="http://127.0.0.1:1", log_level=level), out


def records(out: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_everything_that_a_cluster_says_is_json() -> None:
    reporter, out = told()
    reporter.spawned("router", 17)
    reporter.health(None)
    reporter.health(None)
    reporter.health({"reason": "no engine"})
    reporter.say("it is full:\nreally", "warning")
    reporter.output("worker-0", 'Traceback (most recent call last): "x"')
    reporter.output("worker-0", json.dumps({"level": "error", "event": "failed", "role": "worker", "rank": 0}))
    reporter.output("router", json.dumps({"level": "info", "event": "listening", "role": "router"}))
    reporter.last_lines("worker-0", ["again"])
    reporter.phase(Phase.SERVING)
    reporter.close()
    said = records(out)
    events = [(record["event"], record["level"]) for record in said]
    assert events == [
        ("begins", "info"),
        ("process_started", "info"),
        ("waiting", "info"),
        ("waiting", "info"),
        ("says", "warning"),
        ("output", "warning"),
        ("failed", "error"),
        ("serving", "info"),
    ]
    assert said[6] == {"level": "error", "event": "failed", "role": "worker", "rank": 0, "process": "worker-0"}
    assert said[7]["url"] == "http://127.0.0.1:1"
    assert all("time" in record for record in said if record["role"] == "supervisor")


def test_lines_below_the_level_are_left_out() -> None:
    for level, count in (("debug", 3), ("info", 2), ("error", 1)):
        reporter, out = told(level)
        for name in ("debug", "info", "error"):
            reporter.output("router", json.dumps({"level": name, "event": "e"}))
        assert len(records(out)) == 1 + count
