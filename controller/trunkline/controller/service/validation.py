"""Refuse invalid messages of routers and workers before the engine sees them. Pure.

Decoding has checked the types, but any number fits an `int`, and NaN is a `float`. No later code checks again. One
number of a router that a rank cannot handle would end the whole group, with the requests of all clients; a wrong
number of a worker must end its group only, not the controller.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from trunkline.controller.messages import (
    GrammarReady,
    LoadProgress,
    ModulesCall,
    ModuleText,
    MovesDone,
    Prefetch,
    Probed,
    PromptLayout,
    PromptLogprobs,
    StepResult,
    Submit,
    TopLogprobs,
    WorkerFailed,
    WorkerHello,
    WorkerReady,
    WorkerReport,
)
from trunkline.controller.sequences.sequence import Request
from trunkline.kvstore.beams import candidate_count
from trunkline.kvstore.chunks import unpack_int32
from trunkline.kvstore.cuts import problem_of_drops
from trunkline.runtime.spans import CONTEXT_BYTES
from trunkline.worker.messages import Sampling

NUMBER_BITS: Final = 32
"""Bits of a router's request numbers."""
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
"""Ranges that the workers' tensors can hold, whether sensible or not. `seed` may be any number; it is masked."""


def is_request_number(number: int) -> bool:
    """Return whether a router may use this number; other numbers would mean another router's requests."""
    return 0 <= number < 1 << NUMBER_BITS


def request_of_prefetch(message: Prefetch) -> Request:
    """Return the engine's request for a valid announcement of a request."""
    tokens, own = message.tokens, len(message.tokens) // 4
    submit = Submit(0, tokens, own, 1, Sampling(), salt=message.salt, drops=message.drops, layout=message.layout)
    return Request.of(0, submit)


def _drops(packed: bytes) -> tuple[tuple[int, int], ...]:
    return tuple((start, stop) for start, stop in unpack_int32(packed, columns=2).tolist())


def problem_of_prefetch(message: Prefetch, vocab_size: int) -> str:
    """Return what is wrong with an announcement; "" if it is valid."""
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
    """Return why a request must be refused; "" if it may be given to the engine.

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


TEXTS_MAX: Final = 65_536
"""Most texts of one schema."""
RUNS_MAX: Final = 65_536
_PAIR_BYTES: Final = 8
OPERATIONS: Final = ("encode", "look", "unpin", "cancel")


def tokens_problem(packed: bytes, vocab_size: int) -> str:
    """Return why these bytes are not the int32 ids of tokens; "" if they are.

    Args:
        vocab_size: 0 if unknown.
    """
    if len(packed) % 4:
        return f"tokens are {len(packed)} bytes, which is no array of int32"
    tokens, id_max = unpack_int32(packed), vocab_size - 1 if vocab_size else _INT32_MAX
    if len(tokens) and not (tokens.min() >= 0 and tokens.max() <= id_max):
        return f"token ids from {tokens.min()} to {tokens.max()} were given; they are 0 to {id_max}"
    return ""


def problem_of_call(call: ModulesCall, vocab_size: int) -> str:
    """Return why a call about texts must be refused; "" if it may be given to the engine."""
    if call.op not in OPERATIONS:
        return f"operation {call.op!r} is unknown; known are {', '.join(OPERATIONS)}"
    if not 0.0 <= call.ttl < math.inf:
        return f"ttl is {call.ttl}; it is a time in seconds"
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


BLOCKS_MAX: Final = 1 << 24
SLOTS_MAX: Final = 1 << 28
_COUNT_MAX: Final = 1 << 31
_BYTES_MAX: Final = 1 << 48
"""Most bytes in a report: totals of them are kept, and sent as 64-bit numbers."""
_US_MAX: Final = 1 << 42
"""Most microseconds in a report: seven weeks."""
_TEXT_MAX: Final = 4096
_RESULT_RANGES: Final = {
    "elapsed_us": _US_MAX,
    "plan_copies": 1,
    "kv_bytes_read": _BYTES_MAX,
    "moved_us": _US_MAX,
    "moved_blocks": _COUNT_MAX,
    "waited_us": _US_MAX,
}
_READY_RANGES: Final = {
    "num_blocks": BLOCKS_MAX,
    "block_bytes": _BYTES_MAX,
    "host_slots": SLOTS_MAX,
    "disk_slots": SLOTS_MAX,
    "swap_us_per_block": _US_MAX,
}


def problem_of_report(report: WorkerReport, ranks: int) -> str:
    """Return why no correct worker of a group of this size sends such a report; "" if one may."""
    match report:
        case StepResult():
            return _out_of_range(report, _RESULT_RANGES) or _problem_of_scores(report)
        case WorkerReady():
            return _problem_of_rank(report.rank, ranks) or _out_of_range(report, _READY_RANGES)
        case WorkerHello():
            return _problem_of_rank(report.rank, ranks) or _too_long(report.node)
        case LoadProgress():
            is_sound = math.isfinite(report.fraction)
            problem = _too_long(report.stage) or ("" if is_sound else "its progress is no number")
            return _problem_of_rank(report.rank, ranks) or problem
        case MovesDone():
            late = next((move for move in report.outcomes if not 0 <= move.elapsed_us <= _US_MAX), None)
            problem = "" if late is None else f"a move took {late.elapsed_us} us"
            return _problem_of_rank(report.rank, ranks) or problem
        case Probed():
            return _problem_of_rank(report.rank, ranks)
        case GrammarReady():
            return ""
        case WorkerFailed():
            return ""  # its reason is all that people will know; whatever it is, its epoch ends


def _problem_of_rank(rank: int, ranks: int) -> str:
    return "" if 0 <= rank < ranks else f"rank {rank} reports; the group has {ranks}"


def _too_long(text: str) -> str:
    return f"a name has {len(text)} characters" if len(text) > _TEXT_MAX else ""


def _out_of_range(report: StepResult | WorkerReady, ranges: dict[str, int]) -> str:
    for name, most in ranges.items():
        value = getattr(report, name)
        if not 0 <= value <= most:  # also true of NaN
            return f"{type(report).__name__}.{name} is {value}; allowed are 0 to {most}"
    return ""


def _problem_of_scores(result: StepResult) -> str:
    for top in (result.logprobs or {}).values():
        if not _are_pairs(top):
            return f"log-probabilities of step {result.step} do not go with their tokens"
    for scored in (result.prompt_logprobs or {}).values():
        if not _fit(scored):
            return f"scores of a prompt in step {result.step} do not go with their tokens"
    return ""


def _are_pairs(top: TopLogprobs) -> bool:
    return len(top.top_ids) == len(top.top_logprobs) and len(top.top_ids) % 4 == 0


def _fit(scored: PromptLogprobs) -> bool:
    count, top = len(scored.token_logprobs), len(scored.top_ids)
    return (
        0 <= scored.start < _COUNT_MAX
        and count > 0
        and count % 4 == 0
        and len(scored.ranks) == count
        and len(scored.top_logprobs) == top
        and top % count == 0
    )
