"""What a family costs: steps of random models of equal active weights, and bytes of KV per token.

    python benchmarks/models.py [--quick] [--json PATH] [--layers 6] [--threads 1] [--families mixtral,qwen3-moe,…]
                                [--op-by-op]

Every model has the width of the small benchmark model (768, 12 heads over 4 KV heads, a vocabulary of 4,096,
bfloat16), and MLPs of which a token uses 2,400 columns: in one matrix, or spread over its experts. So the weights
that a token needs have the same bytes in all of them (a quarter of that for experts in MXFP4). Each family takes
turns with a LLaMA in one process, step by step.

`decode` is a step of so many rows over a block of context each; `time_to_first` is the prefill of a prompt with
the logits of its last token; `ratio` compares with the LLaMA's. With one thread, times are CPU time. With
`--op-by-op`, each family is also run op by op from Python over the same kernels and weights. Weights that found no
large pages (`in_large_pages`) are read up to 1.3 times slower at batch 1: compare rows of like shares.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from quantisation import CHUNK, Model
from report import Report, argument_parser, median_seconds
from torch import Tensor

from trunkline.kernels.load import load_kernels
from trunkline.kernels.op_by_op import OpByOp
from trunkline.kernels.ops import Kernels
from trunkline.worker.batch.batch import ScoredPrompt
from trunkline.worker.model.families import read_model_config
from trunkline.worker.model.stacked_experts import MXFP4_GROUP
from trunkline.worker.model.tensor_index import expected_shapes
from trunkline.worker.tensor_parallel import TensorParallel

DTYPE: Final = "bfloat16"
SHAPE: Final[dict[str, Any]] = {
    "vocab_size": 4096,
    "hidden_size": 768,
    "intermediate_size": 2400,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
ROUTED: Final = {"num_experts_per_tok": 8, "moe_intermediate_size": 300, "norm_topk_prob": True}
CHOSEN: Final = {"intermediate_size": 480, "num_local_experts": 32, "num_experts_per_tok": 5}
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], "query_pre_attn_scalar": 64},
    "granite": {"architectures": ["GraniteForCausalLM"], "residual_multiplier": 0.22, "logits_scaling": 8.0},
    "phi3": {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.75},
    "glm4": {"architectures": ["Glm4ForCausalLM"], "partial_rotary_factor": 0.5},
    "olmo2": {"architectures": ["Olmo2ForCausalLM"]},
    "gemma3": {"architectures": ["Gemma3ForCausalLM"], "query_pre_attn_scalar": 64, "sliding_window": 512},
    "gemma4": {
        "architectures": ["Gemma4ForCausalLM"],
        "global_head_dim": 64,
        "hidden_size_per_layer_input": 0,
    },
    "gemma4-experts": {
        "architectures": ["Gemma4ForCausalLM"],
        "global_head_dim": 64,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 300,
        "enable_moe_block": True,
        "num_experts": 32,
        "top_k_experts": 7,
        "moe_intermediate_size": 300,
    },
    "gemma4-e": {
        "architectures": ["Gemma4ForCausalLM"],
        "global_head_dim": 64,
        "num_kv_shared_layers": 3,
        "layer_types": ["full_attention"] * 6,
        "hidden_size_per_layer_input": 64,
        "vocab_size_per_layer_input": 4096,
    },
    "mixtral": {"architectures": ["MixtralForCausalLM"], "intermediate_size": 1200, "num_local_experts": 8},
    "qwen3-moe": {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 32, **ROUTED},
    "qwen2-moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 300,
        "shared_expert_intermediate_size": 1200,
    },
    "llama4": {
        "architectures": ["Llama4ForCausalLM"],
        "intermediate_size": 1200,
        "intermediate_size_mlp": 2400,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
    },
    "gpt-oss": {"architectures": ["GptOssForCausalLM"], **CHOSEN},
    "gpt-oss-mxfp4": {
        "architectures": ["GptOssForCausalLM"],
        **CHOSEN,
        "quantization_config": {"quant_method": "mxfp4"},
    },
    "glm4-moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "n_routed_experts": 32,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        **ROUTED,
        "num_experts_per_tok": 7,
    },
    "deepseek-v2": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "num_key_value_heads": 12,
        "q_lora_rank": None,
        "kv_lora_rank": 192,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "n_routed_experts": 32,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        **ROUTED,
        "norm_topk_prob": False,
        "num_experts_per_tok": 7,
    },
}
"""config.json of each, beside `SHAPE`."""
DRAWN: Final = (1 << 24) - 3
"""Random numbers that weights are parts of; no size of a matrix divides it."""
EXPERT: Final = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
MXFP4_SCALE: Final = 120
"""The exponent, plus 127, with which random codes are about as large as other weights."""
ROWS: Final = (1, 8, 32)


def write_random(folder: Path, config: dict[str, Any]) -> Path:
    """Write a checkpoint of random weights in the shapes that config.json implies; return `folder`.

    Weights are parts of one long row of normal numbers, which is all that speed needs of large matrices, and takes
    no memory for them. Experts are in MXFP4 if the configuration says so.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    model = read_model_config(folder)
    shapes = expected_shapes(model, model.architecture.prefixes[0])
    longest = max(map(math.prod, shapes.values()))
    row = _repeated((torch.randn(DRAWN) * 0.02).bfloat16(), longest)
    codes = _repeated(torch.randint(256, (DRAWN,), dtype=torch.uint8), longest)
    tensors: dict[str, Tensor] = {}
    experts: dict[str, tuple[int, int, int]] = {}
    for name, shape in shapes.items():
        if config.get("quantization_config") and (found := EXPERT.fullmatch(name)) is not None:
            experts[f"{found[1]}.{found[3]}"] = int(found[2]) + 1, shape[0], shape[1]
        elif "norm" in name or "scal" in name:  # near 1, so that tokens differ in what routers choose
            tensors[name] = _part(row, shape) + 1.0
        else:
            tensors[name] = _part(row, shape)
    for name, (count, rows, width) in experts.items():
        groups = (rows, width // MXFP4_GROUP)
        blocks = [_part(codes, (*groups, MXFP4_GROUP // 2)) for _ in range(count)]
        tensors[f"{name}_blocks"] = torch.stack(blocks)
        tensors[f"{name}_scales"] = torch.full((count, *groups), MXFP4_SCALE, dtype=torch.uint8)
    _write_tensors(folder / "model.safetensors", tensors)
    return folder


def _repeated(drawn: Tensor, longest: int) -> Tensor:
    """Return numbers again and again, so that `longest` of them follow each of the first ones."""
    return drawn.repeat(1 + -(-longest // len(drawn)))


def _part(row: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return consecutive numbers from a random place on."""
    start = int(torch.randint(DRAWN, ()))
    return row[start : start + math.prod(shape)].view(shape)


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file; tensors may share memory, as the library does not allow."""
    names, header, end = {torch.bfloat16: "BF16", torch.uint8: "U8"}, {}, 0
    for name, tensor in tensors.items():
        offsets = [end, end := end + tensor.nbytes]
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.flatten().view(torch.uint8).numpy().data)


class Family(Model):
    """A model of one family, on one rank."""

    def first_token(self, count: int) -> Callable[[], object]:
        """The prefill of a prompt of `count` tokens, with the logits behind its last one."""
        batch = replace(
            self.prompt_step(torch.arange(count) * 7 % 4000 + 2),
            state_rows=torch.tensor([count - 1]),
            scored=(ScoredPrompt(0, count, np.zeros(1, dtype=np.int32), 0),),
        )
        return lambda: self.decoder.forward(batch)

    def run_op_by_op(self) -> None:
        decoder, alone = self.decoder, TensorParallel.alone(torch.device("cpu"))
        decoder.runner = OpByOp(decoder.program, self.kernels, decoder.pool, alone)


def large_page_bytes() -> int:
    """Bytes of this process in large pages, as Linux counts them; 0 elsewhere."""
    try:
        found = Path("/proc/self/smaps_rollup").read_text()
    except OSError:
        return 0
    return 1024 * sum(int(line.split()[1]) for line in found.splitlines() if line.startswith("AnonHugePages"))


def load(name: str, folder: Path, layers: int, kernels: Kernels) -> Family:
    made = write_random(folder / name, {**SHAPE, "num_hidden_layers": layers, **FAMILIES[name]})
    return Family(made, DTYPE, "", kernels, max(*ROWS, 8))


def compare(case: dict[str, Any], plain: Family, model: Family, quick: bool, report: Report) -> None:
    """Measure steps of the two by turns."""
    budget_s, prompt = (1.0, 128) if quick else (4.0, 512)
    pairs = [(f"decode {rows}", [plain.decode_step(rows), model.decode_step(rows)]) for rows in ROWS]
    pairs.append((f"time_to_first {prompt}", [plain.first_token(prompt), model.first_token(prompt)]))
    for metric, calls in pairs:
        (expected, taken), runs = median_seconds(calls, case["threads"], budget_s)
        report.add(case, metric, taken * 1e3, "ms", runs)
        report.add(case, f"{metric} ratio", taken / expected, "x", runs)
    chunk = model.decoder.shard.config.chunk_format(CHUNK, DTYPE)
    report.add(case, "kv_per_token", chunk.chunk_bytes / CHUNK, "B", 1)


def run(arguments: argparse.Namespace, report: Report) -> None:
    kernels = load_kernels("cpu", "cpu", arguments.threads)
    with tempfile.TemporaryDirectory() as scratch:
        before = large_page_bytes()
        plain = load("llama", Path(scratch), arguments.layers, kernels)
        share = (large_page_bytes() - before) / plain.weights.bytes_read
        print(f"of the weights of the LLaMA that is compared with, {share:.0%} are in large pages")
        for name in arguments.families.split(","):
            measure(name, plain, Path(scratch), arguments, report)
            gc.collect()


def measure(name: str, plain: Family, scratch: Path, arguments: argparse.Namespace, report: Report) -> None:
    """Compare one family; with the weights of all in memory, fewer would get large pages."""
    before = large_page_bytes()
    model = load(name, scratch / "compared", arguments.layers, plain.kernels)
    share = (large_page_bytes() - before) / model.weights.bytes_read
    shutil.rmtree(scratch / "compared")
    case = {"family": name, "run": "native", "threads": arguments.threads}
    compare(case, plain, model, arguments.quick, report)
    report.add(case, "in_large_pages", 100 * share, "%", 1)
    if arguments.op_by_op:
        model.run_op_by_op()
        compare({**case, "run": "op by op"}, plain, model, arguments.quick, report)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1, help="of the kernels")
    parser.add_argument("--families", default=",".join(FAMILIES), help="some of them")
    parser.add_argument("--op-by-op", action="store_true", help="also op by op from Python")
    arguments = parser.parse_args()
    if unknown := set(arguments.families.split(",")) - set(FAMILIES):
        parser.error(f"no such family: {', '.join(sorted(unknown))}; there are {', '.join(FAMILIES)}")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    report = Report("models")
    with torch.inference_mode():
        run(arguments, report)
    report.finish(arguments.json, wide=True)


if __name__ == "__main__":
    main()
