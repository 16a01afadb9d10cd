"""A model's step as data: a flat list of ops over named buffers (docs/decisions/0017-a-step-is-a-program.md).

A program is compiled once, when a model is loaded. It is the one description of what a step computes: `op_by_op`
runs it over any kernels, the reference included, and the CPU kernels run it in one native call (`cpu_program`).

      buffer   `[rows, width]` in one type; rows are the step's tokens, the tokens whose final states are needed
               (`ForwardBatch.state_rows`), or the first of those, whose logits are needed
      op       reads buffers and writes or changes others; its weights and constants are its own

An op has no other effect than on its buffers and, for `StoreKv`, on the KV pool. Ops run in order. `str(program)`
is the whole program, a line for each buffer and each op with all of its constants.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from trunkline.kernels.ops import AttentionSpec, PackedLinear, QkNorm

PLAIN_ACTIVATIONS: Final = ("silu", "gelu", "gelu_tanh", "relu")
"""The names that `Activate` takes."""


class ProgramError(ValueError):
    """A program whose parts contradict each other."""


class Rows(StrEnum):
    """The number of rows that a buffer has in a step."""

    TOKENS = "tokens"
    STATES = "states"
    LOGITS = "logits"


@dataclass(frozen=True, slots=True)
class Buffer:
    """A matrix that ops read and write. Its contents mean nothing before the first op that writes it."""

    name: str
    rows: Rows
    width: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """What one step of a program does; `reads`, `writes` and `changes` name the fields that are its buffers."""

    kind: ClassVar[str]
    reads: ClassVar[tuple[str, ...]] = ()
    writes: ClassVar[tuple[str, ...]] = ()
    changes: ClassVar[tuple[str, ...]] = ()

    def buffers(self, *roles: str) -> list[Buffer]:
        """Return the buffers that the op has in these roles ("reads", "writes", "changes"), all three if none is
        named."""
        names = [name for role in roles or ("reads", "writes", "changes") for name in getattr(self, role)]
        return [buffer for name in names if (buffer := getattr(self, name)) is not None]

    def facts(self) -> Facts:
        """Return what has to be equal, besides what is checked for each kind here."""
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Embed(Op):
    """`out = table[ids - first]`; zeros for ids that the table does not have."""

    kind = "embed"
    writes = ("out",)
    table: Tensor
    """`[ids, width]`."""
    first: int
    out: Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class AddPositions(Op):
    """`into += table[positions]`."""

    kind = "add_positions"
    changes = ("into",)
    table: Tensor
    into: Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale(Op):
    """`into *= factor`."""

    kind = "scale"
    changes = ("into",)
    factor: float
    into: Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce(Op):
    """Sum `into` over the ranks, in place."""

    kind = "all_reduce"
    changes = ("into",)
    into: Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotations(Op):
    """Compute the rotary factors of the step's positions (`ops.make_angles`) for the layers that use them."""

    kind = "rotations"
    writes = ("cos", "sin")
    frequencies: Tensor
    """float64 `[rotary_dim / 2]`, radians per position."""
    factor: float
    cos: Buffer
    """Width `rotary_dim`, as is `sin`."""
    sin: Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class RmsNorm(Op):
    """`out` = RMS norm of `x`; with a residual, of `residual += x`."""

    kind = "rms_norm"
    reads = ("x",)
    writes = ("out",)
    changes = ("residual",)
    x: Buffer
    residual: Buffer | None
    weight: Tensor
    eps: float
    out: Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNorm(Op):
    """`out` = layer norm of `x`; with a residual, of `residual += x`."""

    kind = "layer_norm"
    reads = ("x",)
    writes = ("out",)
    changes = ("residual",)
    x: Buffer
    residual: Buffer | None
    weight: Tensor
    bias: Tensor | None
    eps: float
    out: Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear(Op):
    """`out` = the layer of `x`, of its first rows if `out` has only those; gated layers activate, too."""

    kind = "linear"
    reads = ("x",)
    writes = ("out",)
    x: Buffer
    layer: PackedLinear
    gated: bool
    out: Buffer
    place: str = ""
    """Name of the layer for adapters (`trunkline.kernels.adapters`); "": they have nothing for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activate(Op):
    """Apply one of `PLAIN_ACTIVATIONS`, in place."""

    kind = "activate"
    changes = ("into",)
    activation: str
    into: Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Clamp(Op):
    """Bring `into` between ± `limit`."""

    kind = "clamp"
    changes = ("into",)
    limit: float
    into: Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Add(Op):
    """`into += x`."""

    kind = "add"
    reads = ("x",)
    changes = ("into",)
    x: Buffer
    into: Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreKv(Op):
    """`Kernels.write_kv`: norm and rotate queries and keys in place, store keys and values."""

    kind = "store_kv"
    reads = ("cos", "sin")
    changes = ("qkv",)
    qkv: Buffer
    layer: int
    spec: AttentionSpec
    cos: Buffer | None
    sin: Buffer | None
    norm: QkNorm | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attend(Op):
    """`Kernels.decode_attention` of the decode rows, `Kernels.prefill_attention` of the tokens behind them."""

    kind = "attend"
    reads = ("qkv",)
    writes = ("out",)
    qkv: Buffer
    """Queries in front, as `StoreKv` left them; or queries alone, where the layer's KV is another one's."""
    layer: int
    """The layer of the pool whose KV it reads."""
    spec: AttentionSpec
    out: Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Select(Op):
    """`out` = the rows of `x` whose final states are needed."""

    kind = "select"
    reads = ("x",)
    writes = ("out",)
    x: Buffer
    out: Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftCap(Op):
    """`into = cap * tanh(into / cap)`."""

    kind = "soft_cap"
    changes = ("into",)
    cap: float
    into: Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Forbid(Op):
    """Set the columns of `into` from `first` on to -inf."""

    kind = "forbid"
    changes = ("into",)
    first: int
    into: Buffer


@dataclass(frozen=True, eq=False)
class Program:
    """A compiled step.

    Raises:
        ProgramError: Parts that contradict each other: a buffer that is read before it is written, two of a name,
            widths or types that do not fit an op.
    """

    ops: tuple[Op, ...]
    layers: int
    """Layers of the KV pool: those that store KV."""
    states: Buffer
    """The final hidden states."""
    logits: Buffer
    """float32, this rank's columns."""
    first_logit: int = 0
    """The id of the first of these columns."""

    def __post_init__(self) -> None:
        written: dict[str, Buffer] = {}
        for index, op in enumerate(self.ops):
            try:
                _check_op(op, written)
            except ProgramError as error:
                raise ProgramError(f"op {index} ({op.kind}): {error}") from None
        places = [place for op in self.ops if (place := getattr(op, "place", ""))]
        if len(set(places)) < len(places):
            raise ProgramError("two layers have the same name for adapters")
        for result in (self.states, self.logits):
            if written.get(result.name) != result:
                raise ProgramError(f"no op writes the result {result.name!r}")
        stored = [op.layer for op in self.ops if isinstance(op, StoreKv)]
        if stored != list(range(self.layers)):
            raise ProgramError(f"KV is stored for the layers {stored}, in this order; there are {self.layers}")

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """All buffers, in the order in which they are first written."""
        return tuple(dict.fromkeys(buffer for op in self.ops for buffer in op.buffers("writes")))

    @property
    def stores(self) -> tuple[int, ...]:
        """Index of the op that stores KV, for each layer."""
        return tuple(index for index, op in enumerate(self.ops) if isinstance(op, StoreKv))

    @property
    def states_end(self) -> int:
        """Number of ops up to and with the last one that touches the final states; the others make logits."""
        touching = [i for i, op in enumerate(self.ops) if self.states in op.buffers("writes", "changes")]
        return touching[-1] + 1

    def __str__(self) -> str:
        head = [f"program: {self.layers} layers, {len(self.ops)} ops, {len(self.buffers)} buffers"]
        named = [
            f"  {buffer.name}: {buffer.rows} × {buffer.width} {_type_name(buffer.dtype)}"
            for buffer in self.buffers
        ]
        lines = [f"  {index:4}  {printed(op)}" for index, op in enumerate(self.ops)]
        ends = [f"  states: {self.states.name}", f"  logits: {self.logits.name}"]
        return "\n".join((*head, "buffers", *named, "ops", *lines, "results", *ends))


def printed(op: Op) -> str:
    """Return an op in one line: its kind and all of its fields."""
    fields = (f"{field.name}={_described(getattr(op, field.name))}" for field in dataclasses.fields(op))
    return f"{op.kind} {' '.join(fields)}"


def _described(value: Any) -> str:
    """Return a field of an op in a few characters: a buffer by its name, a tensor by type and shape."""
    if isinstance(value, Buffer):
        return value.name
    if isinstance(value, Tensor):
        return f"{_type_name(value.dtype)}{list(value.shape)}".replace(" ", "")
    if isinstance(value, PackedLinear):
        return f"[{value.out_features},{value.in_features}]"
    if isinstance(value, QkNorm):
        return f"rms({value.eps:g})"
    if isinstance(value, tuple):
        return f"{len(value)}×({'+'.join(map(_described, value[0]))})" if value else "none"
    if isinstance(value, AttentionSpec):
        fields = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        return f"({' '.join(f'{name}={_described(own)}' for name, own in fields)})"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_op(op: Op, written: dict[str, Buffer]) -> None:
    """Refuse an op that does not fit; add to `written` what it writes."""
    for buffer in op.buffers("reads", "changes"):
        if written.get(buffer.name) != buffer:
            raise ProgramError(f"{buffer.name!r} was not written before, or is another buffer")
    for buffer in op.buffers("writes"):
        if buffer in op.buffers("reads", "changes"):
            raise ProgramError(f"{buffer.name!r} is read and written over")
        if written.setdefault(buffer.name, buffer) != buffer:
            raise ProgramError(f"there are two buffers {buffer.name!r}")
    for name, expected, found in (*_CHECKS.get(type(op), _no_facts)(op), *op.facts()):
        if expected != found:
            raise ProgramError(f"{name} is {found}; expected is {expected}")


Facts = list[tuple[str, Any, Any]]
"""What has to be equal: what it is, the expected value, the value found."""


def _no_facts(_: Any) -> Facts:
    return []


def _like(first: Buffer, second: Buffer | None, *, rows: bool = True) -> Facts:
    """Return that two buffers must be alike, apart from their names."""
    if second is None:
        return []
    facts: Facts = [
        (f"the width of {second.name!r}", first.width, second.width),
        (f"the type of {second.name!r}", first.dtype, second.dtype),
    ]
    return [*facts, (f"the rows of {second.name!r}", first.rows, second.rows)] if rows else facts


def _table_facts(op: Embed | AddPositions) -> Facts:
    buffer = op.out if isinstance(op, Embed) else op.into
    shape = ("the shape of the table", [len(op.table), buffer.width], list(op.table.shape))
    return [shape, ("the rows", Rows.TOKENS, buffer.rows), ("the type of the table", buffer.dtype, op.table.dtype)]


def _norm_facts(op: RmsNorm | LayerNorm) -> Facts:
    facts = _like(op.x, op.out) + _like(op.x, op.residual)
    return [*facts, ("the shape of the weight", [op.x.width], list(op.weight.shape))]


def _linear_facts(op: Linear) -> Facts:
    facts: Facts = [
        ("the width of x", op.layer.in_features, op.x.width),
        ("the width of out", op.layer.out_features, op.out.width),
    ]
    if (op.x.rows, op.out.rows) != (Rows.STATES, Rows.LOGITS):
        facts.append(("the rows of out", op.x.rows, op.out.rows))
    if op.place:
        facts.append(("whether adapters know its rows", True, op.out.rows is not Rows.LOGITS))
    if op.gated or op.out.dtype != torch.float32:
        facts.append(("the type of out", op.x.dtype, op.out.dtype))
    return facts


def _rotation_facts(op: Rotations) -> Facts:
    facts = _like(op.cos, op.sin)
    return [*facts, ("the width", 2 * len(op.frequencies), op.cos.width), ("the rows", Rows.TOKENS, op.cos.rows)]


def _store_facts(op: StoreKv) -> Facts:
    spec = op.spec
    facts: Facts = [
        ("the width of qkv", spec.qkv_width, op.qkv.width),
        ("the rows of qkv", Rows.TOKENS, op.qkv.rows),
        ("the presence of sin", op.cos is not None, op.sin is not None),
    ]
    if op.cos is not None:
        facts.append(("whether a head is wide enough for the rotation", True, op.cos.width <= spec.head_dim))
    return facts


def _attend_facts(op: Attend) -> Facts:
    spec, queries = op.spec, op.spec.heads * op.spec.head_dim
    return [
        ("the width of qkv", queries if op.qkv.width == queries else spec.qkv_width, op.qkv.width),
        ("the width of out", spec.heads * spec.value_dim, op.out.width),
        ("the rows of out", Rows.TOKENS, op.out.rows),
        ("the type of out", op.qkv.dtype, op.out.dtype),
    ]


def _select_facts(op: Select) -> Facts:
    rows: Facts = [("the rows of x", Rows.TOKENS, op.x.rows), ("the rows of out", Rows.STATES, op.out.rows)]
    return rows + _like(op.x, op.out, rows=False)


def _activate_facts(op: Activate) -> Facts:
    return [("whether there is such an activation", True, op.activation in PLAIN_ACTIVATIONS)]


_CHECKS: Final[dict[type[Op], Any]] = {
    Embed: _table_facts,
    AddPositions: _table_facts,
    RmsNorm: _norm_facts,
    LayerNorm: _norm_facts,
    Linear: _linear_facts,
    Rotations: _rotation_facts,
    StoreKv: _store_facts,
    Attend: _attend_facts,
    Select: _select_facts,
    Activate: _activate_facts,
    Add: lambda op: _like(op.x, op.into),
}
