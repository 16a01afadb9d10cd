"""`trunkline top`: show a cluster in the terminal, again and again."""

from __future__ import annotations

import signal
import time
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from trunkline.deploy.errors import UserError
from trunkline.deploy.reporting import run
from trunkline.deploy.watch.screen import screen
from trunkline.deploy.watch.source import Look, Source, WatchError

Url = Annotated[
    str | None, typer.Option(help="Address of the server. Default: the cluster that runs on this machine.")
]
KeyFile = Annotated[
    str,
    typer.Option(help="File with a key of role admin. Default: TRUNKLINE_API_KEY, or the key of a local cluster."),
]


def command(
    url: Url = None,
    api_key_file: KeyFile = "",
    interval: Annotated[float, typer.Option(help="Seconds between two updates.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the figures once and exit.")] = False,
) -> None:
    """Watch groups, tiers, cache hits and sessions in the terminal; Ctrl-C leaves.

    [bold]Examples[/]

    trunkline top

    trunkline top --url https://llm.example.com --api-key-file admin.key

    trunkline top --once
    """
    run(lambda: _top(url, api_key_file, interval, once))


def _top(url: str | None, api_key_file: str, interval: float, once: bool) -> None:
    if not 0.2 <= interval <= 3600:
        raise UserError(f"--interval is {interval:g}; allowed are 0.2 to 3600 seconds")
    source = Source(url, api_key_file)
    console = Console(highlight=False)
    interrupt = _Interrupt()
    try:
        look = source.look()
        if once or not console.is_terminal:
            console.print(screen(look))
            return
        with Live(screen(look), console=console, screen=True, auto_refresh=False) as live:
            while not interrupt.came:
                time.sleep(interval)
                look, shown = _next(source, look)
                live.update(shown, refresh=True)
    except KeyboardInterrupt:
        return
    finally:
        source.close()


class _Interrupt:
    """Raise `KeyboardInterrupt` at Ctrl-C, and remember that it came.

    Python drops an exception that a signal raises while an object is being finalised, and the command would not
    end.
    """

    def __init__(self) -> None:
        self.came = False
        signal.signal(signal.SIGINT, self._note)

    def _note(self, _signal: int, _frame: object) -> None:
        self.came = True
        raise KeyboardInterrupt


def _next(source: Source, last: Look) -> tuple[Look, RenderableType]:
    """Return new figures and their screen; if the router does not answer, the last ones with the reason."""
    try:
        look = source.look()
    except WatchError as error:
        return last, Group(Text(f"{error}; trying again", style="bold red"), Text(), screen(last))
    return look, screen(look)
