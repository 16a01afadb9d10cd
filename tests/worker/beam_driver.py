"""A beam search through plans made by hand: the workers' side alone, in step with the controller's bookkeeping."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from worker.checkpoints import transformers_model
from worker.driver import Driver
from worker.ranks import Rank

from trunkline.controller.messages import BeamSearch
from trunkline.controller.reports import BeamStep, StepResult
from trunkline.controller.sequences.beam_search import BeamHistory, sample_seed
from trunkline.kvstore.beams import choose_beams
from trunkline.kvstore.chunks import blocks_for, pack_int32, unpack_int32
from trunkline.router.messages import Hypothesis
from trunkline.worker.messages import BeamPosition, Fork, Join, Sampling
from trunkline.worker.runner import Runner

BLOCKS: Final = 1000
CHUNK: Final = 8
GREEDY = Sampling(temperature=0)


@dataclass
class Case:
    """A search, and what runs beside it."""

    prompt: list[int]
    spec: BeamSearch
    stop_ids: tuple[int, ...] = ()
    limit: int = 12
    """Output tokens."""
    resume_at: int = 0
    """Output length at which the search is preempted and comes back in other blocks; 0: never. Not for several
    ranks: those that learn no results could not say which tokens come back."""
    beside: list[int] = field(default_factory=list)
    """Prompt of an ordinary sequence that decodes among the beams; empty: none."""
    sampling: Sampling = GREEDY
    """Of that sequence."""


class Search:
    """Runs one case; every rank makes the same plans, whether it learns results or not."""

    def __init__(self, driver: Driver, chunk_size: int, case: Case) -> None:
        self._driver = driver
        self._chunk_size = chunk_size
        self._case = case
        self._rng = np.random.default_rng(len(case.prompt))
        self.history = BeamHistory(case.spec, case.spec.width, list(case.stop_ids), case.limit)
        self.stops_met = 0
        """Steps in which a continuation ended a hypothesis."""
        self.closest = float("inf")
        """Smallest distance between the scores of two continuations, one of which mattered."""
        self.output: list[int] = []
        """Of the sequence beside the search."""
        self._ids: list[int] = []
        self._other, self._other_known = 0, 0
        self._rows: list[int] = []

    def run(self, piece: int = 7) -> list[Hypothesis]:
        """The hypotheses, best first; empty on ranks that learn no results."""
        case, chunk_size = self._case, self._chunk_size
        self._begin(piece)
        full = -1
        for length in range(1, case.limit):
            if length == case.resume_at:
                self._preempt()
            computed = len(case.prompt) + length - 1
            entries = self._new_blocks(computed, self._ids)
            if self._other:
                entries += self._grow_other()
            fields: dict[str, Any] = {}
            if full < 0 or length == case.resume_at:
                self._seat_rows()
                fields["rows"] = pack_int32(self._rows)
            if computed // chunk_size != full or "rows" in fields:
                full = computed // chunk_size
                fields["runs"] = pack_int32([0, len(self._rows), 0, full]) if full else b""
            result = self._driver.send(blocks=pack_int32(np.array(entries, dtype=np.int32)), **fields)
            self._take(result, self._rows)
        self._driver.send(leaves=pack_int32(self._rows), rows=b"", runs=b"")
        return self.history.hypotheses()

    def _seat_rows(self) -> None:
        """Beams in any order, others among them."""
        everyone = self._ids + ([self._other] if self._other else [])
        self._rows = [everyone[index] for index in self._rng.permutation(len(everyone))]

    def _begin(self, piece: int) -> None:
        case = self._case
        positions = self._seats(np.zeros(case.spec.width, np.float32))
        self._ids = [self._driver.take_id() for _ in positions]
        blocks = self._driver.take_blocks(blocks_for(len(case.prompt), self._chunk_size))
        joins = [self._join(self._ids[0], case.prompt, len(case.prompt), blocks, positions[0])]
        starts = list(range(0, len(case.prompt), piece))
        for start in starts[:-1]:
            self._driver.send(joins=joins, prefill=pack_int32([self._ids[0], start, piece, 0, 0]))
            joins = []
        last = [self._ids[0], starts[-1], len(case.prompt) - starts[-1], 0, 1]
        full, partial = divmod(len(case.prompt), self._chunk_size)
        tables = [blocks[:full] + self._driver.take_blocks(int(partial > 0)) for _ in self._ids]
        forks = [
            Fork(self._ids[0], self._ids[i], pack_int32(tables[i]), 0, positions[i])
            for i in range(1, len(positions))
        ]
        sampled = [self._ids[0]]
        if case.beside:
            self._other, self._other_known = self._driver.take_id(), len(case.beside)
            own = self._driver.take_blocks(blocks_for(len(case.beside), self._chunk_size))
            joins.append(self._join(self._other, case.beside, len(case.beside), own, None))
            # Before the search's entry: the tokens of a search need not stand side by side.
            last = [self._other, 0, len(case.beside), 0, 1, *last]
            sampled = [self._other, *sampled]
        result = self._driver.send(joins=joins, prefill=pack_int32(last), forks=forks)
        self._take(result, [*sampled, *self._ids[1:]])

    def _preempt(self) -> None:
        """All beams leave and come back with their tokens, to be computed again in blocks of their own."""
        case, old = self._case, self._ids
        positions = self._seats(self.history.scores)
        self._ids = [self._driver.take_id() for _ in positions]
        joins, prefill = [], []
        for index, beam_position in enumerate(positions):
            tokens = case.prompt + self.history.output(index).tolist()
            blocks = self._driver.take_blocks(blocks_for(len(tokens) - 1, self._chunk_size))
            joins.append(self._join(self._ids[index], tokens, len(case.prompt), blocks, beam_position))
            prefill += [self._ids[index], 0, len(tokens) - 1, 0, 0]
        rows = [self._other] if self._other else []
        tables = self._grow_other() if rows else []
        result = self._driver.send(
            leaves=pack_int32(old),
            joins=joins,
            prefill=pack_int32(prefill),
            blocks=pack_int32(np.array(tables, dtype=np.int32)),
            rows=pack_int32(rows),
            runs=b"",
        )
        self._take(result, rows)

    def _seats(self, scores: np.ndarray[Any, np.dtype[np.float32]]) -> list[BeamPosition]:
        width, history = self._case.spec.width, self.history
        group = self._driver.take_id()
        return [
            BeamPosition(group, index, width, float(scores[index]), history.candidates, history.stop_ids)
            for index in range(width)
        ]

    def _join(
        self, id_: int, tokens: list[int], prompt_len: int, blocks: list[int], beam_position: BeamPosition | None
    ) -> Join:
        sampling = GREEDY if beam_position else self._case.sampling
        return Join(
            id_, pack_int32(tokens), 0, prompt_len, pack_int32(blocks), sampling, beam_position=beam_position
        )

    def _grow_other(self) -> list[tuple[int, int, int]]:
        """It decodes in this step."""
        self._other_known += 1
        return self._new_blocks(self._other_known - 1, [self._other])

    def _new_blocks(self, position: int, ids: list[int]) -> list[tuple[int, int, int]]:
        if position % self._chunk_size:
            return []
        index = position // self._chunk_size
        return [(id_, index, block) for id_, block in zip(ids, self._driver.take_blocks(len(ids)), strict=True)]

    def _take(self, result: StepResult | None, order: list[int]) -> None:
        if result is None:
            return
        tokens = dict(zip(order, unpack_int32(result.tokens).tolist(), strict=True))
        if self._other in tokens:
            self.output.append(tokens[self._other])
        if result.beams is None:
            return
        (step,) = result.beams.values()
        if not self.history.done:
            best = unpack_int32(step.tokens)[: self._case.spec.width]
            self.stops_met += any(token in self._case.stop_ids for token in best.tolist())
            self._measure(step)
            self.history.advance(step)
            if not self.history.done:
                outputs = [self.history.output(index)[-1] for index in range(self._case.spec.width)]
                assert [tokens[id_] for id_ in self._ids] == outputs

    def _measure(self, step: BeamStep) -> None:
        tokens = unpack_int32(step.tokens)
        last = int(choose_beams(tokens, np.array(self._case.stop_ids, np.int32), self._case.spec.width)[-1])
        scores = np.frombuffer(step.scores, dtype="<f4")[: last + 2]
        self.closest = min(self.closest, float(np.diff(-scores).min()))


def expected_hypotheses(folder: Path, case: Case) -> list[tuple[list[int], float]]:
    """Output and score of each hypothesis, as `transformers` finds them."""
    early: bool | str | None = case.spec.early_stopping
    with torch.inference_mode():
        found = transformers_model(folder).generate(
            torch.tensor([case.prompt]),
            attention_mask=torch.ones(1, len(case.prompt), dtype=torch.int64),
            num_beams=case.spec.width,
            num_return_sequences=case.spec.width,
            do_sample=False,
            max_new_tokens=case.limit,
            length_penalty=case.spec.length_penalty,
            early_stopping="never" if early is None else early,
            eos_token_id=list(case.stop_ids) or None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    hypotheses = []
    for sequence, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        output = sequence[len(case.prompt) :]
        ends = [index for index, token in enumerate(output) if token in case.stop_ids]
        hypotheses.append((output[: ends[0] + 1] if ends else output, score))
    return hypotheses


def with_likely_stops(folder: Path, case: Case) -> Case:
    """The case with stop tokens that end hypotheses early: some of those that the search without them finds."""
    free = expected_hypotheses(folder, case)
    tokens = dict.fromkeys(output[2 + index] for index, (output, _) in enumerate(free))
    return replace(case, stop_ids=tuple(tokens)[:3])


def check(found: list[Hypothesis], expected: list[tuple[list[int], float]]) -> None:
    """The same hypotheses in the same order, with the same scores."""
    assert len(found) == len(expected)
    for ours, (tokens, score) in zip(found, expected, strict=True):
        assert np.frombuffer(ours.tokens, dtype="<i4").tolist() == tokens
        assert ours.score == pytest.approx(score, abs=1e-4)


def run_cases(runner: Runner, cases: list[Case]) -> tuple[list[list[Hypothesis]], list[list[int]]]:
    """The hypotheses of each search; then what ran beside them, and samples of the first case's prompt."""
    driver = Driver(runner.execute, num_blocks=BLOCKS, chunk_size=CHUNK)
    searches = [Search(driver, CHUNK, case) for case in cases]
    found = [search.run() for search in searches]
    samples = driver.add_samples(cases[0].prompt, [Sampling(seed=sample_seed(1, i)) for i in range(3)])
    greedy = driver.add_samples(cases[0].prompt, [Sampling(temperature=0)] * 2)
    driver.run([samples[0], greedy[0]], 8)
    outputs = [search.output for search in searches] + [stream.output[:8] for stream in samples + greedy]
    return found, outputs


def search_on_rank(rank: Rank, folder: Path, cases: list[Case]) -> tuple[list[list[Hypothesis]], list[list[int]]]:
    """Run cases on one rank of several."""
    runner = rank.load(folder, chunk_size=CHUNK, pool_blocks=BLOCKS)
    results = run_cases(runner, cases)
    runner.close()
    return results
