"""A request's headers, in which a name is found without a look at all others."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Final

from starlette.datastructures import Headers

_HEADERS: Final = "trunkline.headers"


def text_of(value: bytes) -> str:
    """Return a header's text: UTF-8, as bodies have it, so that a name is the same in both; or else Latin-1, as in
    old clients."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


class RequestHeaders(Headers):
    """Headers of a request. Of several with one name the first counts, as in Starlette's."""

    def __init__(self, raw: list[tuple[bytes, bytes]]) -> None:
        """`raw`: names in lower case, with their values."""
        super().__init__(raw=raw)
        self._first = dict(reversed(raw))
        self.repeats = len(self._first) < len(raw)
        """Whether any name is given more than once."""

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a header; `default`: the request does not have it."""
        value = self._first.get(key.lower().encode("latin-1"))
        return default if value is None else text_of(value)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key.lower().encode("latin-1") in self._first


def headers_of(scope: MutableMapping[str, Any]) -> RequestHeaders:
    """Return the headers of a request, which are looked through once."""
    found = scope.get(_HEADERS)
    if found is None:
        found = scope[_HEADERS] = RequestHeaders(scope["headers"])
    assert isinstance(found, RequestHeaders)
    return found
