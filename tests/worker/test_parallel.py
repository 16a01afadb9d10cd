"""Tensor parallelism: real ranks give the logits of `transformers`; shared memory does what gloo does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from worker.checkpoints import make_checkpoint
from worker.driver import Stream, run_config
from worker.test_equality import LAYOUTS, largest_difference

from trunkline.controller.messages import TopLogprobs
from trunkline.kernels.native import ISA_VARIABLE, LIBRARY_VARIABLE, library
from trunkline.kernels.reference import ReferenceKernels
from trunkline.kernels.shared_group import CollectiveMismatchError, PeerGoneError
from trunkline.worker.backend_errors import of_collective
from trunkline.worker.errors import ConfigError, PeerLostError, WorkerError
from trunkline.worker.messages import Sampling
from trunkline.worker.model.checkpoint import Shard, load_weights
from trunkline.worker.model.families import check_model
from trunkline.worker.parallel.collectives import TensorParallel

TESTS = Path(__file__).parents[1]
CASES = {2: ("mha", "gqa", "mqa-tied", "biases", "llama3-rope"), 4: ("mha", "gqa", "mqa-tied")}
"""Head layouts with as many, fewer and far fewer KV heads than ranks; the vocabulary of 101 is padded."""


def run_ranks(script: str, size: int, folder: Path, *arguments: str, **environment: str) -> list[int]:
    """The exit codes of a script's ranks."""
    command = [sys.executable, str(TESTS / "worker" / script)]
    settings = {"PYTHONPATH": str(TESTS), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", **environment}
    ranks = [
        subprocess.Popen([*command, str(rank), str(size), str(folder), *arguments], env={**os.environ, **settings})
        for rank in range(size)
    ]
    try:
        return [rank.wait(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.parametrize("tp", [2, 4])
def test_logits_equal_transformers(tp: int, tmp_path: Path) -> None:
    folders = [make_checkpoint(tmp_path / name, **LAYOUTS[name]) for name in CASES[tp]]
    assert run_ranks("parallel_rank.py", tp, tmp_path, *map(str, folders)) == [0] * tp
    for folder in folders:
        data = (tmp_path / f"{folder.name}-{tp}.msgpack").read_bytes()
        reports = msgspec.msgpack.decode(data, type=list[tuple[list[int], list[int], list[TopLogprobs]]])
        for prompt, output, logprobs in reports:
            stream = Stream(0, prompt, Sampling(), [], output=output, logprobs=logprobs)
            assert len(output) >= 4
            assert largest_difference(folder, stream) <= 1e-4, folder.name


@pytest.mark.parametrize("name", ["mha", "gqa", "biases", "sharded"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_rank_reads_only_its_slices(name: str, tp: int, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / name, **LAYOUTS[name])
    config = check_model(folder, tp, "float32")
    device, kernels = torch.device("cpu"), ReferenceKernels()
    shards = [Shard(config, rank, tp) for rank in range(tp)]
    loaded = [load_weights(folder, shard, torch.float32, device, kernels, lambda *_: None) for shard in shards]
    hidden, head_dim = config.hidden_size, config.head_dim
    queries, keys = config.heads * head_dim // tp, max(1, config.kv_heads // tp) * head_dim
    mlp = config.intermediate_size // tp
    for shard, weights in zip(shards, loaded, strict=True):
        attention = (2 * queries + 2 * keys) * hidden
        biases = queries + 2 * keys + 2 * mlp + (2 * hidden if shard.rank == 0 else 0)
        layer = attention + 3 * mlp * hidden + 2 * hidden + (biases if config.mlp_bias else 0)
        vocabulary = len(range(*shard.vocab_rows.indices(config.vocab_size)))
        floats = config.layers * layer + hidden + 2 * vocabulary * hidden
        assert weights.bytes_read == 4 * floats
        head = weights.head
        assert (head.out_features, head.in_features) == (-(-config.vocab_size // tp), hidden)
    # Together the ranks hold every row of the vocabulary once, and zeros behind it.
    table = torch.cat([weights.embedding for weights in loaded])
    assert not table[config.vocab_size :].any()
    whole = load_weights(folder, Shard(config, 0, 1), torch.float32, device, kernels, lambda *_: None)
    assert torch.equal(table[: config.vocab_size], whole.embedding)


needs_library = pytest.mark.skipif(library() is None, reason="the compiled kernels are not installed")


@needs_library
@pytest.mark.parametrize("size", [2, 3])
def test_shared_memory_does_what_gloo_does(size: int, tmp_path: Path) -> None:
    seed = 40 + size
    print(f"seed {seed}")
    assert run_ranks("collectives_rank.py", size, tmp_path, str(seed), "gloo", "shared") == [0] * size
    gloo = [torch.load(tmp_path / f"gloo-{rank}.pt") for rank in range(size)]
    shared = [torch.load(tmp_path / f"shared-{rank}.pt") for rank in range(size)]
    for rank in range(size):
        assert len(shared[rank]) == len(gloo[rank]) > 0
        for ours, theirs in zip(shared[rank], gloo[rank], strict=True):
            # Equal but for sums, in which gloo rounds after each rank, in an order of its own.
            torch.testing.assert_close(
                ours, theirs, rtol=2e-2 if ours.dtype == torch.bfloat16 else 2e-3, atol=5e-2
            )
            assert ours.dtype == theirs.dtype
    for ours, others in zip(shared[0], zip(*shared[1:], strict=True), strict=True):
        for other in others:
            assert ours.shape != other.shape or torch.equal(ours, other)


@pytest.mark.parametrize("backend", ["gloo", pytest.param("shared", marks=needs_library)])
def test_a_killed_rank_ends_the_others_wait(backend: str, tmp_path: Path) -> None:
    assert run_ranks("collectives_rank.py", 3, tmp_path, "die", backend) == [7, 7, -9]


def test_gloo_serves_without_the_library(tmp_path: Path) -> None:
    missing = {LIBRARY_VARIABLE: str(tmp_path / "missing.so")}
    assert run_ranks("collectives_rank.py", 2, tmp_path, "1", "auto=gloo", **missing) == [0, 0]


@needs_library
def test_a_wrong_level_is_seen_by_all_ranks(tmp_path: Path) -> None:
    assert run_ranks("collectives_rank.py", 2, tmp_path, "1", "auto=gloo", **{ISA_VARIABLE: "avx1024"}) == [0, 0]


NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77,"


@pytest.mark.parametrize(
    ("backend", "raised", "seen"),
    [
        ("shared", PeerGoneError("rank 1 is gone"), PeerLostError),
        ("shared", CollectiveMismatchError("calls differ"), WorkerError),
        ("shared", RuntimeError("not enough memory"), RuntimeError),
        ("nccl", torch.distributed.DistBackendError("NCCL error"), PeerLostError),
        ("nccl", torch.distributed.DistBackendError(f"{NCCL} ncclInvalidUsage: this is refused"), ConfigError),
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
        (torch.distributed.DistBackendError(DUPLICATE), ConfigError),
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


@needs_library
def test_shared_memory_is_the_default(tmp_path: Path) -> None:
    assert run_ranks("collectives_rank.py", 2, tmp_path, "1", "auto=shared") == [0, 0]


def test_shared_memory_asked_for_but_not_there(tmp_path: Path) -> None:
    config = run_config(
        tmp_path, force_collectives=True, collectives="shared", rendezvous=f"file://{tmp_path}/rendezvous"
    )
    with pytest.raises(WorkerError, match="for CPU ranks; device is 'cuda'"):
        TensorParallel.connect(config, torch.device("cuda"))
