"""Refuse what the engine must not be given: invalid messages of routers, and requests that can never run. Pure.

    Submit ── problem_of_submit: can ranks handle its numbers? ──► Request
    Request ── problem_of_request: does it fit this group? ──► the queue

Decoding has checked the types of a message, but any number fits an `int`, and NaN is a `float`. No later code
checks again: one number that a rank cannot handle would end the whole group, with the requests of all clients.

A request that is let in fits the block pool alone at its full length. So the oldest request always ends, and then
the next one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

from msgspec import structs

from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import (
    ENDED_CHARACTERS_MAX,
    WENT_ON_NAMES,
    Forget,
    Holder,
    KeptChunks,
    ModulesCall,
    ModuleText,
    Prefetch,
    PromptLayout,
    Submit,
    Told,
    WentOn,
)
from trunkline.controller.sequences.beam_search import WIDTH_MAX
from trunkline.controller.sequences.sequence import Request
from trunkline.kvstore.beams import candidate_count
from trunkline.kvstore.chunks import NAME_BYTES, TOKEN_BYTES, blocks_for, largest, least, unpack_int32
from trunkline.kvstore.cuts import problem_of_drops
from trunkline.runtime.spans import CONTEXT_BYTES
from trunkline.worker.messages import POOL_MEAN, Sampling

TEXTS_MAX: Final = 65_536
"""Largest number of texts of one schema."""
RUNS_MAX: Final = 65_536
"""Largest number of runs of own tokens between the texts of a prompt."""
OPERATIONS: Final = ("encode", "look", "forget", "unpin", "cancel")
"""Operations that a `ModulesCall` may ask for."""
_PAIR_BYTES: Final = 8
NUMBER_BITS: Final = 32
"""Number of bits of a router's request numbers."""
PIN_NAME_CHARACTERS_MAX: Final = 2048
"""Largest length of the name under which texts are pinned (`ModulesCall.pin_name`)."""
HOLDERS_MAX: Final = 64
"""Largest number of peers' runs of chunks that a request names."""
RANKS_MAX: Final = 1024
"""Largest number of ranks that a peer may have."""
ENDPOINT_CHARACTERS_MAX: Final = 1024
REQUEST_ID_CHARACTERS_MAX: Final = 128
GRAMMAR_TENANT_BYTES_MAX: Final = 64
TENANT_BYTES_MAX: Final = 128
_INT32_MAX: Final = (1 << 31) - 1
_FLOAT32_MAX: Final = 3.4028234e38
GRAMMAR_KINDS: Final = ("json_schema", "json_object", "regex", "ebnf", "choice", "structural_tag")
_RANGES: Final[dict[str, tuple[float, float]]] = {
    "temperature": (0.0, _FLOAT32_MAX),
    "top_p": (0.0, 1.0),
    "top_k": (0, _INT32_MAX),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-_FLOAT32_MAX, _FLOAT32_MAX),
    "frequency_penalty": (-_FLOAT32_MAX, _FLOAT32_MAX),
    "repetition_penalty": (0.0, _FLOAT32_MAX),
    "logprobs": (-1, _INT32_MAX),
    "min_tokens": (0, _INT32_MAX),
    "prompt_logprobs": (-1, _INT32_MAX),
    "pooling": (0, POOL_MEAN),
}
"""Ranges of numbers that the workers' tensors can hold, whether sensible or not. `seed` may be any number; it is
masked."""


def is_request_number(number: int) -> bool:
    """Return whether a router may use this number; other numbers would mean another router's requests."""
    return 0 <= number < 1 << NUMBER_BITS


def request_of_prefetch(message: Prefetch | Forget) -> Request:
    """Return the engine's request for a valid prompt without a request."""
    tokens, own = message.tokens, len(message.tokens) // 4
    submit = Submit(0, tokens, own, 1, Sampling(), salt=message.salt, drops=message.drops, layout=message.layout)
    if isinstance(message, Prefetch):
        plain: dict[str, Any] = {"salt": b"", "drops": b"", "layout": None} if message.root else {}
        submit = structs.replace(submit, holders=message.holders, **plain)
    return Request.of(0, submit)


def _drops(packed: bytes) -> tuple[tuple[int, int], ...]:
    return tuple((start, stop) for start, stop in unpack_int32(packed, columns=2).tolist())


def problem_of_prefetch(message: Prefetch | Forget, vocab_size: int) -> str:
    """Return what is wrong with a prompt without a request; "" if it is valid."""
    problem = tokens_problem(message.tokens, vocab_size)
    if isinstance(message, Prefetch):
        problem = problem or _problem_of_holders(message.holders)
        if len(message.names) % NAME_BYTES or (message.names and not message.root):
            problem = problem or f"{len(message.names)} bytes are no names of chunks below a root"
        if problem or message.root:
            return problem
    if not problem and message.layout is not None:
        problem = problem_of_layout(message.layout, len(message.tokens) // 4, vocab_size)
    if problem or not message.drops:
        return problem
    return _drops_problem(message.drops, len(message.tokens) // 4)


def problem_of_told(message: Told) -> str:
    """Return why a message must be passed over; "" if it may be given to the engine."""
    if not is_request_number(message.request):
        return f"request number {message.request} does not fit {NUMBER_BITS} bits"
    if len(message.ended) > ENDED_CHARACTERS_MAX:
        return f"ended has {len(message.ended)} characters; at most {ENDED_CHARACTERS_MAX} are read"
    return ""


def problem_of_went_on(message: WentOn) -> str:
    """Return why a message must be passed over; "" if it may be given to the engine."""
    size = len(message.names)
    if size % NAME_BYTES or size > WENT_ON_NAMES * NAME_BYTES:
        return f"{size} bytes are no names of at most {WENT_ON_NAMES} chunks"
    return ""


def _drops_problem(packed: bytes, count: int) -> str:
    if len(packed) % 8:
        return f"dropped ranges are {len(packed)} bytes, which is no array of pairs of int32"
    return problem_of_drops(_drops(packed), count)


def problem_of_submit(message: Submit, vocab_size: int) -> str:
    """Return why a request must be refused; "" if it may be given to the engine.

    Args:
        vocab_size: 0 if unknown.
    """
    if not is_request_number(message.request):
        return f"request number {message.request} does not fit {NUMBER_BITS} bits"
    problem = tokens_problem(message.tokens, vocab_size)
    if problem:
        return problem
    if message.prediction and (problem := tokens_problem(message.prediction, vocab_size)):
        return f"prediction: {problem}"
    if message.drops and (problem := _drops_problem(message.drops, message.prompt_len)):
        return problem
    if message.layout is not None:
        problem = problem_of_layout(message.layout, message.prompt_len, vocab_size)
        if problem or message.drops:
            return problem or "a prompt with modules cannot have dropped ranges"
    if len(message.request_id) > REQUEST_ID_CHARACTERS_MAX:
        return f"request_id has {len(message.request_id)} characters; at most {REQUEST_ID_CHARACTERS_MAX} are kept"
    if len(message.trace) not in (0, CONTEXT_BYTES):
        return f"trace is {len(message.trace)} bytes; it is {CONTEXT_BYTES}, or none"
    if len(message.tenant.encode()) > TENANT_BYTES_MAX:
        return f"tenant has {len(message.tenant.encode())} bytes; at most {TENANT_BYTES_MAX} are allowed"
    if not 0.0 <= message.ttl < math.inf:
        return f"ttl is {message.ttl}; it is a time in seconds"
    if not 0.0 <= message.next_s < math.inf:
        return f"next_s is {message.next_s}; it is a time in seconds"
    id_max = vocab_size - 1 if vocab_size else _INT32_MAX
    for stop in message.stop_token_ids:
        if not 0 <= stop <= _INT32_MAX:
            return f"stop token {stop} is not a token id; they are 0 to {_INT32_MAX}"
    if not 0.0 <= message.kv_floor <= message.kv_ceiling <= 1.0:
        return f"kv_floor is {message.kv_floor} and kv_ceiling {message.kv_ceiling}; 0 <= floor <= ceiling <= 1"
    if not -_INT32_MAX <= message.priority <= _INT32_MAX:
        return f"priority is {message.priority}; allowed are {-_INT32_MAX} to {_INT32_MAX}"
    if message.beam is not None and not math.isfinite(message.beam.length_penalty):
        return f"length_penalty is {message.beam.length_penalty}; it must be finite"
    if message.beam is not None and vocab_size:
        candidates = candidate_count(message.beam.width, len(message.stop_token_ids))
        if candidates > vocab_size:
            return f"a search of width {message.beam.width} looks at {candidates} tokens; there are {vocab_size}"
    if message.grammar is not None and message.grammar.kind not in GRAMMAR_KINDS:
        return f"grammars of kind {message.grammar.kind!r} are unknown; known are {', '.join(GRAMMAR_KINDS)}"
    if message.grammar is not None and len(message.grammar.tenant) > GRAMMAR_TENANT_BYTES_MAX:
        size = len(message.grammar.tenant)
        return f"a grammar's tenant is {size} bytes; at most {GRAMMAR_TENANT_BYTES_MAX} are kept"
    problem = _problem_of_holders(message.holders) if message.holders else ""
    problem = problem or (_problem_of_kept(message, message.kept) if message.kept is not None else "")
    return problem or _sampling_problem(message.sampling, id_max)


def _problem_of_kept(message: Submit, kept: KeptChunks) -> str:
    if not message.drops or len(kept.names) % NAME_BYTES:
        return f"{len(kept.names)} bytes are no names of chunks kept behind a cut"
    return _problem_of_holders(kept.holders)


def _problem_of_holders(holders: Sequence[Holder]) -> str:
    if len(holders) > HOLDERS_MAX:
        return f"{len(holders)} holders were given; at most {HOLDERS_MAX} are allowed"
    for holder in holders:
        if not 0 <= holder.start < holder.stop <= _INT32_MAX:
            return f"{holder.member} is said to hold chunks [{holder.start}, {holder.stop})"
        if not 1 <= len(holder.endpoints) <= RANKS_MAX:
            return f"{holder.member} has {len(holder.endpoints)} endpoints; one per rank, up to {RANKS_MAX}"
        for endpoint in (holder.member, *holder.endpoints):
            if len(endpoint) > ENDPOINT_CHARACTERS_MAX:
                return f"a holder's name or endpoint has {len(endpoint)} characters"
    return ""


def _sampling_problem(sampling: Sampling, id_max: int) -> str:
    for name, (low, high) in _RANGES.items():
        value = getattr(sampling, name)
        if not low <= value <= high:  # also true of NaN
            return f"{name} is {value}; allowed are {low} to {high}"
    for token, bias in sampling.logit_bias.items():
        if not math.isfinite(bias):
            return f"logit_bias of token {token} is {bias}; it must be finite"
    for name in ("stop_ids", "allowed_ids"):
        packed = getattr(sampling, name)
        if len(packed) % 4:
            return f"{name} are {len(packed)} bytes, which is no array of int32"
    ids = [*unpack_int32(sampling.stop_ids).tolist(), *unpack_int32(sampling.allowed_ids).tolist()]
    for word in sampling.bad_words:
        ids += word
    if ids and not 0 <= min(ids) <= max(ids) <= id_max:
        return f"ids outside the vocabulary (0 to {id_max}) are given as stop, bad or allowed tokens"
    if [] in sampling.bad_words:
        return "bad_words has an empty one"
    if sampling.grammar:
        return "grammars are named by the controller, not by routers"
    return ""


def tokens_problem(packed: bytes, vocab_size: int) -> str:
    """Return why these bytes are not the int32 ids of tokens; "" if they are.

    Args:
        vocab_size: 0 if unknown.
    """
    if len(packed) % 4:
        return f"tokens are {len(packed)} bytes, which is no array of int32"
    tokens, id_max = unpack_int32(packed), vocab_size - 1 if vocab_size else _INT32_MAX
    if len(tokens) and not (least(tokens) >= 0 and largest(tokens) <= id_max):
        return f"token ids from {tokens.min()} to {tokens.max()} were given; they are 0 to {id_max}"
    return ""


def problem_of_call(call: ModulesCall, vocab_size: int) -> str:
    """Return why a call about texts must be refused; "" if it may be given to the engine."""
    if call.op not in OPERATIONS:
        return f"operation {call.op!r} is unknown; known are {', '.join(OPERATIONS)}"
    if not 0.0 <= call.ttl < math.inf:
        return f"ttl is {call.ttl}; it is a time in seconds"
    if len(call.pin_name) > PIN_NAME_CHARACTERS_MAX:
        return f"pin_name has {len(call.pin_name)} characters; at most {PIN_NAME_CHARACTERS_MAX} are allowed"
    if len(call.tenant.encode()) > TENANT_BYTES_MAX:
        return f"tenant has {len(call.tenant.encode())} bytes; at most {TENANT_BYTES_MAX} are allowed"
    if not 0.0 <= call.pins <= 1.0:
        return f"pins is {call.pins}; it is a part, from 0 to 1"
    return _problem_of_texts(call.texts, vocab_size)


def problem_of_layout(layout: PromptLayout, prompt_len: int, vocab_size: int) -> str:
    """Return why a prompt with `prompt_len` tokens of its own cannot have this layout; "" if it can."""
    if not 0.0 <= layout.ttl < math.inf:
        return f"the layout's ttl is {layout.ttl}; it is a time in seconds"
    problem = _problem_of_texts(layout.texts, vocab_size)
    if problem:
        return problem
    if len(layout.runs) % _PAIR_BYTES:
        return f"runs are {len(layout.runs)} bytes, which is no array of pairs of int32"
    runs = unpack_int32(layout.runs, columns=2).tolist()
    if len(runs) > RUNS_MAX:
        return f"{len(runs)} runs of own tokens were given; at most {RUNS_MAX} are allowed"
    if sum(count for _, count in runs) != prompt_len:
        return f"runs hold {sum(count for _, count in runs)} tokens; the prompt has {prompt_len} of its own"
    return _problem_of_places(layout, runs) if runs else ""


def _problem_of_places(layout: PromptLayout, runs: list[list[int]]) -> str:
    """Check that every position has exactly one token, and that the last one is the request's own."""
    if any(position < 0 or count < 1 for position, count in runs):
        return "a run of own tokens is empty or begins before the prompt"
    if any(a[0] + a[1] > b[0] for a, b in pairwise(runs)):
        return "runs of own tokens are not in the order of their positions"
    taken = [(position, position + count) for position, count in runs]
    for text in layout.texts:
        taken += [(text.position + start, text.position + stop) for start, stop in _ranges(text)]
    taken.sort()
    for before, after in pairwise(taken):
        if before[1] > after[0]:
            return f"position {after[0]} has two tokens"
    last = runs[-1][0] + runs[-1][1]
    if taken[-1][1] != last:
        return f"own tokens end at position {last}, but texts are seen up to {taken[-1][1]}"
    return "" if last <= _INT32_MAX else f"the prompt ends at position {last}"


def _ranges(text: ModuleText) -> list[tuple[int, int]]:
    return [(start, stop) for start, stop in unpack_int32(text.seen, columns=2).tolist()]


def _problem_of_texts(texts: Sequence[ModuleText], vocab_size: int) -> str:
    if len(texts) > TEXTS_MAX:
        return f"{len(texts)} texts were given; at most {TEXTS_MAX} are allowed"
    # All tokens at once: there may be tens of thousands of texts, and the group waits meanwhile.
    whole = not any(len(text.tokens) % 4 for text in texts)
    sound = whole and not tokens_problem(b"".join([text.tokens for text in texts]), vocab_size)
    for index, text in enumerate(texts):
        problem = "" if sound else tokens_problem(text.tokens, vocab_size)
        problem = problem or _problem_of_text(texts, index)
        if problem:
            return f"text {index}: {problem}"
        if text.parent >= 0 and texts[text.parent].position + len(texts[text.parent].tokens) // 4 > text.position:
            return f"text {index} begins at {text.position}, before the end of its parent, text {text.parent}"
    return ""


def _problem_of_text(texts: Sequence[ModuleText], index: int) -> str:
    """Return what is wrong with a text of a layout, whose tokens are ids; "" if nothing is."""
    text = texts[index]
    count = len(text.tokens) // 4
    if not count:
        return "it is empty"
    if not 0 <= text.position <= _INT32_MAX - count:
        return f"it stands at position {text.position}"
    if not -1 <= text.parent < index:
        return f"its parent is text {text.parent}; parents come first"
    if problem := _problem_of_holders(text.holders):
        return problem
    if len(text.seen) % _PAIR_BYTES:
        return f"seen ranges are {len(text.seen)} bytes, which is no array of pairs of int32"
    before = 0
    for start, stop in _ranges(text):
        if not before <= start < stop <= count:
            return (
                f"range [{start}, {stop}) of its {count} tokens is seen; ranges are ascending, apart and not empty"
            )
        before = stop
    return ""


# What this group can run


def problem_of_request(request: Request, config: EngineConfig) -> tuple[str, str]:
    """Return why a request can never run here, and the client's parameter that is wrong ("" if none is).

    Return ("", "") if the request can run.
    """
    submit, count = request.submit, len(request.tokens)
    longest = request.longest(config)
    prompt_len = submit.prompt_len
    if not 0 < prompt_len <= count:
        return f"the prompt is empty or its length ({prompt_len}) does not fit {count} tokens", ""
    if submit.sampling.pooling and (submit.max_tokens != 1 or submit.n != 1 or submit.beam is not None):
        return "a prompt that is pooled has one output token, and one sample", ""
    if submit.sampling.pooling and (request.drops or submit.layout is not None):
        return "a prompt that is not plain and seen whole cannot be pooled", ""
    if request.drops:
        if submit.beam is not None:
            return "a beam search cannot drop parts of its prompt", "truncation"
        if submit.sampling.prompt_logprobs >= 0:
            return "tokens of a prompt that is not seen whole cannot be scored", "truncation"
        dropped = sum(stop - start for start, stop in request.drops)
        count, prompt_len = count - dropped, prompt_len - dropped
    if submit.layout is not None and (problem := _problem_of_fit(request, submit.layout, prompt_len, config)):
        return problem, "prompt"
    if submit.max_tokens < 1:
        return f"max_tokens is {submit.max_tokens}; at least 1 is needed", "max_tokens"
    if count >= longest:
        return f"the prompt has {count} tokens; this group holds {longest}, prompt and output together", "prompt"
    if count - prompt_len >= submit.max_tokens:
        return f"{count - prompt_len} output tokens are given; max_tokens is {submit.max_tokens}", "max_tokens"
    if submit.n == 1 and submit.beam is None:
        return "", ""
    return _problem_of_width(request, prompt_len, config)


def _problem_of_fit(request: Request, layout: PromptLayout, prompt_len: int, config: EngineConfig) -> str:
    """Return why a prompt with modules can never run here; "" if it can."""
    if request.submit.sampling.prompt_logprobs >= 0:
        return "a prompt with modules cannot have its tokens scored"
    if problem := problem_of_texts(layout.texts, config):
        return problem
    size = config.chunk_size
    runs = unpack_int32(layout.runs, columns=2)
    last, behind = int(runs[-1, 0]), int(runs[:-1, 1].sum())
    end = last + len(request.tokens) - behind
    if end >= config.max_context:
        return f"the prompt ends at position {end}; this model has {config.max_context}, with the output"
    longest = min(prompt_len + request.submit.max_tokens, behind + config.max_context - last)
    # All texts count, also those that are needed only to compute others: a request that waits for several texts
    # must be able to have them all at once.
    texts = [blocks_for(len(text.tokens) // TOKEN_BYTES, size) for text in layout.texts]
    needed = (
        sum(texts)
        + blocks_for(longest, size)
        + (request.width - 1) * (blocks_for(longest, size) - prompt_len // size)
    )
    if needed > config.kept_blocks:
        return (
            f"its modules and {request.width} outputs of up to {longest} own tokens need {needed} blocks of "
            f"{size} tokens at once (a text begins a block of its own); this group has {config.kept_blocks}"
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
    """Return whether a request that begins like this one can come; if not, nothing is fetched for it."""
    if request.submit.layout is None:
        return True
    texts, size = request.submit.layout.texts, config.chunk_size
    seen = sum(blocks_for(len(text.tokens) // TOKEN_BYTES, size) for text in texts if text.seen)
    return seen <= config.max_table_blocks and not problem_of_texts(texts, config)


def problem_of_texts(texts: Sequence[ModuleText], config: EngineConfig) -> str:
    """Return why these texts of modules can never be encoded here; "" if they can."""
    if not config.prefix_cache:
        return "this group keeps no KV (its prefix cache is off), so it has no modules"
    blocks: list[int] = []
    for index, text in enumerate(texts):
        count = len(text.tokens) // TOKEN_BYTES
        end = text.position + count
        if end > config.max_context:
            return f"text {index} ends at position {end}; this model has {config.max_context} positions"
        blocks.append(blocks_for(count, config.chunk_size) + (blocks[text.parent] if text.parent >= 0 else 0))
        if blocks[-1] > min(config.kept_blocks, config.max_table_blocks):
            return (
                f"text {index} and those that it sees need {blocks[-1]} blocks of {config.chunk_size} tokens at "
                f"once; this group has {config.kept_blocks}, and a sequence at most {config.max_table_blocks}"
            )
    return ""


def _problem_of_width(request: Request, prompt_len: int, config: EngineConfig) -> tuple[str, str]:
    """Check that all sequences of a request fit at once: their rows, and their blocks at full length."""
    submit, width = request.submit, request.width
    n, beam = submit.n, submit.beam
    param = "n" if beam is None else "beam_width"
    if n < 1 or width < n:
        return f"n is {n}; it must be at least 1 and at most the beam width", "n"
    if beam is not None and width > WIDTH_MAX:
        return f"the beam width is {width}; at most {WIDTH_MAX} is allowed", param
    if width > config.max_rows:
        return f"{param} is {width}; this group decodes at most {config.max_rows} sequences at once", param
    if beam is not None and submit.grammar is not None:
        return "a beam search cannot follow a grammar", "beam_width"
    if width == 1:
        return "", ""
    if beam is None and len(request.tokens) > submit.prompt_len:
        return "several samples cannot go on from one given output", "n"
    limit = min(prompt_len + submit.max_tokens, config.longest_sequence)
    # Without the cache, samples that come back after a preemption no longer find each other's prompt.
    shared = prompt_len // config.chunk_size if config.prefix_cache else 0
    needed = shared + width * (blocks_for(limit, config.chunk_size) - shared)
    if needed > config.kept_blocks:
        return (
            f"{param} = {width} sequences of up to {limit} tokens need {needed} blocks of {config.chunk_size} "
            f"tokens at once; this group has {config.kept_blocks}. Ask for fewer sequences or fewer tokens."
        ), param
    return "", ""
