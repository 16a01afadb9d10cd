"""Model families as data, from which the decoder is composed.

A new family is a record here and a reader of its config.json in `families`, not a new class of model. What may
differ between two models of a family is in `ModelConfig`; a reader may also change parts of the record
(`dataclasses.replace`), as Falcon's does, under whose name three layouts go.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final


class NormKind(StrEnum):
    """The kind of a norm of hidden states."""

    RMS = "rms"
    RMS_OFFSET = "rms, weights stored minus one"
    LAYER = "layer"
    LAYER_NO_BIAS = "layer, without bias"


class Positions(StrEnum):
    """The way in which a token's position enters the model."""

    ROTARY = "rotary"
    ALIBI = "alibi"
    LEARNED = "learned"
    """A table of vectors added to the embeddings. Keys depend on it, so cached KV cannot move."""


class Qkv(StrEnum):
    """The place of the query, key and value projections in the checkpoint."""

    SEPARATE = "three matrices"
    STACKED = "one matrix: all queries, all keys, all values"
    GROUPED = "one matrix: for each KV head its queries, its key, its value"
    LATENT = "queries, a latent and a rotary key for all heads, and what makes keys and values of the latent"


class Mlp(StrEnum):
    """The kind of an MLP, or of a mixture's experts."""

    PLAIN = "down(activation(up(x)))"
    GATED = "down(activation(gate(x)) * up(x))"


class Residual(StrEnum):
    """The way in which attention `a` and MLP `m` are added to `x`; `n` are norms of their own."""

    SEQUENTIAL = "x + a(n(x)), then x + m(n(x))"
    PARALLEL = "x + a(n(x)) + m(n(x))"
    """Attention and MLP side by side: one all-reduce per layer."""
    POST_NORM = "n(x + a(x)), then n(x + m(x))"


@dataclass(frozen=True)
class WeightNames:
    """Tensor names in a checkpoint, without the ending `.weight` or `.bias`; "": there is none.

    Every name but `head` stands behind the prefix of `Architecture.prefixes` that the checkpoint uses; the names
    of a layer's tensors also stand behind `layer`.
    """

    embedding: str
    layer: str
    """Prefix of a layer's names, with `{}` for its index."""
    attention_norm: str
    attention_out: str
    mlp_norm: str
    """Norm before the MLP. Empty under `PARALLEL` if the MLP reads what attention reads."""
    up: str
    down: str
    final_norm: str
    head: str = "lm_head"
    qkv: str = ""
    """The fused projection; empty if there are `query`, `key` and `value`."""
    query: str = ""
    key: str = ""
    value: str = ""
    query_norm: str = ""
    """RMS norm of each query head before rotation, or of all together (`Architecture.wide_norms`)."""
    key_norm: str = ""
    query_down: str = ""
    """`LATENT`: projection to the vector that queries are made of, with a norm; empty if they are made of the
    hidden state."""
    query_down_norm: str = ""
    latent: str = ""
    """`LATENT`: one matrix, first the latent's rows, then those of the rotary key."""
    latent_norm: str = ""
    expand: str = ""
    """`LATENT`: for each head the rows that make a key of the latent, then those that make a value."""
    gate: str = ""
    """The same as `up` if one matrix has both: first the gate's rows."""
    attention_post_norm: str = ""
    """Norm of attention's output before it is added; under `POST_NORM`, of the sum."""
    mlp_post_norm: str = ""
    router: str = ""
    """Router of a mixture of experts; empty if the family has none."""
    expert: str = ""
    """Prefix of the names of an expert's tensors (`gate`, `up`, `down`), with `{}` for its index."""
    expert_gate: str = ""
    """Name of an expert's gate where it is not `gate`; so with `expert_up`."""
    expert_up: str = ""
    shared_experts: str = ""
    """Prefix of the same names of the experts that every token goes to."""
    shared_gate: str = ""
    """Projection to one number, whose sigmoid multiplies what those give."""
    dense: str = ""
    """Prefix of the same names in layers without a mixture."""
    sinks: str = ""
    """Score of each head's sink (`AttentionSpec.sinks`); the whole name."""
    choice_bias: str = ""
    """What is added to an expert's score for the choice alone; the whole name."""
    layer_scale: str = ""
    """What multiplies the residual behind the layer, one number; the whole name."""
    positions: str = ""
    embedding_in: str = ""
    """Projection from the embeddings' width to the hidden size."""
    embedding_out: str = ""
    """Projection from the hidden size to the embeddings' width, before the head."""

    @property
    def expert_gates(self) -> tuple[str, str]:
        """Names of an expert's gate and up."""
        return self.expert_gate or self.gate, self.expert_up or self.up


@dataclass(frozen=True)
class Architecture:
    """A family of decoders."""

    family: str
    norm: NormKind
    positions: Positions
    qkv: Qkv
    mlp: Mlp
    residual: Residual
    names: WeightNames
    prefixes: tuple[str, ...]
    """Prefixes of tensor names; a checkpoint uses one of them."""
    wide_norms: bool = False
    """Whether queries are normalised as one vector, and keys as one, instead of each head."""
    interleaved: bool = False
    """Whether the pairs of dimensions that rotary positions turn are neighbours in the checkpoint; here they are
    half of the rotated part apart."""
    transposed: bool = False
    """Whether the layers' matrices are stored as `[in, out]`."""
    head_prefixes: tuple[str, ...] = ()
    """Prefix of the head's name for each of `prefixes`; empty: none has any."""
    interleaved_gates: bool = False
    """Whether, in a matrix of gate and up, their rows alternate; else all of the gate's come first."""
    position_rows_skipped: int = 0
    """Number of rows of the table of positions in front of position 0."""


LLAMA: Final = Architecture(
    family="llama",
    norm=NormKind.RMS,
    positions=Positions.ROTARY,
    qkv=Qkv.SEPARATE,
    mlp=Mlp.GATED,
    residual=Residual.SEQUENTIAL,
    prefixes=("model.", ""),
    names=WeightNames(
        embedding="embed_tokens",
        layer="layers.{}.",
        attention_norm="input_layernorm",
        query="self_attn.q_proj",
        key="self_attn.k_proj",
        value="self_attn.v_proj",
        attention_out="self_attn.o_proj",
        mlp_norm="post_attention_layernorm",
        gate="mlp.gate_proj",
        up="mlp.up_proj",
        down="mlp.down_proj",
        final_norm="norm",
    ),
)

MISTRAL: Final = replace(LLAMA, family="mistral")
QWEN2: Final = replace(LLAMA, family="qwen2")
QWEN3: Final = replace(
    LLAMA,
    family="qwen3",
    names=replace(LLAMA.names, query_norm="self_attn.q_norm", key_norm="self_attn.k_norm"),
)
MIXTRAL: Final = replace(
    LLAMA,
    family="mixtral",
    names=replace(
        LLAMA.names,
        router="block_sparse_moe.gate",
        expert="block_sparse_moe.experts.{}.",
        gate="w1",
        up="w3",
        down="w2",
    ),
)
QWEN3_MOE: Final = replace(
    QWEN3,
    family="qwen3_moe",
    names=replace(
        QWEN3.names,
        router="mlp.gate",
        expert="mlp.experts.{}.",
        dense="mlp.",
        gate="gate_proj",
        up="up_proj",
        down="down_proj",
    ),
)
QWEN2_MOE: Final = replace(
    QWEN3_MOE,
    family="qwen2_moe",
    names=replace(
        QWEN3_MOE.names,
        query_norm="",
        key_norm="",
        shared_experts="mlp.shared_expert.",
        shared_gate="mlp.shared_expert_gate",
    ),
)
GLM4_MOE: Final = replace(
    LLAMA,
    family="glm4_moe",
    names=replace(
        QWEN3_MOE.names,
        query_norm="",
        key_norm="",
        shared_experts="mlp.shared_experts.",
        choice_bias="mlp.gate.e_score_correction_bias",
    ),
)
DEEPSEEK_V3: Final = replace(
    GLM4_MOE,
    family="deepseek_v3",
    qkv=Qkv.LATENT,
    interleaved=True,
    names=replace(
        GLM4_MOE.names,
        query_down="self_attn.q_a_proj",
        query_down_norm="self_attn.q_a_layernorm",
        query="self_attn.q_b_proj",
        key="",
        value="",
        latent="self_attn.kv_a_proj_with_mqa",
        latent_norm="self_attn.kv_a_layernorm",
        expand="self_attn.kv_b_proj",
    ),
)
DEEPSEEK_V2: Final = replace(DEEPSEEK_V3, family="deepseek_v2", names=replace(DEEPSEEK_V3.names, choice_bias=""))
GLM4_MOE_LITE: Final = replace(DEEPSEEK_V3, family="glm4_moe_lite")
MISTRAL4: Final = replace(
    DEEPSEEK_V2,
    family="mistral4",
    names=replace(DEEPSEEK_V2.names, expert_gate="gate_up_proj", expert_up="gate_up_proj"),
)
PHI3: Final = replace(
    LLAMA,
    family="phi3",
    qkv=Qkv.STACKED,
    names=replace(
        LLAMA.names,
        query="",
        key="",
        value="",
        qkv="self_attn.qkv_proj",
        gate="mlp.gate_up_proj",
        up="mlp.gate_up_proj",
    ),
)
GRANITE: Final = replace(LLAMA, family="granite")
GRANITE_MOE: Final = replace(
    LLAMA,
    family="granitemoe",
    names=replace(
        LLAMA.names,
        gate="input_linear",
        up="input_linear",
        down="output_linear",
        router="block_sparse_moe.router.layer",
        expert="block_sparse_moe.experts.{}.",
        shared_experts="shared_mlp.",
        dense="shared_mlp.",
    ),
)
GLM: Final = replace(
    LLAMA,
    family="glm",
    interleaved=True,
    names=replace(LLAMA.names, gate="mlp.gate_up_proj", up="mlp.gate_up_proj"),
)
GLM4: Final = replace(
    GLM,
    family="glm4",
    names=replace(GLM.names, attention_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm"),
)
OLMO2: Final = replace(
    LLAMA,
    family="olmo2",
    wide_norms=True,
    names=replace(
        QWEN3.names,
        attention_norm="",
        attention_post_norm="post_attention_layernorm",
        mlp_norm="",
        mlp_post_norm="post_feedforward_layernorm",
    ),
)
GPT_OSS: Final = replace(
    LLAMA,
    family="gpt_oss",
    interleaved_gates=True,
    names=replace(
        LLAMA.names,
        sinks="self_attn.sinks",
        router="mlp.router",
        expert="mlp.experts.{}.",
        gate="gate_up_proj",
        up="gate_up_proj",
        down="down_proj",
    ),
)
GPT_OSS_APART: Final = replace(GPT_OSS, names=replace(GPT_OSS.names, gate="gate_proj", up="up_proj"))
"""With a matrix for the gate and one for up."""
LLAMA4: Final = replace(
    LLAMA,
    family="llama4",
    interleaved=True,
    names=replace(
        LLAMA.names,
        gate="gate_proj",
        up="up_proj",
        down="down_proj",
        dense="feed_forward.",
        router="feed_forward.router",
        expert="feed_forward.experts.{}.",
        expert_gate="gate_up_proj",
        expert_up="gate_up_proj",
        shared_experts="feed_forward.shared_expert.",
    ),
)
OLMOE: Final = replace(QWEN3_MOE, family="olmoe", wide_norms=True)
GEMMA: Final = replace(LLAMA, family="gemma", norm=NormKind.RMS_OFFSET)
GEMMA2: Final = replace(
    LLAMA,
    family="gemma2",
    norm=NormKind.RMS_OFFSET,
    names=replace(
        LLAMA.names,
        attention_post_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
    ),
)
GEMMA3: Final = replace(
    GEMMA2,
    family="gemma3",
    names=replace(GEMMA2.names, query_norm="self_attn.q_norm", key_norm="self_attn.k_norm"),
)
GEMMA4: Final = replace(
    GEMMA3, family="gemma4", norm=NormKind.RMS, names=replace(GEMMA3.names, layer_scale="layer_scalar")
)
GPT2: Final = Architecture(
    family="gpt2",
    norm=NormKind.LAYER,
    positions=Positions.LEARNED,
    qkv=Qkv.STACKED,
    mlp=Mlp.PLAIN,
    residual=Residual.SEQUENTIAL,
    transposed=True,
    prefixes=("transformer.", ""),
    names=WeightNames(
        embedding="wte",
        positions="wpe",
        layer="h.{}.",
        attention_norm="ln_1",
        qkv="attn.c_attn",
        attention_out="attn.c_proj",
        mlp_norm="ln_2",
        up="mlp.c_fc",
        down="mlp.c_proj",
        final_norm="ln_f",
    ),
)
OPT: Final = Architecture(
    family="opt",
    norm=NormKind.LAYER,
    positions=Positions.LEARNED,
    qkv=Qkv.SEPARATE,
    mlp=Mlp.PLAIN,
    residual=Residual.SEQUENTIAL,
    position_rows_skipped=2,
    prefixes=("model.decoder.", "decoder."),
    names=WeightNames(
        embedding="embed_tokens",
        positions="embed_positions",
        layer="layers.{}.",
        attention_norm="self_attn_layer_norm",
        query="self_attn.q_proj",
        key="self_attn.k_proj",
        value="self_attn.v_proj",
        attention_out="self_attn.out_proj",
        mlp_norm="final_layer_norm",
        up="fc1",
        down="fc2",
        final_norm="final_layer_norm",
    ),
)
OPT_POST_NORM: Final = replace(
    OPT,
    residual=Residual.POST_NORM,
    names=replace(
        OPT.names,
        attention_norm="",
        attention_post_norm="self_attn_layer_norm",
        mlp_norm="",
        mlp_post_norm="final_layer_norm",
        final_norm="",
    ),
)
GPT_NEOX: Final = Architecture(
    family="gpt_neox",
    norm=NormKind.LAYER,
    positions=Positions.ROTARY,
    qkv=Qkv.GROUPED,
    mlp=Mlp.PLAIN,
    residual=Residual.PARALLEL,
    prefixes=("gpt_neox.", ""),
    names=WeightNames(
        embedding="embed_in",
        layer="layers.{}.",
        attention_norm="input_layernorm",
        qkv="attention.query_key_value",
        attention_out="attention.dense",
        mlp_norm="post_attention_layernorm",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        final_norm="final_layer_norm",
        head="embed_out",
    ),
)
FALCON: Final = Architecture(
    family="falcon",
    norm=NormKind.LAYER,
    positions=Positions.ROTARY,
    qkv=Qkv.GROUPED,
    mlp=Mlp.PLAIN,
    residual=Residual.PARALLEL,
    prefixes=("transformer.", ""),
    names=WeightNames(
        embedding="word_embeddings",
        layer="h.{}.",
        attention_norm="input_layernorm",
        qkv="self_attention.query_key_value",
        attention_out="self_attention.dense",
        mlp_norm="",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        final_norm="ln_f",
    ),
)
FALCON_TWO_NORMS: Final = replace(FALCON, names=replace(FALCON.names, attention_norm="ln_attn", mlp_norm="ln_mlp"))
FALCON_SEQUENTIAL: Final = replace(
    FALCON,
    residual=Residual.SEQUENTIAL,
    names=replace(FALCON.names, mlp_norm="post_attention_layernorm"),
)
MPT: Final = Architecture(
    family="mpt",
    norm=NormKind.LAYER_NO_BIAS,
    positions=Positions.ALIBI,
    qkv=Qkv.STACKED,
    mlp=Mlp.PLAIN,
    residual=Residual.SEQUENTIAL,
    prefixes=("transformer.", ""),
    names=WeightNames(
        embedding="wte",
        layer="blocks.{}.",
        attention_norm="norm_1",
        qkv="attn.Wqkv",
        attention_out="attn.out_proj",
        mlp_norm="norm_2",
        up="ffn.up_proj",
        down="ffn.down_proj",
        final_norm="norm_f",
    ),
)
