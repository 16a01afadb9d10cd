"""Choose the tokens that are left out of a prompt that does not fit the context (CachedAttention §3.4). Pure.

    tokens  0 ─ head ─ h ──── dropped ──── h + D ──────── the rest ──────── n
            instructions,     D: a multiple of one unit
            attention sinks

The client keeps sending the whole history, or a session keeps storing it; the cut is computed for every request.
Cuts are stable: the unit is (1 - retention) × context, and D is the smallest multiple that makes the rest fit. So
D stays the same until the next overflow, and the KV after the cut is found again. The engine shifts the positions
of that KV instead of computing it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from trunkline.router.errors import PromptError

ROOM_SHARE: Final = 8
"""Divisor of the context that gives the room for an answer without a limit: an eighth of the context is kept free.
A cut that left room for a single token would be useless."""


class TokenSpan(NamedTuple):
    """Tokens `[start, stop)` of a prompt or a history."""

    start: int
    stop: int


class RetentionPolicy(msgspec.Struct, frozen=True):
    """The policy by which a prompt is cut. The defaults are the policy "auto"."""

    retention_ratio: float = 0.5
    """Share of the context that a cut leaves after an overflow, above 0 and below 1."""
    keep_instructions: bool = True
    """Whether the leading system messages stay."""
    sink_tokens: int = 4
    """Number of first tokens that always stay: attention sinks."""


class PromptCut(msgspec.Struct, frozen=True):
    """The tokens of a prompt that the model does not see."""

    drops: tuple[TokenSpan, ...] = ()
    """Spans of tokens that are left out: ascending, disjoint and not adjacent. The prompt's last token is in
    none."""
    asked: bool = False
    """Whether the request allows truncation, so that its answer reports it."""
    removed_tokens: int = 0
    """Number of tokens that were taken out of the prompt for good, so that it is computed as a plain one."""

    @property
    def dropped_tokens(self) -> int:
        """Number of the prompt's tokens that are left out."""
        return span_tokens(self.drops) if self.drops else 0

    @property
    def left_out_tokens(self) -> int:
        """Number of tokens that are left out, those included that the prompt does not have any more."""
        return self.dropped_tokens + self.removed_tokens

    def without_dropped(self, tokens: Sequence[int]) -> tuple[list[int], PromptCut]:
        """Return a prompt's tokens without those that are left out, and its cut, which drops nothing."""
        left: list[int] = []
        begin = 0
        for start, stop in self.drops:
            left += tokens[begin:start]
            begin = stop
        left += tokens[begin:]
        return left, PromptCut((), self.asked, self.left_out_tokens)


NO_CUT: Final = PromptCut()


class CutError(PromptError):
    """No cut makes a prompt fit. The exception's text says why."""


def merge_spans(spans: Iterable[TokenSpan | Sequence[int]]) -> tuple[TokenSpan, ...]:
    """Return the same tokens as ascending, disjoint and not adjacent spans, without empty ones."""
    merged: list[TokenSpan] = []
    for start, stop in sorted((span[0], span[1]) for span in spans):
        if start >= stop:
            continue
        if merged and start <= merged[-1].stop:
            merged[-1] = TokenSpan(merged[-1].start, max(stop, merged[-1].stop))
        else:
            merged.append(TokenSpan(start, stop))
    return tuple(merged)


def clip_spans(spans: Iterable[TokenSpan | Sequence[int]], tokens: int) -> tuple[TokenSpan, ...]:
    """Return the part of `spans` within the first `tokens` tokens, merged."""
    return merge_spans(TokenSpan(span[0], min(span[1], tokens)) for span in spans)


def span_tokens(spans: Iterable[TokenSpan]) -> int:
    """Return the number of tokens in merged spans."""
    return sum(span.stop - span.start for span in spans)


def room_for(wanted: int | None, context: int) -> int:
    """Return the tokens to keep free for an answer of at most `wanted` tokens. None: the request gives no
    limit."""
    return max(1, context // ROOM_SHARE) if wanted is None else max(1, wanted)


def plan_cut(
    tokens: int,
    context: int,
    room: int,
    policy: RetentionPolicy | None,
    *,
    head: int = 0,
    discards: Sequence[TokenSpan] = (),
) -> PromptCut:
    """Choose what a prompt leaves out so that the rest and `room` output tokens fit into `context`.

    Args:
        tokens: Length of the prompt.
        policy: How to cut; None: leave out `discards` only, whether the rest fits or not.
        head: First tokens that stay (the instructions); at least `policy.sink_tokens`.
        discards: Merged spans that are always left out, without the prompt's last token.

    Raises:
        CutError: The head and the room leave no token for anything else.
    """
    given = PromptCut(tuple(discards), policy is not None)
    if policy is None or tokens - given.dropped_tokens + room <= context:
        return given
    head = max(head, policy.sink_tokens)
    # A wider unit could cut off the prompt's last token; this one always leaves the head and one more token.
    spare = context - room - head
    if spare < 1:
        raise CutError(
            f"the {head} tokens that are to be kept at its beginning and the {room} for the answer leave no room "
            f"in a context of {context}"
        )
    unit = min(max(1, int((1 - policy.retention_ratio) * context)), spare)
    dropped = _first_multiple(unit, tokens, context - room, head, discards)
    return PromptCut(merge_spans([TokenSpan(head, head + dropped), *discards]), True)


def _first_multiple(unit: int, tokens: int, most: int, head: int, discards: Sequence[TokenSpan]) -> int:
    """Return the smallest multiple D of `unit` such that at most `most` tokens remain without `[head, head + D)`
    and without `discards`."""
    low, high = 0, -(-tokens // unit)
    while low < high:  # what is left only shrinks as D grows
        middle = (low + high) // 2
        drops = merge_spans([TokenSpan(head, head + middle * unit), *discards])
        if tokens - span_tokens(clip_spans(drops, tokens)) <= most:
            high = middle
        else:
            low = middle + 1
    return low * unit
