"""What every stream must be, worked out from the request alone: plain Python, no blocks, no batch, no engine.

`beam_search` states the rules of `transformers` 5.23 (`generation/utils.py`, `_beam_search` and its helpers) for
one prompt, without sampling and logits processors. With k beams, prompt length P and E stop tokens:

1. Candidates of a step are the K = max(2, 1 + E) · k best of k · V sums (beam's score + float32 log-softmax),
   best first; in the first step only the prompt's own V count (the other beams start at -1e9).
2. A candidate *hits* if its token is a stop token, or if its length reaches P + max_tokens (all hit then).
3. The next k beams are the best k that do not hit, whatever their rank among the K.
4. Of the hits only those of rank < k become hypotheses, with score sum / L^length_penalty in float32, L being the
   output's length with the stop token. They compete with earlier ones for k places; a tie keeps the earlier.
5. The search goes on unless
   a. all candidates hit (the length is reached), or
   b. k hypotheses are there and `early_stopping` is True, or
   c. k hypotheses are there and the best next beam cannot improve on the worst of them: its sum / B^length_penalty
      is not greater, where B is the output length so far; only for `early_stopping` "never" with a positive
      penalty B is max_tokens. This rule applies under `early_stopping` True, too.
6. The result are the best n hypotheses, best first. (There are always k: 5a makes k hits of rank < k.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from simulation.model import extend_hash, log_probabilities, next_token, prefix_hash

from trunkline.controller.messages import BeamSearch


def expected_output(prompt: list[int], seed: int, max_tokens: int, stop_ids: tuple[int, ...] = ()) -> list[int]:
    """The stream that a request must produce, whatever the schedule."""
    current = prefix_hash(prompt)
    output: list[int] = []
    while len(output) < max_tokens:
        token = next_token(current, seed)
        output.append(token)
        if token in stop_ids:
            break
        current = extend_hash(current, token)
    return output


@dataclass(frozen=True)
class ExpectedHypothesis:
    """One result of a beam search."""

    tokens: list[int]
    score: float
    logprob: float


@dataclass
class ExpectedSearch:
    """The whole course of a beam search."""

    hypotheses: list[ExpectedHypothesis] = field(default_factory=list)
    """The best n, best first."""
    parents: list[list[int]] = field(default_factory=list)
    """Of each next beam, by step after which the search went on: where tails had to be copied."""


@dataclass(frozen=True)
class _Beam:
    tokens: list[int]
    prefix: bytes
    score: np.float32


def beam_search(
    prompt: list[int] | bytes,
    beam: BeamSearch,
    max_tokens: int,
    stop_ids: tuple[int, ...] = (),
    n: int = 1,
    *,
    extend: Callable[[bytes, int], bytes] = extend_hash,
) -> ExpectedSearch:
    """The rules above over the simulated model.

    Args:
        prompt: its tokens, or the hash of all that is seen behind it.
        extend: returns the hash of what is seen after one more token.
    """
    width, stops = beam.width, set(stop_ids)
    past = prompt if isinstance(prompt, bytes) else prefix_hash(prompt)
    beams = [_Beam([], past, np.float32(0.0))]
    found: list[tuple[np.float32, _Beam]] = []
    result = ExpectedSearch()
    for length in range(1, max_tokens + 1):
        penalty = np.float32(length**beam.length_penalty)
        candidates = _candidates(beams, max(2, 1 + len(stops)) * width, extend)
        hits = [length == max_tokens or c.tokens[-1] in stops for _, c in candidates]
        ended = [c for (_, c), hit in list(zip(candidates, hits, strict=True))[:width] if hit]
        found = sorted([*found, *((c.score / penalty, c) for c in ended)], key=lambda entry: -entry[0])[:width]
        if all(hits):
            break
        going = [entry for entry, hit in zip(candidates, hits, strict=True) if not hit][:width]
        beams = [candidate for _, candidate in going]
        if len(found) == width:
            never = beam.early_stopping is None and beam.length_penalty > 0.0
            reach = np.float32((max_tokens if never else length) ** beam.length_penalty)
            if beam.early_stopping is True or not beams[0].score / reach > found[-1][0]:
                break
        result.parents.append([parent for parent, _ in going])
    result.hypotheses = [
        ExpectedHypothesis(hypothesis.tokens, float(score), float(hypothesis.score))
        for score, hypothesis in found[:n]
    ]
    return result


def _candidates(beams: list[_Beam], count: int, extend: Callable[[bytes, int], bytes]) -> list[tuple[int, _Beam]]:
    """(parent, continuation) best first; equal ones by parent, then by token."""
    scored = [
        (-(value + beam.score), parent, token)
        for parent, beam in enumerate(beams)
        for token, value in enumerate(log_probabilities(beam.prefix))
    ]
    best = sorted(scored)[:count]
    return [
        (parent, _Beam([*beams[parent].tokens, token], extend(beams[parent].prefix, token), -negative))
        for negative, parent, token in best
    ]
