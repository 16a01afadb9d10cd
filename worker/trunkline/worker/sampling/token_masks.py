"""Masks of the tokens that rows may draw: grammars, allowed ids, minimum lengths, bad words.

A mask is one bit per id (int32 words, little-endian, bit i of word w is id 32·w + i), so that 128,000 ids are
16 KB: masks are combined on the CPU and travel packed to where the logits are.

Masks can contradict each other. They are applied in this order, and one that would leave nothing of those before
it is left out at this step, so that every row always has a token to draw:

      grammar, allowed ids, minimum length (stop ids forbidden), bad words.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from trunkline.kvstore.int32_codec import Int32Array, unpack_int32
from trunkline.worker.batch.sequences import BatchSequence
from trunkline.worker.errors import PlanError
from trunkline.worker.messages import Sampling

_FINITE_MAX: Final = 1e20
"""Logits of masked rows are brought below it: an allowed token then beats every masked one, also after
penalties and temperature, whatever the model or a bias made of it (NaN and -inf included)."""


class Grammars(Protocol):
    """What masks need of `grammar.compiler.GrammarStore`."""

    def fill(self, sequence: BatchSequence, words: Int32Array) -> None:
        """Write the ids that the grammar allows next; at least one."""

    def forget_sequences(self, sequences: Iterable[int]) -> None:
        """Forget sequences that left the batch."""


def needs_mask(sampling: Sampling, output_index: int) -> bool:
    """Return whether a row may be forbidden any token, now or later."""
    return bool(
        sampling.grammar
        or sampling.allowed_ids
        or sampling.bad_words
        or (output_index < sampling.min_tokens and sampling.stop_ids)
    )


class TokenMasks:
    """The masks of a fixed set of rows."""

    def __init__(
        self, samples: list[BatchSequence], vocab_size: int, device: torch.device, grammars: Grammars | None
    ) -> None:
        """`samples`: of all rows; those that ask for nothing are left alone.

        Raises:
            PlanError: a row follows a grammar, and there are none on this rank.
        """
        rows = [row for row, s in enumerate(samples) if needs_mask(s.sampling, s.output_index)]
        self._masks = [_RowMask(samples[row], vocab_size, grammars) for row in rows]
        self._all_rows = len(rows) == len(samples)
        self._rows = torch.tensor(rows, dtype=torch.int64, device=device)
        self._words = np.zeros((len(rows), -(-vocab_size // 32)), dtype=np.int32)
        octets = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
        self._penalties = torch.from_numpy(np.where(octets == 1, 0, -np.inf).astype(np.float32)).to(device)
        """float32 `[256, 8]`: what 8 bits of a mask add to 8 logits."""

    def apply(self, logits: Tensor) -> None:
        """Set the logits of forbidden tokens to -inf, in place, for the next token of each row.

        Args:
            logits: float32 `[all rows, vocabulary]`.
        """
        for mask, words in zip(self._masks, self._words, strict=True):
            mask.fill(words)
        octets = torch.from_numpy(self._words.view(np.uint8)).to(logits.device, torch.int32)
        added = torch.nn.functional.embedding(octets, self._penalties).flatten(1)[:, : logits.shape[1]]
        x = logits if self._all_rows else logits[self._rows]
        x.clamp_(-_FINITE_MAX, _FINITE_MAX).nan_to_num_(-_FINITE_MAX)
        x += added
        if not self._all_rows:
            logits[self._rows] = x


class _RowMask:
    """The mask of one row, whose sequence grows from step to step."""

    def __init__(self, sequence: BatchSequence, vocab_size: int, grammars: Grammars | None) -> None:
        self._sequence = sequence
        self._size = vocab_size
        self._grammars = grammars
        sampling = sequence.sampling
        if sampling.grammar and grammars is None:
            raise PlanError(f"sequence {sequence.id} follows grammar {sampling.grammar}; this rank has none")
        self._everything = self._without(())
        self._allowed = None
        if sampling.allowed_ids:
            allowed = unpack_int32(sampling.allowed_ids).tolist()
            self._allowed = self._everything & ~self._without(allowed)
        self._no_stops = self._without(unpack_int32(sampling.stop_ids).tolist())
        words = [word for word in sampling.bad_words if word]
        self._never = [word[0] for word in words if len(word) == 1]
        self._no_bad_words = self._without(self._never)
        self._bad_sequences = [word for word in words if len(word) > 1]

    def _without(self, ids: Iterable[int]) -> Int32Array:
        """Return a mask of all ids of the vocabulary but these."""
        bits = np.zeros(-(-self._size // 32) * 32, dtype=bool)
        bits[: self._size] = True
        bits[[token for token in ids if 0 <= token < self._size]] = False
        return np.packbits(bits, bitorder="little").view(np.int32)

    def fill(self, words: Int32Array) -> None:
        """Write the ids that are allowed now."""
        sequence = self._sequence
        words[:] = self._everything
        if sequence.sampling.grammar:
            assert self._grammars is not None
            self._grammars.fill(sequence, words)
            words &= self._everything
        if self._allowed is not None:
            _narrow(words, self._allowed)
        if sequence.output_index < sequence.sampling.min_tokens:
            _narrow(words, self._no_stops)
        ending = [word[-1] for word in self._bad_sequences if self._stands_before(word)]
        if ending:
            _narrow(words, self._without([*self._never, *ending]))
        elif self._never:
            _narrow(words, self._no_bad_words)

    def _stands_before(self, word: list[int]) -> bool:
        """Whether all but the last id of a bad word are the newest tokens, be they prompt or output."""
        return self._sequence.tokens[1 - len(word) :].tolist() == word[:-1]


def _narrow(words: Int32Array, mask: Int32Array) -> None:
    """`words &= mask`, unless that would leave nothing."""
    narrowed = words & mask
    if narrowed.any():
        words[:] = narrowed
