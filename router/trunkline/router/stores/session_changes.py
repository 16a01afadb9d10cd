"""The changes of a session's history, which are the segments of its record (`kvstore/records/`). Pure.

    history ─► turn ─► history'          change_between(history, history') ─► pack ─► segment
    no history ◄── the record's segments, each applied to the result of those before: fold

A change says how much of the beginning of the history before it stays, and what follows it. As a rule everything
stays, so a segment is as long as what its turn adds. Where a template rewrites the end of what it showed before,
only that end is in the segment, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from trunkline.kvstore.records import SEGMENT_BYTES_MAX
from trunkline.router.stores.session_history import Form, History, HistoryMark
from trunkline.router.text.conversation_memory import common_length
from trunkline.router.text.truncation import TokenSpan

MESSAGE_BYTES_MAX: Final = SEGMENT_BYTES_MAX // 2
"""Largest size in bytes of a packed message. A message is never split, so it must fit in a segment."""


class HistoryChange(msgspec.Struct, frozen=True, array_like=True):
    """A change of a history. New fields need a default: older segments lack them."""

    kept_messages: int
    """Number of messages that stay, from the first one on."""
    kept_characters: int
    """Number of characters of the text that stay, from the first one on."""
    kept_tokens: int
    kept_marks: int
    messages: list[dict[str, Any]]
    """Messages that follow the ones that stay."""
    text: str
    tokens: bytes
    """Token ids that follow the ones that stay, as int32."""
    marks: list[HistoryMark]
    discards: list[TokenSpan] | None
    """All discards; None: they stay as they are."""
    form: Form
    vocabulary: str


def change_between(before: History, after: History) -> HistoryChange:
    """Return the change that makes `before` into `after`."""
    messages = common_length(before.messages, after.messages)
    characters = common_length(before.text, after.text)
    tokens = common_length(before.tokens, after.tokens) // 4
    marks = common_length(before.marks, after.marks)
    return HistoryChange(
        messages,
        characters,
        tokens,
        marks,
        after.messages[messages:],
        after.text[characters:],
        after.tokens[4 * tokens :],
        after.marks[marks:],
        None if before.discards == after.discards else after.discards,
        after.form,
        after.vocabulary,
    )


def fold(history: History, changes: Iterable[HistoryChange]) -> History:
    """Return the history after successive changes. The time grows with the sizes of the history and the changes,
    not with their product.

    Raises:
        ValueError: a change keeps more than there is.
    """
    messages, marks = list(history.messages), list(history.marks)
    text, tokens = _Text(history.text), bytearray(history.tokens)
    discards, form, vocabulary = history.discards, history.form, history.vocabulary
    for change in changes:
        _keep(messages, change.kept_messages)
        _keep(tokens, 4 * change.kept_tokens)
        _keep(marks, change.kept_marks)
        text.keep(change.kept_characters)
        messages += change.messages
        tokens += change.tokens
        marks += change.marks
        text.add(change.text)
        discards = discards if change.discards is None else change.discards
        form, vocabulary = change.form, change.vocabulary
    return History(
        form=form,
        messages=messages,
        text=str(text),
        tokens=bytes(tokens),
        vocabulary=vocabulary,
        marks=marks,
        discards=discards,
    )


class _Text:
    """A text of which the end is replaced again and again."""

    def __init__(self, text: str) -> None:
        self._pieces = [text]
        self._length = len(text)

    def keep(self, length: int) -> None:
        if not 0 <= length <= self._length:
            raise _unfit(length, self._length)
        while self._length > length:
            piece = self._pieces.pop()
            self._length -= len(piece)
            if self._length < length:
                self.add(piece[: length - self._length])

    def add(self, text: str) -> None:
        self._pieces.append(text)
        self._length += len(text)

    def __str__(self) -> str:
        return "".join(self._pieces)


def _keep(items: list[Any] | bytearray, length: int) -> None:
    if not 0 <= length <= len(items):
        raise _unfit(length, len(items))
    del items[length:]


def _unfit(kept: int, length: int) -> ValueError:
    return ValueError(f"a change keeps {kept} of {length} items; it belongs to another history")


def segments_of(change: HistoryChange, bytes_max: int = SEGMENT_BYTES_MAX) -> list[bytes]:
    """Return a change as contents of segments: of several ones if it is longer than `bytes_max`.

    A change that cannot be split, because one of its messages is so long, stays too long.
    """
    packed = msgspec.msgpack.encode(change)
    if len(packed) <= bytes_max:
        return [packed]
    first, second = _halves(change)
    if not (second.messages or second.text or second.tokens or second.marks):
        return [packed]
    return segments_of(first, bytes_max) + segments_of(second, bytes_max)


def _halves(change: HistoryChange) -> tuple[HistoryChange, HistoryChange]:
    """Return two changes that do the same one after the other. The second one is empty if there is nothing to
    split."""
    messages, text = (len(change.messages) + 1) // 2, (len(change.text) + 1) // 2
    tokens, marks = (len(change.tokens) // 4 + 1) // 2, (len(change.marks) + 1) // 2
    first = replace(
        change,
        messages=change.messages[:messages],
        text=change.text[:text],
        tokens=change.tokens[: 4 * tokens],
        marks=change.marks[:marks],
        discards=None,
    )
    second = replace(
        change,
        kept_messages=change.kept_messages + messages,
        kept_characters=change.kept_characters + text,
        kept_tokens=change.kept_tokens + tokens,
        kept_marks=change.kept_marks + marks,
        messages=change.messages[messages:],
        text=change.text[text:],
        tokens=change.tokens[4 * tokens :],
        marks=change.marks[marks:],
    )
    return first, second


def read_segments(history: History, segments: Sequence[bytes]) -> History:
    """Return the history after the changes in the contents of successive segments.

    Raises:
        ValueError: a segment is no change of this history.
    """
    try:
        return fold(history, [msgspec.msgpack.decode(segment, type=HistoryChange) for segment in segments])
    except msgspec.DecodeError as error:
        raise ValueError(f"not a change of a session: {error}") from error
