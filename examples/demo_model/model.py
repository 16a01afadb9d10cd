"""A lean Llama for training on a CPU, and its export to the published form.

Same mathematics as ``LlamaForCausalLM`` (checked by ``evaluate.py``), but query, key and
value are one matrix product and so are gate and up, logits are computed only where a loss
counts, and each block compiles to a few fused kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from chat import BOS_ID, END_ID, PAD_ID
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

# Embeddings start large enough that the first layers' output does not drown the tokens, and
# the final norm small enough that the tied head nevertheless starts with even scores.
EMBEDDING_STD = 0.3
FINAL_NORM = 0.1


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; two key-value heads so that it splits over two workers."""

    vocabulary: int = 4096
    hidden: int = 256
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 704
    context_tokens: int = 2048
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5


class Block(nn.Module):
    """Attention and gated MLP with their norms."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        hidden, width = shape.hidden, shape.heads * shape.head_dim
        self.norm_attention = nn.RMSNorm(hidden, shape.norm_epsilon)
        self.qkv = nn.Linear(hidden, width + 2 * shape.kv_heads * shape.head_dim, bias=False)
        self.out = nn.Linear(width, hidden, bias=False)
        self.norm_mlp = nn.RMSNorm(hidden, shape.norm_epsilon)
        self.gate_up = nn.Linear(hidden, 2 * shape.intermediate, bias=False)
        self.down = nn.Linear(shape.intermediate, hidden, bias=False)
        # A block starts as the identity: the first steps then train what is near the loss.
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """One layer over a whole batch of rows."""
        shape = self.shape
        rows, length, _ = x.shape
        rotated = shape.heads + shape.kv_heads
        heads = self.qkv(self.norm_attention(x)).view(rows, length, -1, shape.head_dim)
        heads = heads.transpose(1, 2)
        qk, value = heads[:, :rotated], heads[:, rotated:]
        first, second = qk.chunk(2, -1)
        qk = (qk * cos + torch.cat((-second, first), -1) * sin).to(value.dtype)
        group = shape.heads // shape.kv_heads
        mixed = F.scaled_dot_product_attention(
            qk[:, : shape.heads],
            qk[:, shape.heads :].repeat_interleave(group, 1),
            value.repeat_interleave(group, 1),
            is_causal=True,
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, -1))
        gate, up = self.gate_up(self.norm_mlp(x)).chunk(2, -1)
        output: Tensor = x + self.down(F.silu(gate) * up)
        return output


class LeanLlama(nn.Module):
    """The network; ``forward`` gives hidden states, ``logits`` the scores of some of them."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        nn.init.normal_(self.embedding.weight, std=EMBEDDING_STD)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, shape.norm_epsilon)
        nn.init.constant_(self.norm.weight, FINAL_NORM)
        powers = torch.arange(0, shape.head_dim, 2) / shape.head_dim
        angles = torch.outer(torch.arange(shape.context_tokens), shape.rope_theta**-powers)
        angles = torch.cat((angles, angles), -1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Normed hidden states of rows of token ids."""
        x = self.embedding(ids)
        length = ids.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        for block in self.blocks:
            x = block(x, cos, sin)
        hidden: Tensor = self.norm(x)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary; the head is the embedding (tied)."""
        return F.linear(hidden, self.embedding.weight)

    def loss(self, ids: Tensor, targets: Tensor, ignored: int) -> Tensor:
        """Mean cross entropy over the positions that count."""
        hidden = self(ids).flatten(0, 1)
        chosen = targets.flatten() != ignored
        logits = self.logits(hidden[chosen])
        return F.cross_entropy(logits.float(), targets.flatten()[chosen])


def llama_config(shape: Shape) -> LlamaConfig:
    """The configuration under which ``transformers`` computes the same function."""
    return LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context_tokens,
        rms_norm_eps=shape.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
        attention_bias=False,
        mlp_bias=False,
        dtype="bfloat16",
    )


def published_weights(model: LeanLlama) -> dict[str, Tensor]:
    """The weights under the names that every serving engine expects."""
    shape = model.shape
    query = shape.heads * shape.head_dim
    key = shape.kv_heads * shape.head_dim
    weights = {
        "model.embed_tokens.weight": model.embedding.weight,
        "model.norm.weight": model.norm.weight,
    }
    for index, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        prefix = f"model.layers.{index}."
        q, k, v = torch.split(block.qkv.weight, [query, key, key])
        gate, up = block.gate_up.weight.chunk(2)
        weights |= {
            f"{prefix}input_layernorm.weight": block.norm_attention.weight,
            f"{prefix}self_attn.q_proj.weight": q,
            f"{prefix}self_attn.k_proj.weight": k,
            f"{prefix}self_attn.v_proj.weight": v,
            f"{prefix}self_attn.o_proj.weight": block.out.weight,
            f"{prefix}post_attention_layernorm.weight": block.norm_mlp.weight,
            f"{prefix}mlp.gate_proj.weight": gate,
            f"{prefix}mlp.up_proj.weight": up,
            f"{prefix}mlp.down_proj.weight": block.down.weight,
        }
    return {name: weight.detach().clone().contiguous() for name, weight in weights.items()}


def published_model(model: LeanLlama, dtype: torch.dtype) -> LlamaForCausalLM:
    """The same network as a ``transformers`` model."""
    target = LlamaForCausalLM(llama_config(model.shape))
    nn.Module.to(target, dtype)
    weights = {name: value.to(dtype) for name, value in published_weights(model).items()}
    missing, unexpected = target.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"weights do not fit: missing {missing}, unexpected {unexpected}")
    target.tie_weights()
    target.train(False)
    return target


def export(model: LeanLlama, folder: Path) -> None:
    """Write config, generation config and bfloat16 weights."""
    target = published_model(model, torch.bfloat16)
    target.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=BOS_ID, eos_token_id=[END_ID], pad_token_id=PAD_ID, do_sample=False
    )
    target.save_pretrained(folder)
