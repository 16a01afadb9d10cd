"""Find documents in the text that a chat template makes of a conversation. Pure.

As in `marked_text.py`, marks are put around them before the template runs. Here a document must come back as it
was, and once: it becomes a module, so it is encoded on its own.
"""

from __future__ import annotations

from typing import Final

CHARACTERS_MIN: Final = 256
"""Shortest document that becomes a module: each takes a chunk of its own."""
DOCUMENTS_MAX: Final = 128
"""Largest number of documents of a prompt that become modules: half of the partial chunks that a block table has
room for."""
_OPENING, _CLOSING = "\ufdd0", "\ufdd1"
"""Noncharacters of Unicode, which no document has."""


class DocumentMarks:
    """Marks the documents of one request in its messages, to find them in the text that a template makes of
    them."""

    def __init__(self) -> None:
        self._documents: list[str] = []

    def around(self, text: str) -> str:
        """Return a document with marks around it, but for white space at its ends; without marks if it is not to
        be a module."""
        core = text.strip()
        if len(core) < CHARACTERS_MIN or len(self._documents) == DOCUMENTS_MAX or _OPENING in core:
            return text
        self._documents.append(core)
        return text.replace(core, self._marked(len(self._documents) - 1), 1)

    def _marked(self, index: int) -> str:
        return f"{_OPENING}{index}{_OPENING}{self._documents[index]}{_CLOSING}"

    def without(self, text: str) -> str:
        """Return a text without the marks."""
        if _OPENING in text:
            for index, document in enumerate(self._documents):
                text = text.replace(self._marked(index), document)
        return text

    def split(self, text: str) -> list[str] | None:
        """Return the text before the first document, that document, the text up to the next one, and so on, ending
        with the text behind the last one; None if there is no document, or not each stands there once as it was
        marked."""
        count = len(self._documents)
        if not count or text.count(_CLOSING) != count:
            return None
        places = sorted((text.find(self._marked(index)), index) for index in range(count))
        if places[0][0] < 0:
            return None
        pieces, end = list[str](), 0
        for start, index in places:
            pieces += [text[end:start], self._documents[index]]
            end = start + len(self._marked(index))
        return [*pieces, text[end:]]
