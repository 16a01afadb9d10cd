"""Run a program op by op over any kernels: one Python call per op.

With the reference kernels this is what a program means. It serves GPUs, machines without compiled kernels, groups
whose sums go through other processes, and comparisons (`compare`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from trunkline.kernels.adapters import AdapterGroups, AdapterLayers, AdapterRows
from trunkline.kernels.experts import Experts, run_experts
from trunkline.kernels.family_ops import Gate, HeadNorm, Multiply, PrepareQueries, Spread
from trunkline.kernels.latent import Absorb, Expand
from trunkline.kernels.live_plan import AnyDecodePlan
from trunkline.kernels.ops import Angles, Kernels, KvPool, make_angles, rotate
from trunkline.kernels.plan import PrefillPlan, WritePlan
from trunkline.kernels.program import (
    Activate,
    Add,
    AddPositions,
    AllReduce,
    Attend,
    Buffer,
    Clamp,
    Embed,
    Forbid,
    LayerNorm,
    Linear,
    Op,
    Program,
    RmsNorm,
    Rotations,
    Rows,
    Scale,
    Select,
    SoftCap,
    StoreKv,
)
from trunkline.kernels.query_scale import Temper
from trunkline.kernels.wide_norms import SquareSums, WideNorm
from trunkline.kvstore.chunks import Int32Array


class StepBatch(Protocol):
    """What a program reads of a step; `worker.batch.batch.ForwardBatch` says what each part is."""

    @property
    def numbers(self) -> tuple[Int32Array, Int32Array]: ...
    @property
    def ids(self) -> Tensor: ...
    @property
    def positions(self) -> Tensor: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def write(self) -> WritePlan: ...
    @property
    def decode(self) -> AnyDecodePlan | None: ...
    @property
    def prefill(self) -> PrefillPlan | None: ...
    @property
    def state_rows(self) -> Tensor | None: ...
    @property
    def logits_rows(self) -> int: ...
    @property
    def adapters(self) -> AdapterRows | None: ...


class Collective(Protocol):
    """The ranks that share a model."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        ...

    @property
    def shared_handle(self) -> int:
        """Handle of the group in the compiled library (`shared_group`); 0: sums go another way."""
        ...


class StepRunner(Protocol):
    """Runs a program's ops. One step at a time; call under `torch.inference_mode`."""

    program: Program

    def begin(self, batch: StepBatch) -> None:
        """Take the step whose ops the next calls of `run` are about."""
        ...

    def run(self, start: int, stop: int) -> None:
        """Run ops `[start, stop)` of the program, of the step that has begun."""
        ...

    def value(self, buffer: Buffer) -> Tensor:
        """Return a buffer's rows of this step. Valid until the next one begins."""
        ...

    def set_value(self, buffer: Buffer, value: Tensor) -> None:
        """Overwrite a buffer's rows, for comparisons."""
        ...

    def set_adapter(self, key: bytes, layers: AdapterLayers | None) -> None:
        """Take an adapter for the steps that follow, or forget it (None). Not within a step."""
        ...


_ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "relu": F.relu_,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": lambda x: F.silu(x, inplace=True),
}


class OpByOp:
    """Implements `StepRunner`. Buffers are tensors that the ops return."""

    def __init__(self, program: Program, kernels: Kernels, pool: KvPool, group: Collective) -> None:
        self.program = program
        self._kernels = kernels
        self._pool = pool
        self._group = group
        self._values: dict[str, Tensor] = {}
        self._batch: StepBatch
        self._adapters: dict[bytes, AdapterLayers] = {}
        self._adapted: dict[Rows, AdapterGroups] = {}
        calls: dict[type[Op], Callable[[Any], None]] = {
            Embed: self._embed,
            AddPositions: self._add_positions,
            Scale: self._scale,
            AllReduce: self._all_reduce,
            Rotations: self._rotations,
            RmsNorm: self._rms_norm,
            LayerNorm: self._layer_norm,
            Linear: self._linear,
            Activate: self._activate,
            Clamp: self._clamp,
            Add: self._add,
            Gate: self._gate,
            HeadNorm: self._head_norm,
            PrepareQueries: self._prepare_queries,
            Multiply: self._multiply,
            SquareSums: self._square_sums,
            WideNorm: self._wide_norm,
            Absorb: self._absorb,
            Expand: self._expand,
            StoreKv: self._store_kv,
            Temper: self._temper,
            Attend: self._attend,
            Experts: self._experts,
            Select: self._select,
            Spread: self._spread,
            SoftCap: self._soft_cap,
            Forbid: self._forbid,
        }
        self._bound = [(calls[type(op)], op) for op in program.ops]

    def begin(self, batch: StepBatch) -> None:
        self._batch = batch
        self._values.clear()
        self._adapted.clear()
        if batch.adapters is not None:
            device = batch.ids.device
            for rows, chosen in ((Rows.TOKENS, None), (Rows.STATES, batch.state_rows)):
                self._adapted[rows] = AdapterGroups(batch.adapters, chosen, self._adapters, device)

    def run(self, start: int, stop: int) -> None:
        for call, op in self._bound[start:stop]:
            call(op)

    def value(self, buffer: Buffer) -> Tensor:
        return self._values[buffer.name]

    def set_value(self, buffer: Buffer, value: Tensor) -> None:
        self._values[buffer.name] = value

    def set_adapter(self, key: bytes, layers: AdapterLayers | None) -> None:
        if layers is None:
            self._adapters.pop(key, None)
        else:
            self._adapters[key] = layers

    def _embed(self, op: Embed) -> None:
        ids, size = self._batch.ids, len(op.table)
        local = ids - op.first
        foreign = (local < 0) | (local >= size)
        rows = F.embedding(local.masked_fill(foreign, 0), op.table)
        self._values[op.out.name] = rows.masked_fill_(foreign[:, None], 0.0)

    def _add_positions(self, op: AddPositions) -> None:
        self._values[op.into.name] += F.embedding(self._batch.positions, op.table)

    def _scale(self, op: Scale) -> None:
        self._values[op.into.name].mul_(op.factor)

    def _all_reduce(self, op: AllReduce) -> None:
        self._group.all_reduce(self._values[op.into.name])

    def _rotations(self, op: Rotations) -> None:
        angles = make_angles(self._batch.positions, op.frequencies, op.factor, op.cos.dtype)
        self._values[op.cos.name], self._values[op.sin.name] = angles.cos[:, 0], angles.sin[:, 0]

    def _rms_norm(self, op: RmsNorm) -> None:
        x = self._values[op.x.name]
        if op.residual is None:
            out = self._kernels.rms_norm(x, op.weight, op.eps)
        else:
            out = self._kernels.add_rms_norm(x, self._values[op.residual.name], op.weight, op.eps)
        self._values[op.out.name] = out

    def _layer_norm(self, op: LayerNorm) -> None:
        x = self._values[op.x.name]
        if op.residual is not None:
            x = self._values[op.residual.name].add_(x)
        # Statistics of half types are in float32.
        self._values[op.out.name] = F.layer_norm(x, (x.shape[-1],), op.weight, op.bias, op.eps)

    def _linear(self, op: Linear) -> None:
        x, out = self._values[op.x.name], op.out
        if out.rows is Rows.LOGITS and op.x.rows is Rows.STATES:
            x = x[: self._batch.logits_rows]
        addend = None
        if op.place and self._adapted:
            addend = self._adapted[out.rows].addend(self._kernels, op.place, x)
        if op.gated:
            self._values[out.name] = self._kernels.gated_linear(x, op.layer, addend)
        else:
            dtype = None if out.dtype == x.dtype else out.dtype
            self._values[out.name] = self._kernels.linear(x, op.layer, dtype, addend)

    def _activate(self, op: Activate) -> None:
        self._values[op.into.name] = _ACTIVATIONS[op.activation](self._values[op.into.name])

    def _clamp(self, op: Clamp) -> None:
        self._values[op.into.name].clamp_(-op.limit, op.limit)

    def _add(self, op: Add) -> None:
        self._values[op.into.name].add_(self._values[op.x.name])

    def _gate(self, op: Gate) -> None:
        into = self._values[op.into.name]
        into.copy_(into.float() * self._values[op.x.name].sigmoid())

    def _head_norm(self, op: HeadNorm) -> None:
        _norm_heads(self._values[op.into.name][:, op.first :], op.weight, op.eps)

    def _prepare_queries(self, op: PrepareQueries) -> None:
        queries = self._values[op.queries.name]
        if op.weight is not None:
            _norm_heads(queries, op.weight, op.eps)
        if (angles := self._angles(op.cos, op.sin)) is not None:
            rotate(queries.view(len(queries), op.spec.heads, -1), angles)

    def _multiply(self, op: Multiply) -> None:
        columns = slice(op.first, op.first + op.into.width)
        self._values[op.into.name].mul_(self._values[op.x.name][:, columns])

    def _square_sums(self, op: SquareSums) -> None:
        queries, keys, _ = _split(self._values[op.qkv.name], *op.widths)
        sums = [part.float().square().sum(dim=-1) for part in (queries, keys)]
        self._values[op.out.name] = torch.stack(sums, dim=-1)

    def _wide_norm(self, op: WideNorm) -> None:
        weights = (op.norm.q_weight, op.norm.k_weight)
        parts = _split(self._values[op.qkv.name], *map(len, weights))
        for part, weight, total in zip(parts, weights, self._values[op.sums.name].unbind(-1), strict=False):
            factor = (total / (len(weight) * op.ranks) + op.norm.eps).rsqrt()
            part.copy_(part.float() * factor[:, None] * weight.float())

    def _absorb(self, op: Absorb) -> None:
        queries, rotary = self._values[op.queries.name], op.rotary.width
        by_head = queries.view(len(queries), len(op.layers), -1)
        made = by_head.new_empty(len(queries), len(op.layers) + 1, rotary + op.latent.width)
        made[:, :-1, :rotary] = by_head[..., :rotary]
        for head, layer in enumerate(op.layers):
            made[:, head, rotary:] = self._kernels.linear(by_head[:, head, rotary:].contiguous(), layer)
        made[:, -1, :rotary], made[:, -1, rotary:] = self._values[op.rotary.name], self._values[op.latent.name]
        self._values[op.out.name] = made.view(len(queries), -1)

    def _expand(self, op: Expand) -> None:
        x = self._values[op.x.name]
        parts = x.view(len(x), len(op.layers), -1).unbind(1)
        made = [self._kernels.linear(part.contiguous(), own) for part, own in zip(parts, op.layers, strict=True)]
        self._values[op.out.name] = torch.cat(made, dim=-1)

    def _store_kv(self, op: StoreKv) -> None:
        angles, qkv, write = self._angles(op.cos, op.sin), self._values[op.qkv.name], self._batch.write
        self._kernels.write_kv(write, qkv, angles, self._pool, op.layer, op.spec, op.norm)

    def _angles(self, cos: Buffer | None, sin: Buffer | None) -> Angles | None:
        if cos is None or sin is None:
            return None
        return Angles(self._values[cos.name][:, None], self._values[sin.name][:, None])

    def _temper(self, op: Temper) -> None:
        parts = (self._batch.positions + op.added).div(op.period, rounding_mode="floor").double()
        factor = (parts.log1p().mul_(op.factor) + 1.0).float()
        queries = self._values[op.qkv.name][:, : op.width]
        queries.copy_(queries.float() * factor[:, None])

    def _attend(self, op: Attend) -> None:
        kernels, spec, pool, batch = self._kernels, op.spec, self._pool, self._batch
        qkv = self._values[op.qkv.name]
        q = qkv.view(len(qkv), -1, spec.head_dim)[:, : spec.heads]
        out = q.new_empty(len(qkv), spec.heads, spec.value_dim)
        rows = batch.num_rows
        if batch.decode is not None:
            kernels.decode_attention(batch.decode, q[:rows], pool, op.layer, spec, out[:rows])
        if batch.prefill is not None:
            kernels.prefill_attention(batch.prefill, q[rows:], pool, op.layer, spec, out[rows:])
        self._values[op.out.name] = out.view(len(qkv), -1)

    def _experts(self, op: Experts) -> None:
        router_x = None if op.router_x is None else self._values[op.router_x.name]
        adapted = self._adapted.get(op.x.rows)
        self._values[op.out.name] = run_experts(self._kernels, op, self._values[op.x.name], router_x, adapted)

    def _select(self, op: Select) -> None:
        x, rows = self._values[op.x.name], self._batch.state_rows
        self._values[op.out.name] = x if rows is None else x[rows]

    def _spread(self, op: Spread) -> None:
        x, rows = self._values[op.x.name], self._batch.state_rows
        if rows is None:
            self._values[op.out.name] = x.clone()
            return
        out = self._values[op.out.name] = x.new_zeros(len(self._batch.ids), op.out.width)
        out[rows] = x

    def _soft_cap(self, op: SoftCap) -> None:
        self._values[op.into.name].div_(op.cap).tanh_().mul_(op.cap)

    def _forbid(self, op: Forbid) -> None:
        self._values[op.into.name][:, op.first :] = float("-inf")


def _split(qkv: Tensor, queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of queries, keys and the columns behind them."""
    return qkv[:, :queries], qkv[:, queries : queries + keys], qkv[:, queries + keys :]


def _norm_heads(part: Tensor, weight: Tensor, eps: float) -> None:
    """RMS norm of each head, as wide as the weight, in place."""
    heads = part.float().view(len(part), -1, len(weight))
    normal = heads * (heads.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    part.copy_((normal.to(part.dtype).float() * weight.float()).flatten(1))


class OpDifference(NamedTuple):
    """How far two runners' results of one op are apart."""

    number: int
    """Index of the op in the program."""
    op: Op
    largest: float
    """Largest absolute difference over the op's buffers."""
    size: float
    """Largest magnitude of the expected values."""


def compare(runner: StepRunner, expected: StepRunner, batch: StepBatch, other: StepBatch) -> list[OpDifference]:
    """Run a step on both runners op by op, each op on what `expected` has, and return how far they are apart.

    Args:
        runner: runs a program of the same ops as `expected` (of other kernels, so with weights packed otherwise),
            over a pool of the same contents.
        other: the step for `expected`: a batch with plans of its own, as kernels keep their state in plans.
    """
    runner.begin(batch)
    expected.begin(other)
    found = []
    for index, (op, reference) in enumerate(zip(runner.program.ops, expected.program.ops, strict=True)):
        for buffer in reference.buffers("reads", "changes"):
            runner.set_value(buffer, expected.value(buffer).clone())
        runner.run(index, index + 1)
        expected.run(index, index + 1)
        largest = size = 0.0
        for buffer in reference.buffers("writes", "changes"):
            ours, theirs = runner.value(buffer).float(), expected.value(buffer).float()
            if not theirs.numel():
                continue
            apart = (ours - theirs).abs().masked_fill_(ours == theirs, 0.0)  # infinities are equal
            largest = max(largest, float(apart.max()))
            size = max(size, float(theirs.masked_fill(theirs.isinf(), 0.0).abs().max()))
        found.append(OpDifference(index, op, largest, size))
    return found
