"""A prompt with modules: the texts that it sees, and how its block table is made of them
(`trunkline.controller.allocation.modules`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trunkline.controller.messages import Holder
from trunkline.kvstore.chunks import TOKEN_BYTES, ChunkName, Int32Array, blocks_for
from trunkline.kvstore.module_names import Ranges


class CachedText(NamedTuple):
    """A module's text, with the names under which its KV is found."""

    tokens: bytes
    position: int
    parent: int
    """Index of the text before this one on its path; -1: none."""
    seen: Ranges
    """Ranges of the text's tokens that the request sees."""
    place: ChunkName
    """Name of the text's tree, from what the text sees and its first chunk."""
    content: ChunkName
    """Name of the whole text, with what it sees."""
    holders: Sequence[Holder] = ()
    """Peers that are said to have chunks of the text."""

    @property
    def token_count(self) -> int:
        """Number of the text's tokens."""
        return len(self.tokens) // TOKEN_BYTES


class Part(NamedTuple):
    """A text in the block table."""

    text: int
    """Index of the text."""
    chunks: int
    """Number of the text's chunks in the table, from the first one on."""
    ranges: Ranges
    """Ranges of the text's tokens that are seen."""

    def tokens(self, prompt: ModulePrompt) -> int:
        """Return how many tokens the text's chunks in the table hold."""
        return min(prompt.texts[self.text].token_count, self.chunks * prompt.chunk_size)


class ModulePrompt:
    """The layout of a prompt with modules. Immutable, except for `ttl`, `encoded` and `miss`."""

    __slots__ = (
        "chunk_size",
        "encoded",
        "entries",
        "holes",
        "miss",
        "name",
        "parts",
        "runs",
        "seen_indices",
        "seen_tokens",
        "target",
        "texts",
        "ttl",
    )

    def __init__(
        self,
        texts: list[CachedText],
        shown: Sequence[int],
        ranges: Sequence[Ranges],
        runs: Ranges,
        name: ChunkName,
        chunk_size: int,
        target: int = -1,
    ) -> None:
        """
        Args:
            shown: indices of the texts that are seen, in the order of the table.
            ranges: for each of these texts, the ranges of its tokens that are seen; not empty.
            runs: (position, count) of the sequence's own tokens.
            name: name of the tree of the own tokens.
            target: index of the text whose tokens are the own tokens (`SequenceGroup.encodes`); -1: none.
        """
        self.texts = texts
        self.runs = runs
        self.name = name
        self.target = target
        self.chunk_size = chunk_size
        self.parts = [
            Part(text, blocks_for(seen[-1][1], chunk_size), seen) for text, seen in zip(shown, ranges, strict=True)
        ]
        self.entries = sum(part.chunks for part in self.parts)
        """Number of block-table entries before the own tokens."""
        self.seen_indices = self._seen()
        """Indices in the table of the seen tokens before the own ones."""
        self.seen_tokens = len(self.seen_indices)
        self.holes = self.entries * chunk_size - self.seen_tokens
        self.ttl = 0.0
        """Seconds for which the texts are kept after the request; 0: the group's own setting."""
        self.encoded: set[int] = set()
        """Indices of the texts that were encoded because of this request: they do not count as cached."""
        self.miss = ""
        """The reason why texts were not cached; "" if all were."""

    @property
    def encoded_tokens(self) -> int:
        """Number of seen tokens of the texts that were encoded because of this request."""
        return sum(stop - start for text in self.encoded for start, stop in self.texts[text].seen)

    def _seen(self) -> NDArray[np.int64]:
        begins = np.cumsum([0, *(part.chunks * self.chunk_size for part in self.parts)])
        ranges = [
            np.arange(begin + start, begin + stop)
            for begin, part in zip(begins.tolist(), self.parts, strict=False)
            for start, stop in part.ranges
        ]
        return np.concatenate(ranges) if ranges else np.empty(0, np.int64)

    def table_tokens(self, own: Int32Array) -> Int32Array:
        """Return the tokens of the table: texts, zeros where a chunk is not full, and the own tokens."""
        table = np.zeros(self.entries * self.chunk_size + len(own), np.int32)
        at = 0
        for part in self.parts:
            tokens = np.frombuffer(self.texts[part.text].tokens, "<i4")[: part.chunks * self.chunk_size]
            table[at : at + len(tokens)] = tokens
            at += part.chunks * self.chunk_size
        table[at:] = own
        return table

    def not_encoded(self, text: CachedText) -> None:
        """Note that a text was found in a tier after all."""
        self.encoded = {index for index in self.encoded if self.texts[index].content != text.content}
        if not self.encoded:
            self.miss = ""
