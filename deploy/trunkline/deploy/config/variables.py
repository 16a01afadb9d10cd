"""Environment variables that give options: what they may say, and names that are mistyped. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from trunkline.deploy.config.cli_option import CliOption
from trunkline.deploy.config.option_values import API_KEY_VARIABLE
from trunkline.deploy.config.options import NODE_OPTIONS, SERVE_OPTIONS
from trunkline.deploy.errors import UserError

_PREFIX: Final = "TRUNKLINE_"
_SWITCHES: Final = frozenset("1 0 true false t f yes no y n on off".split())
_OF_SERVICES: Final = re.compile(
    r"(.+_)?(SERVICE_(HOST|PORT(_.+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
"""Variables that Kubernetes sets in all pods beside a Service whose name is `trunkline` or begins so."""
_ALIKE: Final = 0.75
"""Likeness of two names from which on one counts as the other, mistyped. What is less like any option is left
alone: it may be another program's."""


def variable_of(option: CliOption) -> str:
    """Return the name of the variable that gives an option."""
    return _PREFIX + option.parameter.upper()


def given_values(options: Sequence[CliOption], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the values that the environment gives, by the parameters of their options.

    Raises:
        UserError: An option cannot have the value of its variable.
    """
    found = {}
    for option in options:
        name = variable_of(option)
        value = environment.get(name, "")
        if not value or value.startswith("tcp://"):  # what a Service named trunkline makes of TRUNKLINE_PORT
            continue
        if rule := _broken_rule(option.kind, value):
            raise UserError(f"{name} is {value[:80]!r}; {rule}")
        found[option.parameter] = value
    return found


def check_names(environment: Mapping[str, str]) -> None:
    """Check that no variable has nearly the name of one that gives an option.

    Raises:
        UserError: A variable is mistyped, so that what it says would be passed over.
    """
    known = {API_KEY_VARIABLE, *map(variable_of, (*SERVE_OPTIONS, *NODE_OPTIONS))}
    for name in sorted(environment):
        if name.startswith(_PREFIX) and name not in known and (meant := _nearest(name, known)):
            raise UserError(f"the environment has {name}, which no option reads; did you mean {meant}?")


def _nearest(name: str, known: Collection[str]) -> str:
    rest = name.removeprefix(_PREFIX)
    if _OF_SERVICES.fullmatch(rest):
        return ""
    endings = [each.removeprefix(_PREFIX) for each in known]
    return "".join(_PREFIX + found for found in difflib.get_close_matches(rest, endings, 1, _ALIKE))


def _broken_rule(kind: type, value: str) -> str:
    """Return the rule for values of a kind, if this one breaks it; else ""."""
    if kind is bool:
        return "" if value.lower() in _SWITCHES else "allowed are true and false"
    try:
        if kind in (int, float):
            kind(value)
    except ValueError:
        return "it takes a whole number" if kind is int else "it takes a number"
    return ""
