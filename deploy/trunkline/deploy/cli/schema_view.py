"""Show what `trunkline schema` prints: the layout of a prompt, the modules of a schema, lists."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trunkline.prompts import Schema, SchemaEntry
from trunkline.router import pml

_STYLES: Final = {
    "text": "green",
    "role": "cyan",
    "argument": "bold yellow",
    "hole": "dim yellow",
    "gap": "magenta",
    "trailing": "bold magenta",
    "free": "dim",
}
_LEGEND: Final = {
    "text": "text of the schema",
    "role": "text of the chat template",
    "argument": "the value of a parameter",
    "hole": "unused rest of a parameter",
    "gap": "text between modules",
    "trailing": "text after the modules",
    "free": "not selected",
}


def show_prompt(console: Console, schema: pml.CompiledSchema, prompt: pml.CompiledPrompt, unit: str) -> None:
    """Print a prompt's parts with their positions; `unit` says what is counted."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("position", unit.split()[0]):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("kind", "kv"):
        table.add_column(name, no_wrap=True)
    table.add_column("module", overflow="fold", max_width=32)
    table.add_column("text", overflow="fold")
    kinds = []
    for kind, path, position, count, text, kv in _rows(prompt):
        style = _STYLES[kind]
        kinds.append(kind)
        table.add_row(str(position), str(count), Text(kind, style), kv, path, Text(_visible(text), style))
    console.print(table)
    console.print()
    for kind, style in _STYLES.items():
        if kind in kinds:
            console.print(Text.assemble((f"{kind:<9}", style), _LEGEND[kind]))
    cached, own = prompt.module_tokens, len(prompt.own)
    console.print(
        f"\n{cached + own} {unit}: {cached} cached with their modules, {own} computed for this prompt. The schema "
        f"takes {schema.extent} positions; the answer begins at {prompt.end}.",
        highlight=False,
    )


def _rows(prompt: pml.CompiledPrompt) -> Iterator[tuple[str, str, int, int, str, str]]:
    """Yield (kind, module, position, count, text, origin of its KV) of each part, and of gaps between them."""
    end = 0
    for piece in prompt.pieces:
        if piece.position > end:
            yield "free", "", end, piece.position - end, "", ""
        kv = "" if piece.kind == "hole" else ("cached" if piece.cached else "computed")
        yield piece.kind, piece.path, piece.position, piece.count, piece.text, kv
        end = max(end, piece.position + piece.count)


def _visible(text: str) -> str:
    """Return a text with visible line ends, and without characters that control a terminal."""
    shown = (character if character.isprintable() or character == "\n" else "�" for character in text)
    return "".join(shown).replace("\n", "⏎\n").removesuffix("\n")


def show_compiled(console: Console, schema: pml.CompiledSchema, unit: str) -> None:
    """Print the modules of a schema that was compiled here."""
    table = _module_table(unit)
    for module in schema.modules:
        params = ", ".join(f"{slot.name}[{slot.length}]" for slot in module.params)
        table.add_row(module.path or "(schema)", str(module.start), str(module.length), str(module.tokens), params)
    console.print(table)


def show_schema(console: Console, schema: Schema) -> None:
    """Print a schema of a server."""
    console.print(
        f"{schema.name}, version {schema.version}: {schema.status}, {schema.extent} positions, "
        f"{_expiry(schema.expires_at)}",
        markup=False,
        highlight=False,
    )
    table = _module_table("tokens")
    table.add_column("KV bytes", justify="right")
    table.add_column("tier")
    for module in schema.modules:
        params = ", ".join(f"{param.name}[{param.length}]" for param in module.params)
        numbers = (str(module.start), str(module.length), str(module.tokens))
        tier = module.tier or "-" if module.cached else "per request"
        table.add_row(module.path or "(schema)", *numbers, params, str(module.bytes), tier)
    console.print(table)
    for warning in schema.warnings:
        console.print(Text.assemble(("warning: ", "yellow"), warning), soft_wrap=True)


def show_list(console: Console, entries: list[SchemaEntry]) -> None:
    """Print the names of schemas, one a line."""
    if not entries:
        Console(stderr=True).print("There are no schemas.")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("name", "expires"):
        table.add_column(name, overflow="fold")
    for entry in entries:
        table.add_row(entry.id, _expiry(entry.expires_at))
    console.print(table)


def _module_table(unit: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("module", overflow="fold")
    for name in ("start", "length", unit.split()[0]):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("parameters", overflow="fold")
    return table


def _expiry(expires_at: int | None) -> str:
    if expires_at is None:
        return "never expires"
    return f"expires {datetime.fromtimestamp(expires_at, UTC):%Y-%m-%d %H:%M} UTC"
