"""Requests as a service would get them: when they arrive, how long they are, which share a system prompt.

Everything is drawn from a seed, and so that short runs differ little by chance:

- Arrivals: a Poisson process conditioned on its count. Given how many arrive in a window, the times of a Poisson
  process are independent and uniform in it; taking exactly rate x window of them makes the offered rate exact.
- Lengths: log-normal, clipped; the distribution's quantiles in random order, so that every trace has its mean.
- Every prompt is a system prompt and a user's part. A given share of the requests, spread at random, has one and
  the same system prompt; all others have one of their own, equally long. So the work without reuse is the same
  whatever the share, and the requests of a trace are the same whoever serves it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log
from statistics import NormalDist
from typing import Final

import numpy as np
from serving import Prompts


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal lengths in tokens: `mean` before clipping to [low, high], `sigma` that of the logarithm."""

    mean: float
    sigma: float
    low: int
    high: int

    def draw(self, count: int, rng: np.random.Generator) -> list[int]:
        normal = NormalDist(log(self.mean) - self.sigma**2 / 2, self.sigma)
        quantiles = [exp(normal.inv_cdf((i + 0.5) / count)) for i in rng.permutation(count).tolist()]
        return [round(min(max(value, self.low), self.high)) for value in quantiles]


USER_TOKENS: Final = Lengths(mean=64, sigma=0.6, low=8, high=256)
OUTPUT_TOKENS: Final = Lengths(mean=128, sigma=0.6, low=16, high=512)

DATASETS: Final = {
    "alpaca-like": (Lengths(19, 0.6, 4, 128), Lengths(58, 0.6, 8, 256)),
    "sharegpt-like": (Lengths(161, 1.0, 8, 1024), Lengths(338, 0.7, 16, 900)),
}
"""Prompts and outputs with the mean lengths that PagedAttention §6.1 gives for its data sets; the spread is
ours."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace."""

    at_seconds: float
    prompt: list[int]
    output_tokens: int
    shared: bool
    """Its system prompt is the common one."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival."""

    arrivals: list[Arrival]
    window_seconds: float
    """In which all of them arrive."""
    system_tokens: int
    """Length of every system prompt."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What all traces of a run have in common."""

    vocabulary: int
    system_tokens: int
    seed: int

    def dataset_trace(self, dataset: str, count: int, window_seconds: float) -> Trace:
        """`count` requests of unrelated prompts with the lengths of `DATASETS[dataset]`."""
        rng = np.random.default_rng(self.seed)
        prompts = Prompts(self.vocabulary, self.seed)
        times = sorted(rng.uniform(0.0, window_seconds, count).tolist())
        inputs, outputs = DATASETS[dataset]
        lengths = zip(times, inputs.draw(count, rng), outputs.draw(count, rng), strict=True)
        arrivals = [Arrival(at, prompts.take(tokens), output, shared=False) for at, tokens, output in lengths]
        return Trace(arrivals, window_seconds, 0)

    def trace(self, count: int, window_seconds: float, shared_fraction: float) -> Trace:
        """`count` requests that arrive within `window_seconds`."""
        rng = np.random.default_rng(self.seed)
        prompts = Prompts(self.vocabulary, self.seed)
        times = sorted(rng.uniform(0.0, window_seconds, count).tolist())
        user_tokens, output_tokens = USER_TOKENS.draw(count, rng), OUTPUT_TOKENS.draw(count, rng)
        sharers = set(rng.permutation(count)[: round(shared_fraction * count)].tolist())
        system = prompts.take(self.system_tokens)
        arrivals = []
        for i, at in enumerate(times):
            head = system if i in sharers else prompts.take(self.system_tokens)
            arrivals.append(Arrival(at, head + prompts.take(user_tokens[i]), output_tokens[i], i in sharers))
        return Trace(arrivals, window_seconds, self.system_tokens)
