"""Execution of step plans: everything a rank does apart from talking to the controller.

`Runner.execute` is the worker's whole life: state, batch, forward pass, sampling. All ranks execute every plan
in the same order; the controller has decided everything, so they never need to agree on anything but the
sampled ids, which rank 0 draws (design.md, idea 3).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from trunkline.controller.messages import StepResult, TopLogprobs
from trunkline.kernels.load import KernelsUnavailableError, load_kernels
from trunkline.kernels.ops import Kernels, KvPool
from trunkline.kernels.plan import PrefillPlan, WritePlan
from trunkline.kvstore.layout import Int32Array, pack_int32, unpack_int32
from trunkline.worker.batch import Batch, BatchBuilder
from trunkline.worker.checkpoint import Progress, Shard, load_weights
from trunkline.worker.config import WorkerConfig
from trunkline.worker.decoder import Decoder, make_kv_pool
from trunkline.worker.errors import ConfigError, PlanError
from trunkline.worker.families import ModelConfig, check_model
from trunkline.worker.messages import StepPlan
from trunkline.worker.parallel import TensorParallel
from trunkline.worker.sampler import Sampler, first_argmax, is_plain_greedy
from trunkline.worker.sequences import SequenceTable

TORCH_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_GPU_SHARE: Final = 0.9
"""Part of the free GPU memory that the KV pool may take; activations need the rest."""


class Runner:
    """One rank's state and model. Not thread-safe."""

    def __init__(self, config: WorkerConfig, decoder: Decoder, kernels: Kernels, group: TensorParallel) -> None:
        """See `load`, which makes the parts."""
        self._config = config
        self._decoder = decoder
        self._group = group
        self.kernels = kernels
        device = decoder.pool.data.device
        self._sequences = SequenceTable(self.num_blocks)
        self._batches = BatchBuilder(self._sequences, config.chunk_size, device)
        self._vocab_size = decoder.shard.config.vocab_size
        self._sampler = Sampler(self._vocab_size, device)
        self._step = 0
        self._sampled_step = -1
        self._plain_greedy = False

    @classmethod
    def load(cls, config: WorkerConfig, progress: Progress) -> Runner:
        """Join the group, read the shard, allocate the pool.

        Raises:
            WorkerError: a model, a configuration or a group that does not work.
        """
        model = check_model(Path(config.model), config.tp, config.dtype)
        device = _device(config)
        progress("joining the group", 0.0)
        group = TensorParallel.connect(config, device)
        kernels = _kernels(config)
        # The native kernels have threads of their own; torch's would wait for work by spinning on their cores.
        torch.set_num_threads(1 if kernels.name == "cpu" else config.threads)
        shard = Shard(model, config.rank, config.tp)
        dtype = TORCH_DTYPES[config.dtype]
        weights = load_weights(Path(config.model), shard, dtype, device, kernels, progress)
        blocks = group.minimum(_pool_blocks(config, model, device))
        if blocks < 1:
            raise ConfigError("the KV pool has no room for a single block; give it more memory")
        pool = make_kv_pool(shard, blocks, config.chunk_size, dtype, device)
        runner = cls(config, Decoder(shard, weights, kernels, group, pool), kernels, group)
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
        """Leave the group."""
        self._group.close()

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Meet torch's and the collectives' one-time costs now rather than in the first request."""
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
        self.kernels.counters.reset()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult | None:
        """Run one step.

        Returns:
            The result on rank 0, None on the others.

        Raises:
            PlanError: a gap in the steps, another epoch, or a plan that does not fit the state. The rank's
                state is then undefined: it must stop.
        """
        started = time.perf_counter_ns()
        counters = self.kernels.counters
        copies_before, bytes_before = counters.decode_plans, counters.decode_bytes_read
        if plan.epoch != self._config.epoch:
            raise PlanError(f"plan of epoch {plan.epoch}; this rank belongs to epoch {self._config.epoch}")
        if plan.step != self._step + 1:
            raise PlanError(f"plan of step {plan.step} after step {self._step}: a plan was lost")
        self._sequences.apply(plan)
        copies = unpack_int32(plan.copies, columns=4)
        if len(copies):
            self._copy(copies)
        batch = self._batches.build(plan)
        tokens, logprobs = self._run(batch)
        self._step = plan.step
        if self._group.rank != 0:
            return None
        elapsed_us = (time.perf_counter_ns() - started) // 1000
        return StepResult(
            step=plan.step,
            epoch=plan.epoch,
            tokens=pack_int32(tokens),
            elapsed_us=elapsed_us,
            logprobs=logprobs,
            plan_copies=counters.decode_plans - copies_before,
            kv_bytes_read=counters.decode_bytes_read - bytes_before,
        )

    def _copy(self, copies: Int32Array) -> None:
        try:
            self.kernels.copy_blocks(self.pool, copies)
        except ValueError as error:
            raise PlanError(str(error)) from error

    def _run(self, batch: Batch) -> tuple[Int32Array, dict[int, TopLogprobs] | None]:
        """Forward pass and sampling; returns the sampled ids, the same on every rank."""
        # A plan may only let sequences leave, or only copy blocks.
        logits = self._decoder.forward(batch) if len(batch.ids) else None
        if logits is None:
            return np.zeros(0, dtype=np.int32), None
        reports = None
        if batch.samples_changed:
            self._plain_greedy = is_plain_greedy(batch.samples)
        if self._plain_greedy:
            ids = self._agree_on_largest(logits)
        else:
            whole = self._group.gather_columns(logits)
            if whole is None:
                ids = torch.empty(len(batch.samples), dtype=torch.int64, device=logits.device)
            else:
                whole = whole[:, : self._vocab_size]
                ids, reports = self._sampler.sample(whole, batch.samples, changed=self._sampler_is_stale(batch))
            self._group.broadcast(ids)
        tokens = ids.cpu().numpy().astype(np.int32)
        for sequence, token in zip(batch.samples, tokens.tolist(), strict=True):
            sequence.append(token)
        return tokens, reports

    def _sampler_is_stale(self, batch: Batch) -> bool:
        """The sampler keeps rows between steps; it must not have missed one."""
        stale = batch.samples_changed or self._sampled_step != self._step
        self._sampled_step = self._step + 1
        return stale

    def _agree_on_largest(self, logits: Tensor) -> Tensor:
        """Greedy ids from each rank's largest logits: one small collective instead of gather and broadcast.

        Every rank sees the same numbers, so all take the same id: the lowest on a tie, as ranks hold
        ascending parts of the vocabulary.
        """
        best = first_argmax(logits)
        if self._group.size == 1:
            return best
        ids = best + self._decoder.shard.vocab_start
        values = logits.gather(1, best[:, None]).squeeze(1)
        # float64 holds both a float32 logit and an id exactly.
        every = self._group.all_gather(torch.stack([values.double(), ids.double()]))
        owner = first_argmax(every[:, 0].T.contiguous())
        return every[:, 1].T.gather(1, owner[:, None]).squeeze(1).long()


def _device(config: WorkerConfig) -> torch.device:
    """The compute device of a rank: ranks of a group on one host take its GPUs in turn."""
    if config.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch finds no CUDA device")
    device = torch.device("cuda", config.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _kernels(config: WorkerConfig) -> Kernels:
    try:
        return load_kernels(config.kernels, config.device, config.threads)
    except KernelsUnavailableError as error:
        raise ConfigError(str(error)) from error


def _pool_blocks(config: WorkerConfig, model: ModelConfig, device: torch.device) -> int:
    """Blocks that this rank can hold."""
    if config.pool_blocks:
        return config.pool_blocks
    memory = config.kv_memory_bytes
    if not memory:
        free, _ = torch.cuda.mem_get_info(device)
        memory = int(free * _GPU_SHARE)
    return memory // model.kv_block_bytes(config.chunk_size, config.tp, config.dtype)
