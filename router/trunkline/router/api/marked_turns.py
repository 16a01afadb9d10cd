"""Conversations with marks around all that edits may clear, and where that stands in the prompt. Pure.

    came before   A B C      marked: a b c      tokens of the parts: known
    comes now     A B C D    marked:       d    looked for behind the last border of the prompt before a new part

What earlier turns were marked as is used again, and must therefore never be changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from pydantic_core import from_json

from trunkline.kvstore.chunks import Int32Array
from trunkline.router.jobs.request_models import Message, ToolCall
from trunkline.router.text.borders import Places, agreed_length
from trunkline.router.text.conversation_memory import LEAST, MESSAGE_BYTES, Beginnings, common_length
from trunkline.router.text.edits import ConversationPart, ToolUse
from trunkline.router.text.marked_text import Marks, PlacedText
from trunkline.router.text.prompt_memory import agreed_tokens
from trunkline.router.text.token_ids import TokenIds
from trunkline.router.text.token_places import TokenPlaces
from trunkline.router.text.truncation import TokenSpan


class MarkedConversation(NamedTuple):
    """A conversation with marks around all that edits may clear."""

    messages: list[Message]
    parts: list[ConversationPart]
    """What stands between the marks, by number."""
    uses: list[ToolUse]


class KnownMarks(NamedTuple):
    """What is known of a conversation that was marked before."""

    marking: Marking
    marked: str
    """The text that the template makes of it."""
    placed: PlacedText
    tokens: Int32Array
    """The prompt's token ids."""
    spans: list[TokenSpan]
    """The tokens of each place of `placed`."""


class MarkMemory:
    """What is known of the beginning of one conversation, and where to keep what is found of it now."""

    def __init__(
        self, memory: Beginnings[Any] | None, scope: bytes, begins: Hashable, messages: list[Message]
    ) -> None:
        """
        Args:
            memory: What was found of conversations; None: nothing is remembered.
            scope: Names the tenant, whose other requests may use it.
            begins: What conversations that begin alike have in common.
            messages: The conversation.
        """
        self._memory = None if len(messages) < LEAST else memory
        self._key = scope, ("marked", begins)
        self._messages = messages
        known = None if self._memory is None else self._memory.find(*self._key, messages)
        self.known: KnownMarks | None = None
        """What is known of the first messages; None: nothing."""
        if known is not None and known.agreed == len(known.items):
            self.known = known.value

    def marking(self) -> Marking | None:
        """Return the conversation with marks, as `mark_conversation`."""
        if self.known is not None:
            before = self.known.marking
            longer = before.extended(self._messages[len(before.messages) :])
            if longer is not None:
                return longer
        return mark_conversation(self._messages)

    def read(self, marking: Marking, marked: str) -> PlacedText | None:
        """Take the marks out of the text that the template makes of a conversation; None if some are damaged."""
        known = self.known
        if known is None or known.marking.marks != marking.marks:
            return marking.marks.read(marked)
        return marking.marks.read(marked, (known.marked, known.placed))

    def keep(self, found: KnownMarks) -> None:
        """Remember what was found of the conversation."""
        if self._memory is not None:
            size = 3 * len(found.placed.text) + MESSAGE_BYTES * len(self._messages)
            self._memory.put(*self._key, self._messages, found, size)


def mark_conversation(messages: Sequence[Message]) -> Marking | None:
    """Return a conversation with marks around its thoughts, the texts in calls, and results; None if the
    conversation itself has all characters that could be marks.

    A user's message begins a new turn of the assistant's, unless it comes with results.
    """
    marks = Marks.unused(_texts(messages))
    return None if marks is None else Marking(marks).extended(messages)


def part_spans(
    text: str,
    tokens: Sequence[int],
    placed: PlacedText,
    known: KnownMarks | None,
    borders: Places,
    places: Callable[[str, Sequence[int]], TokenPlaces],
) -> list[TokenSpan]:
    """Return for each place of `placed` the tokens that stand for nothing else.

    Args:
        text: The text of `placed`.
        tokens: The tokens of the text.
        known: What is known of the beginning of the conversation.
        borders: Places where text and tokens can be split.
        places: Returns the places of the tokens of a text.
    """
    count = _known_count(text, tokens, placed, known)
    new = placed.places[count:]
    spans = [] if known is None else known.spans[:count]
    if new:
        row = int(np.searchsorted(borders[:, 0], new[0].start, "right")) - 1 if count else -1
        characters, first = borders[row].tolist() if row >= 0 else (0, 0)
        found = places(text[characters:], tokens[first:])
        for place in new:
            start, stop = found.within(place.start - characters, place.stop - characters)
            spans.append(TokenSpan(start + first, stop + first))
    return spans


def _known_count(text: str, tokens: Sequence[int], placed: PlacedText, known: KnownMarks | None) -> int:
    """Return the number of first places whose tokens are known."""
    if known is None or not isinstance(tokens, TokenIds):
        return 0
    count = common_length(known.placed.places, placed.places)
    characters, agreed = agreed_length(known.placed.text, text), agreed_tokens(known.tokens, tokens.array)
    # The token behind a part must be the same, too: it is not within the part.
    while count and (placed.places[count - 1].stop > characters or known.spans[count - 1].stop >= agreed):
        count -= 1
    return count


class Marking:
    """Puts marks into the messages of a conversation, one after the other."""

    def __init__(self, marks: Marks) -> None:
        self.marks = marks
        self.messages: list[Message] = []
        self.parts: list[ConversationPart] = []
        self.tools: list[str] = []
        """The tool of each use."""
        self.answered: set[int] = set()
        """Numbers of the uses with results."""
        self._turn = 0
        self._use_of: dict[str, int] = {}

    def extended(self, messages: Sequence[Message]) -> Marking | None:
        """Return the conversation with more messages; None if these contain the marks."""
        if any(mark in text for text in _texts(messages) if not text.isascii() for mark in self.marks):
            return None
        longer = Marking(self.marks)
        longer.messages, longer.parts, longer.tools = self.messages[:], self.parts[:], self.tools[:]
        longer.answered, longer._turn, longer._use_of = set(self.answered), self._turn, dict(self._use_of)
        for message in messages:
            longer._add(message)
        return longer

    @property
    def conversation(self) -> MarkedConversation:
        """The conversation so far."""
        uses = [ToolUse(tool, number in self.answered) for number, tool in enumerate(self.tools)]
        return MarkedConversation(self.messages, self.parts, uses)

    def _add(self, message: Message) -> None:
        if message.role == "user" and self.messages and self.messages[-1].role != "tool":
            self._turn += 1
        changed: dict[str, Any] = {}
        if message.role == "tool":
            use = self._use_of.get(message.tool_call_id or "")
            if use is not None:
                self.answered.add(use)
                changed["content"] = self._marked(message.content, ConversationPart("result", use))
        elif message.role == "assistant":
            if message.reasoning_content:
                part = ConversationPart("thought", self._turn)
                changed["reasoning_content"] = self._marked(message.reasoning_content, part)
            if message.tool_calls:
                changed["tool_calls"] = [self._call(call) for call in message.tool_calls]
        self.messages.append(message.model_copy(update=changed) if changed else message)

    def _call(self, call: ToolCall) -> ToolCall:
        use = self._use_of[call.id] = len(self.tools)
        self.tools.append(call.function.name)
        try:
            arguments = from_json(call.function.arguments, allow_inf_nan=False)
        except ValueError:
            return call
        if json.dumps(arguments, ensure_ascii=False) != call.function.arguments:
            return call  # its spaces and escapes would be others, and so would be its tokens
        marked = json.dumps(self._marked_texts(arguments, use), ensure_ascii=False)
        return call.model_copy(update={"function": call.function.model_copy(update={"arguments": marked})})

    def _marked_texts(self, value: Any, use: int) -> Any:
        """Return a JSON value with marks around all texts in it, but for the names of fields."""
        if isinstance(value, str):
            return self._marked(value, ConversationPart("input", use))
        if isinstance(value, list):
            return [self._marked_texts(item, use) for item in value]
        if isinstance(value, dict):
            return {name: self._marked_texts(item, use) for name, item in value.items()}
        return value

    def _marked(self, text: str, part: ConversationPart) -> str:
        self.parts.append(part)
        return self.marks.around(len(self.parts) - 1, text)


def _texts(messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        yield message.content
        yield message.reasoning_content or ""
        for call in message.tool_calls or ():
            yield call.function.arguments
