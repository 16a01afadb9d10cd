"""What each process is told at its start, from the classes that check it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Final

import griffe
from generate.tables import code, table

_ROOT: Final = Path(__file__).parents[2]
_CLASSES: Final = (
    ("router", "config", "RouterConfig"),
    ("controller", "config", "ControllerConfig"),
    ("worker", "config", "WorkerConfig"),
)
_INTRODUCTION: Final = """# Configuration

Options of commands are in the [reference of the command line](cli.md). A process is told what it needs in a JSON
file (`python -m trunkline.router --config FILE`) that `trunkline` writes for you. These are its fields. Sizes are
bytes, times seconds, unless a name says otherwise. Unknown fields are refused, and `validate` says which rule is
broken.

Environment variables are read for what cannot be in a file: `NO_COLOR` and `TRUNKLINE_LOG` (output), `TMPDIR` and
`XDG_CACHE_HOME` (folders), and those that the pages on [security](../security.md) and
[observability](../observability.md) name."""


def page() -> str:
    """Markdown."""
    parts = [_INTRODUCTION]
    for package, module, name in _CLASSES:
        found = _package(package)[module][name]
        parts += [f"## {name}", _text(found), table(("field", "type", "default", ""), _fields(found))]
    return "\n\n".join(parts) + "\n"


@cache
def _package(name: str) -> Any:
    loader = griffe.GriffeLoader(search_paths=[_ROOT / name / "trunkline"])
    return loader.load(name)


def _fields(found: Any) -> list[tuple[str, str, str, str]]:
    rows = []
    for name, field in found.members.items():
        if field.is_attribute and not name.startswith("_") and field.annotation is not None:
            default = "" if field.value is None else str(field.value)
            rows.append((code(name), code(str(field.annotation)), code(default) or "required", _text(field)))
    return rows


def _text(found: Any) -> str:
    return found.docstring.value if found.docstring else ""
