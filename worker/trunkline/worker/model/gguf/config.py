"""A GGUF file's metadata as the config.json that `transformers` would have for the model. No torch.

`families` reads the result like any other, so a model is the same in both forms. A value that changes the
computation in a way that is not read is refused by name.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from typing import Any, Final

from trunkline.worker.errors import CheckpointError, UnsupportedModelError
from trunkline.worker.model.gguf.container import GgufTensor
from trunkline.worker.model.gguf.names import family_of, head_counts

_MATRIX_DTYPES: Final = {"F32": "float32", "F16": "float16"}
"""The type to compute in, by the type of the embedding; for all others bfloat16, in which most models are made."""
_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "expert_gating_func": (0, 1),
    "expert_group_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
    "leading_dense_block_count": (0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.sliding_window_pattern": (),
    "attention.temperature_scale": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "rope.dimension_sections": (),
    "rope.freq_base_swa": (),
    "rope.scaling.alpha": (0.0,),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
"""Keys behind the architecture's name that would change the computation, and their values that do not."""
_LOW, _HIGH = 1.0, 4.0
"""`low_freq_factor` and `high_freq_factor` of every published Llama 3."""
_SCALED_BY_HIDDEN: Final = {("gemma2", 46), ("gemma3", 62)}
"""Gemmas of 27 B, which scale scores by the hidden size shared among the heads, not by a head's own size. The file
does not say so; llama.cpp tells these models by their number of layers, too."""


def config_of(
    metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor], rope_factors: list[float] | None
) -> dict[str, Any]:
    """Return the model's config.json.

    Args:
        metadata: The file's.
        tensors: The file's, by their names there.
        rope_factors: Content of the tensor `rope_freqs.weight`; None: there is none.

    Raises:
        UnsupportedModelError: an architecture or a value that is not read; the message names it.
        CheckpointError: a value is missing or of the wrong type.
    """
    name, family = family_of(metadata)
    own = _Own(metadata, name)
    for key, allowed in _NEUTRAL.items():
        if (name, key) != ("gemma3", "rope.freq_base_swa"):
            own.refuse(key, allowed)
    if not family.experts:
        own.refuse("expert_count", (0,))
    heads, kv_heads = head_counts(metadata, name)
    hidden = own.whole("embedding_length")
    head_dim = own.whole("attention.key_length", hidden // heads)
    if own.whole("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError("keys and values of different sizes are not supported")
    if own.whole("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModelError(f"{name}.rope.dimension_count: partial rotary positions are not supported")
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError("there is no matrix token_embd.weight")
    layers = own.whole("block_count")
    if embedding.shape[1] != hidden or heads > hidden or layers > len(tensors):
        raise CheckpointError(
            f"{name}: {layers} layers of {hidden} with {heads} heads do not fit {len(tensors)} tensors and "
            f"embeddings of {embedding.shape[1]}"
        )
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": name,
        "dtype": _MATRIX_DTYPES.get(embedding.type, "bfloat16"),
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": own.whole("feed_forward_length", own.get("expert_feed_forward_length")),
        "max_position_embeddings": own.whole("context_length"),
        "rms_norm_eps": own.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    config["rope_parameters"] = _rope(own, head_dim, rope_factors)
    return {**config, **_EXTRA[name](own, tensors, config), **(_experts(own) if family.experts else {})}


class _Own:
    """The values behind an architecture's name."""

    def __init__(self, metadata: Mapping[str, Any], name: str) -> None:
        self.name = name
        self._metadata = metadata

    def get(self, key: str) -> Any:
        return self._metadata.get(f"{self.name}.{key}")

    def whole(self, key: str, default: int | None = None) -> int:
        """Return a number of things; a list of equal ones, one per layer, counts as one."""
        value = self.get(key)
        if isinstance(value, list) and value:
            if len(set(map(str, value))) != 1:
                raise UnsupportedModelError(f"{self.name}.{key} differs from layer to layer")
            value = value[0]
        value = default if value is None else value
        if type(value) is not int or not 0 < value < 1 << 31:
            raise CheckpointError(f"{self.name}.{key} is {value!r:.80}, not a number of things")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value: Any = self.get(key)
        value = default if value is None else value
        if type(value) not in (int, float) or not math.isfinite(value):
            raise CheckpointError(f"{self.name}.{key} is {value!r:.80}, not a number")
        return decimal(value)

    def refuse(self, key: str, allowed: tuple[object, ...]) -> None:
        value = self.get(key)
        if value is not None and value not in allowed:
            raise UnsupportedModelError(f"{self.name}.{key} is {value!r:.80}, which is not supported")


def decimal(value: float) -> float:
    """Return the shortest decimal number that is the same as `value` in 32 bits: 1e-05 for 9.99999974e-06."""
    single = struct.pack("<f", value) if abs(value) < 3e38 else b""
    for digits in range(1, 9):
        shorter = float(f"{value:.{digits}g}")
        if single and struct.pack("<f", shorter) == single:
            return shorter
    return float(value)


def _rope(own: _Own, head_dim: int, factors: list[float] | None) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": own.number("rope.freq_base", 10000.0)}
    kind = own.get("rope.scaling.type")
    linear = own.number("rope.scale_linear", 1.0)
    factor = own.number("rope.scaling.factor", 0.0)
    if kind is None and (linear != 1.0 or factor not in (0.0, 1.0)):
        kind, factor = "linear", factor or linear  # files from before the kind was written
    if factors is not None:
        if kind not in (None, "none"):
            raise UnsupportedModelError(f"rope_freqs.weight beside rope scaling {kind!r} is not supported")
        return {**rope, **_llama3(rope["rope_theta"], head_dim, factors)}
    if kind in (None, "none"):
        return rope
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(f"rope scaling {kind!r:.80} is not supported; supported: none, linear, yarn")
    scaled = {**rope, "rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaled["original_max_position_embeddings"] = own.whole("rope.scaling.original_context_length")
        for key, ours in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if own.get(f"rope.scaling.{key}") is not None:
                scaled[ours] = own.number(f"rope.scaling.{key}")
    return scaled


def _llama3(theta: float, head_dim: int, factors: list[float]) -> dict[str, Any]:
    """Return the scaling whose frequencies are the plain ones divided by `factors`.

    A pair that is slowed down in part says what the original context was: it turns `_LOW + kept * (_HIGH - _LOW)`
    times in it.

    Raises:
        UnsupportedModelError: it is no scaling of Llama 3.
    """
    factor = decimal(max(factors, default=1.0))
    if len(factors) != head_dim // 2 or not all(1.0 <= each <= 1e6 for each in factors):
        raise UnsupportedModelError(
            f"rope_freqs.weight has {len(factors)} values that are no factors of {head_dim}"
        )
    wavelengths = [2 * math.pi * theta ** (2 * pair / head_dim) for pair in range(head_dim // 2)]
    between = next((pair for pair, each in enumerate(factors) if 1.001 < each < 0.999 * factor), None)
    if factor > 1.0 and between is not None:
        kept = (1 / factors[between] - 1 / factor) / (1 - 1 / factor)
        original = round((_LOW + kept * (_HIGH - _LOW)) * wavelengths[between])
        if all(
            math.isclose(_slowed(original / wave, factor), each, rel_tol=1e-4)
            for wave, each in zip(wavelengths, factors, strict=True)
        ):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": _LOW,
                "high_freq_factor": _HIGH,
                "original_max_position_embeddings": original,
            }
    raise UnsupportedModelError("rope_freqs.weight holds no scaling of Llama 3, the only one that is supported")


def _slowed(turns: float, factor: float) -> float:
    kept = min(1.0, max(0.0, (turns - _LOW) / (_HIGH - _LOW)))
    return 1 / ((1 - kept) / factor + kept)


def _llama(own: _Own, tensors: Mapping[str, GgufTensor], config: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }
    if own.get("attention.sliding_window"):
        found |= {
            "architectures": ["MistralForCausalLM"],
            "sliding_window": own.whole("attention.sliding_window"),
        }
    return found


def _experts(own: _Own) -> dict[str, Any]:
    count, chosen = own.whole("expert_count"), own.whole("expert_used_count")
    found: dict[str, Any] = {"num_local_experts": count, "num_experts_per_tok": chosen}
    width = own.get("expert_feed_forward_length")
    if own.name == "qwen3moe":
        return {**found, "num_experts": count, "moe_intermediate_size": width, "norm_topk_prob": True}
    if width is not None:
        found["intermediate_size"] = own.whole("expert_feed_forward_length")
    if own.name == "llama":
        found |= {"architectures": ["MixtralForCausalLM"], "sliding_window": own.get("attention.sliding_window")}
    return found


def _gpt_oss(own: _Own, tensors: Mapping[str, GgufTensor], config: Mapping[str, Any]) -> dict[str, Any]:
    # The rounding of YaRN's range is the model's own, and in no file.
    positions = {**config["rope_parameters"], "truncate": False}
    window = own.whole("attention.sliding_window", 128)
    return {"rope_parameters": positions, "sliding_window": window, "gate_and_up_apart": True}


def _qwen2(own: _Own, tensors: Mapping[str, GgufTensor], config: Mapping[str, Any]) -> dict[str, Any]:
    own.refuse("attention.sliding_window", (0,))
    return {}


def _qwen3(own: _Own, tensors: Mapping[str, GgufTensor], config: Mapping[str, Any]) -> dict[str, Any]:
    own.refuse("attention.sliding_window", (0,))
    return {"attention_bias": "blk.0.attn_q.bias" in tensors}


def _gemma2(own: _Own, tensors: Mapping[str, GgufTensor], config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_gemma(own, config),
        "attn_logit_softcapping": own.number("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": own.number("final_logit_softcapping", 30.0) or None,
        "sliding_window": own.whole("attention.sliding_window", 4096),
    }


def _gemma3(own: _Own, tensors: Mapping[str, GgufTensor], config: Mapping[str, Any]) -> dict[str, Any]:
    windows = {"sliding_window": own.whole("attention.sliding_window"), "sliding_window_pattern": 6}
    nearby = {"rope_type": "default", "rope_theta": own.number("rope.freq_base_swa", 10000.0)}
    return {
        **_gemma(own, config),
        **windows,
        "final_logit_softcapping": own.number("final_logit_softcapping", 0.0) or None,
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": nearby},
    }


def _gemma(own: _Own, config: Mapping[str, Any]) -> dict[str, Any]:
    by_hidden = (own.name, config["num_hidden_layers"]) in _SCALED_BY_HIDDEN
    scalar = config["hidden_size"] // config["num_attention_heads"] if by_hidden else config["head_dim"]
    return {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": scalar}


_EXTRA: Final[Mapping[str, Callable[[_Own, Mapping[str, GgufTensor], Mapping[str, Any]], dict[str, Any]]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3,
    "gpt-oss": _gpt_oss,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
}
"""What each architecture's config.json has beside the fields of all."""
