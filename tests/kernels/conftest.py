"""The implementations as a parameter: a test that takes `kernels` or `implementation` runs once with each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kernels.implementations import NAMES, NATIVE, make_kernels

from trunkline.kernels.ops import Kernels


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Last, so that it varies fastest: what a test caches for its other parameters serves all implementations."""
    if "implementation" in metafunc.fixturenames:
        # The levels are one source: under sanitizers the widest and the narrowest vectors say it all.
        ends = {NATIVE[0], NATIVE[-1]} if NATIVE else set()
        marks = {name: [pytest.mark.sanitized] if name in ends else [] for name in NAMES}
        metafunc.parametrize("implementation", [pytest.param(name, marks=marks[name]) for name in NAMES])


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
