"""What people and log collectors read: progress, log lines, last words, and commands that work when pasted."""

from __future__ import annotations

import io
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from trunkline.deploy.supervisor.lifecycle import Phase
from trunkline.deploy.supervisor.reporters import (
    JsonReporter,
    TerminalReporter,
    chat_command,
    curl_lines,
    describe_health,
    format_record,
    last_words,
    parse_log_line,
)

URL = "http://127.0.0.1:8000"


def record(level: str, event: str, **fields: Any) -> str:
    return json.dumps({"level": level, "event": event, "role": "router", "time": "now", "port": 1, **fields})


# -- on a terminal


def reporter(log_level: str = "warning") -> tuple[TerminalReporter, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, width=60)
    return TerminalReporter(console, title="t", url=URL, model_name="m", log_level=log_level), out


def test_the_curl_command_survives_a_shell_and_is_not_wrapped() -> None:
    words = shlex.split("".join(line.removesuffix("\\") for line in curl_lines("http://h:1", "it's")))
    assert words[:2] == ["curl", "http://h:1/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == "it's"
    shown, out = reporter()
    shown.phase(Phase.SERVING)
    assert all(line in out.getvalue().splitlines() for line in curl_lines(URL, "m"))


def test_the_chat_command_is_found_without_an_activated_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / ".venv/bin/python"))
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert chat_command(URL) == f"{tmp_path}/.venv/bin/trunkline chat"
    monkeypatch.chdir(tmp_path)
    assert chat_command("http://127.0.0.1:9") == ".venv/bin/trunkline chat --url http://127.0.0.1:9"
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/trunkline")
    assert chat_command(URL) == "trunkline chat"


def test_lines_of_a_start_wait_until_it_serves() -> None:
    shown, out = reporter()
    shown.output("router", record("warning", "odd"))
    shown.output("router", record("info", "dull"))
    assert "odd" not in out.getvalue()
    shown.phase(Phase.SERVING)
    assert "router     warning odd port=1" in out.getvalue()
    assert "dull" not in out.getvalue()
    shown.output("router", "Segmentation fault")
    assert "router     Segmentation fault" in out.getvalue()


def test_lines_of_a_failed_start_are_shown_once() -> None:
    shown, out = reporter()
    shown.output("worker-0", "no memory")
    shown.last_lines("worker-0", ["no memory"])
    assert out.getvalue().count("no memory") == 1
    shown.phase(Phase.SERVING)
    shown.last_lines("worker-0", ["later"])
    assert "later" not in out.getvalue()


def test_markup_in_child_output_is_text() -> None:
    shown, out = reporter("info")
    shown.output("worker-0", "[bold]x[/bold] [/nonsense]")
    assert "[bold]x[/bold] [/nonsense]" in out.getvalue()


def test_log_lines_and_progress() -> None:
    parsed = parse_log_line(record("error", "lost"))
    assert parsed is not None
    assert format_record(parsed) == "error   lost port=1"
    assert format_record({"event": "e", "exception": "Traceback"}).endswith("e\nTraceback")
    assert [parse_log_line(line) for line in ("plain", "{", "[]", "{}", '{"a": 1}')] == [None] * 5
    said = [describe_health(answer) for answer in (None, {}, {"reason": "rank 0 loading 40 %"})]
    assert said == ["starting processes", "starting", "rank 0 loading 40 %"]


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


# -- as JSON


def json_reporter(level: str = "warning") -> tuple[JsonReporter, io.StringIO]:
    out = io.StringIO()
    return JsonReporter(out, title="demo · 2 workers", url="http://127.0.0.1:1", log_level=level), out


def records(out: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_everything_that_a_cluster_says_is_json() -> None:
    shown, out = json_reporter()
    shown.spawned("router", 17)
    shown.health(None)
    shown.health(None)
    shown.health({"reason": "no engine"})
    shown.say("it is full:\nreally", "warning")
    shown.output("worker-0", 'Traceback (most recent call last): "x"')
    shown.output("worker-0", json.dumps({"level": "error", "event": "failed", "role": "worker", "rank": 0}))
    shown.output("router", record("info", "listening"))
    shown.last_lines("worker-0", ["again"])
    shown.phase(Phase.SERVING)
    shown.close()
    said = records(out)
    events = "begins info, process_started info, waiting info, waiting info, says warning, output warning, "
    assert ", ".join(f"{line['event']} {line['level']}" for line in said) == events + "failed error, serving info"
    assert said[6] == {"level": "error", "event": "failed", "role": "worker", "rank": 0, "process": "worker-0"}
    assert said[7]["url"] == "http://127.0.0.1:1"
    assert all("time" in line for line in said if line["role"] == "supervisor")


@pytest.mark.parametrize(("level", "count"), [("debug", 3), ("info", 2), ("error", 1)])
def test_lines_below_the_level_are_left_out(level: str, count: int) -> None:
    shown, out = json_reporter(level)
    for name in ("debug", "info", "error"):
        shown.output("router", record(name, "e"))
    assert len(records(out)) == 1 + count


def test_a_level_that_is_not_known_is_shown() -> None:
    shown, out = json_reporter("error")
    shown.output("router", record("notice", "e"))
    shown.output("router", json.dumps({"event": "e"}))  # no level: info
    assert [line["level"] for line in records(out)[1:]] == ["notice"]
