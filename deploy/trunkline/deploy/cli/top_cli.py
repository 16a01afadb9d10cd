"""`trunkline top`: the shell around `screen.py`."""

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
    str | None, typer.Option(help="Where the server is. Default: the cluster that runs on this machine.")
]
KeyFile = Annotated[
    str,
    typer.Option(help="File with a key of role admin. Default: TRUNKLINE_API_KEY, or the local cluster's own."),
]


def command(
    url: Url = None,
    api_key_file: KeyFile = "",
    interval: Annotated[float, typer.Option(help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one look and leave.")] = False,
) -> None:
    """Watch a cluster in the terminal: groups, tiers, hit rates, sessions. Ctrl-C leaves.

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
    """Ctrl-C: raises `KeyboardInterrupt`, and remembers that it came. Python drops an exception that a signal
    raises while an object is being finalised, and the command would stay.
    """

    def __init__(self) -> None:
        self.came = False
        signal.signal(signal.SIGINT, self._note)

    def _note(self, _signal: int, _frame: object) -> None:
        self.came = True
        raise KeyboardInterrupt


def _next(source: Source, last: Look) -> tuple[Look, RenderableType]:
    """A new look; if there is none, the last one, and what is wrong. A router may be replaced at any time."""
    try:
        look = source.look()
    except WatchError as error:
        return last, Group(Text(f"{error}; trying again", style="bold red"), Text(), screen(last))
    return look, screen(look)
