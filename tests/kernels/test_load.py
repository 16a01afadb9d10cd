"""Choosing kernels: which ran must never be a guess."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernels.forests import Forest, one_row
from kernels.implementations import NATIVE
from kernels.oracle import make_spec
from structlog.testing import capture_logs

from trunkline.kernels import cuda_build, load, native
from trunkline.kernels.cpu import CpuKernels
from trunkline.kernels.load import KERNEL_NAMES, KernelsUnavailableError, load_kernels
from trunkline.kernels.native import ISA_VARIABLE, LIBRARY_VARIABLE, REINSTALL
from trunkline.kernels.ops import Kernels, KvPool
from trunkline.kernels.plan import WritePlan
from trunkline.worker.config import WorkerConfig
from trunkline.worker.device import choose_kernels
from trunkline.worker.errors import WorkerConfigError

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


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_no_slow_kernels_on_a_gpu_unless_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a GPU is and no library for it: the reason, what to install, and the name of the slow ones."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    monkeypatch.setattr(cuda_build, "prebuilt_library", lambda: None)
    monkeypatch.setattr(cuda_build, "find_compiler", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere")
    with capture_logs() as logs, pytest.raises(KernelsUnavailableError) as raised:
        load_kernels(name, "cuda")
    for words in ("no nvcc to compile them for sm_120", "'trunkline[nvcc]'", "--kernels reference"):
        assert words in str(raised.value)
    assert logs == []
    config = WorkerConfig(model="", plan_endpoint="", report_endpoint="", device="cuda", gpu=0, kernels=name)
    with pytest.raises(WorkerConfigError, match="--kernels reference"):  # the rank ends with code 2, for good
        choose_kernels(config, 1)
    assert load_kernels("reference", "cuda").name == "reference"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_its_kernels_are_refused() -> None:
    with pytest.raises(KernelsUnavailableError, match=r"torch finds no CUDA device here.*--kernels reference"):
        load_kernels("auto", "cuda")


@needs_native
@pytest.mark.parametrize("level", NATIVE)
def test_the_environment_forces_a_level(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, level)
    kernels = load_kernels("auto", "cpu")
    assert isinstance(kernels, CpuKernels)
    assert kernels.isa == level
    assert CpuKernels(isa=NATIVE[-1]).isa == NATIVE[-1], "what is asked for explicitly comes first"


@needs_native
@pytest.mark.sanitized
def test_other_levels_are_refused() -> None:
    """Those that no processor has, that this one has not, and that were not compiled, as for the sanitizers."""
    module = native.library()

    def runs(level: int) -> bool:
        try:
            module.cpu_context_delete(module.cpu_context_new(level, 1))
        except ValueError:
            return False
        return True

    best = module.cpu_level()
    running = {level for level in range(-1, len(native.ISA_LEVELS) + 1) if runs(level)}
    assert {0, best} <= running <= set(range(best + 1))
    assert native.isa_levels() == tuple(native.ISA_LEVELS[level] for level in sorted(running, reverse=True))
    beyond = len(native.ISA_LEVELS)
    with pytest.raises(ValueError, match=f"level {beyond} does not run here"):
        module.cpu_context_new(beyond, 1)


@pytest.fixture
def fresh_library() -> Iterator[None]:
    """The library is looked for again, here and afterwards."""
    native.library.cache_clear()
    yield
    native.library.cache_clear()


@pytest.mark.usefixtures("fresh_library")
@pytest.mark.parametrize("name", ["auto", "cpu"])
@pytest.mark.parametrize(("exists", "reason"), [(False, "does not exist"), (True, "cannot be loaded")])
def test_an_unusable_library_is_no_missing_one(
    exists: bool, reason: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "other.so"
    if exists:
        path.write_text("no library")
    monkeypatch.setenv(LIBRARY_VARIABLE, str(path))
    with pytest.raises(KernelsUnavailableError, match=f"other.so {reason}.*correct or unset {LIBRARY_VARIABLE}"):
        load_kernels(name, "cpu")


@needs_native
@pytest.mark.usefixtures("fresh_library")
def test_a_library_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "INTERFACE_VERSION", native.INTERFACE_VERSION + 1)
    with pytest.raises(
        KernelsUnavailableError, match=f"was built from other sources; .*({re.escape(REINSTALL)}|unset)"
    ):
        load_kernels("auto", "cpu")


@needs_native
def test_a_wrong_level_is_no_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "avx1024")
    with pytest.raises(KernelsUnavailableError, match=f"'avx1024' does not.*correct or unset {ISA_VARIABLE}"):
        load_kernels("auto", "cpu")


TOO_MANY_THREADS = """
import resource
from trunkline.kernels.load import KernelsUnavailableError, load_kernels
load_kernels("cpu", "cpu")
pages = int(open("/proc/self/statm").read().split()[0])
used = pages * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), -1))
for _ in range(3):
    try:
        load_kernels("auto", "cpu", threads=1000)
    except KernelsUnavailableError as error:
        print(error)
print(load_kernels("auto", "cpu", threads=3).name)
"""


@needs_native
@pytest.mark.processes
def test_threads_that_cannot_be_started() -> None:
    done = subprocess.run([sys.executable, "-c", TOO_MANY_THREADS], capture_output=True, text=True, check=True)
    *errors, name = done.stdout.splitlines()
    assert len(errors) == 3
    for error in errors:
        assert error.startswith("1000 threads cannot be started")
        assert "use fewer threads" in error
    assert name == "cpu"


@needs_native
def test_an_op_keeps_what_it_needs_alive() -> None:
    kernels = CpuKernels(threads=2)
    layer, linear = kernels.pack_linear(torch.eye(64), None), kernels.linear
    context = weakref.ref(kernels.context)
    del kernels
    gc.collect()
    assert context() is not None
    x = torch.arange(128.0).view(2, 64)
    assert torch.equal(linear(x, layer), x)
    del linear
    gc.collect()
    assert context() is None


@needs_native
def test_concurrent_use_is_refused() -> None:
    kernels, weight, stop = CpuKernels(), torch.ones(16), threading.Event()
    busy: Any = native.library().limit_multiply
    busy.release_gil = True

    def occupy() -> None:
        while not stop.is_set():
            try:
                busy(kernels.context.handle, weight, 10_000)
            except RuntimeError:  # the other one was first
                continue

    def call_often() -> None:
        for _ in range(1_000_000):
            kernels.rms_norm(torch.ones(2, 16), weight, 1e-5)

    thread = threading.Thread(target=occupy)
    thread.start()
    try:
        with pytest.raises(RuntimeError, match="in use by another thread"):
            call_often()
    finally:
        stop.set()
        thread.join()
    kernels.rms_norm(torch.ones(2, 16), weight, 1e-5)


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
