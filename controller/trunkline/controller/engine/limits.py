"""What a group of workers can run at all: a request beyond it is refused when it comes, with the reason. Pure.

Whoever is let in fits the pool alone at its longest; so the oldest request always ends, and then the next.
"""

from __future__ import annotations

from collections.abc import Sequence

from trunkline.controller.cache.radix_tree import TOKEN_BYTES
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import ModuleText
from trunkline.controller.sequences.beam_search import WIDTH_MAX
from trunkline.controller.sequences.sequence import Request
from trunkline.kvstore.chunks import blocks_for, unpack_int32
from trunkline.kvstore.cuts import problem_of_drops


def problem_of_request(request: Request, config: EngineConfig) -> tuple[str, str]:
    """Why it can never run and which parameter of the client's is to blame ("" if none is); ("", "") if it can."""
    count, longest = len(request.tokens), config.longest_sequence
    if count == 0 or not 0 < request.submit.prompt_len <= count:
        return f"the prompt is empty or its length ({request.submit.prompt_len}) does not fit {count} tokens", ""
    prompt_len = request.submit.prompt_len
    if request.drops:
        problem = _problem_of_cut(request, prompt_len)
        if problem:
            return problem, "truncation"
        dropped = sum(stop - start for start, stop in request.drops)
        count, prompt_len = count - dropped, prompt_len - dropped
    if request.submit.layout is not None and (problem := _problem_of_layout(request, prompt_len, config)):
        return problem, "prompt"
    if request.submit.max_tokens < 1:
        return f"max_tokens is {request.submit.max_tokens}; at least 1 is needed", "max_tokens"
    if count >= longest:
        return f"the prompt has {count} tokens; this group holds {longest}, prompt and output together", "prompt"
    if count - prompt_len >= request.submit.max_tokens:
        return (
            f"{count - prompt_len} output tokens are given; max_tokens is {request.submit.max_tokens}",
            "max_tokens",
        )
    return _problem_of_width(request, prompt_len, config)


def _problem_of_cut(request: Request, prompt_len: int) -> str:
    if request.submit.beam is not None:
        return "a beam search cannot drop parts of its prompt"
    if request.submit.sampling.prompt_logprobs >= 0:
        return "tokens of a prompt that is not seen whole cannot be scored"
    return problem_of_drops(request.drops, prompt_len)


def _problem_of_layout(request: Request, prompt_len: int, config: EngineConfig) -> str:
    layout = request.submit.layout
    assert layout is not None
    if request.drops or request.submit.beam is not None or request.submit.sampling.prompt_logprobs >= 0:
        return "a prompt with modules cannot be cut, searched with beams, or have its tokens scored"
    if problem := problem_of_texts(layout.texts, config):
        return problem
    size = config.chunk_size
    runs = unpack_int32(layout.runs, columns=2)
    last, behind = int(runs[-1, 0]), int(runs[:-1, 1].sum())
    end = last + len(request.tokens) - behind
    if end >= config.max_context:
        return f"the prompt ends at position {end}; this model has {config.max_context}, with the output"
    longest = min(prompt_len + request.submit.max_tokens, behind + config.max_context - last)
    # All texts count, also those that are needed only to compute others: so who waits for several of them can have
    # them all at once.
    texts = [blocks_for(len(text.tokens) // TOKEN_BYTES, size) for text in layout.texts]
    needed = (
        sum(texts)
        + blocks_for(longest, size)
        + (request.width - 1) * (blocks_for(longest, size) - prompt_len // size)
    )
    if needed > config.num_blocks:
        return (
            f"its modules and {request.width} outputs of up to {longest} own tokens need {needed} blocks of "
            f"{size} tokens at once (a text begins a block of its own); this group has {config.num_blocks}"
        )
    seen = sum(count for count, text in zip(texts, layout.texts, strict=True) if text.seen)
    if seen + blocks_for(longest, size) > config.max_table_blocks:
        return (
            f"it sees texts in {seen} blocks of {size} tokens (a text begins a block of its own) and has "
            f"{longest} own tokens; a sequence has at most {config.max_table_blocks} blocks. "
            "Use fewer, longer modules."
        )
    return ""


def is_expectable(request: Request, config: EngineConfig) -> bool:
    """Whether one like this, without its last tokens perhaps, may come: else nothing is done for it."""
    if request.submit.layout is None:
        return True
    texts, size = request.submit.layout.texts, config.chunk_size
    seen = sum(blocks_for(len(text.tokens) // TOKEN_BYTES, size) for text in texts if text.seen)
    return seen <= config.max_table_blocks and not problem_of_texts(texts, config)


def problem_of_texts(texts: Sequence[ModuleText], config: EngineConfig) -> str:
    """Why these texts of modules can never be encoded here; "" if they can."""
    if not config.prefix_cache:
        return "this group keeps no KV (its prefix cache is off), so it has no modules"
    blocks: list[int] = []
    for index, text in enumerate(texts):
        count = len(text.tokens) // TOKEN_BYTES
        end = text.position + count
        if end > config.max_context:
            return f"text {index} ends at position {end}; this model has {config.max_context} positions"
        blocks.append(blocks_for(count, config.chunk_size) + (blocks[text.parent] if text.parent >= 0 else 0))
        if blocks[-1] > min(config.num_blocks, config.max_table_blocks):
            return (
                f"text {index} and those that it sees need {blocks[-1]} blocks of {config.chunk_size} tokens at "
                f"once; this group has {config.num_blocks}, and a sequence at most {config.max_table_blocks}"
            )
    return ""


def _problem_of_width(request: Request, prompt_len: int, config: EngineConfig) -> tuple[str, str]:
    """Several sequences at once: rows, blocks at their longest, and what a search must be."""
    n, width, beam = request.submit.n, request.width, request.submit.beam
    param = "n" if beam is None else "beam_width"
    if n < 1 or width < n:
        return f"n is {n}; it must be at least 1 and at most the beam width", "n"
    if beam is not None and width > WIDTH_MAX:
        return f"the beam width is {width}; at most {WIDTH_MAX} is allowed", param
    if width > config.max_rows:
        return f"{param} is {width}; this group decodes at most {config.max_rows} sequences at once", param
    if beam is not None and request.submit.grammar is not None:
        return "a beam search cannot follow a grammar", "beam_width"
    if width == 1:
        return "", ""
    if beam is None and len(request.tokens) > request.submit.prompt_len:
        return "several samples cannot go on from one given output", "n"
    limit = min(prompt_len + request.submit.max_tokens, config.longest_sequence)
    # Without the cache, samples that come back after a preemption no longer find each other's prompt.
    shared = prompt_len // config.chunk_size if config.prefix_cache else 0
    needed = shared + width * (blocks_for(limit, config.chunk_size) - shared)
    if needed > config.num_blocks:
        return (
            f"{param} = {width} sequences of up to {limit} tokens need {needed} blocks of {config.chunk_size} "
            f"tokens at once; this group has {config.num_blocks}. Ask for fewer sequences or fewer tokens."
        ), param
    return "", ""
