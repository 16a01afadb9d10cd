"""Schemas and prompts as trees, into which both written forms (XML and JSON) are parsed.

Texts are final: white space is normalised, no text is empty, and no two texts are adjacent. Two trees are equal if
they mean the same; places in the document (`mark`) are not compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from trunkline.router.pml.pml_error import Mark

NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
ROLES: Final = ("system", "user", "assistant")
TAGS: Final = frozenset({"schema", "module", "union", "param", "parameter", "scaffold", "prompt", *ROLES})
"""Names of elements, which modules and parameters cannot have."""

SOURCE_BYTES_MAX: Final = 8 << 20
DEPTH_MAX: Final = 32
"""Deepest nesting of elements, including the root."""
NODES_MAX: Final = 65_536
"""Largest number of elements and texts of one document."""
NAME_CHARACTERS_MAX: Final = 256
MODULE_PATH_CHARACTERS_MAX: Final = 1024
"""Largest length of a module's path. A path repeats the names around the module, so without a limit a small
document would have gigabytes of paths."""

RoleName: TypeAlias = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class Text:
    """A literal text, tokenised on its own."""

    text: str
    mark: Mark | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter: a place for an argument (Prompt Cache §3.2.2)."""

    name: str
    length: int
    """Largest number of tokens of an argument."""
    default: str | None = None
    """Argument that is used if a prompt gives none; None: the parameter has no default."""
    fill: str | None = None
    """Text that is repeated in the parameter's place while the module's KV is computed; None: the tokenizer's
    placeholder."""
    required: bool = False
    mark: Mark | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Module:
    """A part of a schema that prompts import by name (§3.2.1)."""

    name: str
    items: tuple[Item, ...] = ()
    cache: bool = True
    """Whether the module's KV is computed once. False: it is computed for each request and sees everything
    before."""
    mark: Mark | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Union:
    """Modules of which a prompt has at most one; all begin at the same position (§3.2.3)."""

    members: tuple[Module, ...]
    default: str | None = None
    """Name of the member that a prompt has if it imports none; None: the prompt has no member."""
    mark: Mark | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class RoleItem:
    """A message in the model's own form (§3.2.3). Names in it belong to the module around it."""

    role: RoleName
    items: tuple[Item, ...] = ()
    open: bool = False
    """Whether the message goes on with what follows in the prompt."""
    mark: Mark | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Scaffold:
    """Modules that see each other if a prompt imports all of them (§3.3)."""

    name: str
    modules: tuple[str, ...]
    """Paths of the scaffold's modules."""
    mark: Mark | None = field(default=None, compare=False, repr=False)


Item: TypeAlias = Text | Param | Module | Union | RoleItem


@dataclass(frozen=True, slots=True)
class SchemaDocument:
    """A whole schema."""

    name: str
    items: tuple[Item, ...] = ()
    scaffolds: tuple[Scaffold, ...] = ()
    mark: Mark | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Ref:
    """A prompt's import of a module, with the content that it adds to the module."""

    name: str
    args: tuple[tuple[str, str], ...] = ()
    items: tuple[PromptItem, ...] = ()
    mark: Mark | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Turn:
    """A message that a prompt adds."""

    role: RoleName
    items: tuple[PromptItem, ...] = ()
    open: bool = False
    """Whether the model's answer continues the message."""
    mark: Mark | None = field(default=None, compare=False, repr=False)


PromptItem: TypeAlias = Text | Ref | Turn


@dataclass(frozen=True, slots=True)
class PromptDocument:
    """A prompt derived from a schema, or from several."""

    schema: str
    """Names of the schemas, with a blank between two."""
    items: tuple[PromptItem, ...] = ()
    mark: Mark | None = field(default=None, compare=False, repr=False)

    @property
    def schemas(self) -> list[str]:
        """Names of the schemas, in the order in which they lie behind each other."""
        return self.schema.split()


def join_path(parent: str, name: str) -> str:
    """Return the path of a module within another one ("": the schema itself)."""
    return f"{parent}/{name}" if parent else name


def modules_below(items: Sequence[Item], parent: str = "") -> Iterator[tuple[str, Module]]:
    """Yield all modules with their paths, in document order."""
    for item in items:
        match item:
            case Module():
                path = join_path(parent, item.name)
                yield path, item
                yield from modules_below(item.items, path)
            case Union():
                yield from modules_below(item.members, parent)
            case RoleItem():
                yield from modules_below(item.items, parent)
            case _:
                pass
