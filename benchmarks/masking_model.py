"""The demo model's forward with every liberty about positions and about who sees whom (Prompt Cache §3.3, §3.4).

Keys are kept unrotated, so that they can act at any position, also at a wrong one, which a rank would refuse. A
second way to compute what ranks compute, independent of kernels, blocks, extents and shifts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from trunkline.worker.model.families import read_model_config

_LAYER: Final = "model.layers.{layer}.{name}.weight"


class State(NamedTuple):
    """KV of some tokens, keys before they are rotated."""

    keys: Tensor
    """float32 `[layers, kv_heads, tokens, head_dim]`."""
    values: Tensor

    def behind(self, count: int) -> State:
        """Return the KV of all tokens but the first `count`."""
        return State(self.keys[:, :, count:], self.values[:, :, count:])


class Said(NamedTuple):
    """What the model says of tokens, given those before; of all but the first."""

    logprobs: NDArray[np.float64]
    exact: NDArray[np.bool_]
    """Whether the token was the likeliest."""
    distribution: Tensor
    """Log-probabilities of all tokens, float32 `[tokens − 1, vocabulary]`."""


class MaskedModel:
    """A Llama in float32."""

    def __init__(self, folder: Path) -> None:
        self._config = read_model_config(folder)
        self._weights = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
        rope = self._config.attention[0].rope
        assert rope is not None
        self._frequencies = rope.theta ** (-torch.arange(0, rope.rotary_dim, 2) / rope.rotary_dim)

    @torch.inference_mode()
    def read(self, tokens: list[int], position: int, seen: Sequence[tuple[State, int]] = ()) -> tuple[State, Said]:
        """Compute tokens from a position on, each of which sees those before it and all of `seen`.

        Args:
            seen: states, and the positions from which on they act.
        """
        config, weights = self._config, self._weights
        own = torch.arange(position, position + len(tokens))
        places = [torch.arange(start, start + state.keys.shape[2]) for state, start in seen]
        at = torch.cat([*places, own])
        before = len(at) - len(own)
        visible = torch.ones(len(own), len(at), dtype=torch.bool).tril(before)
        hidden = functional.embedding(torch.tensor(tokens), weights["model.embed_tokens.weight"])
        kept: list[tuple[Tensor, Tensor]] = []
        for layer in range(config.layers):
            normed = self._norm(hidden, layer, "input_layernorm")
            query, key, value = (self._heads(normed, layer, name) for name in "qkv")
            kept.append((key, value))
            keys = torch.cat([*(other.keys[layer] for other, _ in seen), key], dim=1)
            values = torch.cat([*(other.values[layer] for other, _ in seen), value], dim=1)
            attended = functional.scaled_dot_product_attention(
                self._rotate(query, own)[None],
                self._rotate(keys, at)[None],
                values[None],
                attn_mask=visible,
                scale=config.attention[layer].scale,
                enable_gqa=True,
            )[0]
            hidden = hidden + self._linear(attended.transpose(0, 1).flatten(1), layer, "self_attn.o_proj")
            normed = self._norm(hidden, layer, "post_attention_layernorm")
            gate, up = (self._linear(normed, layer, f"mlp.{name}_proj") for name in ("gate", "up"))
            hidden = hidden + self._linear(functional.silu(gate) * up, layer, "mlp.down_proj")
        state = State(torch.stack([k for k, _ in kept]), torch.stack([v for _, v in kept]))
        return state, self._say(hidden, tokens)

    def _say(self, hidden: Tensor, tokens: list[int]) -> Said:
        head = self._weights["model.embed_tokens.weight" if self._config.tied_embeddings else "lm_head.weight"]
        normed = functional.rms_norm(
            hidden[:-1], hidden.shape[1:], self._weights["model.norm.weight"], self._config.norm_eps
        )
        logprobs = (normed @ head.T).log_softmax(dim=1)
        following = torch.tensor(tokens[1:])
        exact = logprobs.argmax(dim=1) == following
        return Said(logprobs.gather(1, following[:, None])[:, 0].double().numpy(), exact.numpy(), logprobs)

    def _norm(self, hidden: Tensor, layer: int, name: str) -> Tensor:
        weight = self._weights[_LAYER.format(layer=layer, name=name)]
        return functional.rms_norm(hidden, hidden.shape[1:], weight, self._config.norm_eps)

    def _linear(self, hidden: Tensor, layer: int, name: str) -> Tensor:
        return hidden @ self._weights[_LAYER.format(layer=layer, name=name)].T

    def _heads(self, hidden: Tensor, layer: int, name: str) -> Tensor:
        """`[heads, tokens, head_dim]`."""
        projected = self._linear(hidden, layer, f"self_attn.{name}_proj")
        return projected.view(len(hidden), -1, self._config.head_dim).transpose(0, 1)

    def _rotate(self, heads: Tensor, positions: Tensor) -> Tensor:
        angles = positions[:, None] * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        first, second = heads.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
