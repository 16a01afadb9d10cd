"""Send HTTP requests to a server and read its streams. Errors of httpx become errors of this package here."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator, Iterator, Mapping
from typing import Any, Final

import httpx
from httpx_sse import EventSource

from trunkline.prompts.errors import PmlRequestError, RequestError, UnreachableError

DEFAULT_URL: Final = "http://127.0.0.1:8000"
_CONNECT_SECONDS: Final = 10.0


class HttpConnection:
    """Connections to one server."""

    def __init__(
        self, base_url: str, api_key: str | None, timeout_s: float, transport: httpx.BaseTransport | None
    ) -> None:
        """
        Args:
            base_url: Address of the server, with or without the `/v1` that OpenAI's clients want.
            timeout_s: Seconds without any data after which a request fails.
        """
        self._url = base_url.rstrip("/").removesuffix("/v1")
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_SECONDS))
        with self._errors():
            self._http = httpx.Client(base_url=self._url, headers=headers, timeout=timeout, transport=transport)

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str | int | None] | None = None,
    ) -> dict[str, Any]:
        """Send a request and return the JSON object of the answer. Entries of `query` that are None are left out.

        Raises:
            RequestError: The server refused the request.
            UnreachableError: There was no answer.
        """
        params = {name: value for name, value in (query or {}).items() if value is not None}
        with self._errors():
            response = self._http.request(method, path, json=body, params=params)
            if response.status_code >= 400:
                raise _refusal(response)
            answer = response.json()
        if not isinstance(answer, dict):
            raise UnreachableError(f"{self._url} does not speak the expected protocol: {path} is no JSON object")
        return answer

    def events(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Yield the JSON objects of an answer's event stream. Closing the iterator early ends the request.

        Raises:
            RequestError: The request was refused, or failed later.
            UnreachableError: There was no answer, or the connection broke before the stream was complete.
        """
        with self._errors(), self._http.stream("POST", path, json=body) as response:
            if response.status_code >= 400:
                response.read()
                raise _refusal(response)
            for sent in EventSource(response).iter_sse():
                if sent.data == "[DONE]":
                    return
                event = sent.json()
                if "error" in event:
                    raise _error(event["error"], response.status_code)
                yield event
            raise UnreachableError("the server ended the answer before its end")

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError as error:
            raise UnreachableError(
                f"no server answers at {self._url}; start one with `trunkline serve`, or say where it is"
            ) from error
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise UnreachableError(f"{self._url} is no address of a server: {error}") from error
        except httpx.HTTPError as error:
            raise UnreachableError(
                f"the connection to {self._url} failed: {error or type(error).__name__}"
            ) from error
        except json.JSONDecodeError as error:
            raise UnreachableError(f"{self._url} does not speak the expected protocol: {error}") from error


def _refusal(response: httpx.Response) -> RequestError:
    try:
        return _error(response.json()["error"], response.status_code)
    except (ValueError, KeyError, TypeError):
        return RequestError(response.text[:200] or "no reason was given", response.status_code, None)


def _error(fields: Mapping[str, Any], status: int) -> RequestError:
    message, code = str(fields["message"]), fields.get("code")
    if isinstance(code, str) and code.startswith("E_"):
        return PmlRequestError(message, status, fields)
    return RequestError(message, status, code if isinstance(code, str) else None)
