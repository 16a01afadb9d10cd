"""Families at published widths, served: time to first token and tokens/s beside a dense model of equal bytes.

    python benchmarks/served_models.py [--quick] [--json PATH] [--families gpt-oss,gemma3,…] [--rounds 3] [--tp 2]
                                       [--folder /dev/shm] [--write docs/measurements/servers.md]

`trunkline serve` on loopback, over HTTP, streamed, greedy, in bfloat16; experts of gpt-oss in MXFP4. Weights are
random (models.py). Widths, heads, experts and windows are those of a published model, which `FAMILIES` names. The
number of layers is cut, and the vocabulary to the 16,384 words of small_model.py's tokenizer. A checkpoint has up
to 4.7 GB; it is made in `--folder` (the temporary one; /dev/shm is memory), and removed when it is loaded.

Beside each runs a LLaMA with the same hidden size, heads, layers and vocabulary, whose MLP is as wide as makes the
bytes equal that a token reads: all matrices but the embedding, and of experts those that a token goes to. Beside
experts in MXFP4 it has a fourth of their arithmetic, so its first token comes earlier. The two servers are asked
in turn, one request or batch at a time, when both have settled, as in peers.py:

- first token, cold: of a prompt of 512 tokens that is new; prefix cached: of the same with another last token;
- batch 1, 8: tokens/s of streams that share a cached prefix of 256 tokens, from the first token of any on.

`ratio` is how many times as fast the family is as the dense model.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import torch
from models import EXPERT, write_random
from peer_servers import TRUNKLINE, Running, Setting, settle, stop_servers_when_terminated
from peer_table import shown
from peers import Client
from report import Report, argument_parser, commit, cpu_name, fill, place_in, some_of
from serving import Prompts
from small_model import VOCABULARY, small_model

from trunkline.worker.model.families import read_model_config
from trunkline.worker.model.tensor_index import expected_shapes

MXFP4_BYTES: Final = 17 / 32
"""Of a weight: 4 bits, and an exponent for 32 of them."""
MARK: Final = "served_models.py"
MLP_QUANTUM: Final = 64
TOKENIZER: Final = ("tokenizer.json", "tokenizer_config.json")


class Published(NamedTuple):
    """A published model, cut."""

    name: str
    layers: int
    """That it has; the configuration says how many are left."""
    config: Mapping[str, Any]


FAMILIES: Final[dict[str, Published]] = {
    "gpt-oss": Published(
        "gpt-oss-20b",
        24,
        {
            "architectures": ["GptOssForCausalLM"],
            "num_hidden_layers": 2,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "tie_word_embeddings": False,
            "quantization_config": {"quant_method": "mxfp4"},
        },
    ),
    "gemma3": Published(
        "Gemma 3 1B",
        26,
        {
            "architectures": ["Gemma3ForCausalLM"],
            "num_hidden_layers": 6,
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 512,
        },
    ),
    "gemma4": Published(
        "Gemma 4 as its configuration class has it",
        30,
        {
            "architectures": ["Gemma4ForCausalLM"],
            "num_hidden_layers": 6,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "global_head_dim": 512,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": VOCABULARY,
            "sliding_window": 512,
        },
    ),
    "llama4": Published(
        "Llama 4 Scout",
        48,
        {
            "architectures": ["Llama4ForCausalLM"],
            "num_hidden_layers": 1,
            "hidden_size": 5120,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
        },
    ),
    "qwen2-moe": Published(
        "Qwen1.5-MoE-A2.7B",
        24,
        {
            "architectures": ["Qwen2MoeForCausalLM"],
            "num_hidden_layers": 2,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
    ),
    "qwen3-moe": Published(
        "Qwen3-30B-A3B",
        48,
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "num_hidden_layers": 2,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
        },
    ),
    "deepseek-v2": Published(
        "DeepSeek V2-Lite",
        27,
        {
            "architectures": ["DeepseekV2ForCausalLM"],
            "num_hidden_layers": 2,
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
        },
    ),
}
DEFAULT: Final = ("gpt-oss", "gemma3", "gemma4", "llama4", "qwen2-moe")


class Lengths(NamedTuple):
    """In tokens."""

    prompt: int = 512
    prefix: int = 256
    output: int = 32
    batches: tuple[int, ...] = (1, 8)


def read_by_token(folder: Path, *, is_packed: bool) -> float:
    """Return the bytes of the weights that a token needs.

    Args:
        is_packed: whether experts are in MXFP4; all else takes two bytes.
    """
    config = read_model_config(folder)
    prefix, names = config.architecture.prefixes[0], config.architecture.names
    skipped = {f"{prefix}{names.layer_embedding}.weight"}
    if not config.tied_embeddings:
        skipped.add(f"{prefix}{names.embedding}.weight")
    own, found = re.compile(r".*experts\.\d+\..*"), 0.0
    for name, shape in expected_shapes(config, prefix).items():
        if name in skipped:
            continue
        share = 1.0
        if own.fullmatch(name):
            assert config.mixture is not None
            share = config.mixture.routing.per_token / config.mixture.experts
        found += share * math.prod(shape) * (MXFP4_BYTES if is_packed and EXPERT.fullmatch(name) else 2.0)
    return found


def dense_twin(folder: Path, wanted: float) -> dict[str, Any]:
    """Return config.json of a LLaMA of which a token reads so many bytes.

    Args:
        folder: the model whose twin it is.
    """
    config = read_model_config(folder)
    own = config.attention[0].heads
    head_dim, kv_heads = (own.head_dim, own.kv_heads) if own else (config.head_dim, config.kv_heads)
    if config.latent is not None:
        head_dim, kv_heads = config.latent.value, config.heads
    hidden, layers = config.hidden_size, config.layers
    attention = 2 * hidden * head_dim * (config.heads + kv_heads)
    mlp = (wanted / 2 - VOCABULARY * hidden) / layers - attention
    width = round(mlp / (3 * hidden) / MLP_QUANTUM) * MLP_QUANTUM
    return {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_attention_heads": config.heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "tie_word_embeddings": False,
    }


def write(folder: Path, config: Mapping[str, Any]) -> Path:
    """Write a checkpoint that can be served."""
    shared = {"vocab_size": VOCABULARY, "max_position_embeddings": 8192, "bos_token_id": 0, "eos_token_id": 1}
    write_random(folder, {**shared, "dtype": "bfloat16", **config})
    for name in TOKENIZER:
        shutil.copy(small_model() / name, folder)
    return folder


def command(program: str, setting: Setting, port: int) -> list[str]:
    return [*TRUNKLINE.command(program, setting, port), "--kv-memory", "512MiB"]


async def ask(servers: Mapping[str, Running], lengths: Lengths, rounds: int) -> dict[tuple[str, str], list[float]]:
    """Return the values of each cell, by its name and the server's: milliseconds and tokens/s."""
    prompts = Prompts(VOCABULARY, 0)
    clients = {name: Client(server, prompts) for name, server in servers.items()}
    found: dict[tuple[str, str], list[float]] = {}

    def keep(cell: str, name: str, value: float) -> None:
        found.setdefault((cell, name), []).append(value)

    for client in clients.values():
        await client.send(prompts.take(64), 4)
    for _ in range(rounds):
        for name, client in clients.items():
            settle(list(servers.values()))
            cold, cached = await client.first_tokens(lengths.prompt)
            keep("first token, cold", name, 1e3 * cold)
            keep("first token, prefix cached", name, 1e3 * cached)
        for batch in lengths.batches:
            for name, client in clients.items():
                settle(list(servers.values()))
                rate, _ = await client.streams(batch, lengths.prefix, lengths.output)
                keep(f"batch {batch}", name, rate)
    return found


def run(name: str, program: str, arguments: argparse.Namespace, report: Report) -> str:
    """Measure a family; return a row of Markdown."""
    published = FAMILIES[name]
    kind = replace(TRUNKLINE, command=command)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        folder = write(Path(scratch, "family"), published.config)
        read = read_by_token(folder, is_packed="quantization_config" in published.config)
        twin = write(Path(scratch, "dense"), dense_twin(folder, read))
        settings = {
            each: Setting(folder=path, dtype="bfloat16", scratch=Path(scratch, f"{each}-own"), tp=arguments.tp)
            for each, path in (("family", folder), ("dense", twin))
        }
        for setting in settings.values():
            setting.scratch.mkdir()
        with (
            Running(kind, program, settings["family"]) as own,
            Running(kind, program, settings["dense"]) as dense,
        ):
            shutil.rmtree(folder)
            shutil.rmtree(twin)
            lengths = Lengths(prompt=256, prefix=128, output=16) if arguments.quick else Lengths()
            found = asyncio.run(ask({"family": own, "dense": dense}, lengths, arguments.rounds))
    layers = f"{published.config['num_hidden_layers']} of {published.layers}"
    case = {"family": name, "model": published.name, "layers": layers, "tp": arguments.tp}
    report.add(case, "read by a token", read / 1e6, "MB", 1)
    texts = [f"{published.name}, {layers} layers", f"{read / 1e6:,.0f} MB"]
    for cell in dict.fromkeys(cell for cell, _ in found):
        values, against = median(found[cell, "family"]), median(found[cell, "dense"])
        unit, ratio = ("tokens/s", values / against) if cell.startswith("batch") else ("ms", against / values)
        report.add(case, cell, values, unit, arguments.rounds)
        report.add(case, f"{cell}, dense", against, unit, arguments.rounds)
        report.add(case, f"{cell}, ratio", ratio, "x", arguments.rounds)
        texts.append(f"{shown(values)} {unit} ({ratio:.2f})")
    row = f"| {' | '.join(texts)} |"
    print(row, flush=True)
    return row


def main() -> None:
    stop_servers_when_terminated()
    parser = argument_parser(__doc__)
    some = f"some of {', '.join(FAMILIES)}; default: {', '.join(DEFAULT)}"
    parser.add_argument(
        "--families", type=some_of(tuple(FAMILIES)), default=DEFAULT, metavar="FAMILY,…", help=some
    )
    parser.add_argument("--rounds", type=int, default=0, help="default: 3, quick: 1")
    parser.add_argument("--folder", type=Path, help="where checkpoints are made")
    parser.add_argument("--write", type=Path, help="page whose table is replaced by this run's")
    parser.add_argument("--tp", type=int, default=2, help="ranks (%(default)s)")
    arguments = parser.parse_args()
    arguments.rounds = arguments.rounds or (1 if arguments.quick else 3)
    if arguments.write is not None:
        place_in(arguments.write, MARK)  # rather than after all
    program = TRUNKLINE.found("")
    if program is None:
        raise SystemExit(f"trunkline is not installed: {TRUNKLINE.install}")
    torch.manual_seed(0)
    report = Report("served_models")
    rows = [run(name, program, arguments, report) for name in arguments.families]
    of_run = f"Commit `{commit()}`, {cpu_name()}, {arguments.rounds} rounds{' of `--quick`' * arguments.quick}."
    cells = ("first token, cold", "prefix cached", "batch 1", "batch 8")
    heads = f"| model | read by a token | {' | '.join(cells)} |"
    if arguments.write is not None:
        fill(arguments.write, MARK, [of_run, "", heads, "|" + "---|" * (2 + len(cells)), *rows])
    report.finish(arguments.json, wide=True)


if __name__ == "__main__":
    main()
