"""Markdown that every generated page needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def cell(text: str) -> str:
    """Text in a cell of a table: one line, no bars."""
    return " ".join(text.split()).replace("|", "\\|")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; "" if it has no rows."""
    lines = ["| " + " | ".join(cell(text) for text in row) + " |" for row in rows]
    if not lines:
        return ""
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *lines]) + "\n"


def code(text: str) -> str:
    """As code, in a line; "" stays."""
    return f"`{text}`" if text else ""
