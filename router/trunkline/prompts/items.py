"""What a prompt program is compiled to: the items of a module, and what decides about them when it is called.

    program  = name, role, items
    item     = text | Slot | Branches | Nested
    Slot     -> <param>                  an argument's place
    Branches -> <module> or <union>      `if`, `if`/`else`, `match`
    Nested   -> <module>                 call of another program, which holds that one's items

Everything here is fixed when the function is decorated, but for the two functions that evaluate conditions and
arguments: these take the values of a call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Role: TypeAlias = Literal["system", "user", "assistant"]
Values: TypeAlias = Mapping[str, Any]
"""Of a call's parameters, by name."""


@dataclass(frozen=True)
class MaxTokens:
    """Makes an argument a parameter of the schema: `city: Annotated[str, MaxTokens(8)]`.

    Its place in the layout is that long whatever is given, so that what stands behind it keeps its position
    (Prompt Cache §3.3); a longer argument is refused by the server.
    """

    count: int
    fill: str | None = None
    """What stands there while the module's KV is computed; None: the model's token for the unknown."""

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 1:
            raise ValueError(f"MaxTokens({self.count!r}): give a whole number of tokens, 1 or more")


@dataclass(frozen=True)
class ArgumentSlot:
    """A place in the text where an argument goes."""

    argument: str
    """The function's parameter."""
    name: str
    """The schema's: the same unless the argument stands at several places of the module."""
    limit: MaxTokens
    default: str | None
    """What the schema says it is if a prompt does not give it; None: it has to."""


@dataclass(frozen=True)
class ProgramModule:
    """A branch."""

    name: str
    items: tuple[Item, ...]


@dataclass(frozen=True)
class Branches:
    """Modules of which a call selects one at most."""

    members: tuple[ProgramModule | None, ...]
    """One per branch of the program, in its order. None: the branch says nothing."""
    choose: Callable[[Values], int]
    """The branch that is taken; -1: none."""

    @property
    def modules(self) -> tuple[ProgramModule, ...]:
        """Those that say something."""
        return tuple(member for member in self.members if member is not None)


@dataclass(frozen=True)
class Nested:
    """Another program's module within this one's."""

    name: str
    program: Program
    bind: Callable[[Values], tuple[tuple[Any, ...], dict[str, Any]]]
    """Positional and named arguments of the call."""


Item: TypeAlias = str | ArgumentSlot | Branches | Nested


@dataclass(frozen=True, eq=False)
class Program:
    """A compiled function."""

    name: str
    """Of its module."""
    role: Role | None
    """The whole module is one message of this role."""
    signature: inspect.Signature
    limits: Mapping[str, MaxTokens]
    """The parameters that are text."""
    items: tuple[Item, ...] = field(repr=False)

    @property
    def has_roles(self) -> bool:
        """Whether it, or anything in it, is a role's message."""
        return self.role is not None or _has_roles(self.items)

    def values(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The parameters' values in a call with these arguments.

        Raises:
            TypeError: they do not fit the function, or what becomes text is neither text nor a whole number.
        """
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        for name in self.limits:
            value = bound.arguments[name]
            if isinstance(value, bool) or not isinstance(value, str | int):
                raise TypeError(
                    f"{self.name}({name}=…) becomes text, so it is str or int, not {type(value).__name__}"
                )
        return dict(bound.arguments)


def _has_roles(items: tuple[Item, ...]) -> bool:
    for item in items:
        if isinstance(item, Nested) and item.program.has_roles:
            return True
        if isinstance(item, Branches) and any(_has_roles(module.items) for module in item.modules):
            return True
    return False
