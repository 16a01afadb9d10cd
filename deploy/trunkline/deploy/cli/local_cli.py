"""`trunkline ui` and `flush`: requests of an operator over HTTP, with the key from the cluster's run folder."""

from __future__ import annotations

from typing import Annotated

import httpx
import typer

from trunkline.deploy.errors import DeployError, UserError
from trunkline.deploy.reporting import run
from trunkline.deploy.supervisor.client_keys import admin_key, client_key
from trunkline.deploy.supervisor.registry import find_cluster

_Port = Annotated[int | None, typer.Option(help="Port of the cluster. Default: the only cluster that runs here.")]
_Url = Annotated[
    str,
    typer.Option(help="Address of a server elsewhere; its key comes from --api-key-file or TRUNKLINE_API_KEY."),
]
_KeyFile = Annotated[str, typer.Option(metavar="FILE", help="File with a key of role admin.")]


class FlushError(DeployError):
    """The server cannot be reached, or refused to empty its cache."""


def ui(port: _Port = None, url: _Url = "", api_key_file: _KeyFile = "") -> None:
    """Print the address of the dashboard, with the key that it needs.

    The key stands behind a #, which browsers do not send to servers. But
    any client that has the address may do everything.

    [bold]Example[/]

    trunkline ui
    """
    base, key = run(lambda: _server(port, url, api_key_file))
    typer.echo(f"{base}/ui#key={key}" if key else f"{base}/ui")


def flush(port: _Port = None, url: _Url = "", api_key_file: _KeyFile = "") -> None:
    """Empty the KV cache, but for what running requests use.

    [bold]Example[/]

    trunkline flush
    """
    base, key = run(lambda: _server(port, url, api_key_file))
    typer.echo(run(lambda: f"{_flush(base, key)} blocks freed"))


def _server(port: int | None, url: str, api_key_file: str) -> tuple[str, str]:
    """Its address and an admin's key."""
    if url:
        if port is not None:
            raise UserError("--url and --port say the same; give one of them")
        return url.rstrip("/"), client_key(url, api_key_file)
    folder, running = find_cluster(port)
    if not running.url.startswith("http"):
        raise UserError(f"{running.title} speaks no HTTP; give the address of a router with --url")
    return running.url, client_key("", api_key_file) if api_key_file else admin_key(folder)


def _flush(base: str, key: str) -> int:
    try:
        answer = httpx.post(f"{base}/flush_cache", headers={"Authorization": f"Bearer {key}"}, timeout=60.0)
        body = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise FlushError(f"{base} cannot be asked: {error or type(error).__name__}") from error
    if answer.status_code != httpx.codes.OK:
        raise FlushError(f"{base} refused: {body.get('error', {}).get('message', answer.status_code)}")
    return int(body["blocks_freed"])
