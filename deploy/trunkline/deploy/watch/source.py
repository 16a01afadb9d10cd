"""Ask a router about its cluster over HTTP, for `trunkline top` and `doctor`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from trunkline.deploy.config.listening import DEFAULT_URL
from trunkline.deploy.config.node_settings import Kind
from trunkline.deploy.errors import DeployError
from trunkline.deploy.supervisor.client_keys import client_headers
from trunkline.deploy.supervisor.registry import running_clusters

_TIMEOUT_S: Final = 10.0
HISTORY_S: Final = 120
SESSIONS_MAX: Final = 100


class WatchError(DeployError):
    """The server cannot be reached, or refuses to answer."""


@dataclass(frozen=True)
class Look:
    """The figures of a cluster at one moment, as `/ui/api/…` gives them (docs/dashboard.md)."""

    overview: Mapping[str, Any]
    history: Mapping[str, Any] = field(default_factory=dict)
    sessions: tuple[Mapping[str, Any], ...] = ()
    requests: tuple[Mapping[str, Any], ...] = ()


class Source:
    """A connection to a router."""

    def __init__(self, url: str | None = None, api_key_file: str = "", *, key: str | None = None) -> None:
        """Connect to a router.

        Args:
            url: Its address; None for the cluster that runs on this machine, or else the default address.
            api_key_file: File with a key of role admin; "" to find a key as other commands do.
            key: A key to send instead; "" to send none.

        Raises:
            DeployError: The key's file cannot be read, or several clusters run here.
        """
        self.url = (url or _local_url()).rstrip("/")
        if key is None:
            headers = client_headers(self.url, api_key_file)
        else:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(base_url=self.url, headers=headers, timeout=_TIMEOUT_S)

    def close(self) -> None:
        """Disconnect."""
        self._client.close()

    def look(self) -> Look:
        """Return the figures that `top` shows; without sessions and requests if the router does not give them now.

        Raises:
            WatchError: The server does not answer, or refuses the key.
        """
        overview = self.get("/ui/api/overview")
        history = self.get(f"/ui/api/history?seconds={HISTORY_S}")
        lists: list[tuple[Mapping[str, Any], ...]] = [(), ()]
        for index, path in enumerate((f"/ui/api/sessions?limit={SESSIONS_MAX}", "/ui/api/requests")):
            with contextlib.suppress(WatchError):
                found = self.get(path)
                rows = (
                    found
                    if isinstance(found, list)
                    else next(iter(v for v in found.values() if isinstance(v, list)), [])
                )
                lists[index] = tuple(rows)
        return Look(overview, history, *lists)

    def get(self, path: str) -> Any:
        """Return the JSON at a path.

        Raises:
            WatchError: There is none; the text says why.
        """
        answer = self.fetch(path)
        if answer.status_code in (401, 403):
            raise WatchError(
                f"{self.url} refuses {path.partition('?')[0]}: {_message(answer)}. A key of role admin is needed: "
                "give it with --api-key-file, or in TRUNKLINE_API_KEY"
            )
        if answer.status_code != 200:
            raise WatchError(f"{self.url}{path} answers {answer.status_code}: {_message(answer)}")
        try:
            return answer.json()
        except ValueError as error:
            raise WatchError(f"{self.url}{path} does not answer in JSON: is that a Trunkline router?") from error

    def fetch(self, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        """Return the answer to a GET, or to a POST of this body.

        Raises:
            WatchError: The server does not answer.
        """
        try:
            return self._client.get(path) if body is None else self._client.post(path, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise WatchError(
                f"{self.url} does not answer ({error or type(error).__name__}); is the cluster running?"
            ) from error

    def timed(self, path: str, body: Mapping[str, Any]) -> tuple[httpx.Response, float]:
        """Return the answer as `fetch`, with the seconds that it took."""
        begun = time.monotonic()
        return self.fetch(path, body), time.monotonic() - begun


def _message(answer: httpx.Response) -> str:
    try:
        error = answer.json()["error"]
        return str(error["message"]).rstrip(".")
    except (ValueError, KeyError, TypeError):
        return answer.text[:200] or answer.reason_phrase


def _local_url() -> str:
    # Of the parts of a cluster only routers speak HTTP.
    running = [found for found in running_clusters().values() if found.kind in ("cluster", Kind.ROUTER)]
    if len(running) > 1:
        ports = ", ".join(str(cluster.port) for cluster in running)
        raise WatchError(
            f"several clusters run here, on ports {ports}; say which with --url http://127.0.0.1:PORT"
        )
    return running[0].url if running else DEFAULT_URL
