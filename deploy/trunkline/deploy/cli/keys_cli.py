"""`trunkline key`: API keys of tenants, and keys of the connections between a cluster's hosts.

API keys stand in the file of tenants (`router/tenancy/tenant_file.py`). What is in that file besides keys stays as
it is. It is written anew in one go, for its owner only, and by one command at a time; routers see the old file or
the new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trunkline.deploy.cli.option_commands import run
from trunkline.deploy.errors import UserError
from trunkline.router.config import NO_LIMITS
from trunkline.router.tenancy.auth import KeyRole, draw_key, hash_key
from trunkline.router.tenancy.tenant_file import BYTES_MAX, parse_rules, parse_time, write_private
from trunkline.runtime.wire_keys import PARTS, WireKeys, WireKeysError, generate, load, write

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


def _role(text: str) -> KeyRole:
    try:
        return KeyRole(text)
    except ValueError:
        raise UserError(f"--role is {text!r}; allowed are {', '.join(KeyRole)}") from None


_SPAN: Final = re.compile(r"([1-9][0-9]{0,5})([hdwy])")
_HOURS: Final = {"h": 1, "d": 24, "w": 7 * 24, "y": 365 * 24}
_DIGITS_MIN: Final = 8
"""Smallest number of digits of a key's digest by which the key may be named."""


@dataclass(frozen=True)
class Row:
    """A key as the file of keys lists it."""

    tenant: str
    name: str
    """Name by which the key can be revoked; "" if it has none."""
    role: str
    digest: str
    expires: str
    """Time at which the key expires; "" if it never does."""
    created: str
    """Time at which the key was made; "" if that is not known."""
    gateway: bool

    def is_over(self, now: datetime) -> bool:
        """Return whether the key has expired."""
        return bool(self.expires) and parse_time(self.expires, "expires") <= now.timestamp()


def add_key(
    path: Path, tenant: str, *, name: str, role: KeyRole, expires: str, gateway: bool, now: datetime
) -> tuple[str, Row]:
    """Draw a key for a tenant, and put its digest into a file, which is made if it does not exist.

    Args:
        name: The name by which the key can be revoked; "": a free one is chosen.
        expires: A span such as "90d", or a time; "": never.

    Returns:
        The key, which is stored nowhere, and its row in the file.

    Raises:
        UserError: The file cannot be used or written, or the key cannot be made as was asked.
    """
    key = draw_key()
    with _locked(path):
        document = _read(path)
        used = {row.name for row in _rows(document) if row.tenant == tenant}
        if name in used:
            raise UserError(
                f"tenant {tenant} has a key named {name} already; choose another --name or revoke that"
            )
        number = 1
        while not name:
            name = "" if f"key{number}" in used else f"key{number}"
            number += 1
        entry: dict[str, Any] = {"sha256": hash_key(key), "name": name, "created": _written(now)}
        if role is not KeyRole.USER:
            entry["role"] = role.value
        if expires:
            entry["expires"] = _written(_moment(expires, now))
        if gateway:
            entry["gateway"] = True
        keys = document.setdefault("tenants", {}).setdefault(tenant, {}).setdefault("keys", [])
        keys.append(entry)
        _write(path, document)
    return key, _row(tenant, entry)


def keys_of(path: Path) -> list[Row]:
    """Return all keys of a file.

    Raises:
        UserError: The file cannot be read, or is no file of keys.
    """
    return _rows(_read(path, must_exist=True, note=""))


def revoke_key(path: Path, named: str, tenant: str = "") -> Row:
    """Take a key out of a file.

    Args:
        named: The key's name, or the beginning of its digest.
        tenant: The tenant who has the key; "" for any.

    Raises:
        UserError: No key fits, or several do.
    """
    with _locked(path):
        document = _read(path, must_exist=True)
        found = [row for row in _rows(document) if tenant in ("", row.tenant) and _is(row, named)]
        if not found:
            whose = f" of {tenant}" if tenant else ""
            raise UserError(f"{path} has no key {named!r}{whose}; see `trunkline key list --file {path}`")
        if len(found) > 1:
            which = ", ".join(f"{row.tenant}/{row.name or row.digest[:12]}" for row in found)
            raise UserError(f"{named!r} may be each of {which}; say which with --tenant, or by its digest")
        [row] = found
        place = document["tenants"][row.tenant]
        # The empty list stays: it says that keys are needed, also when there are none.
        place["keys"] = [entry for entry in place["keys"] if _row(row.tenant, entry).digest != row.digest]
        _write(path, document)
    return row


def _is(row: Row, named: str) -> bool:
    return named == row.name or (len(named) >= _DIGITS_MIN and row.digest.startswith(named.lower()))


def _rows(document: dict[str, Any]) -> list[Row]:
    return [
        _row(tenant, entry)
        for tenant, said in document.get("tenants", {}).items()
        for entry in said.get("keys", [])
    ]


def _row(tenant: str, entry: str | dict[str, Any]) -> Row:
    if isinstance(entry, str):
        entry = {"sha256": entry}
    return Row(
        tenant,
        entry.get("name", ""),
        entry.get("role", KeyRole.USER.value),
        entry["sha256"].lower(),
        entry.get("expires") or "",
        entry.get("created", ""),
        entry.get("gateway", False),
    )


def _read(path: Path, *, must_exist: bool = False, note: str = "; nothing was changed") -> dict[str, Any]:
    try:
        text = path.read_bytes()
        if len(text) > BYTES_MAX:
            raise ValueError(f"it has more than {BYTES_MAX} bytes")
        parse_rules(text, NO_LIMITS)
        document: dict[str, Any] = msgspec.json.decode(text)
    except FileNotFoundError:
        if must_exist:
            advice = f"`trunkline key new --tenant NAME --file {path}` makes it"
            raise UserError(f"{path} does not exist; {advice}") from None
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or error}{note}") from None
    return document


def _write(path: Path, document: dict[str, Any]) -> None:
    text = msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        parse_rules(text, NO_LIMITS)
        write_private(new, text)
        new.replace(path)
    except (OSError, ValueError) as error:
        new.unlink(missing_ok=True)
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or error}; nothing was changed") from None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other commands from changing the folder's key files meanwhile."""
    try:
        folder = os.open(path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; nothing was changed") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _moment(text: str, now: datetime) -> datetime:
    span = _SPAN.fullmatch(text)
    try:
        if span is not None:
            return now + timedelta(hours=int(span[1]) * _HOURS[span[2]])
        moment = datetime.fromtimestamp(parse_time(text, "--expires"), UTC)
    except (ValueError, OverflowError):
        raise UserError(
            f"--expires is {text!r}; allowed are spans such as 12h, 90d, 4w, 1y, and times such as "
            "2027-01-31T12:00:00Z"
        ) from None
    if moment <= now:
        raise UserError(f"--expires is {text}, which is over already")
    return moment


def _written(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@app.command()
def wire(
    file: Annotated[Path, typer.Argument(help="The file of keys; only its owner can read it.")],
    rotate: Annotated[bool, typer.Option("--rotate", help="Add new keys before those in the file.")] = False,
    retire: Annotated[
        bool, typer.Option("--retire", help="Remove all keys but the newest from the file.")
    ] = False,
    part: Annotated[
        str,
        typer.Option(
            metavar="PART",
            help=f"Copy to FILE the keys in --of that one part needs: {', '.join(PARTS)}.",
            show_default=False,
        ),
    ] = "",
    of: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The file of the whole cluster, for --part.", show_default=False),
    ] = None,
) -> None:
    """Make the keys of connections between hosts, for --wire-keys.

    A process that has the file can connect to the cluster: copy it to the hosts
    in a way that others cannot read. Keys can be changed while the cluster
    runs: use --rotate, copy the file to all hosts and restart the groups; then
    use --retire, and copy it again.

    [bold]Examples[/]

    trunkline key wire cluster.keys

    trunkline key wire router.keys --part router --of cluster.keys

    trunkline key wire cluster.keys --rotate
    """
    typer.echo(run(lambda: _wire(file, rotate, retire, part, of)))


def _wire(file: Path, rotate: bool, retire: bool, part: str, of: Path | None) -> str:
    if rotate + retire + bool(part) > 1:
        raise UserError("--rotate, --retire and --part exclude each other; give one of them")
    if bool(part) != (of is not None):
        raise UserError("--part says what FILE is to hold, --of which file it is taken from; give both or none")
    if part and part not in PARTS:
        raise UserError(f"--part is {part!r}; allowed are {', '.join(PARTS)}")
    try:
        keys = _keys(file, rotate, retire, part, of)
        write(keys, file, overwrite=rotate or retire)
    except WireKeysError as error:
        raise UserError(str(error)) from None
    held = f"for {part}" if part else "for a whole cluster"
    return f"{file}: wire keys {held} ({keys.names})"


def _keys(file: Path, rotate: bool, retire: bool, part: str, of: Path | None) -> WireKeys:
    if rotate:
        return load(file).rotated()
    if retire:
        return load(file).retired()
    if of is not None:
        return load(of).part(PARTS[part])
    return generate()
