"""What the options in the file may be: the options of `trunkline group`, `workers` and `router` themselves.

Nothing is said twice: names, types and defaults are those of the commands.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from typer.models import OptionInfo

from trunkline.deploy.cli import node_cli
from trunkline.deploy.launch.fileformat import Scalar

_COMMANDS: Final = {"group": node_cli.group, "workers": node_cli.workers, "router": node_cli.router}

_FIELDS: Final = {
    "tp": "a group's tp",
    "ranks": "a group's hosts",
    "listen": "a group's port and its host's address",
    "leader": "a group's hosts",
    "controllers": "groups",
    "host": "a router's listen",
    "port": "a router's port",
    "routers": "a router's processes",
    "tenants": "security.api_keys",
    "wire-keys": "security.wire_keys",
    "plain-tcp": "security.plain_tcp",
    "health-port": "ports.health",
    "health-host": "nothing: units answer for their health on the loopback address",
    "kv-memory": "tiers.kv_memory",
    "host-tier": "tiers.host",
    "disk-tier": "tiers.disk",
    "remote-tier": "tiers.remote",
    "tier-policy": "tiers.policy",
}
"""Options that the plan sets, and where the file says them."""


@dataclass(frozen=True)
class Rule:
    """An option of a command."""

    flag: str
    off: str = ""
    """Of a switch: what turns it off."""
    is_switch: bool = False
    variable: str = ""
    """Environment variable that means the same, for what must not be on a command line."""
    kind: type = str

    def words(self, value: Scalar) -> list[str]:
        """On a command line.

        Raises:
            ValueError: it cannot have this value.
        """
        if self.is_switch:
            if not isinstance(value, bool):
                raise ValueError(f"is {value!r}; allowed are true and false")
            chosen = self.flag if value else self.off
            return [chosen] if chosen else []
        if isinstance(value, bool):
            raise ValueError(f"is {str(value).lower()}, but takes a value")
        if self.kind is int and not isinstance(value, int):
            raise ValueError(f"is {value!r}; it takes a whole number")
        if self.kind is float and isinstance(value, str):
            raise ValueError(f"is {value!r}; it takes a number")
        text = str(value)
        if "\0" in text:
            raise ValueError("has a zero byte in it")
        return [f"{self.flag}={text}"]


Rules = Mapping[str, Mapping[str, Rule]]
"""By command, then by the option's name without dashes in front."""


def plain(name: str) -> str:
    """An option's name as it is written here; `max_context` and `max-context` are the same."""
    return name.replace("_", "-")


def reserved(name: str) -> str:
    """Where the file says it instead; "": it is an ordinary option."""
    return _FIELDS.get(plain(name), "")


def command_rules() -> dict[str, dict[str, Rule]]:
    """Of the commands as they are installed here."""
    return {command: _rules_of(function) for command, function in _COMMANDS.items()}


def _rules_of(function: Callable[..., None]) -> dict[str, Rule]:
    rules = {}
    for name, parameter in inspect.signature(function).parameters.items():
        shown, info = typing.get_args(parameter.annotation)
        if not isinstance(info, OptionInfo):
            continue  # an argument: the model
        kind = _kind(shown)
        # In an annotation Typer takes the first flag for a default.
        flags = [word for word in (info.default, *(info.param_decls or ())) if isinstance(word, str)]
        flag, _, off = (flags or [f"--{plain(name)}"])[0].partition("/")
        rules[plain(name)] = Rule(flag, off, kind is bool, str(info.envvar or ""), kind)
    return rules


def _kind(shown: Any) -> type:
    """`int` of `int | None`."""
    if isinstance(shown, types.UnionType):
        shown = next(kind for kind in typing.get_args(shown) if kind is not type(None))
    return shown if isinstance(shown, type) else str
