"""The runner against malformed plans, changed layouts, copies, and the laziness of its plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worker.checkpoints import make_checkpoint, transformers_logits
from worker.driver import VOCAB_SIZE, Driver, Stream, dense_logprobs, generate, run_config

from trunkline.controller.reports import StepResult
from trunkline.kvstore.chunks import OPEN_COUNT, Extent, pack_int32, unpack_int32
from trunkline.worker.errors import PlanError, WorkerConfigError
from trunkline.worker.loading import load_runner
from trunkline.worker.messages import Join, Sampling, StepPlan
from trunkline.worker.runner import Runner
from trunkline.worker.tensor_parallel import TensorParallel

GREEDY = Sampling(temperature=0)
ALL_LOGPROBS = Sampling(temperature=0, logprobs=VOCAB_SIZE)


@pytest.fixture
def runner(folder: Path) -> Runner:
    return load_runner(run_config(folder), lambda *_: None)


def prompt(length: int, seed: int = 0) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(VOCAB_SIZE, size=length).tolist()
    return found


def join(sequence: int, tokens: list[int], blocks: list[int], sampling: Sampling = GREEDY) -> Join:
    return Join(sequence, pack_int32(tokens), 0, len(tokens), pack_int32(blocks), sampling)


def step(runner: Runner, **fields: Any) -> StepResult:
    result = runner.execute(StepPlan(runner.steps + 1, 1, **fields))
    assert result is not None
    return result


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"leaves": pack_int32([4])}, "sequence 4 leave"),
        ({"rows": pack_int32([4])}, "sequence 4, which has not joined"),
        ({"joins": [join(1, prompt(3), [64])]}, "the pool has 64"),
        ({"joins": [join(1, prompt(3), [-1])]}, "the pool has 64"),
        ({"joins": [join(1, prompt(3), [1]), join(1, prompt(3), [1])]}, "here already"),
        ({"joins": [join(1, [], [1])]}, "0 tokens"),
        ({"joins": [join(1, prompt(3), [1])], "blocks": pack_int32([1, 2, 5])}, "entry 2 set; there are 1"),
        ({"joins": [join(1, prompt(9), [1])], "prefill": pack_int32([1, 0, 9, 0, 1])}, "needs .* entr"),
        ({"joins": [join(1, prompt(9), [1, 2])], "prefill": pack_int32([1, 5, 5, 0, 1])}, r"\[5, 10\) asked"),
        ({"joins": [join(1, prompt(9), [1, 2])], "prefill": pack_int32([1, 0, 0, 0, 0])}, "asked"),
        ({"joins": [join(1, prompt(9), [1, 2])], "prefill": pack_int32([1, 0, 5, 0, 1])}, "9 tokens are known"),
        ({"joins": [join(1, prompt(9), [1])], "rows": pack_int32([1])}, "needs (2 blocks|block-table entry 1)"),
        (
            {"joins": [join(1, prompt(9), [1, 2])], "rows": pack_int32([1]), "runs": pack_int32([0, 2, 0, 1])},
            "outside 1 rows",
        ),
        ({"copies": pack_int32([0, 64, 0, 1])}, "the pool has 64"),
        ({"prefill": pack_int32([1, 2, 3])}, "reshape"),
    ],
)
def test_malformed_plans(runner: Runner, fields: dict[str, Any], message: str) -> None:
    with pytest.raises((PlanError, ValueError), match=message):
        step(runner, **fields)


def test_leaving_row_needs_new_rows(runner: Runner) -> None:
    step(runner, joins=[join(1, prompt(4), [2])], prefill=pack_int32([1, 0, 4, 0, 1]))
    step(runner, rows=pack_int32([1]), runs=b"")
    with pytest.raises(PlanError, match=r"\[1\] leave, but the plan keeps"):
        step(runner, leaves=pack_int32([1]))


def test_plans_are_copied_lazily(folder: Path) -> None:
    """One plan per change of rows, not one per step or filled block."""
    runner = load_runner(run_config(folder), lambda *_: None)
    driver = Driver(runner.execute, num_blocks=64, chunk_size=8)
    stream = driver.add(prompt(8), GREEDY)
    driver.run([stream], 33, piece=8)
    counters = runner.kernels.counters
    # 32 decoded tokens in four blocks of 8; the runner drew the first from the prefill.
    assert counters.calls["decode_attention"] == 2 * 32
    assert counters.decode_plans == 1
    assert counters.decode_tokens_read == 2 * sum(range(9, 41))


def test_with_invariant_rows_a_first_token_is_the_same_bits_beside_another_prompt(folder: Path) -> None:
    """Of a long prompt that lacks only its last token, which alone in a step could be a decode row."""
    found = []
    for more_joins, more_prefill in (([], []), ([join(2, prompt(5, 3), [50])], [2, 0, 5, 0, 1])):
        runner = load_runner(run_config(folder, invariant_rows=True, dtype="bfloat16"), lambda *_: None)
        first = join(1, prompt(100), list(range(13)), ALL_LOGPROBS)
        runner.execute(StepPlan(1, 1, joins=[first], prefill=pack_int32([1, 0, 99, 0, 0])))
        result = step(runner, joins=more_joins, prefill=pack_int32([1, 99, 1, 0, 1, *more_prefill]))
        assert result.logprobs is not None
        found.append(dense_logprobs(result.logprobs[0], VOCAB_SIZE))
    alone, beside = found
    assert np.array_equal(alone, beside)


def gathered(runner: Runner, block: int) -> torch.Tensor:
    """A block's contents in plain order: kernels may hold it in another."""
    data = runner.pool.data
    out = data.new_empty((1, *data.shape[1:]))
    runner.kernels.gather_blocks(runner.pool, np.array([block], dtype=np.int32), range(data.shape[1]), out)
    return out


def test_positions_before_write_from_are_not_stored(runner: Runner) -> None:
    tokens = prompt(12)
    step(runner, joins=[join(1, tokens, [3, 4])], prefill=pack_int32([1, 0, 12, 0, 1]))
    before = gathered(runner, 3)
    runner.pool.data[5].fill_(float("nan"))
    result = step(
        runner,
        joins=[join(2, tokens, [3, 5], ALL_LOGPROBS)],
        prefill=pack_int32([2, 6, 6, 8, 1]),
    )
    assert torch.equal(gathered(runner, 3), before)
    assert result.logprobs is not None
    expected = transformers_logits(Path(runner.model_path), tokens).log_softmax(-1)[-1]
    actual = torch.from_numpy(dense_logprobs(result.logprobs[0], VOCAB_SIZE))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


def test_copied_head_of_a_block_and_decode_from_a_join(runner: Runner) -> None:
    """Token-granular reuse: 5 of 8 tokens are copied; then, as after a preemption, the last token decodes."""
    tokens = prompt(8)
    step(runner, joins=[join(1, tokens, [3])], prefill=pack_int32([1, 0, 8, 0, 0]))
    other = [*tokens[:5], (tokens[5] + 1) % VOCAB_SIZE]
    runner.pool.data[9].fill_(float("nan"))
    result = step(
        runner,
        joins=[join(2, other, [9], ALL_LOGPROBS)],
        copies=pack_int32([3, 9, 0, 5]),
        rows=pack_int32([2]),
        runs=b"",
    )
    assert result.logprobs is not None
    expected = transformers_logits(Path(runner.model_path), other).log_softmax(-1)[-1]
    actual = torch.from_numpy(dense_logprobs(result.logprobs[0], VOCAB_SIZE))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("rope", [{}, {"rope_type": "linear", "factor": 2.0}])
def test_relocated_chunks_act_where_the_layout_says(rope: dict[str, Any], tmp_path: Path) -> None:
    """Sinks, a dropped middle, a hole inside a block: with one layer KV does not depend on context, so the
    result must equal a computation of the kept tokens alone."""
    settings: dict[str, Any] = {"rope_parameters": {**rope, "rope_theta": 100.0}} if rope else {}
    folder = make_checkpoint(tmp_path / "model", num_hidden_layers=1, **settings)
    runner = load_runner(run_config(folder), lambda *_: None)
    tokens, new = prompt(40), prompt(6, seed=1)
    table = [7, 3, 11, 2, 30]
    step(runner, joins=[join(1, tokens, table)], prefill=pack_int32([1, 0, 40, 0, 0]))
    # Kept: tokens 0-3, 25-26, 29-39. Dropped: 21 before token 25, two more before token 29.
    layout = [
        Extent(0, 0, 4, 0, 0),
        Extent(3, 1, 2, 25, -21),
        Extent(3, 5, 11, 29, -23),
        Extent(5, 0, OPEN_COUNT, 40, -23),
    ]
    kept = tokens[:4] + tokens[25:27] + tokens[29:]
    joined = Join(
        2,
        pack_int32(new),
        len(kept),
        len(kept) + len(new),
        pack_int32([*table, 20]),
        ALL_LOGPROBS,
        pack_int32(np.array(layout, dtype=np.int32)),
    )
    stream = Stream(2, kept + new, ALL_LOGPROBS, [])
    result = step(runner, joins=[joined], prefill=pack_int32([2, len(kept), len(new), 0, 1]))
    for index in range(10):
        assert result.logprobs is not None
        stream.output += unpack_int32(result.tokens).tolist()
        stream.logprobs.append(result.logprobs[0])
        fields: dict[str, Any] = {"rows": pack_int32([2]), "runs": b""} if index == 0 else {}
        if index == 2:
            fields["blocks"] = pack_int32([2, 6, 21])
        result = step(runner, **fields)
    expected = transformers_logits(folder, stream.prompt + stream.output).log_softmax(-1)
    expected = expected[len(stream.prompt) - 1 : -1]
    actual = np.stack([dense_logprobs(report, VOCAB_SIZE) for report in stream.logprobs])
    torch.testing.assert_close(torch.from_numpy(actual), expected, rtol=0, atol=1e-4)
    assert runner.kernels.counters.decode_plans == 2


def test_pool_size_from_memory(folder: Path) -> None:
    config = run_config(folder, pool_blocks=0, kv_memory_bytes=100_000)
    runner = load_runner(config, lambda *_: None)
    assert runner.num_blocks == 100_000 // runner.block_bytes
    with pytest.raises(WorkerConfigError, match="no room"):
        load_runner(run_config(folder, pool_blocks=0, kv_memory_bytes=100), lambda *_: None)


def test_collectives_can_be_forced_on_one_rank(folder: Path, tmp_path: Path) -> None:
    plain = generate(load_runner(run_config(folder), lambda *_: None))
    forced = run_config(folder, rendezvous=f"file://{tmp_path}/rendezvous")
    runner = load_runner(forced, lambda *_: None, connect=TensorParallel.connect)
    assert [stream.output for stream in generate(runner)] == [stream.output for stream in plain]
    runner.close()
