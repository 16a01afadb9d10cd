"""The options that the file may have: those of `trunkline group`, `workers` and `router`, by their own table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from trunkline.deploy.config.options import OPTIONS_OF, CliOption
from trunkline.deploy.launch.fileformat import Scalar

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
"""Options that the plan sets, and where the file gives them."""


@dataclass(frozen=True)
class Rule:
    """How an option is written on a command line."""

    flag: str
    off: str = ""
    """The flag that turns a switch off."""
    is_switch: bool = False
    variable: str = ""
    """An environment variable that means the same, for a value that must not be on a command line."""
    kind: type = str

    def words(self, value: Scalar) -> list[str]:
        """Return the words for a value.

        Raises:
            ValueError: The option cannot have this value.
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
    """Return an option's name with hyphens; `max_context` and `max-context` are the same."""
    return name.replace("_", "-")


def reserved(name: str) -> str:
    """Return where the file gives this option instead; "" for an ordinary option."""
    return _FIELDS.get(plain(name), "")


def command_rules() -> dict[str, dict[str, Rule]]:
    """Return the rules of each command, as it is installed here."""
    return {
        kind.value: {plain(option.parameter): _rule(option) for option in options if not option.is_argument}
        for kind, options in OPTIONS_OF.items()
    }


def _rule(option: CliOption) -> Rule:
    flag, _, off = option.flag.partition("/")
    return Rule(flag, off, option.kind is bool, option.variable or "", option.kind)
