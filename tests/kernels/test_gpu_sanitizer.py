"""The part `sanitizer` of the GPU benchmark: what the tool is given, with the emulated kernels; what it says."""

from __future__ import annotations

import io
import sys
from functools import partial
from pathlib import Path
from typing import Any

import gpu_checks
import gpu_sanitized
import gpu_sanitizer
import pytest
import torch
from gpu_device import Gpu, Output, Visit
from gpu_sanitized import PIECES, check_small
from gpu_sanitizer import Check
from gpu_visit import Findings
from kernels.cuda_emulated import CXX
from kernels.emulated_gpu import EmulatedGpu
from torch.utils._python_dispatch import TorchDispatchMode

from trunkline.kernels.cuda_layers import CudaLayers

pytestmark = pytest.mark.skipif(CXX is None, reason="no C++ compiler for the emulation")

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "einsum", "_grouped_mm", "_scaled_mm")


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the products that torch computes of numbers of 16 and 8 bits."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.called: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        if name.removesuffix("_v2") in PRODUCTS and any(each.dtype.itemsize < 4 for each in tensors):
            self.called.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("piece", PIECES)
def test_a_piece_is_right_and_has_no_product_of_torchs_that_the_tool_cannot_bear(
    piece: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Small chunks: the emulation takes its time for whole ones.
    monkeypatch.setattr(gpu_sanitized, "random_trial", partial(gpu_checks.random_trial, chunk=16))
    with Products() as products:
        assert check_small(EmulatedGpu(), torch.bfloat16, piece) == []
    assert products.called == []
    assert "computed: " in capsys.readouterr().out


def test_the_whole_round_has_such_products() -> None:
    """So the test before this one would notice them."""
    with Products() as products:
        errors = gpu_sanitized.small_errors(EmulatedGpu(), torch.bfloat16)
        while "mm" not in products.called:
            next(errors)


def test_what_is_wrong_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def noted(gpu: Gpu, seed: int, dtype: torch.dtype, head_dims: object, rows: int) -> list[tuple[str, float]]:
        assert rows == gpu_sanitized.ROWS
        return [("an op", 0.0), ("another", float(dtype == torch.float16))]

    monkeypatch.setattr(gpu_sanitized, "one_round", noted)
    assert check_small(EmulatedGpu(), torch.float32) == []
    assert check_small(EmulatedGpu(), torch.float16) == ["another in torch.float16 is off by 1.00e+00"]


def test_gates_that_are_wrong_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    activate = CudaLayers._activate
    monkeypatch.setattr(
        CudaLayers, "_activate", lambda self, _, gate_up: activate(self, "silu", gate_up), raising=True
    )
    bad = check_small(EmulatedGpu(), torch.bfloat16, "gates")
    assert [each.split()[0] for each in bad] == ["gate_gelu", "gate_gelu_tanh"]


TOOL = """#!/bin/sh
case "$2" in
memcheck) exec {memcheck};;
*) echo "computed: rms_norm"
   echo "========= {severity}: Race reported between Read access at f()+0x10"
   echo "=========     and Write access at f()+0x20 [19680 hazards]"
   echo "========="
   echo "========= {severity}: Race reported between Read access at f()+0x10"
   echo "=========     and Write access at f()+0x20 [7 hazards]"
   exit {code};;
esac
"""
RACE = "Race reported between Read access at f()+0x10 and Write access at f()+0x20"


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "compute-sanitizer"
    monkeypatch.setattr(gpu_sanitizer, "find_sanitizer", lambda: str(path))
    return path


def sanitized(tool: Path, text: str, visit: Visit) -> Findings:
    """What the part tells of a sanitizer that is this script."""
    tool.write_text(text)
    tool.chmod(0o755)
    stream = io.StringIO()
    gpu_sanitizer.sanitize(EmulatedGpu(), Output(stream), visit)
    found = Findings("part", "done", 0, "")
    found.read(stream.getvalue())
    return found


@pytest.mark.processes
@pytest.mark.parametrize(("severity", "code"), [("Warning", 0), ("Error", 9), ("Error", 0)])
def test_what_a_sanitizer_finds_is_told(severity: str, code: int, tool: Path) -> None:
    """Once, however often it is reported; an error is a problem, whatever the exit code, and a warning is not."""
    found = sanitized(tool, TOOL.format(memcheck="true", severity=severity, code=code), Visit(60))
    clean = [f"compute-sanitizer memcheck, {dtype}, done: nothing found" for dtype in ("bfloat16", "float32")]
    assert [note for note in found.notes if "memcheck" in note] == clean
    races = [text for text in (found.notes if severity == "Warning" else found.problems) if "racecheck" in text]
    assert {text.count(f"{severity}: {RACE}") for text in races} == {1}
    assert [text.split(", ")[2] for text in races[1:]] == list(PIECES), "each by its name"
    assert len(found.notes) + len(found.problems) == len(gpu_sanitizer.CHECKS)
    assert all("ended with code 9 behind rms_norm" in text for text in races) is (code == 9)


@pytest.mark.processes
def test_a_sanitizer_that_dies_says_where_and_the_other_pieces_are_told(tool: Path) -> None:
    """As it died on an H200."""
    text = """#!/bin/sh
case "$*" in
*norms)
   echo "computed: rms_norm"
   echo "computed: add_rms_norm"
   echo "========= Internal Sanitizer Error: The Sanitizer failed to handle a hardware exception."
   echo "========= "
   echo "terminate called after throwing an instance of 'c10::AcceleratorError'"
   exit 134;;
*) echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)";;
esac
"""
    found = sanitized(tool, text, Visit(60))
    assert found.problems == [
        "compute-sanitizer racecheck, bfloat16, norms, ended with code 134 behind add_rms_norm: "
        "Internal Sanitizer Error: The Sanitizer failed to handle a hardware exception."
    ]
    assert len(found.notes) == len(gpu_sanitizer.CHECKS) - 1
    assert all(note.endswith("done: nothing found") for note in found.notes)


def test_the_program_understands_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[torch.dtype, str]] = []
    monkeypatch.setattr(gpu_sanitized, "Gpu", lambda: None)
    monkeypatch.setattr(gpu_sanitized, "check_small", lambda _, dtype, piece: asked.append((dtype, piece)))
    for check in gpu_sanitizer.CHECKS:
        *_, program, dtype = command = gpu_sanitizer.command_of("tool", check._replace(piece=""))
        assert (Path(program), dtype) == (Path(gpu_sanitized.__file__), check.dtype)
        given = gpu_sanitizer.command_of("tool", check)
        monkeypatch.setattr(sys, "argv", given[len(command) - 2 :])
        gpu_sanitized.main()
    assert asked == [(getattr(torch, check.dtype), check.piece) for check in gpu_sanitizer.CHECKS]


@pytest.mark.processes
def test_a_sanitizer_that_is_stopped_tells_what_it_had_found(tool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_sanitizer, "CHECKS", (Check("memcheck", "float32"),))
    found = sanitized(tool, TOOL.format(memcheck="sleep 100", severity="", code=0), Visit(2))
    assert found.notes == ["compute-sanitizer memcheck, float32, stopped before its end: nothing found"]
    said = (
        "=========     Invalid __global__ read of size 4 bytes\n=========     at k()+0x10\n========= by thread 1"
    )
    assert gpu_sanitizer.findings(said) == ["Invalid __global__ read of size 4 bytes at k()+0x10"]
