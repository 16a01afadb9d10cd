"""Drafts in the workers: the same tokens and log-probabilities as without them, in fewer steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worker.checkpoints import Models
from worker.draft_driver import LONGEST, Said, Table, decode, some
from worker.driver import VOCAB_SIZE, run_config
from worker.ranks import Rank, run_ranks

from trunkline.kvstore.chunks import pack_int32, unpack_int32
from trunkline.worker.batch.draft_rows import DraftRows, accepted
from trunkline.worker.batch.sequences import BatchSequence
from trunkline.worker.errors import PlanError
from trunkline.worker.loading import load_runner
from trunkline.worker.messages import BeamPosition, Join, Sampling, StepPlan
from trunkline.worker.runner import Runner

STOPS = pack_int32(list(range(0, VOCAB_SIZE, 3)))
SAMPLINGS = {
    "greedy": [Sampling(temperature=0)],
    "greedy, reported": [Sampling(temperature=0, logprobs=3)],
    "drawn": [Sampling(temperature=1.0, seed=5), Sampling(temperature=0.7, top_k=9, seed=1)],
    "limits": [Sampling(temperature=1.3, top_p=0.8, seed=2, logprobs=0), Sampling(temperature=1.0, min_p=0.1)],
    "penalties": [
        Sampling(temperature=0, repetition_penalty=1.4, logprobs=2),
        Sampling(seed=3, frequency_penalty=0.9, presence_penalty=0.4, logprobs=1),
    ],
    "masks": [
        Sampling(temperature=0, bad_words=[[5], [7, 9], [3, 3, 3]], logit_bias={5: 9.0, 3: 5.0}),
        Sampling(seed=8, min_tokens=9, stop_ids=STOPS, allowed_ids=pack_int32(list(range(40)))),
        Sampling(temperature=0, min_tokens=9, stop_ids=STOPS),
    ],
}


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(VOCAB_SIZE, size=int(rng.integers(1, 20))).tolist() for _ in range(count)]


def same(found: list[Said], expected: list[Said]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens
        assert len(one.logprobs) == len(other.logprobs)
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            assert a.token_logprob == pytest.approx(b.token_logprob, abs=1e-4)
            ours, theirs = (np.frombuffer(x.top_logprobs, "<f4") for x in (a, b))
            np.testing.assert_allclose(ours, theirs, atol=1e-4)


def compare(runner: Runner, samplings: list[Sampling], seed: int) -> tuple[int, int]:
    """Return the number of steps without and with guesses."""
    texts = prompts(len(samplings), seed)
    plain, alone = decode(runner.execute, texts, samplings, first_step=runner.steps + 1)
    guessed, fewer = decode(runner.execute, texts, samplings, some(plain, seed), first_step=runner.steps + 1)
    same(guessed, plain)
    return alone, fewer


@pytest.fixture(scope="module", params=["reference", "cpu"])
def runner(request: pytest.FixtureRequest, folder: Path) -> Runner:
    return load_runner(run_config(folder, kernels=request.param), lambda *_: None)


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("seed", [0, 1])
def test_what_is_said_does_not_depend_on_drafts(runner: Runner, name: str, seed: int) -> None:
    runner.pool.data.fill_(float("nan"))  # what was not written must not be read
    steps, fewer = compare(runner, SAMPLINGS[name], seed)
    assert fewer < steps


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in ("gqa", "deepseek-v3") for dtype in ("bfloat16", "float32")]
    + [(name, "bfloat16") for name in ("mistral4", "gemma4-experts", "gemma4-e", "qwen2-moe", "granite-4-nope")],
)
def test_drafts_change_no_bit_of_what_rows_compute(models: Models, name: str, dtype: str) -> None:
    """With compiled kernels on a CPU: reports are equal, not only close."""
    folder = models(name, head_dim=16) if name == "gqa" else models(name)
    runner = load_runner(run_config(folder, kernels="cpu", dtype=dtype, invariant_rows=True), lambda *_: None)
    samplings = [Sampling(temperature=t, seed=n, logprobs=VOCAB_SIZE) for n, t in enumerate((0.0, 1.0, 2.0))]
    texts = [text * 4 for text in prompts(3, 5)]
    plain, steps = decode(runner.execute, texts, samplings, count=40, first_step=1)
    guessed, fewer = decode(runner.execute, texts, samplings, some(plain, 0), count=40, first_step=steps + 1)
    assert fewer < steps
    for one, other in zip(guessed, plain, strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == other.logprobs


def test_different_requests_side_by_side(runner: Runner) -> None:
    compare(runner, [sampling for samplings in SAMPLINGS.values() for sampling in samplings], 3)


def test_right_guesses_save_their_steps(runner: Runner) -> None:
    texts, samplings = prompts(1, 9), [Sampling(temperature=0.8, seed=4)]
    plain, _ = decode(runner.execute, texts, samplings, count=25, first_step=runner.steps + 1)

    def guess(stream: int, output: list[int]) -> list[int]:
        return plain[stream].tokens[len(output) :][:LONGEST]

    guessed, steps = decode(runner.execute, texts, samplings, guess, count=25, first_step=runner.steps + 1)
    same(guessed, plain)
    assert steps == 1 + 3 + 1  # the prompt's, 24 tokens by eight, the one in which all leave


def drafts_on_rank(rank: Rank, folder: Path, expected: dict[str, list[Said]]) -> dict[str, list[Said]]:
    """The second rank, which reports nothing, goes by what is expected."""
    runner = rank.load(folder)
    found = {}
    for name, said in expected.items():
        samplings = SAMPLINGS[name]
        guess, step = some(said, 7), runner.steps + 1
        found[name], _ = decode(
            runner.execute, prompts(len(samplings), 1), samplings, guess, first_step=step, foreseen=said
        )
    runner.close()
    return found


@pytest.mark.processes
def test_two_ranks_accept_the_same_drafts(folder: Path) -> None:
    runner = load_runner(run_config(folder, kernels="reference"), lambda *_: None)
    expected = {}
    for name in ("greedy", "drawn", "penalties"):
        samplings = SAMPLINGS[name]
        texts, step = prompts(len(samplings), 1), runner.steps + 1
        expected[name], _ = decode(runner.execute, texts, samplings, first_step=step)
    found, others = run_ranks(drafts_on_rank, 2, folder, expected)
    for name, said in expected.items():
        same(found[name], said)
        assert [one.tokens for one in others[name]] == [one.tokens for one in said]


# Plans that do not fit


def row(tokens: list[int], **fields: Any) -> BatchSequence:
    return BatchSequence(Join(1, pack_int32(tokens), 0, len(tokens), pack_int32([4, 2]), Sampling(), **fields))


def test_the_rows_of_drafts() -> None:
    rows = DraftRows.of([row([7, 8]), row([9])], [pack_int32([5, 6]), b""])
    assert rows.ids.tolist() == [8, 5, 6, 9]
    assert rows.lengths.tolist() == [2, 3, 4, 1]
    assert rows.guesses.tolist() == [-1, 5, 6, -1]
    assert rows.runs(np.array([[0, 2, 0, 1]], dtype=np.int32), 2).tolist() == [[0, 4, 0, 1], [0, 3, 0, 2]]


def test_what_is_accepted() -> None:
    guesses = np.array([-1, 5, 6, -1, 8], dtype=np.int32)
    for tokens, kept in (
        ([5, 6, 1, 9, 2, 3], [5, 6, 1, 9, -1, 3]),
        ([4, 6, 1, 8, 2, 3], [4, -1, -1, 8, 2, 3]),
        ([5, 5, 1, 8, 2, 3], [5, 5, -1, 8, 2, 3]),
    ):
        assert accepted(np.array(tokens, dtype=np.int32), guesses).tolist() == kept


@pytest.mark.parametrize(
    ("drafts", "reason"),
    [
        ([pack_int32([1]), b""], "drafts for 2 rows; 1 sequences decode"),
        ([b"abc"], "no int32 tokens"),
        ([pack_int32([3, -1])], "no tokens"),
        ([pack_int32([1] * 20)], "needs 4 blocks; its table has 3"),
    ],
)
def test_drafts_that_do_not_fit(folder: Path, drafts: list[bytes], reason: str) -> None:
    """Among them those beyond the block table."""
    runner = load_runner(run_config(folder, kernels="reference"), lambda *_: None)
    join = Join(1, pack_int32([1, 2, 3, 4, 5]), 0, 5, pack_int32(Table(64, 8).take(24)), Sampling())
    runner.execute(StepPlan(1, 1, joins=[join], prefill=pack_int32([1, 0, 5, 0, 1])))
    with pytest.raises(PlanError, match=reason):
        runner.execute(StepPlan(2, 1, rows=pack_int32([1]), runs=b"", drafts=drafts))


def test_a_beam_has_no_drafts() -> None:
    with pytest.raises(PlanError, match="it is a beam"):
        DraftRows.of([row([1, 2], beam_position=BeamPosition(1, 0, 1))], [pack_int32([1])])


def test_a_result_names_a_place_for_each_draft(runner: Runner) -> None:
    join = Join(9000, pack_int32([1, 2, 3]), 0, 3, pack_int32([0]), Sampling(temperature=0))
    runner.execute(StepPlan(runner.steps + 1, 1, joins=[join], prefill=pack_int32([9000, 0, 3, 0, 1])))
    plan = StepPlan(runner.steps + 1, 1, rows=pack_int32([9000]), runs=b"", drafts=[pack_int32([0, 0, 0])])
    result = runner.execute(plan)
    assert result is not None
    assert len(unpack_int32(result.tokens)) == 4
    runner.execute(StepPlan(runner.steps + 1, 1, leaves=pack_int32([9000]), rows=b"", runs=b""))
