"""How a command ends that could not do what it was asked for: one line, and an exit code."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import typer
from rich.console import Console
from rich.text import Text

from trunkline.deploy.errors import DeployError

T = TypeVar("T")


def run(action: Callable[[], T]) -> T:
    """`action`, with errors meant for people turned into one line and an exit code."""
    try:
        return action()
    except DeployError as error:
        Console(stderr=True).print(Text.assemble(("Error: ", "bold red"), str(error)), soft_wrap=True)
        raise typer.Exit(error.exit_code) from error
