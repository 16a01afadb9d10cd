"""Memory that cached tokens take, by model, and what the rounding of modules to chunks adds (Prompt Cache §5.5).

    python benchmarks/kv_bytes.py [--quick] [--json PATH]

Computed, not measured: nothing here depends on a machine, and --quick changes nothing.

- models: KV of a token in a 16-bit type: layers * 2 * KV heads * head dimension * 2 bytes, as a rank reads these
  from a config.json (BERT, which no rank serves: from the formula); the small and the demo model's own files.
  `paper`: the paper's table 2. `own_heads`: what it would be if every query head had KV of its own: so the paper
  counts, also where the model groups its heads. `document`: 1,000 tokens, in whole chunks.
- chunks: a text of a module begins a chunk of its own, so its last one is not full. `empty`: slots that stay
  empty, of those taken, by chunk size; the mean over texts whose lengths lie within a fifth of the given one.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from report import Report, parse_arguments
from small_model import small_model

from trunkline.kvstore.chunks import blocks_for
from trunkline.worker.model.families import read_model_config
from trunkline.worker.model.model_config import ModelConfig

DEMO_MODEL: Final = Path(__file__).resolve().parents[1] / "deploy/trunkline/deploy/demo_model"
CHUNK: Final = 64
CHUNK_SIZES: Final = (16, 32, 64, 128)
TEXT_LENGTHS: Final = (50, 100, 200, 500, 1000, 5000)
SPREAD: Final = 0.2
DOCUMENT: Final = 1000
MIB: Final = float(1 << 20)
BERT_BASE: Final = 12 * 2 * 12 * 64 * 2
"""Bytes: layers, keys and values, heads, head dimension, 16 bits."""


def llama(hidden: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    """What KV depends on, as in config.json; the rest is the family's."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": 32_000,
    }


def falcon(hidden: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    """See `llama`; the new decoder architecture is the one whose heads are grouped."""
    return {
        "architectures": ["FalconForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_kv_heads": kv_heads,
        "multi_query": kv_heads == 1,
        "new_decoder_architecture": 1 < kv_heads < heads,
        "vocab_size": 65_024,
    }


def mpt(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    """See `llama`."""
    return {
        "architectures": ["MPTForCausalLM"],
        "d_model": hidden,
        "n_layers": layers,
        "n_heads": heads,
        "vocab_size": 50_432,
    }


class Model(NamedTuple):
    """One row."""

    name: str
    config: dict[str, Any]
    paper: float | None = None
    """MiB per token in the paper's table 2."""


MODELS: Final = (
    Model("Falcon RW 1B", falcon(2048, 24, 32, 32), 0.18),
    Model("Llama 2 7B", llama(4096, 32, 32, 32), 0.50),
    Model("Llama 2 13B", llama(5120, 40, 40, 40), 0.78),
    Model("MPT 30B", mpt(7168, 48, 64), 1.31),
    Model("Falcon 40B", falcon(8192, 60, 128, 8), 1.87),
    Model("Llama 2 70B", llama(8192, 80, 64, 8), 2.5),
    Model("Falcon 180B", falcon(14_848, 80, 232, 8), 4.53),
    Model("MPT 7B", mpt(4096, 32, 32)),
    Model("Falcon 7B", falcon(4544, 32, 71, 1)),
    Model("CodeLlama 34B", llama(8192, 48, 64, 8)),
    Model("Llama 3.1 8B", llama(4096, 32, 32, 8)),
)


def read(config: dict[str, Any]) -> ModelConfig:
    """As a rank reads it."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return read_model_config(Path(folder))


def token_bytes(model: ModelConfig) -> int:
    """KV of one token, all layers, in a 16-bit type."""
    return model.chunk_format(1, "bfloat16").chunk_bytes


def add_models(report: Report) -> None:
    rows = [(model.name, read(model.config), model.paper) for model in MODELS]
    rows += [(name, read_model_config(folder), None) for name, folder in own_models().items()]
    case = {"part": "models", "model": "BERT base"}
    report.add(case, "token", BERT_BASE / MIB, "MiB", 1)
    report.add(case, "own_heads", BERT_BASE / MIB, "MiB", 1)
    report.add(case, "paper", 0.03, "MiB", 1)
    for name, model, paper in rows:
        case = {"part": "models", "model": name}
        size = token_bytes(model)
        report.add(case, "token", size / MIB, "MiB", 1)
        report.add(case, "own_heads", size * model.heads / model.kv_heads / MIB, "MiB", 1)
        if paper is not None:
            report.add(case, "paper", paper, "MiB", 1)
        report.add(case, "document", blocks_for(DOCUMENT, CHUNK) * CHUNK * size / MIB, "MiB", 1)


def own_models() -> dict[str, Path]:
    """Those that other benchmarks use."""
    return {"small (benchmarks)": small_model(), "demo": DEMO_MODEL}


def empty_share(length: int, chunk_size: int) -> float:
    """Of the slots that texts of about this length take, those that stay empty."""
    lengths = np.arange(round(length * (1 - SPREAD)), round(length * (1 + SPREAD)) + 1)
    slots = -(-lengths // chunk_size) * chunk_size
    return float(1 - lengths.sum() / slots.sum())


def add_chunks(report: Report) -> None:
    for length in TEXT_LENGTHS:
        for chunk_size in CHUNK_SIZES:
            case = {"part": "chunks", "text": length}
            report.add(case, f"empty, chunks of {chunk_size}", 100 * empty_share(length, chunk_size), "%", 1)


def main() -> None:
    arguments = parse_arguments(__doc__)
    report = Report("kv_bytes")
    add_models(report)
    add_chunks(report)
    report.finish(arguments.json, wide=True)


if __name__ == "__main__":
    main()
