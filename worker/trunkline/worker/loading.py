"""Make a rank's runner: join the group, read the weights, choose the number of blocks, allocate the KV pool.

On a GPU the pool gets the memory that the weights and the largest steps leave. That is measured: these steps run
once with hardly any pool (`device.measure_largest_step`). On a CPU the configuration says how large the pool is.
All ranks have as many blocks as the one with the least room.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from trunkline.worker.collective_errors import of_loading
from trunkline.worker.config import WorkerConfig
from trunkline.worker.device import (
    TORCH_DTYPES,
    CudaMemory,
    MemoryMeter,
    choose_device,
    choose_kernels,
    longest_sequence,
    measure_largest_step,
)
from trunkline.worker.errors import WorkerConfigError
from trunkline.worker.model.checkpoint import Progress, load_weights
from trunkline.worker.model.decoder import Decoder
from trunkline.worker.model.families import check_model
from trunkline.worker.model.shard import Shard
from trunkline.worker.pool_memory import PoolMaker, make_copier
from trunkline.worker.runner import Runner
from trunkline.worker.step_graphs import CudaGraphs, GraphMaker
from trunkline.worker.tensor_parallel import TensorParallel
from trunkline.worker.tiers.copy_lane import CopyOptions

Connect = Callable[[WorkerConfig, torch.device], TensorParallel]


def load_runner(
    config: WorkerConfig,
    progress: Progress,
    meter: MemoryMeter | None = None,
    *,
    copying: CopyOptions = CopyOptions(),  # noqa: B008
    connect: Connect = TensorParallel.join,
    graphs: Callable[[], GraphMaker] = CudaGraphs,
) -> Runner:
    """Join the group, read the shard, allocate the pool, and return the runner, warmed up.

    Args:
        meter: Measures the device's memory. None: on a GPU `CudaMemory`, on a CPU nothing is measured.
        copying: How copies go on beside the computation; benchmarks compare other ways.
        connect: How this rank meets the others; tests on one GPU have collectives in a group of one.
        graphs: What captures decode steps, where CUDA kernels run them; tests emulate it.

    Raises:
        WorkerConfigError: A configuration that can never work on this device.
        WorkerError: A model, a configuration or a group that does not work.
    """
    try:
        return _load(config, progress, meter, copying, connect, graphs)
    except RuntimeError as error:
        found = of_loading(error)
        if found is None:
            raise
        raise found from error


def _load(
    config: WorkerConfig,
    progress: Progress,
    meter: MemoryMeter | None,
    copying: CopyOptions,
    connect: Connect,
    graphs: Callable[[], GraphMaker],
) -> Runner:
    model = check_model(
        Path(config.model), config.tp, config.dtype, config.max_context, expert_parallel=config.expert_parallel
    )
    device = choose_device(config)
    if meter is None and device.type == "cuda":
        meter = CudaMemory(device)
    free_at_start = meter.total_and_free()[1] if meter is not None else 0
    progress("joining the group", 0.0)
    group = connect(config, device)
    kernels = choose_kernels(config, config.threads)
    if model.latent is not None and kernels.name == "cuda":
        raise WorkerConfigError("latent attention has no CUDA kernels; use device cpu, or kernels reference")
    # The native kernels have threads of their own; torch's would wait for work by spinning on their cores.
    torch.set_num_threads(1 if kernels.name == "cpu" else config.threads)
    shard = Shard(model, config.rank, config.tp)
    dtype = TORCH_DTYPES[config.dtype]
    weights = load_weights(Path(config.model), shard, dtype, device, kernels, progress, config.quantisation)

    pools = PoolMaker(config, model, device)

    def make(blocks: int, host_memory_bytes: int) -> Runner:
        pool = pools.make(blocks)
        copier = make_copier(config, pool, host_memory_bytes, copying)
        return Runner(config, Decoder(shard, weights, kernels, group, pool), kernels, group, copier)

    longest = longest_sequence(config, model.max_positions)
    if meter is None:
        fitting = pools.fitting
    else:
        progress("running the largest step", 0.0)
        fitting = measure_largest_step(
            lambda blocks: make(blocks, 0),
            lambda runner: runner.capture_graphs(graphs, longest),
            config,
            longest,
            pools.part.chunk_bytes,
            meter,
            free_at_start,
        )
    blocks = group.minimum(fitting)
    if blocks < 1:
        raise WorkerConfigError("the KV pool has no room for a single block; give it more memory")
    runner = make(blocks, config.host_memory_bytes)
    runner.warm_up()
    progress("capturing graphs", 0.0)
    runner.capture_graphs(graphs, longest)
    return runner
