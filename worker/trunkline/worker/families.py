"""From a model folder to a `ModelConfig`, or to an error that says what is wrong, without torch.

The launcher calls `check_model` before it starts any process; workers call it again to build their shard.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any, Final

from trunkline.worker.architecture import ARCHITECTURES, Architecture
from trunkline.worker.config import DTYPES
from trunkline.worker.errors import CheckpointError, ModelError, ParallelismError, UnsupportedModelError
from trunkline.worker.tensor_index import read_tensor_index

ROPE_KINDS: Final = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions and their scaling (config.json's `rope_parameters`, formerly `rope_scaling`)."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """Multiplies cos and sin (YaRN)."""
    truncate: bool = True
    """Whether YaRN's correction range is rounded to whole dimensions."""


@dataclass(frozen=True)
class ModelConfig:
    """A model's shape, in this project's words."""

    architecture: Architecture
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    """Longest context the model was made for, in tokens."""
    norm_eps: float
    rope: RopeConfig
    tied_embeddings: bool
    attention_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    stored_dtype: str
    """Of the checkpoint's weights, as config.json says; "" if it does not."""

    def kv_block_bytes(self, chunk_size: int, tp: int, dtype: str) -> int:
        """Bytes of one block on one rank."""
        width = 4 if dtype == "float32" else 2
        return self.layers * 2 * max(1, self.kv_heads // tp) * chunk_size * self.head_dim * width


def check_model(folder: Path, tp: int, dtype: str) -> ModelConfig:
    """Read config.json and the headers of the weight files, and check that `tp` ranks can serve them.

    Args:
        folder: Hugging Face checkpoint: config.json, one or more safetensors files.
        tp: tensor-parallel ranks.
        dtype: "float32", "bfloat16" or "float16".

    Raises:
        UnsupportedModelError: architecture, activation, rope scaling or dtype that is not implemented.
        ParallelismError: heads, KV heads or MLP that cannot be divided by `tp`.
        CheckpointError: missing or cut-off files, missing tensors, wrong shapes.
        ModelError: no readable config.json.
    """
    config = read_model_config(folder)
    if dtype not in DTYPES:
        raise UnsupportedModelError(f"dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
    check_parallelism(config, tp)
    check_weights(config, folder)
    return config


def read_model_config(folder: Path) -> ModelConfig:
    """Parse `folder/config.json`.

    Raises:
        UnsupportedModelError: see `check_model`.
        ModelError: missing or malformed file.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{folder} is not a model folder: {error.strerror or error} ({path.name})") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    names = raw.get("architectures") or [] if isinstance(raw, dict) else []
    found = next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), None)
    if found is None:
        given = ", ".join(map(str, names)) or "none named"
        raise UnsupportedModelError(
            f"{path}: unsupported architecture: {given}; supported: {', '.join(sorted(ARCHITECTURES))}"
        )
    try:
        return _read_llama(raw, found)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        what = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
        raise ModelError(f"{path}: {what}") from error


def _read_llama(raw: dict[str, Any], architecture: Architecture) -> ModelConfig:
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModelError(f"hidden_act {activation!r} is not supported; supported: silu")
    if raw.get("quantization_config"):
        raise UnsupportedModelError("quantised checkpoints are not supported")
    heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    config = ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        layers=int(raw["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or hidden // heads),
        intermediate_size=int(raw["intermediate_size"]),
        vocab_size=int(raw["vocab_size"]),
        max_positions=int(raw.get("max_position_embeddings", 2048)),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_read_rope(raw),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bool(raw.get("attention_bias", False)),
        attention_out_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        stored_dtype=str(raw.get("dtype") or raw.get("torch_dtype") or ""),
    )
    if min(config.layers, config.heads, config.kv_heads, config.vocab_size, config.intermediate_size) < 1:
        raise ValueError("layers, heads, vocab_size and intermediate_size must be positive")
    if config.heads % config.kv_heads:
        raise ValueError(f"{config.heads} attention heads cannot share {config.kv_heads} KV heads evenly")
    if config.head_dim % 2:
        raise ValueError(f"head_dim is {config.head_dim}; rotary positions need an even one")
    return config


def _read_rope(raw: dict[str, Any]) -> RopeConfig:
    """Both forms: `rope_parameters` (with the theta inside) and `rope_theta` beside `rope_scaling`."""
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(given.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise UnsupportedModelError(f"rope scaling {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    if float(given.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UnsupportedModelError("partial rotary positions are not supported")
    if kind == "default":
        return RopeConfig(theta)
    factor = float(given["factor"])
    original = int(given.get("original_max_position_embeddings") or raw.get("max_position_embeddings", 2048))
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    if kind == "llama3":
        return RopeConfig(
            theta,
            kind,
            factor,
            original,
            low_freq_factor=float(given["low_freq_factor"]),
            high_freq_factor=float(given["high_freq_factor"]),
        )
    return _read_yarn(given, theta, factor, original)


def _read_yarn(given: dict[str, Any], theta: float, factor: float, original: int) -> RopeConfig:
    if given.get("mscale") or given.get("mscale_all_dim"):
        raise UnsupportedModelError("yarn with mscale is not supported")
    attention_factor = given.get("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else 0.1 * log(factor) + 1.0
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original,
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
        attention_factor=float(attention_factor),
        truncate=bool(given.get("truncate", True)),
    )


def check_parallelism(config: ModelConfig, tp: int) -> None:
    """Whether `tp` ranks can hold equal shards. The vocabulary is padded, so it may have any size.

    Raises:
        ParallelismError: naming what does not divide, and what would.
    """
    if tp < 1:
        raise ParallelismError(f"tp is {tp}; it must be at least 1")
    allowed = [n for n in range(1, config.heads + 1) if _divides(config, n)]
    if tp in allowed:
        return
    reasons = []
    if config.heads % tp:
        reasons.append(f"{config.heads} attention heads")
    if config.kv_heads % tp and tp % config.kv_heads:
        reasons.append(f"{config.kv_heads} KV heads")
    if config.intermediate_size % tp:
        reasons.append(f"an MLP of {config.intermediate_size}")
    raise ParallelismError(
        f"cannot split {' and '.join(reasons)} over {tp} ranks; "
        f"possible for this model: {', '.join(map(str, allowed))}"
    )


def _divides(config: ModelConfig, tp: int) -> bool:
    kv_fits = config.kv_heads % tp == 0 or tp % config.kv_heads == 0  # fewer KV heads than ranks: replicated
    return config.heads % tp == 0 and kv_fits and config.intermediate_size % tp == 0


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the decoder needs, with its whole (unsharded) shape."""
    names, hidden = config.architecture.names, config.hidden_size
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    linear = (
        (names.query, queries, hidden, config.attention_bias),
        (names.key, keys, hidden, config.attention_bias),
        (names.value, keys, hidden, config.attention_bias),
        (names.attention_out, hidden, queries, config.attention_out_bias),
        (names.gate, config.intermediate_size, hidden, config.mlp_bias),
        (names.up, config.intermediate_size, hidden, config.mlp_bias),
        (names.down, hidden, config.intermediate_size, config.mlp_bias),
    )
    shapes: dict[str, tuple[int, ...]] = {
        f"{names.embedding}.weight": (config.vocab_size, hidden),
        f"{names.final_norm}.weight": (hidden,),
    }
    if not config.tied_embeddings:
        shapes[f"{names.head}.weight"] = (config.vocab_size, hidden)
    for layer in range(config.layers):
        prefix = names.layer.format(layer)
        shapes[f"{prefix}{names.attention_norm}.weight"] = (hidden,)
        shapes[f"{prefix}{names.mlp_norm}.weight"] = (hidden,)
        for name, rows, columns, bias in linear:
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
    return shapes


def check_weights(config: ModelConfig, folder: Path) -> None:
    """Whether the weight files hold every tensor in its shape; only their headers are read.

    Raises:
        CheckpointError: see `check_model`.
    """
    found = read_tensor_index(folder)
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in found]
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(expected)} tensors are missing: "
            f"{', '.join(missing[:5])}{', …' if len(missing) > 5 else ''}"
        )
    for name, shape in expected.items():
        if found[name].shape != shape:
            raise CheckpointError(
                f"{folder}: {name} has shape {list(found[name].shape)}; config.json implies {list(shape)}"
            )
