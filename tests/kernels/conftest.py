"""The implementations as a parameter: a test that takes `kernels` or `implementation` runs once with each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kernels.implementations import NAMES, REFERENCE, make_kernels

from trunkline.kernels.ops import Kernels


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Last, so that it varies fastest: what a test caches for its other parameters serves all implementations."""
    if "implementation" in metafunc.fixturenames:
        native = pytest.mark.sanitized
        metafunc.parametrize(
            "implementation", [name if name == REFERENCE else pytest.param(name, marks=native) for name in NAMES]
        )


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
