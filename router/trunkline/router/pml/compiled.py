"""What schemas and prompts are compiled to: tokens, positions, and who sees whom. Plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from trunkline.kvstore.int32_codec import Int32Array
from trunkline.router.pml.pml_error import Mark
from trunkline.router.pml.roles import RoleForms

Scope: TypeAlias = Literal["ancestors", "self"]
Trailing: TypeAlias = Literal["fixed", "compact"]
Span: TypeAlias = tuple[int, int]
"""`[start, stop)`."""


SchemaPieceKind: TypeAlias = Literal["text", "role", "param"]


@dataclass(frozen=True, slots=True)
class SegmentPiece:
    """A part of a segment: a text, what a template writes around it (and the BOS), or a parameter's place."""

    kind: SchemaPieceKind
    position: int
    count: int
    """Tokens."""
    text: str
    """As written; of a parameter its name."""


@dataclass(frozen=True, slots=True, eq=False)
class ModuleSegment:
    """A longest run of texts and parameters of one module, with no other module in between."""

    index: int
    """In `CompiledSchema.texts`; -1: its module is not cached."""
    position: int
    tokens: Int32Array
    """Parameters' placeholders included."""
    pieces: tuple[SegmentPiece, ...]
    seen: tuple[Span, ...]
    """Ranges of `tokens` that are no placeholders; ascending, not touching."""

    @property
    def end(self) -> int:
        """The position behind it."""
        return self.position + len(self.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class CompiledText:
    """A segment as it is computed once for all prompts: it sees `parent` and all that `parent` sees."""

    module: int
    """In `CompiledSchema.modules`."""
    segment: ModuleSegment
    parent: int
    """In `CompiledSchema.texts`, smaller than its own index; -1: it sees only itself."""
    scaffold: str = ""
    """The first scaffold it was made for; "": its module's own version."""

    @property
    def position(self) -> int:
        """Of its first token."""
        return self.segment.position

    @property
    def tokens(self) -> Int32Array:
        """Placeholders included."""
        return self.segment.tokens


@dataclass(frozen=True, slots=True)
class ParamSlot:
    """A parameter's place."""

    name: str
    position: int
    length: int
    required: bool
    default: str | None
    default_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RoleSlot:
    """A message that a schema brings."""

    event: int
    role: str
    suffix: str
    """What the template writes behind it."""
    open: bool
    """The suffix is not there yet."""


@dataclass(frozen=True, slots=True)
class UnionSlot:
    """A union among a module's parts."""

    members: tuple[int, ...]
    default: int
    """-1: none."""


@dataclass(frozen=True, slots=True, eq=False)
class CompiledModule:
    """A module's place. Number 0 is the schema itself, with its anonymous texts, under the path ""."""

    path: str
    parent: int
    """-1: of the schema itself."""
    start: int
    length: int
    """Positions, those of nested modules included."""
    cached: bool
    params: tuple[ParamSlot, ...]
    segments: tuple[ModuleSegment, ...]
    children: Mapping[str, int]
    """Nested modules by name, unions' members included."""
    unions: tuple[UnionSlot, ...]
    union: int
    """Its own, in its parent's `unions`; -1: it is in none."""
    roles: tuple[RoleSlot, ...]
    enter: int
    """Number of the event of walking into it in document order, …"""
    exit: int
    """… and out."""
    mark: Mark | None

    @property
    def end(self) -> int:
        """The position behind it."""
        return self.start + self.length

    @property
    def texts(self) -> tuple[int, ...]:
        """Its own, without nested modules', in `CompiledSchema.texts`; empty if it is not cached."""
        return tuple(segment.index for segment in self.segments if segment.index >= 0)

    @property
    def tokens(self) -> int:
        """Of its own texts, placeholders included, without nested modules'."""
        return sum(len(segment.tokens) for segment in self.segments)


@dataclass(frozen=True, slots=True, eq=False)
class CompiledScaffold:
    """Texts that replace modules' own versions if a prompt has all members."""

    name: str
    members: frozenset[int]
    """Modules."""
    tokens: int
    """Of the members' own texts."""
    member_texts: Mapping[int, int]
    """A member's text → the version of it in which it sees the members and their ancestors before it; …"""
    ancestor_texts: Mapping[int, int]
    """… and those of ancestors, where the version is not the text itself."""


@dataclass(frozen=True, slots=True, eq=False)
class CompiledSchema:
    """A schema laid out for one model."""

    name: str
    revision: str
    scope: Scope
    extent: int
    """Positions that it takes; a prompt's trailing text begins there."""
    texts: tuple[CompiledText, ...]
    """First the modules' own, in document order, then scaffolds' versions; parents come first."""
    modules: tuple[CompiledModule, ...]
    """In document order; the schema itself is the first."""
    scaffolds: tuple[CompiledScaffold, ...]
    by_path: Mapping[str, int]
    """Modules."""
    forms: RoleForms
    """What the model's chat template writes."""

    def with_parents(self, indexes: Iterable[int]) -> list[int]:
        """These texts and all those behind which they were computed, parents first."""
        needed = set(indexes)
        for index in list(needed):
            parent = self.texts[index].parent
            while parent >= 0 and parent not in needed:
                needed.add(parent)
                parent = self.texts[parent].parent
        return sorted(needed)

    def module(self, path: str) -> CompiledModule | None:
        """The module of that path ("": the schema itself)."""
        index = self.by_path.get(path)
        return None if index is None else self.modules[index]


@dataclass(frozen=True, slots=True, eq=False)
class PlacedText:
    """A cached text in a prompt."""

    index: int
    """In `CompiledSchema.texts`."""
    path: str
    """Of its module."""
    position: int
    tokens: Int32Array
    parent: int
    """In `CompiledPrompt.texts`, smaller than its own; -1: none."""
    seen: tuple[Span, ...]
    """Ranges of `tokens` that the request sees; empty: it is there only because others were computed behind it."""


PieceKind: TypeAlias = Literal["text", "role", "argument", "hole", "gap", "trailing"]


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """A part of a prompt, to be shown to people."""

    kind: PieceKind
    """"text": of a module or of the schema; "role": what the chat template writes; "argument"; "hole": what an
    argument leaves of its parameter's place; "gap": text between modules; "trailing": text behind them."""
    path: str
    """Of the module that it is in."""
    position: int
    count: int
    text: str
    """A hole's is its parameter's name. A longer text's last token, computed anew, is one without text."""
    cached: bool


@dataclass(frozen=True, slots=True, eq=False)
class CompiledPrompt:
    """A prompt laid out: cached texts, and the request's own tokens around them."""

    schema: str
    texts: tuple[PlacedText, ...]
    own: Int32Array
    """Tokens to compute, in ascending position."""
    runs: tuple[tuple[int, int], ...]
    """Position and count of `own`'s runs of consecutive positions."""
    pieces: tuple[PromptPiece, ...]
    """In ascending position."""
    modules: tuple[int, ...]
    """Selected modules in document order, the schema itself included."""
    messages_from: int
    """Index in `own` from which on it is what `messages` and the generation prompt brought."""

    @property
    def module_tokens(self) -> int:
        """Tokens of cached texts that the request sees."""
        return sum(stop - start for text in self.texts for start, stop in text.seen)

    @property
    def prompt_tokens(self) -> int:
        """All tokens that the answer sees."""
        return self.module_tokens + len(self.own)

    @property
    def end(self) -> int:
        """Position of the answer's first token."""
        position, count = self.runs[-1]
        return position + count
