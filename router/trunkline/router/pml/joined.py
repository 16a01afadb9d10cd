"""Several schemas as one, for a prompt that imports modules of all of them.

Each schema lies behind the one before it, as it was compiled:

    positions   0 ── text of a ── modules of a ── extent of a ── text of b ── modules of b ── extent of b
    names       the modules of both, in one prompt

No text of one schema sees a text of another, so the KV of each is that of prompts with this schema alone, only
shifted as a whole: what a module sees is as far away as ever. The text that an answer begins with sees all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

from trunkline.router.pml.compiled import (
    CompiledModule,
    CompiledScaffold,
    CompiledSchema,
    CompiledText,
    ModuleSegment,
    UnionSlot,
)
from trunkline.router.pml.pml_error import ErrorCode, PmlError


def join_schemas(schemas: Sequence[CompiledSchema]) -> CompiledSchema:
    """Return one schema of at least one, compiled by one tokenizer. Its name is theirs, with blanks between them.

    Only the first one's BOS is seen.

    Raises:
        PmlError: E_DUP, two of them have modules of one name outside of all others; E_ROLE_ORDER, a message of one
            is open, and one behind it has messages.
    """
    return reduce(_joined, schemas)


def _joined(first: CompiledSchema, second: CompiledSchema) -> CompiledSchema:
    _check(first, second)
    moved = _Moved(first, second)
    root, other = first.modules[0], moved.modules[0]
    both = replace(
        root,
        length=root.length + other.length,
        segments=(*root.segments, *other.segments),
        children={**root.children, **other.children},
        unions=(*root.unions, *other.unions),
        roles=(*root.roles, *other.roles),
        exit=other.exit,
    )
    modules = (both, *first.modules[1:], *moved.modules[1:])
    return CompiledSchema(
        name=f"{first.name} {second.name}",
        revision=first.revision,
        scope=first.scope,
        extent=first.extent + second.extent,
        texts=(*first.texts, *moved.texts),
        modules=modules,
        scaffolds=(*first.scaffolds, *moved.scaffolds),
        by_path={module.path: index for index, module in enumerate(modules)},
        forms=first.forms,
    )


def _check(first: CompiledSchema, second: CompiledSchema) -> None:
    """Raise what `join_schemas` does."""
    twice = next((name for name in second.modules[0].children if name in first.modules[0].children), None)
    if twice is not None:
        message = (
            f'the schema "{second.name}" has a module "{twice}", and one before it has, too; modules of a prompt '
            "have different names"
        )
        raise PmlError(ErrorCode.DUP, message, path=twice)
    is_open = any(slot.open for module in first.modules for slot in module.roles)
    if is_open and any(module.roles for module in second.modules):
        message = (
            f'the schema "{second.name}" has messages, and the last one before it is open; name the schema with '
            "the open message last"
        )
        raise PmlError(ErrorCode.ROLE_ORDER, message)


class _Moved:
    """The parts of a schema that lies behind another one."""

    def __init__(self, first: CompiledSchema, second: CompiledSchema) -> None:
        root = first.modules[0]
        self._position = first.extent
        self._events = root.exit
        self._texts = len(first.texts)
        self._modules = len(first.modules) - 1
        self._unions = len(root.unions)
        self._bos = len(second.forms.bos)
        self._segments: dict[int, ModuleSegment] = {}
        self.modules = [self._module(module) for module in second.modules]
        self.texts = [self._text(text) for text in second.texts]
        self.scaffolds = [self._scaffold(scaffold) for scaffold in second.scaffolds]

    def _index(self, module: int) -> int:
        """Return the new index of a module; the schemas themselves become one."""
        return module + self._modules if module > 0 else module

    def _module(self, module: CompiledModule) -> CompiledModule:
        at, outermost = self._position, module.parent == 0
        return replace(
            module,
            parent=self._index(module.parent),
            start=module.start + at,
            params=tuple(replace(param, position=param.position + at) for param in module.params),
            segments=tuple(
                self._segment(segment, is_text_of_schema=module.parent < 0) for segment in module.segments
            ),
            children={name: self._index(child) for name, child in module.children.items()},
            unions=tuple(
                UnionSlot(tuple(map(self._index, union.members)), self._index(union.default))
                for union in module.unions
            ),
            union=module.union + self._unions if outermost and module.union >= 0 else module.union,
            roles=tuple(replace(slot, event=slot.event + self._events) for slot in module.roles),
            enter=module.enter + self._events,
            exit=module.exit + self._events,
        )

    def _segment(self, segment: ModuleSegment, *, is_text_of_schema: bool) -> ModuleSegment:
        pieces, seen = segment.pieces, segment.seen
        if is_text_of_schema and segment.position < self._bos:
            (_, stop), *others = seen
            seen = ((self._bos, stop), *others) if stop > self._bos else tuple(others)
            pieces = pieces[1:]
        moved = replace(
            segment,
            index=segment.index + self._texts if segment.index >= 0 else -1,
            position=segment.position + self._position,
            pieces=tuple(replace(piece, position=piece.position + self._position) for piece in pieces),
            seen=seen,
        )
        self._segments[id(segment)] = moved
        return moved

    def _text(self, text: CompiledText) -> CompiledText:
        parent = text.parent + self._texts if text.parent >= 0 else -1
        return replace(
            text, module=self._index(text.module), segment=self._segments[id(text.segment)], parent=parent
        )

    def _scaffold(self, scaffold: CompiledScaffold) -> CompiledScaffold:
        def moved(versions: dict[int, int]) -> dict[int, int]:
            return {text + self._texts: version + self._texts for text, version in versions.items()}

        return replace(
            scaffold,
            members=frozenset(map(self._index, scaffold.members)),
            member_texts=moved(dict(scaffold.member_texts)),
            ancestor_texts=moved(dict(scaffold.ancestor_texts)),
        )
