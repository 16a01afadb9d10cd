"""What a router may ask: a `Submit` that could harm the group is refused before the engine sees it.

Routers check what clients send and answer in HTTP's words; this is the last line. Types have been checked when
the message was decoded, but every number fits an `int` and NaN is a `float`. Past this point nobody checks
again, and one number that a rank cannot handle would end the whole group with everybody's requests.
"""

from __future__ import annotations

import math
from typing import Final

from trunkline.controller.messages import Prefetch, Submit
from trunkline.controller.sequences.sequence import Request
from trunkline.controller.service.layout_checks import problem_of_layout, tokens_problem
from trunkline.controller.trace_ids import TraceIds
from trunkline.kvstore.beams import candidate_count
from trunkline.kvstore.cuts import problem_of_drops
from trunkline.kvstore.int32_codec import unpack_int32
from trunkline.runtime.spans import CONTEXT_BYTES
from trunkline.worker.messages import Sampling

NUMBER_BITS: Final = 32
"""Of a router's request numbers."""
REQUEST_ID_CHARACTERS_MAX: Final = 128
TENANT_BYTES_MAX: Final = 64
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
}
"""What the workers' tensors can hold, not what makes sense. `seed` may be anything: workers mask it."""


def is_request_number(number: int) -> bool:
    """Whether a router may use this number; others would reach into another router's requests."""
    return 0 <= number < 1 << NUMBER_BITS


def request_of(message: Submit, request_id: int, trace: TraceIds | None = None) -> Request:
    """The engine's view of a submission that has no problem. `trace`: if it is traced."""
    return Request(
        id=request_id,
        tokens=unpack_int32(message.tokens),
        max_tokens=message.max_tokens,
        sampling=message.sampling,
        prompt_len=message.prompt_len,
        stop_ids=tuple(message.stop_token_ids),
        salt=message.salt,
        drops=_drops(message.drops),
        layout=message.layout,
        ttl=message.ttl,
        n=message.n,
        beam=message.beam,
        priority=message.priority,
        grammar=message.grammar,
        request_id=message.request_id,
        trace=trace,
    )


def request_of_prefetch(message: Prefetch) -> Request:
    """Likewise of an announcement."""
    return Request(
        id=0,
        tokens=unpack_int32(message.tokens),
        max_tokens=1,
        sampling=Sampling(),
        salt=message.salt,
        drops=_drops(message.drops),
        layout=message.layout,
    )


def _drops(packed: bytes) -> tuple[tuple[int, int], ...]:
    return tuple((start, stop) for start, stop in unpack_int32(packed, columns=2).tolist())


def problem_of_prefetch(message: Prefetch, vocab_size: int) -> str:
    """What is wrong with an announcement that no router should send; "" if nothing is."""
    problem = tokens_problem(message.tokens, vocab_size)
    if not problem and message.layout is not None:
        problem = problem_of_layout(message.layout, len(message.tokens) // 4, vocab_size)
    if problem or not message.drops:
        return problem
    return _drops_problem(message.drops, len(message.tokens) // 4)


def _drops_problem(packed: bytes, count: int) -> str:
    if len(packed) % 8:
        return f"dropped ranges are {len(packed)} bytes, which is no array of pairs of int32"
    return problem_of_drops(_drops(packed), count)


def problem_of(message: Submit, vocab_size: int) -> str:
    """Why a request can never be given to the engine; "" if it can.

    Args:
        vocab_size: 0 if unknown.
    """
    if not is_request_number(message.request):
        return f"request number {message.request} does not fit {NUMBER_BITS} bits"
    problem = tokens_problem(message.tokens, vocab_size)
    if problem:
        return problem
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
    if not 0.0 <= message.ttl < math.inf:
        return f"ttl is {message.ttl}; it is a time in seconds"
    id_max = vocab_size - 1 if vocab_size else _INT32_MAX
    stop = next((stop for stop in message.stop_token_ids if not 0 <= stop <= _INT32_MAX), None)
    if stop is not None:
        return f"stop token {stop} is not a token id; they are 0 to {_INT32_MAX}"
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
    if message.grammar is not None and len(message.grammar.tenant) > TENANT_BYTES_MAX:
        return f"a grammar's tenant is {len(message.grammar.tenant)} bytes; at most {TENANT_BYTES_MAX} are kept"
    return _sampling_problem(message.sampling, id_max)


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
    ids += [token for word in sampling.bad_words for token in word]
    if any(not 0 <= token <= id_max for token in ids):
        return f"ids outside the vocabulary (0 to {id_max}) are given as stop, bad or allowed tokens"
    if any(not word for word in sampling.bad_words):
        return "bad_words has an empty one"
    if sampling.grammar:
        return "grammars are named by the controller, not by routers"
    return ""
