"""No test of the launcher touches the cache folder of the user who runs it, or depends on what the machine has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from deploy.commands import Serve, invoke

from trunkline.deploy.cli import serving
from trunkline.deploy.config import machine
from trunkline.deploy.config.settings import ServeSettings

ShowGpus = Callable[[int], None]


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that stands for `~/.cache`; it does not exist yet."""
    home = tmp_path / "cache-home"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home


@pytest.fixture
def show_gpus(monkeypatch: pytest.MonkeyPatch) -> ShowGpus:
    """Return a function that makes this process see so many GPUs."""

    def show(count: int) -> None:
        found = machine.Gpus(tuple(machine.Gpu("NVIDIA H200", 140 << 30) for _ in range(count)))
        monkeypatch.setattr(machine, "find_gpus", lambda: found)

    return show


@pytest.fixture(autouse=True)
def plain_machine(show_gpus: ShowGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Show no GPUs and no matrix registers, unless a test shows some."""
    show_gpus(0)
    monkeypatch.setattr(machine, "has_matrix_registers", lambda: False)


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Return a function that gives the settings with which a cluster would run."""

    def settings(text: str, *words: str, **environment: str) -> ServeSettings:
        seen: list[ServeSettings] = []
        monkeypatch.setattr(serving, "run_cluster", seen.append)
        (tmp_path / "serve.yaml").write_text(text)
        done = invoke(["serve", *words, "--config", str(tmp_path / "serve.yaml")], environment)
        assert done.exit_code == 0, done.stderr
        return seen[0]

    return settings
