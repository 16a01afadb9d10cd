"""Commands in the test's own process."""

from __future__ import annotations

from collections.abc import Callable

from typer.testing import CliRunner, Result

from trunkline.deploy.cli import app as cli
from trunkline.deploy.config.settings import ServeSettings

Serve = Callable[..., ServeSettings]
"""Returns the settings with which `serve` would run, from the text of its file, words and the environment."""


def invoke(words: list[str], environment: dict[str, str]) -> Result:
    """Run a command."""
    return CliRunner().invoke(cli.app, words, env={"COLUMNS": "160", "NO_COLOR": "1", **environment})
