"""Turn the options that the cluster's file gives into words of command lines. Pure.

The options are those of `trunkline group`, `workers` and `router`, by their own table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from trunkline.deploy.config.cli_option import CliOption, Scalar
from trunkline.deploy.config.option_values import nearest
from trunkline.deploy.config.options import OPTIONS_OF
from trunkline.deploy.launch.document import Document, Path
from trunkline.deploy.launch.fileformat import Cluster, Options, Tiers

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
    "peers": "tiers.peers",
    "records": "records",
    "members": "members",
    "more-models": "models",
    "join": "members",
}
"""Options that the plan sets: for each, the field of the file that gives its value."""


Rules = Mapping[str, Mapping[str, CliOption]]
"""The options of all commands: by the command's name, then by the option's name without leading dashes."""


def plain(name: str) -> str:
    """Return an option's name with hyphens; `max_context` and `max-context` are the same."""
    return name.replace("_", "-")


def reserved(name: str) -> str:
    """Return the field of the file that replaces this option; "" for an ordinary option."""
    return _FIELDS.get(plain(name), "")


def command_rules() -> dict[str, dict[str, CliOption]]:
    """Return the options of each command of the installed version."""
    return {
        kind.value: {plain(option.parameter): option for option in options if not option.is_argument}
        for kind, options in OPTIONS_OF.items()
    }


_TIER_OPTIONS: Final = {
    "kv_memory": "kv-memory",
    "host": "host-tier",
    "disk": "disk-tier",
    "remote": "remote-tier",
    "policy": "tier-policy",
    "peers": "peers",
}


class OptionWords:
    """Turns options into words of a command line and environment variables, by the commands' own rules."""

    def __init__(self, document: Document, cluster: Cluster, rules: Rules) -> None:
        """
        Raises:
            FileError: The file gives all units an option that no command has.
        """
        self._document = document
        self._common = cluster.options
        self._rules = rules
        known = sorted({name for each in rules.values() for name in each if not reserved(name)})
        for name in self._common:
            self._check_name(name, known, ("options",))

    def for_options(self, command: str, own: Options, path: Path) -> tuple[list[str], dict[str, str]]:
        """Return the command-line words and the environment variables that pass a unit's options to `command`.
        Where the unit and the cluster both set an option, the unit's value is used.

        Raises:
            FileError: The command does not know one of its own options, or a value is impossible.
        """
        rules = self._rules[command]
        known = sorted(name for name in rules if not reserved(name))
        # A group's options are for its workers, too, whose command does not have all of them.
        for name in own:
            self._check_name(name, known if command != "workers" else [plain(name)], (*path, "options"))
        values: dict[str, tuple[Scalar, Path]] = {}
        for options, where in ((self._common, ("options",)), (own, (*path, "options"))):
            for name, value in options.items():
                if plain(name) in rules:
                    values[plain(name)] = value, (*where, name)
        return self._written(rules, values)

    def for_tiers(self, command: str, tiers: Tiers, path: Path, folder: str) -> tuple[list[str], dict[str, str]]:
        """Return the command-line words and the environment variables that pass the options of the tiers.

        Args:
            folder: The name of the group's own folder, below the folder that the disk tier names.
        """
        rules = self._rules[command]
        values: dict[str, tuple[Scalar, Path]] = {}
        for field, name in _TIER_OPTIONS.items():
            value = getattr(tiers, field)
            if value in ("", None) or name not in rules:
                continue
            if isinstance(value, bool):
                value = "on" if value else "off"
            if field == "disk" and isinstance(value, str) and ":" in value:
                base, _, size = value.rpartition(":")
                value = f"{base.rstrip('/')}/{folder}:{size}"
            values[name] = value, (*path, "tiers", field)
        return self._written(rules, values)

    def for_records(self, command: str, url: str) -> tuple[list[str], dict[str, str]]:
        """Return the command-line words and the environment variables that tell where records are."""
        return self._written(self._rules[command], {"records": (url, ("records",))} if url else {})

    def for_joining(self, command: str, url: str) -> tuple[list[str], dict[str, str]]:
        """Return the command-line words and the environment variables that tell a group where to register."""
        return self._written(self._rules[command], {"join": (url, ("members",))})

    def _written(
        self, rules: Mapping[str, CliOption], values: Mapping[str, tuple[Scalar, Path]]
    ) -> tuple[list[str], dict[str, str]]:
        words: list[str] = []
        variables: dict[str, str] = {}
        for name, (value, where) in sorted(values.items()):
            try:
                written = rules[name].words(value)
            except ValueError as error:
                raise self._document.error(where, str(error)) from error
            if variable := rules[name].variable:
                variables[variable] = str(value)
            else:
                words += written
        return words, variables

    def _check_name(self, name: str, known: list[str], path: Path) -> None:
        if instead := reserved(name):
            raise self._document.error((*path, name), f"is not given here: {instead} says it")
        if plain(name) not in known:
            raise self._document.error((*path, name), f"is unknown; {nearest(plain(name), known)}")
