"""The exceptions of this package: errors in prompt programs, and errors of requests.

TrunklineError
  PromptProgramError       a function cannot be compiled; has file and line
  UnreachableError         no answer, or an answer that is not a Trunkline server's
  RequestError             the server refused a request; has status and code
    PmlRequestError        the schema or prompt in it is wrong; has line, column and path
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class TrunklineError(Exception):
    """Base class of all errors of this package."""


class PromptProgramError(TrunklineError):
    """A prompt program has a part that PML cannot express. Raised where the function is decorated."""

    def __init__(self, message: str, filename: str, line: int) -> None:
        """`line` counts from 1."""
        super().__init__(f"{filename}:{line}: {message}")
        self.message = message
        self.filename = filename
        self.line = line


class UnreachableError(TrunklineError):
    """The server does not answer, went away, or does not speak the protocol."""


class RequestError(TrunklineError):
    """The server refused a request."""

    def __init__(self, message: str, status: int, code: str | None) -> None:
        """`status`: HTTP status (200 if the request failed during the answer); `code`: error code of the
        server."""
        super().__init__(f"{message} ({code or f'HTTP {status}'})")
        self.message = message
        self.status = status
        self.code = code


class PmlRequestError(RequestError):
    """The server refused a schema or a prompt; `code` is one of PML's (`E_…`)."""

    def __init__(self, message: str, status: int, fields: Mapping[str, Any]) -> None:
        """`fields`: fields of the error object in the answer."""
        super().__init__(message, status, str(fields["code"]))
        self.line: int | None = fields.get("line")
        """Line in the PML that was sent, from 1; None: JSON was sent, which has no lines."""
        self.column: int | None = fields.get("column")
        """Column in the PML that was sent, from 1; None: not known."""
        self.path: str = fields.get("path") or ""
        """Path of the module that is wrong."""
        known = {"message", "type", "param", "code", "line", "column", "path"}
        self.extra: dict[str, Any] = {name: value for name, value in fields.items() if name not in known}
        """Numbers that belong to the code, such as `len` and `got` of E_ARG_TOO_LONG (tokens)."""
