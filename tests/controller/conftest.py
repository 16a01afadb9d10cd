"""A controller process of a test's own, with a router by hand."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from controller.service_harness import Router, group_config, run_controller

from trunkline.controller.config import ControllerConfig


@pytest.fixture
def config(tmp_path: Path) -> ControllerConfig:
    return group_config(tmp_path)


@pytest.fixture
def running(config: ControllerConfig, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Router]]:
    with run_controller(config, tmp_path) as running:
        yield running


@pytest.fixture
def controller(running: tuple[subprocess.Popen[bytes], Router]) -> subprocess.Popen[bytes]:
    return running[0]


@pytest.fixture
def router(running: tuple[subprocess.Popen[bytes], Router]) -> Router:
    return running[1]
