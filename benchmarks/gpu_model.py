"""A random model of 8 billion parameters in the real runner (part `model`): what a step takes, and where it goes.

Rows join with their context in the pool already (random numbers, which take as long as others), so that only
decode steps cost time here. Steps run as graphs, and op by op on the same runner in turn. Beside a step's time
stands what its matrix products alone would take as one graph: no step can be faster. In a server the next step is
launched before the tokens of this one are read; that is measured, too.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import torch
from gpu_device import Gpu, Output, Visit
from safetensors.torch import save_file

from trunkline.kernels.ops import PackedLinear
from trunkline.kvstore.chunks import blocks_for, pack_int32
from trunkline.worker.config import WorkerConfig
from trunkline.worker.loading import load_runner
from trunkline.worker.messages import Join, Sampling, StepPlan
from trunkline.worker.model.weights import MlpWeights
from trunkline.worker.runner import Runner

CHUNK: Final = 64
WARM_STEPS: Final = 3
STEPS: Final = 16
TOP_KERNELS: Final = 20
DRAWN: Final = {
    "temperature": Sampling(temperature=1.0, seed=1),
    "temperature, top-k 50, top-p 0.9": Sampling(temperature=1.0, top_k=50, top_p=0.9, seed=1),
}
GREEDY: Final = Sampling(temperature=0.0)


@dataclass(frozen=True)
class ModelShape:
    """A Llama's sizes; as they stand, those of Llama 3.1 8B."""

    hidden: int = 4096
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    mlp: int = 14336
    vocabulary: int = 128256
    dtype: str = "bfloat16"
    context: int = 1024
    """Tokens of each row."""
    shared: int = 768
    """The first of them, where rows share any."""
    prompt: int = 2048
    """Tokens of a prompt that is computed."""
    batches: Sequence[int] = (1, 8, 32, 256)

    @property
    def pool_blocks(self) -> int:
        """For the largest batch without sharing, and the prompt."""
        return max(self.batches) * self.row_blocks + blocks_for(self.prompt + 1, CHUNK)

    @property
    def row_blocks(self) -> int:
        """Of a row that decodes for a while."""
        return blocks_for(self.context + 4 * STEPS, CHUNK)


EIGHT_BILLION: Final = ModelShape()


def make_checkpoint(folder: Path, shape: ModelShape, device: torch.device) -> None:
    """A file per layer. All layers have the same numbers: drawing them once is quicker, and no step can tell."""
    hidden, head_dim = shape.hidden, shape.hidden // shape.heads
    dtype = getattr(torch, shape.dtype)

    def draw(*size: int) -> torch.Tensor:
        return (torch.randn(*size, device=device) * 0.02).to(dtype).cpu()

    kv = shape.kv_heads * head_dim
    norm = torch.ones(hidden, dtype=dtype)
    layer = {
        "self_attn.q_proj": draw(hidden, hidden),
        "self_attn.k_proj": draw(kv, hidden),
        "self_attn.v_proj": draw(kv, hidden),
        "self_attn.o_proj": draw(hidden, hidden),
        "mlp.gate_proj": draw(shape.mlp, hidden),
        "mlp.up_proj": draw(shape.mlp, hidden),
        "mlp.down_proj": draw(hidden, shape.mlp),
        "input_layernorm": norm,
        "post_attention_layernorm": norm.clone(),
    }
    ends = {
        "model.embed_tokens.weight": draw(shape.vocabulary, hidden),
        "model.norm.weight": norm,
        "lm_head.weight": draw(shape.vocabulary, hidden),
    }
    files = {"ends.safetensors": ends}
    for index in range(shape.layers):
        named = {f"model.layers.{index}.{name}.weight": tensor for name, tensor in layer.items()}
        files[f"layer-{index}.safetensors"] = named
    for file, tensors in files.items():
        save_file(tensors, folder / file)
    index_of = {name: file for file, tensors in files.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index_of}))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": shape.dtype,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))


def scratch_folder(needed_bytes: int) -> str | None:
    """In memory where there is room; None: wherever temporary files go."""
    memory = Path("/dev/shm")
    return str(memory) if memory.is_dir() and shutil.disk_usage(memory).free > 2 * needed_bytes else None


class Batch:
    """Rows that decode, one after the other batch in one runner."""

    def __init__(self, runner: Runner, shape: ModelShape, gpu: Gpu) -> None:
        self._runner = runner
        self._shape = shape
        self._gpu = gpu
        self._present: list[int] = []
        self._next = 1

    def execute(self, **fields: Any) -> float:
        """Milliseconds of one step, until its tokens are on the host."""
        start = time.perf_counter()
        self._runner.execute(StepPlan(self._runner.steps + 1, 1, **fields))
        return (time.perf_counter() - start) * 1e3

    def replace(self, rows: int, shared: int, sampling: Sampling = GREEDY) -> None:
        """Let all rows leave and others join, the first `shared` tokens of whose context are the same blocks."""
        shape = self._shape
        common, ids = shared // CHUNK, list(range(self._next, self._next + rows))
        own = shape.row_blocks - common
        joins = [
            Join(
                sequence=sequence,
                tokens=pack_int32([7 + index]),
                first=shape.context - 1,
                prompt_len=shape.context,
                blocks=pack_int32([*range(common), *range(common + index * own, common + (index + 1) * own)]),
                sampling=sampling,
            )
            for index, sequence in enumerate(ids)
        ]
        runs = [0, rows, 0, common] if common and rows > 1 else []
        leaves, self._present, self._next = self._present, ids, self._next + rows
        self.execute(leaves=pack_int32(leaves), joins=joins, rows=pack_int32(ids), runs=pack_int32(runs))

    def step_ms(self) -> float:
        """Median of a decode step of the rows that are there."""
        for _ in range(WARM_STEPS):
            self.execute()
        return median(self.execute() for _ in range(STEPS))

    def ahead_ms(self) -> float:
        """Mean of a decode step where the next one has been launched before its tokens are read."""
        runner = self._runner
        for _ in range(WARM_STEPS):
            self.execute()
        start = time.perf_counter()
        for step in range(STEPS):
            runner.launch(StepPlan(runner.steps + 1, 1))
            if step:
                runner.launched.take()
        runner.launched.take()
        return (time.perf_counter() - start) * 1e3 / STEPS

    @contextmanager
    def op_by_op(self) -> Iterator[None]:
        """Without graphs."""
        launched = self._runner.launched
        graphs, launched.graphs = launched.graphs, None
        try:
            yield
        finally:
            launched.graphs = graphs
            if graphs is not None:
                graphs.forget_tokens()

    def prefill_ms(self) -> float:
        """From a prompt's arrival at the runner to its first token; nothing else runs, nothing is cached."""
        shape, times = self._shape, []
        for _ in range(4):
            sequence, self._next = self._next, self._next + 1
            tokens = np.random.default_rng(0).integers(5, shape.vocabulary, shape.prompt).tolist()
            table = list(range(blocks_for(shape.prompt + 1, CHUNK)))
            join = Join(sequence, pack_int32(tokens), 0, shape.prompt, pack_int32(table), GREEDY)
            entry = pack_int32([sequence, 0, shape.prompt, 0, 1])
            leaves, self._present = self._present, [sequence]
            times.append(self.execute(leaves=pack_int32(leaves), joins=[join], prefill=entry, rows=b"", runs=b""))
        return median(times[1:])


def measure_model(gpu: Gpu, out: Output, visit: Visit, shape: ModelShape = EIGHT_BILLION) -> None:
    """Everything, the most wanted first."""
    parameters = (
        shape.layers * shape.hidden * (2 * shape.hidden + 3 * shape.mlp) + 2 * shape.vocabulary * shape.hidden
    )
    with tempfile.TemporaryDirectory(dir=scratch_folder(2 * parameters)) as folder:
        make_checkpoint(Path(folder), shape, gpu.device)
        gpu.empty_cache()
        out.add({"model": "start"}, "written", visit.seconds - visit.seconds_left, "s", 1)
        config = WorkerConfig(
            model=folder,
            plan_endpoint="",
            report_endpoint="",
            chunk_size=CHUNK,
            pool_blocks=shape.pool_blocks,
            dtype=shape.dtype,
            max_context=2 * max(shape.prompt, shape.context),
            token_budget=shape.prompt,
            max_rows=max(shape.batches),
            **gpu.worker,
        )
        runner = load_runner(config, lambda *_: None)
    out.add({"model": "start"}, "loaded", visit.seconds - visit.seconds_left, "s", 1)
    runner.pool.data.normal_(std=0.1)
    if runner.launched.graphs is None:
        out.note("steps run op by op: there are no graphs for these kernels")
    batch = Batch(runner, shape, gpu)
    try:
        measure_steps(gpu, out, visit, (batch, runner, shape))
        if not visit.has_used(0.7):
            out.add({"prompt": shape.prompt}, "to the first token", batch.prefill_ms(), "ms", 3)
        measure_sampling(out, visit, batch, shape)
    finally:
        runner.close()


def measure_steps(gpu: Gpu, out: Output, visit: Visit, what: tuple[Batch, Runner, ModelShape]) -> None:
    """Decode steps by batch; on the device alone, of which products alone; the longest kernels of one."""
    batch, runner, shape = what
    for rows in shape.batches:
        for shared in (shape.shared, 0) if rows > 1 else (0,):
            if visit.has_used(0.7):
                out.note(f"no time was left for {rows} rows")
                return
            case = {"rows": rows, "context": shape.context, "shared": shared}
            batch.replace(rows, shared)
            if runner.launched.graphs is not None:
                with batch.op_by_op():
                    out.add(case, "step, op by op", batch.step_ms(), "ms", STEPS)
                out.add(case, "step, the next one launched ahead", batch.ahead_ms(), "ms", STEPS)
            step, times = batch.step_ms(), gpu.kernel_times(batch.execute, calls=5)
            busy = sum(times.values()) / 1e3
            out.add(case, "step", step, "ms", STEPS)
            out.add(case, "busy on the device", busy, "ms", 5)
            out.add(case, "idle, for the host's work", step - busy, "ms", 5)
            if (rows, shared) == (shape.batches[-2], shape.shared):
                for name, spent in list(times.items())[:TOP_KERNELS]:
                    out.add({"rows": rows, "kernel": name[:80]}, "time in a step", spent, "us", 5)
        limit = products_ms(gpu, runner, shape, rows)
        out.add(
            {"rows": rows, "context": shape.context, "shared": 0}, "products alone, as a graph", limit, "ms", 7
        )


def products_ms(gpu: Gpu, runner: Runner, shape: ModelShape, rows: int) -> float:
    """All matrix products of a step, captured as one graph."""
    weights, kernels = runner._decoder.weights, runner.kernels
    dtype = getattr(torch, shape.dtype)
    x = torch.randn(rows, shape.hidden, device=gpu.device).to(dtype)
    wide = torch.randn(rows, shape.mlp, device=gpu.device).to(dtype)

    def products() -> None:
        for layer in weights.layers:
            assert isinstance(layer.qkv, PackedLinear)
            kernels.linear(x, layer.qkv)
            kernels.linear(x, layer.attention_out)
            assert isinstance(layer.mlp, MlpWeights)
            up, down = layer.mlp
            kernels.gated_linear(x, up)
            kernels.linear(wide, down)
        kernels.linear(x, weights.head)

    with torch.inference_mode():
        return gpu.time_us(gpu.graph([products]).replay, runs=7) / 1e3


def measure_sampling(out: Output, visit: Visit, batch: Batch, shape: ModelShape) -> None:
    """What it costs to draw tokens instead of taking the likeliest."""
    for rows in shape.batches:
        if visit.has_used(0.9):
            out.note(f"no time was left for sampling {rows} rows")
            return
        shared = shape.shared if rows > 1 else 0
        batch.replace(rows, shared)
        greedy = batch.step_ms()
        for name, sampling in DRAWN.items():
            batch.replace(rows, shared, sampling)
            out.add({"rows": rows, "sampling": name}, "more than greedy", batch.step_ms() - greedy, "ms", STEPS)
