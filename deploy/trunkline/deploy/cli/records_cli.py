"""`trunkline records`: look at the store of sessions, schemas and kept answers, bring old files into it, and purge
tenants."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlencode

import typer
from rich.console import Console

from trunkline.deploy.cli.cluster_cli import KeyFile, Url, admin_server, post_as_admin
from trunkline.deploy.cli.option_commands import Port, run
from trunkline.deploy.config.option_values import check_records_url, format_bytes, redacted
from trunkline.deploy.config.record_files import PATIENCE_S, old_files, plan_records, take_over
from trunkline.deploy.config.settings import ServeSettings
from trunkline.deploy.errors import DeployError, UserError
from trunkline.kvstore.records import RecordError, Usage, open_records

app = typer.Typer(no_args_is_help=True, help="Look at what is stored as a whole, move old records, purge tenants.")
_Url = Annotated[
    str,
    typer.Option(
        "--records", metavar="URL", envvar="TRUNKLINE_RECORDS", help="As for serve. Default: as serve has it."
    ),
]
_STYLES: Final = {"warning": "yellow"}


class RecordsError(DeployError):
    """The store does not answer."""


@app.command()
def check(records: _Url = "") -> None:
    """Say how many records there are, and what endangers them.

    Exit code: 0 if they last, 1 if they could be lost or the store does not
    answer.

    [bold]Example[/]

    trunkline records check --records redis://10.0.0.9:6379/0
    """
    console = Console(highlight=False)
    url = run(lambda: _url(records))
    usage, problem = run(lambda: asyncio.run(_looked(url)))
    count = f"{usage.records} record{'' if usage.records == 1 else 's'}"
    console.print(f"{count}, {format_bytes(usage.bytes)}, in {redacted(url)}", markup=False)
    if problem:
        console.print(problem, style="yellow", markup=False)
        raise typer.Exit(1)


@app.command("import")
def import_(
    folder: Annotated[Path, typer.Argument(metavar="PATH", help="The folder of a disk tier.")],
    records: _Url = "",
) -> None:
    """Bring sessions and schemas that earlier versions kept beside the KV of
    each group into the store.

    `serve` and `router` do this themselves with the folder of their own disk
    tier; this is for the folders of groups on other hosts.

    [bold]Example[/]

    trunkline records import /scratch/kv/group-0 --records redis://10.0.0.9:6379/0
    """
    console = Console(highlight=False)

    def say(text: str, level: str) -> None:
        console.print(text, style=_STYLES.get(level), markup=False)

    def imported() -> None:
        try:
            if not old_files(folder, []):
                say(f"Nothing is to be done: {folder} has no records of earlier versions.", "info")
            take_over(_url(records), folder, [], say)
        except OSError as error:
            raise UserError(f"{folder}: {error.strerror or error}") from error
        except RecordError as error:
            raise RecordsError(f"the store does not answer: {error}; nothing was lost") from error

    run(imported)


@app.command()
def purge(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="The tenant's name.")],
    port: Port = None,
    url: Url = "",
    api_key_file: KeyFile = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete everything that a running server stores for a tenant, with its
    KV.

    These are sessions, stored responses, conversations, files, batches,
    schemas and kept answers. Revoke the tenant's keys first: its requests
    could store more meanwhile. What cannot be attributed to a tenant, as
    without keys, is that of the tenant 'default'.

    Exit code: 0 if all is deleted, 1 if something was in use; then run it
    again.

    [bold]Example[/]

    trunkline records purge alice
    """
    base, key = run(lambda: admin_server(port, url, api_key_file))
    if not yes:
        typer.confirm(f"Delete everything that is stored for tenant {tenant!r}?", abort=True)
    deleted: Counter[str] = Counter()
    address = f"{base}/ui/api/purge?{urlencode({'tenant': tenant})}"
    while True:
        answer = run(lambda: post_as_admin(address, key))
        deleted.update(answer["deleted"])
        if answer["is_done"]:
            break
    parts = [f"{count} {kind}" for kind, count in sorted(deleted.items()) if count]
    typer.echo(f"deleted: {', '.join(parts) or 'nothing'}")
    if answer["left"]:
        typer.echo(f"in use, and so not deleted: {answer['left']}; run it again", err=True)
        raise typer.Exit(1)


def _url(given: str) -> str:
    if given:
        check_records_url(given)
    plan = plan_records(ServeSettings(records=given))
    if not plan.url:
        raise UserError("there is no home folder, so there is no default; give --records URL")
    return plan.url


async def _looked(url: str) -> tuple[Usage, str]:
    store = open_records(url, patience_s=PATIENCE_S)
    try:
        return await store.usage(), await store.check()
    except RecordError as error:
        raise RecordsError(f"{redacted(url)} does not answer: {error}") from error
    finally:
        await store.close()
