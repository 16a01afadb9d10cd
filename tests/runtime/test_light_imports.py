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
def test_the_garbage_collector_of_a_role_begins_when_its_modules_are_imported() -> None:
    code = """
import gc, sys
from importlib.machinery import ModuleSpec
sys.modules["__main__"].__spec__ = ModuleSpec("trunkline.router.__main__", None)  # as for python -m
import trunkline.runtime.light_imports
assert not gc.isenabled()
from trunkline.runtime.process import enter_role
enter_role("router")
print(gc.isenabled(), gc.get_freeze_count() > 1000)
"""
    assert _said(code) == "True True"


@pytest.mark.processes
def test_imports_elsewhere_leave_the_garbage_collector_alone() -> None:
    assert _said("import gc, trunkline.runtime.light_imports; print(gc.isenabled())") == "True"
    for module in ("trunkline.worker.grammar.trial", "trunkline.deploy.cli.app"):  # which call no `enter_role`
        code = f"""
import gc, sys
from importlib.machinery import ModuleSpec
sys.modules["__main__"].__spec__ = ModuleSpec({module!r}, None)
import {module}
print(gc.isenabled())
"""
        assert _said(code) == "True"


@pytest.mark.processes
def test_a_worker_has_torch_without_what_traces_it_until_that_is_imported() -> None:
    code = """
import sys
import trunkline.worker.light_torch
import torch
assert "torch._meta_registrations" not in sys.modules
assert "torch._prims" not in sys.modules
assert (torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3)) == 3).all()
assert torch.randn(3).isfinite().all()
import torch._prims.rng_prims
assert torch.randn(3, generator=torch.Generator().manual_seed(0)).isfinite().all()
import torch._meta_registrations
shape = torch.ops.aten.convolution(
    torch.empty(1, 2, 5, 5, device="meta"), torch.empty(3, 2, 3, 3, device="meta"),
    None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1,
).shape
print(tuple(shape))
"""
    assert _said(code) == "(1, 3, 3, 3)"
