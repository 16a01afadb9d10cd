"""The interface of the ops: the calls that the decoder makes and that every implementation provides.

The PyTorch reference (`trunkline.kernels.reference`) specifies each op; native versions are tested against it.
Plans (`trunkline.kernels.plan`) are built on the host once per change. They carry a `state`, in which an
implementation keeps the data that it derived from them.

Slots of the pool that no plan covers may contain anything, also NaN, and must not influence a result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from trunkline.kernels.grouped import GroupedWeight
from trunkline.kernels.live_plan import AnyDecodePlan
from trunkline.kernels.plan import PrefillPlan, WritePlan
from trunkline.kvstore.chunk_format import ChunkFormat, kv_format
from trunkline.kvstore.chunks import Int32Array


class Angles(NamedTuple):
    """Rotary factors of a step's tokens, laid out so that `x * cos + swap_halves(x) * sin` rotates `x`."""

    cos: Tensor
    """Cosines, `[tokens, 1, rotary_dim]`; the two halves are equal."""
    sin: Tensor
    """Sines, `[tokens, 1, rotary_dim]`; the first half is negated."""


@dataclass(frozen=True, slots=True)
class KvPool:
    """The device tier of the KV cache on one rank."""

    data: Tensor
    """KV of all blocks, `[blocks, *format.shape]`: layers, keys and values (or latents), heads of this rank,
    tokens, a row; contiguous: one chunk is one region for tier moves, and a strided view per layer."""
    packed: Tensor
    """uint8 `[blocks, layers]`. 1: the block's tiles of that layer are permuted in place, into an order private to
    the kernels that wrote them. Other code reads such a block through `gather_blocks`, which always gives the
    plain order."""
    format: ChunkFormat
    """What a chunk is in this pool, the rank's part of it."""
    thin: Callable[[Int32Array], None] | None = None
    """Gives back the memory of blocks for layers with a window (`trunkline.kernels.thin_memory`); None: the pool
    has all its memory for good."""
    windowed: tuple[bool, ...] = ()
    """Of a pool with `thin`: for each layer, whether it has a window."""

    @classmethod
    def wrap(cls, data: Tensor, chunk: ChunkFormat | None = None) -> KvPool:
        """Return a pool around a tensor in plain order.

        Args:
            chunk: What a chunk is; None: keys and values as they are computed, in the tensor's type.

        Raises:
            ValueError: The tensor is not of this format.
        """
        if chunk is None:
            _, layers, _, heads, chunk_size, head_dim = data.shape
            chunk = kv_format((layers, heads, chunk_size, head_dim), str(data.dtype).removeprefix("torch."))
        if data.shape[1:] != chunk.shape or str(data.dtype) != f"torch.{chunk.element}":
            raise ValueError(f"{data.dtype} {list(data.shape)} does not hold chunks of {chunk.text}")
        return cls(data, torch.zeros(data.shape[:2], dtype=torch.uint8, device=data.device), chunk)

    @property
    def blocks(self) -> int:
        return self.data.shape[0]

    @property
    def chunk_size(self) -> int:
        return self.format.chunk_size

    @property
    def computed(self) -> torch.dtype:
        """Type in which KV is computed, also that of what reads it; KV may be kept in another."""
        dtype: torch.dtype = getattr(torch, self.format.computed)
        return dtype


class QkNorm(NamedTuple):
    """RMS norm of each query and key head before rotation."""

    q_weight: Tensor
    """Weights of the query heads' norm, `[head_dim]`."""
    k_weight: Tensor
    """Weights of the key heads' norm, `[head_dim]`."""
    eps: float


Activation = Literal["silu", "gelu", "gelu_tanh", "clamped_silu"]
"""How a gated layer joins `gate` and `up`: `activation(gate) * up`. "clamped_silu" is that of gpt-oss:
`g * sigmoid(1.702 * g) * (u + 1)`, where g is the gate, at most 7, and u is `up`, between ±7."""
CLAMPED_SILU: Final = (1.702, 7.0)
"""Factor and limit of "clamped_silu"."""

Quantisation = Literal["", "int8"]
"""The form in which a linear layer's weight is stored: its own type (""), or as `trunkline.kernels.quantisation`
says."""


Weight = Tensor | GroupedWeight
"""A weight `[out, in]` as layers take it: floating point, or codes in groups."""


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A linear layer in the form that its kernels need. `Kernels.pack_linear` makes it; only they can use it."""

    out_features: int
    in_features: int
    data: Any
    """The packed weights, private to the kernels that packed them."""
    packed_bytes: int
    """Bytes of weight, scales and bias: the layer's memory, and what a call with few tokens reads."""


class ExpertMatrices(NamedTuple):
    """A matrix of each of a layer's experts on this rank, in one tensor."""

    weight: Tensor
    """`[experts, out, in]`: numbers, or codes of 8 bits (float8_e4m3fn or int8)."""
    scale: Tensor | None = None
    """float32 `[experts, out, groups]`: of codes, the factor for each group of inputs."""


@dataclass(frozen=True)
class ExpertStack:
    """A layer's experts on this rank in a few tensors, for grouped products. `Kernels.stack_experts` makes it."""

    up: ExpertMatrices
    """Gated matrices, `[experts, 2 * width, hidden]`: of each expert its gate, then up."""
    down: ExpertMatrices
    """Second matrices, `[experts, hidden, width]`."""
    multiply: Callable[[Tensor, ExpertMatrices, Tensor], Tensor]
    """Multiplies rows `[rows, in]`, sorted by expert, with the matrix of their expert. The third argument is int32
    `[experts]`: where each expert's rows end. Rows behind the last end may stay unwritten."""
    numbers: Tensor
    """int64 `[experts]`: 0, 1, 2, ….."""
    layers: tuple[tuple[PackedLinear, PackedLinear], ...]
    """The two layers of each expert, in the same memory."""
    activate: Callable[[Tensor], Tensor]
    """Makes `[rows, width]` of what the gated matrices give, `[rows, 2 * width]`."""

    def __str__(self) -> str:
        return f"{len(self.layers)} in one"


class RowAddend(NamedTuple):
    """What is added to some rows of a layer's result, before it is activated and rounded: what adapters add."""

    rows: Tensor
    """int64 `[n]`: the rows of `x`, distinct."""
    values: Tensor
    """float32 `[n, out]`; of a gated layer `[n, 2 * out]`, those of the gate first."""


@dataclass(frozen=True)
class AttentionSpec:
    """The constants of a layer's attention on this rank."""

    heads: int
    kv_heads: int
    """Number of KV heads. With `n = queries_per_kv`, query heads `[i * n, (i + 1) * n)` read KV head `i`."""
    head_dim: int
    """Numbers of a query or a key."""
    scale: float
    """Factor of the scores; usually `head_dim ** -0.5`."""
    inverse_frequencies: Tensor | None = None
    """float64 `[rotary_dim / 2]`, radians per position, for shifts; None: no rotary positions."""
    alibi_slopes: Tensor | None = None
    """float32 `[heads]`: `slope * (key position - query position)` is added to the score; None: no bias."""
    window: int = 0
    """Number of latest positions that a query sees, its own included; 0: all before it."""
    soft_cap: float = 0.0
    """Scaled scores become `soft_cap * tanh(score / soft_cap)`, before a bias; 0: as they are."""
    latent_dim: int = 0
    """Latent attention: so many numbers at the end of a key are also its value, and nothing else is stored of a
    token; 0: values are stored beside keys."""
    span: int = 0
    """A query sees only keys of its own part of the positions, which are cut every `span`; 0: they are not cut."""
    sinks: Tensor | None = None
    """float32 `[heads]`: the score of one more key, whose value is zero, in each query's softmax; None: there is
    none."""

    @property
    def queries_per_kv(self) -> int:
        """Number of query heads that read the same KV head (grouped-query attention)."""
        return self.heads // self.kv_heads

    @property
    def bands(self) -> int:
        """Number of vectors that are stored of a token and KV head."""
        return 1 if self.latent_dim else 2

    @property
    def value_dim(self) -> int:
        """Numbers of a value, and of a head's result."""
        return self.latent_dim or self.head_dim

    @property
    def qkv_width(self) -> int:
        """Numbers of a token's queries and of what is stored of it."""
        return (self.heads + self.bands * self.kv_heads) * self.head_dim


@dataclass
class KernelCounters:
    """Counts of the ops that ran, so that tests notice a silent fallback or a superfluous copy of a plan."""

    unread: list[Callable[[dict[str, int]], None]] = field(default_factory=list)
    """What adds calls that are counted elsewhere, since it was called last."""
    decode_plans: int = 0
    """Number of decode plans that were turned into device state ("lazy copy", ChunkAttention §3.3)."""
    decode_tokens_read: int = 0
    """Tokens of KV that decode attention has read, summed over layers; a token shared by several rows counts
    once."""
    decode_bytes_read: int = 0
    prefill_tokens_read: int = 0
    """Tokens of KV that prefill attention has read, summed over layers; a shared token counts once."""
    _calls: dict[str, int] = field(default_factory=dict)

    @property
    def calls(self) -> dict[str, int]:
        """Number of calls by op."""
        for add in self.unread:
            add(self._calls)
        return self._calls

    def called(self, op: str) -> None:
        self._calls[op] = self._calls.get(op, 0) + 1

    def reset(self) -> None:
        """Set all counts to zero, in place: parts of an implementation hold this object."""
        self.calls.clear()
        self.decode_plans = self.decode_tokens_read = self.decode_bytes_read = self.prefill_tokens_read = 0


class Kernels(Protocol):
    """An implementation of all ops for one device. One thread at a time may call an instance."""

    name: str
    counters: KernelCounters

    def write_kv(
        self,
        plan: WritePlan,
        qkv: Tensor,
        angles: Angles | None,
        pool: KvPool,
        layer: int,
        spec: AttentionSpec,
        norm: QkNorm | None = None,
    ) -> Tensor:
        """Split, rotate and store keys and values in one op (PagedAttention §4.3 and §5.1: fused block write).

        Args:
            plan: Where each token's key and value go.
            qkv: `[tokens, spec.qkv_width]`, contiguous: queries, keys, then values if they are stored beside
                keys; queries and keys are normalised and rotated in place.
            angles: rotary factors, None: nothing is rotated.
            layer: index into the pool's second dimension.
            spec: head counts.
            norm: applied to each query and key head before rotation.

        Returns:
            The rotated queries `[tokens, heads, head_dim]`, a view of `qkv`.
        """
        ...

    def decode_attention(
        self, plan: AnyDecodePlan, q: Tensor, pool: KvPool, layer: int, spec: AttentionSpec, out: Tensor
    ) -> None:
        """Compute attention of one query per row in two phases (ChunkAttention §3.2; PagedAttention §4.1: blocks).

        Args:
            plan: the work list, at its current `steps`.
            q: `[rows, heads, head_dim]`, rotated.
            out: `[rows, heads, value_dim]`, overwritten. A row without any token gets zeros.
        """
        ...

    def prefill_attention(
        self, plan: PrefillPlan, q: Tensor, pool: KvPool, layer: int, spec: AttentionSpec, out: Tensor
    ) -> None:
        """Compute attention of new tokens over their paged context, and causally among themselves.

        Args:
            plan: the work list.
            q: `[queries, heads, head_dim]`, rotated.
            out: `[queries, heads, value_dim]`, overwritten.
        """
        ...

    def copy_blocks(self, pool: KvPool, copies: Int32Array) -> None:
        """Copy token ranges between blocks, all layers (PagedAttention §4.3: fused block copy).

        Args:
            copies: int32 `[n, 4]`: source block, destination block, first token, token count. No destination
                range may be a source range of the same call.

        Raises:
            ValueError: A block or a range lies outside the pool.
        """
        ...

    def gather_blocks(self, pool: KvPool, blocks: Int32Array, layers: range, out: Tensor) -> None:
        """Copy layers of blocks into one tensor, in plain order however the pool holds them.

        Args:
            out: `[n, len(layers), bands, kv_heads, chunk_size, row]`, overwritten.
        """
        ...

    def scatter_blocks(self, pool: KvPool, blocks: Int32Array, layers: range, data: Tensor) -> None:
        """Copy layers of blocks back into the pool, the reverse of `gather_blocks`. `blocks` are distinct."""
        ...

    def gather_slots(
        self, pool: KvPool, blocks: Int32Array, layers: range, host: Tensor, slots: Int32Array
    ) -> None:
        """Copy layers of blocks straight into main memory, for tier moves (CachedAttention §3.2).

        Args:
            host: `[slots, all layers, bands, kv_heads, chunk_size, row]`, contiguous, on the CPU; pinned if the
                pool is on a GPU, where the copies are only enqueued.
            slots: where each block's layers go; distinct.
        """
        ...

    def scatter_slots(
        self, pool: KvPool, blocks: Int32Array, layers: range, host: Tensor, slots: Int32Array
    ) -> None:
        """Copy layers of blocks from main memory, the reverse of `gather_slots`. `blocks` are distinct."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return `x / sqrt(mean(x²) + eps) * weight` over the last dimension; statistics in at least float32."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add `x` into `residual` (in place) and return its `rms_norm`."""
        ...

    def pack_linear(self, weight: Weight, bias: Tensor | None, quantisation: Quantisation = "") -> PackedLinear:
        """Prepare the layer `y = x @ weight.T + bias`; `weight` is `[out, in]`, and is not kept if it was copied.

        Args:
            weight: floating point, or codes in groups, which are stored and multiplied as that class says.
            quantisation: "int8" stores one byte per weight and a scale per output, of a floating-point weight. As
                without it, `x` has the type that `weight` has here.
        """
        ...

    def linear(
        self,
        x: Tensor,
        layer: PackedLinear,
        out_dtype: torch.dtype | None = None,
        addend: RowAddend | None = None,
    ) -> Tensor:
        """Apply a layer to `x` `[tokens, in]`, contiguous.

        Returns:
            `[tokens, out]`, in `out_dtype` (the type of `x`, or float32) or else in the type of `x`; sums are
            in at least float32. A token's result does not depend on the other tokens beyond rounding.
        """
        ...

    def pack_gated_linear(
        self, weight: Weight, bias: Tensor | None, activation: Activation, quantisation: Quantisation = ""
    ) -> PackedLinear:
        """Prepare `activation(gate) * up` of `x @ weight.T + bias`; `weight` is `[2 * n, in]`: gate, then up."""
        ...

    def gated_linear(self, x: Tensor, layer: PackedLinear, addend: RowAddend | None = None) -> Tensor:
        """Apply a gated layer to `x` `[tokens, in]`; return `[tokens, n]`."""
        ...

    def stack_experts(
        self, experts: Sequence[tuple[PackedLinear, PackedLinear]], dtype: torch.dtype
    ) -> ExpertStack | None:
        """Bring the experts of a layer together; their old memory is not needed any more.

        Args:
            experts: gated layer and second layer of each.
            dtype: the type of the rows that they multiply.

        Returns:
            None: these kernels, this device or these weights have no grouped products, so experts are computed one
            at a time.
        """
        ...


def add_rows(out: Tensor, addend: RowAddend | None) -> Tensor:
    """Add to a layer's result, in place; return it."""
    return out if addend is None else out.index_add_(0, addend.rows, addend.values.to(out.dtype))


def check_copies(pool: KvPool, copies: Int32Array) -> None:
    """Refuse copies (`Kernels.copy_blocks`) of blocks or tokens that the pool does not have."""
    blocks, chunk_size = pool.blocks, pool.chunk_size
    for source, destination, first, count in copies.tolist():
        if not (0 <= source < blocks and 0 <= destination < blocks):
            raise ValueError(f"copy of block {source} to {destination}: the pool has {blocks} blocks")
        if not (first >= 0 and count > 0 and first + count <= chunk_size):
            raise ValueError(f"copy of tokens [{first}, {first + count}): a block has {chunk_size}")


def swap_halves(x: Tensor) -> Tensor:
    """Return a new tensor with the two halves of the last dimension exchanged."""
    half = x.shape[-1] // 2
    return torch.cat((x[..., half:], x[..., :half]), dim=-1)


def rotate(x: Tensor, angles: Angles) -> None:
    """Rotate the leading dimensions of each head of `x`, `[tokens, heads, head_dim]`, in place."""
    turned = x[..., : angles.cos.shape[-1]]
    swapped = swap_halves(turned)
    turned.mul_(angles.cos)
    turned.addcmul_(swapped, angles.sin)


def make_angles(
    positions: Tensor, inverse_frequencies: Tensor, factor: float = 1.0, dtype: torch.dtype | None = None
) -> Angles:
    """Return the rotary factors of positions.

    Args:
        positions: `[tokens]`, any numeric type, negative ones allowed.
        inverse_frequencies: `[rotary_dim / 2]`; the computation is in its dtype. In float32 the angle of a
            position in the millions, where sessions get to after many cuts, would be off by a tenth of a radian.
        factor: multiplies both (attention temperature of YaRN scaling).
        dtype: type of the result; None: the type of the computation.
    """
    angle = positions.to(inverse_frequencies.dtype)[:, None] * inverse_frequencies
    cos, sin = (x.mul_(factor).to(dtype or x.dtype) for x in (angle.cos(), angle.sin()))
    return Angles(torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None])
