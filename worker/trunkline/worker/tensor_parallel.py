"""Tensor parallelism: how the ranks of a group join it, and their collectives.

One controller decides, the ranks compute shards as Megatron does (PagedAttention §4.6). There are three ways to
move the numbers, chosen when the group meets, the same on every rank:

- shared memory (`trunkline.kernels.shared_group`) for CPU ranks of one host: a few microseconds a call,
- gloo for CPU ranks of several hosts or without the compiled kernels; also the rendezvous of all CPU ranks,
- NCCL for GPUs, except that messages of up to a few megabytes are summed through memory that all GPUs read, where
  each can read the others' (`trunkline.worker.symmetric_sums`).

A group of one needs none of them. `rendezvous` says where ranks of several hosts meet, `collective_errors` what
errors mean.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

import structlog
import torch
import torch.distributed as dist
from torch import Tensor

from trunkline.kernels.native import NativeLibraryError, chosen_level
from trunkline.kernels.shared_group import GroupFileError, SharedGroup, create_file
from trunkline.worker.collective_errors import COLLECTIVE_ERRORS, hopeless, of_collective, of_peers, words_of
from trunkline.worker.config import WorkerConfig
from trunkline.worker.errors import WorkerError
from trunkline.worker.rendezvous import choose_interface, open_store
from trunkline.worker.symmetric_sums import TYPES, SymmetricSums, may_share_gpus, place_of, why_apart

_TIMEOUT: Final = datetime.timedelta(minutes=5)
"""Time limit of the rendezvous and of each collective. It bounds the wait for a peer that hangs, and must outlast
slow loading on one rank. A peer's death is noticed at once: its connections close, and its locks are given up."""

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
"""File with an id that is the same for all processes on one kernel, in whatever container they run."""

_T = TypeVar("_T")

log = structlog.get_logger()


class TensorParallel:
    """This rank's view of its group. Every method must be called by all ranks in the same order."""

    def __init__(self, rank: int, size: int, device: torch.device, *, backend: str) -> None:
        """Make a group over a backend that is set up already; see `connect` and `alone`."""
        self.rank = rank
        self.size = size
        self.device = device
        self.backend = backend
        """The transport of the collectives: "none", "shared", "gloo" or "nccl"."""
        self._shared: SharedGroup | None = None
        self._symmetric: SymmetricSums | None = None
        # Gloo works in the memory of the CPU; tensors of a GPU go through a copy there.
        self._staged = backend == "gloo" and device.type != "cpu"

    @classmethod
    def alone(cls, device: torch.device) -> TensorParallel:
        """A group of one without collectives."""
        return cls(0, 1, device, backend="none")

    @classmethod
    def join(cls, config: WorkerConfig, device: torch.device) -> TensorParallel:
        """Return the group that the configuration names. For more than one rank see `connect`."""
        return cls.alone(device) if config.tp == 1 else cls.connect(config, device)

    @classmethod
    def connect(cls, config: WorkerConfig, device: torch.device) -> TensorParallel:
        """Meet the other ranks, also in a group of one.

        Raises:
            WorkerConfigError: the backend refuses such a group, so it can never work.
            WorkerError: they did not come in time, the address cannot be used, or the collectives asked for do
                not work here.
        """
        for means, kind, name in (("shared", "cpu", "CPU"), ("symmetric", "cuda", "GPU")):
            if config.collectives == means and device.type != kind:
                raise WorkerError(
                    f"collectives is {means!r}, which is for {name} ranks; device is {device.type!r}"
                )
        store = None
        # Gloo otherwise connects through the address of the host's name, which containers may not have.
        if config.is_spread:
            choose_interface(config)
            store = open_store(config, _TIMEOUT)
        elif config.rendezvous.startswith(("tcp://127.", "tcp://localhost", "file:")):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        backend = "nccl" if device.type == "cuda" and config.collectives == "auto" else "gloo"
        try:
            dist.init_process_group(
                backend,
                init_method=None if config.is_spread else config.rendezvous,
                store=store,
                rank=config.rank,
                world_size=config.tp,
                timeout=_TIMEOUT,
                # NCCL then meets the other ranks here, so that what it refuses is said before anything is loaded.
                device_id=device if backend == "nccl" else None,
            )
        except (RuntimeError, ValueError) as error:
            reason = f"rank {config.rank} found no group at {config.rendezvous}: {words_of(error)}"
            raise (hopeless(error) or WorkerError(reason)) from error
        group = cls(config.rank, config.tp, device, backend=backend)
        if device.type == "cpu" and config.collectives != "gloo":
            group._share_memory(required=config.collectives == "shared")
        if device.type == "cuda" and config.tp > 1 and config.collectives in ("auto", "symmetric"):
            group._share_gpu_memory(config.dtype, required=config.collectives == "symmetric")
        return group

    def _share_memory(self, *, required: bool) -> None:
        """Go over to shared memory if every rank can; all ranks come to the same decision.

        Raises:
            WorkerError: not every rank can, though it is required.
        """
        shared, problem = _join_shared_group(self.rank, self.size)
        if shared is not None:
            self._shared, self.backend = shared, "shared"
        elif required:
            raise WorkerError(f"collectives is 'shared', but {problem}")
        elif self.rank == 0:
            log.warning("collectives go through gloo, which is slower than shared memory", reason=problem)

    def _share_gpu_memory(self, dtype: str, *, required: bool) -> None:
        """Sum small messages through the GPUs' memory if every rank can; all ranks come to the same decision.

        Args:
            dtype: The type of the messages, that of the model.

        Raises:
            WorkerError: not every rank can, though it is required.
        """
        self._symmetric, problem = _join_symmetric_sums(self, dtype)
        if problem and required:
            raise WorkerError(f"collectives is 'symmetric', but {problem}")
        if self._symmetric is not None and self.rank == 0:
            log.info("small sums go through symmetric memory", multicast=self._symmetric.multicast)
        elif self.rank == 0:
            log.warning("all sums go through NCCL, which takes longer for small messages", reason=problem)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place; `tensor` must be contiguous and is returned."""
        if self._shared is not None:
            # Dozens of times per step: no context manager here.
            try:
                self._shared.all_reduce(tensor)
            except COLLECTIVE_ERRORS as error:
                raise of_collective(error, self.backend) from error
        elif self._symmetric is not None and self._symmetric.add(tensor):
            return tensor
        elif self.backend != "none":
            with self._in_place(tensor) as operand, of_peers(self.backend):
                dist.all_reduce(operand)
        return tensor

    @property
    def shared_handle(self) -> int:
        """Handle of the group in the compiled library; 0 if sums do not go through shared memory."""
        return self._shared.handle if self._shared is not None else 0

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return every rank's tensor on every rank, `[size, *tensor.shape]`."""
        if self.backend == "none":
            return tensor[None]
        operand = self._operand(tensor)
        if self._shared is not None:
            with of_peers(self.backend):
                return self._shared.all_gather(operand)
        parts = [torch.empty_like(operand) for _ in range(self.size)]
        with of_peers(self.backend):
            dist.all_gather(parts, operand)
        return torch.stack(parts).to(self.device)

    def gather_columns(self, tensor: Tensor) -> Tensor | None:
        """Return all ranks' columns side by side on rank 0, `[rows, size * columns]`; None on the others."""
        if self.backend == "none":
            return tensor
        operand = self._operand(tensor)
        if self._shared is not None:
            with of_peers(self.backend):
                return self._shared.gather_columns(operand)
        parts = [torch.empty_like(operand) for _ in range(self.size)] if self.rank == 0 else None
        with of_peers(self.backend):
            dist.gather(operand, parts, dst=0)
        return torch.cat(parts, dim=1).to(self.device) if parts is not None else None

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Overwrite `tensor` in place with the tensor of rank 0; it must be contiguous and is returned."""
        if self._shared is not None:
            with of_peers(self.backend):
                self._shared.broadcast(tensor)
        elif self.backend != "none":
            with self._in_place(tensor) as operand, of_peers(self.backend):
                dist.broadcast(operand, src=0)
        return tensor

    def minimum(self, value: int) -> int:
        """Return the smallest value given by any rank."""
        return int(self.all_gather(torch.tensor([value], device=self.device)).min())

    def close(self) -> None:
        """Leave the group. Ranks that still wait for this one get `PeerLostError`."""
        if self._shared is not None:
            self._shared.close()
            self._shared = None
        self._symmetric = None
        if self.backend != "none":
            dist.destroy_process_group()
            self.backend = "none"

    def _operand(self, tensor: Tensor) -> Tensor:
        """Return the tensor, contiguous and in memory that the backend takes."""
        return tensor.cpu().contiguous() if self._staged else tensor.contiguous()

    @contextmanager
    def _in_place(self, tensor: Tensor) -> Iterator[Tensor]:
        """Yield a tensor that the backend may overwrite; `tensor` gets the result."""
        if not self._staged:
            yield tensor
            return
        copy = tensor.cpu()
        yield copy
        tensor.copy_(copy)


def _join_shared_group(rank: int, size: int) -> tuple[SharedGroup | None, str]:
    """Set up shared memory over the process group. Return the group, or None and why not; the same on every
    rank."""
    facts = _exchange((_BOOT_ID.read_text() if _BOOT_ID.exists() else None, _native_problem()), size)
    if None in (boot for boot, _ in facts) or len({boot for boot, _ in facts}) > 1:
        return None, "the ranks are not on one host"
    problem = _first_problem([problem for _, problem in facts])
    if problem:
        return None, problem
    path: Path | None = None
    if rank == 0:
        try:
            path = create_file(size)
        except GroupFileError as error:
            problem = str(error)
    shared: SharedGroup | None = None
    try:
        path_text, problem = _exchange((str(path or ""), problem), size)[0]
        if problem:
            return None, problem
        try:
            shared = SharedGroup(Path(path_text), rank, size, timeout_s=_TIMEOUT.total_seconds())
        except (GroupFileError, ValueError) as error:
            problem = str(error)
        problem = _first_problem(_exchange(problem, size))
    finally:
        if path is not None:
            path.unlink(missing_ok=True)
    if problem and shared is not None:
        shared.close()
    return (None, problem) if problem else (shared, "")


def _join_symmetric_sums(group: TensorParallel, dtype: str) -> tuple[SymmetricSums | None, str]:
    """Set up sums through the GPUs' memory, and try them. Return them, or None and why not; the same on every
    rank. No memory is taken for a type that could not be summed in it."""
    if getattr(torch, dtype) not in TYPES:
        return None, f"torch's kernels add {' and '.join(map(str, TYPES))}, and the model is in {dtype}"
    rank, size, device, backend = group.rank, group.size, group.device, group.backend
    host = _BOOT_ID.read_text() if _BOOT_ID.exists() else ""
    places = _exchange(place_of(device, host), size, backend)
    if problem := why_apart(places, may_share=may_share_gpus()):
        return None, problem
    sums: SymmetricSums | None = None
    try:
        sums = SymmetricSums.meet(device, size)
    except RuntimeError as error:
        problem = words_of(error)
    facts = _exchange((problem, sums is not None and sums.multicast), size, backend)
    problem = _first_problem([problem for problem, _ in facts])
    if problem or sums is None:
        return None, problem
    sums.multicast = all(multicast for _, multicast in facts)
    try:
        problem = sums.wrong_way(rank)
    except RuntimeError as error:  # a kernel that torch was built without, or does not run on this GPU
        problem = words_of(error)
    problem = _first_problem(_exchange(problem, size, backend))
    return (None, problem) if problem else (sums, "")


def _exchange(value: _T, size: int, backend: str = "gloo") -> list[_T]:
    """Return every rank's value, by rank."""
    values: list[_T] = [value] * size
    with of_peers(backend):
        dist.all_gather_object(values, value)
    return values


def _native_problem() -> str:
    """Return why this rank cannot use the compiled kernels; empty if it can."""
    try:
        chosen_level(None)
    except NativeLibraryError as error:
        return f"{error}; {error.remedy}"
    return ""


def _first_problem(problems: list[str]) -> str:
    return next((f"on rank {rank} {problem}" for rank, problem in enumerate(problems) if problem), "")
