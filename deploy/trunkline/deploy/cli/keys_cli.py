"""`trunkline key`: API keys of tenants, and keys of the connections between a cluster's hosts."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trunkline.deploy.cli.key_file import add_key, keys_of, revoke_key
from trunkline.deploy.cli.wire_cli import add_to as add_wire
from trunkline.deploy.errors import UserError
from trunkline.deploy.reporting import run
from trunkline.router.tenancy.auth import Role, draw_key

app = typer.Typer(no_args_is_help=True, help="Make, list and revoke API keys, and keys between hosts.")
_File = Annotated[Path, typer.Option("--file", metavar="FILE", help="The file of --tenants.")]


@app.command()
def new(
    file: _File,
    tenant: Annotated[str, typer.Option(help="The tenant who gets the key.")],
    name: Annotated[str, typer.Option(help="Name of the key. Default: key1, key2, …")] = "",
    role: Annotated[
        str,
        typer.Option(
            help="What the key allows: user (requests), metrics (reading metrics) or admin (everything)."
        ),
    ] = "user",
    expires: Annotated[
        str, typer.Option(help="When it expires: after 90d, 12h, 4w or 1y, or at 2027-01-31T12:00:00Z.")
    ] = "",
    gateway: Annotated[
        bool,
        typer.Option("--gateway", help="A gateway may use it and name the tenant in a header (--tenant-header)."),
    ] = False,
) -> None:
    """Make an API key, and print it.

    It is printed once: the file holds only its digest. Running routers accept
    it within a second.

    [bold]Examples[/]

    trunkline key new --tenant alice --file tenants.json

    trunkline key new --tenant ops --role admin --expires 90d --file tenants.json
    """
    now = datetime.now(UTC)
    key, row = run(
        lambda: add_key(file, tenant, name=name, role=_role(role), expires=expires, gateway=gateway, now=now)
    )
    typer.echo(key)
    until = f" until {row.expires}" if row.expires else ""
    typer.echo(f"{row.role} key {row.name} of tenant {tenant}{until}; keep it, it is not shown again.", err=True)


@app.command("list")
def list_keys(file: _File) -> None:
    """List the keys of all tenants."""
    rows = run(lambda: keys_of(file))
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("tenant", "name", "role", "digest", "created", "expires"):
        table.add_column(title)
    now = datetime.now(UTC)
    for row in rows:
        over = row.is_over(now)
        expires = f"{row.expires} (over)" if over else row.expires or "never"
        role = f"{row.role}, gateway" if row.gateway else row.role
        cells = (row.tenant, row.name or "-", role, row.digest[:12], row.created or "-", expires)
        table.add_row(*map(Text, cells), style="red" if over else "")
    Console(highlight=False).print(table)


@app.command()
def revoke(
    key: Annotated[str, typer.Argument(help="Name of the key, or the first 8 digits of its digest, or more.")],
    file: _File,
    tenant: Annotated[str, typer.Option(help="The tenant, if several have a key of this name.")] = "",
) -> None:
    """Remove a key from the file.

    Routers refuse it within a second; running streams go on to their end.
    """
    row = run(lambda: revoke_key(file, key, tenant))
    typer.echo(f"key {row.name or row.digest[:12]} of tenant {row.tenant} is revoked")


@app.command()
def draw() -> None:
    """Print a new key without storing it, for TRUNKLINE_API_KEY or --api-key-file."""
    typer.echo(draw_key())


add_wire(app)


def _role(text: str) -> Role:
    try:
        return Role(text)
    except ValueError:
        raise UserError(f"--role is {text!r}; allowed are {', '.join(Role)}") from None
