"""The parts of a prompt that a request leaves out by name: the ranges of `drop`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trunkline.router.errors import bad_value
from trunkline.router.jobs.drop_ranges import DropRange
from trunkline.router.jobs.request_models import ChatRequest, CompletionRequest
from trunkline.router.text.edits import AppliedEdit
from trunkline.router.text.remembered_prompts import RememberedPrompt
from trunkline.router.text.truncation import TokenSpan, merge_spans


class EditedPrompt(NamedTuple):
    """A prompt of which parts are left out."""

    text: str
    """The whole text, with what is left out."""
    tokens: Sequence[int]
    """The tokens of `text`."""
    drops: tuple[TokenSpan, ...]
    """The tokens that are left out, merged."""
    applied: tuple[AppliedEdit, ...] = ()
    remembered: RememberedPrompt | None = None
    """The prompt in the memory of prompts; None: it is not there."""
    before: int = 0
    """Number of tokens of modules, and of texts between them, that the model sees before `text`."""


def check_left_out(body: ChatRequest | CompletionRequest) -> None:
    """Refuse parameters that are not available for a prompt of which a part is left out.

    Raises:
        ApiError: 400.
    """
    for name in ("truncate_prompt_tokens", "use_beam_search"):
        if getattr(body, name):
            raise bad_value(name, f"`{name}` is not available for a prompt of which a part is left out")


def dropped_tokens(ranges: Sequence[DropRange], tokens: int) -> tuple[TokenSpan, ...]:
    """Return the tokens that `drop` leaves out of a prompt of `tokens` tokens, merged.

    Raises:
        ApiError: 400, naming the range.
    """
    for index, given in enumerate(ranges):
        if given.stop >= tokens:
            param = f"drop[{index}]"
            what = f"the prompt has {tokens} tokens, the last of which stays"
            raise bad_value(param, f"`{param}` ends at {given.stop}, but {what}")
    return merge_spans(TokenSpan(given.start, given.stop) for given in ranges)


def dropped_messages(
    ranges: list[DropRange], borders: list[int | None], noun: str = "message"
) -> list[dict[str, int]]:
    """Return `drop` in terms of the messages of a chat completion.

    Args:
        ranges: Ranges of the messages, or items, of the request.
        borders: For each message of the request the number of translated ones before it; None: it is a part of the
            one before it. In the end the number of all translated ones.
        noun: What errors call an entry that a range counts.

    Raises:
        ApiError: 400, naming the range.
    """
    moved: list[dict[str, int]] = []
    if ranges and sum(given.stop - given.start for given in ranges) == len(borders) - 1:
        raise bad_value(f"drop[{len(ranges) - 1}]", f"`drop[{len(ranges) - 1}]` leaves no {noun}")
    for index, given in enumerate(ranges):
        param = f"drop[{index}]"
        if given.stop >= len(borders):
            raise bad_value(param, f"`{param}` ends at {given.stop}; there are {len(borders) - 1} {noun}s")
        first, last = borders[given.start], borders[given.stop]
        if first is None or last is None:
            raise bad_value(param, f"`{param}` parts {noun}s that the model is shown as one message")
        moved.append({"from": first, "to": last})
    return moved
