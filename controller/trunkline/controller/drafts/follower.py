"""Follow one sequence: hold the place in some text from which it seems to go on; check it with each token. Pure.

      sequence   … d e f g h ?
      a text     … d e f g h i j k …      place: the next token should be i; 5 tokens agree before it
                             └ draft: i j k …

When the next token is another one, the place is lost, and the longest match is looked for in all texts.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from typing import Final, NamedTuple, Protocol

import numpy as np

from trunkline.controller.drafts.acceptance import CHANCE_MAX, Fit, Others, Source
from trunkline.controller.drafts.tenant_texts import Tenant
from trunkline.controller.drafts.text_index import MATCH_MAX, NO_TOKEN, RUNS, TAIL_MAX, RunHashes, TextIndex
from trunkline.controller.drafts.tree_texts import TreeText, text_behind
from trunkline.controller.sequences.sequence import Sequence
from trunkline.kvstore.chunks import Int32Array, unpack_int32

LATE_MAX: Final = 64
"""Number of tokens of a sequence that are indexed together, if short matches are not looked for."""
INTERVAL_LEAST: Final = 8
"""Number of tokens behind which a match is looked for again, where none was found."""
INTERVAL_MAX: Final = 64
"""Largest number of such tokens, reached after many searches without a match."""
CHEAP: Final = 0.1
"""Chance that makes a drafted token worth its row, below which short matches are always looked for."""
LIKELY: Final = 2.0
"""How much more often tokens must be foreseen than is worth a row, so that short matches are looked for."""
FORESEEN_NEW: Final = 0.1
"""Weight of a new token in how often tokens are foreseen."""
LEARNT_MAX: Final = 4
"""Of tokens that have waited together, how many of the last are learnt from, if short matches are not looked for.
Not of those behind drafts: how many come depends on what was right."""
SURE: Final = 8
"""Number of tokens that agree from which on no longer match is looked for."""


class Text(Protocol):
    """A text in which a follower may hold a place."""

    def token(self, place: int) -> int:
        """Return the token at a position; `NO_TOKEN`: it is not there."""
        ...

    def tokens(self, place: int, count: int) -> list[int]:
        """Return up to `count` tokens from a position on."""
        ...


class Place(NamedTuple):
    """A place in a text."""

    text: Text
    source: Source
    at: int
    match: int
    """Number of tokens that agree before the place, at most `MATCH_MAX`."""
    others: Others = Others.NONE


class Follower:
    """The place of one decoding sequence, and the indexes that are its own."""

    __slots__ = (
        "_chunk_size",
        "_foreseen",
        "_hashes",
        "_interval",
        "_late",
        "_tenant",
        "_to_index",
        "_tree_looked",
        "_waiting",
        "came",
        "context",
        "fits",
        "place",
        "prediction",
        "sequence",
    )

    def __init__(self, sequence: Sequence, tenant: Tenant, chunk_size: int, prediction: bytes = b"") -> None:
        """
        Args:
            tenant: whose sequence it is.
            chunk_size: tokens of a chunk of the radix tree; 0: the tree is not looked at.
            prediction: int32 token ids that the answer may be like.
        """
        tokens = sequence.tokens
        self.sequence = sequence
        self._tenant = tenant
        self.place: Place | None = None
        self.context: TextIndex | None = None
        """Index of the sequence's own tokens; None: it has none (yet)."""
        self.prediction: TextIndex | None = None
        self.fits: dict[Source, Fit] = {}
        self._chunk_size = chunk_size
        self._tree_looked = -1
        """Number of chunks of the sequence's path behind which the tree has no other text; -1: not looked."""
        self._hashes = RunHashes(tokens.view(max(0, tokens.count - TAIL_MAX // 2)).tolist())
        self.came = array("i")
        """The tokens that came since the follower began and were looked at."""
        self._foreseen = 0.5
        """Part of the latest tokens that stood at a place."""
        self._late = 0
        """Number of the latest of `came` that are not in `context`."""
        self._waiting: list[int] = []
        """Tokens behind those that came, which were not looked at."""
        self._interval = 1
        """Number of tokens that wait before they are looked at."""
        self._to_index = tokens.count
        """Number of the sequence's tokens when the follower began, which are indexed before those that came."""
        if prediction:
            likely = unpack_int32(prediction)
            self.prediction = TextIndex(len(likely) + 1)
            self.prediction.extend(np.append(likely, np.int32(NO_TOKEN)))
            if tokens.count == sequence.prompt_len:
                self.place = Place(self.prediction, Source.PREDICTION, 0, 0)

    @property
    def count(self) -> int:
        """Number of the sequence's tokens that were looked at."""
        return self._to_index + len(self.came)

    @property
    def is_indexed(self) -> bool:
        """Whether all of the sequence's tokens but the late ones are in `context`."""
        return self.context is not None and self.context.count >= self._to_index

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
            context.extend(np.array(self.came[: len(self.came) - self._late], np.int32))
        return stop - start

    def extend(self, tokens: list[int]) -> bool:
        """Take in the sequence's next tokens, which wait for `advance`; return whether that is due."""
        self._waiting += tokens
        return len(self._waiting) >= self._interval

    def advance(self, runs: int, *, drafted: bool = False) -> None:
        """Go on behind the tokens that wait, and look for the longest match if the place is lost.

        Args:
            runs: number of lengths of `RUNS` that are looked for. All: also while a place is held that agrees with
                few tokens. 0: nothing is looked for.
            drafted: whether the tokens came behind drafts. If all lengths are looked for, that is done as if they
                had come one by one.
        """
        waiting = self._waiting
        while drafted and runs == len(RUNS) and (count := self._sure(len(waiting))) < len(waiting):
            self._waiting, waiting = waiting[:count], waiting[count:]
            self._advance(runs)
        self._waiting = waiting
        self._advance(runs, learns_all=drafted)

    def _sure(self, count: int) -> int:
        """Return how many of `count` tokens that come behind drafts may be taken in together: none but the last
        can be another one than was drafted, and behind that all others are looked for."""
        place = self.place
        if place is None or place.match < SURE:
            return 1
        if place.text is self.context:  # which goes on only as tokens are taken in
            count = min(count, self.count - place.at)
        return max(1, count - 1)

    def _advance(self, runs: int, *, learns_all: bool = False) -> None:
        tokens, place, thorough = self._waiting, self.place, runs == len(RUNS)
        if place is not None and self._late and (thorough or self._nears_end(place, len(tokens))):
            self._index_late()
        foreseen, last = 0, self._hashes.tail[-1]
        skipped = 0 if thorough or learns_all or self.repeats_end else len(tokens) - LEARNT_MAX
        if place is not None and skipped > 0:
            text = place.text.tokens(place.at, skipped)
            foreseen = next(
                (i for i, pair in enumerate(zip(text, tokens, strict=False)) if pair[0] != pair[1]), len(text)
            )
            last = tokens[skipped - 1]
            match = min(place.match + skipped, MATCH_MAX)
            moved = Place(place.text, place.source, place.at + skipped, match)
            place = moved if foreseen == skipped else None
        while place is not None and foreseen < len(tokens):
            place = self._compare(place, last, last := tokens[foreseen])
            foreseen += place is not None
        self._note(foreseen, len(tokens))
        if runs and place is None and len(tokens) > 1:  # the sequence may repeat what has just come
            self._take_in(tokens[:-1])
            self._index_late()
            tokens = tokens[-1:]
        self._take_in(tokens)
        if runs and (place is None or (thorough and place.match < SURE)):
            place = self._look(place, self._hashes.mixed(), self.came[-self._late :], runs)
        if thorough or self._late >= LATE_MAX:
            self._index_late()
        self.place = place
        self._waiting = []
        if thorough or place is not None:
            self._interval = 1
        else:  # it fails again and again: less often
            self._interval = min(max(2 * self._interval, INTERVAL_LEAST), INTERVAL_MAX)

    def skip(self) -> None:
        """Take in the tokens that wait without looking at any: the place is lost."""
        self._take_in(self._waiting)
        self.place, self._waiting = None, []
        self._interval = max(self._interval, INTERVAL_LEAST)

    def _take_in(self, tokens: list[int]) -> None:
        if len(tokens) == 1:
            self._hashes.push(tokens[0])
        else:
            self._hashes.extend(tokens)
        self.came.extend(tokens)
        self._late += len(tokens)

    def foretold(self, tokens: Int32Array) -> None:
        """Go on along what the grammar demands behind the sequence's tokens so far."""
        if self._waiting:
            self.advance(0)
        self.place = Place(TreeText(tokens), Source.GRAMMAR, 0, MATCH_MAX)
        self._interval = 1

    @property
    def prompt(self) -> Int32Array:
        """The tokens that the sequence had when the follower began."""
        return self.sequence.tokens.view(0, self._to_index)

    @property
    def output(self) -> Int32Array:
        """The tokens that came since the follower began."""
        return np.array([*self.came, *self._waiting], np.int32)

    @property
    def can_draft(self) -> bool:
        """Whether there is a place, behind the sequence's last token."""
        return self.place is not None and not self._waiting

    @property
    def interval(self) -> int:
        """Number of tokens that wait before they are looked at."""
        return self._interval

    @property
    def waiting_count(self) -> int:
        """Number of tokens that wait."""
        return len(self._waiting)

    @property
    def repeats_end(self) -> bool:
        """Whether the place may be in tokens that wait, so that one is learnt from after the other. Those before
        them are indexed first if that could matter."""
        return self.place is not None and self._nears_end(self.place, len(self._waiting) - self._late)

    def is_likely(self, least: float) -> bool:
        """Return whether rows are so cheap, or so many tokens foreseen, that short matches are worth being looked
        for.

        Args:
            least: the chance from which on a drafted token is worth its row.
        """
        return least < CHEAP or self._foreseen >= LIKELY * least

    def _note(self, foreseen: int, count: int) -> None:
        """Take in that the first of some tokens were foreseen."""
        kept = 1.0 - FORESEEN_NEW
        self._foreseen = (1.0 - (1.0 - self._foreseen) * kept**foreseen) * kept ** (count - foreseen)

    def _nears_end(self, place: Place, count: int) -> bool:
        """Return whether some of `count` tokens at a place may be among those that are not indexed."""
        return self.context is not None and place.text is self.context and place.at + count > self.context.count

    def _index_late(self) -> None:
        if self.is_indexed and self.context is not None:
            if self._late == 1:
                self.context.push(self.came[-1], self._hashes.mixed())
            else:
                self.context.extend(np.array(self.came[-self._late :], np.int32))
        self._late = 0

    def _compare(self, place: Place, last: int, token: int) -> Place | None:
        """Return the place behind `token`, and learn whether it was the expected one; None: it was not, or the
        text has ended.

        Args:
            last: the token before it.
        """
        acceptance = self._tenant.acceptance
        text, source, at, match, others = place
        expected = text.token(at)
        if expected == NO_TOKEN:  # the prompt is not indexed so far
            return None
        is_right = expected == token
        fit = self.fits.get(source)
        if fit is None:
            fit = self.fits[source] = Fit()
        chance = acceptance.chance(source, match, others)
        acceptance.learn(source, match, others, is_right=is_right)
        if match < SURE:
            chance = min(chance * acceptance.behind.ratio(last) * acceptance.of.ratio(expected), CHANCE_MAX)
            acceptance.behind.learn(last, chance, is_right=is_right)
            acceptance.of.learn(expected, chance, is_right=is_right)
        fit.learn(chance, is_right=is_right)
        if not is_right or text.token(at + 1) == NO_TOKEN:
            return None
        return Place(text, source, at + 1, min(match + 1, MATCH_MAX))

    def _look(
        self,
        place: Place | None,
        mixed: list[int],
        behind: Items[int],
        runs: int = len(RUNS),
    ) -> Place | None:
        """Return the place with the longest match, `place` included, or else one in the tree."""
        place = self._longest(place, self._hashes, mixed, behind, runs)
        if place is None or place.source is not Source.TREE:
            return self._in_tree() or place
        return place

    def _longest(
        self,
        place: Place | None,
        hashes: RunHashes,
        mixed: list[int],
        behind: Items[int],
        runs: int = len(RUNS),
    ) -> Place | None:
        """Return the place with the longest match to the tokens of `hashes` in all indexes, `place` included.

        Args:
            behind: tokens that stand behind those of `context`.
            runs: as in `TextIndex.find`.
        """
        match = place.match if place is not None else 0
        said: list[int] = []
        if place is not None:
            said.append(self._token(place.text, place.at, behind))
        for source, index in (
            (Source.PREDICTION, self.prediction),
            (Source.CONTEXT, self.context),
            (Source.RECENT, self._tenant.index),
        ):
            if index is None:
                continue
            found, agreed = index.find(hashes, mixed, runs)
            for nth, at in enumerate(found):
                if place is not None and at == place.at and index is place.text:
                    continue
                token = self._token(index, at, behind)
                if token == NO_TOKEN:
                    continue
                if nth == 0 and agreed > match:
                    place, match = Place(index, source, at, agreed), agreed
                    said.insert(0, token)
                else:
                    said.append(token)
        if place is None or not said:
            return place
        return place._replace(others=_others(said)) if len(said) > 1 or place.others else place

    def _in_tree(self) -> Place | None:
        """Return the place behind the sequence's path in the tree, if another sequence went on from there."""
        sequence, chunks = self.sequence, len(self.sequence.path)
        tail = self.count - chunks * self._chunk_size
        if not self._chunk_size or chunks == self._tree_looked or not 0 < tail < TAIL_MAX // 2:
            return None
        text = text_behind(sequence.anchor, self._hashes.tail[-tail:])
        if text is None:
            self._tree_looked = chunks
            return None
        return Place(text, Source.TREE, 0, MATCH_MAX)

    def draft(self, count: int, least: float, *, thorough: bool) -> tuple[Int32Array, list[float]]:
        """Return the sequence's likely next tokens, `count` or fewer, and for each how likely it and all before it
        are right: those that are at least `least`.

        The longest match is looked for anew behind each drafted token, as `advance` would, so a draft may go from
        one text to another. No tokens wait.

        Args:
            least: the chance from which on a drafted token is worth its row.
            thorough: whether to look anew; else the draft stays in one text.
        """
        place, likely, acceptance = self.place, 1.0, self._tenant.acceptance
        if place is not None and self._late and (thorough or self._nears_end(place, count)):
            self._index_late()
        tokens: list[int] = []
        chances: list[float] = []
        hashes: RunHashes | None = None
        last = self._hashes.tail[-1]
        while place is not None and len(tokens) < count:
            if (place.match >= SURE or not thorough) and place.text.token(place.at) != NO_TOKEN:
                rest = self._along(place, count - len(tokens), least / likely)
                tokens += rest[0]
                chances += [likely * chance for chance in rest[1]]
                break
            token = self._token(place.text, place.at, tokens)
            if token == NO_TOKEN:
                break
            chance = acceptance.chance(place.source, place.match, place.others)
            if place.match < SURE:
                chance *= acceptance.behind.ratio(last) * acceptance.of.ratio(token)
            likely *= min(chance * self._fit(place.source), CHANCE_MAX)
            if likely < least:
                break
            tokens.append(token)
            chances.append(likely)
            last = token
            if hashes is None:
                hashes = self._hashes.copy()
            hashes.push(token)
            place = Place(place.text, place.source, place.at + 1, min(place.match + 1, MATCH_MAX))
            if thorough and place.match < SURE:
                place = self._longest(place, hashes, hashes.mixed(), tokens)
        return np.array(tokens, np.int32), chances

    def _token(self, text: Text, at: int, behind: Items[int]) -> int:
        """Return the token at a place, if the tokens `behind` stand behind those of `context`."""
        token = text.token(at)
        if token == NO_TOKEN and text is self.context and self.is_indexed:
            beyond = at - self.context.count
            return behind[beyond] if 0 <= beyond < len(behind) else NO_TOKEN
        return token

    def _along(self, place: Place, count: int, least: float) -> tuple[list[int], list[float]]:
        """Return what stands at a place, `count` tokens or fewer, with the chances that are `least` or more."""
        fit, acceptance = self._fit(place.source), self._tenant.acceptance
        chances = acceptance.chances(place.source, place.match, count, fit, least)
        tokens = place.text.tokens(place.at, len(chances)) if chances else []
        return tokens, chances[: len(tokens)]

    def _fit(self, source: Source) -> float:
        fit = self.fits.get(source)
        return fit.ratio if fit is not None else 1.0


def _others(said: Items[int]) -> Others:
    """Return how the tokens at other places go with that at the first."""
    agreeing, count = said.count(said[0]) - 1, len(said) - 1
    if not count:
        return Others.NONE
    return Others.ALL_AGREE if agreeing == count else Others.SOME_AGREE if agreeing else Others.DIFFER
