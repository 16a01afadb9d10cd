"""What a group of workers can run at all: a request beyond it is refused when it comes, with the reason. Pure.

Whoever is let in fits the pool alone at its longest; so the oldest request always ends, and then the next.
"""

from __future__ import annotations

from trunkline.controller.beam_search import WIDTH_MAX
from trunkline.controller.config import EngineConfig
from trunkline.controller.sequence import Request
from trunkline.kvstore.cuts import problem_of_drops
from trunkline.kvstore.layout import blocks_for


def problem_of_request(request: Request, config: EngineConfig) -> tuple[str, str]:
    """Why it can never run and which parameter of the client's is to blame ("" if none is); ("", "") if it can."""
    count, longest = len(request.tokens), config.longest_sequence
    if count == 0 or not (request.prompt_len == -1 or 0 < request.prompt_len <= count):
        return f"the prompt is empty or its length ({request.prompt_len}) does not fit {count} tokens", ""
    prompt_len = request.prompt_len if request.prompt_len >= 0 else count
    if request.drops:
        problem = _problem_of_cut(request, prompt_len)
        if problem:
            return problem, "truncation"
        dropped = sum(stop - start for start, stop in request.drops)
        count, prompt_len = count - dropped, prompt_len - dropped
    if request.max_tokens < 1:
        return f"max_tokens is {request.max_tokens}; at least 1 is needed", "max_tokens"
    if count >= longest:
        return f"the prompt has {count} tokens; this group holds {longest}, prompt and output together", "prompt"
    if count - prompt_len >= request.max_tokens:
        return f"{count - prompt_len} output tokens are given; max_tokens is {request.max_tokens}", "max_tokens"
    return _problem_of_width(request, prompt_len, config)


def _problem_of_cut(request: Request, prompt_len: int) -> str:
    if request.beam is not None:
        return "a beam search cannot drop parts of its prompt"
    if request.sampling.prompt_logprobs >= 0:
        return "tokens of a prompt that is not seen whole cannot be scored"
    return problem_of_drops(request.drops, prompt_len)


def _problem_of_width(request: Request, prompt_len: int, config: EngineConfig) -> tuple[str, str]:
    """Several sequences at once: rows, blocks at their longest, and what a search must be."""
    n, width, beam = request.n, request.width, request.beam
    param = "n" if beam is None else "beam_width"
    if n < 1 or width < n:
        return f"n is {n}; it must be at least 1 and at most the beam width", "n"
    if beam is not None and width > WIDTH_MAX:
        return f"the beam width is {width}; at most {WIDTH_MAX} is allowed", param
    if width > config.max_rows:
        return f"{param} is {width}; this group decodes at most {config.max_rows} sequences at once", param
    if beam is not None and request.grammar is not None:
        return "a beam search cannot follow a grammar", "beam_width"
    if width == 1:
        return "", ""
    if beam is None and len(request.tokens) > request.prompt_len >= 0:
        return "several samples cannot go on from one given output", "n"
    limit = min(prompt_len + request.max_tokens, config.longest_sequence)
    # Without the cache, samples that come back after a preemption no longer find each other's prompt.
    shared = prompt_len // config.chunk_size if config.prefix_cache else 0
    needed = shared + width * (blocks_for(limit, config.chunk_size) - shared)
    if needed > config.num_blocks:
        return (
            f"{param} = {width} sequences of up to {limit} tokens need {needed} blocks of {config.chunk_size} "
            f"tokens at once; this group has {config.num_blocks}. Ask for fewer sequences or fewer tokens."
        ), param
    return "", ""
