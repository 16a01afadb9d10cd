"""The input of a batch: a file with one request in each line.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": […]}}

The requests are put in an order in which prompts with equal beginnings stand together, as in a walk through the
tree of all prompts that finishes each branch before it begins the next one. So the KV of a shared prefix is
computed once, and used while it is in fast memory, however large the file is.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections.abc import AsyncIterator, Iterator
from typing import IO, Any, Final, NamedTuple

import msgspec
from pydantic_core import from_json

from trunkline.router.stores.batch_store import Problem

LINES_MAX: Final = 50_000
"""Largest number of requests in a batch, as in OpenAI's API."""
PROBLEMS_MAX: Final = 100
"""Number of errors that are reported of an input."""
_BLOCK_CHARACTERS: Final = 256
"""Characters of a prompt that are compared at once: about as many as a chunk has."""
_DIGEST_BYTES: Final = 8
_MEMORY_BYTES: Final = 16 << 20
"""Size in bytes up to which an input is kept in memory, not in a temporary file."""
_CUSTOM_ID_CHARACTERS_MAX: Final = 512
_TEXT_FIELDS: Final = ("tools", "instructions", "system", "messages", "prompt", "pml", "input")
"""Fields of requests that become the prompt, in the order in which templates write them."""


class Line(NamedTuple):
    """Where a request stands in the input."""

    order: bytes
    """Digests of the prompt's blocks: prompts with equal beginnings have equal beginnings here."""
    number: int
    """Number of the request in the input, from 0."""
    start: int
    """First byte of the line."""
    size: int


class BatchLine(msgspec.Struct):
    """A request of a batch."""

    custom_id: str
    body: msgspec.Raw
    method: str = "POST"
    url: str = ""


class BatchInput:
    """The requests of a batch, read and checked. Call `close` in the end."""

    def __init__(self, endpoint: str, line_bytes_max: int) -> None:
        """
        Args:
            endpoint: path that all requests must be for.
            line_bytes_max: largest size of a request.
        """
        self.lines: list[Line] = []
        self.problems: list[Problem] = []
        self._endpoint = endpoint
        self._line_bytes_max = line_bytes_max
        self._content: IO[bytes] = tempfile.SpooledTemporaryFile(_MEMORY_BYTES)  # noqa: SIM115 (`close` closes it)
        self._ids: set[bytes] = set()
        self._number = 0
        """Number of the line that was read last, from 1; empty lines count."""
        self._size = 0

    async def read(self, parts: AsyncIterator[bytes]) -> None:
        """Read a whole file, and put its lines in order. A part is checked in a thread."""
        rest = b""
        async for part in parts:
            whole, newline, rest = (rest + part).rpartition(b"\n")
            await asyncio.to_thread(self._add, whole + newline)
            if len(rest) > self._line_bytes_max:
                message = f"this line is longer than {self._line_bytes_max} bytes"
                self.problems.append(Problem("line_too_long", message, self._number + 1))
                return
            if len(self.problems) >= PROBLEMS_MAX:
                return
        await asyncio.to_thread(self._add, rest)
        if not self.lines and not self.problems:
            self.problems.append(Problem("empty_file", "the input file has no requests"))
        self._ids.clear()
        self.lines.sort()

    def get(self, line: Line) -> BatchLine:
        """Return a request."""
        self._content.seek(line.start)
        return msgspec.json.decode(self._content.read(line.size), type=BatchLine)

    def close(self) -> None:
        """Free the input's memory, or its temporary file."""
        self._content.close()

    def _add(self, content: bytes) -> None:
        self._content.write(content)
        for start, line in _split(content):
            self._number += 1
            if not line.strip():
                continue
            problem = self._problem_of(line)
            if problem is not None:
                self.problems.append(problem)
                if len(self.problems) >= PROBLEMS_MAX:
                    return
                continue
            fields = msgspec.json.decode(line)["body"]
            self.lines.append(Line(order_of(fields), len(self.lines), self._size + start, len(line)))
        self._size += len(content)

    def _problem_of(self, content: bytes) -> Problem | None:
        """Return what is wrong with a line."""
        number = self._number
        try:
            line = msgspec.json.decode(content, type=BatchLine)
            body = msgspec.json.decode(line.body)
            from_json(
                bytes(line.body), allow_inf_nan=False
            )  # the endpoint reads it so, too: it must not be too deep
        except (ValueError, RecursionError) as error:
            return Problem("invalid_json_line", f"this line is no request: {error}", number)
        if not 1 <= len(line.custom_id) <= _CUSTOM_ID_CHARACTERS_MAX:
            message = f"`custom_id` must have 1 to {_CUSTOM_ID_CHARACTERS_MAX} characters"
            return Problem("invalid_custom_id", message, number, "custom_id")
        digest = hashlib.blake2b(line.custom_id.encode(), digest_size=16).digest()
        if digest in self._ids:
            message = f"`custom_id` {line.custom_id[:80]!r} is that of an earlier line"
            return Problem("duplicate_custom_id", message, number, "custom_id")
        self._ids.add(digest)
        if line.method != "POST":
            return Problem("invalid_method", "`method` must be POST", number, "method")
        if line.url != self._endpoint:
            message = f"`url` must be the batch's endpoint, {self._endpoint}"
            return Problem("mismatched_endpoint", message, number, "url")
        if not isinstance(body, dict):
            return Problem("invalid_body", "`body` must be an object", number, "body")
        if len(self.lines) == LINES_MAX:
            return Problem("too_many_requests", f"a batch has {LINES_MAX} requests at most", number)
        return None


def order_of(fields: dict[str, Any]) -> bytes:
    """Return a key by which requests are sorted (`Line.order`). `fields`: the request's body."""
    text = "\0".join(_texts(fields))
    blocks = (text[at : at + _BLOCK_CHARACTERS] for at in range(0, len(text), _BLOCK_CHARACTERS))
    return b"".join(
        hashlib.blake2b(block.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()
        for block in blocks
    )


def _texts(fields: dict[str, Any]) -> Iterator[str]:
    """Yield what a prompt is made of, from its beginning to its end."""
    for name in _TEXT_FIELDS:
        value = fields.get(name)
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, str):
                yield part
            elif part is not None:
                yield msgspec.json.encode(part, order="deterministic").decode()


def _split(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a text, each with the place where it begins."""
    start = 0
    while start < len(content):
        end = content.find(b"\n", start)
        end = len(content) if end < 0 else end
        yield start, content[start:end]
        start = end + 1
