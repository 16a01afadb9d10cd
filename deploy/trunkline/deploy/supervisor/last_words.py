"""Why a process ended, in its own words: the last of what it wrote that says so. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Final

_ERRORS: Final = ("error", "critical")
_REASON: Final = re.compile(r"[A-Za-z_][\w.]*: \S")
"""As the last line of a traceback begins, or what a process says before it can log."""
_CHARACTERS_MAX: Final = 2000


def parse_log_line(line: str) -> dict[str, Any] | None:
    """The fields of a structured log line, or None if it is something else (a traceback, say)."""
    if not line.startswith("{"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "event" in record else None


def last_words(lines: Iterable[str]) -> str:
    """Return the reason in the last error that these lines tell of; "" if there is none.

    Args:
        lines: the end of a process's output: log lines of Trunkline, and what the interpreter or a library wrote.
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
