"""Whether the layout of a prompt with modules, as a router sent it, can be what it says. Pure.

The last line of defence, as in `trunkline.controller.service.validation`: behind it nobody checks again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from trunkline.controller.messages import ModulesCall, ModuleText, PromptLayout
from trunkline.kvstore.int32_codec import unpack_int32

TEXTS_MAX: Final = 65_536
"""Of one schema."""
RUNS_MAX: Final = 65_536
_INT32_MAX: Final = (1 << 31) - 1
_PAIR_BYTES: Final = 8
OPERATIONS: Final = ("encode", "look", "unpin", "cancel")


def tokens_problem(packed: bytes, vocab_size: int) -> str:
    """Why these are no int32 ids of tokens; "" if they are.

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
    """Why a call about texts can never be given to the engine; "" if it can."""
    if call.op not in OPERATIONS:
        return f"operation {call.op!r} is unknown; known are {', '.join(OPERATIONS)}"
    if not 0.0 <= call.ttl < math.inf:
        return f"ttl is {call.ttl}; it is a time in seconds"
    return _problem_of_texts(call.texts, vocab_size)


def problem_of_layout(layout: PromptLayout, prompt_len: int, vocab_size: int) -> str:
    """Why a prompt of `prompt_len` own tokens cannot be laid out so; "" if it can."""
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
    """Every position has one token, and the last is the request's own."""
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
    """Its tokens are ids."""
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
