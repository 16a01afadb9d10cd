"""Files in the input of `/v1/responses`, as text for the model. Pure."""

from __future__ import annotations

import base64
import binascii
from typing import Any, Final

from trunkline.router.errors import bad_value, unsupported

_TEXTUAL: Final = ("application/json", "application/xml", "application/yaml", "application/x-yaml")
"""Media types of text besides `text/…`."""


def file_text(part: dict[str, Any], path: str) -> str:
    """Return the text of an `input_file` part between tags, with its name.

    Raises:
        ApiError: 400, it is not given in the request, or it is no text.
    """
    data = part.get("file_data")
    if not isinstance(data, str):
        raise unsupported(f"{path}.file_data", "only files with `file_data` are read; send the file in it")
    head, comma, encoded = data.partition(",")
    media, _, options = head.removeprefix("data:").partition(";")
    if not (comma and head.startswith("data:")):
        raise bad_value(f"{path}.file_data", f'`{path}.file_data` must be like "data:text/plain;base64,…"')
    if not (media.startswith("text/") or media in _TEXTUAL or media.endswith(("+json", "+xml"))):
        kind = media[:60]
        raise unsupported(f"{path}.file_data", f"files of type {kind!r} are not supported; send the file's text")
    if not options.endswith("base64"):
        raise bad_value(f"{path}.file_data", f"`{path}.file_data` must be in base64")
    try:
        text = base64.b64decode(encoded, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        raise bad_value(f"{path}.file_data", f"`{path}.file_data` is no text in UTF-8 and base64") from None
    name = part.get("filename")
    title = [f"<title>{name}</title>"] if isinstance(name, str) and name else []
    return "\n".join(["<document>", *title, text, "</document>"])
