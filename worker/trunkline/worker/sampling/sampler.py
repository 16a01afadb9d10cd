"""Drawing the next tokens on rank 0, for all rows at once: masks, penalties, limits, noise.

Order: logit bias; masks (-inf for what grammars, allowed ids, minimum lengths and bad words forbid); repetition,
frequency and presence penalties; here the reported log-probabilities are taken; temperature; top-k; top-p; min-p;
then Gumbel-max. So a bias never brings back what is masked, and reported probabilities are those of tokens that
could be drawn. Repetition counts prompt and output, frequency and presence count output only. Temperature 0 takes
the largest logit, on a tie the lowest id.

A row's token depends on its logits and its own parameters, never on the other rows.

A mask is one bit per id (int32 words, little-endian, bit i of word w is id 32·w + i), so that 128,000 ids are
16 KB: masks are combined on the CPU and travel packed to where the logits are. Masks can contradict each other.
They are applied in this order, and one that would leave nothing of those before it is left out at this step, so
that every row always has a token to draw:

      grammar, allowed ids, minimum length (stop ids forbidden), bad words.

Noise is a pure function of (seed, output index, token id). So a stream that is resumed elsewhere, batched with
others or split over other ranks draws the same tokens. The arithmetic is in `trunkline.kernels.sampling`: there a
row is a row of logits, a seed, an index and options; here these are put together from sequences.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trunkline.controller.reports import TopLogprobs
from trunkline.kernels.reference_sampling import ReferenceSampling
from trunkline.kernels.reference_sampling import first_argmax as first_argmax
from trunkline.kernels.sampling import Biases, Draws, LogitEdits, Masks, Penalties, SamplingOps
from trunkline.kvstore.chunks import Int32Array, pack_int32, unpack_int32
from trunkline.worker.batch.sequences import BatchSequence
from trunkline.worker.errors import PlanError
from trunkline.worker.grammar.compiler import GrammarStore
from trunkline.worker.messages import Sampling

LOGPROB_MIN: Final = -9999.0
"""Log-probability that is reported instead of -inf, which JSON cannot express."""


def is_plain_greedy(samples: list[BatchSequence]) -> bool:
    """Whether every row just takes its largest logit, so that ranks need not bring all logits together."""
    for sequence in samples:
        sampling = sequence.sampling
        if sampling.temperature != 0 or sampling.logprobs >= 0 or sampling.logit_bias or sampling.needs_history:
            return False
        if needs_mask(sampling, sequence.output_index):
            return False
    return True


def draws_plainly(samples: list[BatchSequence], *, limits: bool) -> bool:
    """Return whether each of these rows wants a token by temperature and seed, and no more: so a graph may draw
    it, and what stands before it need not be known.

    Args:
        limits: Whether top-k, top-p and min-p may be wanted, too.
    """
    return all(_is_plain(sequence, limits) for sequence in samples)


def _is_plain(sequence: BatchSequence, limits: bool) -> bool:
    sampling = sequence.sampling
    limited = not limits and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0)
    return not (
        sequence.beam_position is not None
        or sampling.logprobs >= 0
        or sampling.logit_bias
        or sampling.needs_history
        or needs_mask(sampling, sequence.output_index)
        or (limited and sampling.temperature != 0)
    )


class Sampler:
    """Draws tokens; keeps between steps what depends on a sequence, or on the set of rows, only."""

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        grammars: GrammarStore | None = None,
        ops: SamplingOps | None = None,
    ) -> None:
        """Make a sampler.

        Args:
            grammars: the grammars of this rank; None: no row may follow a grammar.
            ops: what computes; None: the reference, which runs on every device.
        """
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._device = device
        self._ops = ops or ReferenceSampling()
        self._rows: _Rows | None = None
        self._histories: dict[int, History] = {}
        self._masks: dict[int, RowMask] = {}

    def sample(
        self,
        logits: Tensor,
        samples: list[BatchSequence],
        *,
        changed: bool,
        ahead: NDArray[np.int64] | None = None,
    ) -> tuple[Tensor, dict[int, TopLogprobs] | None]:
        """Draw one token per row.

        Args:
            logits: float32 `[rows, vocabulary]`, overwritten.
            samples: the rows' sequences, before the token is appended to them.
            changed: whether these are other sequences than in the last call.
            ahead: how many tokens will stand between each sequence and the token that is drawn, `[rows]`; None:
                none. Only for rows that `draws_plainly`.

        Returns:
            int64 ids `[rows]`, and log-probabilities by row for those that asked (None if none did).

        Raises:
            PlanError: a row follows a grammar that is not compiled.
        """
        rows = self._rows
        if rows is None or changed:
            self._rows = rows = _Rows(samples, self._vocab_size, self._device)
        edits = LogitEdits(
            rows.biases,
            self._mask(samples, rows.masked) if rows.masked else None,
            self._penalise(samples, rows.penalised) if rows.penalised else None,
        )
        self._ops.edit_logits(logits, edits)
        ids = self._ops.draw(logits, rows.draws(samples, ahead))
        return ids, self._report(logits, ids, rows) if rows.logprob_rows else None

    def forget(self, sequences: Iterable[int]) -> None:
        """Forget sequences that left the batch."""
        for id_ in sequences:
            self._histories.pop(id_, None)
            self._masks.pop(id_, None)
        if self._grammars is not None and self._grammars.outputs:
            self._grammars.forget_sequences(sequences)

    def _mask(self, samples: list[BatchSequence], rows: list[int]) -> Masks:
        """Return the masks of the rows' next tokens."""
        words = np.empty((len(rows), -(-self._vocab_size // 32)), dtype=np.int32)
        for row, row_words in zip(rows, words, strict=True):
            sequence = samples[row]
            mask = self._masks.get(sequence.id)
            # Another sequence may have come under the same id.
            if mask is None or mask.sequence is not sequence:
                mask = self._masks[sequence.id] = RowMask(sequence, self._vocab_size, self._grammars)
            mask.fill(row_words)
        return Masks(torch.tensor(rows, dtype=torch.int32), torch.from_numpy(words))

    def _penalise(self, samples: list[BatchSequence], rows: list[int]) -> Penalties:
        """Return the penalties of the rows' next tokens."""
        found = []
        for row in rows:
            sequence = samples[row]
            history = self._histories.get(sequence.id)
            if history is None or history.sequence is not sequence:
                history = self._histories[sequence.id] = History(sequence)
            found.append(history.entries())
        tokens, counts = zip(*found, strict=True)
        params = [samples[row].sampling for row in rows]
        factors = [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params]
        return Penalties(
            torch.tensor(rows, dtype=torch.int32),
            torch.from_numpy(np.cumsum([0, *(len(part) for part in tokens)])),
            torch.from_numpy(np.concatenate(tokens)),
            torch.from_numpy(np.concatenate(counts)),
            torch.tensor(factors, dtype=torch.float32),
        )

    def _report(self, logits: Tensor, ids: Tensor, rows: _Rows) -> dict[int, TopLogprobs]:
        numbers = torch.tensor(rows.logprob_rows, dtype=torch.int32)
        chosen, top_ids, top = self._ops.report(logits, numbers, ids[rows.logprob_rows], max(rows.logprob_counts))
        own = chosen.clamp_min(LOGPROB_MIN).tolist()
        tokens = top_ids.cpu().numpy()
        values = top.clamp_min(LOGPROB_MIN).cpu().numpy().astype("<f4")
        return {
            row: TopLogprobs(own[i], pack_int32(tokens[i, :count]), values[i, :count].tobytes())
            for i, (row, count) in enumerate(zip(rows.logprob_rows, rows.logprob_counts, strict=True))
        }


class _Rows:
    """Sampling parameters of a fixed set of rows, as tensors."""

    def __init__(self, samples: list[BatchSequence], vocab_size: int, device: torch.device) -> None:
        params = [s.sampling for s in samples]
        seeds = np.array([p.seed & (1 << 64) - 1 for p in params], dtype=np.uint64)
        self._seeds = torch.from_numpy(seeds.view(np.int64)).to(device)
        # A greedy row's limits do not matter; without them it does not force a sort on the others.
        limits = [(p.top_k, p.top_p, p.min_p) if p.temperature != 0 else (0, 1.0, 0.0) for p in params]
        self._top_k = torch.tensor([max(0, k) for k, _, _ in limits], dtype=torch.int32, device=device)
        factors = [[p.temperature for p in params], [p for _, p, _ in limits], [p for _, _, p in limits]]
        self._factors = torch.tensor(factors, dtype=torch.float32)
        self._factors[2].log_()
        self._factors = self._factors.to(device)
        self._limited = any(limit[0] > 0 or limit[1] < 1 or limit[2] > 0 for limit in limits)
        bias = [
            (row, token, value)
            for row, p in enumerate(params)
            for token, value in p.logit_bias.items()
            if 0 <= token < vocab_size
        ]
        self.biases = Biases(*_columns(bias, device)) if bias else None
        self.logprob_rows = [row for row, p in enumerate(params) if p.logprobs >= 0]
        self.logprob_counts = [min(p.logprobs, vocab_size) for p in params if p.logprobs >= 0]
        self.masked = [row for row, s in enumerate(samples) if needs_mask(s.sampling, s.output_index)]
        self.penalised = [row for row, p in enumerate(params) if _is_penalised(p)]

    def draws(self, samples: list[BatchSequence], ahead: NDArray[np.int64] | None) -> Draws:
        """Return how the rows draw their next tokens, or those `ahead`."""
        indices = np.array([s.output_index for s in samples], dtype=np.int64)
        index = torch.from_numpy(indices if ahead is None else indices + ahead).to(self._seeds.device)
        return Draws(self._seeds, index, self._top_k, self._factors, self._limited)


def _columns(bias: list[tuple[int, int, float]], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    rows, tokens, values = map(list, zip(*bias, strict=True))
    return (
        torch.tensor(rows, dtype=torch.int32, device=device),
        torch.tensor(tokens, dtype=torch.int32, device=device),
        torch.tensor(values, dtype=torch.float32, device=device),
    )


def _is_penalised(sampling: Sampling) -> bool:
    return (
        sampling.repetition_penalty != 1.0 or sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0
    )


class History:
    """The tokens of one sequence, each once, and how often its output has them."""

    def __init__(self, sequence: BatchSequence) -> None:
        self.sequence = sequence
        self._counted = len(sequence.tokens)
        tokens = np.array(sequence.tokens, dtype=np.int32)
        output = max(0, sequence.prompt_len - sequence.first)
        distinct, place = np.unique(tokens, return_inverse=True)
        self._size = len(distinct)
        self._tokens = distinct
        self._counts = np.bincount(place[output:], minlength=self._size).astype(np.int32)
        self._place = {token: i for i, token in enumerate(distinct.tolist())}

    def entries(self) -> tuple[Int32Array, Int32Array]:
        """Return the distinct tokens of prompt and output now, and their counts in the output, int32 `[n]`; they
        are valid until the next call."""
        for token in self.sequence.tokens[self._counted :]:
            self._add(token)
        self._counted = len(self.sequence.tokens)
        return self._tokens[: self._size], self._counts[: self._size]

    def _add(self, token: int) -> None:
        """Count one more output token."""
        place = self._place.setdefault(token, self._size)
        if place == len(self._tokens):
            room = place + max(64, place // 2)
            self._tokens, self._counts = np.resize(self._tokens, room), np.resize(self._counts, room)
        if place == self._size:
            self._tokens[place], self._counts[place] = token, 0
            self._size += 1
        self._counts[place] += 1


def needs_mask(sampling: Sampling, output_index: int) -> bool:
    """Return whether a row may be forbidden any token, now or later."""
    return bool(
        sampling.grammar
        or sampling.allowed_ids
        or sampling.bad_words
        or (output_index < sampling.min_tokens and sampling.stop_ids)
    )


class RowMask:
    """The mask of one row, whose sequence grows from step to step."""

    def __init__(self, sequence: BatchSequence, vocab_size: int, grammars: GrammarStore | None) -> None:
        self.sequence = sequence
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
        """Write the ids that are allowed as the row's next token."""
        sequence = self.sequence
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
        """Return whether all but the last id of a bad word are the newest tokens, be they prompt or output."""
        return self.sequence.tokens[1 - len(word) :].tolist() == word[:-1]


def _narrow(words: Int32Array, mask: Int32Array) -> None:
    """Compute `words &= mask` in place, unless that would leave no id."""
    narrowed = words & mask
    if narrowed.any():
        words[:] = narrowed
