"""Names of the KV of prompts that are made of modules (Prompt Cache §3.3).

A text's *place* names what the text sees and how it begins; its tree of chunks is found by it. A text's *content*
names all of it. A prompt's own tokens hang from a root whose name says which texts they see, and where these
stand.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from trunkline.kvstore.chunks import NAME_BYTES, ChunkName, unpack_int32

Ranges = tuple[tuple[int, int], ...]


def pairs(packed: bytes) -> Ranges:
    """Return packed int32 `[n, 2]` as a tuple of pairs."""
    return tuple((a, b) for a, b in unpack_int32(packed, columns=2).tolist())


class RelocationRule(Enum):
    """The rule that says where a text that was computed at one position may act."""

    ANYWHERE = auto()
    WITH_ITS_PARENT = auto()
    """The text may act where the texts above it are as far away as when it was computed."""
    NOWHERE = auto()
    """The text may act only where it was computed, because the model's positions are learned."""

    @staticmethod
    def of(positions_shift: bool, relocate: bool) -> RelocationRule:
        """Return the rule for a model and a request.

        Args:
            positions_shift: Whether the model's keys can be rotated to other positions.
            relocate: Whether the request allows texts to act at other positions.
        """
        if not positions_shift:
            return RelocationRule.NOWHERE
        return RelocationRule.ANYWHERE if relocate else RelocationRule.WITH_ITS_PARENT


class TextNames(NamedTuple):
    """The two names of a text."""

    place: ChunkName
    """Name of the place: of the texts that this text sees, and of its first chunk."""
    content: ChunkName
    """Name of the content: of the texts that this text sees, and of all its tokens."""


def modules_root(root: bytes) -> ChunkName:
    """Return the name from which the names of a salt's texts are chained.

    Args:
        root: The root name of the texts' salt.
    """
    return _digest(b"modules", root)


def text_names(
    position: int,
    tokens: bytes,
    parent: tuple[ChunkName, int] | None,
    base: ChunkName,
    moves: RelocationRule,
    chunk_bytes: int,
) -> TextNames:
    """Return the names of a text below another one.

    Args:
        position: Position of the text's first token.
        tokens: The text's tokens, as `pack_int32` gives them.
        parent: Content and position of the text above it; None: it sees no other text.
        base: The result of `modules_root`.
        chunk_bytes: Bytes of the tokens of a full chunk.
    """
    above, origin = parent if parent is not None else (base, position)
    where = b""
    if moves is not RelocationRule.ANYWHERE:
        where = (position - (origin if moves is RelocationRule.WITH_ITS_PARENT else 0)).to_bytes(8, "little")
    place = _digest(b"place", above, where, tokens[:chunk_bytes])
    return TextNames(place, _digest(b"content", above, where, tokens))


def prompt_root(base: ChunkName, shown: Sequence[tuple[ChunkName, int, Ranges]], runs: Ranges) -> ChunkName:
    """Return the root name of a prompt's own tokens.

    Args:
        base: The result of `modules_root`.
        shown: Content, position and seen ranges of the texts that are seen, in the order of their positions.
        runs: (position, count) of the own tokens.
    """
    digest = blake2b(digest_size=NAME_BYTES, person=b"trunkline-prompt")
    digest.update(base)
    for content, position, seen in shown:
        digest.update(content + np.array([position, *sum(seen, ())], "<i8").tobytes() + b";")
    # The places of own tokens are part of the name; the length of the last run is not, because it grows.
    closed = [value for run in runs[:-1] for value in run]
    digest.update(np.array([*closed, runs[-1][0] if runs else 0], "<i8").tobytes())
    return ChunkName(digest.digest())


def _digest(*parts: bytes) -> ChunkName:
    digest = blake2b(digest_size=NAME_BYTES, person=b"trunkline-module")
    for part in parts:
        digest.update(len(part).to_bytes(4, "little") + part)
    return ChunkName(digest.digest())
