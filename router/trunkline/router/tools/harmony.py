"""Read answers of gpt-oss, which consist of messages on channels (OpenAI's Harmony format).

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…
    <|channel|>commentary to=functions.add <|constrain|>json<|message|>{…}<|call|>

The header of a message stands before `<|message|>`. Messages on the channel "analysis" are thoughts, those to an
offered function are calls, and all others are text. A text before the first marker is text, too, unless it names a
recipient: prompts end with `<|start|>assistant`, and templates write recipients in front of channels.

     to=functions.add<|channel|>commentary json<|message|>{…}<|call|>
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Final

from trunkline.router.text.tool_styles import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START
from trunkline.router.tools.call_object import WHITESPACE, ArgumentsReader, Progress
from trunkline.router.tools.pieces import CallArguments, CallStart, Piece, TextPiece, ThoughtPiece, joined

_MARKERS: Final = (CHANNEL, MESSAGE, CONSTRAIN, START, END, CALL, RETURN)
_BEFORE_HEADERS: Final = (START, CHANNEL)
_RECIPIENT: Final = re.compile(r"to=(?:functions\.)?([A-Za-z0-9_.-]+)")
_CHANNEL_NAME: Final = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_HEADER_CHARACTERS_MAX: Final = 256
_TO: Final = "to="


class HarmonyParser:
    """Finds thoughts, calls and text in one answer."""

    def __init__(self, names: Collection[str], draw_id: Callable[[], str]) -> None:
        """`names`: names of the offered functions; `draw_id`: makes the id of a call."""
        self.calls = 0
        self._names = names
        self._draw_id = draw_id
        self._pieces: list[Piece] = []
        self._marker = ""
        """The part of a marker that was read."""
        self._header: str | None = None
        """The header that is read, its markers included; None within a message."""
        self._beginning: str | None = ""
        """The text so far, as long as it may be a header whose first marker is in the prompt; None: it is not."""
        self._thinks = False
        """Whether the current message is a thought."""
        self._reader: ArgumentsReader | None = None
        """Reader of the current call; None if the message is none."""
        self._arguments_end = True
        """Whether the current call's arguments are complete or went wrong."""

    def feed(self, text: str) -> list[Piece]:
        """Read more of the model's text; return the pieces that are certain now."""
        text = self._begin(text)
        position = 0
        while position < len(text):
            if self._reader is not None and not self._arguments_end:  # markers within a call's JSON are none
                position = self._read_arguments(self._reader, text, position)
                continue
            if not self._marker:
                found = text.find("<", position)
                found = len(text) if found < 0 else found
                self._give(text[position:found])
                position = found
                if position == len(text):
                    break
            word = self._marker + text[position]
            if any(marker.startswith(word) for marker in _MARKERS):
                self._marker = word
                position += 1
                if word in _MARKERS:
                    self._marker = ""
                    self._read_marker(word)
            else:
                self._marker, word = "", self._marker
                self._give(word)
        return self._drain()

    def finish(self, *, cut: bool = False) -> list[Piece]:
        """End the text. A header without its end is dropped."""
        if self._beginning and not cut:
            self._give(self._beginning)
        self._beginning = None
        if self._marker and self._header is None and not cut:
            self._give(self._marker)
        self._marker = ""
        return self._drain()

    def _begin(self, text: str) -> str:
        """Look for a recipient at the answer's beginning. Return the text that can be read on; while it is not
        certain, it is held back."""
        if self._beginning is None:
            return text
        text = self._beginning + text
        stripped = text.lstrip(WHITESPACE)
        if len(stripped) < len(_TO) and _TO.startswith(stripped):
            self._beginning = text
            return ""
        self._beginning = None
        if stripped.startswith(_TO):
            self._header = ""
        return text

    def _drain(self) -> list[Piece]:
        pieces, self._pieces = joined(self._pieces), []
        return pieces

    def _read_marker(self, marker: str) -> None:
        if self._header is None:
            self._reader = None
            self._thinks = False
            if marker in _BEFORE_HEADERS:
                self._header = marker
        elif marker == MESSAGE:
            header, self._header = self._header, None
            self._begin_message(header)
        elif marker in (END, CALL, RETURN):
            self._header = None
        else:
            self._header += marker

    def _begin_message(self, header: str) -> None:
        channel = _CHANNEL_NAME.search(header)
        recipient = _RECIPIENT.search(header)
        name = recipient[1] if recipient else ""
        if name in self._names:
            self._pieces.append(CallStart(self.calls, self._draw_id(), name))
            self.calls += 1
            self._reader, self._arguments_end = ArgumentsReader(name), False
            return
        self._thinks = channel is not None and channel[1] == "analysis"

    def _give(self, text: str) -> None:
        if not text:
            return
        if self._header is not None:
            if len(self._header) + len(text) > _HEADER_CHARACTERS_MAX:  # no header after all
                text, self._header = self._header + text, None
                self._pieces.append(TextPiece(text))
            else:
                self._header += text
        elif self._reader is not None:  # behind a call
            text = text.lstrip(WHITESPACE)
            if text:
                self._reader = None
                self._pieces.append(TextPiece(text))
        else:
            self._pieces.append((ThoughtPiece if self._thinks else TextPiece)(text))

    def _read_arguments(self, reader: ArgumentsReader, text: str, position: int) -> int:
        """Read a call's arguments from a position on; return the position of what they do not take."""
        while position < len(text) and not self._arguments_end:
            if not (text[position] in WHITESPACE and not reader.started):
                progress = reader.feed(text[position])
                self._arguments_end = progress is not Progress.MORE
                if progress is Progress.WRONG:
                    self._reader = None  # what follows is text
                    break
            position += 1
        arguments = reader.take()
        if arguments:
            self._pieces.append(CallArguments(self.calls - 1, arguments))
        return position
