"""What a log collector sees of a cluster: one JSON object a line (`--log-format json`), instead of `display.py`.

Children write such lines themselves; they are passed on with the name of their process. What else a child writes
(a traceback of the interpreter, a library's complaint) and what the supervisor has to say become such lines here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TextIO

from trunkline.deploy.supervisor.display import describe_health
from trunkline.deploy.supervisor.last_words import parse_log_line
from trunkline.deploy.supervisor.lifecycle import Phase


class JsonReporter:
    """Implements `supervisor.Reporter`."""

    def __init__(self, out: TextIO, *, title: str, url: str, log_level: str) -> None:
        self._out = out
        self._url = url
        self._level = logging.getLevelNamesMapping()[log_level.upper()]
        self._detail = ""
        self._write("info", "begins", title=title)

    def spawned(self, name: str, pid: int) -> None:
        """A child runs."""
        self._write("info", "process_started", process=name, pid=pid)

    def health(self, answer: Mapping[str, Any] | None) -> None:
        """Say what the router says when it changes."""
        detail = describe_health(answer)
        if detail != self._detail:
            self._detail = detail
            self._write("info", "waiting", detail=detail)

    def output(self, name: str, line: str) -> None:
        """Pass on a line of a child."""
        record = parse_log_line(line)
        if record is None:
            self._write("warning", "output", process=name, text=line)
        elif logging.getLevelNamesMapping().get(str(record.get("level", "")).upper(), 0) >= self._level:
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
