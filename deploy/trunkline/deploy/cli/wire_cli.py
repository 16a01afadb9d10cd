"""`trunkline key wire`: make, change and divide the keys of connections between a cluster's hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trunkline.deploy.errors import UserError
from trunkline.deploy.reporting import run
from trunkline.runtime.wire_keys import PARTS, WireKeys, WireKeysError, generate, load, write


def add_to(app: typer.Typer) -> None:
    """Add the command to the app, as `wire`."""
    app.command(name="wire")(wire)


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
