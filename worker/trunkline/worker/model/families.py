"""Read a model folder into a `ModelConfig`, or say what is wrong with it. No torch.

One function per family reads its config.json: it chooses the record of `architecture` and takes the numbers.
Defaults are those of the family's configuration class in `transformers`, since files leave them out. A field whose
value would change the computation in a way that is not implemented is refused by name.

The launcher calls `check_model` before it starts any process; workers call it again to build their shard.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from trunkline.worker.config import DTYPES
from trunkline.worker.errors import ModelError, UnsupportedModelError
from trunkline.worker.model import architecture as records
from trunkline.worker.model.architecture import Architecture, Positions, Residual
from trunkline.worker.model.config_fields import Fields, bloom_slopes, make_rope, mpt_slopes, read_rope
from trunkline.worker.model.model_config import LayerAttention, ModelConfig, check_parallelism
from trunkline.worker.model.tensor_index import check_weights


def check_model(folder: Path, tp: int, dtype: str) -> ModelConfig:
    """Read config.json and the headers of the weight files, and check that `tp` ranks can serve them.

    Args:
        folder: Hugging Face checkpoint: config.json, one or more safetensors files.
        tp: tensor-parallel ranks.
        dtype: "float32", "bfloat16" or "float16".

    Raises:
        UnsupportedModelError: architecture, activation, rope scaling or dtype that is not implemented.
        ParallelismError: heads, KV heads, MLP or experts that cannot be divided by `tp`.
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
    name = next((name for name in names if name in READERS), "")
    if not name:
        given = ", ".join(map(str, names)) or "none named"
        reason = next((f" ({REFUSED[name]})" for name in names if name in REFUSED), "")
        raise UnsupportedModelError(
            f"{path}: unsupported architecture: {given}{reason}; supported: {', '.join(sorted(READERS))}"
        )
    if raw.get("quantization_config"):
        raise UnsupportedModelError(f"{path}: quantization_config: quantised checkpoints are not supported")
    try:
        return READERS[name](raw)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{path}: {name}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        what = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
        raise ModelError(f"{path}: {what}") from error


GATED_ACTIVATIONS: Final = ("silu", "gelu", "gelu_tanh")
PLAIN_ACTIVATIONS: Final = ("relu", "gelu", "gelu_tanh", "silu")


def _llama(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(raw)
    config = _llama_like(fields, records.LLAMA)
    return replace(_with_attention_bias(config, fields), mlp_bias=fields.flag("mlp_bias", False))


def _mistral(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(raw)
    window = int(fields.nullable("sliding_window", 4096))
    return _with_attention(_llama_like(fields, records.MISTRAL), lambda _, own: replace(own, window=window))


def _mixtral(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(raw)
    config = _llama_like(fields, records.MIXTRAL, theta=1e6, norm_eps=1e-5)
    window = int(fields.nullable("sliding_window", 0))
    experts, chosen = fields.whole("num_local_experts", 8), fields.whole("num_experts_per_tok", 2)
    if not 1 <= chosen <= experts:
        raise ValueError(f"num_experts_per_tok is {chosen}; there are {experts} experts")
    config = _with_attention(config, lambda _, own: replace(own, window=window))
    return replace(config, experts=experts, experts_per_token=chosen)


def _qwen2(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(raw)
    return replace(_qwen_windowed(_llama_like(fields, records.QWEN2), fields), attention_bias=True)


def _qwen3(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(raw)
    config = _with_attention_bias(_llama_like(fields, records.QWEN3, head_dim=128), fields)
    return _qwen_windowed(config, fields)


def _qwen_windowed(config: ModelConfig, fields: Fields) -> ModelConfig:
    if not fields.flag("use_sliding_window", False):
        return config
    first = fields.whole("max_window_layers", 28)
    return _windowed(config, fields, lambda layer: layer >= first)


def _gemma2(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(raw, hidden_act="hidden_activation")
    config = _gemma(fields, records.GEMMA2, period=2)
    soft_cap = fields.nullable("attn_logit_softcapping", 50.0)
    return replace(
        _with_attention(config, lambda _, own: replace(own, soft_cap=soft_cap)),
        logit_soft_cap=fields.nullable("final_logit_softcapping", 30.0),
    )


def _gemma3(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(raw, hidden_act="hidden_activation")
    fields.refuse("attn_logit_softcapping")
    config = _gemma(fields, records.GEMMA3, period=fields.whole("sliding_window_pattern", 6))
    given = fields.get("rope_parameters") or {}
    everywhere = given.get("full_attention") or fields.get("rope_scaling") or {}
    nearby = given.get("sliding_attention") or {}
    theta = float(everywhere.get("rope_theta") or fields.number("rope_theta", 1e6))
    near_theta = float(nearby.get("rope_theta") or fields.number("rope_local_base_freq", 1e4))
    rope = make_rope(everywhere, config.head_dim, theta, config.max_positions)
    near_rope = make_rope(nearby, config.head_dim, near_theta, config.max_positions)
    return replace(
        _with_attention(config, lambda _, own: replace(own, rope=near_rope if own.window else rope)),
        logit_soft_cap=fields.nullable("final_logit_softcapping", 0.0),
    )


def _gemma(fields: Fields, architecture: Architecture, period: int) -> ModelConfig:
    """Read what Gemmas have in common: every `period`-th layer sees all before it, the others a window."""
    fields.refuse("use_bidirectional_attention", False)
    config = _llama_like(fields, architecture, activation="gelu_pytorch_tanh", tied=True, head_dim=256)
    scale = fields.number("query_pre_attn_scalar", 256) ** -0.5
    config = _with_attention(config, lambda _, own: replace(own, scale=scale))
    config = _windowed(config, fields, lambda layer: (layer + 1) % period > 0)
    return replace(_with_attention_bias(config, fields), embedding_scale=config.hidden_size**0.5)


def _llama_like(
    fields: Fields,
    architecture: Architecture,
    *,
    theta: float = 1e4,
    norm_eps: float = 1e-6,
    activation: str = "silu",
    tied: bool = False,
    head_dim: int = 0,
) -> ModelConfig:
    """Read what LLaMA and its followers have in common; the keywords are defaults."""
    config = _base(
        fields,
        architecture,
        norm_eps=fields.number("rms_norm_eps", norm_eps),
        activation=fields.activation("hidden_act", activation, GATED_ACTIVATIONS),
        tied=tied,
        head_dim=fields.whole("head_dim", head_dim),
    )
    rope = read_rope(fields, config.head_dim, theta)
    if rope.rotary_dim != config.head_dim:
        raise UnsupportedModelError("partial_rotary_factor is not supported for this architecture")
    return _with_attention(config, lambda _, own: replace(own, rope=rope))


def _gpt2(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(
        raw,
        hidden_size="n_embd",
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        intermediate_size="n_inner",
        max_position_embeddings="n_positions",
        hidden_act="activation_function",
    )
    fields.refuse("add_cross_attention", False)
    config = _base(
        fields,
        records.GPT2,
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        activation=fields.activation("hidden_act", "gelu_new", PLAIN_ACTIVATIONS),
        max_positions=1024,
    )
    scale = config.head_dim**-0.5 if fields.flag("scale_attn_weights", True) else 1.0
    by_layer = fields.flag("scale_attn_by_inverse_layer_idx", False)
    return replace(
        _with_attention(config, lambda i, own: replace(own, scale=scale / (i + 1) if by_layer else scale)),
        attention_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
    )


def _opt(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(raw, intermediate_size="ffn_dim", hidden_act="activation_function")
    fields.refuse("layer_norm_elementwise_affine", True)
    architecture = records.OPT if fields.flag("do_layer_norm_before", True) else records.OPT_POST_NORM
    if fields.flag("_remove_final_layer_norm", False):
        architecture = replace(architecture, names=replace(architecture.names, final_norm=""))
    width, hidden = fields.whole("word_embed_proj_dim", 0), fields.whole("hidden_size")
    if width not in (0, hidden):
        names = replace(architecture.names, embedding_in="project_in", embedding_out="project_out")
        architecture = replace(architecture, names=names)
    bias = fields.flag("enable_bias", True)
    return replace(
        _base(
            fields,
            architecture,
            norm_eps=1e-5,
            activation=fields.activation("hidden_act", "relu", PLAIN_ACTIVATIONS),
        ),
        embedding_size=0 if width == hidden else width,
        attention_bias=bias,
        attention_out_bias=bias,
        mlp_bias=bias,
    )


def _gpt_neox(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(raw, rope_theta="rotary_emb_base")
    parallel = fields.flag("use_parallel_residual", True)
    config = _base(
        fields,
        replace(records.GPT_NEOX, residual=Residual.PARALLEL if parallel else Residual.SEQUENTIAL),
        norm_eps=fields.number("layer_norm_eps", 1e-5),
        activation=fields.activation("hidden_act", "gelu", PLAIN_ACTIVATIONS),
        tied=False,
    )
    rope = read_rope(fields, config.head_dim, fraction=fields.number("rotary_pct", 0.25))
    config = _with_attention(config, lambda _, own: replace(own, rope=rope))
    return replace(_with_attention_bias(config, fields, default=True), mlp_bias=True)


def _falcon(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(raw, intermediate_size="ffn_hidden_size", hidden_act="activation")
    grouped, parallel = fields.flag("new_decoder_architecture", False), fields.flag("parallel_attn", True)
    if grouped and not parallel:
        raise UnsupportedModelError("parallel_attn is False; the new decoder architecture is always parallel")
    if grouped and fields.whole("num_ln_in_parallel_attn", 2) == 2:
        architecture = records.FALCON_TWO_NORMS
    else:
        architecture = records.FALCON if parallel else records.FALCON_SEQUENTIAL
    heads = fields.whole("num_attention_heads")
    kv_heads = 1 if fields.flag("multi_query", True) else heads
    if grouped:
        kv_heads = fields.whole("num_kv_heads", heads)
    config = _base(
        fields,
        architecture,
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        activation=fields.activation("hidden_act", "gelu", PLAIN_ACTIVATIONS),
        kv_heads=kv_heads,
    )
    bias = fields.flag("bias", False)
    config = replace(config, attention_bias=bias, attention_out_bias=bias, mlp_bias=bias)
    if not fields.flag("alibi", False):
        rope = read_rope(fields, config.head_dim)
        return _with_attention(config, lambda _, own: replace(own, rope=rope))
    return replace(
        config,
        architecture=replace(architecture, positions=Positions.ALIBI),
        # The biases are added before the scores are scaled.
        alibi_slopes=tuple(slope * config.head_dim**-0.5 for slope in bloom_slopes(heads)),
    )


def _mpt(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(
        raw,
        hidden_size="d_model",
        num_hidden_layers="n_layers",
        num_attention_heads="n_heads",
        max_position_embeddings="max_seq_len",
    )
    own = Fields(fields.get("attn_config", {}))
    fields.refuse("no_bias", True)
    fields.refuse("logit_scale")
    own.refuse("alibi", True)  # without it, positions are learned
    own.refuse("alibi_bias_max", 8)
    own.refuse("attn_type", "multihead_attention")
    own.refuse("prefix_lm", False)
    own.refuse("qk_ln", False)
    config = _base(
        fields,
        records.MPT,
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        activation="gelu",
    )
    scale = own.number("softmax_scale", config.head_dim**-0.5)
    return replace(
        _with_attention(config, lambda _, layer: replace(layer, scale=scale)),
        intermediate_size=fields.whole("expansion_ratio", 4) * config.hidden_size,
        qkv_clip=own.number("clip_qkv", 0.0),
        alibi_slopes=mpt_slopes(config.heads),
    )


def _base(
    fields: Fields,
    architecture: Architecture,
    *,
    norm_eps: float,
    activation: str,
    tied: bool = True,
    head_dim: int = 0,
    kv_heads: int = 0,
    max_positions: int = 2048,
) -> ModelConfig:
    """Read the fields that all families have.

    Args:
        tied: whether embedding and head are one, where the file does not say.
        head_dim: 0: the hidden size divided by the heads.
        kv_heads: 0: what the file says, and if it does not, as many as heads.
        max_positions: longest context, where the file does not say.
    """
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    layers = fields.whole("num_hidden_layers")
    head_dim = head_dim or hidden // heads
    config = ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads or fields.whole("num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate_size=fields.whole("intermediate_size", 4 * hidden),
        vocab_size=fields.whole("vocab_size"),
        max_positions=fields.whole("max_position_embeddings", max_positions),
        norm_eps=norm_eps,
        activation=activation,
        attention=(LayerAttention(head_dim**-0.5),) * layers,
        tied_embeddings=fields.flag("tie_word_embeddings", tied),
        stored_dtype=str(fields.get("dtype") or fields.get("torch_dtype") or ""),
    )
    if min(layers, heads, config.kv_heads, config.vocab_size, config.intermediate_size) < 1:
        raise ValueError("layers, heads, vocab_size and intermediate_size must be positive")
    if heads % config.kv_heads:
        raise ValueError(f"{heads} attention heads cannot share {config.kv_heads} KV heads evenly")
    return config


def _with_attention(config: ModelConfig, change: Callable[[int, LayerAttention], LayerAttention]) -> ModelConfig:
    """Return the configuration with each layer's attention changed; equal ones stay one object."""
    made: dict[LayerAttention, LayerAttention] = {}
    changed = (change(layer, own) for layer, own in enumerate(config.attention))
    return replace(config, attention=tuple(made.setdefault(own, own) for own in changed))


def _with_attention_bias(config: ModelConfig, fields: Fields, default: bool = False) -> ModelConfig:
    bias = fields.flag("attention_bias", default)
    return replace(config, attention_bias=bias, attention_out_bias=bias)


def _windowed(config: ModelConfig, fields: Fields, is_sliding: Callable[[int], bool]) -> ModelConfig:
    """Add a window to the layers that `layer_types` names, or, without that field, `is_sliding`."""
    window = int(fields.nullable("sliding_window", 4096))
    kinds = fields.get("layer_types")
    if kinds is None:
        kinds = ["sliding_attention" if is_sliding(i) else "full_attention" for i in range(config.layers)]
    other = set(kinds) - {"sliding_attention", "full_attention"}
    if other:
        raise UnsupportedModelError(f"layer_types has {', '.join(map(repr, sorted(other)))}")
    if len(kinds) != config.layers:
        raise ValueError(f"layer_types has {len(kinds)} entries for {config.layers} layers")
    return _with_attention(
        config, lambda i, own: replace(own, window=window if kinds[i] == "sliding_attention" else 0)
    )


READERS: Final[Mapping[str, Callable[[Mapping[str, Any]], ModelConfig]]] = {
    "FalconForCausalLM": _falcon,
    "GPT2LMHeadModel": _gpt2,
    "GPTNeoXForCausalLM": _gpt_neox,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "LlamaForCausalLM": _llama,
    "MPTForCausalLM": _mpt,
    "MistralForCausalLM": _mistral,
    "MixtralForCausalLM": _mixtral,
    "MptForCausalLM": _mpt,
    "OPTForCausalLM": _opt,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}
"""The reader of each name in config.json's `architectures`."""

REFUSED: Final[Mapping[str, str]] = {
    "Gemma3ForConditionalGeneration": "it reads images too; save its text model as Gemma3ForCausalLM",
}
"""The reason why a known architecture is not supported, by its name."""
