"""Find the reason for the end of a process in the last lines that it wrote. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Final

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
