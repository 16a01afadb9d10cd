"""What a job asks of a controller: at first, and from where an earlier one was lost."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from trunkline.controller.messages import Submit
from trunkline.controller.sequences.beam_search import sample_seed
from trunkline.kvstore.chunks import pack_int32
from trunkline.router.jobs.job import Job
from trunkline.router.messages import FinishReason


def submission(job: Job, request: int) -> Submit:
    """Return the message that asks a controller for all samples of a job from the beginning.

    Args:
        request: number of the request on the connection.
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
        drops=job.packed_drops() if job.cut.drops else b"",
        ttl=job.ttl,
        layout=None if job.modules is None else job.modules.layout,
        tenant=job.tenant,
        kv_floor=job.kv_share[0],
        kv_ceiling=job.kv_share[1],
        next_s=job.hints.next_s,
        is_last=job.hints.is_last,
        prediction=job.prediction,
    )


def continuation(job: Job, request: int, sample: int, output: Sequence[int]) -> Submit:
    """Return the message that asks a controller to go on with one sample of a job.

    Args:
        request: number of the request on the connection.
        sample: index of the sample.
        output: tokens that the sample has so far; may be empty.
    """
    sampling = msgspec.structs.replace(
        job.sampling, seed=sample_seed(job.sampling.seed, sample), prompt_logprobs=-1
    )
    whole = submission(job, request)
    return msgspec.structs.replace(whole, tokens=whole.tokens + pack_int32(output), sampling=sampling, n=1)


def end_of(job: Job, output: Sequence[int], max_context: int) -> FinishReason | None:
    """Return why a sample is complete; None if it is not. A sample may be complete without a message of its end,
    because that message can be lost with a controller.

    Args:
        output: the sample's output tokens so far.
        max_context: largest number of tokens of prompt and output together; 0: not known.
    """
    if output and output[-1] in job.eos_ids:
        return FinishReason.STOP
    if len(output) >= job.max_tokens:
        return FinishReason.LENGTH
    if max_context and output and job.seen_tokens + len(output) >= max_context:
        return FinishReason.LENGTH
    return None
