"""Show how a cluster starts, runs and stops: a live table on a terminal, plain lines, or JSON for a log collector.

Children write their log as lines of JSON. For people they are made readable; a log collector (`--log-format json`)
gets them with the name of their process. What else a child writes (a traceback of the interpreter, a library's
complaint) and the supervisor's own sentences become such lines, too.
"""

from __future__ import annotations

import json
import logging
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TextIO

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from trunkline.deploy.config.machine import DEFAULT_URL
from trunkline.deploy.supervisor.lifecycle import Phase

_STYLES: Final = {"debug": "dim", "info": "", "warning": "yellow", "error": "bold red", "critical": "bold red"}
_PLAIN_INTERVAL_S: Final = 2.0
_HIDDEN_FIELDS: Final = ("event", "level", "time", "role", "rank", "router", "exception")


class TerminalReporter:
    """A `supervisor.Reporter` on a rich console (standard error, so that output can be piped)."""

    def __init__(self, console: Console, *, title: str, url: str, model_name: str, log_level: str) -> None:
        self._console = console
        self._title = title
        self._url = url
        self._model_name = model_name
        self._level = logging.getLevelNamesMapping()[log_level.upper()]
        self._held: list[tuple[str, str]] | None = [] if self._level >= logging.WARNING else None
        """Lines that children wrote while the cluster starts. They are shown once the cluster serves; of a child
        that failed, at once. None: all lines are shown at once."""
        self._started = time.monotonic()
        self._pids: dict[str, int] = {}
        self._detail = ""
        self._printed_s = 0.0
        self._live = Live(console=console, refresh_per_second=8, transient=True, get_renderable=self._table)
        console.print(f"[bold]Trunkline[/] {escape(title)}")
        if console.is_terminal:
            self._live.start()

    def spawned(self, name: str, pid: int) -> None:
        """Show that a child process was started."""
        self._pids[name] = pid
        if not self._live.is_started:  # no terminal, or the table has gone
            self._console.print(f"{name} started (process {pid})")

    def health(self, answer: Mapping[str, Any] | None) -> None:
        """Keep the router's answer; without a terminal, print it when it changes, every 2 s at most."""
        detail = describe_health(answer)
        now = time.monotonic() - self._started
        changed = detail != self._detail
        self._detail = detail
        if changed and not self._console.is_terminal and now - self._printed_s >= _PLAIN_INTERVAL_S:
            self._printed_s = now
            self._console.print(f"[{now:5.1f} s] {detail}", markup=False)

    def output(self, name: str, line: str) -> None:
        """Show a child's log line if `--log-level` asks for it, and any other line."""
        if self._held is not None:
            self._held.append((name, line))
            return
        record = parse_log_line(line)
        if record is None:
            self._console.print(Text(f"{name:<10} {line}"), soft_wrap=True)
            return
        if level_of(record) >= self._level:
            style = _STYLES.get(str(record.get("level", "info")), "")
            text = Text(f"{name:<10} {format_record(record)}", style=style)
            self._console.print(text, soft_wrap=True)  # a search in a log file finds whole lines

    def say(self, text: str, level: str) -> None:
        """Print a sentence."""
        self._console.print(Text(text, style=_STYLES.get(level, "")), soft_wrap=True)

    def last_lines(self, name: str, lines: Sequence[str]) -> None:
        """Print the last lines of a child that could not start; later ones were shown when they came."""
        if self._held is None or not lines:
            return
        self._console.print(Text(f"Its last lines ({name}):", style="bold"))
        for line in lines:
            record = parse_log_line(line)
            self._console.print(Text(f"  {format_record(record) if record else line}"))

    def phase(self, phase: Phase) -> None:
        """Show that the cluster entered another phase."""
        if phase is not Phase.STARTING:
            self._live.stop()
        match phase:
            case Phase.SERVING:
                held, self._held = self._held, None
                for name, line in held or ():
                    self.output(name, line)
                self._announce()
            case Phase.FAILED:
                self.say("The cluster cannot go on without it; stopping.", "error")
            case Phase.STOPPED:
                self._console.print("Stopped.")
            case _:
                pass

    def close(self) -> None:
        """Give the terminal back."""
        self._live.stop()

    def _announce(self) -> None:
        if not self._url:  # of a part of a cluster each process says itself when it is ready
            return
        seconds = time.monotonic() - self._started
        self._console.print(f"Ready after {seconds:.1f} s: [bold]{self._url}[/]")
        # Written as plain text without wrapping, so that what is selected and pasted works.
        self._console.print("\nAsk it something:\n", highlight=False)
        for line in curl_lines(self._url, self._model_name):
            self._console.print(line, soft_wrap=True, markup=False, highlight=False)
        self._console.print(
            f"\nTalk to it:  {chat_command(self._url)}", soft_wrap=True, markup=False, highlight=False
        )
        self._console.print(
            f"See it:      {self._url}/ui  (API: {self._url}/docs)", soft_wrap=True, highlight=False
        )
        self._console.print("Stop it:     Ctrl-C\n", highlight=False)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, pid in self._pids.items():
            table.add_row(Text(name, style="bold"), Text(f"process {pid}", style="dim"))
        seconds = time.monotonic() - self._started
        table.add_row(Spinner("dots"), Text(f"{seconds:4.0f} s  {self._detail or 'starting processes'}"))
        return table


def describe_health(answer: Mapping[str, Any] | None) -> str:
    """Return one line for the body of a `/health` that is not yet 200."""
    if answer is None:
        return "starting processes"
    return str(answer.get("reason") or "starting")


def format_record(record: Mapping[str, Any]) -> str:
    """Return a log record as `level event key=value …`, followed by its traceback if it has one."""
    # The name of a process says its group already; the lines of a router name the group of a request.
    hidden = _HIDDEN_FIELDS if record.get("role") == "router" else (*_HIDDEN_FIELDS, "group")
    fields = " ".join(f"{key}={value}" for key, value in record.items() if key not in hidden)
    text = f"{record.get('level', 'info'):<7} {record['event']} {fields}".rstrip()
    return f"{text}\n{record['exception']}" if "exception" in record else text


def chat_command(url: str) -> str:
    """Return the command line of the chat client, with the path of this installation unless the shell finds the
    command by itself: after `make serve` the environment is not activated."""
    program = shutil.which("trunkline") and "trunkline"
    if program is None:
        path = Path(sys.executable).with_name("trunkline")
        program = str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
    return f"{shlex.quote(program)} chat" + ("" if url == DEFAULT_URL else f" --url {url}")


def curl_lines(url: str, model_name: str) -> list[str]:
    """Return the lines of a command that asks the model a question, to be pasted into a shell."""
    question = "What does os.path.join do?"
    body = {"model": model_name, "messages": [{"role": "user", "content": question}], "max_tokens": 64}
    quoted = json.dumps(body).replace("'", "'\\''")
    return [
        f"curl {url}/v1/chat/completions \\",
        "  -H 'Content-Type: application/json' \\",
        f"  -d '{quoted}'",
    ]


class JsonReporter:
    """Implements `supervisor.Reporter`."""

    def __init__(self, out: TextIO, *, title: str, url: str, log_level: str) -> None:
        self._out = out
        self._url = url
        self._level = logging.getLevelNamesMapping()[log_level.upper()]
        self._detail = ""
        self._write("info", "begins", title=title)

    def spawned(self, name: str, pid: int) -> None:
        """Write that a child process was started."""
        self._write("info", "process_started", process=name, pid=pid)

    def health(self, answer: Mapping[str, Any] | None) -> None:
        """Write the router's answer whenever it changes."""
        detail = describe_health(answer)
        if detail != self._detail:
            self._detail = detail
            self._write("info", "waiting", detail=detail)

    def output(self, name: str, line: str) -> None:
        """Pass on a line of a child."""
        record = parse_log_line(line)
        if record is None:
            self._write("warning", "output", process=name, text=line)
        elif level_of(record) >= self._level:
            self._line({**record, "process": name})

    def say(self, text: str, level: str) -> None:
        """Write a sentence of the supervisor."""
        self._write(level, "says", text=text)

    def last_lines(self, name: str, lines: Sequence[str]) -> None:
        """Do nothing: these lines were passed on when they came."""

    def phase(self, phase: Phase) -> None:
        """Write that the cluster entered another phase."""
        fields = {"url": self._url} if phase is Phase.SERVING and self._url else {}
        self._write("error" if phase is Phase.FAILED else "info", phase.name.lower(), **fields)

    def close(self) -> None:
        """Do nothing: there is nothing to give back."""

    def _write(self, level: str, event: str, **fields: Any) -> None:
        """Write a line of the supervisor itself. They are few and concern the whole cluster, so all levels are
        shown."""
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        self._line({"time": now, "level": level, "event": event, "role": "supervisor", **fields})

    def _line(self, record: Mapping[str, Any]) -> None:
        self._out.write(json.dumps(record) + "\n")
        self._out.flush()


_ERRORS: Final = ("error", "critical")
_REASON: Final = re.compile(r"[A-Za-z_][\w.]*: \S")
"""The beginning of the last line of a traceback, or of a line written before logging is set up."""
_CHARACTERS_MAX: Final = 2000


def parse_log_line(line: str) -> dict[str, Any] | None:
    """Return the fields of a structured log line; None if it is another line, such as one of a traceback."""
    if not line.startswith("{"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "event" in record else None


def level_of(record: Mapping[str, Any]) -> int:
    """Return the level of a log record. One that is not known, a library's perhaps, is shown as errors are."""
    return logging.getLevelNamesMapping().get(str(record.get("level", "info")).upper(), logging.ERROR)


def last_words(lines: Iterable[str]) -> str:
    """Return the reason in the last error that these lines tell of; "" if there is none.

    Args:
        lines: The last lines of its output: log lines of Trunkline, and what the interpreter or a library wrote.
    """
    words, plain = "", ""
    for line in lines:
        record = parse_log_line(line)
        if record is None:
            plain = line.strip() or plain
            words = plain if _REASON.match(line) else words
        elif str(record.get("level")) in _ERRORS:
            words = str(record.get("error") or record.get("reason") or record["event"])
    return (words or plain)[:_CHARACTERS_MAX]
