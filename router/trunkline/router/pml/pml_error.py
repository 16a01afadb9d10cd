"""`PmlError`: the exception for wrong schemas and prompts, with a code for each kind of mistake."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from trunkline.router.errors import PromptError

MESSAGE_CHARACTERS_MAX: Final = 1000
"""Largest length of an error's message. Longer ones are cut, because names in it may be as long as a document."""
PATH_CHARACTERS_MAX: Final = 200
"""Largest length of an error's path. Longer ones are cut, because names in it may be as long as a document."""


class ErrorCode(StrEnum):
    """The codes of mistakes in schemas and prompts."""

    XML = "E_XML"
    """The document cannot be read: not well-formed, not UTF-8, a construct that is not allowed (DOCTYPE,
    processing instructions, entities), larger or deeper than allowed, or JSON of another shape."""
    TAG = "E_TAG"
    """An element or attribute stands where it does not belong, is missing, or has a value that is not allowed."""
    NAME = "E_NAME"
    """A name is missing or not allowed."""
    DUP = "E_DUP"
    """Two modules, two parameters or two scaffolds of one namespace have the same name."""
    PARAM_ROOT = "E_PARAM_ROOT"
    """A parameter stands outside any module."""
    UNION_CONTENT = "E_UNION_CONTENT"
    """A union contains something other than modules."""
    UNION_EMPTY = "E_UNION_EMPTY"
    """A union has no modules."""
    SCAFFOLD_PATH = "E_SCAFFOLD_PATH"
    """A scaffold names no modules, or a module that does not exist, is named twice, is not cached, or cannot be
    imported together with another one."""
    SCHEMA_TOO_LONG = "E_SCHEMA_TOO_LONG"
    """The schema has more positions than the model, or more tokens in all than a schema may have."""
    TEMPLATE = "E_TEMPLATE"
    """The model has no chat template, or its template refuses the roles or does not write them in their order."""
    ROLE_ORDER = "E_ROLE_ORDER"
    """A role stands within a role, or after an open one."""
    SCHEMA_UNKNOWN = "E_SCHEMA_UNKNOWN"
    """The prompt names a schema that does not exist (HTTP 404)."""
    MODULE_UNKNOWN = "E_MODULE_UNKNOWN"
    """The prompt imports a module that does not exist."""
    DUP_IMPORT = "E_DUP_IMPORT"
    """The prompt imports a module twice."""
    UNION_CONFLICT = "E_UNION_CONFLICT"
    """The prompt imports two modules of one union."""
    ARG_UNKNOWN = "E_ARG_UNKNOWN"
    """The prompt gives an argument for a parameter that does not exist."""
    ARG_MISSING = "E_ARG_MISSING"
    """A required parameter has no argument."""
    ARG_TOO_LONG = "E_ARG_TOO_LONG"
    """An argument has `got` tokens where its parameter has room for `len`."""
    TEXT_OVERFLOW = "E_TEXT_OVERFLOW"
    """A text between modules has `got` tokens where there are `capacity` free positions."""
    ORDER = "E_ORDER"
    """Modules before and after a text are not in the schema's order."""
    EMPTY = "E_EMPTY"
    """The prompt selects nothing and adds nothing."""
    CONTEXT_LENGTH = "E_CONTEXT_LENGTH"
    """The prompt leaves no position for an answer."""


class Mark(NamedTuple):
    """A place in a document. Lines and columns count from 1; columns count characters."""

    line: int
    column: int


class PmlError(PromptError):
    """A schema or a prompt is wrong. The message is written for its author."""

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        mark: Mark | None = None,
        path: str = "",
        extra: Mapping[str, int] | None = None,
    ) -> None:
        """Args:
        code: the kind of mistake.
        message: what is wrong, for the author.
        mark: place of the mistake in the document; None: not known.
        path: path of the module, or of the JSON value, that is wrong.
        extra: numbers that belong to the code.
        """
        message = _cut(message, MESSAGE_CHARACTERS_MAX)
        super().__init__(message)
        self.code: str = code.value
        self.message = message
        self.line: int | None = mark.line if mark else None
        self.column: int | None = mark.column if mark else None
        self.path = _cut(path, PATH_CHARACTERS_MAX)
        self.extra: dict[str, int] = dict(extra or {})

    def __str__(self) -> str:
        place = f" (line {self.line}, column {self.column})" if self.line is not None else ""
        return f"{self.code}: {self.message}{place}"


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}…"
