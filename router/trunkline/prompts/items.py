"""The items of a compiled prompt program (texts, parameters, branches, nested programs), and what a call selects.

    program  = name, role, items
    item     = text | ArgumentSlot | Branches | Nested
    ArgumentSlot -> <param>                  an argument's place
    Branches     -> <module> or <union>      `if`, `if`/`else`, `match`
    Nested       -> <module>                 call of another program; the module has its items

Items are fixed when the function is decorated. Their two functions that evaluate conditions and arguments get the
values of a call; `select` uses them to choose the call's modules.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Role: TypeAlias = Literal["system", "user", "assistant"]
Values: TypeAlias = Mapping[str, Any]
"""Values of a call's parameters by name."""


@dataclass(frozen=True)
class MaxTokens:
    """Makes an argument a parameter of the schema: `city: Annotated[str, MaxTokens(8)]`.

    The parameter always has `count` positions, so that the text after it keeps its position however long the
    argument is (Prompt Cache §3.3). The server refuses a longer argument.
    """

    count: int
    fill: str | None = None
    """Text that is repeated in the argument's place while the module's KV is computed; None: the unknown token."""

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 1:
            raise ValueError(f"MaxTokens({self.count!r}): give a whole number of tokens, 1 or more")


@dataclass(frozen=True)
class ArgumentSlot:
    """A place in the text for an argument."""

    argument: str
    """Name of the function's parameter that gives the argument."""
    name: str
    """Name of the schema's parameter: that of the function's parameter, unless the argument appears several times
    in the module."""
    limit: MaxTokens
    default: str | None
    """Default value of the schema's parameter; None: prompts must give the argument."""


@dataclass(frozen=True)
class ProgramModule:
    """A branch of a program, as a module."""

    name: str
    items: tuple[Item, ...]


@dataclass(frozen=True)
class Branches:
    """Modules of which a call selects at most one."""

    members: tuple[ProgramModule | None, ...]
    """The module of each branch of the program, in order; None for a branch without text."""
    choose: Callable[[Values], int]
    """Function that returns the index of the branch that is taken; -1 if no branch is."""

    @property
    def modules(self) -> tuple[ProgramModule, ...]:
        """Branches that have text."""
        return tuple(member for member in self.members if member is not None)


@dataclass(frozen=True)
class Nested:
    """The module of another program, called in this one."""

    name: str
    program: Program
    bind: Callable[[Values], tuple[tuple[Any, ...], dict[str, Any]]]
    """Function that returns the positional and named arguments of the call."""


Item: TypeAlias = str | ArgumentSlot | Branches | Nested


@dataclass(frozen=True, eq=False)
class Program:
    """A compiled function."""

    name: str
    """Name of its module."""
    role: Role | None
    """Role of the message that the whole module is; None: it is not a message."""
    signature: inspect.Signature
    limits: Mapping[str, MaxTokens]
    """Limits of the parameters that become text."""
    items: tuple[Item, ...] = field(repr=False)

    @property
    def has_roles(self) -> bool:
        """Whether the program, or a program in it, is a message with a role."""
        return self.role is not None or _has_roles(self.items)

    def values(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the values of the parameters in a call with these arguments.

        Raises:
            TypeError: The arguments do not fit the function, or one that becomes text is neither text nor a whole
                number.
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


@dataclass(frozen=True)
class ModuleSelection:
    """A selected module with its selected content."""

    name: str
    arguments: Mapping[str, str]
    """Arguments of the module's own parameters, by their names in the schema."""
    parts: tuple[Part, ...]
    """Texts (including arguments) and modules, in the order in which the model reads them."""

    @property
    def children(self) -> tuple[ModuleSelection, ...]:
        """Selected modules in this one."""
        return tuple(part for part in self.parts if isinstance(part, ModuleSelection))

    @property
    def text(self) -> str:
        """All text including that of nested modules, without text that the chat template adds around roles."""
        return "".join(part if isinstance(part, str) else part.text for part in self.parts)

    def walk(self, above: str = "") -> Iterator[tuple[str, ModuleSelection]]:
        """Yield this module and all modules in it with their paths, in document order."""
        path = f"{above}{self.name}"
        yield path, self
        for child in self.children:
            yield from child.walk(f"{path}/")


Part: TypeAlias = str | ModuleSelection


def select(name: str, program: Program, values: Values) -> ModuleSelection:
    """Return what a call of `program` with these values selects.

    Raises:
        Exception: A condition or an argument of a nested program failed with this exception.
    """
    return _module(name, program.items, values)


def _module(name: str, items: tuple[Item, ...], values: Values) -> ModuleSelection:
    arguments: dict[str, str] = {}
    parts: list[Part] = []
    for item in items:
        match item:
            case str():
                parts.append(item)
            case ArgumentSlot():
                arguments[item.name] = format(values[item.argument], "")
                parts.append(arguments[item.name])
            case Branches():
                taken = item.choose(values)
                member = item.members[taken] if taken >= 0 else None
                if member is not None:
                    parts.append(_module(member.name, member.items, values))
            case Nested():
                args, kwargs = item.bind(values)
                parts.append(select(item.name, item.program, item.program.values(*args, **kwargs)))
    return ModuleSelection(name, arguments, tuple(parts))
