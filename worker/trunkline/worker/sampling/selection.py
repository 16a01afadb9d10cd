"""From a step's logits to the tokens that every rank appends: sampling, beam searches, scored prompts.

Rank 0 decides and tells the others with one broadcast: the samples' tokens, then for each beam which one it goes
on from. Steps in which every sample just takes its largest logit need not even bring the logits together.

Drafts are verified at once where what is drawn depends on the logits, a seed and an index only. Otherwise (masks,
penalties, reports) position by position: first each sequence's next token is drawn, then, of those whose first
draft is that token, the one behind it, and so on. So each token is drawn in the state that its sequence would have
been in without drafts, nothing has to be taken back, and nothing is drawn behind a draft that is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from trunkline.controller.reports import BeamStep, PromptLogprobs, TopLogprobs
from trunkline.kvstore.chunks import Int32Array
from trunkline.worker.batch.batch import ForwardBatch
from trunkline.worker.batch.draft_rows import NO_GUESS, accepted
from trunkline.worker.batch.sequences import BatchSequence
from trunkline.worker.model.shard import Shard
from trunkline.worker.sampling.beams import BeamPositions, BeamSearches, report
from trunkline.worker.sampling.sampler import LOGPROB_MIN, Sampler, draws_plainly, first_argmax, is_plain_greedy
from trunkline.worker.tensor_parallel import TensorParallel


@dataclass
class Selection:
    """The tokens that a step chose, and what rank 0 reports of them."""

    tokens: Int32Array
    """The chosen tokens in the order of `StepResult.tokens`, -1 where none is drawn; the same on every rank."""
    tables_changed: bool = False
    """Whether block tables moved between beams; the same on every rank."""
    logprobs: dict[int, TopLogprobs] | None = None
    """Log-probabilities, by index of the sample. This field and the next two are known on rank 0 only."""
    beams: dict[int, BeamStep] | None = None
    """What the controller is told of each beam search, by the search's id; on rank 0 only."""
    prompt_logprobs: dict[int, PromptLogprobs] | None = None
    """Log-probabilities of scored prompts, by id of the sequence; on rank 0 only."""
    appended: bool = False
    """Whether the tokens of samples that are no beams have been appended to them on this rank."""


class Selector:
    """Chooses the next token of every sample of a batch, and appends it to its sequence."""

    def __init__(
        self,
        group: TensorParallel,
        sampler: Sampler,
        searches: BeamSearches,
        shard: Shard,
        chunk_size: int,
        largest: Callable[[], Int32Array] | None = None,
    ) -> None:
        """
        Args:
            largest: Returns the id of each row's largest logit in the last step, the same on every rank; None: it
                is found here.
        """
        self._group = group
        self._sampler = sampler
        self._searches = searches
        self._vocab_size = shard.config.vocab_size
        """Number of the model's tokens; the ranks' columns of logits together are a few more."""
        self._vocab_start = shard.vocab_start
        self._chunk_size = chunk_size
        self._largest = largest
        self._plain_greedy = False
        self._sampler_is_current = False
        self._drawn_plainly: bool | None = None
        """Whether a graph draws what the rows want; None: that was not asked for these rows."""

    def forget(self, sequences: Iterable[int]) -> None:
        """Forget sequences that have left the batch."""
        self._sampler.forget(sequences)

    @property
    def takes_largest(self) -> bool:
        """Whether all that is done for the rows of the last step is to ask `largest` for their tokens."""
        return self._plain_greedy and self._largest is not None

    def leaves_to_graph(self, batch: ForwardBatch) -> bool:
        """Return whether the tokens that a graph draws for decode rows are those that they want."""
        self._look_at(batch)
        if self._drawn_plainly is None:
            self._drawn_plainly = draws_plainly(batch.samples, limits=self._group.size == 1)
        return self._drawn_plainly

    def take_drawn(self, batch: ForwardBatch, tokens: Int32Array) -> Selection:
        """Append the tokens that a graph drew, as far as drafts were right."""
        assert batch.guesses is not None
        selection = Selection(accepted(tokens, batch.guesses))
        _append(batch.samples, selection.tokens.tolist())
        return selection

    def _look_at(self, batch: ForwardBatch) -> BeamPositions | None:
        """Forget what was known of other rows; return the places of beams."""
        positions = self._searches.positions(batch) if self._searches.search_of else None
        if batch.samples_changed:
            self._sampler_is_current = False
            self._plain_greedy = positions is None and is_plain_greedy(batch.samples)
            self._drawn_plainly = None
        return positions

    def select(self, batch: ForwardBatch, logits: Tensor | None) -> Selection:
        """Choose the tokens, the same on every rank, and append them.

        Args:
            logits: float32 `[logits rows, padded vocabulary / tp]`, this rank's columns, overwritten; None: none
                are needed.

        Raises:
            PlanError: a beam search that is not whole.
        """
        positions = self._look_at(batch)
        if logits is None:
            self._sampler_is_current = False
            return Selection(np.zeros(0, dtype=np.int32))
        if self._plain_greedy and not batch.scored:
            self._sampler_is_current = False
            selection = Selection(self._agree_on_largest(logits, batch))
            if batch.guesses is not None:
                selection.tokens = accepted(selection.tokens, batch.guesses)
        else:
            selection = self._select_on_rank_0(batch, positions, logits)
        if not selection.appended:
            tokens, samples = selection.tokens.tolist(), batch.samples
            if positions is not None:
                tokens, samples = [tokens[index] for index in positions.others.tolist()], positions.other_samples
            _append(samples, tokens)
        return selection

    def _select_on_rank_0(self, batch: ForwardBatch, positions: BeamPositions | None, logits: Tensor) -> Selection:
        """Gather the logits on rank 0, which chooses and tells all ranks; advance the beams."""
        selection = Selection(np.zeros(0, dtype=np.int32))
        count = len(batch.samples)
        whole = self._group.gather_columns(logits)
        if whole is None:
            members = 0 if positions is None else positions.members
            decision = torch.empty(count + members, dtype=torch.int64, device=logits.device)
        else:
            whole = whole[:, : self._vocab_size]
            if batch.scored:
                selection.prompt_logprobs = _score_prompts(whole, batch)
            # Before the sampler, which overwrites its rows.
            beams = None if positions is None else self._choose_beams(whole, positions, selection)
            decision = self._sample(whole, batch, positions, selection)
            if positions is not None and beams is not None:
                decision = _merge(decision, beams, positions, count)
        if len(decision):
            self._group.broadcast(decision)
        numbers = _numbers(decision)
        selection.tokens = numbers[:count]
        if positions is not None:
            selection.tables_changed = self._advance_beams(numbers, positions, count)
        return selection

    def _choose_beams(self, logits: Tensor, positions: BeamPositions, selection: Selection) -> Int32Array:
        """Return parents and tokens of the next beams, int32 `[2, members]`, search by search."""
        found = positions.choose(logits)
        selection.beams = {
            placed.search.id: report(best) for placed, best in zip(positions.searches, found, strict=True)
        }
        chosen = [placed.search.choose(best) for placed, best in zip(positions.searches, found, strict=True)]
        return np.concatenate([np.stack(pair) for pair in chosen], axis=1)

    def _sample(
        self, logits: Tensor, batch: ForwardBatch, positions: BeamPositions | None, selection: Selection
    ) -> Tensor:
        """Draw a token for each sample that is no beam; return int64 ids, -1 behind drafts that are refused."""
        if batch.guesses is not None:
            return self._sample_drafted(logits, batch, positions, selection)
        samples = batch.samples if positions is None else positions.other_samples
        if not samples:
            self._sampler_is_current = False
            return torch.empty(0, dtype=torch.int64, device=logits.device)
        if positions is not None:
            rows = logits[torch.from_numpy(positions.other_rows).to(logits.device)]
        else:
            rows = _with_forks(logits[: batch.sampled_rows], batch)
        ids, reports = self._sampler.sample(rows, samples, changed=not self._sampler_is_current)
        self._sampler_is_current = True
        if positions is not None and reports is not None:
            reports = {int(positions.others[index]): found for index, found in reports.items()}
        selection.logprobs = reports
        return ids

    def _sample_drafted(
        self, logits: Tensor, batch: ForwardBatch, positions: BeamPositions | None, selection: Selection
    ) -> Tensor:
        """Draw what `_sample` does, at once or position by position; then it is appended, too."""
        assert batch.guesses is not None
        guesses = np.full(len(batch.samples) + 1, NO_GUESS, dtype=np.int32)
        guesses[: len(batch.guesses)] = batch.guesses
        own = (guesses[:-1] == NO_GUESS).nonzero()[0]
        if positions is None and draws_plainly([batch.samples[index] for index in own.tolist()], limits=True):
            ahead = np.arange(len(batch.samples)) - own.repeat(np.diff(own, append=len(batch.samples)))
            every = _with_forks(logits[: batch.sampled_rows], batch)
            ids, _ = self._sampler.sample(every, batch.samples, changed=True, ahead=ahead)
            self._sampler_is_current = False
            return torch.from_numpy(accepted(_numbers(ids), batch.guesses).astype(np.int64)).to(logits.device)
        tokens = np.full(len(batch.samples), NO_GUESS, dtype=np.int64)
        rows = np.array([*range(batch.sampled_rows), *batch.fork_rows])
        others = np.arange(len(tokens)) if positions is None else positions.others
        reports: dict[int, TopLogprobs] = {}
        drawn = others[guesses[others] == NO_GUESS]
        while len(drawn):
            samples = [batch.samples[index] for index in drawn.tolist()]
            chosen = logits[torch.from_numpy(rows[drawn]).to(logits.device)]
            ids, found = self._sampler.sample(chosen, samples, changed=True)
            tokens[drawn] = _numbers(ids)
            for sequence, token in zip(samples, tokens[drawn].tolist(), strict=True):
                sequence.append(token)
            reports |= {int(drawn[index]): report for index, report in (found or {}).items()}
            drawn = drawn[(guesses[drawn + 1] != NO_GUESS) & (guesses[drawn + 1] == tokens[drawn])] + 1
        self._sampler_is_current = False
        selection.logprobs, selection.appended = reports or None, True
        return torch.from_numpy(tokens[others]).to(logits.device)

    def _advance_beams(self, decision: Int32Array, positions: BeamPositions, count: int) -> bool:
        changed = False
        for placed in positions.searches:
            parents = decision[count : count + placed.search.width].tolist()
            tokens = decision[placed.places].tolist()
            changed |= placed.search.advance(parents, tokens, self._chunk_size)
            count += placed.search.width
        return changed

    def _agree_on_largest(self, logits: Tensor, batch: ForwardBatch) -> Int32Array:
        """Return greedy ids from each rank's largest logits: one small collective instead of gather and broadcast.

        Every rank sees the same numbers, so all take the same id: the lowest on a tie, as ranks hold
        ascending parts of the vocabulary.
        """
        if self._largest is not None:
            largest = self._largest()
            return largest[[*range(batch.sampled_rows), *batch.fork_rows]] if batch.fork_rows else largest
        best = first_argmax(logits)
        if self._group.size == 1:
            return _numbers(_with_forks(best, batch))
        ids = best + self._vocab_start
        values = logits.gather(1, best[:, None]).squeeze(1)
        # float64 holds both a float32 logit and an id exactly.
        every = self._group.all_gather(torch.stack([values.double(), ids.double()]))
        owner = first_argmax(every[:, 0].T.contiguous())
        return _numbers(_with_forks(every[:, 1].T.gather(1, owner[:, None]).squeeze(1).long(), batch))


def _append(samples: list[BatchSequence], tokens: list[int]) -> None:
    for sequence, token in zip(samples, tokens, strict=True):
        if token != NO_GUESS:
            sequence.append(token)


def _numbers(ids: Tensor) -> Int32Array:
    return ids.cpu().numpy().astype(np.int32)


def _with_forks(rows: Tensor, batch: ForwardBatch) -> Tensor:
    """Return values by sample, given those by logits row: a fork gets its parent's."""
    if not batch.fork_rows:
        return rows
    index = torch.tensor([*range(batch.sampled_rows), *batch.fork_rows], device=rows.device)
    return rows[index]


def _merge(ids: Tensor, beams: Int32Array, positions: BeamPositions, count: int) -> Tensor:
    """Combine the chosen tokens and beams into one int64 tensor `[samples + members]`, which rank 0 broadcasts:
    the token of every sample in the samples' order, then the parent of every beam, search by search."""
    decision = np.empty(count + positions.members, dtype=np.int64)
    decision[positions.others] = ids.cpu().numpy()
    decision[np.concatenate([placed.places for placed in positions.searches])] = beams[1]
    decision[count:] = beams[0]
    return torch.from_numpy(decision).to(ids.device)


def _score_prompts(logits: Tensor, batch: ForwardBatch) -> dict[int, PromptLogprobs]:
    """Return the reports of scored prompts, by sequence.

    Args:
        logits: float32 `[logits rows, vocabulary]`.
    """
    found, first = {}, batch.sampled_rows
    for entry in batch.scored:
        stop = first + len(entry.targets)
        found[entry.sequence] = score_prompt(logits[first:stop], entry.targets, entry.start, entry.top)
        first = stop
    return found


_CHUNK_BYTES_MAX: Final = 32 << 20
"""Largest number of bytes of logits that are looked at together; temporaries are a few times as large."""


def score_prompt(logits: Tensor, targets: Int32Array, start: int, count: int) -> PromptLogprobs:
    """Score prompt tokens.

    Args:
        logits: float32 `[n, vocabulary]`; row i is the model's output one position before `targets[i]`.
        targets: `[n]`, the prompt's tokens at positions start … start + n - 1.
        start: position of the first target; at least 1.
        count: number of most likely tokens to report per position; at most the vocabulary's size is used.

    Returns:
        Natural logarithms, at least `LOGPROB_MIN`. A token's rank is 1 + the number of strictly likelier ones.
    """
    vocab_size = logits.shape[1]
    count = min(count, vocab_size)
    rows = max(1, _CHUNK_BYTES_MAX // (4 * vocab_size))
    own, ranks, top_ids, top_values = [], [], [], []
    for begin in range(0, len(targets), rows):
        x = logits[begin : begin + rows]
        tokens = torch.from_numpy(targets[begin : begin + rows].astype(np.int64)).to(x.device)[:, None]
        total = x.logsumexp(dim=-1, keepdim=True)
        chosen = x.gather(1, tokens)
        own.append(_array(chosen - total))
        ranks.append(1 + (x > chosen).sum(dim=-1).cpu().numpy())
        top = x.topk(count, dim=-1)
        top_ids.append(top.indices.cpu().numpy())
        top_values.append(_array(top.values - total))
    return PromptLogprobs(
        start=start,
        token_logprobs=b"".join(part.tobytes() for part in own),
        ranks=b"".join(part.astype("<i4").tobytes() for part in ranks),
        top_ids=b"".join(part.astype("<i4").tobytes() for part in top_ids),
        top_logprobs=b"".join(part.tobytes() for part in top_values),
    )


def _array(log_probs: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return log_probs.clamp_min(LOGPROB_MIN).cpu().numpy().astype("<f4")
