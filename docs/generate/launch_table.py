"""Print the table of fields in docs/launch.md: `python docs/generate/launch_table.py`."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from trunkline.deploy.launch.fileformat import Cluster, Group, Host, Ports, Record, Router, Security, Ssh, Tiers

_PARTS: Final[tuple[tuple[str, type[Record]], ...]] = (
    ("", Cluster),
    ("hosts.NAME.", Host),
    ("hosts.NAME.ssh.", Ssh),
    ("groups[].", Group),
    ("routers[].", Router),
    ("tiers.", Tiers),
    ("ports.", Ports),
    ("security.", Security),
)


def table() -> str:
    """Return the rows in Markdown, without the head."""
    return "".join(row for prefix, record in _PARTS for row in _rows(prefix, record))


def _rows(prefix: str, record: type[Record]) -> Iterator[str]:
    hints = typing.get_type_hints(record, include_extras=True)
    for field in msgspec.structs.fields(record):
        text = next((m.description for m in getattr(hints[field.name], "__metadata__", ()) if m.description), "")
        if text:
            yield f"| `{prefix}{field.name}` | {_default(field)} | {text} |\n"


def _default(field: msgspec.structs.FieldInfo) -> str:
    """Return a default that is a number or a word; the text says the others."""
    if field.required:
        return "needed"
    value: Any = field.default
    if value is msgspec.NODEFAULT or value is None or value == "" or isinstance(value, Record):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    print(table(), end="")
