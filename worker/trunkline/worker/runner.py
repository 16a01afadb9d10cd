"""Execution of step plans: everything a rank does apart from talking to the controller.

`Runner.execute` is the worker's whole life: state, batch, forward pass, sampling. All ranks execute every plan
in the same order; the controller has decided everything, so they never need to agree on anything but the
sampled ids, which rank 0 draws (design.md, idea 3).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import structlog
import torch

from trunkline.controller.messages import GrammarReady, StepResult
from trunkline.kernels.load import KernelsUnavailableError, load_kernels
from trunkline.kernels.ops import Kernels, KvPool
from trunkline.kernels.plan import PrefillPlan, WritePlan
from trunkline.kvstore.int32_codec import Int32Array, pack_int32, unpack_int32
from trunkline.worker.batch.batch import Batch, BatchBuilder
from trunkline.worker.batch.sequences import SequenceTable
from trunkline.worker.config import WorkerConfig
from trunkline.worker.errors import ConfigError, PlanError, WorkerError
from trunkline.worker.grammar.compiler import GrammarStore
from trunkline.worker.messages import CompileGrammar, StepPlan
from trunkline.worker.model.checkpoint import Progress, Shard, load_weights
from trunkline.worker.model.decoder import Decoder, make_kv_pool
from trunkline.worker.model.families import ModelConfig, check_model
from trunkline.worker.parallel.backend_errors import of_loading, words_of
from trunkline.worker.parallel.collectives import TensorParallel
from trunkline.worker.sampling.beams import BeamSearches
from trunkline.worker.sampling.sampler import Sampler
from trunkline.worker.sampling.selection import Selection, Selector
from trunkline.worker.startup.device_memory import (
    CudaMemory,
    MemoryMeter,
    MemoryUse,
    blocks_that_fit,
    gib,
    measured,
)
from trunkline.worker.startup.rehearsal import POOL_BLOCKS, StepLimits, rehearsal
from trunkline.worker.tiers.copier import Copier, CopyOptions
from trunkline.worker.tiers.host_pool import HostPool
from trunkline.worker.tiers.layer_gate import LayerTrace, StepGate

TORCH_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

log = structlog.get_logger()


class Runner:
    """One rank's state and model. Not thread-safe."""

    def __init__(
        self,
        config: WorkerConfig,
        decoder: Decoder,
        kernels: Kernels,
        group: TensorParallel,
        copying: CopyOptions | None = None,
    ) -> None:
        """See `load`, which makes the parts."""
        self._config = config
        self._decoder = decoder
        self._group = group
        self.kernels = kernels
        device = decoder.pool.data.device
        self._sequences = SequenceTable(self.num_blocks)
        self._batches = BatchBuilder(self._sequences, config.chunk_size, device)
        self._searches = BeamSearches()
        vocab_size = decoder.shard.config.vocab_size
        # Rank 0 alone samples, so it alone needs grammars.
        self._grammars = GrammarStore(Path(config.model), vocab_size) if group.rank == 0 else None
        self._sampler = Sampler(vocab_size, device, self._grammars)
        self._selector = Selector(group, self._sampler, self._searches, vocab_size, config.chunk_size)
        self.copier = _copier(config, decoder.pool, copying)
        """Between device and host pool; None without a host pool."""
        self.swap_us_per_block = 0.0
        """What one save and one load of a block take; 0 without a host pool."""
        self._step = 0

    @classmethod
    def load(
        cls,
        config: WorkerConfig,
        progress: Progress,
        meter: MemoryMeter | None = None,
        copying: CopyOptions | None = None,
    ) -> Runner:
        """Join the group, read the shard, allocate the pool.

        Args:
            meter: measures the device's memory; None: on a GPU `CudaMemory`, on a CPU nothing is measured.

        Raises:
            ConfigError: a configuration that can never work on this device.
            WorkerError: a model, a configuration or a group that does not work.
        """
        try:
            return cls._load(config, progress, meter, copying)
        except RuntimeError as error:
            found = of_loading(error)
            if found is None:
                raise
            raise found from error

    @classmethod
    def _load(
        cls,
        config: WorkerConfig,
        progress: Progress,
        meter: MemoryMeter | None,
        copying: CopyOptions | None,
    ) -> Runner:
        model = check_model(Path(config.model), config.tp, config.dtype)
        device = _device(config)
        if meter is None and device.type == "cuda":
            meter = CudaMemory(device)
        free_at_start = meter.total_and_free()[1] if meter is not None else 0
        progress("joining the group", 0.0)
        group = TensorParallel.connect(config, device)
        kernels = _kernels(config, config.threads)
        # The native kernels have threads of their own; torch's would wait for work by spinning on their cores.
        torch.set_num_threads(1 if kernels.name == "cpu" else config.threads)
        shard = Shard(model, config.rank, config.tp)
        dtype = TORCH_DTYPES[config.dtype]
        weights = load_weights(Path(config.model), shard, dtype, device, kernels, progress, config.quantisation)

        def make(config: WorkerConfig, blocks: int) -> Runner:
            pool = make_kv_pool(shard, blocks, config.chunk_size, dtype, device)
            return cls(config, Decoder(shard, weights, kernels, group, pool), kernels, group, copying)

        block_bytes = model.kv_block_bytes(config.chunk_size, config.tp, config.dtype)
        if meter is None:
            fitting = config.pool_blocks or config.kv_memory_bytes // block_bytes
        else:
            progress("running the largest step", 0.0)
            use = _rehearse(make, config, model, meter, free_at_start)
            fitting = blocks_that_fit(use, config, block_bytes)
            _log_memory(use, config, fitting * block_bytes)
        blocks = group.minimum(fitting)
        if blocks < 1:
            raise ConfigError("the KV pool has no room for a single block; give it more memory")
        runner = make(config, blocks)
        runner.warm_up()
        return runner

    @property
    def num_blocks(self) -> int:
        return self._decoder.pool.blocks

    @property
    def block_bytes(self) -> int:
        data = self._decoder.pool.data
        return data[0].numel() * data.element_size()

    @property
    def host_slots(self) -> int:
        """Blocks that the host pool holds."""
        return self.copier.host.capacity_slots if self.copier else 0

    @property
    def pool(self) -> KvPool:
        """The rank's KV."""
        return self._decoder.pool

    @property
    def weight_bytes_read(self) -> int:
        """Bytes that this rank read from the checkpoint's files."""
        return self._decoder.weights.bytes_read

    @property
    def model_path(self) -> str:
        return self._config.model

    @property
    def steps(self) -> int:
        """Plans executed so far: the number of the last one."""
        return self._step

    def close(self) -> None:
        """Leave the group, end what compiles grammars, give the host pool back. Nobody may use it any more."""
        self._group.close()
        if self._grammars is not None:
            self._grammars.close()
        if self.copier is not None:
            self.copier.close()

    def check(self) -> None:
        """
        Raises:
            CopyError: copies beside the steps have failed, so that the rank cannot go on.
        """
        if self.copier is not None:
            self.copier.check()

    def trace_layers(self, length: int = 10_000) -> LayerTrace:
        """Keep, from now on, when the last `length` layers were computed, loaded and saved.

        Raises:
            ConfigError: this rank has no host pool.
        """
        if self.copier is None:
            raise ConfigError("no layers are traced without a host pool")
        return self.copier.start_trace(length)

    def compile_grammar(self, request: CompileGrammar) -> None:
        """Begin to prepare a grammar beside the steps; on rank 0, `grammar_reports` then says how that went."""
        if self._grammars is not None:
            self._grammars.compile(
                request.grammar, request.kind, request.text, spaced=request.spaced, tenant=request.tenant
            )

    def forget_grammar(self, grammar: int) -> None:
        """No sequence uses the grammar any more."""
        if self._grammars is not None:
            self._grammars.forget(grammar)

    @property
    def is_compiling(self) -> bool:
        """Whether `grammar_reports` has something to say, now or soon."""
        return self._grammars is not None and self._grammars.pending

    def grammar_reports(self) -> list[GrammarReady]:
        """What became of grammars since the last call. Does not wait."""
        return self._grammars.poll() if self._grammars is not None and self._grammars.pending else []

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Meet torch's and the collectives' one-time costs now rather than in the first request, and measure what
        moving a block costs."""
        zero, two = np.zeros(1, dtype=np.int32), np.array([0, 1], dtype=np.int32)
        batch = Batch(
            ids=torch.zeros(1, dtype=torch.int64, device=self.pool.data.device),
            positions=torch.zeros(1, dtype=torch.int64, device=self.pool.data.device),
            num_rows=0,
            write=WritePlan(self._config.chunk_size, zero),
            decode=None,
            prefill=PrefillPlan(
                self._config.chunk_size, two, zero, two, zero, zero, np.ones(1, dtype=np.int32), zero, zero
            ),
            samples=[],
            samples_changed=False,
            logit_rows=None,
        )
        self._decoder.forward(batch)
        if self.copier is not None:
            self.swap_us_per_block = self.copier.measure()
        self.kernels.counters.reset()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult | None:
        """Run one step.

        Returns:
            The result on rank 0, None on the others.

        Raises:
            PlanError: a gap in the steps, another epoch, or a plan that does not fit the state. The rank's
                state is then undefined: it must stop.
            CopyError: blocks could not be copied; likewise.
        """
        started = time.perf_counter_ns()
        counters = self.kernels.counters
        copies_before, bytes_before = counters.decode_plans, counters.decode_bytes_read
        if plan.epoch != self._config.epoch:
            raise PlanError(f"plan of epoch {plan.epoch}; this rank belongs to epoch {self._config.epoch}")
        if plan.step != self._step + 1:
            raise PlanError(f"plan of step {plan.step} after step {self._step}: a plan was lost")
        self._apply(plan)
        gate = self._begin_copies(plan)
        batch = self._batches.build(plan)
        selection = self._run(batch, gate)
        self._step = plan.step
        if self._group.rank != 0:
            return None
        elapsed_us = (time.perf_counter_ns() - started) // 1000
        moved_us, moved_blocks = self.copier.take_moved() if self.copier else (0, 0)
        return StepResult(
            step=plan.step,
            epoch=plan.epoch,
            tokens=pack_int32(selection.tokens),
            elapsed_us=elapsed_us,
            logprobs=selection.logprobs,
            plan_copies=counters.decode_plans - copies_before,
            kv_bytes_read=counters.decode_bytes_read - bytes_before,
            beams=selection.beams,
            prompt_logprobs=selection.prompt_logprobs,
            moved_us=moved_us,
            moved_blocks=moved_blocks,
            waited_us=gate.waited_ns // 1000 if gate else 0,
        )

    def _apply(self, plan: StepPlan) -> None:
        """Who leaves, who joins, and which block tables grow."""
        self._sequences.apply(plan)
        if plan.leaves:
            gone = unpack_int32(plan.leaves).tolist()
            self._searches.remove(gone)
            self._sampler.forget(gone)
        for join in plan.joins:
            if join.beam_position is not None:
                self._searches.add(self._sequences[join.sequence])

    def _begin_copies(self, plan: StepPlan) -> StepGate | None:
        """Saves and loads are begun; the copies that beams left to do and then the plan's own are done.

        Returns:
            What the computation waits for; None without a host pool.
        """
        gate = None
        if self.copier is not None:
            gate = self.copier.begin(plan)
        elif plan.saves or plan.loads or plan.late_saves:
            raise PlanError("blocks are to be saved or loaded, but this rank has no host pool")
        for copies in (self._searches.take_copies(), unpack_int32(plan.copies, columns=4)):
            if not len(copies):
                continue
            if self.copier is not None and gate is not None:
                self.copier.before_copies(copies, gate)
            self._copy(copies)
        return gate

    def _copy(self, copies: Int32Array) -> None:
        try:
            self.kernels.copy_blocks(self.pool, copies)
        except ValueError as error:
            raise PlanError(str(error)) from error

    def _run(self, batch: Batch, gate: StepGate | None) -> Selection:
        """Forward pass, then the samples' tokens, the same on every rank."""
        for child in batch.children:
            self._searches.add(child)
        # A plan may only let sequences leave, or only copy blocks.
        logits = None
        if len(batch.ids):
            logits = self._decoder.forward(batch, None if gate is None or gate.is_open else gate)
        if self.copier is not None and gate is not None:
            self.copier.finish(gate)
        selection = self._selector.select(batch, logits, self._decoder.shard.vocab_start)
        if selection.tables_changed:
            self._batches.forget_plan()
        return selection


def _device(config: WorkerConfig) -> torch.device:
    """Return the compute device that the configuration gives this rank.

    Raises:
        ConfigError: there is no such GPU.
    """
    if config.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch finds no CUDA device")
    count = torch.cuda.device_count()
    if config.gpu is None or config.gpu >= count:
        raise ConfigError(f"gpu is {config.gpu}, but torch sees {count}; allowed: 0 to {count - 1}")
    device = torch.device("cuda", config.gpu)
    torch.cuda.set_device(device)
    return device


def _kernels(config: WorkerConfig, threads: int) -> Kernels:
    try:
        return load_kernels(config.kernels, config.device, threads)
    except KernelsUnavailableError as error:
        raise ConfigError(str(error)) from error


def _rehearse(
    make: Callable[[WorkerConfig, int], Runner],
    config: WorkerConfig,
    model: ModelConfig,
    meter: MemoryMeter,
    free_at_start: int,
) -> MemoryUse:
    """Run the largest steps once with hardly any pool. All ranks do so together.

    Raises:
        WorkerError: they do not fit what is free now beside the weights.
    """
    weights = meter.held()
    meter.begin_peak()
    longest = min(filter(None, (config.max_context, model.max_positions)))
    limits = StepLimits(config.token_budget, config.max_rows, longest, config.chunk_size)
    try:
        runner = make(msgspec.structs.replace(config, host_memory_bytes=0), POOL_BLOCKS)
        runner.pool.data.zero_()  # what is read is of no interest, but should be numbers
        for plan in rehearsal(limits, config.epoch):
            runner.execute(plan)
    except torch.OutOfMemoryError as error:
        raise WorkerError(
            f"a step of {limits.token_budget} tokens and {limits.max_rows} rows does not fit the GPU beside the "
            f"weights, which take {gib(weights)} GiB; give a smaller --token-budget or --max-batch, or more GPUs "
            f"(--tp). The error was: {words_of(error)}"
        ) from error
    peak = meter.peak()
    del runner
    gc.collect()  # a pool that is in a cycle of references would still take its memory
    return measured(meter, free_at_start, weights, peak)


def _log_memory(use: MemoryUse, config: WorkerConfig, kv_bytes: int) -> None:
    log.info(
        "GPU memory in GiB",
        total=gib(use.total),
        fraction=config.gpu_memory_fraction,
        weights=gib(use.weights),
        largest_step=gib(use.step),
        step_tokens=config.token_budget,
        step_rows=config.max_rows,
        nccl_and_kernels=gib(use.outside),
        kv=gib(kv_bytes),
        free_beside_kv=gib(use.available - kv_bytes),
    )
    if (
        not config.pool_blocks
        and not config.kv_memory_bytes
        and use.available < use.left(config.gpu_memory_fraction)
    ):
        log.warning("other processes use memory of this GPU that was meant for KV", available=gib(use.available))


def _copier(config: WorkerConfig, pool: KvPool, options: CopyOptions | None) -> Copier | None:
    """The tier below the device pool and what copies there, if memory was given to it."""
    if not config.host_memory_bytes:
        return None
    slots = config.host_memory_bytes // (pool.data[0].numel() * pool.data.element_size())
    if slots < 1:
        raise ConfigError("the host pool has no room for a single block; give it more memory, or none")
    if options is None:
        options = CopyOptions(config.link_bytes_per_s, config.preload == "layerwise", config.async_saves)
    host, device = HostPool(slots, pool), pool.data.device
    return Copier(host, device, pool.blocks, lambda: _kernels(config, 1), options)
