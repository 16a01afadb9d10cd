"""Names of the KV of prompts that are made of modules (Prompt Cache §3.3;
`trunkline.controller.allocation.modules`).

A text's *place* names what it sees and how it begins: by that its tree is found. Its *content* names all of it.
Own tokens behind texts hang from a root that is named by the texts that are seen, and by where they stand.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from trunkline.controller.messages import ModuleText
from trunkline.kvstore.int32_codec import unpack_int32
from trunkline.kvstore.names import NAME_BYTES, ChunkName

Ranges = tuple[tuple[int, int], ...]


def pairs(packed: bytes) -> Ranges:
    """int32 `[n, 2]` as tuples."""
    return tuple((a, b) for a, b in unpack_int32(packed, columns=2).tolist())


class RelocationRule(Enum):
    """Where a text that was computed at one position may act."""

    ANYWHERE = auto()
    WITH_ITS_PARENT = auto()
    """Where the texts above it are as far away as they were."""
    NOWHERE = auto()
    """There only: positions are learned."""

    @staticmethod
    def of(positions_shift: bool, relocate: bool) -> RelocationRule:
        """
        Args:
            positions_shift: whether the model's keys can be turned.
            relocate: whether the request allows it.
        """
        if not positions_shift:
            return RelocationRule.NOWHERE
        return RelocationRule.ANYWHERE if relocate else RelocationRule.WITH_ITS_PARENT


class TextNames(NamedTuple):
    """Of one text, with what it sees above itself."""

    place: ChunkName
    """What it sees, and its first chunk."""
    content: ChunkName
    """The whole of it, and what it sees."""


def modules_root(root: bytes) -> ChunkName:
    """What the names of texts begin with.

    Args:
        root: the name of the root of their salt.
    """
    return _digest(b"modules", root)


def text_names(
    text: ModuleText,
    parent: tuple[ChunkName, int] | None,
    base: ChunkName,
    moves: RelocationRule,
    chunk_bytes: int,
) -> TextNames:
    """
    Args:
        parent: content and position of the text above it; None: there is none.
        base: see `modules_root`.
        chunk_bytes: of the tokens of a full chunk.
    """
    above, origin = parent if parent is not None else (base, text.position)
    where = b""
    if moves is not RelocationRule.ANYWHERE:
        where = (text.position - (origin if moves is RelocationRule.WITH_ITS_PARENT else 0)).to_bytes(8, "little")
    place = _digest(b"place", above, where, text.tokens[:chunk_bytes])
    return TextNames(place, _digest(b"content", above, where, text.tokens))


def prompt_root(base: ChunkName, shown: Sequence[tuple[ChunkName, int, Ranges]], runs: Ranges) -> ChunkName:
    """The name of the tree of own tokens.

    Args:
        base: see `modules_root`.
        shown: content, position and seen ranges of the texts that are seen, by position.
        runs: (position, count) of the own tokens.
    """
    digest = blake2b(digest_size=NAME_BYTES, person=b"trunkline-prompt")
    digest.update(base)
    for content, position, seen in shown:
        digest.update(content + np.array([position, *sum(seen, ())], "<i8").tobytes() + b";")
    # Where own tokens stand is part of the name; how many there are behind all is not.
    closed = [value for run in runs[:-1] for value in run]
    digest.update(np.array([*closed, runs[-1][0] if runs else 0], "<i8").tobytes())
    return ChunkName(digest.digest())


def _digest(*parts: bytes) -> ChunkName:
    digest = blake2b(digest_size=NAME_BYTES, person=b"trunkline-module")
    for part in parts:
        digest.update(len(part).to_bytes(4, "little") + part)
    return ChunkName(digest.digest())
