"""The commands for a cluster that runs on this machine: `status`, `scale`, `drain`, `undrain`, `restart`, `ui`,
`flush`.

The last two ask its router over HTTP, with the admin key from the cluster's run folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import httpx
import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trunkline.deploy.cli.option_commands import WHOLE, Port, run
from trunkline.deploy.config.option_values import check_range, format_duration
from trunkline.deploy.config.settings import GROUPS_MAX
from trunkline.deploy.errors import DeployError, UserError
from trunkline.deploy.supervisor.control import ControlError, ask
from trunkline.deploy.supervisor.members import Command, Reply
from trunkline.deploy.supervisor.run_folder import (
    CONTROL_SOCKET,
    Running,
    admin_key,
    client_key,
    find_cluster,
    local_port,
    server_url,
)

_Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it is done.")]
_STYLES = {
    "ready": "green",
    "running": "green",
    "draining": "yellow",
    "starting": "yellow",
    "given up": "bold red",
    "lost": "bold red",
}


class RefusedError(DeployError):
    """The cluster refused or failed to do what was asked for."""


def status(
    port: Port = None,
    url: Annotated[str, typer.Option(help="Address of the cluster, instead of its port.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Show the processes of a running cluster.

    [bold]Examples[/]

    trunkline status

    trunkline status --json | jq '.groups'
    """
    running, answer = run(lambda: _status(local_port(port, url)))
    if as_json:
        typer.echo(json.dumps({**msgspec.to_builtins(running), **answer}, indent=2))
        return
    print_status(running, answer)


def drain(
    group: Annotated[str, typer.Argument(help="Number of a group, or the name of its controller.")],
    port: Port = None,
    wait: _Wait = True,
) -> None:
    """Stop a group without losing a request.

    Its streams finish, or go on in another group, which also takes its new
    requests; if there is none, they wait. The group stays down until
    `trunkline undrain`.

    [bold]Examples[/]

    trunkline drain 0

    trunkline drain controller-1 --no-wait
    """
    run(lambda: _order(Command("drain", [group]), port, wait))


def undrain(
    group: Annotated[str, typer.Argument(help="Number of a group, or the name of its controller.")],
    port: Port = None,
    wait: _Wait = True,
) -> None:
    """Start a group that was drained or given up.

    [bold]Example[/]

    trunkline undrain 0
    """
    run(lambda: _order(Command("undrain", [group]), port, wait))


def restart(
    units: Annotated[
        list[str] | None,
        typer.Argument(help="Groups by number, routers by name or all as 'routers'. Default: everything."),
    ] = None,
    port: Port = None,
    wait: _Wait = True,
) -> None:
    """Restart groups and routers one after the other, without losing a request.

    Each is ready again before the next one stops. If one does not come back,
    the others are left as they are. Drained groups stay down.

    [bold]Examples[/]

    trunkline restart

    trunkline restart 0 1

    trunkline restart routers
    """
    run(lambda: _order(Command("restart", units or []), port, wait))


def scale(
    groups: Annotated[
        int, typer.Argument(help="The number of groups that there are to be.", **{**WHOLE, "metavar": "N"})
    ],
    port: Port = None,
    wait: _Wait = True,
) -> None:
    """Change the number of groups of a running cluster, without losing a
    request.

    Routers go on, and take in each new group as soon as it is ready. Of the
    groups, those with the highest numbers leave: their streams finish within
    --drain-seconds, or go on in other groups. Stored sessions stay.

    [bold]Examples[/]

    trunkline scale 3

    trunkline scale 1 --no-wait
    """
    run(lambda: _scale(groups, port, wait))


def _scale(groups: int, port: int | None, wait: bool) -> None:
    if groups < 1:
        raise UserError(f"N is {groups}; at least one group stays. Ctrl-C or SIGTERM stops the cluster")
    check_range("N", groups, 1, GROUPS_MAX)
    _order(Command("scale", groups=groups), port, wait)


def print_status(running: Running, answer: Mapping[str, Any]) -> None:
    """Print what runs, and why a group or router was given up."""
    console = Console(highlight=False)
    console.print(f"{running.title}\n{running.url} · {answer['phase']}", markup=False, soft_wrap=True)
    console.print(status_table(answer))
    for why in [row["why"] for row in (*answer["groups"], *answer["processes"]) if row.get("why")]:
        console.print(Text(f"Given up: {why}.", style="bold red"), soft_wrap=True)


def status_table(answer: Mapping[str, Any]) -> Table:
    """Return a table of groups and processes."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("process", "pid", "state", "restarts", "up"):
        table.add_column(title, justify="right" if title in ("pid", "restarts", "up") else "left")
    states = {group["group"]: str(group["state"]) for group in answer["groups"]}
    last = None
    for row in answer["processes"]:
        if row["group"] != last and row["group"] in states:
            state = states[row["group"]]
            table.add_row(
                Text(f"group {row['group']}", style="bold"), "", Text(state, style=_STYLES.get(state, ""))
            )
        last = row["group"]
        state = str(row["state"])
        table.add_row(
            Text(str(row["name"])),
            str(row["pid"] or ""),
            Text(state, style=_STYLES.get(state, "")),
            str(row["restarts"]),
            format_duration(row["up_s"]) if row["pid"] and row["up_s"] is not None else "",
        )
    return table


def _status(port: int | None) -> tuple[Running, dict[str, Any]]:
    folder, running = find_cluster(port)
    for reply in ask(folder / CONTROL_SOCKET, Command("status")):
        if reply.status is not None:
            return running, reply.status
        raise RefusedError(reply.text)
    raise ControlError("the supervisor did not answer")


def _order(command: Command, port: int | None, wait: bool) -> None:
    folder, _ = find_cluster(port)
    console = Console(highlight=False)
    try:
        for reply in ask(folder / CONTROL_SOCKET, command):
            _show(console, reply)
            if not wait:
                return
    except KeyboardInterrupt:
        console.print(f"\nNo longer waiting, but the {command.command} goes on; see `trunkline status`.")
        raise typer.Exit(130) from None


def _show(console: Console, reply: Reply) -> None:
    if not reply.ok:
        raise RefusedError(reply.text)
    console.print(reply.text, markup=False, soft_wrap=True)


Url = Annotated[
    str,
    typer.Option(help="Address of a server elsewhere; its key comes from --api-key-file or TRUNKLINE_API_KEY."),
]
KeyFile = Annotated[str, typer.Option(metavar="FILE", help="File with a key of role admin.")]


class ServerError(DeployError):
    """The server cannot be reached, or refused what was asked of it."""


def ui(port: Port = None, url: Url = "", api_key_file: KeyFile = "") -> None:
    """Print the address of the dashboard, with the key that it needs.

    The key stands behind a #, which browsers do not send to servers. But
    any client that has the address may do everything.

    [bold]Example[/]

    trunkline ui
    """
    base, key = run(lambda: admin_server(port, url, api_key_file))
    typer.echo(f"{base}/ui#key={key}" if key else f"{base}/ui")


def flush(port: Port = None, url: Url = "", api_key_file: KeyFile = "") -> None:
    """Empty the KV cache, but for what running requests use.

    [bold]Example[/]

    trunkline flush
    """
    base, key = run(lambda: admin_server(port, url, api_key_file))
    typer.echo(run(lambda: f"{_flush(base, key)} blocks freed"))


def admin_server(port: int | None, url: str, api_key_file: str) -> tuple[str, str]:
    """Return the address of a cluster's router, and the key of an admin."""
    if url:
        return server_url(port, url), client_key(url, api_key_file)
    folder, running = find_cluster(port)
    if not running.url.startswith("http"):
        raise UserError(f"{running.title} speaks no HTTP; give the address of a router with --url")
    return running.url, client_key("", api_key_file) if api_key_file else admin_key(folder)


def _flush(base: str, key: str) -> int:
    return int(post_as_admin(f"{base}/flush_cache", key)["blocks_freed"])


def post_as_admin(address: str, key: str) -> dict[str, Any]:
    """Send a request without a body to a router; return the answer.

    Raises:
        ServerError: it does not answer, or refuses.
    """
    try:
        answer = httpx.post(address, headers={"Authorization": f"Bearer {key}"}, timeout=60.0)
        body: dict[str, Any] = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ServerError(f"{address} cannot be asked: {error or type(error).__name__}") from error
    if answer.status_code != httpx.codes.OK:
        raise ServerError(f"{address} refused: {body.get('error', {}).get('message', answer.status_code)}")
    return body
