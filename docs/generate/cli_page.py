"""The command line, from the commands themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import typer
from generate.tables import code, table

from trunkline.deploy.cli.app import app

_MARKUP: Final = re.compile(r"\[/?[a-z]*\]")


def page() -> str:
    """Markdown."""
    root = typer.main.get_command(app)
    parts = [
        "# Command line",
        "Every command says the same with `--help`. Exit code 2: what was asked for is impossible.",
    ]
    for path, command in _commands(root, "trunkline"):
        parts += _command(path, command)
    return "\n\n".join(parts) + "\n"


def _commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    yield path, command
    for name, child in sorted(getattr(command, "commands", {}).items()):
        if not child.hidden:
            yield from _commands(child, f"{path} {name}")


def _command(path: str, command: Any) -> list[str]:
    parts = [f"## {path}", _prose(command.help or "")]
    arguments: list[tuple[str, str]] = []
    options: dict[str, list[tuple[str, str, str]]] = {}
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            arguments.append((code((parameter.metavar or parameter.name or "").upper()), _help(parameter)))
        elif not parameter.hidden:
            panel = getattr(parameter, "rich_help_panel", None) or "Options"
            options.setdefault(panel, []).append((_names(parameter), _default(parameter), _help(parameter)))
    if arguments:
        parts.append(table(("argument", ""), arguments))
    for panel, rows in options.items():
        title = [f"**{panel}**"] if len(options) > 1 else []
        parts += [*title, table(("option", "default", ""), rows)]
    return [part for part in parts if part]


def _names(parameter: Any) -> str:
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    kind = getattr(parameter.type_descriptor.annotation, "__name__", "value")
    takes = "" if parameter.is_flag else f" {(parameter.metavar or kind).upper()}"
    return code(names + takes)


def _default(parameter: Any) -> str:
    default = parameter.default
    if default is None or default == "" or callable(default) or repr(default) == "Sentinel.UNSET":
        return ""
    if parameter.is_flag:
        return "on" if default else "off"
    return code(str(default))


def _help(parameter: Any) -> str:
    return _MARKUP.sub("", getattr(parameter, "help", None) or "")


def _prose(text: str) -> str:
    """A command's help, its examples as code."""
    text = _MARKUP.sub("", text.replace("\f", ""))
    lines = [f"    {line}" if line.startswith("trunkline ") else line for line in text.splitlines()]
    return "\n".join(lines).strip()
