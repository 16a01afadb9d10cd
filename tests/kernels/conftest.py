"""The CPU implementations as a parameter: a test that takes `kernels` or `implementation` runs once with each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kernels.implementations import CPU, SANITIZED, make_kernels

from trunkline.kernels.ops import Kernels


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise what chooses no implementations itself.

    It comes last and so varies fastest: what a test caches for its other parameters serves all implementations.
    """
    marks = metafunc.definition.iter_markers("parametrize")
    chosen = {name for mark in marks for name in _names(mark.args[0])}
    if "implementation" in metafunc.fixturenames and "implementation" not in chosen:
        sanitized = {name: [pytest.mark.sanitized] if name in SANITIZED else [] for name in CPU}
        metafunc.parametrize("implementation", [pytest.param(name, marks=sanitized[name]) for name in CPU])


def _names(names: str | list[str] | tuple[str, ...]) -> list[str]:
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


@pytest.fixture
def kernels(implementation: str) -> Kernels:
    return make_kernels(implementation)


@pytest.fixture(autouse=True, scope="module")
def torch_on_one_thread() -> Iterator[None]:
    """Operands are small: more threads cost more than they bring, above all where tests run side by side."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
