"""Make names of modules and parameters from a program's source.

A name depends on the program's text only, never on addresses or seeded hashes: every process that decorates the
same function makes the same schema, so its modules' KV is found again, by other processes and after restarts.
"""

from __future__ import annotations

import ast
import hashlib
import re
from typing import Final

from trunkline.router.pml.tree import NAME, TAGS

NAME_CHARS_MAX: Final = 48
# What would be left out of a name although it makes a difference.
_WORDS: Final = ((" != ", " ne "), (" <= ", " le "), (" >= ", " ge "), (" < ", " lt "), (" > ", " gt "))


def is_name(text: str) -> bool:
    """Return whether PML allows a text as the name of a schema, module or parameter."""
    return NAME.fullmatch(text) is not None and text not in TAGS


def from_expression(node: ast.AST) -> str:
    """Return a name for an expression: `days > 3` gives "days-gt-3"."""
    return readable(ast.unparse(node))


def readable(source: str) -> str:
    """Return a name made from source code, with a digest if the code gives no name or a long one."""
    text = source
    for sign, word in _WORDS:
        text = text.replace(sign, word)
    name = re.sub(r"[^A-Za-z0-9_]+", "-", text).strip("-")
    if len(name) > NAME_CHARS_MAX or not name:
        digest = hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()[:6]
        name = f"{name[: NAME_CHARS_MAX - 7].rstrip('-')}-{digest}".lstrip("-")
    return name if is_name(name) else f"_{name}"


class Namer:
    """Makes names that are unique within a module."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def take(self, wish: str) -> str:
        """Return `wish` or, if it is taken, `wish-2`, `wish-3`, …"""
        name, count = wish, 1
        while name in self._taken:
            count += 1
            name = f"{wish}-{count}"
        self._taken.add(name)
        return name
