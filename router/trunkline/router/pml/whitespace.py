"""White space in XML documents: what is layout and what is text."""

from __future__ import annotations

from typing import Final

BLANKS: Final = " \t\n\r"
"""What XML calls white space; other blanks are ordinary characters."""


def normalise(text: str, preserve: bool) -> str:
    """What is left of a text between two tags; empty: it was only layout.

    A text of white space with a line end in it is layout. Otherwise a leading and a trailing run of white space
    each become one blank, and the rest stays as it is. `preserve` (`xml:space`) keeps everything.
    """
    if preserve or not text:
        return text
    core = text.strip(BLANKS)
    if not core:
        return "" if "\n" in text else " "
    before = " " if text[0] in BLANKS else ""
    behind = " " if text[-1] in BLANKS else ""
    return f"{before}{core}{behind}"
