"""What the processes of a cluster leave out of the libraries that they import."""

from __future__ import annotations

import subprocess
import sys

import pytest


def _said(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("role", ["router", "controller", "worker"])
@pytest.mark.processes
def test_no_role_imports_what_draws_tracebacks(role: str) -> None:
    code = (
        f"import sys, trunkline.{role}.__main__, structlog.dev; print({{'rich', 'pygments'}} & set(sys.modules))"
    )
    assert _said(code) == "set()"


@pytest.mark.processes
def test_a_worker_has_torch_without_what_traces_it_until_that_is_imported() -> None:
    code = """
import sys
import trunkline.worker.light_torch
import torch
assert "torch._meta_registrations" not in sys.modules
assert (torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3)) == 3).all()
assert torch.randn(3, generator=torch.Generator().manual_seed(0)).isfinite().all()
import torch._meta_registrations
shape = torch.ops.aten.convolution(
    torch.empty(1, 2, 5, 5, device="meta"), torch.empty(3, 2, 3, 3, device="meta"),
    None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1,
).shape
print(tuple(shape))
"""
    assert _said(code) == "(1, 3, 3, 3)"
