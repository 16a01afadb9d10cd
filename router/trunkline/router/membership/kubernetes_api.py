"""Lists and watches the EndpointSlices of a Service through the Kubernetes API, with the credentials of a pod."""

from __future__ import annotations

import os
import ssl
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import msgspec

CREDENTIALS: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder in which each pod finds its token and the certificate of the API server's authority."""
WATCH_SECONDS: Final = 60
"""Time in seconds after which the server ends a watch. The next one goes on where it ended, with the token as it
is then."""
_SILENCE_SECONDS: Final = WATCH_SECONDS + 15
"""Time in seconds without a byte after which the connection of a watch counts as lost."""
_CALL_SECONDS: Final = 10.0
_PAGE: Final = 500


class GoneError(Exception):
    """The server does not know any more what has changed since the given version: list again."""


class ApiFailedError(Exception):
    """The server did not answer, or refused."""


class _Named(msgspec.Struct, frozen=True):
    name: str = ""


class Conditions(msgspec.Struct, frozen=True):
    terminating: bool | None = None


class Endpoint(msgspec.Struct, frozen=True, rename="camel"):
    """A pod behind a Service."""

    addresses: list[str] = []
    conditions: Conditions | None = None
    hostname: str | None = None
    node_name: str | None = None
    target_ref: _Named | None = None


class Port(msgspec.Struct, frozen=True):
    """A named port of all pods of a slice."""

    name: str | None = None
    port: int | None = None


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    """What identifies an object and its version."""

    name: str = ""
    resource_version: str = ""


class Slice(msgspec.Struct, frozen=True, rename="camel"):
    """An EndpointSlice: some of the pods behind a Service."""

    metadata: Metadata = Metadata()
    address_type: str = "IPv4"
    endpoints: list[Endpoint] | None = None
    ports: list[Port] | None = None


class _ListMetadata(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class _List(msgspec.Struct, frozen=True):
    metadata: _ListMetadata
    items: list[Slice] | None = None


class _Status(msgspec.Struct, frozen=True):
    code: int = 0
    message: str = ""


class _Event(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class Listing(NamedTuple):
    """All slices at one moment."""

    slices: dict[str, Slice]
    version: str
    """Where a watch goes on."""


class Change(NamedTuple):
    """A slice that is new, changed or gone."""

    version: str
    """Where a watch goes on after this change."""
    name: str
    """Name of the slice; "": only the version has changed (a bookmark)."""
    slice: Slice | None
    """None: it is gone."""


class SlicesApi:
    """The EndpointSlices of one Service."""

    def __init__(self, namespace: str, service: str, *, server: str = "", credentials: Path = CREDENTIALS) -> None:
        """
        Args:
            server: base URL of the API server; "": the one that the pod's environment names.
            credentials: see `CREDENTIALS`.
        """
        self._server = server or _server_of_pod()
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._query = {"labelSelector": f"kubernetes.io/service-name={service}"}
        self._credentials = credentials
        self._client: httpx.AsyncClient | None = None

    async def close(self) -> None:
        """Close the connections. The next call opens new ones, with the certificate as it is then."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def list(self) -> Listing:
        """Return all slices.

        Raises:
            GoneError: the list has changed too much between two pages.
            ApiFailedError: see there.
        """
        slices: dict[str, Slice] = {}
        following = ""
        while True:
            query = {**self._query, "limit": str(_PAGE)} | ({"continue": following} if following else {})
            try:
                reply = await self._open().get(self._path, params=query, headers=self._headers())
                _check(reply.status_code, reply.content)
                page = msgspec.json.decode(reply.content, type=_List)
            except (httpx.HTTPError, OSError, msgspec.DecodeError) as error:
                raise ApiFailedError(_words(error)) from error
            slices.update((each.metadata.name, each) for each in page.items or [])
            following = page.metadata.continue_
            if not following:
                return Listing(slices, page.metadata.resource_version)

    async def watch(self, version: str) -> AsyncGenerator[Change, None]:
        """Yield what has changed since a version, until the server ends the watch. The first change is empty; it
        says that the server has accepted the call.

        Raises:
            GoneError: see there.
            ApiFailedError: see there. Changes that were yielded before are right all the same.
        """
        query = self._query | {
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        timeout = httpx.Timeout(_CALL_SECONDS, read=_SILENCE_SECONDS)
        try:
            async with self._open().stream(
                "GET", self._path, params=query, headers=self._headers(), timeout=timeout
            ) as reply:
                if reply.status_code != 200:
                    _check(reply.status_code, await reply.aread())
                yield Change(version, "", None)
                async for line in reply.aiter_lines():
                    if line.strip():
                        yield _change(line)
        except (httpx.HTTPError, OSError, msgspec.DecodeError) as error:
            raise ApiFailedError(_words(error)) from error

    def _open(self) -> httpx.AsyncClient:
        if self._client is None:
            verify: ssl.SSLContext | bool = True
            authority = self._credentials / "ca.crt"
            if self._server.startswith("https:") and authority.exists():
                verify = ssl.create_default_context(cafile=authority)
            self._client = httpx.AsyncClient(
                base_url=self._server, verify=verify, timeout=_CALL_SECONDS, trust_env=False
            )
        return self._client

    def _headers(self) -> dict[str, str]:
        """Return the headers of a call. The token is read each time: Kubernetes replaces it about every hour."""
        token = (self._credentials / "token").read_text(encoding="ascii").strip()
        return {"Authorization": f"Bearer {token}", "Accept": "application/json"}


def _server_of_pod() -> str:
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "kubernetes.default.svc")
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def _check(status: int, content: bytes) -> None:
    if status == 410:
        raise GoneError
    if status != 200:
        try:
            message = msgspec.json.decode(content, type=_Status).message
        except msgspec.DecodeError:
            message = ""
        raise ApiFailedError(f"the API server answers {status}" + (f": {message}" if message else ""))


def _change(line: str) -> Change:
    event = msgspec.json.decode(line, type=_Event)
    if event.type == "ERROR":
        status = msgspec.json.decode(event.object, type=_Status)
        if status.code == 410:
            raise GoneError
        raise ApiFailedError(f"the API server ended the watch: {status.code} {status.message}")
    changed: Any = msgspec.json.decode(event.object, type=Slice)
    version = changed.metadata.resource_version
    if event.type == "BOOKMARK":
        return Change(version, "", None)
    return Change(version, changed.metadata.name, None if event.type == "DELETED" else changed)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
