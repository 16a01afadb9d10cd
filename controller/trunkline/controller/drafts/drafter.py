"""The source of drafts of one scheduler: follows its decoding sequences, and says what each should draft. Pure.

    add ─► extend … ─► remove     each token moves its sequence's follower, and teaches how often drafts are
                                  right; where nothing can pay, tokens of some steps are held together
    study                         indexes prompts, while the workers compute
    waits, propose                would drafts pay now? which, and how long (`length.py`)

A token that a follower foresaw counts as right whether it was drafted or not, so nothing is spent on trying.
Drafts never cross tenants, whose answers would tell by their speed what others have been told: each salt has an
index of its texts and counts of its own (`tenant_texts.py`), and the tree is looked at only behind a sequence's
own path. Memory is bounded: without room for an index, a sequence does without it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import log1p
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trunkline.controller.drafts.acceptance import Source
from trunkline.controller.drafts.allowance import SHARE, Allowance
from trunkline.controller.drafts.follower import LEARNT_MAX, Follower
from trunkline.controller.drafts.length import Lengths
from trunkline.controller.drafts.tenant_texts import TenantTexts
from trunkline.controller.drafts.text_index import RUNS, TextIndex
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.sequences.sequence import Sequence
from trunkline.controller.tiers.costs import StepCosts
from trunkline.kvstore.chunks import Int32Array

Slots = NDArray[np.intp]
DRAFT_MAX: Final = 24
"""Largest number of tokens that are drafted for a row."""
FOLLOWED_MAX: Final = 64
"""Largest number of sequences that are followed at once: a larger batch gains little from drafts, and following
takes some µs per token."""
INDEX_TOKENS_PER_STEP: Final = 8192
"""Tokens of prompts that are indexed behind one plan (about 0.1 ms)."""
TENANT_TOKENS_PER_STEP: Final = 2048
"""Tokens of the texts of requests that have ended which are looked at behind one plan (0.06 to 0.16 ms)."""
INDEX_BYTES_MAX: Final = 64 << 20
"""Memory of all indexes of sequences together."""
GROWTH_TOKENS: Final = 4096
"""Room for output in the index of a sequence; a longer output overwrites the prompt's oldest tokens."""
LONG_RUNS: Final = 1
"""Number of lengths of `RUNS` that are looked for where short matches are not worth it."""
HELD_MAX: Final = 64
"""Largest number of tokens of a sequence that wait while nothing may be looked at; then its place is lost."""
CALM_STEPS_MAX: Final = 24
"""Largest number of steps whose tokens are held together."""
HAND_US: Final = 20.0, 1.0
"""Price of giving tokens that were held to followers, and of each of a step's rows. These prices were measured in
servers whose workers share the cores, where most are two or three times what a loop of its own takes."""
TRACK_US: Final = 35.0, 6.0
"""Price of going on with a sequence that has a place, and of each token that is learnt from."""
LOOK_US: Final = 50.0
"""Price of looking for a long match."""
THOROUGH_US: Final = 30.0, 12.0
"""Price of looking for every match, and of each token behind which that is done: of drafts each, else the last."""
STUDY_US: Final = 40.0, 0.02, 0.05
"""Price of indexing, of each token of a prompt of a sequence, and of a text of one that has ended."""
CONSIDER_US: Final = 20.0
"""Price of asking whether drafts may pay."""
DRAFT_US: Final = 30.0
"""Price of a draft that is considered."""
CHOOSE_US: Final = 150.0
"""Price of choosing lengths for several sequences."""
STALL: Final = 2.0
"""What a step with drafts takes beyond so many times its expected time is not held against drafts."""


class Drafter:
    """Implements `DraftSource` for one scheduler."""

    def __init__(self, config: EngineConfig, costs: StepCosts) -> None:
        self._chunk_size = config.chunk_size if config.prefix_cache else 0
        self._followers: dict[int, Follower] = {}
        """The sequences that are followed, by slot."""
        self._placed = 0
        """Number of these that have a place."""
        self._unindexed: deque[Follower] = deque()
        """Followers whose prompts are not wholly indexed, in order of arrival."""
        self._index_bytes = 0
        self._held = _HeldTokens()
        self._rest = 1
        """Number of steps whose tokens are held before they are looked at."""
        self._tenants = TenantTexts()
        self._allowance = Allowance()
        self._lengths = Lengths(costs)
        self._serial: _SerialStep | None = None
        """The last step before which the workers had to wait, for the sake of drafts."""
        self._least = 0.0
        """Chance from which on a drafted token was worth its row in the last step that was considered."""
        self._waits: bool | None = None
        """Whether the next step is planned only behind the result of the one in flight; None: not known yet."""
        self._plain = 0, 0.0
        """Rows of the next step, and its time without drafts in µs; 0 until they are known."""
        self._share = SHARE
        """Part of the steps' time that looking may take; 0: nothing is looked at."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory of all indexes."""
        return self._index_bytes + self._tenants.nbytes

    # Sequences

    def add(self, sequence: Sequence) -> None:
        """Follow a sequence that begins to decode, if there is room for one more."""
        prediction = sequence.group.request.submit.prediction
        if prediction is None or len(self._followers) >= FOLLOWED_MAX:
            return
        if self._index_bytes + TextIndex.bytes_for(len(prediction) // 4 + 1) > INDEX_BYTES_MAX:
            prediction = b""
        self._hand_over()
        follower = Follower(sequence, self._tenants.of(sequence.salt), self._chunk_size, prediction)
        self._index_bytes += follower.nbytes
        self._placed += follower.place is not None
        self._followers[sequence.slot] = follower
        self._unindexed.append(follower)
        self._rest = 1

    def remove(self, sequence: Sequence) -> None:
        """Stop following a sequence; its texts are a source of drafts for others of its tenant."""
        if sequence.slot not in self._followers:
            return
        self._hand_over()
        follower = self._followers.pop(sequence.slot)
        if not self._followers:
            self._waits, self._plain = None, (0, 0.0)
        self._placed -= follower.place is not None
        self._index_bytes -= follower.nbytes
        if follower in self._unindexed:
            self._unindexed.remove(follower)
        self._tenants.add(sequence.salt, follower.prompt, follower.output)

    def extend(self, slots: Slots, tokens: Int32Array) -> None:
        """Take in the next tokens of some sequences."""
        if self._serial is not None:
            self._serial.tokens += tokens.size
        if self._followers and len(slots):
            self._held.steps.append((slots, tokens))
            self._held.count += 1 if tokens.ndim == 1 else len(tokens)
            if self._held.count >= self._rest:
                self._look()

    @property
    def _is_shut(self) -> bool:
        """Whether nothing may be looked at. For what `waits` has decided on, all may: the workers wait already."""
        return not self._waits and (not self._share or self._allowance.is_broke)

    def _look(self) -> None:
        """Look at the tokens that are held, as far as the allowance admits, and decide when to look again."""
        if self._is_shut and self._held.count < HELD_MAX:
            self._rest = min(self._held.count + self._shut_steps, HELD_MAX)
            return
        if not self._is_shut:
            self._allowance.spend(_hand_us(len(self._held.steps[-1][0])))
        for follower in self._hand_over():
            self._advance(follower)
        if self._is_shut:
            self._rest = self._shut_steps
        elif self._placed:
            self._rest = 1
        else:
            self._rest = min(follower.interval for follower in self._followers.values())
        self._rest = min(self._rest, CALM_STEPS_MAX)

    @property
    def _shut_steps(self) -> int:
        return self._allowance.broke_steps if self._share else CALM_STEPS_MAX

    def _hand_over(self) -> list[Follower]:
        """Give the tokens that are held to their followers; return those that are due. Where nothing may be looked
        at, places behind which too many tokens wait are lost."""
        self._rest, is_shut = max(1, self._rest - self._held.count), self._is_shut
        held, self._held = self._held.steps, _HeldTokens()
        due: list[Follower] = []
        while held:
            slots, count = held[0][0], 1
            while count < len(held) and (held[count][0] is slots or np.array_equal(held[count][0], slots)):
                count += 1
            columns = np.concatenate([tokens.reshape(-1, len(slots)) for _, tokens in held[:count]]).T
            for slot, drawn in zip(slots.tolist(), columns.tolist(), strict=True):
                if (follower := self._followers.get(slot)) is None:
                    continue
                if follower.extend(drawn):
                    due.append(follower)
                if is_shut:
                    self._limit_waiting(follower)
            del held[:count]
        return list(dict.fromkeys(due))

    def _limit_waiting(self, follower: Follower) -> None:
        """Give up the place of a follower for which too many tokens wait."""
        if follower.waiting_count >= HELD_MAX:
            self._placed -= follower.place is not None
            follower.skip()

    def _advance(self, follower: Follower) -> None:
        """Look at tokens that wait, as far as the allowance admits."""
        if self._is_shut:
            self._limit_waiting(follower)
            return
        runs, price, count = LONG_RUNS, LOOK_US, follower.waiting_count
        drafted, is_thorough = self._serial is not None and self._serial.drafted, self._is_thorough(follower)
        if follower.place is not None:
            self._placed -= 1
            learns_all = drafted or is_thorough or follower.repeats_end
            learnt = count if learns_all else min(count, LEARNT_MAX)
            price = TRACK_US[0] + TRACK_US[1] * learnt
        if is_thorough:
            runs, price = len(RUNS), max(price, THOROUGH_US[0] + THOROUGH_US[1] * (count if drafted else 1))
        self._allowance.spend(price)
        follower.advance(runs, drafted=drafted)
        self._placed += follower.place is not None

    def _is_thorough(self, follower: Follower) -> bool:
        """Return whether short matches are looked for, too."""
        return self._allowance.is_rich and follower.is_likely(self._least)

    @property
    def studies(self) -> bool:
        """Whether prompts of sequences wait to be indexed, and may be."""
        return bool(self._unindexed) and not self._is_shut

    def study(self, *, is_idle: bool) -> bool:
        """Index a part of the texts that wait for it, if there are some and the allowance admits it; where nothing
        runs, it costs nothing. Return whether to go on at once."""
        if is_idle:
            self._tenants.index_some(TENANT_TOKENS_PER_STEP)
            return self._tenants.waits
        of_tenants = self._allowance.is_rich and self._tenants.waits
        if self._is_shut or not (self._unindexed or of_tenants):
            return False
        budget = INDEX_TOKENS_PER_STEP
        while self._unindexed and budget > 0:
            follower = self._unindexed[0]
            if follower.context is None:
                capacity = min(follower.count + GROWTH_TOKENS, follower.sequence.group.limit)
                if self._index_bytes + TextIndex.bytes_for(capacity) > INDEX_BYTES_MAX:
                    self._unindexed.popleft()
                    continue
                follower.context = TextIndex(capacity)
                self._index_bytes += follower.context.nbytes
            budget -= follower.index_some(budget)
            if follower.is_indexed:
                self._unindexed.popleft()
        own = INDEX_TOKENS_PER_STEP - budget
        others = self._tenants.index_some(min(max(budget, 0), TENANT_TOKENS_PER_STEP)) if of_tenants else 0
        self._allowance.spend(STUDY_US[0] + STUDY_US[1] * own + STUDY_US[2] * others)
        return False

    # Steps

    def foretold(self, slot: int, tokens: Int32Array) -> None:
        """Let a sequence draft what its grammar demands."""
        follower = self._followers.get(slot)
        if follower is None or self._is_shut or not len(tokens) or tokens.min() < 0:
            return
        self._allowance.spend(TRACK_US[0])
        self._hand_over()
        self._placed -= follower.place is not None
        follower.foretold(tokens)
        self._placed += 1
        self._rest = 1

    @property
    def calm_steps(self) -> int:
        """For how many steps more there will be no guesses; 0: it has to be told of each."""
        if self._serial is not None or self.studies:
            return 0
        return max(1, self._rest - self._held.count) if self._followers else CALM_STEPS_MAX

    def settle(self, slots: Slots, tokens: Int32Array, steps: list[int]) -> None:
        """Take in the tokens of steps that were neither `planned` nor `answered` here."""
        self._lengths.bubble.settle(steps)
        if not len(tokens):
            return
        self._lengths.worth.rest(len(tokens))
        self._waits = self._waits or None
        self._share = self._lengths.share(len(slots))
        self._allowance.step(self._lengths.plain_us(len(slots), 0), self._share, len(tokens))
        self.extend(slots, tokens)

    def waits(self, slots: Slots) -> bool:
        """Return whether drafts behind the step in flight are worth waiting for its result."""
        if self._waits is None:
            chances = [chances[1:] for _, chances in self._drafts(slots.tolist(), 0, ahead=1)]
            self._waits = bool(chances) and self._lengths.choose(len(slots), 0, chances) is not None
            if self._waits:
                self._rest = 1  # or the tokens that are waited for would be held
            elif self._may_draft(slots.tolist()):
                track_us = TRACK_US[0] + TRACK_US[1] * LEARNT_MAX
                price = _hand_us(len(slots)) + track_us * self._placed + CONSIDER_US
                price += self._draft_us(len(slots)) if chances else 0.0
                self._rest = min(self._allowance.rest(price), CALM_STEPS_MAX)
        return self._waits

    def propose(self, slots: Slots, room: NDArray[np.int64], prefill_tokens: int) -> list[Int32Array] | None:
        """Return what each row should draft; None: no row should."""
        drafts = self._drafts(slots.tolist(), prefill_tokens, room.tolist())
        if not drafts:
            return None
        lengths = self._lengths.choose(len(slots), prefill_tokens, [chances for _, chances in drafts])
        if lengths is None:
            return None
        return [tokens[:length] for (tokens, _), length in zip(drafts, lengths, strict=True)]

    def _drafts(
        self, slots: list[int], prefill_tokens: int, room: list[int] | None = None, ahead: int = 0
    ) -> list[tuple[Int32Array, list[float]]]:
        """Return each row's draft with its chances, `ahead` longer than may be; none at all: all are empty."""
        self._plain = len(slots), self._lengths.plain_us(len(slots), prefill_tokens)
        self._least = least = self._lengths.least_chance(len(slots), prefill_tokens)
        self._share = self._lengths.share(len(slots))
        if not self._may_draft(slots):
            return []
        self._allowance.spend(CONSIDER_US)
        if not self._lengths.may_pay(len(slots), prefill_tokens, [_GAIN_MAX] * min(self._placed, len(slots))):
            return []
        self._allowance.spend(self._draft_us(len(slots)))
        found = []
        for index, slot in enumerate(slots):
            row = self._followers.get(slot)
            if row is None or not row.can_draft:
                found.append(_NO_DRAFT)
                continue
            count = DRAFT_MAX + ahead if room is None else min(DRAFT_MAX, room[index])
            found.append(row.draft(count, least, thorough=self._is_thorough(row)))
        return found

    def _may_draft(self, slots: list[int]) -> bool:
        """Return whether a row has a place behind its last token, and may be looked at."""
        if self._held.steps or self._is_shut:
            return False
        rows = (self._followers.get(slot) for slot in slots)
        return any(row is not None and row.can_draft for row in rows)

    def _draft_us(self, rows: int) -> float:
        """Return the price of drafting for all sequences that have a place, and of choosing."""
        return DRAFT_US * self._placed + (CHOOSE_US if rows > 1 else 0.0)

    def is_prediction(self, slot: int) -> bool:
        """Return whether the place from which a sequence would draft is in its prediction."""
        follower = self._followers.get(slot)
        place = follower.place if follower is not None else None
        return place is not None and place.source is Source.PREDICTION

    def planned(self, step: int, now: float, drafted: int) -> None:
        """Note a step that was planned."""
        alone = self._lengths.bubble.planned(step, now)
        rows, plain_us = self._plain
        if plain_us:
            self._allowance.step(plain_us, self._share)
        serial, self._serial = self._serial, None
        if serial is not None and serial.whole_us:
            self._lengths.worth.step(serial.tokens, serial.rows, serial.plain_us, serial.whole_us)
            whole_us = min(serial.whole_us, STALL * serial.expected_us)
            self._allowance.saved(serial.plain_us * serial.tokens / serial.rows - whole_us)
        if alone and rows and (drafted or self._waits or (serial is not None and serial.drafted)):
            expected_us = self._lengths.whole_us(rows, drafted, plain_us)
            self._serial = _SerialStep(rows, plain_us, expected_us, drafted=drafted > 0)
        elif not alone:
            self._lengths.worth.rest()
        self._waits, self._plain = None, (0, 0.0)

    def answered(self, step: int, now: float, elapsed_us: int) -> None:
        """Note the answer to a step."""
        whole_us = self._lengths.bubble.answered(step, now, elapsed_us)
        if self._serial is not None:
            self._serial.whole_us = whole_us


@dataclass(slots=True)
class _HeldTokens:
    """The tokens of the latest steps, which no follower has got yet."""

    steps: list[tuple[Slots, Int32Array]] = field(default_factory=list)
    """The slots of each step's rows, and its tokens: `[rows]`, or `[positions, rows]`."""
    count: int = 0
    """Number of tokens of each sequence, at most."""


@dataclass(slots=True)
class _SerialStep:
    """A step that was planned only when the one before it was answered."""

    rows: int
    plain_us: float
    """Estimated time of the step without drafts, in microseconds."""
    expected_us: float
    """Estimated time of the step as it is, with the time that the workers wait for its plan."""
    drafted: bool
    tokens: int = 0
    """Tokens that it has brought so far."""
    whole_us: float = 0.0
    """Its time, with the time that the workers waited for its plan; 0: it is in flight."""


def _hand_us(rows: int) -> float:
    """Return the price of giving the tokens of so many rows to their followers."""
    return HAND_US[0] + HAND_US[1] * rows


_GAIN_MAX: Final = log1p(DRAFT_MAX)
"""Logarithm of by how much a draft makes a sequence faster at most."""
_NO_DRAFT: Final[tuple[Int32Array, list[float]]] = (np.empty(0, np.int32), [])
