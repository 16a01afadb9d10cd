"""Compiled schemas and prompts as plain data: tokens, their positions, and which texts see which.

The functions at the end turn them into messages for controllers (`trunkline.controller.messages`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np

from trunkline.controller.messages import ModuleText, PromptLayout
from trunkline.kvstore.chunks import Int32Array, pack_int32
from trunkline.router.pml.pml_error import ErrorCode, Mark, PmlError
from trunkline.router.pml.roles import RoleForms

Scope: TypeAlias = Literal["ancestors", "self"]
Trailing: TypeAlias = Literal["fixed", "compact"]
Span: TypeAlias = tuple[int, int]
"""A range `[start, stop)` of tokens."""


SchemaPieceKind: TypeAlias = Literal["text", "role", "param"]


@dataclass(frozen=True, slots=True)
class SegmentPiece:
    """A part of a segment: a text, text that a chat template adds (or the BOS), or the place of a parameter."""

    kind: SchemaPieceKind
    position: int
    count: int
    """Number of tokens."""
    text: str
    """The text as it was written; for a parameter its name."""


@dataclass(frozen=True, slots=True, eq=False)
class ModuleSegment:
    """Consecutive texts and parameters of one module, up to the next module within it."""

    index: int
    """Index in `CompiledSchema.texts`; -1 if the module is not cached."""
    position: int
    tokens: Int32Array
    """Token ids, including placeholders of parameters."""
    pieces: tuple[SegmentPiece, ...]
    seen: tuple[Span, ...]
    """Ranges of `tokens` other than placeholders; ascending and not adjacent."""

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.position + len(self.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class CompiledText:
    """A segment whose KV is computed once for all prompts. It sees `parent` and everything that `parent` sees."""

    module: int
    """Index in `CompiledSchema.modules`."""
    segment: ModuleSegment
    parent: int
    """Index of the parent in `CompiledSchema.texts`, smaller than the text's own; -1: the text sees only
    itself."""
    scaffold: str = ""
    """Name of the first scaffold that needs this version of the text; "": the version of the module itself."""

    @property
    def position(self) -> int:
        """Position of the first token."""
        return self.segment.position

    @property
    def tokens(self) -> Int32Array:
        """Token ids, including placeholders."""
        return self.segment.tokens


@dataclass(frozen=True, slots=True)
class ParamSlot:
    """The place of a parameter in a module."""

    name: str
    position: int
    length: int
    required: bool
    default: str | None
    default_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RoleSlot:
    """A message that a schema contains."""

    event: int
    """Number of the event of entering the role, in document order. Roles and modules are counted together
    (`CompiledModule.enter`)."""
    role: str
    suffix: str
    """Text that the template writes after the message."""
    open: bool
    """Whether the message is open, so that the suffix is still missing."""


@dataclass(frozen=True, slots=True)
class UnionSlot:
    """A union within a module."""

    members: tuple[int, ...]
    default: int
    """Index of the module that is selected if no member of the union is imported; -1: none."""


@dataclass(frozen=True, slots=True, eq=False)
class CompiledModule:
    """A module, laid out. Module 0 is the schema itself with its anonymous texts; its path is ""."""

    path: str
    parent: int
    """Index of the module around this one; -1 for the schema itself."""
    start: int
    length: int
    """Number of positions, including nested modules."""
    cached: bool
    params: tuple[ParamSlot, ...]
    segments: tuple[ModuleSegment, ...]
    children: Mapping[str, int]
    """Indexes of the nested modules by name, including members of unions."""
    unions: tuple[UnionSlot, ...]
    union: int
    """Index in the parent's `unions` of the union that has this module; -1: none."""
    roles: tuple[RoleSlot, ...]
    enter: int
    """Number of the event of entering the module, in document order."""
    exit: int
    """Number of the event of leaving the module, in document order."""
    mark: Mark | None

    @property
    def end(self) -> int:
        """Position after the module."""
        return self.start + self.length

    @property
    def texts(self) -> tuple[int, ...]:
        """Indexes of the module's own texts in `CompiledSchema.texts`; empty if it is not cached."""
        return tuple(segment.index for segment in self.segments if segment.index >= 0)

    @property
    def tokens(self) -> int:
        """Number of tokens in the module's own texts, including placeholders, without nested modules."""
        return sum(len(segment.tokens) for segment in self.segments)


@dataclass(frozen=True, slots=True, eq=False)
class CompiledScaffold:
    """Versions of texts that replace the modules' own texts if a prompt imports all members of the scaffold."""

    name: str
    members: frozenset[int]
    """Indexes of the scaffold's modules."""
    tokens: int
    """Number of tokens in the members' own texts."""
    member_texts: Mapping[int, int]
    """By text of a member: the version that replaces it, which sees all earlier members and their ancestors. Keys
    and values are indexes in `CompiledSchema.texts`."""
    ancestor_texts: Mapping[int, int]
    """By text of a member's ancestor: the version that replaces it in this scaffold. Texts that keep their own
    version are left out. Keys and values are indexes in `CompiledSchema.texts`."""


@dataclass(frozen=True, slots=True, eq=False)
class CompiledSchema:
    """A schema, laid out for one model."""

    name: str
    revision: str
    scope: Scope
    extent: int
    """Number of positions; a prompt's trailing text begins there."""
    texts: tuple[CompiledText, ...]
    """Texts of modules in document order, then versions for scaffolds. Parents come first."""
    modules: tuple[CompiledModule, ...]
    """Modules in document order; the schema itself is the first."""
    scaffolds: tuple[CompiledScaffold, ...]
    by_path: Mapping[str, int]
    """Indexes of modules by path."""
    forms: RoleForms
    """Text that the model's chat template writes around messages."""

    def with_parents(self, indexes: Iterable[int]) -> list[int]:
        """Return the indexes of some texts and of all texts that they see, parents first."""
        needed = set(indexes)
        for index in list(needed):
            parent = self.texts[index].parent
            while parent >= 0 and parent not in needed:
                needed.add(parent)
                parent = self.texts[parent].parent
        return sorted(needed)

    def module(self, path: str) -> CompiledModule | None:
        """Return the module with a path ("": the schema itself); None if there is none."""
        index = self.by_path.get(path)
        return None if index is None else self.modules[index]


@dataclass(frozen=True, slots=True, eq=False)
class PlacedText:
    """A cached text in a prompt."""

    index: int
    """Index in `CompiledSchema.texts`."""
    path: str
    """Path of the text's module."""
    position: int
    tokens: Int32Array
    parent: int
    """Index of the parent in `CompiledPrompt.texts`, smaller than the text's own; -1: there is no parent."""
    seen: tuple[Span, ...]
    """Ranges of `tokens` that the request sees; empty if the text is only an ancestor of other texts."""


PieceKind: TypeAlias = Literal["text", "role", "argument", "hole", "gap", "trailing"]


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """A part of a prompt, as the dashboard shows it."""

    kind: PieceKind
    """"text": text of a module or of the schema; "role": text of the chat template; "argument"; "hole": positions
    of a parameter that its argument leaves empty; "gap": text between modules; "trailing": text after all
    modules."""
    path: str
    """Path of the module that has the piece."""
    position: int
    count: int
    text: str
    """The text; for a hole the name of its parameter; "" for the last token of a longer text, which is
    computed."""
    cached: bool


@dataclass(frozen=True, slots=True, eq=False)
class CompiledPrompt:
    """A prompt, laid out: cached texts, and the request's own tokens between and after them."""

    schema: str
    texts: tuple[PlacedText, ...]
    own: Int32Array
    """Tokens that the request computes itself, by ascending position."""
    runs: tuple[tuple[int, int], ...]
    """Ranges of consecutive positions of `own`, each as its first position and its number of tokens."""
    pieces: tuple[PromptPiece, ...]
    """All pieces of the prompt, by ascending position."""
    modules: tuple[int, ...]
    """Indexes of the selected modules in document order, including the schema itself."""
    messages_from: int
    """Index in `own` of the first token of `messages` and of the generation prompt."""

    @property
    def module_tokens(self) -> int:
        """Number of tokens of cached texts that the request sees."""
        return sum(stop - start for text in self.texts for start, stop in text.seen)

    @property
    def prompt_tokens(self) -> int:
        """Number of all tokens that the answer sees."""
        return self.module_tokens + len(self.own)

    @property
    def end(self) -> int:
        """Position of the answer's first token."""
        position, count = self.runs[-1]
        return position + count


ENCODE_TOKENS_MAX: Final = 1 << 20
"""Largest number of tokens that are computed in one call."""
TEXT_TOKENS_MIN: Final = 64
"""Number of tokens as which a shorter text counts: each text takes a row of a step and a block."""


def texts_message(schema: CompiledSchema) -> list[ModuleText]:
    """Return all texts of a schema, including versions for scaffolds, in the order of `schema.texts`."""
    return [ModuleText(pack_int32(text.tokens), text.position, text.parent) for text in schema.texts]


def check_encoding(schema: CompiledSchema) -> None:
    """Refuse to compute a schema in one call if no client would wait that long.

    Raises:
        PmlError: E_SCHEMA_TOO_LONG, with the numbers (`got`, `limit`).
    """
    work = sum(max(len(text.tokens), TEXT_TOKENS_MIN) for text in schema.texts)
    if work > ENCODE_TOKENS_MAX:
        count, scaffolds = len(schema.texts), len(schema.scaffolds)
        message = (
            f"its {count} texts (of modules, and once more of {scaffolds} scaffolds) are work for {work} tokens, "
            f"each counted as {TEXT_TOKENS_MIN} at least; {ENCODE_TOKENS_MAX} are allowed in one call. Use fewer "
            'or smaller scaffolds, or several schemas; or send `"warm": false`: requests compute what they need'
        )
        raise PmlError(ErrorCode.SCHEMA_TOO_LONG, message, extra={"got": work, "limit": ENCODE_TOKENS_MAX})


def to_layout(prompt: CompiledPrompt, ttl: float = 0.0) -> PromptLayout:
    """Return the layout of a prompt (`Submit.layout`); `Submit.tokens` are `prompt.own`.

    `ttl`: seconds for which the texts are kept; 0: as the controller is set.
    """
    texts = [
        ModuleText(pack_int32(text.tokens), text.position, text.parent, _pack_spans(text.seen))
        for text in prompt.texts
    ]
    return PromptLayout(texts, _pack_spans(prompt.runs), ttl)


def hint_layout(schema: CompiledSchema, indexes: Iterable[int]) -> PromptLayout:
    """Return the layout of some texts of a schema (`likely_texts`) and their ancestors, for a `Prefetch`."""
    wanted = set(indexes)
    order = schema.with_parents(wanted)
    places = {index: place for place, index in enumerate(order)}
    texts = []
    for index in order:
        text = schema.texts[index]
        seen = _pack_spans(text.segment.seen) if index in wanted else b""
        parent = places[text.parent] if text.parent >= 0 else -1
        texts.append(ModuleText(pack_int32(text.tokens), text.position, parent, seen))
    return PromptLayout(texts, b"")


def _pack_spans(spans: tuple[Span, ...]) -> bytes:
    return pack_int32(np.array(spans, dtype=np.int32).reshape(-1))
