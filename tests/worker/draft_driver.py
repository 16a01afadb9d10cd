"""Decoding with drafts on a real runner: a few prompts, whose rows guess what they will say."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from worker.driver import Execute

from trunkline.controller.reports import TopLogprobs
from trunkline.kvstore.chunks import blocks_for, pack_int32, unpack_int32
from trunkline.worker.messages import Join, Sampling, StepPlan

Guess = Callable[[int, list[int]], list[int]]
"""What a stream, by its number, guesses behind the token that follows its output so far."""
LONGEST = 7


class Said(NamedTuple):
    """What a stream has said."""

    tokens: list[int]
    logprobs: list[TopLogprobs]


def nothing(stream: int, output: list[int]) -> list[int]:
    return []


def some(said: list[Said], seed: int, right: float = 0.8) -> Guess:
    """Guess what was said, each token with a probability; else any other."""
    rng = random.Random(seed)

    def guess(stream: int, output: list[int]) -> list[int]:
        coming = said[stream].tokens[len(output) :][: rng.choice([0, 1, 3, LONGEST])]
        return [token if rng.random() < right else (token + 1) % 101 for token in coming]

    return guess


class Table:
    """Blocks that nobody else gets."""

    def __init__(self, num_blocks: int, chunk_size: int) -> None:
        self._free = list(range(num_blocks))
        random.Random(5).shuffle(self._free)
        self.chunk_size = chunk_size

    def take(self, tokens: int) -> list[int]:
        return [self._free.pop() for _ in range(blocks_for(tokens, self.chunk_size))]


def decode(
    execute: Execute,
    prompts: list[list[int]],
    samplings: list[Sampling],
    guess: Guess = nothing,
    *,
    count: int = 20,
    first_step: int = 1,
    foreseen: list[Said] | None = None,
) -> tuple[list[Said], int]:
    """Let each prompt say `count` tokens.

    Args:
        foreseen: on ranks that report nothing, what rank 0 will report.

    Returns:
        what was said, and the number of steps.
    """
    table, said, step = Table(64, 8), [Said([], []) for _ in prompts], first_step - 1
    joins = [
        Join(
            100 * step + number + 1,
            pack_int32(prompt),
            0,
            len(prompt),
            pack_int32(table.take(len(prompt) + count + LONGEST)),
            sampling,
        )
        for number, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
    ]

    def go(of: list[tuple[int, list[int]]], **plan: Any) -> None:
        nonlocal step
        step += 1
        result = execute(StepPlan(step, 1, **plan))
        if result is not None:
            _take(said, of, unpack_int32(result.tokens).tolist(), result.logprobs or {})
        else:
            _take(said, of, _foretold(foreseen or [], said, of), {})

    entries = [(join.sequence, 0, len(prompt), 0, 1) for join, prompt in zip(joins, prompts, strict=True)]
    go([(number, []) for number in range(len(prompts))], joins=joins, prefill=pack_int32(np.array(entries)))
    before: list[int] = []
    while left := [number for number, one in enumerate(said) if len(one.tokens) < count]:
        drafts = [guess(number, said[number].tokens)[: count - 1 - len(said[number].tokens)] for number in left]
        go(
            list(zip(left, drafts, strict=True)),
            rows=None if left == before else pack_int32([joins[number].sequence for number in left]),
            runs=None if left == before else b"",
            drafts=[pack_int32(chain) for chain in drafts] if any(drafts) else [],
        )
        before = left
    go([], leaves=pack_int32([join.sequence for join in joins]), rows=b"", runs=b"")
    return said, step - first_step + 1


def _foretold(foreseen: list[Said], said: list[Said], rows: list[tuple[int, list[int]]]) -> list[int]:
    tokens = []
    for number, chain in rows:
        coming = foreseen[number].tokens[len(said[number].tokens) :]
        kept = 0
        while kept < len(chain) and coming[kept] == chain[kept]:
            kept += 1
        tokens += [*coming[: kept + 1], *[-1] * (len(chain) - kept)]
    return tokens


def _take(
    said: list[Said], rows: list[tuple[int, list[int]]], tokens: list[int], logprobs: dict[int, TopLogprobs]
) -> None:
    place = 0
    for number, chain in rows:
        drawn = tokens[place : place + 1 + len(chain)]
        kept = 1
        while kept <= len(chain) and drawn[kept - 1] == chain[kept - 1]:
            kept += 1
        assert min(drawn[:kept]) >= 0, "a token is missing that was guessed"
        assert set(drawn[kept:]) <= {-1}, "a token stands behind a guess that was wrong"
        said[number].tokens.extend(drawn[:kept])
        said[number].logprobs.extend(logprobs[place + i] for i in range(kept) if place + i in logprobs)
        assert not [at for at in range(place + kept, place + len(drawn)) if at in logprobs]
        place += len(drawn)
    assert place == len(tokens)
