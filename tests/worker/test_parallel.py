"""Tensor parallelism: shared memory does what gloo does, and whose fault a failed collective is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from seeds import seeds
from worker.collectives_rank import lose_the_last_rank, random_results
from worker.driver import run_config
from worker.ranks import run_ranks

from trunkline.kernels.native import ISA_VARIABLE, LIBRARY_VARIABLE, library
from trunkline.kernels.shared_group import CollectiveMismatchError, PeerGoneError
from trunkline.worker.collective_errors import of_collective
from trunkline.worker.errors import PeerLostError, WorkerConfigError, WorkerError
from trunkline.worker.tensor_parallel import TensorParallel

needs_library = pytest.mark.skipif(library() is None, reason="the compiled kernels are not installed")


@needs_library
@pytest.mark.processes
@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize("size", [2, 3])
def test_shared_memory_does_what_gloo_does(size: int, seed: int) -> None:
    """It is the default, too."""
    results = run_ranks(random_results, size, seed, "gloo", "auto=shared")
    for gloo, shared in results:
        assert len(shared) == len(gloo) > 0
        for ours, theirs in zip(shared, gloo, strict=True):
            # Equal but for sums, in which gloo rounds after each rank, in an order of its own.
            tolerance = 2e-2 if ours.dtype == torch.bfloat16 else 2e-3
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=5e-2)
            assert ours.dtype == theirs.dtype
    for ours, *others in zip(*(shared for _, shared in results), strict=True):
        for other in others:
            assert ours.shape != other.shape or torch.equal(ours, other)


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["gloo", pytest.param("shared", marks=needs_library)])
def test_a_killed_rank_ends_the_others_wait(backend: str) -> None:
    assert run_ranks(lose_the_last_rank, 3, backend) == [7, 7, -9]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("variable", "value"),
    [(LIBRARY_VARIABLE, "missing.so"), pytest.param(ISA_VARIABLE, "avx1024", marks=needs_library)],
)
def test_gloo_serves_where_a_rank_cannot_use_the_library(variable: str, value: str) -> None:
    """It is missing, or the level that is asked for does not exist. All ranks come to see it."""
    assert len(run_ranks(random_results, 2, 1, "auto=gloo", **{variable: value})[1][0]) > 0


NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77,"


@pytest.mark.parametrize(
    ("backend", "raised", "seen"),
    [
        ("shared", PeerGoneError("rank 1 is gone"), PeerLostError),
        ("shared", CollectiveMismatchError("calls differ"), WorkerError),
        ("shared", RuntimeError("not enough memory"), RuntimeError),
        ("nccl", torch.distributed.DistBackendError("NCCL error"), PeerLostError),
        (
            "nccl",
            torch.distributed.DistBackendError(f"{NCCL} ncclInvalidUsage: this is refused"),
            WorkerConfigError,
        ),
        ("nccl", torch.distributed.DistBackendError(f"{NCCL} ncclUnhandledCudaError: failed"), WorkerError),
        ("nccl", RuntimeError("not enough memory"), RuntimeError),
        ("gloo", RuntimeError("Connection closed by peer"), PeerLostError),
    ],
)
def test_only_what_peers_did_is_their_fault(
    backend: str, raised: RuntimeError, seen: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise raised

    names = ("all_reduce", "all_gather", "gather", "gather_columns", "broadcast")
    group = TensorParallel(0, 2, torch.device("cpu"), backend=backend)
    if backend == "shared":
        group._shared = SimpleNamespace(**dict.fromkeys(names, fail))  # type: ignore[assignment]
    else:
        for name in set(names) - {"gather_columns"}:
            monkeypatch.setattr(torch.distributed, name, fail)
    for call in (group.all_reduce, group.all_gather, group.gather_columns, group.broadcast):
        with pytest.raises((RuntimeError, WorkerError)) as caught:
            call(torch.ones(2, 2))
        assert type(caught.value) is seen


DUPLICATE = (
    f"{NCCL} invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.27.5\nncclInvalidUsage: This "
    "usually reflects invalid usage of NCCL library.\nLast error:\nDuplicate GPU detected : rank 0 and rank 1 "
    "both on CUDA device 18000\nException raised from create at /pytorch/torch/csrc/NCCLUtils.cpp:77 (most recent "
    "call first):\nframe #0: c10::Error::Error"
)
SYSTEM = (
    f"{NCCL} unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nncclSystemError: "
    "System call (e.g. socket, malloc) or external library call failed.\nLast error:\nsocketPollConnect: connect "
    "returned Connection refused"
)
GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:31415"


@pytest.mark.parametrize(
    ("backend", "raised", "words"),
    [
        ("nccl", torch.distributed.DistBackendError(DUPLICATE), "rank 0 and rank 1 both on CUDA device 18000"),
        ("nccl", torch.distributed.DistBackendError(SYSTEM), "connect returned Connection refused"),
        ("gloo", RuntimeError(GLOO), r"(gloo: Connection closed by peer [127.0.0.1]:31415)"),
    ],
)
def test_a_backend_s_own_words_are_kept(backend: str, raised: RuntimeError, words: str) -> None:
    """Without places in sources and stack frames, in one line."""
    text = str(of_collective(raised, backend))
    assert words in text
    assert not any(noise in text for noise in ("/pytorch", "frame #", "\n", "Exception raised"))


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (torch.distributed.DistBackendError(DUPLICATE), WorkerConfigError),
        (torch.distributed.DistBackendError(SYSTEM), WorkerError),
    ],
)
def test_what_nccl_refuses_at_the_meeting_can_never_work(
    raised: RuntimeError, seen: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And NCCL is given the device, so that it meets the others at once."""
    given: dict[str, object] = {}

    def refuse(backend: str, **options: object) -> None:
        given.update(options, backend=backend)
        raise raised

    monkeypatch.setattr(torch.distributed, "init_process_group", refuse)
    config = run_config(tmp_path, device="cuda", gpu=1, tp=2, rendezvous=f"file://{tmp_path}/rendezvous")
    with pytest.raises(WorkerError) as caught:
        TensorParallel.connect(config, torch.device("cuda", 1))
    assert type(caught.value) is seen
    assert given["backend"] == "nccl"
    assert given["device_id"] == torch.device("cuda", 1)


def test_shared_memory_asked_for_but_not_there(tmp_path: Path) -> None:
    config = run_config(tmp_path, collectives="shared", rendezvous=f"file://{tmp_path}/rendezvous")
    with pytest.raises(WorkerError, match="for CPU ranks; device is 'cuda'"):
        TensorParallel.connect(config, torch.device("cuda"))
