"""Latent attention with KV in 8 bits: as `transformers` to the error of the rounding, all kernels and ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import torch
from worker.checkpoints import Models, transformers_logits
from worker.driver import VOCAB_SIZE, Stream, dense_logprobs, generate, run_config
from worker.ranks import generate_with_each, run_ranks

from trunkline.worker.loading import load_runner

NAMES: Final = ("deepseek-v2-lite", "deepseek-v2", "deepseek-v3", "glm4-moe-lite", "mistral4")
TOLERANCE: Final = 0.04
"""Of a mean: where the rounding changes which expert a token goes to, single numbers differ by far more."""


def difference(folder: Path, stream: Stream) -> float:
    """Return by how much log-probabilities differ from those of `transformers`, in the mean."""
    tokens = stream.prompt + stream.output
    expected = transformers_logits(folder, tokens).log_softmax(dim=-1)[len(stream.prompt) - 1 : -1]
    actual = np.stack([dense_logprobs(report, VOCAB_SIZE) for report in stream.logprobs])
    return float((torch.from_numpy(actual) - expected).abs().mean())


def run(name: str, models: Models, **fields: object) -> list[Stream]:
    runner = load_runner(run_config(models(name), kv_dtype="int8", **fields), lambda *_: None)
    assert runner.pool.data.dtype == torch.int8
    runner.pool.data.view(torch.uint8).fill_(255)  # scales that are NaN
    return generate(runner)


@pytest.mark.parametrize("name", NAMES)
def test_log_probabilities(name: str, models: Models) -> None:
    """Prompts in pieces, some on top of others' blocks, beside rows that decode."""
    for kernels in ("reference", "auto"):
        for stream in run(name, models, kernels=kernels):
            assert 1e-4 < difference(models(name), stream) <= TOLERANCE


def test_the_rounding_is_what_differs(models: Models) -> None:
    """The two kernels agree with each other far better than with `transformers`."""
    native, reference = (run("deepseek-v3", models, kernels=kernels) for kernels in ("auto", "reference"))
    errors, between = [], []
    for mine, other in zip(native, reference, strict=True):
        assert mine.output == other.output
        a, b = (np.stack([dense_logprobs(x, VOCAB_SIZE) for x in own.logprobs]) for own in (mine, other))
        between.append(float(np.abs(a - b).mean()))
        errors.append(difference(models("deepseek-v3"), mine))
    assert max(between) < max(errors) / 5


@pytest.mark.processes
@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_give_the_same(tp: int, models: Models) -> None:
    """Each holds the whole row and reads it with its own query heads."""
    names = ("deepseek-v3", "mistral4")
    results, *_ = run_ranks(partial(generate_with_each, kv_dtype="int8"), tp, [models(name) for name in names])
    for name, streams in zip(names, results, strict=True):
        for stream in streams:
            assert 1e-4 < difference(models(name), stream) <= TOLERANCE
