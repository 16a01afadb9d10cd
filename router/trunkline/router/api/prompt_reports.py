"""Jobs of which only one report is wanted: the pooled hidden states of a prompt, or the likelihood of a word after
it. Each draws one token, which is not given out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from trunkline.controller.reports import TopLogprobs
from trunkline.router.api.answer_fields import usage_of
from trunkline.router.api.prompt_batch import PromptBatch
from trunkline.router.api.prompting import of_tenant
from trunkline.router.api.responses import CachedTokens
from trunkline.router.errors import ApiError, bad_value, unavailable
from trunkline.router.jobs.job import Job, Prompt, check_prompt
from trunkline.router.jobs.pooling_models import PoolingRequest
from trunkline.router.service import RouterService
from trunkline.router.streams.generation import Generation
from trunkline.worker.messages import POOL_LAST, POOL_MEAN, Sampling

TOGETHER_MAX: Final = 512
"""Largest number of a request's prompts that are with the engines at once. The others follow when these are
done, so that one request does not take all places of a router."""
_POOLINGS: Final = {"last": POOL_LAST, "mean": POOL_MEAN}

Vector = NDArray[np.float32]


class PromptUsage(msgspec.Struct):
    """The field `usage` of answers without output tokens."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens

    @classmethod
    def of(cls, generations: Sequence[Generation]) -> PromptUsage:
        """Return the token counts of generations that are over."""
        usage = usage_of(*generations)
        return cls(usage.prompt_tokens, usage.prompt_tokens, usage.prompt_tokens_details)


class PromptReport(NamedTuple):
    """The results of one prompt."""

    generation: Generation
    report: TopLogprobs


def report_job(service: RouterService, body: PoolingRequest, prompt: Prompt, sampling: Sampling) -> Job:
    """Return the job of a prompt of which only the report of one token is wanted.

    Args:
        prompt: `param` names it in errors.

    Raises:
        ApiError: 400, the prompt is too long or has ids outside the vocabulary.
    """
    check_prompt(prompt, service.limits, prompt.param)
    job = Job(prompt=prompt.tokens, max_tokens=1, sampling=sampling, eos_ids=frozenset())
    return of_tenant(job, body.cache_salt, body.priority)


def pooled_sampling(service: RouterService, body: PoolingRequest) -> Sampling:
    """Return the sampling parameters that ask for pooled hidden states, as the request or else the model says.

    Raises:
        ApiError: 400, the model's own embeddings cannot be made here.
    """
    embedder = service.tokenizer.files.embedder
    if body.pooling is None and embedder.problem:
        raise bad_value(
            "pooling",
            f"this model's own embeddings cannot be made: {embedder.problem}. `pooling` gives its hidden states, "
            "pooled in another way",
        )
    return Sampling(temperature=0.0, pooling=_POOLINGS[body.pooling or embedder.pooling])


async def read_reports(service: RouterService, jobs: Sequence[Job], params: Sequence[str]) -> list[PromptReport]:
    """Run jobs and return their reports, in the same order.

    Args:
        params: The jobs' prompts, as errors name them.

    Raises:
        ApiError: A job was refused or failed; all are aborted.
    """
    found: list[PromptReport] = []
    for start in range(0, len(jobs), TOGETHER_MAX):
        batch = PromptBatch(params[start : start + TOGETHER_MAX])
        try:
            await batch.submit(service, jobs[start : start + TOGETHER_MAX])
            answers = await batch.collect()
        finally:
            batch.close()
        for generation, [answer] in zip(batch.generations, answers, strict=True):
            reports = [entry.logprobs for entry in answer.logprobs if entry.logprobs is not None]
            if not reports:
                raise _no_report()
            found.append(PromptReport(generation, reports[0]))
    return found


def vector_of(report: TopLogprobs, dimensions: int | None = None, *, normalize: bool = True) -> Vector:
    """Return an embedding, float32 `[dimensions]`.

    Args:
        dimensions: Number of first values to take; None: all.
        normalize: Whether to bring it to length 1.

    Raises:
        ApiError: 503, the engine has reported nothing that could be an embedding; 400, it has fewer dimensions.
    """
    state = np.frombuffer(report.pooled, "<f4")
    if not len(state) or not np.isfinite(state).all():
        raise _no_report()
    if dimensions is not None and dimensions > len(state):
        raise too_many_dimensions(dimensions, len(state))
    values = state[:dimensions].astype(np.float64)
    length = float(np.linalg.norm(values))
    if normalize and length:
        values /= length
    vector: Vector = values.astype("<f4")
    return vector


def too_many_dimensions(asked: int, size: int) -> ApiError:
    """Return the error of a request for longer embeddings than the model has."""
    return bad_value("dimensions", f"`dimensions` is {asked}; this model's embeddings have {size}")


def optional_warnings(body: PoolingRequest) -> list[str] | UnsetType:
    """Return the field `warnings` of an answer."""
    return UNSET if body.warnings is None else body.warnings


def _no_report() -> ApiError:
    return unavailable("the engine did not report what it was asked for about a prompt", code="engine_failed")
