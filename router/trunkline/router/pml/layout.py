"""Compile a schema: the positions of its tokens, and what its texts see (Prompt Cache §3.2, §3.3).

Positions. A cursor walks through the schema in document order. A text moves it by its tokens, a parameter by its
length, a module by its content. All modules of a union begin where the union begins, and the longest one moves the
cursor. The cursor's last position is the schema's *extent*. The model's BOS, if it has one, is at position 0 and
belongs to the schema's own text.

Texts. A *segment* is a sequence of texts and parameters of one module without another module in between. Text that
a chat template writes around a role belongs to the module (or the schema) that contains the role. A segment of a
cached module becomes a *text* whose KV is computed once. It sees its parent, and everything that its parent sees:

    scope "ancestors"   The parent is the previous segment of the module. The parent of the first segment is the
                        previous segment of the modules around it or of the schema. So a text sees earlier text of
                        its own module and of all ancestors, but neither siblings nor children.
    scope "self"        The parent is the previous segment of the module; the first segment sees nothing (this is
                        the paper's literal rule). The schema's anonymous texts together count as one module.

Scaffolds. The members of a scaffold and their ancestors, including the schema, form one chain in document order:
the parent of each text is the previous one in the chain. Where a text has that parent anyway, no version is made.

Modules with `cache="false"`, and everything in them, are not texts: their tokens are computed for each request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from trunkline.router.pml.compiled import (
    CompiledModule,
    CompiledScaffold,
    CompiledSchema,
    CompiledText,
    ModuleSegment,
    ParamSlot,
    RoleSlot,
    SchemaPieceKind,
    Scope,
    SegmentPiece,
    Span,
    UnionSlot,
)
from trunkline.router.pml.pml_error import ErrorCode, Mark, PmlError
from trunkline.router.pml.roles import PmlTokenizer, RoleForms, trimmed, without_common
from trunkline.router.pml.tree import (
    Item,
    Module,
    Param,
    RoleItem,
    Scaffold,
    SchemaDocument,
    Text,
    Union,
    join_path,
)

TOKENS_MAX: Final = 8 << 20
"""Largest number of tokens in all texts of a schema, including placeholders and members of unions. They take 32
MiB in a message."""


def compile_schema(
    document: SchemaDocument, tokenizer: PmlTokenizer, *, scope: Scope, context: int, revision: str = ""
) -> CompiledSchema:
    """Compile a schema for one model.

    Args:
        document: The schema, from `parse_schema` or `schema_from_json`.
        tokenizer: The model's tokenizer.
        scope: What texts see.
        context: Positions of the model, of which the schema must leave at least one.
        revision: A string that is copied to the result.

    Raises:
        PmlError: E_SCHEMA_TOO_LONG, E_TEMPLATE, or E_ARG_TOO_LONG for a parameter's default.
    """
    layout = _Layout(tokenizer, scope, context)
    root = layout.schema(document)
    modules = layout.modules()
    by_path = {module.path: index for index, module in enumerate(modules)}
    scaffolds = compile_scaffolds(document.scaffolds, modules, by_path, layout.texts)
    if layout.total + scaffolds.tokens > TOKENS_MAX:
        message = (
            f"its scaffolds have {scaffolds.tokens} tokens, with its modules more than {TOKENS_MAX}; use fewer"
        )
        raise PmlError(ErrorCode.SCHEMA_TOO_LONG, message, document.mark)
    return CompiledSchema(
        name=document.name,
        revision=revision,
        scope=scope,
        extent=root.length,
        texts=(*layout.texts, *scaffolds.texts),
        modules=modules,
        scaffolds=scaffolds.scaffolds,
        by_path=by_path,
        forms=layout.forms,
    )


@dataclass(slots=True)
class _Frame:
    """State of a module while the walk is in it."""

    index: int
    path: str
    cached: bool
    start: int
    cursor: int
    seen_text: int
    """Index of the text that the module's next text sees; -1: none."""
    roles_before: tuple[str, ...]
    """Roles of the messages before the cursor."""
    suffix_before: str = ""
    """Text that the template writes after the last message of `roles_before`."""
    pieces: list[SegmentPiece] = field(default_factory=list)
    """Pieces of the unfinished segment."""
    ids: list[int] = field(default_factory=list)
    """Token ids of the unfinished segment."""
    params: list[ParamSlot] = field(default_factory=list)
    segments: list[ModuleSegment] = field(default_factory=list)
    children: dict[str, int] = field(default_factory=dict)
    unions: list[UnionSlot] = field(default_factory=list)
    roles: list[RoleSlot] = field(default_factory=list)


class _Layout:
    """One walk through a schema."""

    def __init__(self, tokenizer: PmlTokenizer, scope: Scope, context: int) -> None:
        self.texts: list[CompiledText] = []
        self.total = 0
        """Number of tokens so far, in all texts."""
        self.forms = RoleForms(tokenizer)
        self._tokenizer = tokenizer
        self._scope = scope
        self._context = context
        self._events = 0
        self._count = 0
        """Number of modules so far, without the schema itself."""
        self._closed: dict[int, CompiledModule] = {}

    def modules(self) -> tuple[CompiledModule, ...]:
        """Return all modules in document order, after the walk."""
        return tuple(self._closed[index] for index in range(len(self._closed)))

    def schema(self, document: SchemaDocument) -> CompiledModule:
        """Walk through a schema; return it as a module."""
        frame = _Frame(0, "", True, 0, 0, -1, ())
        enter = self._event()
        if self.forms.bos:
            self._put(frame, "role", "", list(self.forms.bos), document.mark)
        self._items(frame, document.items)
        return self._close(frame, parent=-1, union=-1, enter=enter, mark=document.mark)

    def _event(self) -> int:
        self._events += 1
        return self._events

    def _items(self, frame: _Frame, items: Sequence[Item]) -> None:
        for item in items:
            match item:
                case Text():
                    self._put(frame, "text", item.text, self._tokenizer.encode_plain(item.text), item.mark)
                case Param():
                    self._param(frame, item)
                case RoleItem():
                    self._role(frame, item)
                case Module():
                    self._flush(frame)
                    child = self._module(frame, item, -1)
                    frame.cursor = child.cursor
                    frame.roles_before, frame.suffix_before = child.roles_before, child.suffix_before
                case Union():
                    self._flush(frame)
                    self._union(frame, item)

    def _put(self, frame: _Frame, kind: SchemaPieceKind, text: str, ids: list[int], mark: Mark | None) -> None:
        """Add tokens at the cursor."""
        if not ids:
            return
        self._room(frame, len(ids), mark)
        frame.pieces.append(SegmentPiece(kind, frame.cursor, len(ids), text))
        frame.ids += ids
        frame.cursor += len(ids)

    def _room(self, frame: _Frame, count: int, mark: Mark | None) -> None:
        """Check that `count` more tokens are allowed."""
        end = frame.cursor + count
        if end >= self._context:
            message = (
                f"the schema reaches position {end} here, and the model has {self._context}, of which one must be "
                "left for an answer; shorten it, or put modules that are not used together into a union"
            )
            raise PmlError(ErrorCode.SCHEMA_TOO_LONG, message, mark, frame.path)
        self.total += count
        if self.total > TOKENS_MAX:
            message = f"the schema's texts have more than {TOKENS_MAX} tokens in all; split it"
            raise PmlError(ErrorCode.SCHEMA_TOO_LONG, message, mark, frame.path)

    def _param(self, frame: _Frame, param: Param) -> None:
        self._room(frame, param.length, param.mark)
        default = self._tokenizer.encode_plain(param.default) if param.default else []
        if len(default) > param.length:
            message = f'the default of "{param.name}" has {len(default)} tokens; its length is {param.length}'
            extra = {"len": param.length, "got": len(default)}
            raise PmlError(ErrorCode.ARG_TOO_LONG, message, param.mark, frame.path, extra)
        slot = ParamSlot(param.name, frame.cursor, param.length, param.required, param.default, tuple(default))
        frame.params.append(slot)
        frame.pieces.append(SegmentPiece("param", frame.cursor, param.length, param.name))
        frame.ids += self._tokenizer.placeholder_ids(param.fill, param.length)
        frame.cursor += param.length

    def _role(self, frame: _Frame, role: RoleItem) -> None:
        form = self.forms.form(frame.roles_before, role.role, role.mark, frame.path)
        prefix = without_common(form.gap, frame.suffix_before)
        self._put(frame, "role", prefix, self.forms.encode(prefix), role.mark)
        event = self._event()
        self._items(frame, trimmed(role.items, form))
        if not role.open:
            self._put(frame, "role", form.suffix, self.forms.encode(form.suffix), role.mark)
        frame.roles.append(RoleSlot(event, role.role, form.suffix, role.open))
        frame.roles_before = (*frame.roles_before, role.role)
        frame.suffix_before = "" if role.open else form.suffix

    def _flush(self, frame: _Frame) -> None:
        """Finish the segment at the cursor."""
        if not frame.pieces:
            return
        tokens = np.array(frame.ids, dtype=np.int32)
        tokens.setflags(write=False)
        index = len(self.texts) if frame.cached else -1
        position = frame.pieces[0].position
        segment = ModuleSegment(index, position, tokens, tuple(frame.pieces), _seen(frame.pieces))
        frame.segments.append(segment)
        if frame.cached:
            self.texts.append(CompiledText(frame.index, segment, frame.seen_text))
            frame.seen_text = index
        frame.pieces, frame.ids = [], []

    def _module(self, outer: _Frame, module: Module, union: int) -> _Frame:
        self._count += 1
        index = outer.children[module.name] = self._count
        enter = self._event()
        frame = _Frame(
            index,
            join_path(outer.path, module.name),
            outer.cached and module.cache,
            outer.cursor,
            outer.cursor,
            outer.seen_text if self._scope == "ancestors" else -1,
            outer.roles_before,
            outer.suffix_before,
        )
        self._items(frame, module.items)
        self._close(frame, parent=outer.index, union=union, enter=enter, mark=module.mark)
        return frame

    def _union(self, frame: _Frame, union: Union) -> None:
        members = [self._module(frame, member, len(frame.unions)) for member in union.members]
        indexes = tuple(member.index for member in members)
        default = frame.children[union.default] if union.default is not None else -1
        frame.unions.append(UnionSlot(indexes, default))
        shown = next((member for member in members if member.index == default), members[0])
        frame.roles_before, frame.suffix_before = shown.roles_before, shown.suffix_before
        frame.cursor = max(member.cursor for member in members)

    def _close(self, frame: _Frame, *, parent: int, union: int, enter: int, mark: Mark | None) -> CompiledModule:
        self._flush(frame)
        module = CompiledModule(
            path=frame.path,
            parent=parent,
            start=frame.start,
            length=frame.cursor - frame.start,
            cached=frame.cached,
            params=tuple(frame.params),
            segments=tuple(frame.segments),
            children=frame.children,
            unions=tuple(frame.unions),
            union=union,
            roles=tuple(frame.roles),
            enter=enter,
            exit=self._event(),
            mark=mark,
        )
        self._closed[frame.index] = module
        return module


def _seen(pieces: Sequence[SegmentPiece]) -> tuple[Span, ...]:
    """Return the ranges of a segment's tokens other than placeholders."""
    spans: list[Span] = []
    origin = pieces[0].position
    for piece in pieces:
        start = piece.position - origin
        if piece.kind == "param":
            continue
        if spans and spans[-1][1] == start:
            start = spans.pop()[0]
        spans.append((start, piece.position - origin + piece.count))
    return tuple(spans)


CHAIN_TEXTS_MAX: Final = 1 << 20
"""Largest number of texts in the chains of all scaffolds together. It bounds the time for walking through them."""


class Scaffolds(NamedTuple):
    """The result of `compile_scaffolds`: a schema's scaffolds, and the texts that were made for them."""

    scaffolds: tuple[CompiledScaffold, ...]
    texts: tuple[CompiledText, ...]
    """New versions of texts; their indexes follow those of the modules' own texts."""
    tokens: int
    """Number of tokens in the new versions of texts."""


def compile_scaffolds(
    scaffolds: Sequence[Scaffold],
    modules: Sequence[CompiledModule],
    by_path: Mapping[str, int],
    texts: Sequence[CompiledText],
) -> Scaffolds:
    """Make the versions of `texts` that these scaffolds need.

    Raises:
        PmlError: E_SCHEMA_TOO_LONG: the scaffolds have too many texts.
    """
    known = {(index, text.parent): index for index, text in enumerate(texts)}
    made: list[CompiledText] = []
    compiled: list[CompiledScaffold] = []
    steps = 0
    for scaffold in scaffolds:
        members = frozenset(by_path[path] for path in scaffold.modules)
        chain = sorted(text for module in _with_ancestors(members, modules) for text in modules[module].texts)
        steps += len(chain)
        if steps > CHAIN_TEXTS_MAX:
            message = (
                f"the schema's scaffolds have more than {CHAIN_TEXTS_MAX} texts in all; use fewer or smaller ones"
            )
            raise PmlError(ErrorCode.SCHEMA_TOO_LONG, message, scaffold.mark)
        member_texts: dict[int, int] = {}
        ancestor_texts: dict[int, int] = {}
        last = -1
        for index in chain:
            version = known.get((index, last))
            if version is None:
                text = texts[index]
                version = known[index, last] = len(texts) + len(made)
                made.append(CompiledText(text.module, text.segment, last, scaffold.name))
            if texts[index].module in members:
                member_texts[index] = version
            elif version != index:
                ancestor_texts[index] = version
            last = version
        tokens = sum(modules[member].tokens for member in members)
        compiled.append(CompiledScaffold(scaffold.name, members, tokens, member_texts, ancestor_texts))
    return Scaffolds(tuple(compiled), tuple(made), sum(len(text.tokens) for text in made))


def _with_ancestors(members: Set[int], modules: Sequence[CompiledModule]) -> set[int]:
    """Return some modules together with their ancestors and the schema."""
    found = {0}
    for member in members:
        while member not in found:
            found.add(member)
            member = modules[member].parent
    return found


def choose_versions(scaffolds: Sequence[CompiledScaffold], selected: Set[int]) -> dict[int, int]:
    """Return which texts are replaced in a prompt with these modules, and by which versions.

    Scaffolds whose members are all selected are considered by their number of tokens, largest first, then in the
    schema's order. A scaffold is used if it shares no member with one used before. Texts of its members get its
    versions. Other texts get the version of the first used scaffold that has one.
    """
    usable = [scaffold for scaffold in scaffolds if scaffold.members <= selected]
    usable.sort(key=lambda scaffold: -scaffold.tokens)
    taken: set[int] = set()
    chosen: list[CompiledScaffold] = []
    for scaffold in usable:
        if taken.isdisjoint(scaffold.members):
            taken |= scaffold.members
            chosen.append(scaffold)
    versions: dict[int, int] = {}
    for scaffold in chosen:
        versions |= scaffold.member_texts
    for scaffold in chosen:
        for text, version in scaffold.ancestor_texts.items():
            versions.setdefault(text, version)
    return versions
