"""The steps that a rank on a GPU runs once before it is ready: the largest ones that a controller may send.

They show how much memory a step takes, and they have everything loaded that CUDA, cuBLAS, NCCL and our own kernels
otherwise load in the first request that needs it: prefill behind a context, decoding over chunks that rows share,
merges, the sampler with and without limits, log-probabilities, penalties, scored prompts, copies of blocks.

The plans are real ones, executed by `Runner.execute`. Their sequences have block 0 wherever they read and block 1
wherever they write, so that a pool of two blocks is enough; what is computed is of no interest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from trunkline.kvstore.extents import blocks_for
from trunkline.kvstore.int32_codec import pack_int32
from trunkline.worker.messages import Join, Sampling, StepPlan

POOL_BLOCKS: Final = 2
_CONTEXT_CHUNKS: Final = 8
"""Chunks in front of what is computed, as far as sequences may be so long: enough for shared reads and merges."""
_REPORTED: Final = 20
"""Most likely tokens that are reported beside each."""

_SAMPLED: Final = Sampling(temperature=1.0, seed=1)
_GREEDY: Final = Sampling(temperature=0.0)
_EVERYTHING: Final = Sampling(
    temperature=0.8,
    top_p=0.9,
    top_k=50,
    min_p=0.01,
    seed=1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    repetition_penalty=1.1,
    logit_bias={0: 0.5},
    logprobs=_REPORTED,
    min_tokens=1000,
    stop_ids=pack_int32([0]),
)


@dataclass(frozen=True)
class StepLimits:
    """The largest step that a controller sends."""

    token_budget: int
    """Tokens, those of decoding rows included."""
    max_rows: int
    """Sequences that decode."""
    longest: int
    """Tokens of one sequence."""
    chunk_size: int


def rehearsal(limits: StepLimits, epoch: int) -> Iterator[StepPlan]:
    """Step plans in order, from step 1 on: a full batch that decodes beside a prefill that uses the whole budget,
    every prompt token of which is scored; the next step of the same rows; then rows of other kinds."""
    size = limits.chunk_size
    rows = max(1, min(limits.max_rows, limits.token_budget - 1))
    # Decoding goes on for two tokens behind the context.
    context = max(0, min(_CONTEXT_CHUNKS, (limits.longest - 2) // size)) * size
    decoding = [_decoding(number, context, size, _EVERYTHING) for number in range(1, rows + 1)]
    prompts = list(_prompts(rows + 1, limits.token_budget - rows, context, limits))
    entries = [
        (join.sequence, join.prompt_len - count, count, join.prompt_len, int(index == 0))
        for index, (join, count) in enumerate(prompts)
    ]
    everyone = [join.sequence for join in decoding]
    run = [[0, rows, 0, context // size]] if rows > 1 and context else []
    yield StepPlan(
        1,
        epoch,
        joins=decoding + [join for join, _ in prompts],
        prefill=pack_int32(np.array(entries, dtype=np.int32)),
        rows=pack_int32(everyone),
        runs=pack_int32(np.array(run, dtype=np.int32)),
    )
    yield StepPlan(2, epoch, copies=pack_int32([0, 1, 0, 1]))
    number = rows + len(prompts) + 1
    for step, sampling in enumerate((_SAMPLED, _GREEDY), 3):
        join = _decoding(number, context, size, sampling)
        yield StepPlan(step, epoch, joins=[join], rows=pack_int32([number]), runs=b"")
        number += 1


def _decoding(number: int, context: int, chunk_size: int, sampling: Sampling) -> Join:
    """A sequence whose first output token has been drawn already; its input is that token, behind a context."""
    table = [0] * (context // chunk_size) + [1] * blocks_for(2, chunk_size)
    return Join(number, pack_int32([0]), context, context, pack_int32(table), sampling)


def _prompts(first: int, tokens: int, context: int, limits: StepLimits) -> Iterator[tuple[Join, int]]:
    """Sequences whose prompts have so many tokens to compute in all, none stored; with the number of each."""
    while tokens > 0:
        count = min(tokens, max(1, limits.longest - 1 - context))
        length = context + count
        sampling = Sampling(temperature=0.8, top_p=0.9, seed=1, prompt_logprobs=_REPORTED)
        table = pack_int32([0] * blocks_for(length, limits.chunk_size))
        yield Join(first, pack_int32([0] * length), 0, length, table, sampling), count
        first, tokens = first + 1, tokens - count
