"""What a person reads: progress, log lines, and a command that works when pasted."""

from __future__ import annotations

import io
import json
import shlex
from pathlib import Path

import pytest
from rich.console import Console

from trunkline.deploy.supervisor.display import (
    TerminalReporter,
    chat_command,
    curl_lines,
    describe_health,
    format_record,
)
from trunkline.deploy.supervisor.last_words import parse_log_line
from trunkline.deploy.supervisor.lifecycle import Phase


def reporter(log_level: str = "warning") -> tuple[TerminalReporter, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, width=60)
    url = "http://127.0.0.1:8000"
    return TerminalReporter(console, title="t", url=url, model_name="m", log_level=log_level), out


def record(level: str, event: str) -> str:
    return json.dumps({"level": level, "event": event, "role": "router", "time": "now", "port": 1})


def test_the_curl_command_survives_a_shell() -> None:
    words = shlex.split("".join(line.removesuffix("\\") for line in curl_lines("http://h:1", "it's")))
    assert words[:2] == ["curl", "http://h:1/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == "it's"


def test_the_curl_command_is_not_wrapped() -> None:
    shown, out = reporter()
    shown.phase(Phase.SERVING)
    assert all(line in out.getvalue().splitlines() for line in curl_lines("http://127.0.0.1:8000", "m"))


def test_the_chat_command_is_found_without_an_activated_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / ".venv/bin/python"))
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert chat_command("http://127.0.0.1:8000") == f"{tmp_path}/.venv/bin/trunkline chat"
    monkeypatch.chdir(tmp_path)
    assert chat_command("http://127.0.0.1:9") == ".venv/bin/trunkline chat --url http://127.0.0.1:9"
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/trunkline")
    assert chat_command("http://127.0.0.1:8000") == "trunkline chat"


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


def test_log_lines() -> None:
    parsed = parse_log_line(record("error", "lost"))
    assert parsed is not None
    assert format_record(parsed) == "error   lost port=1"
    assert format_record({"event": "e", "exception": "Traceback"}).endswith("e\nTraceback")
    assert [parse_log_line(line) for line in ("plain", "{", "[]", "{}", '{"a": 1}')] == [None] * 5


def test_progress_is_what_the_router_says() -> None:
    assert describe_health(None) == "starting processes"
    assert describe_health({}) == "starting"
    assert describe_health({"reason": "rank 0 loading 40 %"}) == "rank 0 loading 40 %"
