"""Follow one sequence: hold the place in some text from which it seems to go on; check it with each token. Pure.

      sequence   … d e f g h ?
      a text     … d e f g h i j k …      place: the next token should be i; 5 tokens agree before it
                             └ draft: i j k …

When the next token is another one, the place is lost, and the longest match is looked for in all texts.
"""

from __future__ import annotations

from array import array
from typing import Final, NamedTuple, Protocol

import numpy as np

from trunkline.controller.drafts.acceptance import Acceptance, Fit, Source
from trunkline.controller.drafts.text_index import MATCH_MAX, NO_TOKEN, TAIL_MAX, RunHashes, TextIndex
from trunkline.controller.drafts.tree_texts import text_behind
from trunkline.controller.sequences.sequence import Sequence
from trunkline.kvstore.chunks import Int32Array, unpack_int32

SURE: Final = 16
"""Number of tokens that agree from which on no longer match is looked for."""


class Text(Protocol):
    """A text in which a follower may hold a place."""

    def token(self, place: int) -> int:
        """Return the token at a position; `NO_TOKEN`: it is not there."""
        ...

    def tokens(self, place: int, count: int) -> Int32Array:
        """Return up to `count` tokens from a position on."""
        ...


class Place(NamedTuple):
    """A place in a text."""

    text: Text
    source: Source
    at: int
    match: int
    """Number of tokens that agree before the place, at most `MATCH_MAX`."""


class Follower:
    """The place of one decoding sequence, and the indexes that are its own."""

    __slots__ = (
        "_chunk_size",
        "_hashes",
        "_to_index",
        "_tree_looked",
        "came",
        "context",
        "count",
        "fits",
        "is_indexed",
        "place",
        "prediction",
        "sequence",
    )

    def __init__(self, sequence: Sequence, chunk_size: int, prediction: bytes = b"") -> None:
        """
        Args:
            chunk_size: tokens of a chunk of the radix tree; 0: the tree is not looked at.
            prediction: int32 token ids that the answer may be like.
        """
        tokens = sequence.tokens
        self.sequence = sequence
        self.place: Place | None = None
        self.context: TextIndex | None = None
        """Index of the sequence's own tokens; None: it has none (yet)."""
        self.prediction: TextIndex | None = None
        self.fits: dict[Source, Fit] = {}
        self.count = tokens.count
        """Number of the sequence's tokens so far."""
        self._chunk_size = chunk_size
        self._tree_looked = -1
        """Number of chunks of the sequence's path behind which the tree has no other text; -1: not looked."""
        self._hashes = RunHashes(tokens.view(max(0, tokens.count - TAIL_MAX // 2)).tolist())
        self.came = array("i")
        """The tokens that came since the follower began."""
        self._to_index = tokens.count
        """Number of the sequence's tokens when the follower began, which are indexed before those that came."""
        self.is_indexed = False
        """Whether all of the sequence's tokens are in `context`."""
        if prediction:
            likely = unpack_int32(prediction)
            self.prediction = TextIndex(len(likely) + 1)
            self.prediction.extend(np.append(likely, np.int32(NO_TOKEN)))
            if tokens.count == sequence.prompt_len:
                self.place = Place(self.prediction, Source.PREDICTION, 0, 0)

    @property
    def nbytes(self) -> int:
        """Bytes of memory of its indexes."""
        return sum(index.nbytes for index in (self.context, self.prediction) if index is not None)

    def index_some(self, most: int) -> int:
        """Add up to `most` of the sequence's tokens to `context`; return how many were added."""
        context = self.context
        if context is None:
            return 0
        start = context.count
        stop = min(start + most, self._to_index)
        if stop > start:
            context.extend(self.sequence.tokens.view(start, stop))
        if stop == self._to_index:
            context.extend(np.array(self.came, np.int32))
            self.is_indexed = True
        return stop - start

    def advance(self, token: int, acceptance: Acceptance, recent: TextIndex | None) -> None:
        """Take in the sequence's next token.

        Args:
            recent: index of the tenant's recent outputs; None: there is none.
        """
        place = self.place
        if place is not None:
            place = self._compare(place, token, acceptance)
        self._hashes.push(token)
        mixed = self._hashes.mixed()
        if place is None or place.match < SURE:
            place = self._look(place, mixed, recent)
        self.place = place
        self.count += 1
        self.came.append(token)
        if self.is_indexed and self.context is not None:
            self.context.push(token, mixed)

    def _compare(self, place: Place, token: int, acceptance: Acceptance) -> Place | None:
        """Return the place behind `token`, and learn whether it was the expected one; None: it was not, or the
        text has ended."""
        text, source, at, match = place
        expected = text.token(at)
        if expected == NO_TOKEN:  # the prompt is not indexed so far
            return None
        is_right = expected == token
        fit = self.fits.get(source)
        if fit is None:
            fit = self.fits[source] = Fit()
        fit.learn(acceptance.chance(source, match), is_right=is_right)
        acceptance.learn(source, match, is_right=is_right)
        if not is_right or text.token(at + 1) == NO_TOKEN:
            return None
        return Place(text, source, at + 1, min(match + 1, MATCH_MAX))

    def _look(self, place: Place | None, mixed: list[int], recent: TextIndex | None) -> Place | None:
        """Return the place with the longest match, `place` included."""
        match = place.match if place is not None else 0
        for source, index in (
            (Source.PREDICTION, self.prediction),
            (Source.CONTEXT, self.context),
            (Source.RECENT, recent),
        ):
            if index is None:
                continue
            at, agreed = index.find(self._hashes, mixed)
            # Behind the end of `context` stands `token`, as soon as it is pushed.
            if agreed > match and (index.token(at) != NO_TOKEN or (source is Source.CONTEXT and place is None)):
                place, match = Place(index, source, at, agreed), agreed
        if place is None or place.source is not Source.TREE:
            return self._in_tree() or place
        return place

    def _in_tree(self) -> Place | None:
        """Return the place behind the sequence's path in the tree, if another sequence went on from there."""
        sequence, chunks = self.sequence, len(self.sequence.path)
        tail = self.count + 1 - chunks * self._chunk_size
        if not self._chunk_size or chunks == self._tree_looked or not 0 < tail < TAIL_MAX // 2:
            return None
        text = text_behind(sequence.anchor, self._hashes.tail[-tail:])
        if text is None:
            self._tree_looked = chunks
            return None
        return Place(text, Source.TREE, 0, MATCH_MAX)

    def draft(self, acceptance: Acceptance, count: int, least: float) -> tuple[Int32Array, list[float]]:
        """Return the sequence's next tokens as they stand at its place, `count` or fewer, and for each how likely
        it and all before it are right: those that are at least `least`."""
        place = self.place
        if place is None or count <= 0:
            return _NOTHING, []
        fit = self.fits.get(place.source)
        ratio = fit.ratio if fit is not None else 1.0
        chances = acceptance.chances(place.source, place.match, count, ratio, least)
        if not chances:
            return _NOTHING, []
        tokens = place.text.tokens(place.at, len(chances))
        return tokens, chances[: len(tokens)]


_NOTHING: Final = np.empty(0, np.int32)
