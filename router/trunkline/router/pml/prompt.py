"""Resolve a prompt against its schema: find its modules and arguments, and the places of its own texts.

Texts. In each body (the prompt itself, or the content of an import) the text between two imports is one *insert*.
Roles are not bodies; text that the template writes around them belongs to the insert. An insert goes

    after imports            to the end of the one that is last in the schema, whatever their order in the prompt;
    before the first import  to the end of the text selected before the following import that is first in the
                             schema, but not before the beginning of the module around;
    into an import without   after the text selected in that module;
    imports of its own
    after the prompt's       to the schema's extent, or right after the last selected token (`trailing`).
    last import, or alone

An insert must end before the next selected token and within the extent. If two inserts begin at the same position
(the text in an import and the text after it), the one that is first in the schema's order comes first. Imports
before a text must also be before the imports after it in the schema (E_ORDER); other imports may come in any
order.

Unions. A union's default is selected if its module is and no member is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple, TypeAlias

from trunkline.router.pml.compiled import CompiledModule, CompiledSchema
from trunkline.router.pml.pml_error import ErrorCode, Mark, PmlError
from trunkline.router.pml.tree import PromptDocument, PromptItem, Ref, Text, Turn, join_path
from trunkline.router.pml.validation import likely, short

LAST_RANK: Final = 1 << 62
"""Rank of inserts that come after everything in a schema."""


class PromptPlace(Enum):
    """The place of an insert relative to a module."""

    BEFORE = 0
    BEHIND = 1
    END_OF = 2
    """The insert goes into the module, after the module's selected text."""
    TRAILING = 3


@dataclass(frozen=True, slots=True)
class Atom:
    """A part of an insert: a text, or the place of text that the template writes before or after a role's
    content."""

    kind: AtomKind
    text: str
    turn: int
    """Index in `Resolved.turns` of the role that the atom belongs to; -1: none."""
    mark: Mark | None
    is_first: bool = False
    """Whether the atom begins the role's content, where the template may trim white space."""
    is_last: bool = False
    """Whether the atom ends the role's content, where the template may trim white space."""


class AtomKind(Enum):
    """The kind of an `Atom`."""

    TEXT = 0
    PREFIX = 1
    SUFFIX = 2


@dataclass(frozen=True, slots=True)
class Insert:
    """Text of a prompt between two imports, and the place where it goes."""

    place: PromptPlace
    module: int
    """Index of the module that `place` is relative to."""
    body: int
    """Index of the module whose import encloses the insert in the prompt; 0: none, the prompt itself does."""
    rank: int
    """Number by which inserts are ordered among each other and among the schema's events, whose ranks are twice
    their numbers."""
    atoms: tuple[Atom, ...]


class Argument(NamedTuple):
    """A parameter's value in a prompt."""

    text: str
    mark: Mark | None


@dataclass(frozen=True, slots=True)
class Resolved:
    """A prompt whose names are resolved against its schema."""

    args: Mapping[int, Mapping[str, Argument]]
    """Arguments of each selected module, including the schema itself, in document order."""
    inserts: tuple[Insert, ...]
    """Inserts by rank."""
    turns: tuple[Turn, ...]
    """Roles that the prompt adds, in the prompt's order."""


_Step: TypeAlias = Atom | Ref


def resolve(schema: CompiledSchema, document: PromptDocument) -> Resolved:
    """Resolve all names in a prompt.

    Raises:
        PmlError: E_SCHEMA_UNKNOWN, E_MODULE_UNKNOWN, E_DUP_IMPORT, E_UNION_CONFLICT, E_ARG_UNKNOWN, E_ARG_MISSING,
            E_ORDER, E_ROLE_ORDER.
    """
    if document.schema != schema.name:
        message = f'the prompt is for the schema "{document.schema}", and this one is "{schema.name}"'
        raise PmlError(ErrorCode.SCHEMA_UNKNOWN, message, document.mark)
    resolver = _Resolver(schema)
    resolver.body(document.items, 0)
    args = resolver.args
    pending = list(args)
    while pending:
        for union in schema.modules[pending.pop()].unions:
            if union.default >= 0 and args.keys().isdisjoint(union.members):
                args[union.default] = {}
                pending.append(union.default)
    for index in args:
        _check_required(schema.modules[index], args[index], resolver.marks.get(index, document.mark))
    ordered = {index: args[index] for index in sorted(args)}
    inserts = sorted(resolver.inserts, key=lambda insert: insert.rank)
    return Resolved(ordered, tuple(inserts), tuple(resolver.turns))


def _check_required(module: CompiledModule, args: Mapping[str, Argument], mark: Mark | None) -> None:
    for param in module.params:
        if param.required and param.name not in args:
            message = f'the module "{module.path}" needs an argument for "{param.name}"; give it one'
            raise PmlError(ErrorCode.ARG_MISSING, message, mark, module.path)


class _Resolver:
    """One walk through a prompt."""

    def __init__(self, schema: CompiledSchema) -> None:
        self.args: dict[int, dict[str, Argument]] = {0: {}}
        self.marks: dict[int, Mark | None] = {}
        """Place of each module's import."""
        self.inserts: list[Insert] = []
        self.turns: list[Turn] = []
        self._modules = schema.modules

    def body(self, items: Sequence[PromptItem], around: int, in_role: bool = False) -> None:
        """Resolve the prompt itself (`around` 0) or the content of a module's import."""
        steps = list(self._flatten(items, in_role))
        found = [self._import(step[0], around, step[1]) for step in steps if isinstance(step[0], Ref)]
        self._check_unions(found)
        atoms: list[Atom] = []
        done = 0
        for step, _ in steps:
            if isinstance(step, Atom):
                atoms.append(step)
                continue
            if atoms:
                self._insert(atoms, around, found[:done], found[done:])
                atoms = []
            done += 1
        if atoms:
            self._insert(atoms, around, found, [])

    def _flatten(self, items: Sequence[PromptItem], in_role: bool) -> Iterator[tuple[_Step, bool]]:
        """Yield, in the prompt's order, an atom for each text, each import, and for each role an atom before and
        (unless the role is open) one after its content. The flag says whether the step belongs to a role; the
        atoms around a role do."""
        for item in items:
            match item:
                case Text():
                    yield Atom(AtomKind.TEXT, item.text, -1, item.mark), in_role
                case Ref():
                    yield item, in_role
                case Turn():
                    yield from self._turn(item)

    def _turn(self, turn: Turn) -> Iterator[tuple[_Step, bool]]:
        number = len(self.turns)
        self.turns.append(turn)
        yield Atom(AtomKind.PREFIX, "", number, turn.mark), True
        last = len(turn.items) - 1
        for place, item in enumerate(turn.items):
            if isinstance(item, Text):
                yield Atom(AtomKind.TEXT, item.text, number, item.mark, place == 0, place == last), True
            elif isinstance(item, Ref):  # roles do not stand in roles
                yield item, True
        if not turn.open:
            yield Atom(AtomKind.SUFFIX, "", number, turn.mark), True

    def _import(self, ref: Ref, around: int, in_role: bool) -> int:
        outer = self._modules[around]
        path = join_path(outer.path, ref.name)
        index = outer.children.get(ref.name)
        if index is None:
            where = f'the module "{outer.path}"' if outer.path else "the schema"
            message = f'{where} has no module "{short(ref.name)}"{likely(ref.name, outer.children)}'
            raise PmlError(ErrorCode.MODULE_UNKNOWN, message, ref.mark, path)
        if index in self.args:
            message = f'the module "{path}" is imported twice; import it once, with all that belongs to it'
            raise PmlError(ErrorCode.DUP_IMPORT, message, ref.mark, path)
        module = self._modules[index]
        known = {param.name for param in module.params}
        for name, _ in ref.args:
            if name not in known:
                message = f'the module "{path}" has no parameter "{short(name)}"{likely(name, known)}'
                raise PmlError(ErrorCode.ARG_UNKNOWN, message, ref.mark, path)
        if in_role and module.roles:
            message = f'the module "{path}" brings a role of its own and cannot be imported in another one'
            raise PmlError(ErrorCode.ROLE_ORDER, message, ref.mark, path)
        self.args[index] = {name: Argument(value, ref.mark) for name, value in ref.args}
        self.marks[index] = ref.mark
        self.body(ref.items, index, in_role)
        return index

    def _check_unions(self, found: Sequence[int]) -> None:
        chosen: dict[int, str] = {}
        for index in found:
            module = self._modules[index]
            if module.union < 0:
                continue
            other = chosen.setdefault(module.union, module.path)
            if other != module.path:
                message = f'"{other}" and "{module.path}" are of one union; import only one of them'
                raise PmlError(ErrorCode.UNION_CONFLICT, message, self.marks[index], module.path)

    def _insert(self, atoms: list[Atom], around: int, before: Sequence[int], behind: Sequence[int]) -> None:
        last = max(before, default=-1)  # indexes are in document order
        first = min(behind, default=-1)
        if before and behind and last > first:
            names = f'"{self._modules[last].path}" and "{self._modules[first].path}"'
            message = f"{names} are the other way round in the schema; with text between them, keep to its order"
            raise PmlError(ErrorCode.ORDER, message, self.marks[first], self._modules[first].path)
        if around == 0 and not behind:
            place, module, rank = PromptPlace.TRAILING, 0, LAST_RANK
        elif before:
            place, module, rank = PromptPlace.BEHIND, last, 2 * self._modules[last].exit + 1
        elif behind:
            place, module, rank = PromptPlace.BEFORE, first, 2 * self._modules[first].enter - 1
        else:
            place, module, rank = PromptPlace.END_OF, around, 2 * self._modules[around].exit - 1
        self.inserts.append(Insert(place, module, around, rank, tuple(atoms)))
