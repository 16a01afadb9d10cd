"""The composable decoder: an `Architecture`'s layers over this rank's shard, paged KV and kernels.

      ids -> embedding -> [ norm -> qkv -> rotate, store KV -> attention -> out ─ all-reduce ─ +
                            norm -> gate, up -> down ─ all-reduce ─ + ] × layers -> norm -> head -> logits

This is LLaMA; `Residual` has the other ways in which attention and MLP come together, all written with the same
few parts. What is constant over steps is decided when the decoder is made.

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
from trunkline.kernels.ops import Angles, Kernels, KvPool
from trunkline.worker.batch.batch import Batch
from trunkline.worker.model.architecture import Residual
from trunkline.worker.model.checkpoint import Weights
from trunkline.worker.model.layers import NO_NORM, Layer, Ropes, make_layers, make_norm
from trunkline.worker.model.sharding import Shard
from trunkline.worker.parallel.collectives import TensorParallel
from trunkline.worker.tiers.layer_gate import StepGate


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
        self._ropes = Ropes(shard, pool.data.device)
        self._layers = make_layers(shard, weights, kernels, self._ropes, pool.data.device)
        self._final_norm = make_norm(shard, kernels, weights.final_norm)
        self._clip = config.qkv_clip
        self._one_norm = not config.architecture.names.mlp_norm
        self._finish = {
            Residual.SEQUENTIAL: self._finish_sequential,
            Residual.PARALLEL: self._finish_parallel,
            Residual.POST_NORM: self._finish_post_norm,
        }[config.architecture.residual]
        # Rounded like the embeddings that it multiplies.
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=pool.data.dtype))

    def forward(self, batch: Batch, gate: StepGate | None = None) -> Tensor | None:
        """Compute a step: store the new tokens' KV and return the logits that are asked for.

        Args:
            gate: Waits for each layer of KV, and is told when it is stored; None: nothing is loaded or saved.

        Returns:
            float32 `[logits rows, padded vocabulary / tp]`: this rank's columns, -inf where padded; None if the
            batch asks for none.
        """
        angles = self._ropes.angles(batch.positions, self.pool.data.dtype)
        last = self._layers[-1]
        residual = self._embed(batch)
        delta: Tensor | None = None
        for layer in self._layers:
            norm = layer.attention_norm
            x = norm.plain(residual) if delta is None else norm.add(delta, residual)
            part = self._attention(x, layer, batch, angles[layer.rope], gate)
            if layer is last:
                # From here on only the tokens matter whose logits are asked for.
                if not batch.needs_logits:
                    return None
                if batch.logit_rows is not None:
                    residual, part, x = residual[batch.logit_rows], part[batch.logit_rows], x[batch.logit_rows]
            residual, delta = self._finish(layer, x, part, residual)
        norm = self._final_norm
        return self._logits(norm.plain(residual) if delta is None else norm.add(delta, residual))

    def _embed(self, batch: Batch) -> Tensor:
        """Vocabulary-parallel: each rank looks up the ids it holds, the sum has them all."""
        shard, weights, ids = self.shard, self.weights, batch.ids
        if shard.tp == 1:
            x = F.embedding(ids, weights.embedding)
        else:
            local = ids - shard.vocab_start
            foreign = (local < 0) | (local >= shard.vocab_size)
            x = F.embedding(local.masked_fill(foreign, 0), weights.embedding).masked_fill_(foreign[:, None], 0.0)
        if weights.embedding_in is not None:
            x = self._kernels.linear(x, weights.embedding_in)
        if weights.positions is not None:
            x += F.embedding(batch.positions, weights.positions)
        x = self._group.all_reduce(x)
        return x.mul_(self._embedding_scale) if self._embedding_scale != 1.0 else x

    def _attention(
        self, x: Tensor, layer: Layer, batch: Batch, angles: Angles | None, gate: StepGate | None
    ) -> Tensor:
        """This rank's part of the sum over heads."""
        kernels, spec, pool = self._kernels, layer.spec, self.pool
        qkv = kernels.linear(x, layer.qkv)
        if self._clip:
            qkv.clamp_(-self._clip, self._clip)
        if gate is not None:
            gate.enter(layer.index)
        q = kernels.write_kv(batch.write, qkv, angles, pool, layer.index, spec, layer.qk_norm)
        if gate is not None:
            gate.stored(layer.index)
        out = x.new_empty(x.shape[0], spec.heads, spec.head_dim)
        rows = batch.num_rows
        if batch.decode is not None:
            kernels.decode_attention(batch.decode, q[:rows], pool, layer.index, spec, out[:rows])
        if batch.prefill is not None:
            kernels.prefill_attention(batch.prefill, q[rows:], pool, layer.index, spec, out[rows:])
        return kernels.linear(out.view(x.shape[0], -1), layer.attention_out)

    def _finish_sequential(
        self, layer: Layer, x: Tensor, part: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """A layer from behind its attention on.

        Args:
            x: attention's input.
            part: its output on this rank; may be changed in place.
            residual: what has been added up before; may be changed in place.

        Returns:
            The residual, and what is still to be added to it.
        """
        all_reduce = self._group.all_reduce
        delta = all_reduce(part)
        if layer.attention_post_norm is not NO_NORM:
            delta = layer.attention_post_norm.plain(delta)
        delta = all_reduce(layer.mlp(layer.mlp_norm.add(delta, residual)))
        if layer.mlp_post_norm is not NO_NORM:
            delta = layer.mlp_post_norm.plain(delta)
        return residual, delta

    def _finish_parallel(
        self, layer: Layer, x: Tensor, part: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """See `_finish_sequential`."""
        if not self._one_norm:
            x = layer.mlp_norm.plain(residual)
        return residual, self._group.all_reduce(part.add_(layer.mlp(x)))

    def _finish_post_norm(
        self, layer: Layer, x: Tensor, part: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """See `_finish_sequential`. The norms' results are what is added to."""
        x = layer.attention_post_norm.add(self._group.all_reduce(part), residual)
        return layer.mlp_post_norm.add(self._group.all_reduce(layer.mlp(x)), x), None

    def _logits(self, x: Tensor) -> Tensor:
        if self.weights.embedding_out is not None:
            x = self._kernels.linear(x, self.weights.embedding_out)
        logits = self._kernels.linear(x, self.weights.head, torch.float32)
        cap = self.shard.config.logit_soft_cap
        if cap:
            logits.div_(cap).tanh_().mul_(cap)
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
