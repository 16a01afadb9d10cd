"""Beam search against `transformers`: the same hypotheses and scores, however prompts, blocks and batches lie."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worker.beam_driver import (
    BLOCKS,
    CHUNK,
    Case,
    Search,
    check,
    expected_hypotheses,
    run_cases,
    search_on_rank,
    with_likely_stops,
)
from worker.driver import VOCAB_SIZE, Driver, run_config
from worker.ranks import run_ranks

from trunkline.controller.messages import BeamSearch
from trunkline.kvstore.chunks import pack_int32
from trunkline.worker.batch.sequences import BatchSequence
from trunkline.worker.errors import PlanError
from trunkline.worker.loading import load_runner
from trunkline.worker.messages import BeamPosition, Fork, Join, Sampling, StepPlan
from trunkline.worker.runner import Runner
from trunkline.worker.sampling.beams import RunningSearch, Scores


def prompt(length: int, seed: int = 0) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(VOCAB_SIZE, size=length).tolist()
    return found


def make_driver(folder: Path, chunk_size: int, kernels: str = "auto") -> Driver:
    config = run_config(folder, chunk_size=chunk_size, pool_blocks=400, kernels=kernels)
    runner = load_runner(config, lambda *_: None)
    runner.pool.data.fill_(float("nan"))
    return Driver(runner.execute, num_blocks=400, chunk_size=chunk_size, seed=3)


ROUNDING = 1e-5
"""Two continuations whose scores are closer may change places from one order of additions to another."""


def is_equal(folder: Path, search: Search, case: Case) -> bool:
    """Run a case and compare; False if rounding decided it, so that nothing can be said."""
    found = search.run()
    if search.closest < ROUNDING:
        return False
    check(found, expected_hypotheses(folder, case))
    return True


LENGTHS = (1, 17, 32, 45)
"""Of prompts: their ends lie at the end of a chunk and inside it, for every chunk size below."""


@pytest.mark.parametrize(("width", "chunk_size"), [(2, 64), (4, 16), (6, 4)])
def test_hypotheses_equal_transformers(folder: Path, width: int, chunk_size: int) -> None:
    driver = make_driver(folder, chunk_size)
    compared = 0
    for index, length in enumerate(LENGTHS):
        case = Case(prompt(length, seed=width), BeamSearch(width), limit=24, beside=prompt(5 + 3 * index))
        compared += is_equal(folder, Search(driver, chunk_size, case), case)
    assert compared >= len(LENGTHS) - 1


@pytest.mark.parametrize(
    ("width", "length_penalty", "early_stopping"),
    [
        (width, penalty, (True, False, None)[(i + j) % 3])
        for i, width in enumerate((2, 4, 6))
        for j, penalty in enumerate((0.6, 1.0, 2.0))
    ],
)
def test_ends_equal_transformers(
    folder: Path, width: int, length_penalty: float, early_stopping: bool | None
) -> None:
    driver = make_driver(folder, 16)
    compared = stops_met = 0
    for length in (16, 21):
        spec = BeamSearch(width, length_penalty, early_stopping)
        case = with_likely_stops(folder, Case(prompt(length, seed=width), spec, limit=14))
        search = Search(driver, 16, case)
        compared += is_equal(folder, search, case)
        stops_met += search.stops_met
    assert compared
    assert stops_met, "no hypothesis met an end token: the case tests nothing"


@pytest.mark.parametrize(
    ("sampling", "kernels"),
    [
        (Sampling(temperature=0, logprobs=2), "auto"),
        (Sampling(seed=5), "reference"),
        (Sampling(temperature=0), "auto"),
    ],
)
def test_what_runs_beside_a_search_does_not_notice(folder: Path, kernels: str, sampling: Sampling) -> None:
    driver = make_driver(folder, 8, kernels)
    case = Case(prompt(21), BeamSearch(4), limit=20, beside=prompt(10, seed=9), sampling=sampling)
    search = Search(driver, 8, case)
    assert is_equal(folder, search, case)
    alone = driver.add(case.beside, sampling)
    driver.run([alone], 20)
    assert search.output[:20] == alone.output[:20]


@pytest.mark.parametrize(("length", "resume_at"), [(15, 1), (16, 3), (17, 8), (16, 13), (15, 8)])
def test_searches_come_back_after_a_preemption(folder: Path, resume_at: int, length: int) -> None:
    driver = make_driver(folder, 8)
    compared = False
    for seed in range(3):
        free = Case(prompt(length, seed), BeamSearch(4), limit=16, beside=prompt(4, seed=1))
        case = replace(with_likely_stops(folder, free), resume_at=resume_at)
        compared = compared or is_equal(folder, Search(driver, 8, case), case)
    assert compared


@pytest.mark.processes
def test_ranks_find_what_one_finds(folder: Path) -> None:
    cases = [
        with_likely_stops(folder, Case(prompt(length, seed=width), BeamSearch(width, 1.0, early), limit=10))
        for width, length, early in ((2, 16, True), (4, 21, False), (6, 7, None))
    ]
    cases[1] = replace(cases[1], beside=prompt(9, seed=4), sampling=Sampling(seed=3))
    found, outputs = run_ranks(search_on_rank, 2, folder, cases)[0]
    for hypotheses, case in zip(found, cases, strict=True):
        check(hypotheses, expected_hypotheses(folder, case))
    assert [len(output) for output in outputs] == [0, 10, 0] + [8] * 5
    config = run_config(folder, chunk_size=CHUNK, pool_blocks=BLOCKS)
    assert run_cases(load_runner(config, lambda *_: None), cases)[1] == outputs


@pytest.mark.parametrize("vocab_size", [1, 101, 256, 1000, 5000])
@pytest.mark.parametrize("ties", [False, True])
def test_best_continuations(vocab_size: int, ties: bool) -> None:
    """Against a stable sort of everything: equal scores in the order of beams, then of ids."""
    rng = np.random.default_rng(vocab_size)
    for count in (1, 4, 12, 48):
        log_probs = rng.standard_normal((6, vocab_size)).astype(np.float32)
        totals = rng.standard_normal(6).astype(np.float32)
        if ties:
            log_probs, totals = np.round(log_probs), np.round(totals)
        scores = Scores(torch.from_numpy(log_probs), torch.from_numpy(totals))
        for lines in ([0], [2, 5, 1], [5, 4, 3, 2, 1, 0]):
            found = scores.best(np.array(lines, dtype=np.intp), count)
            flat = (log_probs + totals[:, None])[lines].reshape(-1)
            expected = np.argsort(-flat, kind="stable")[:count]
            assert (found.parents * vocab_size + found.tokens).tolist() == expected.tolist()
            assert found.scores.tolist() == flat[expected].tolist()


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_broken_scores_come_last(bad: float) -> None:
    log_probs = np.full((2, 600), bad, dtype=np.float32)
    log_probs[1, 400] = -1.0
    found = Scores(torch.from_numpy(log_probs), torch.zeros(2)).best(np.arange(2), 3)
    assert (found.parents.tolist(), found.tokens.tolist()) == ([1, 0, 0], [400, 0, 1])


def test_tables_and_copies_follow_the_beams() -> None:
    """Three full blocks, then a tail of 2 tokens: beam 1 dies, beam 2 is gone on from twice."""
    group, members = make_group([[7, 8, 9, 10], [7, 8, 9, 11], [7, 4, 5, 12]], tokens=14)
    assert group.advance([2, 0, 2], [50, 51, 52], 4)
    # The first child of a beam keeps its tail; the second gets that of the beam without children.
    assert [list(member.blocks) for member in members] == [[7, 4, 5, 12], [7, 8, 9, 10], [7, 4, 5, 11]]
    assert group.copies.tolist() == [[12, 11, 0, 2]]
    assert [(member.known, member.tokens[-1]) for member in members] == [(15, 50), (15, 51), (15, 52)]


def test_full_tails_are_shared() -> None:
    group, members = make_group([[7, 8], [7, 9]], tokens=8)
    assert group.advance([1, 1], [50, 51], 4)
    assert [list(member.blocks) for member in members] == [[7, 9], [7, 9]]
    assert not len(group.copies)


def test_beams_that_stay_change_no_table() -> None:
    group, members = make_group([[7, 8], [7, 9]], tokens=7)
    assert not group.advance([0, 1], [50, 51], 4)
    assert [list(member.blocks) for member in members] == [[7, 8], [7, 9]]
    assert not len(group.copies)
    # The tail of beam 1 gets another content, but the tables say the same as before.
    assert not group.advance([0, 0], [60, 61], 5)
    assert group.copies.tolist() == [[8, 9, 0, 3]]


def make_group(tables: list[list[int]], tokens: int) -> tuple[RunningSearch, list[BatchSequence]]:
    """A search whose beams have the block tables, `tokens` of each being computed."""
    positions = [BeamPosition(1, index, len(tables)) for index in range(len(tables))]
    members = [
        BatchSequence(
            Join(
                10 + i, pack_int32(prompt(tokens)), 0, 3, pack_int32(table), Sampling(), beam_position=positions[i]
            )
        )
        for i, table in enumerate(tables)
    ]
    group = RunningSearch(positions[0])
    for member, beam_position in zip(members, positions, strict=True):
        group.add(member, beam_position)
    return group, members


def test_copies_of_a_search_that_left_are_not_made(folder: Path) -> None:
    """Its blocks may belong to others by then."""
    runner = load_runner(run_config(folder), lambda *_: None)
    positions = [BeamPosition(5, index, 2, 0.0, 4) for index in range(2)]
    join = Join(1, pack_int32(prompt(11)), 0, 11, pack_int32([3, 4]), Sampling(), beam_position=positions[0])
    fork = Fork(1, 2, pack_int32([3, 6]), 0, positions[1])
    runner.execute(StepPlan(1, 1, joins=[join], prefill=pack_int32([1, 0, 11, 0, 1]), forks=[fork]))
    before = runner.pool.data[6].clone()
    runner.execute(StepPlan(2, 1, leaves=pack_int32([1, 2])))
    assert torch.equal(runner.pool.data[6].view(torch.int32), before.view(torch.int32))
    assert "copy_blocks" not in runner.kernels.counters.calls


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"forks": []}, "search 5 has 1 of 3 beams"),
        ({"forks": [1, 1]}, "cannot be beam 1 of 3"),
        ({"forks": [1, 3]}, "cannot be beam 3 of 3"),
        ({"rows": [1, 2]}, r"of its beams, \[3\] are not in the batch"),
        ({"leaves": [2], "rows": [1, 3]}, "search 5 has ended"),
        ({"candidates": 2}, "2 of 2 candidates go on; 3 beams"),
    ],
)
def test_malformed_searches(folder: Path, change: dict[str, Any], message: str) -> None:
    runner = load_runner(run_config(folder), lambda *_: None)
    count = change.get("candidates", 6)
    positions = [BeamPosition(5, index, 3, 0.0, count) for index in range(4)]
    join = Join(1, pack_int32(prompt(8)), 0, 8, pack_int32([3]), Sampling(), beam_position=positions[0])
    indices = change.get("forks", [1, 2])
    forks = [Fork(1, 2 + place, pack_int32([3]), 0, positions[index]) for place, index in enumerate(indices)]
    blocks = pack_int32([1, 1, 20, 2, 1, 21, 3, 1, 22])
    leaves, rows = pack_int32(change.get("leaves", [])), pack_int32(change.get("rows", []))
    plans = [
        StepPlan(1, 1, joins=[join], prefill=pack_int32([1, 0, 8, 0, 1]), forks=forks),
        StepPlan(2, 1, blocks=blocks, rows=pack_int32([1, 2, 3]), runs=pack_int32([0, 3, 0, 1])),
        StepPlan(3, 1, leaves=leaves, rows=rows, runs=b""),
    ]
    with pytest.raises(PlanError, match=message):
        execute_all(runner, plans)


def execute_all(runner: Runner, plans: list[StepPlan]) -> None:
    for plan in plans:
        runner.execute(plan)
