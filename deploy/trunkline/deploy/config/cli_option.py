"""A command-line option, and what one is for a field of the settings (the table is `options.py`)."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Final, get_type_hints

from trunkline.deploy.config.node_settings import NodeSettings
from trunkline.deploy.config.settings import ServeSettings

MODEL: Final = "Model"
CLUSTER: Final = "Cluster"
MEMORY: Final = "Memory for the KV cache"
SERVER: Final = "Server and API keys"
NODE: Final = "This part of the cluster"
TUNING: Final = "Rarely needed: scheduling"
OPERATION: Final = "Rarely needed: operation"
SWITCHES: Final = "Rarely needed: switches"

Scalar = str | int | float | bool
"""The value of an option, as a file gives it."""


@dataclass(frozen=True)
class CliOption:
    """The command-line option for a field of the settings."""

    field: str
    help: str
    panel: str
    name: str = ""
    """The parameter's name where it differs from the field's."""
    flags: tuple[str, ...] = ()
    """The flags, such as `--on/--off`, if they do not follow from the parameter's name."""
    metavar: str | None = None
    parse: Callable[[str], Any] | None = None
    """Function that returns the value of a typed text, or raises `UserError`; None: the text is converted to the
    field's type."""
    is_argument: bool = False
    variable: str | None = None
    """An environment variable that can also give the value, because other users must not see it on a command
    line."""

    @property
    def parameter(self) -> str:
        """The name of the command's parameter."""
        return self.name or self.field

    @property
    def flag(self) -> str:
        """The flag, and behind a slash the one that turns a switch off."""
        return self.flags[0] if self.flags else f"--{self.parameter.replace('_', '-')}"

    @property
    def kind(self) -> type:
        """The type of a typed value: `int` for a field of `int | None`, `str` for a text that is parsed."""
        found = FIELD_TYPES[self.field]
        if self.parse is not None:
            return str
        if isinstance(found, types.UnionType):
            found = next(each for each in typing.get_args(found) if each is not type(None))
        return found if isinstance(found, type) else str

    def words(self, value: Scalar) -> list[str]:
        """Return the words of a command line that give the option this value.

        Raises:
            ValueError: The option cannot have this value.
        """
        flag, _, off = self.flag.partition("/")
        if self.kind is bool:
            if not isinstance(value, bool):
                raise ValueError(f"is {value!r}; allowed are true and false")
            return [flag] if value else [off] if off else []
        if isinstance(value, bool):
            raise ValueError(f"is {str(value).lower()}, but takes a value")
        if self.kind is int and not isinstance(value, int):
            raise ValueError(f"is {value!r}; it takes a whole number")
        if self.kind is float and isinstance(value, str):
            raise ValueError(f"is {value!r}; it takes a number")
        text = str(value)
        if "\0" in text:
            raise ValueError("has a zero byte in it")
        return [f"{flag}={text}"]


FIELD_TYPES: Final = {**get_type_hints(ServeSettings), **get_type_hints(NodeSettings)}
"""The types of the settings' fields."""
FIELD_DEFAULTS: Final = {
    field.name: field.default for record in (ServeSettings, NodeSettings) for field in fields(record)
}
"""The defaults of the settings' fields."""
