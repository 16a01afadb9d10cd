"""Reads a form with a file (`multipart/form-data`) while it arrives: the file is stored part by part."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from trunkline.router.errors import ApiError, bad_value
from trunkline.router.stores.file_store import PART_BYTES

_FIELD_BYTES_MAX: Final = 64 << 10
"""Largest size of all fields of a form together, besides the file."""
_FIELDS_MAX: Final = 32
_NAME_CHARACTERS_MAX: Final = 512


class FormReader:
    """Parses a form. `fields` and `filename` are known when all of it was read."""

    def __init__(self, request: Request, file_field: str, file_bytes_max: int, seconds: float) -> None:
        """
        Args:
            file_field: name of the field with the file.
            file_bytes_max: largest size of the file.
            seconds: time within which the next `PART_BYTES` of the form must arrive.

        Raises:
            ApiError: 400 or 415, the request has no form.
        """
        kind, options = parse_options_header(request.headers.get("content-type", ""))
        if kind != b"multipart/form-data" or b"boundary" not in options:
            raise ApiError(
                415, "please send a form: `Content-Type: multipart/form-data`", code="unsupported_media_type"
            )
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        """Name of the file as the client gives it; None: the form has no file."""
        self.file_bytes = 0
        self._request = request
        self._file_field = file_field
        self._file_bytes_max = file_bytes_max
        self._seconds = seconds
        self._content = bytearray()
        """Content of the file that was parsed and not yielded."""
        self._header: tuple[bytearray, bytearray] = (bytearray(), bytearray())
        """Name and value of the header at hand."""
        self._field = ""
        self._value = bytearray()
        self._is_file = False
        self._value_bytes = 0
        self._is_complete = False
        self._parser = MultipartParser(
            options[b"boundary"],
            {
                "on_part_begin": self._begin_part,
                "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
                "on_header_end": self._end_header,
                "on_part_data": self._add,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """Read the form, and yield the content of its file in parts of `PART_BYTES`; only the last is shorter.

        Raises:
            ApiError: 400, 408 or 413, the form is malformed, too slow or too large.
        """
        stream = self._request.stream()
        more = True
        while more:
            more = await self._fill(stream)
            while len(self._content) >= PART_BYTES:
                yield bytes(self._content[:PART_BYTES])
                del self._content[:PART_BYTES]
        if not self._is_complete:
            raise bad_value("file", "the form ends before its last boundary", code="invalid_form")
        if self._content:
            yield bytes(self._content)

    async def _fill(self, stream: AsyncIterator[bytes]) -> bool:
        """Parse what arrives until a part is complete. Return whether more can come."""
        try:
            async with asyncio.timeout(self._seconds):
                async for chunk in stream:
                    self._parser.write(chunk)
                    if len(self._content) >= PART_BYTES:
                        return True
        except TimeoutError:
            raise ApiError(408, f"a part of the form did not arrive within {self._seconds:g} s") from None
        except ClientDisconnect:
            raise ApiError(400, "the client left before its form was complete") from None
        except FormParserError as error:
            raise bad_value("file", f"the form is malformed: {error}", code="invalid_form") from None
        return False

    def _begin_part(self) -> None:
        self._field, self._is_file, self._value = "", False, bytearray()

    def _end_header(self) -> None:
        name, value = (bytes(part) for part in self._header)
        self._header = (bytearray(), bytearray())
        if name.lower() != b"content-disposition":
            return
        _, options = parse_options_header(value)
        self._field = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = self._field == self._file_field
        if self._is_file:
            if self.filename is not None:
                raise bad_value(self._field, f"the form has more than one `{self._field}`")
            self.filename = options.get(b"filename", b"").decode("utf-8", "replace")[:_NAME_CHARACTERS_MAX]

    def _add(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self.file_bytes += end - start
            if self.file_bytes > self._file_bytes_max:
                message = f"the file is larger than {self._file_bytes_max} bytes"
                raise ApiError(413, message, param=self._field, code="file_too_large")
            self._content += data[start:end]
            return
        self._value_bytes += end - start
        if self._value_bytes > _FIELD_BYTES_MAX:
            raise ApiError(413, "the form's fields are too large", code="body_too_large")
        self._value += data[start:end]

    def _end_part(self) -> None:
        if self._is_file:
            return
        if len(self.fields) >= _FIELDS_MAX:
            raise bad_value(self._field, f"the form has more than {_FIELDS_MAX} fields")
        self.fields[self._field] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self._is_complete = True
