"""Which tokens of a prompt are left out when it outgrows the context (CachedAttention §3.4). Pure.

    tokens  0 ─ head ─ h ──── dropped ──── h + D ──────── the rest ──────── n
            instructions,     D: a multiple of one unit
            attention sinks

The client goes on sending, or a session goes on keeping, the whole history; what is dropped is worked out anew for
every request. Cuts are stable: the unit is (1 - retention) × context and D is the smallest multiple that makes the
rest fit, so D stays as it is until the next overflow, and the KV kept behind the cut is found again. The engine
keeps that KV valid by shifting positions; it is not computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

ROOM_SHARE: Final = 8
"""Where a request does not say how long its answer may be, at least one part in so many of the context is kept
free for it: a cut that left room for a single token would be of no use."""


class TokenSpan(NamedTuple):
    """Tokens `[start, stop)` of a prompt or a history."""

    start: int
    stop: int


class RetentionPolicy(msgspec.Struct, frozen=True):
    """How to cut. The defaults are what `"auto"` means."""

    retention_ratio: float = 0.5
    """Share of the context that an overflow leaves, above 0 and below 1."""
    keep_instructions: bool = True
    """Whether the leading system messages stay."""
    sink_tokens: int = 4
    """First tokens that stay in any case: attention rests on them, whatever they say."""


class PromptCut(msgspec.Struct, frozen=True):
    """What a request does not see of its prompt."""

    drops: tuple[TokenSpan, ...] = ()
    """Ascending, disjoint and not touching; the last token is in none."""
    asked: bool = False
    """Whether the request allows truncation, so that its answer says what came of it."""

    @property
    def dropped_tokens(self) -> int:
        """How many."""
        return span_tokens(self.drops)


class CutError(ValueError):
    """No cut makes it fit; the text says why."""


def merge_spans(spans: Iterable[TokenSpan | Sequence[int]]) -> tuple[TokenSpan, ...]:
    """The same tokens in spans that are ascending, disjoint and not touching; empty ones vanish."""
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
    """What of `spans` lies among the first `tokens` tokens, merged."""
    return merge_spans(TokenSpan(span[0], min(span[1], tokens)) for span in spans)


def span_tokens(spans: Iterable[TokenSpan]) -> int:
    """How many tokens merged spans hold."""
    return sum(span.stop - span.start for span in spans)


def room_for(wanted: int | None, context: int) -> int:
    """Tokens to keep free for an answer of at most `wanted` tokens; None: not said."""
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
    """What a prompt of so many tokens leaves out, so that the rest and `room` output tokens fit into `context`.

    Args:
        policy: None: nothing but `discards`, whether it fits or not.
        head: first tokens that stay (the instructions); `policy.sink_tokens` if that is more.
        discards: tokens that are left out in any case, merged; the prompt's last one is not among them.

    Raises:
        CutError: the head and the room leave no token for anything else.
    """
    given = PromptCut(tuple(discards), policy is not None)
    if policy is None or tokens - given.dropped_tokens + room <= context:
        return given
    head = max(head, policy.sink_tokens)
    # A wider unit could swallow the prompt's last token; this one always leaves the head and one more.
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
    """The smallest multiple D of `unit` such that dropping `[head, head + D)` besides `discards` leaves `most`."""
    low, high = 0, -(-tokens // unit)
    while low < high:  # what is left only shrinks as D grows
        middle = (low + high) // 2
        drops = merge_spans([TokenSpan(head, head + middle * unit), *discards])
        if tokens - span_tokens(clip_spans(drops, tokens)) <= most:
            high = middle
        else:
            low = middle + 1
    return low * unit
