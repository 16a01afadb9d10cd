"""What a controller is asked: a job from its beginning, or the rest of one that another controller began. Pure.

A stream that has lost its controller goes on elsewhere with its prompt and the tokens it has (design.md section
3). Its noise depends on seed, output index and token only, so it goes on as it would have. Samples that have
tokens differ from each other: each goes on for itself, with the seed that it has. A beam search, of which nothing
was told yet, begins again.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from trunkline.controller.messages import Submit
from trunkline.controller.sequences.beam_search import sample_seed
from trunkline.kvstore.int32_codec import pack_int32
from trunkline.router.jobs.job import Job
from trunkline.router.messages import FinishReason

ALL = -1
"""In place of a sample's index: all of a request."""


def submission(job: Job, request: int) -> Submit:
    """A job from its beginning, all samples of it.

    Args:
        request: the number under which the connection knows it.
    """
    return Submit(
        request=request,
        tokens=job.packed_prompt(),
        prompt_len=len(job.prompt),
        max_tokens=job.max_tokens,
        sampling=job.sampling,
        stop_token_ids=sorted(job.eos_ids),
        salt=job.salt,
        n=job.decoding.samples,
        beam=job.decoding.beam,
        priority=job.priority,
        grammar=job.grammar,
        drops=job.packed_drops(),
        ttl=job.ttl,
        layout=None if job.modules is None else job.modules.layout,
    )


def continuation(job: Job, request: int, sample: int, output: Sequence[int]) -> Submit:
    """One sample of a job, behind the tokens that it has.

    Args:
        sample: its index.
        output: its tokens so far; without any it begins.
    """
    sampling = msgspec.structs.replace(
        job.sampling, seed=sample_seed(job.sampling.seed, sample), prompt_logprobs=-1
    )
    whole = submission(job, request)
    return msgspec.structs.replace(whole, tokens=whole.tokens + pack_int32(output), sampling=sampling, n=1)


def end_of(job: Job, output: Sequence[int], max_context: int) -> FinishReason | None:
    """Why a sample with these tokens is over, if it is and only word of it was lost.

    Args:
        output: its tokens so far.
        max_context: prompt and output at most; 0: not known.
    """
    if output and output[-1] in job.eos_ids:
        return FinishReason.STOP
    if len(output) >= job.max_tokens:
        return FinishReason.LENGTH
    if max_context and output and job.seen_tokens + len(output) >= max_context:
        return FinishReason.LENGTH
    return None
