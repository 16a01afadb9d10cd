"""Configuration of one rank: a JSON file, written by the launcher or by the operator who starts the rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

import msgspec

from trunkline.kvstore.chunk_format import KV_DTYPES, type_name
from trunkline.runtime.wire_keys import Role, problem_of
from trunkline.worker.errors import WorkerConfigError

DTYPES: Final = ("float32", "bfloat16", "float16")
DEVICES: Final = ("cpu", "cuda")
COLLECTIVES: Final = ("auto", "gloo", "shared", "symmetric")


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a rank must know before it starts; nothing is read from the environment."""

    model: str
    """Folder of a Hugging Face checkpoint: config.json and safetensors."""
    plan_endpoint: str
    """ZeroMQ endpoint of the controller's XPUB socket, to connect to."""
    report_endpoint: str
    """ZeroMQ endpoint of the controller's PULL socket, to connect to."""
    rank: int = 0
    tp: int = 1
    """Number of ranks in the group."""
    group: str = "group-0"
    """Name of the group, for titles and logs."""
    device: str = "cpu"
    gpu: int | None = None
    """Index of this rank's GPU among those that its process can see (`CUDA_VISIBLE_DEVICES` chooses and renumbers
    them); needed if `device` is "cuda"."""
    gpu_memory_fraction: float = 0.9
    """Share of the GPU's total memory that this rank may use, for weights, KV and everything else."""
    dtype: str = "float32"
    """Type of weights and activations, and of KV if `kv_dtype` is "auto". Float32 by default: greedy output then
    does not depend on caching."""
    kv_dtype: str = "auto"
    """Type in which KV is kept, one of `chunk_format.KV_DTYPES`; 8 bits have a scale for each head and token."""
    kernels: str = "auto"
    """Name of the kernels, one of `trunkline.kernels.load.KERNEL_NAMES`."""
    cuda_graphs: bool = True
    """Whether decode steps on a GPU are captured as graphs. That takes some time at the start and some memory, and
    spares the host nearly all of its work in a step."""
    invariant_rows: bool = False
    """Whether a row's logits are to be the same bits whatever else is in its step, its own drafts among it: with
    compiled kernels on a CPU they then are, in bfloat16, too."""
    quantisation: Literal["", "int8"] = ""
    """How the layers' weights are quantised while they are loaded: "int8" (per output channel), or "" for none."""
    expert_parallel: bool = True
    """Whether each rank has whole experts of a mixture, or else a part of every one."""
    collectives: str = "auto"
    """The means by which ranks exchange data: "auto" is NCCL between GPUs, small sums through symmetric memory if
    they have it, and shared memory (or else gloo) between CPUs; "shared" insists on shared memory; "gloo" works
    everywhere, also for ranks that share a GPU, which NCCL refuses; "symmetric" insists on symmetric memory, with
    gloo for all else."""
    chunk_size: int = 64
    """Number of tokens per block; the controller's value."""
    pool_blocks: int = 0
    """Number of blocks of the KV pool; 0: as many as `kv_memory_bytes`, or on a GPU its memory, allows."""
    kv_memory_bytes: int = 0
    """Bytes of the KV pool; ignored if `pool_blocks` is given. If both are 0, a GPU takes what
    `gpu_memory_fraction` leaves beside the weights and the largest step; on a CPU one of them must be given."""
    window_share: float = 1.0
    """Share of the pool's blocks that can hold KV of layers with a window at once, where other layers see all
    tokens (`trunkline.kernels.thin_memory`). Less than 1: more blocks fit into the same memory. On CPUs."""
    host_memory_bytes: int = 0
    """Main memory for KV blocks outside the pool (preemption by swapping); 0: none."""
    disk_path: str = ""
    """This rank's slab file below the host pool; "": none."""
    disk_bytes: int = 0
    """Largest size of the slab file; 0: no disk tier."""
    remote_url: str = ""
    """URL of a store that all controllers share (`redis://…`); "": none."""
    remote_ttl_s: float = 7 * 86400.0
    """Seconds without a write after which the remote tier forgets a chunk; 0: never."""
    tier_fingerprint: str = ""
    """Hexadecimal digest of everything that KV in the tiers depends on besides the tokens
    (`trunkline.kvstore.fingerprint`). A tier below the host pool never gives a rank KV that was written under
    another fingerprint."""
    exchange_fingerprint: str = ""
    """Hexadecimal digest of everything that KV depends on besides tokens, rank and number of ranks
    (`trunkline.kvstore.fingerprint`): the rank may pull chunks from peers where it is equal. "": from none."""
    export: str = ""
    """ZeroMQ endpoint at which peers may ask for the chunks in this rank's host memory; `tcp://ADDRESS:FIRST-LAST`
    takes the first of these ports that is free, `tcp://ADDRESS:*` any free one. "": the rank exports none."""
    export_host: str = ""
    """Host under which peers reach `export`; "": the address in it."""
    io_threads: int = 4
    """Threads that read and write a tier below the host pool, for each such tier."""
    max_context: int = 0
    """Longest sequence in tokens; 0: the model's own limit."""
    token_budget: int = 1024
    """Largest number of tokens of one step; with `max_rows` it decides how much memory of a GPU steps need. The
    controller that welcomes the rank tells its own budget, which then counts instead."""
    max_rows: int = 256
    """Largest number of sequences that decode in one step."""
    rendezvous: str = ""
    """`init_method` of torch.distributed, such as `tcp://127.0.0.1:29500`; needed for collectives."""
    is_spread: bool = False
    """Whether the group runs on several hosts: `rendezvous` is then tcp://HOST:PORT, where rank 0 listens."""
    model_fingerprint: str = ""
    """Hexadecimal digest of configuration and weights as they are computed with. The controller refuses a rank
    whose digest differs from its own. "": not compared."""
    status_path: str = ""
    """Socket of the supervisor, to which this process reports its status (`trunkline.runtime.process`); "":
    none."""
    threads: int = 1
    """Compute threads of this rank: its share of the cores."""
    epoch: int = 1
    """Epoch of the group; plans of another epoch are refused. In a rank's process the epoch that the controller
    tells it replaces this value (`of_epoch`)."""
    wire_keys: str = ""
    """File of the keys of sockets between hosts (`trunkline key wire`); "": there are no keys."""
    plain_tcp: bool = False
    """Whether sockets between hosts have no keys: for tests, and for networks that no other machine can reach."""
    log_level: str = "info"
    log_format: str = "auto"
    """Format of log lines: "json", "text", or "auto": text on a terminal."""
    otlp_endpoint: str = ""
    """Collector that spans are sent to; "": as OpenTelemetry's environment variables say
    (`runtime/tracing.py`)."""
    parent_pid: int = 0
    """Process whose end ends this rank; 0: none."""

    @property
    def group_label(self) -> str | int:
        """Return the group's label in log lines: its number if the name is `group-NUMBER`, else the name."""
        number = self.group.removeprefix("group-")
        return int(number) if number.isdecimal() else self.group

    def of_epoch(self, epoch: int) -> WorkerConfig:
        """Return the configuration of a rank of this epoch. Ranks that meet by a file get a new one in each
        epoch, so that they never read what an earlier epoch left there."""
        is_file = self.rendezvous.startswith("file:")
        meeting = f"{self.rendezvous}-{epoch}" if is_file else self.rendezvous
        return msgspec.structs.replace(self, epoch=epoch, rendezvous=meeting)

    @property
    def terms(self) -> dict[str, str]:
        """Return the settings that must be equal on the controller and on all ranks, by name."""
        terms = {
            "tp": str(self.tp),
            "dtype": type_name(self.dtype, self.kv_dtype),
            "chunk_size": str(self.chunk_size),
            "max_context": str(self.max_context),
            "model": self.model_fingerprint,
        }
        return {name: value for name, value in terms.items() if value not in ("", "0")}

    def validate(self) -> None:
        """Check every rule; each has a sentence that names the field, its value and what is allowed.

        Raises:
            WorkerConfigError: The first rule that does not hold.
        """
        for holds, sentence in (*self._rules(), *self._tier_rules()):
            if not holds:
                raise WorkerConfigError(sentence)
        endpoints = [self.plan_endpoint, self.report_endpoint, *([self.export] if self.export else [])]
        if problem := problem_of(endpoints, self.wire_keys, Role.WORKER, plain_tcp=self.plain_tcp):
            raise WorkerConfigError(problem)

    def _rules(self) -> tuple[tuple[bool, str], ...]:
        return (
            *self._at_least(1, "tp", "max_rows", "threads"),
            *self._at_least(0, "pool_blocks", "host_memory_bytes", "max_context"),
            *self._one_of(DEVICES, "device"),
            *self._one_of(DTYPES, "dtype"),
            *self._one_of(KV_DTYPES, "kv_dtype"),
            *self._one_of(COLLECTIVES, "collectives"),
            (
                0 < self.window_share <= 1,
                f"window_share is {self.window_share:g}; it must be more than 0 and at most 1",
            ),
            (
                self.window_share == 1 or self.device == "cpu",
                f"window_share is {self.window_share:g}; less than 1 is for device cpu, given is {self.device}",
            ),
            (0 <= self.rank < self.tp, f"rank is {self.rank}; it must be in [0, {self.tp})"),
            (
                self.device != "cuda" or self.gpu is not None,
                "device is 'cuda', but gpu is not given; write the index of this rank's GPU, 0 for the first",
            ),
            (self.gpu is None or self.gpu >= 0, f"gpu is {self.gpu}; it must not be negative"),
            (
                0 < self.gpu_memory_fraction <= 1,
                f"gpu_memory_fraction is {self.gpu_memory_fraction:g}; it must be more than 0 and at most 1",
            ),
            (1 <= self.chunk_size <= 1024, f"chunk_size is {self.chunk_size}; allowed are 1 to 1024 tokens"),
            (
                self.pool_blocks > 0 or self.kv_memory_bytes > 0 or self.device == "cuda",
                "on a CPU, pool_blocks or kv_memory_bytes must be given",
            ),
            (self.token_budget >= 2, f"token_budget is {self.token_budget}; a step has at least 2 tokens"),
            (
                not self.is_spread or self.rendezvous.startswith("tcp://"),
                f"rendezvous is {self.rendezvous!r}; ranks of several hosts meet at tcp://HOST:PORT",
            ),
            (bool(self.rendezvous) or self.tp == 1, f"tp is {self.tp}; collectives need a rendezvous address"),
        )

    def _at_least(self, least: int, *names: str) -> Iterator[tuple[bool, str]]:
        bound = f"be at least {least}" if least else "not be negative"
        for name in names:
            value = getattr(self, name)
            yield value >= least, f"{name} is {value}; it must {bound}"

    def _one_of(self, allowed: tuple[str, ...], name: str) -> Iterator[tuple[bool, str]]:
        value = getattr(self, name)
        yield value in allowed, f"{name} is {value!r}; allowed: {', '.join(allowed)}"

    def _tier_rules(self) -> tuple[tuple[bool, str], ...]:
        has_disk, has_remote = bool(self.disk_bytes), bool(self.remote_url)
        return (
            *self._at_least(0, "disk_bytes", "remote_ttl_s"),
            (not has_disk or bool(self.disk_path), "disk_bytes is given, but no disk_path"),
            (
                self.host_memory_bytes > 0 or not (has_disk or has_remote),
                "a disk or remote tier needs a host pool above it: give host_memory_bytes",
            ),
            (
                bool(self.tier_fingerprint) or not (has_disk or has_remote),
                "a disk or remote tier needs a tier_fingerprint",
            ),
            *(
                (_is_hex(value), f"{name} is {value!r}; allowed: up to 64 pairs of hexadecimal digits")
                for name, value in (
                    ("tier_fingerprint", self.tier_fingerprint),
                    ("exchange_fingerprint", self.exchange_fingerprint),
                )
            ),
            (
                bool(self.exchange_fingerprint) or not self.export,
                f"export is {self.export!r}, but no exchange_fingerprint is given",
            ),
            (
                not self.export or self.export.startswith(("ipc://", "tcp://")),
                f"export is {self.export!r}; write ipc://PATH, tcp://ADDRESS:PORT or tcp://ADDRESS:*",
            ),
            (1 <= self.io_threads <= 64, f"io_threads is {self.io_threads}; allowed are 1 to 64"),
        )


def _is_hex(text: str) -> bool:
    try:
        return len(bytes.fromhex(text)) <= 64 and len(text) % 2 == 0
    except ValueError:
        return False


def load_config(path: Path) -> WorkerConfig:
    """Read and validate a configuration.

    Raises:
        WorkerConfigError: unreadable file, unknown or missing field, wrong type, forbidden value.
    """
    try:
        config = msgspec.json.decode(path.read_bytes(), type=WorkerConfig)
    except (OSError, msgspec.MsgspecError) as error:
        raise WorkerConfigError(f"{path}: {error}") from error
    config.validate()
    return config
