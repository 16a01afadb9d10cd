"""Parallel sampling: samples that fork from one prompt are those that the prompt gives alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worker.checkpoints import transformers_logits
from worker.driver import VOCAB_SIZE, Driver, Stream, dense_logprobs, run_config

from trunkline.controller.sequences.beam_search import sample_seed
from trunkline.kvstore.chunks import pack_int32, unpack_int32
from trunkline.worker.errors import PlanError
from trunkline.worker.loading import load_runner
from trunkline.worker.messages import Fork, Join, Sampling, StepPlan
from trunkline.worker.runner import Runner


def prompt(length: int, seed: int = 0) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(VOCAB_SIZE, size=length).tolist()
    return found


def load(folder: Path, **settings: Any) -> Runner:
    runner = load_runner(run_config(folder, pool_blocks=200, **settings), lambda *_: None)
    runner.pool.data.fill_(float("nan"))
    return runner


def seeded(n: int, **settings: Any) -> list[Sampling]:
    return [Sampling(seed=sample_seed(7, i), **{"temperature": 1.0, **settings}) for i in range(n)]


@pytest.mark.parametrize(
    ("kernels", "chunk_size", "settings"),
    [
        ("auto", 16, {}),
        ("reference", 4, {"frequency_penalty": 0.7, "repetition_penalty": 1.3}),
        ("auto", 64, {"top_p": 0.9, "logprobs": 3}),
        ("auto", 4, {"top_p": 0.9, "logprobs": 3}),
    ],
)
def test_samples_are_those_of_single_runs(
    folder: Path, kernels: str, chunk_size: int, settings: dict[str, Any]
) -> None:
    runner = load(folder, kernels=kernels, chunk_size=chunk_size)
    driver = Driver(runner.execute, num_blocks=200, chunk_size=chunk_size)
    groups = [driver.add_samples(prompt(length), seeded(4, **settings)) for length in (1, 16, 21)]
    other = driver.add(prompt(11, seed=5), Sampling(temperature=0))
    driver.run([groups[0][0], other, *(group[0] for group in groups[1:])], 18)
    alone = Driver(
        load(folder, kernels=kernels, chunk_size=chunk_size).execute, num_blocks=200, chunk_size=chunk_size
    )
    for stream in [*(sample for group in groups for sample in group), other]:
        single = alone.add(stream.prompt, stream.sampling)
        alone.run([single], 18, piece=5)
        assert stream.output[:18] == single.output[:18]
        assert len(stream.logprobs) == (len(stream.output) if settings.get("logprobs") and stream != other else 0)
    outputs = [tuple(sample.output) for sample in groups[2]]
    assert len(set(outputs)) == 4, "different seeds, different samples"


def test_greedy_samples_are_alike(folder: Path) -> None:
    """Without sampling the ranks agree on the largest logits, forks included."""
    driver = Driver(load(folder).execute, num_blocks=200, chunk_size=8)
    samples = driver.add_samples(prompt(13), [Sampling(temperature=0)] * 3)
    driver.run(samples[:1], 9)
    logits = transformers_logits(folder, samples[0].prompt + samples[0].output)[12:-1]
    assert [sample.output for sample in samples] == [logits.argmax(-1).tolist()] * 3


@pytest.mark.parametrize(
    ("forks", "message"),
    [
        ([Fork(1, 2, pack_int32([4, 6]), 0)], "sequences .1. fork, but none"),
        ([Fork(3, 4, pack_int32([4, 200]), 0)], "the pool has 200"),
        ([Fork(3, 1, pack_int32([4, 6]), 0)], "sequence 1 joins, but is here already"),
        ([Fork(9, 4, pack_int32([4, 6]), 0)], "sequences .9. fork, but none"),
    ],
)
def test_malformed_forks(folder: Path, forks: list[Fork], message: str) -> None:
    runner = load(folder)
    tokens = pack_int32(prompt(9))
    joins = [Join(id_, tokens, 0, 9, pack_int32(table), Sampling()) for id_, table in ((1, [1, 2]), (3, [4, 5]))]
    entries = pack_int32([1, 0, 9, 0, 0, 3, 0, 9, 0, 1])
    with pytest.raises(PlanError, match=message):
        runner.execute(StepPlan(1, 1, joins=joins, prefill=entries, forks=forks))


def test_only_prompts_fork(folder: Path) -> None:
    runner = load(folder)
    join = Join(1, pack_int32(prompt(9)), 0, 8, pack_int32([1, 2]), Sampling())
    fork = Fork(1, 2, pack_int32([1, 6]), 0)
    with pytest.raises(PlanError, match="which knows 9 tokens; its prompt has 8"):
        runner.execute(StepPlan(1, 1, joins=[join], prefill=pack_int32([1, 0, 9, 0, 1]), forks=[fork]))
    runner = load(folder)
    with pytest.raises(PlanError, match="forks in a step without prefill"):
        runner.execute(StepPlan(1, 1, joins=[join], forks=[fork]))


@pytest.mark.parametrize("pieces", [[23], [1, 9, 13], [22, 1]])
def test_prompts_are_scored_in_pieces(folder: Path, pieces: list[int]) -> None:
    """Every position but the first, once, whichever step computes it, beside rows that decode."""
    runner = load(folder)
    driver = Driver(runner.execute, num_blocks=200, chunk_size=8)
    beside = Stream(driver.take_id(), prompt(6, seed=3), Sampling(temperature=0), driver.take_blocks(8))
    table = pack_int32(beside.blocks)
    joins = [Join(beside.id, pack_int32(beside.prompt), 0, 6, table, beside.sampling)]
    driver.send(joins=joins, prefill=pack_int32([beside.id, 0, 6, 0, 1]))
    driver.send(rows=pack_int32([beside.id]), runs=b"")
    tokens, scored = prompt(23), driver.take_id()
    sampling = Sampling(temperature=0, prompt_logprobs=2)
    joins = [Join(scored, pack_int32(tokens), 0, 23, pack_int32(driver.take_blocks(3)), sampling)]
    start = 0
    own: dict[int, float] = {}
    ranks: dict[int, int] = {}
    top: dict[int, list[int]] = {}
    for piece in pieces:
        last = start + piece == len(tokens)
        result = driver.send(joins=joins, prefill=pack_int32([scored, start, piece, 0, int(last)]))
        joins = []
        assert result is not None
        assert len(unpack_int32(result.tokens)) == 1 + last
        reports = result.prompt_logprobs or {}
        assert set(reports) == ({scored} if start + 1 < len(tokens) else set())
        for report in reports.values():
            values = np.frombuffer(report.token_logprobs, dtype="<f4")
            positions = range(report.start, report.start + len(values))
            assert not own.keys() & set(positions)
            own.update(zip(positions, values.tolist(), strict=True))
            ranks.update(zip(positions, unpack_int32(report.ranks).tolist(), strict=True))
            top.update(zip(positions, unpack_int32(report.top_ids, columns=2).tolist(), strict=True))
        start += piece
    assert sorted(own) == list(range(1, 23))
    expected = transformers_logits(folder, tokens).log_softmax(-1)
    for position in range(1, 23):
        line = expected[position - 1]
        assert own[position] == pytest.approx(float(line[tokens[position]]), abs=1e-4)
        assert ranks[position] == 1 + int((line > line[tokens[position]]).sum())
        assert top[position] == line.topk(2).indices.tolist()


def test_an_output_that_is_computed_again_is_not_scored(folder: Path) -> None:
    """After a preemption the entry covers prompt and output; only the prompt is reported."""
    runner = load(folder)
    sampling = Sampling(temperature=0, prompt_logprobs=0, logprobs=VOCAB_SIZE)
    tokens = prompt(14)
    join = Join(1, pack_int32(tokens), 0, 10, pack_int32([3, 4]), sampling)
    result = runner.execute(StepPlan(1, 1, joins=[join], prefill=pack_int32([1, 0, 14, 0, 1])))
    assert result is not None
    assert result.prompt_logprobs is not None
    assert result.logprobs is not None
    report = result.prompt_logprobs[1]
    assert (report.start, len(report.token_logprobs)) == (1, 9 * 4)
    expected = transformers_logits(folder, tokens).log_softmax(-1)[-1]
    actual = torch.from_numpy(dense_logprobs(result.logprobs[0], VOCAB_SIZE))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)
