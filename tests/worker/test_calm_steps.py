"""Calm steps: what is computed, drawn and reported is what the ordinary way gives, and the sequences have it; what
ends them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from seeds import seeds
from worker.checkpoints import Models
from worker.driver import VOCAB_SIZE, Driver, run_config
from worker.ranks import Rank, run_ranks

from trunkline.controller.reports import StepResult
from trunkline.kernels.native import isa_levels
from trunkline.kvstore.chunks import Int32Array, unpack_int32
from trunkline.worker.errors import PlanError
from trunkline.worker.loading import load_runner
from trunkline.worker.messages import Sampling, StepPlan
from trunkline.worker.runner import Runner

pytestmark = pytest.mark.skipif(not isa_levels(), reason="the compiled kernels are not installed")

CHUNK, BLOCKS = 32, 256
WIDE: Final = 40_001
"""Number of tokens of a vocabulary whose logits are looked at in parts."""


def load(folder: Path) -> Runner:
    config = run_config(folder, chunk_size=CHUNK, pool_blocks=BLOCKS, threads=2)
    return load_runner(config, lambda *_: None)


class Watched:
    """A runner that keeps its results, and counts its calm steps."""

    def __init__(self, runner: Runner, *, is_calm: bool) -> None:
        self.runner = runner
        self.results: list[dict[str, Any]] = []
        self.calm = self.drawn = 0
        """Number of calm steps; of those in which the library drew the tokens."""
        if not is_calm:
            self.runner._calm._planner = None

    def execute(self, plan: StepPlan) -> StepResult | None:
        calm = self.runner._calm
        made, drawn = calm._made, len(calm._drawn)
        result = self.runner.execute(plan)
        self.calm += calm._made > made
        self.drawn += len(calm._drawn) > drawn
        timed = ("elapsed_us", "moved_us", "moved_blocks")
        names = [name for name in StepResult.__struct_fields__ if name not in timed]
        if result is not None:
            self.results.append({name: getattr(result, name) for name in names})
        return result


def random_sampling(rng: np.random.Generator, *, greedy: bool) -> Sampling:
    kind = 0 if greedy else rng.integers(6)
    seed = int(rng.integers(1 << 60))
    return [
        Sampling(temperature=0),
        Sampling(temperature=0, logprobs=3),
        Sampling(seed=seed, temperature=1.5, top_k=20, top_p=0.9),
        Sampling(seed=seed, temperature=1.0, repetition_penalty=1.3, presence_penalty=0.5),
        Sampling(seed=seed, temperature=1.0, bad_words=[[3], [4, 5]]),
        Sampling(temperature=0, min_tokens=9, stop_ids=np.arange(40, dtype=np.int32).tobytes()),
    ][kind]


def drive(watched: Watched, seed: int, *, greedy: bool) -> list[list[list[int]]]:
    """Streams of any lengths and parameters, alone and beside others, over many chunks; return their texts."""
    rng = np.random.default_rng(seed)
    driver = Driver(watched.execute, num_blocks=BLOCKS, chunk_size=CHUNK, seed=seed)
    texts = []
    for count in (1, int(rng.integers(2, 4)), 10):
        # Many rows that begin their blocks in different steps are hardly ever calm.
        sizes = rng.integers(1, 90, size=count).tolist() if count <= 3 else [int(rng.integers(1, 90))] * count
        prompts = [rng.integers(VOCAB_SIZE, size=size).tolist() for size in sizes]
        streams = [driver.add(prompt, random_sampling(rng, greedy=greedy)) for prompt in prompts]
        steps = int(rng.integers(20, 80))
        left: list[list[int]] = []
        apply = watched.runner._sequences.apply

        def look(plan: StepPlan, left: list[list[int]] = left, apply: Any = apply) -> None:
            if plan.leaves:
                known = watched.runner._sequences._by_id
                left += [known[number].tokens.tolist() for number in unpack_int32(plan.leaves).tolist()]
            apply(plan)

        watched.runner._sequences.apply = look  # type: ignore[method-assign]
        driver.run(streams, steps, piece=40)
        watched.runner._sequences.apply = apply  # type: ignore[method-assign]
        texts.append([stream.output for stream in streams])
        assert left == [stream.prompt + stream.output for stream in streams] or watched.runner._group.rank
    return texts


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("seed", seeds(4))
def test_calm_steps_give_what_ordinary_ones_give(folder: Path, seed: int, *, greedy: bool) -> None:
    """The same texts, results and calls of ops."""
    found = []
    for is_calm in (True, False):
        watched = Watched(load(folder), is_calm=is_calm)
        texts = drive(watched, seed, greedy=greedy)
        found.append((texts, watched.results, watched.runner.kernels.counters.calls))
        assert (watched.calm > len(watched.results) / 5) == is_calm
        assert watched.drawn <= watched.calm
        assert not greedy or watched.drawn == watched.calm
    (texts, results, calls), ordinary = found
    assert texts == ordinary[0]
    assert results == ordinary[1]
    assert calls == ordinary[2]


def drive_rank(rank: Rank, folder: Path, seed: int, calm: tuple[bool, ...]) -> tuple[Any, int]:
    """Return the texts of a rank, and in how many steps the library drew them."""
    runner = rank.load(folder, chunk_size=CHUNK, pool_blocks=BLOCKS)
    watched = Watched(runner, is_calm=calm[rank.number])
    found = drive(watched, seed, greedy=True), watched.drawn
    runner.close()
    return found


@pytest.mark.processes
def test_ranks_agree_whether_they_are_calm_or_not(folder: Path) -> None:
    """What a rank waits for may keep it from calm steps in which others are."""
    alone = drive(Watched(load(folder), is_calm=False), 5, greedy=True)
    for calm in ((True, True), (True, False), (False, True)):
        (texts, first), (_, second) = run_ranks(drive_rank, 2, folder, 5, calm)
        assert texts == alone
        assert (first > 30, second > 30) == calm


def largest_of(rank: Rank, folder: Path, seed: int) -> list[tuple[list[int], list[int]]]:
    """Return which logits a rank found to be the largest, and which are, of random ones in steps of some rows."""
    runner, rng, seen = rank.load(folder), np.random.default_rng(seed), []
    runner._calm._planner = None
    program, found_by, start = runner._decoder.runner, runner._selector._largest, runner._decoder.shard.vocab_start
    assert found_by is not None

    def checked() -> Int32Array:
        own = program.value(program.program.logits)
        logits = np.full((len(own), rank.size * own.shape[1]), -np.inf, dtype=np.float32)
        some = logits[:, :WIDE]
        some[:] = rng.integers(-9, 10, some.shape)  # many ties
        for row, kind in enumerate(rng.integers(4, size=len(own)).tolist()):
            if kind == 1:
                some[row] = rng.normal(size=WIDE)
            elif kind == 2:
                some[row, rng.random(WIDE) < 0.5] = np.nan
            elif kind == 3:
                some[row] = rng.choice([-np.inf, np.nan], size=WIDE)
        own.copy_(torch.from_numpy(logits[:, start : start + own.shape[1]]))
        found = found_by()
        seen.append((found.tolist(), np.where(np.isnan(logits), -np.inf, logits).argmax(axis=1).tolist()))
        return found

    runner._selector._largest = checked
    driver = Driver(runner.execute, num_blocks=64, chunk_size=8)
    driver.run([driver.add([1, 2, 3 + row], Sampling(temperature=0)) for row in range(5)], 8)
    runner.close()
    return seen


@pytest.mark.processes
@pytest.mark.parametrize("tp", [1, 2])
def test_the_library_finds_the_largest_logits(models: Models, tp: int) -> None:
    """Of rows that several threads read, the first of equal ones, whichever rank has it."""
    for seen in run_ranks(largest_of, tp, models(vocab_size=WIDE), 3):
        assert len(seen) > 8
        assert all(found == right for found, right in seen)


def test_plans_that_are_lost_or_of_another_epoch_are_noticed_in_calm_steps(folder: Path) -> None:
    """And whether a row begins a block is seen in time: without one for it the plan is refused."""
    watched = Watched(load(folder), is_calm=True)
    driver = Driver(watched.execute, num_blocks=BLOCKS, chunk_size=CHUNK)
    stream = driver.add([1, 2, 3], Sampling(temperature=0))
    driver._grow(stream, 3)
    entry = np.array([stream.id, 0, 3, 0, 1], dtype=np.int32).tobytes()
    driver.send(joins=[driver._join(stream)], prefill=entry)
    driver.send(rows=np.array([stream.id], dtype=np.int32).tobytes(), runs=b"")
    for _ in range(6):
        driver.send()
    assert watched.calm == 5, "the first of them is the one that looks"
    runner, last = watched.runner, driver.step
    for plan, message in ((StepPlan(last + 2, 1), "a plan was lost"), (StepPlan(last + 1, 2), "plan of epoch 2")):
        with pytest.raises(PlanError, match=message):
            runner.execute(plan)
    for _ in range(CHUNK - 3 - (driver.step - 1)):  # there are the prompt's tokens, and one of each later step
        driver.send()
    with pytest.raises(PlanError, match="needs block-table entry 1"):
        driver.send()
