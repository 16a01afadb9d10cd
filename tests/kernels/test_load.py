"""Choosing kernels: which ran must never be a guess."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernels.forests import Forest, one_row
from kernels.implementations import NATIVE
from kernels.oracle import make_spec
from structlog.testing import capture_logs

from trunkline.kernels import load
from trunkline.kernels.cpu import CpuKernels
from trunkline.kernels.load import KERNEL_NAMES, KernelsUnavailableError, load_kernels
from trunkline.kernels.native import ISA_VARIABLE, NativeLibraryError
from trunkline.kernels.ops import Kernels, KvPool
from trunkline.kernels.plan import WritePlan

needs_native = pytest.mark.skipif(not NATIVE, reason="the compiled kernels are not installed")


def test_unknown_kernels_are_named() -> None:
    with pytest.raises(KernelsUnavailableError, match=rf"'fast'.*{', '.join(KERNEL_NAMES)}"):
        load_kernels("fast", "cpu")
    with pytest.raises(KernelsUnavailableError, match="'cuda' do not run on device 'cpu'"):
        load_kernels("cuda", "cpu")
    assert load_kernels("reference", "cpu").name == "reference"


@needs_native
def test_native_kernels_are_the_default() -> None:
    with capture_logs() as logs:
        assert load_kernels("auto", "cpu").name == load_kernels("cpu", "cpu").name == "cpu"
    assert logs == []


def test_without_the_library_there_is_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "library", lambda: None)
    with capture_logs() as logs:
        assert load_kernels("auto", "cpu").name == "reference"
    assert [entry["log_level"] for entry in logs] == ["warning"]
    with pytest.raises(KernelsUnavailableError, match="reference"):
        load_kernels("cpu", "cpu")


@needs_native
@pytest.mark.parametrize("level", NATIVE)
def test_the_environment_forces_a_level(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, level)
    kernels = load_kernels("auto", "cpu")
    assert isinstance(kernels, CpuKernels)
    assert kernels.isa == level
    assert CpuKernels(isa=NATIVE[-1]).isa == NATIVE[-1], "what is asked for explicitly comes first"


@needs_native
def test_an_unknown_level_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "avx1024")
    with pytest.raises(NativeLibraryError, match=f"'avx1024' does not run here; there are: {', '.join(NATIVE)}"):
        CpuKernels()


def test_every_op_is_counted(kernels: Kernels) -> None:
    """By name, in the counters that the kernels hold when it is called."""
    spec, pool = make_spec(2, 1, 64), KvPool.wrap(torch.zeros(2, 1, 2, 1, 8, 64))
    forest = Forest(8, [one_row(8, 3)], np.zeros((0, 4), dtype=np.int32), 1)
    x, q, weight = torch.randn(3, 16), torch.randn(3, 2, 64), torch.randn(20, 16)
    linear, gated = kernels.pack_linear(weight, None), kernels.pack_gated_linear(weight, None, "silu")

    def run_all() -> None:
        qkv = torch.randn(3, 4 * 64)
        kernels.write_kv(WritePlan(8, np.arange(3, dtype=np.int32)), qkv, None, pool, 0, spec)
        kernels.decode_attention(forest.decode_plan(), q[:1], pool, 0, spec, torch.empty(1, 2, 64))
        kernels.prefill_attention(forest.prefill_plan([3]), q, pool, 0, spec, torch.empty(3, 2, 64))
        kernels.copy_blocks(pool, np.array([[0, 1, 0, 3]], dtype=np.int32))
        blocks, held = np.array([1], dtype=np.int32), torch.empty(1, 1, 2, 1, 8, 64)
        kernels.gather_blocks(pool, blocks, range(1), held)
        kernels.scatter_blocks(pool, blocks, range(1), held)
        kernels.rms_norm(x, x[0], 1e-5)
        kernels.add_rms_norm(x, x.clone(), x[0], 1e-5)
        kernels.linear(x, linear)
        kernels.gated_linear(x, gated)

    names = "write_kv decode_attention prefill_attention copy_blocks gather_blocks scatter_blocks".split()
    names += "rms_norm add_rms_norm linear gated_linear".split()
    for times in (1, 2):
        run_all()
        assert kernels.counters.calls == dict.fromkeys(names, times)
    counters = kernels.counters
    assert (counters.decode_plans, counters.decode_tokens_read, counters.prefill_tokens_read) == (2, 6, 6)
    assert counters.decode_bytes_read == 6 * 2 * 64 * 4
    counters.reset()
    run_all()
    assert kernels.counters.calls == dict.fromkeys(names, 1)
