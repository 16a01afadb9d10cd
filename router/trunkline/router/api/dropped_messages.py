"""Find the messages that a request drops in the text of its whole conversation.

    messages      M0 │ M1 M2 │ M3 │ M4 M5 │ M6         drop: [1, 3) and [4, 6)
    beginnings    M0 to M3 ─────────┤
                  M0 to M5 ─────────────────┤          so the piece of [4, 6) lies between their ends
    rest          M0 │ M3 │ M6                         what the template writes without all ranges; the piece of
                                                       the first range is what it lacks besides

Each beginning is written on from the one before it (`message_loops.py`), so all of them cost little more than one
text. That holds for templates which write a conversation's beginning like the conversation. With others, and
behind modules, the template runs once more for each range: without the last one, without the last two, and so on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

from trunkline.router.api.prompting import Rendering
from trunkline.router.errors import ApiError, PromptError, bad_value
from trunkline.router.jobs.drop_ranges import DropRange
from trunkline.router.jobs.request_models import ChatRequest, Message
from trunkline.router.service import RouterService
from trunkline.router.text.chat_template import RenderedChat
from trunkline.router.text.marked_text import left_out
from trunkline.router.text.token_places import RemainingText
from trunkline.router.text.tokenizer import OFF_LOOP_CHARACTERS
from trunkline.router.text.truncation import TokenSpan, merge_spans, span_tokens

RUNS_MAX: Final = 64
"""Largest number of times that the chat template writes all of a conversation to find its dropped messages."""
_SHORT: Final = 16
"""Number of beginnings that are written in the event loop, if the text is short."""

Write = Callable[[list[Message]], Awaitable[str]]
"""Returns the text that a template makes of a conversation.

Raises:
    ApiError: 400, the template refuses it.
"""
Ends = Callable[[Sequence[int]], Awaitable[list[int] | None]]
"""Returns where the first messages end in the text of all, for ascending numbers of them; None: their own text is
not its beginning."""
Removal = TokenSpan | str
"""How one range is taken out of the text that the ranges behind it have left: the characters of its piece, or the
text without the piece."""


async def plan_removals(body: ChatRequest, text: str, write: Write, ends: Ends | None) -> list[Removal]:
    """Return how to take the ranges of `drop` out of a conversation's text, the last range first.

    Args:
        text: The text of all of `body.messages`.
        ends: Tells where first messages end in it; None: that cannot be told.

    Raises:
        ApiError: 400, naming the range.
    """
    ranges, messages = body.drop, body.messages
    if not ranges:
        return []
    if ranges[-1].stop > len(messages):
        param = f"drop[{len(ranges) - 1}]"
        raise bad_value(param, f"`{param}` ends at {ranges[-1].stop}; there are {len(messages)} messages")
    if sum(given.stop - given.start for given in ranges) == len(messages):
        raise bad_value("drop[0]", "`drop[0]` leaves no message")
    if ends is not None and len(ranges) > 1:
        found = await _between_beginnings(ranges, messages, text, write, ends)
        if found is not None:
            return found
    if len(ranges) > RUNS_MAX:
        param = f"drop[{RUNS_MAX}]"
        raise bad_value(
            param,
            f"`drop` has {len(ranges)} ranges of messages; at most {RUNS_MAX} are allowed behind modules, and "
            "where the chat template writes the beginning of this conversation, or what is left of it, otherwise "
            "than in the whole",
        )
    return list(await _rests(ranges, messages, write))


async def _between_beginnings(
    ranges: Sequence[DropRange], messages: list[Message], text: str, write: Write, ends: Ends
) -> list[Removal] | None:
    """Return the removals by where the messages of each range begin and end; None: the ranges are not such pieces
    of the text."""
    counts = sorted({border for given in ranges[1:] for border in (given.start, given.stop)})
    places = await ends(counts)
    if places is None:
        return None
    place_of = dict(zip(counts, places, strict=True))
    pieces = [TokenSpan(place_of[given.start], place_of[given.stop]) for given in ranges[1:]]
    try:
        rest = await write(_without(messages, ranges))
    except ApiError:
        return None
    kept = [*zip([0, *(piece.stop for piece in pieces)], [*(piece.start for piece in pieces), None], strict=True)]
    if left_out("".join([text[start:stop] for start, stop in kept]), rest) is None:
        return None
    return [*reversed(pieces), rest]


def _without(messages: Sequence[Message], ranges: Iterable[DropRange]) -> list[Message]:
    """Return a new list of the messages outside the ranges."""
    left, start = list[Message](), 0
    for given in ranges:
        left += messages[start : given.start]
        start = given.stop
    return [*left, *messages[start:]]


async def message_ends(
    service: RouterService, rendering: Rendering, messages: Sequence[Message], text: str, counts: Sequence[int]
) -> list[int] | None:
    """Return where the first messages of a conversation end in its text. None: their own text is not the beginning
    of it, or each such text would have to be written whole.

    Args:
        text: The text of all messages.
        counts: How many first messages, ascending.
    """

    def find() -> list[int] | None:
        turns = [message.for_template() for message in messages]
        found, before = list[int](), None
        for count in counts:
            try:
                before = _beginning(service, rendering, turns[:count], before)
            except PromptError:
                return None
            is_whole = not before.rendered.skipped
            if not text.startswith(before.text) or (is_whole and len(found) >= RUNS_MAX):
                return None
            found.append(len(before.text))
        return found

    if not service.tokenizer.goes_on:
        return None
    is_long = len(text) > OFF_LOOP_CHARACTERS or len(counts) > _SHORT
    return await service.large_requests.run(find) if is_long else find()


def _beginning(
    service: RouterService, rendering: Rendering, turns: list[dict[str, object]], before: RenderedChat | None
) -> RenderedChat:
    return service.tokenizer.rendered_chat(
        turns, add_generation_prompt=False, extra=rendering.variables, tools=rendering.tools, before=before
    )


async def _rests(ranges: Sequence[DropRange], messages: list[Message], write: Write) -> list[str]:
    """Return the texts that a conversation has without the last range of `drop`, without the last two, and so on.

    Raises:
        ApiError: 400, naming the range.
    """
    rests = list[str]()
    for index in reversed(range(len(ranges))):
        await asyncio.sleep(0)  # others come in between
        param = f"drop[{index}]"
        try:
            rests.append(await write(_without(messages, ranges[index:])))
        except ApiError as error:
            raise bad_value(param, f"`{param}`: without what it names, {error.message}") from None
    return rests


def dropped_spans(text: RemainingText, removals: Sequence[Removal]) -> tuple[TokenSpan, ...]:
    """Return the tokens that `drop` leaves out of a text, merged. `removals`: those of `plan_removals`.

    Raises:
        ApiError: 400, naming the range.
    """
    spans: list[TokenSpan] = []
    for number, removal in enumerate(removals):
        found = text.reduce(removal) if isinstance(removal, str) else text.cut(*removal)
        if found is None or not span_tokens(merge_spans(found)):
            param = f"drop[{len(removals) - 1 - number}]"
            raise bad_value(
                param,
                f"`{param}`: what it names is no piece of the prompt: the model's chat template does not show it, "
                "or writes other messages differently without it",
            )
        spans += found
    return merge_spans(spans)
