"""Select modules for a call of a prompt program, by its conditions, with their arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from trunkline.prompts.items import ArgumentSlot, Branches, Item, Nested, Program, Values


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
        Exception: whatever a condition or an argument raises.
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
