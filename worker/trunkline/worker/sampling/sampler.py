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
others or split over other ranks draws the same tokens. The generator is a keyed 64-bit mixer (the finaliser known
from MurmurHash3 and SplitMix64): token ids and (seed, index) are each hashed to 64 bits, combined and hashed
again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trunkline.controller.messages import TopLogprobs
from trunkline.kvstore.chunks import Int32Array, pack_int32, unpack_int32
from trunkline.worker.batch.sequences import BatchSequence
from trunkline.worker.errors import PlanError
from trunkline.worker.grammar.compiler import GrammarStore
from trunkline.worker.messages import Sampling

LOGPROB_MIN: Final = -9999.0
"""Log-probability that is reported instead of -inf, which JSON cannot express."""


def is_plain_greedy(samples: list[BatchSequence]) -> bool:
    """Whether every row just takes its largest logit, so that ranks need not bring all logits together."""
    return all(
        s.sampling.temperature == 0
        and s.sampling.logprobs < 0
        and not s.sampling.logit_bias
        and not s.sampling.needs_history
        and not needs_mask(s.sampling, s.output_index)
        for s in samples
    )


class Sampler:
    """Draws tokens; keeps between steps what depends on the set of rows only."""

    def __init__(self, vocab_size: int, device: torch.device, grammars: GrammarStore | None = None) -> None:
        """Make a sampler.

        Args:
            grammars: the grammars of this rank; None: no row may follow a grammar.
        """
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._device = device
        self._keys = token_keys(torch.arange(vocab_size, device=device))
        self._rows: _Rows | None = None

    def sample(
        self, logits: Tensor, samples: list[BatchSequence], *, changed: bool
    ) -> tuple[Tensor, dict[int, TopLogprobs] | None]:
        """Draw one token per row.

        Args:
            logits: float32 `[rows, vocabulary]`, overwritten.
            samples: the rows' sequences, before the token is appended to them.
            changed: whether these are other sequences than in the last call.

        Returns:
            int64 ids `[rows]`, and log-probabilities by row for those that asked (None if none did).

        Raises:
            PlanError: a row follows a grammar that is not compiled.
        """
        rows = self._rows
        if rows is None or changed:
            self._rows = rows = _Rows(samples, self._vocab_size, self._device, self._grammars)
        if rows.bias is not None:
            row, token, value = rows.bias
            logits.index_put_((row, token), value, accumulate=True)
        if rows.masks is not None:
            rows.masks.apply(logits)
        if rows.penalties is not None:
            rows.penalties.apply(logits)
        log_probs = logits[rows.logprob_rows].log_softmax(dim=-1) if rows.logprob_row_list else None
        ids = self._draw(logits, samples, rows)
        if rows.penalties is not None:
            rows.penalties.record(ids)
        reports = None if log_probs is None else _report(log_probs, ids, rows)
        return ids, reports

    def forget(self, sequences: Iterable[int]) -> None:
        """Forget sequences that left the batch."""
        if self._grammars is not None and self._grammars.outputs:
            self._grammars.forget_sequences(sequences)

    def _draw(self, logits: Tensor, samples: list[BatchSequence], rows: _Rows) -> Tensor:
        # Not `Tensor.argmax`: which of several equal maxima it returns is not specified.
        greedy = first_argmax(logits)
        if rows.all_greedy:
            return greedy
        logits = logits / rows.temperature[:, None]
        output_index = torch.tensor([s.output_index for s in samples], device=self._device)
        if rows.limits is not None:
            scores, candidates = _limit(logits, rows.limits)
            noise = gumbel(rows.seeds, output_index, self._keys[candidates])
            best = (scores.double() + noise).argmax(dim=-1, keepdim=True)
            drawn = candidates.gather(1, best).squeeze(1)
        else:
            noise = gumbel(rows.seeds, output_index, self._keys)
            drawn = (logits + noise).argmax(dim=-1)
        return torch.where(rows.is_greedy, greedy, drawn)


class _Limits(NamedTuple):
    """Limits on how many of the most likely tokens each row may draw, by row."""

    top_k: Tensor
    top_p: Tensor | None
    """Limit of top-p for each row; None: no row has a limit below 1."""
    log_min_p: Tensor


class _Rows:
    """Sampling parameters of a fixed set of rows, as tensors."""

    def __init__(
        self, samples: list[BatchSequence], vocab_size: int, device: torch.device, grammars: GrammarStore | None
    ) -> None:
        params = [s.sampling for s in samples]

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        self.is_greedy = torch.tensor([p.temperature == 0 for p in params], device=device)
        self.all_greedy = bool(self.is_greedy.all())
        self.temperature = column([p.temperature or 1.0 for p in params])
        seeds = np.array([p.seed & (1 << 64) - 1 for p in params], dtype=np.uint64)
        self.seeds = torch.from_numpy(seeds.view(np.int64)).to(device)
        # A greedy row's candidates do not matter; without limits it does not force a sort on the others.
        drawn = [p for p in params if p.temperature != 0]
        limited = any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in drawn)
        self.limits = (
            _Limits(
                top_k=torch.tensor([p.top_k if p.top_k > 0 else vocab_size for p in params], device=device),
                top_p=column([p.top_p for p in params]) if any(p.top_p < 1 for p in drawn) else None,
                log_min_p=column([p.min_p for p in params]).log(),
            )
            if limited
            else None
        )
        self.bias: tuple[Tensor, Tensor, Tensor] | None = None
        bias = [
            (row, token, value)
            for row, p in enumerate(params)
            for token, value in p.logit_bias.items()
            if 0 <= token < vocab_size
        ]
        if bias:
            row_list, token_list, value_list = map(list, zip(*bias, strict=True))
            self.bias = (
                torch.tensor(row_list, device=device),
                torch.tensor(token_list, device=device),
                column(value_list),
            )
        self.logprob_row_list = [row for row, p in enumerate(params) if p.logprobs >= 0]
        self.logprob_counts = [min(p.logprobs, vocab_size) for p in params if p.logprobs >= 0]
        self.logprob_rows = torch.tensor(self.logprob_row_list, dtype=torch.int64, device=device)
        masked = any(needs_mask(s.sampling, s.output_index) for s in samples)
        self.masks = TokenMasks(samples, vocab_size, device, grammars) if masked else None
        needs = [row for row, p in enumerate(params) if _is_penalised(p)]
        self.penalties = _Penalties(samples, needs, vocab_size, device) if needs else None


def _is_penalised(sampling: Sampling) -> bool:
    return (
        sampling.repetition_penalty != 1.0 or sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0
    )


class _Penalties:
    """Token counts of the rows that are penalised, kept up to date as they grow."""

    def __init__(
        self, samples: list[BatchSequence], rows: list[int], vocab_size: int, device: torch.device
    ) -> None:
        chosen = [samples[row] for row in rows]
        seen = np.zeros((len(rows), vocab_size), dtype=bool)
        counts = np.zeros((len(rows), vocab_size), dtype=np.float32)
        for index, sequence in enumerate(chosen):
            tokens = np.array(sequence.tokens, dtype=np.int64)
            seen[index, tokens] = True
            output = tokens[max(0, sequence.prompt_len - sequence.first) :]
            counts[index] = np.bincount(output, minlength=vocab_size)
        self._rows = torch.tensor(rows, device=device)
        self._range = torch.arange(len(rows), device=device)
        self._seen = torch.from_numpy(seen).to(device)
        self._counts = torch.from_numpy(counts).to(device)

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

        self._repetition = column([s.sampling.repetition_penalty for s in chosen])
        self._frequency = column([s.sampling.frequency_penalty for s in chosen])
        self._presence = column([s.sampling.presence_penalty for s in chosen])

    def apply(self, logits: Tensor) -> None:
        """Change the penalised rows of `logits` in place."""
        x = logits[self._rows]
        repeated = torch.where(x > 0, x / self._repetition, x * self._repetition)
        x = torch.where(self._seen, repeated, x)
        x -= self._frequency * self._counts + self._presence * (self._counts > 0)
        logits[self._rows] = x

    def record(self, ids: Tensor) -> None:
        """Count the tokens just drawn (`[all rows]`)."""
        drawn = ids[self._rows]
        self._seen[self._range, drawn] = True
        self._counts[self._range, drawn] += 1


def first_argmax(values: Tensor) -> Tensor:
    """Return the index of the largest value of each row, int64 `[rows]`; on a tie the lowest one.

    A row with NaN gives some index that exists.
    """
    if values.device.type == "cpu":
        # Some twenty times faster than torch, and which of several maxima it returns is specified.
        return torch.from_numpy(values.numpy().argmax(axis=-1))
    best = values.amax(dim=-1, keepdim=True)
    # NaN equals nothing, so a row of NaN gives index 0: an id that exists.
    return (values == best).to(torch.uint8).argmax(dim=-1)


def _limit(logits: Tensor, limits: _Limits) -> tuple[Tensor, Tensor]:
    """Apply top-k, top-p, min-p; return the candidates' logits and ids `[rows, n]`, most likely first, -inf beyond
    each row's last candidate; n is the largest number of candidates of any row."""
    scores, candidates = logits.sort(dim=-1, descending=True, stable=True)
    keep = torch.arange(scores.shape[1], device=scores.device) < limits.top_k[:, None]
    if limits.top_p is not None:
        probs = scores.masked_fill(~keep, float("-inf")).softmax(dim=-1, dtype=torch.float32)
        before = probs.cumsum(dim=-1) - probs
        keep &= (before < limits.top_p[:, None]) | (limits.top_p[:, None] >= 1)
    keep &= scores >= scores[:, :1] + limits.log_min_p[:, None]
    keep[:, 0] = True  # the most likely token stays, whatever the parameters
    most = int(keep.sum(dim=-1).max())
    return scores.masked_fill_(~keep, float("-inf"))[:, :most], candidates[:, :most]


def _report(log_probs: Tensor, ids: Tensor, rows: _Rows) -> dict[int, TopLogprobs]:
    log_probs.clamp_min_(LOGPROB_MIN)
    chosen = log_probs.gather(1, ids[rows.logprob_rows, None]).squeeze(1).tolist()
    top = log_probs.topk(max(rows.logprob_counts), dim=-1)
    values, tokens = top.values.cpu().numpy().astype("<f4"), top.indices.cpu().numpy().astype(np.int32)
    return {
        row: TopLogprobs(chosen[i], pack_int32(tokens[i, :count]), values[i, :count].tobytes())
        for i, (row, count) in enumerate(zip(rows.logprob_row_list, rows.logprob_counts, strict=True))
    }


_FINITE_MAX: Final = 1e20
"""Number below which the logits of masked rows are brought: an allowed token then beats every masked one, also
after penalties and temperature, whatever the model or a bias made of it (NaN and -inf included)."""


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
        self, samples: list[BatchSequence], vocab_size: int, device: torch.device, grammars: GrammarStore | None
    ) -> None:
        """Make the masks of the rows whose sequences are `samples`. Rows that ask for no mask are left alone.

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
        """Numbers that 8 bits of a mask add to 8 logits, float32 `[256, 8]`."""

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

    def __init__(self, sequence: BatchSequence, vocab_size: int, grammars: GrammarStore | None) -> None:
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
        """Write the ids that are allowed as the row's next token."""
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
        """Return whether all but the last id of a bad word are the newest tokens, be they prompt or output."""
        return self._sequence.tokens[1 - len(word) :].tolist() == word[:-1]


def _narrow(words: Int32Array, mask: Int32Array) -> None:
    """Compute `words &= mask` in place, unless that would leave no id."""
    narrowed = words & mask
    if narrowed.any():
        words[:] = narrowed


_GOLDEN: Final = 0x9E3779B97F4A7C15 - (1 << 64)  # odd fraction of 2^64, as a signed number
_MULTIPLY_1: Final = 0xBF58476D1CE4E5B9 - (1 << 64)
_MULTIPLY_2: Final = 0x94D049BB133111EB - (1 << 64)


def _mix(x: Tensor) -> Tensor:
    """Mix int64 numbers (wrapping) by a bijection in which every input bit changes half of the output bits."""
    x = (x ^ _shift_right(x, 30)) * _MULTIPLY_1
    x = (x ^ _shift_right(x, 27)) * _MULTIPLY_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift an unsigned number: torch shifts int64 with its sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def token_keys(tokens: Tensor) -> Tensor:
    """Return the hash of token ids, int64 of the same shape; for a whole vocabulary, computed once."""
    return _mix((tokens + 1) * _GOLDEN)


def gumbel(seeds: Tensor, output_index: Tensor, keys: Tensor) -> Tensor:
    """Return standard Gumbel noise, float64 `[rows, n]`.

    Args:
        seeds: int64 `[rows]`; an unsigned seed's bits.
        output_index: int64 `[rows]`, number of output tokens before this one.
        keys: int64 `[n]` or `[rows, n]`, `token_keys` of the candidates.
    """
    row = _mix(_mix(seeds) + (output_index + 1) * _GOLDEN)
    bits = _shift_right(_mix(row[:, None] ^ keys), 11)
    uniform = bits.double().add_(0.5).mul_(2.0**-53)  # in (0, 1), never an end
    return uniform.log_().neg_().log_().neg_()
