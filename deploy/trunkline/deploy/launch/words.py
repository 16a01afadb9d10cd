"""Turn options and tiers of the file into words of a command line. Pure.

A value that may hold a password becomes an environment variable: other users can read command lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from trunkline.deploy.launch.document import Document, Path
from trunkline.deploy.launch.fileformat import Cluster, Options, Scalar, Tiers, nearest
from trunkline.deploy.launch.option_rules import Rule, Rules, plain, reserved

_TIER_OPTIONS: Final = {
    "kv_memory": "kv-memory",
    "host": "host-tier",
    "disk": "disk-tier",
    "remote": "remote-tier",
    "policy": "tier-policy",
}


class Words:
    """Turns options into words, by the commands' own rules."""

    def __init__(self, document: Document, cluster: Cluster, rules: Rules) -> None:
        """
        Raises:
            FileError: no command knows an option that the file gives for all.
        """
        self._document = document
        self._common = cluster.options
        self._rules = rules
        known = sorted({name for each in rules.values() for name in each if not reserved(name)})
        for name in self._common:
            self._check_name(name, known, ("options",))

    def of(self, command: str, own: Options, path: Path) -> tuple[list[str], dict[str, str]]:
        """Return words and variables for the options of a command; its own options go before the common ones.

        Raises:
            FileError: The command does not know one of its own options, or a value is impossible.
        """
        rules = self._rules[command]
        known = sorted(name for name in rules if not reserved(name))
        # What a group says is for its workers, too, who may know less.
        for name in own:
            self._check_name(name, known if command != "workers" else [plain(name)], (*path, "options"))
        values: dict[str, tuple[Scalar, Path]] = {}
        for options, where in ((self._common, ("options",)), (own, (*path, "options"))):
            for name, value in options.items():
                if plain(name) in rules:
                    values[plain(name)] = value, (*where, name)
        return self._written(rules, values)

    def of_tiers(self, command: str, tiers: Tiers, path: Path, folder: str) -> tuple[list[str], dict[str, str]]:
        """Return words and variables for the tiers.

        Args:
            folder: name of the group's own folder, below that of the disk tier if this is named.
        """
        rules = self._rules[command]
        values: dict[str, tuple[Scalar, Path]] = {}
        for field, name in _TIER_OPTIONS.items():
            value = getattr(tiers, field)
            if value == "" or name not in rules:
                continue
            if field == "disk" and isinstance(value, str) and ":" in value:
                base, _, size = value.rpartition(":")
                value = f"{base.rstrip('/')}/{folder}:{size}"
            values[name] = value, (*path, "tiers", field)
        return self._written(rules, values)

    def _written(
        self, rules: Mapping[str, Rule], values: Mapping[str, tuple[Scalar, Path]]
    ) -> tuple[list[str], dict[str, str]]:
        words: list[str] = []
        variables: dict[str, str] = {}
        for name, (value, where) in sorted(values.items()):
            try:
                written = rules[name].words(value)
            except ValueError as error:
                raise self._document.error(where, str(error)) from error
            if rules[name].variable:
                variables[rules[name].variable] = str(value)
            else:
                words += written
        return words, variables

    def _check_name(self, name: str, known: list[str], path: Path) -> None:
        if instead := reserved(name):
            raise self._document.error((*path, name), f"is not given here: {instead} says it")
        if plain(name) not in known:
            raise self._document.error((*path, name), f"is unknown; {nearest(plain(name), known)}")
