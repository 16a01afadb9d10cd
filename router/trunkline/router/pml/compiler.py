"""Compile a prompt over its schema: choose what is reused and what is computed, and place both (Prompt Cache
§3.4).

The answer sees the *seen* ranges of cached texts (everything but placeholders) and the request's *own* tokens. Own
tokens are arguments, at the places of their parameters; texts of modules that are not cached; the prompt's own
texts (`prompt.py`); and, after everything else, chat messages and the generation prompt. A new token sees
everything at smaller positions. The last token of the prompt must be computed, because the answer's first token
comes from it. If it belongs to a cached text, it is removed from that text's seen range and becomes one of the
request's own tokens.

The generation prompt (`add_generation_prompt`) is written only if there is a role or a message. If the last role
is open, it is closed first, except for an assistant's, which the answer continues.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from trunkline.router.pml.compiled import (
    CompiledModule,
    CompiledPrompt,
    CompiledSchema,
    ModuleSegment,
    PieceKind,
    PlacedText,
    PromptPiece,
    SegmentPiece,
    Span,
    Trailing,
)
from trunkline.router.pml.layout import choose_versions
from trunkline.router.pml.pml_error import ErrorCode, PmlError
from trunkline.router.pml.prompt import Argument, Atom, AtomKind, Insert, PromptPlace, Resolved, resolve
from trunkline.router.pml.roles import PmlTokenizer, without_common
from trunkline.router.pml.tree import PromptDocument, Turn


class _Own(NamedTuple):
    """Tokens that the request computes itself, at successive positions."""

    position: int
    ids: Sequence[int]
    kind: PieceKind
    path: str
    text: str


def compile_prompt(
    schema: CompiledSchema,
    document: PromptDocument,
    tokenizer: PmlTokenizer,
    *,
    context: int,
    trailing: Trailing = "fixed",
    messages: Sequence[dict[str, str]] | None = None,
    add_generation_prompt: bool,
) -> CompiledPrompt:
    """Compile a prompt.

    Args:
        schema: The schema that the prompt names.
        document: The prompt, from `parse_prompt` or `prompt_from_json`.
        tokenizer: The tokenizer of the schema; extra variables of its template may differ.
        context: Positions of the model.
        trailing: Where text after the last import goes. "fixed": to the schema's extent; "compact": right after
            the last selected token.
        messages: Further messages (`role`, `content`) after everything else.
        add_generation_prompt: Whether the prompt ends where an answer begins.

    Raises:
        PmlError: With one of the codes from E_SCHEMA_UNKNOWN on, E_TEMPLATE or E_ROLE_ORDER.
    """
    resolved = resolve(schema, document)
    own = _OwnTokens(schema, resolved, tokenizer)
    own.modules()
    own.inserts(trailing, messages or (), add_generation_prompt)
    seen = {segment.index: segment.seen for segment in own.cached}
    if not own.parts and not _says_anything(schema, own.cached):
        message = "the prompt imports nothing and adds nothing; import a module or add a text"
        raise PmlError(ErrorCode.EMPTY, message, document.mark)
    taken = _take_last(own, seen)
    parts = sorted(own.parts, key=lambda part: part.position)
    end = parts[-1].position + len(parts[-1].ids)
    if end >= context:
        message = (
            f"the prompt reaches position {end}, and the model has {context}, of which one must be left for an "
            'answer; shorten it, or place its last text with trailing="compact"'
        )
        extra = {"context": context, "got": end}
        raise PmlError(ErrorCode.CONTEXT_LENGTH, message, document.mark, extra=extra)
    return CompiledPrompt(
        schema=schema.name,
        texts=_placed_texts(schema, resolved.args.keys(), seen),
        own=np.array([token for part in parts for token in part.ids], dtype=np.int32),
        runs=_runs(parts),
        pieces=_pieces(own, parts, taken),
        modules=tuple(resolved.args),
        messages_from=sum(len(part.ids) for part in own.parts) - own.tail_tokens,
    )


def _says_anything(schema: CompiledSchema, segments: Sequence[ModuleSegment]) -> bool:
    """Return whether there are tokens besides the BOS."""
    return sum(stop - start for segment in segments for start, stop in segment.seen) > len(schema.forms.bos)


def _uncached(segment: ModuleSegment, module: CompiledModule) -> Iterator[_Own]:
    for piece in segment.pieces:
        if piece.kind != "param":
            start = piece.position - segment.position
            ids = segment.tokens[start : start + piece.count].tolist()
            yield _Own(piece.position, ids, piece.kind, module.path, piece.text)


class _OwnTokens:
    """Collects the tokens that a request computes itself."""

    def __init__(self, schema: CompiledSchema, resolved: Resolved, tokenizer: PmlTokenizer) -> None:
        self._schema = schema
        self._resolved = resolved
        self._tokenizer = tokenizer
        self.selected: list[tuple[ModuleSegment, CompiledModule]] = sorted(
            (
                (segment, schema.modules[index])
                for index in resolved.args
                for segment in schema.modules[index].segments
            ),
            key=lambda pair: pair[0].position,
        )
        """Segments of all selected modules by position, each with its module."""
        self._starts = [segment.position for segment, _ in self.selected]
        self.cached = [segment for segment, _ in self.selected if segment.index >= 0]
        """The selected segments that are cached."""
        self.parts: list[_Own] = []
        self.tail_start = schema.extent
        """Position where the text after all modules begins."""
        self.tail_tokens = 0
        """Number of tokens of `messages` and the generation prompt."""

    def modules(self) -> None:
        """Add arguments, and texts of modules that are not cached.

        Raises:
            PmlError: E_ARG_TOO_LONG.
        """
        for segment, module in self.selected:
            if segment.index < 0:
                self.parts += _uncached(segment, module)
        for index, given in self._resolved.args.items():
            module = self._schema.modules[index]
            if module.params:
                self.parts += self._arguments(module, given)

    def _arguments(self, module: CompiledModule, given: Mapping[str, Argument]) -> Iterator[_Own]:
        for param in module.params:
            argument = given.get(param.name)
            ids: Sequence[int] = param.default_ids
            if argument is not None:
                ids = self._tokenizer.encode_plain(argument.text)
                if len(ids) > param.length:
                    message = (
                        f'the argument for "{param.name}" of "{module.path}" has {len(ids)} tokens; '
                        f"allowed are {param.length}; shorten it"
                    )
                    extra = {"len": param.length, "got": len(ids)}
                    raise PmlError(ErrorCode.ARG_TOO_LONG, message, argument.mark, module.path, extra)
            if ids:
                text = argument.text if argument is not None else param.default or ""
                yield _Own(param.position, ids, "argument", module.path, text)

    def inserts(self, trailing: Trailing, messages: Sequence[dict[str, str]], generate: bool) -> None:
        """Add the prompt's own texts and, after everything else, messages.

        Raises:
            PmlError: E_TEXT_OVERFLOW, E_TEMPLATE.
        """
        conversation = Conversation(self._schema, self._resolved, self._tokenizer)
        anchored = [(self._anchor(insert), insert) for insert in self._resolved.inserts]
        between = [(anchor, insert) for anchor, insert in anchored if insert.place is not PromptPlace.TRAILING]
        behind = 0
        for anchor, insert in sorted(between, key=lambda pair: (pair[0], pair[1].rank)):
            behind = self._insert(max(anchor, behind), insert, conversation)
        position = self.tail_start = self._schema.extent if trailing == "fixed" else self._visible_end()
        for _, insert in anchored:
            if insert.place is PromptPlace.TRAILING:
                position = self._put(position, self._written(insert, "trailing", conversation))
        tail = self._tail(conversation, messages, generate)
        self._put(position, tail)
        self.tail_tokens = sum(len(part.ids) for part in tail)

    def _anchor(self, insert: Insert) -> int:
        """Return the smallest position of an insert."""
        module = self._schema.modules[insert.module]
        match insert.place:
            case PromptPlace.BEHIND:
                return module.end
            case PromptPlace.BEFORE:
                around = self._schema.modules[insert.body]
                return max(around.start, self._end_before(module.start))
            case PromptPlace.END_OF:
                return max(module.start, self._end_before(module.end))
            case PromptPlace.TRAILING:
                return self._schema.extent

    def _end_before(self, position: int) -> int:
        """Return the position after the last selected token before a position."""
        index = bisect_left(self._starts, position)
        return self.selected[index - 1][0].end if index else 0

    def _visible_end(self) -> int:
        """Return the position after the last token that the answer will see."""
        ends = [part.position + len(part.ids) for part in self.parts]
        ends += [segment.position + segment.seen[-1][1] for segment in self.cached if segment.seen]
        return max(ends, default=0)

    def _insert(self, start: int, insert: Insert, conversation: Conversation) -> int:
        """Add an insert at a position; return its end."""
        parts = self._written(insert, "gap", conversation)
        index = bisect_left(self._starts, start)
        limit = self._starts[index] if index < len(self._starts) else self._schema.extent
        capacity, got = max(limit - start, 0), sum(len(part.ids) for part in parts)
        if got > capacity:
            path = self._schema.modules[insert.body].path
            message = (
                f"a text between modules has {got} tokens, and there are {capacity} free positions; shorten it, "
                "put it behind the last module, or give the schema room (a parameter); a blank between imports "
                "is text, too, and a line end is not"
            )
            mark = insert.atoms[0].mark
            raise PmlError(ErrorCode.TEXT_OVERFLOW, message, mark, path, {"capacity": capacity, "got": got})
        return self._put(start, parts)

    def _put(self, position: int, parts: Sequence[_Own]) -> int:
        for part in parts:
            self.parts.append(part._replace(position=position))
            position += len(part.ids)
        return position

    def _written(self, insert: Insert, kind: PieceKind, conversation: Conversation) -> list[_Own]:
        """Return an insert's tokens, without their positions."""
        path = self._schema.modules[insert.body].path
        return [
            part
            for atom in insert.atoms
            if (part := self._atom(atom, kind, path, conversation.turns.get(atom.turn))).ids
        ]

    def _atom(self, atom: Atom, kind: PieceKind, path: str, form: TurnForm | None) -> _Own:
        text = atom.text
        if form is not None and atom.kind is not AtomKind.TEXT:
            text = form.prefix if atom.kind is AtomKind.PREFIX else form.suffix
            return _Own(0, self._schema.forms.encode(text), "role", path, text)
        if form is not None:
            text = text.lstrip() if atom.is_first and form.trims_left else text
            text = text.rstrip() if atom.is_last and form.trims_right else text
        return _Own(0, self._tokenizer.encode_plain(text), kind, path, text)

    def _tail(self, conversation: Conversation, messages: Sequence[dict[str, str]], generate: bool) -> list[_Own]:
        """Return the tokens of messages and the generation prompt, without their positions."""
        if messages:
            texts = list(conversation.continued(messages, generate))
        else:
            texts = [(conversation.answer_prompt() if generate else "", True)]
        encode = self._schema.forms.encode
        parts = [
            _Own(0, encode(text), "role", "", text)
            if is_role
            else _Own(0, self._tokenizer.encode_plain(text), "trailing", "", text)
            for text, is_role in texts
        ]
        return [part for part in parts if part.ids]


def _take_last(own: _OwnTokens, seen: dict[int, tuple[Span, ...]]) -> int:
    """Make the last token one of the request's own; return its position if it was taken from a text, else -1."""
    visible = [(segment, module) for segment, module in own.selected if seen.get(segment.index)]
    if not visible:
        return -1
    segment, module = visible[-1]
    start, stop = segment.seen[-1]
    position = segment.position + stop - 1
    if any(part.position > position for part in own.parts):
        return -1
    seen[segment.index] = (*segment.seen[:-1], *([(start, stop - 1)] if stop - 1 > start else []))
    piece = next(piece for piece in segment.pieces if piece.position <= position < piece.position + piece.count)
    text = piece.text if piece.count == 1 else ""
    own.parts.append(_Own(position, [int(segment.tokens[stop - 1])], _shown_kind(piece), module.path, text))
    return position


def _shown_kind(piece: SegmentPiece) -> PieceKind:
    return "role" if piece.kind == "role" else "text"


def _placed_texts(
    schema: CompiledSchema, selected: Set[int], seen: Mapping[int, tuple[Span, ...]]
) -> tuple[PlacedText, ...]:
    """Return the cached texts that a prompt sees, in the versions of its scaffolds, and their ancestors."""
    versions = choose_versions(schema.scaffolds, selected)
    shown = {versions.get(index, index): spans for index, spans in seen.items() if spans}
    order = schema.with_parents(shown)
    places = {index: place for place, index in enumerate(order)}
    placed = []
    for index in order:
        text = schema.texts[index]
        path = schema.modules[text.module].path
        parent = places[text.parent] if text.parent >= 0 else -1
        placed.append(PlacedText(index, path, text.position, text.tokens, parent, shown.get(index, ())))
    return tuple(placed)


def _runs(parts: Sequence[_Own]) -> tuple[tuple[int, int], ...]:
    runs: list[tuple[int, int]] = []
    for part in parts:
        if runs and sum(runs[-1]) == part.position:
            runs[-1] = (runs[-1][0], runs[-1][1] + len(part.ids))
        else:
            runs.append((part.position, len(part.ids)))
    return tuple(runs)


def _pieces(own: _OwnTokens, parts: Sequence[_Own], taken: int) -> tuple[PromptPiece, ...]:
    """Return all pieces of a prompt. `taken`: see `_take_last`."""
    pieces = [PromptPiece(part.kind, part.path, part.position, len(part.ids), part.text, False) for part in parts]
    filled = {part.position: len(part.ids) for part in parts if part.kind == "argument"}
    for segment, module in own.selected:
        for piece in segment.pieces:
            position, count = piece.position, piece.count
            if piece.kind == "param":
                start = position + filled.get(position, 0)
                # Compact trailing text may stand where the last parameters leave positions empty.
                end = min(position + count, own.tail_start)
                if start < end:
                    pieces.append(PromptPiece("hole", module.path, start, end - start, piece.text, False))
            elif segment.index >= 0:
                count -= position <= taken < position + count
                if count:
                    pieces.append(PromptPiece(_shown_kind(piece), module.path, position, count, piece.text, True))
    return tuple(sorted(pieces, key=lambda piece: piece.position))


@dataclass(frozen=True, slots=True)
class _Present:
    """A role in the prompt."""

    rank: int
    """Number by which roles and inserts are ordered (`Insert.rank`)."""
    role: str
    suffix: str
    """Text written after the role; "" while it is open."""
    is_open: bool


@dataclass(frozen=True, slots=True)
class TurnForm:
    """Text written around a role that the prompt adds."""

    prefix: str
    suffix: str
    trims_left: bool
    trims_right: bool


class Conversation:
    """The roles of one prompt, in order."""

    def __init__(self, schema: CompiledSchema, resolved: Resolved, tokenizer: PmlTokenizer) -> None:
        """`tokenizer`: its template writes the messages and the generation prompt at the end.

        Raises:
            PmlError: E_TEMPLATE.
        """
        self._forms = schema.forms
        self._tokenizer = tokenizer
        self._present = sorted(
            (
                _Present(2 * slot.event, slot.role, "" if slot.open else slot.suffix, slot.open)
                for index in resolved.args
                for slot in schema.modules[index].roles
            ),
            key=lambda present: present.rank,
        )
        self.turns: dict[int, TurnForm] = {}
        """Forms of the roles that the prompt adds, by index in `Resolved.turns`."""
        for insert in resolved.inserts:
            for atom in insert.atoms:
                if atom.kind is AtomKind.PREFIX:
                    turn = resolved.turns[atom.turn]
                    self.turns[atom.turn] = self._add(insert.rank, turn)

    def _add(self, rank: int, turn: Turn) -> TurnForm:
        """Add a role after all roles of the same or a lower rank."""
        place = sum(present.rank <= rank for present in self._present)
        before = self._present[:place]
        form = self._forms.form(tuple(present.role for present in before), turn.role, turn.mark)
        written = before[-1].suffix if before else ""
        self._present.insert(place, _Present(rank, turn.role, "" if turn.open else form.suffix, turn.open))
        return TurnForm(without_common(form.gap, written), form.suffix, form.trims_left, form.trims_right)

    def answer_prompt(self) -> str:
        """Return the generation prompt: the text that the template writes where an answer begins.

        Raises:
            PmlError: E_TEMPLATE.
        """
        if not self._present:
            return ""
        last = self._present[-1]
        if last.is_open and last.role == "assistant":
            return ""
        roles = tuple(present.role for present in self._present)
        rendered = self._forms.render(roles, generate=True, tokenizer=self._tokenizer)
        return without_common(rendered.gaps[-1], last.suffix)

    def continued(self, messages: Sequence[dict[str, str]], generate: bool) -> Iterator[tuple[str, bool]]:
        """Yield the texts that follow the prompt's roles for these messages, and whether the template wrote each.

        Raises:
            PmlError: E_TEMPLATE.
        """
        count = len(self._present)
        roles = (*(present.role for present in self._present), *(message["role"] for message in messages))
        rendered = self._forms.render(roles, generate=generate, tokenizer=self._tokenizer)
        written = self._present[-1].suffix if self._present else ""
        yield without_common(rendered.gaps[count], written), True
        for number, message in enumerate(messages, count):
            left, right = rendered.trims[number]
            content = message["content"]
            content = content.lstrip() if left else content
            yield content.rstrip() if right else content, False
            yield rendered.gaps[number + 1], True
