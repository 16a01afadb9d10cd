"""The composable decoder: an `Architecture`'s layers over this rank's shard, paged KV and kernels.

      ids -> embedding -> [ norm -> qkv -> rotate, store KV -> attention -> out ─ all-reduce ─ +
                            norm -> gate, up -> down ─ all-reduce ─ + ] × layers -> norm -> head -> logits

Decode rows come first in a batch, prefill tokens behind them; the linear layers see all at once (iteration-level
batching, PagedAttention §4.5), attention is called for each kind.

What is promised: in float32 a token's logits do not depend on the batch beyond rounding, so greedy output is
the same unless two tokens are equal to within it. They are not promised to be equal bit by bit: matrix
multiplications of other sizes and other sharers of the prefix add in another order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trunkline.kernels.large_pages import advise_large_pages
from trunkline.kernels.ops import Angles, AttentionSpec, Kernels, KvPool, make_angles
from trunkline.worker.batch import Batch
from trunkline.worker.checkpoint import LayerWeights, Shard, Weights
from trunkline.worker.parallel import TensorParallel
from trunkline.worker.rope import inverse_frequencies


class Decoder:
    """One rank's part of the model. Not reentrant; call under `torch.inference_mode`."""

    def __init__(
        self, shard: Shard, weights: Weights, kernels: Kernels, group: TensorParallel, pool: KvPool
    ) -> None:
        """
        Args:
            pool: with the rank's KV heads, in the weights' dtype.
        """
        config = shard.config
        self.shard = shard
        self.weights = weights
        self._kernels = kernels
        self._group = group
        self.pool = pool
        self._frequencies = inverse_frequencies(config.rope, config.head_dim).to(pool.data.device)
        self._spec = AttentionSpec(
            heads=shard.heads,
            kv_heads=shard.kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            inverse_frequencies=self._frequencies.double(),
        )

    def forward(self, batch: Batch) -> Tensor | None:
        """Compute a step: store the new tokens' KV and return the logits that are sampled from.

        Returns:
            float32 `[samples, padded vocabulary / tp]`: this rank's columns, -inf where padded; None if the
            batch samples nothing.
        """
        kernels, eps = self._kernels, self.shard.config.norm_eps
        angles = self._angles(batch.positions)
        residual = self._embed(batch.ids)
        delta: Tensor | None = None
        for layer, weights in enumerate(self.weights.layers):
            if delta is None:
                x = kernels.rms_norm(residual, weights.attention_norm, eps)
            else:
                x = kernels.add_rms_norm(delta, residual, weights.attention_norm, eps)
            delta = self._attention(x, layer, weights, batch, angles)
            if layer == self.shard.config.layers - 1:
                # From here on only the tokens matter whose logits are asked for.
                if not batch.samples:
                    return None
                if batch.logit_rows is not None:
                    residual, delta = residual[batch.logit_rows], delta[batch.logit_rows]
            x = kernels.add_rms_norm(delta, residual, weights.mlp_norm, eps)
            delta = self._mlp(x, weights)
        if delta is None:
            raise ValueError("a model without layers")
        return self._logits(kernels.add_rms_norm(delta, residual, self.weights.final_norm, eps))

    def _angles(self, positions: Tensor) -> Angles:
        angles = make_angles(positions, self._frequencies, self.shard.config.rope.attention_factor)
        dtype = self.pool.data.dtype
        return Angles(angles.cos.to(dtype), angles.sin.to(dtype))

    def _embed(self, ids: Tensor) -> Tensor:
        """Vocabulary-parallel: each rank looks up the ids it holds, the sum has them all."""
        shard, table = self.shard, self.weights.embedding
        if shard.tp == 1:
            return F.embedding(ids, table)
        local = ids - shard.vocab_start
        foreign = (local < 0) | (local >= shard.vocab_size)
        x = F.embedding(local.masked_fill(foreign, 0), table)
        return self._group.all_reduce(x.masked_fill_(foreign[:, None], 0.0))

    def _attention(self, x: Tensor, layer: int, weights: LayerWeights, batch: Batch, angles: Angles) -> Tensor:
        kernels, spec, pool = self._kernels, self._spec, self.pool
        qkv = kernels.linear(x, weights.qkv)
        q = kernels.write_kv(batch.write, qkv, angles, pool, layer, spec)
        out = x.new_empty(x.shape[0], spec.heads, spec.head_dim)
        rows = batch.num_rows
        if batch.decode is not None:
            kernels.decode_attention(batch.decode, q[:rows], pool, layer, spec, out[:rows])
        if batch.prefill is not None:
            kernels.prefill_attention(batch.prefill, q[rows:], pool, layer, spec, out[rows:])
        return self._group.all_reduce(kernels.linear(out.view(x.shape[0], -1), weights.attention_out))

    def _mlp(self, x: Tensor, weights: LayerWeights) -> Tensor:
        kernels = self._kernels
        return self._group.all_reduce(kernels.linear(kernels.gated_linear(x, weights.gate_up), weights.down))

    def _logits(self, x: Tensor) -> Tensor:
        logits = self._kernels.linear(x, self.weights.head, torch.float32)
        rows = self.shard.vocab_rows
        present = rows.stop - rows.start
        if present < self.shard.vocab_size:
            logits[:, present:] = float("-inf")
        return logits


def make_kv_pool(shard: Shard, blocks: int, chunk_size: int, dtype: torch.dtype, device: torch.device) -> KvPool:
    """The KV pool of a rank, uninitialised: ops ignore slots that nothing was written to."""
    config = shard.config
    shape = (blocks, config.layers, 2, shard.kv_heads, chunk_size, config.head_dim)
    data = torch.empty(shape, dtype=dtype, device=device)
    advise_large_pages(data)
    return KvPool.wrap(data)
