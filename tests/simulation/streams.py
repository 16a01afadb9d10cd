"""What a client of the simulation sends and sees, and the comparison with what the oracle says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypedDict

import numpy as np
from simulation.model import pooled_prompt, prefix_hash, prompt_score
from simulation.module_oracle import expected_module_output, seen_behind, seen_prompt
from simulation.oracle import beam_search, expected_output

from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import (
    BeamSearch,
    Grammar,
    PromptLayout,
)
from trunkline.controller.scheduling.admission import DEADLY
from trunkline.controller.sequences.beam_search import sample_seed
from trunkline.kvstore.chunks import unpack_int32
from trunkline.router.messages import Finished, FinishReason, Hypothesis, Started
from trunkline.worker.messages import POOL_MEAN


class Options(TypedDict, total=False):
    """What a request may have besides its prompt and length."""

    seed: int
    stop_ids: tuple[int, ...]
    salt: bytes
    n: int
    beam: BeamSearch | None
    priority: int
    tenant: str
    kv_share: tuple[float, float]
    prompt_logprobs: int
    pooling: int
    grammar: Grammar | None
    drops: tuple[tuple[int, int], ...]
    ttl: float
    next_s: float
    is_last: bool
    layout: PromptLayout | None
    temperature: float
    history: bool
    """Whether its sampling looks at all earlier tokens."""


@dataclass
class Stream:
    """What a client of the simulation sees of a request."""

    prompt: list[int]
    """All that is seen of it, by position."""
    seed: int
    max_tokens: int
    stop_ids: tuple[int, ...]
    n: int = 1
    beam: BeamSearch | None = None
    prompt_logprobs: int = -1
    layout: PromptLayout | None = None
    own: list[int] = field(default_factory=list)
    """Of a prompt with modules, what is no module's."""
    positions: int = 0
    """That the model has."""
    outputs: list[list[int]] = field(default_factory=list)
    """By sample."""
    reasons: dict[int, str] = field(default_factory=dict)
    """By sample that ended."""
    given_up: set[int] = field(default_factory=set)
    """Samples that the client does not want any more; the others go on."""
    hypotheses: list[Hypothesis] | None = None
    scored: dict[int, tuple[float, int, list[int], list[float]]] = field(default_factory=dict)
    """By prompt position."""
    pooling: int = 0
    pooled: bytes | None = None
    """What came of the prompt's hidden states, with the first token."""
    cached_tokens: int | None = None
    started: Started | None = None
    foreseen: dict[int, list[int]] = field(default_factory=dict)
    """What samples will be (`expected_stream`)."""
    ended: Finished | None = None
    """The message that ended the whole request."""

    def __post_init__(self) -> None:
        self.outputs = [[] for _ in range(1 if self.beam else self.n)]

    def longest(self, config: EngineConfig) -> int:
        """How many tokens it can have: what is behind the window of a plain one needs no room."""
        is_plain = self.n == 1 and self.beam is None and self.layout is None
        is_plain = is_plain and self.prompt_logprobs < 0 and self.pooling != POOL_MEAN
        return config.longest_plain if is_plain else config.longest_sequence

    @property
    def output(self) -> list[int]:
        """Of the first sample."""
        return self.outputs[0]

    @property
    def end(self) -> int:
        """The position behind a prompt with modules."""
        assert self.layout is not None
        position, count = unpack_int32(self.layout.runs, 2)[-1].tolist()
        return int(position + count)

    @property
    def reason(self) -> str | None:
        """Why the request ended; None while it has not."""
        return self.ended.reason if self.ended else None

    @property
    def is_cut_off(self) -> bool:
        """Whether it ended before its time: it was aborted, or taken for what kills workers."""
        return self.ended is not None and (self.reason == FinishReason.ABORT or self.ended.detail == DEADLY)


def verify(stream: Stream, longest: int) -> None:
    """A stream that ended is what its oracle says, or, where it was cut off, a part of that.

    Args:
        longest: tokens of prompt and output that the group allows; with modules it is `Stream.positions` that
            counts.
    """
    assert stream.ended is not None
    limit = _limit(stream, longest)
    if stream.reason in (FinishReason.INVALID, FinishReason.QUEUE_FULL):
        assert not any(stream.outputs)
        return
    if stream.beam is None:
        for sample, output in enumerate(stream.outputs):
            expected = _expected(stream, sample_seed(stream.seed, sample), limit)
            if sample in stream.reasons:
                assert output == expected
                stopped = expected[-1] in stream.stop_ids
                assert stream.reasons[sample] == (FinishReason.STOP if stopped else FinishReason.LENGTH)
            else:
                assert stream.is_cut_off or sample in stream.given_up
                assert output == expected[: len(output)]
    elif not stream.is_cut_off:
        assert stream.reason in (FinishReason.STOP, FinishReason.LENGTH)
        _verify_search(stream, limit)
    if stream.prompt_logprobs >= 0:
        _verify_scores(stream)
    whole = pooled_prompt(stream.prompt, over_all=stream.pooling == POOL_MEAN)
    assert stream.pooled == (whole if stream.pooling and stream.output else None)


def _limit(stream: Stream, longest: int) -> int:
    if stream.layout is not None:
        return min(stream.max_tokens, stream.positions - stream.end)
    return min(stream.max_tokens, longest - len(stream.prompt))


def expected_stream(stream: Stream, sample: int, longest: int) -> list[int]:
    """What a sample of a stream must be when it has ended by itself; worked out once."""
    if sample not in stream.foreseen:
        stream.foreseen[sample] = _expected(stream, sample_seed(stream.seed, sample), _limit(stream, longest))
    return stream.foreseen[sample]


def _expected(stream: Stream, seed: int, limit: int) -> list[int]:
    if stream.layout is None:
        return expected_output(stream.prompt, seed, limit, stream.stop_ids)
    return expected_module_output(stream.layout, stream.own, seed, limit, stream.stop_ids)


def _verify_search(stream: Stream, limit: int) -> None:
    assert stream.beam is not None
    assert stream.hypotheses is not None, "a beam search ended without results"
    if stream.layout is None:
        expected = beam_search(stream.prompt, stream.beam, limit, stream.stop_ids, stream.n).hypotheses
    else:
        past = seen_prompt(stream.layout, stream.own)
        found_by = beam_search(past, stream.beam, limit, stream.stop_ids, stream.n, extend=seen_behind)
        expected = found_by.hypotheses
    found = [
        (unpack_int32(h.tokens).tolist(), np.float32(h.score), np.float32(h.logprob)) for h in stream.hypotheses
    ]
    assert found == [(h.tokens, np.float32(h.score), np.float32(h.logprob)) for h in expected]
    for hypothesis, (tokens, _, _) in zip(stream.hypotheses, found, strict=True):
        stopped = tokens[-1] in stream.stop_ids
        assert hypothesis.reason == (FinishReason.STOP if stopped else FinishReason.LENGTH)


def _verify_scores(stream: Stream) -> None:
    """Every position of a prompt that was computed is scored, as the model says."""
    if not stream.is_cut_off:
        assert sorted(stream.scored) == list(range(1, len(stream.prompt)))
    for position, row in stream.scored.items():
        past = prefix_hash(stream.prompt[:position])
        expected = prompt_score(past, stream.prompt[position], stream.prompt_logprobs)
        assert row == expected, f"position {position} of a prompt is scored wrongly"
