"""Programs on CPUs: a step is one call of the compiled library, over buffers that stay (`csrc/cpu/program.h`).

Sums over ranks that do not share memory run op by op, in the same buffers, between calls for the ops before and
behind them. Gates and comparisons run ranges of ops, each a call.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from trunkline.kernels.adapters import AdapterLayers
from trunkline.kernels.cpu import DENSE_TYPES, CpuKernels
from trunkline.kernels.cpu_adapters import ProgramAdapters, sites_of
from trunkline.kernels.cpu_counting import Counting
from trunkline.kernels.cpu_memory import ProgramMemory, TokenMemory
from trunkline.kernels.cpu_plans import NONE, CpuDecodeWork, ShiftTable, prefill_state, turns_queries
from trunkline.kernels.experts import Experts
from trunkline.kernels.family_ops import Gate, HeadNorm, Multiply, PrepareQueries, Spread
from trunkline.kernels.latent import Absorb, Expand
from trunkline.kernels.live_plan import LiveDecodePlan
from trunkline.kernels.native import library
from trunkline.kernels.op_by_op import Collective, OpByOp, StepBatch
from trunkline.kernels.ops import KvPool, PackedLinear
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
from trunkline.kernels.routing import Routing
from trunkline.kernels.wide_norms import SquareSums, WideNorm
from trunkline.kvstore.chunks import Int32Array

KV_TYPES: Final = {"float32": 0, "float16": 1, "bfloat16": 2}
"""The number of each `KvType` in `csrc/cpu/attention.h`."""
KINDS: Final[dict[type[Op], int]] = {
    Embed: 1,
    AddPositions: 2,
    Scale: 3,
    AllReduce: 4,
    Rotations: 5,
    RmsNorm: 6,
    LayerNorm: 7,
    Linear: 8,
    Activate: 9,
    Clamp: 10,
    Add: 11,
    StoreKv: 12,
    Attend: 13,
    Select: 14,
    SoftCap: 15,
    Forbid: 16,
    Experts: 17,
    SquareSums: 18,
    WideNorm: 19,
    Absorb: 20,
    Expand: 21,
    Temper: 22,
    Gate: 23,
    HeadNorm: 24,
    PrepareQueries: 25,
    Multiply: 26,
    Spread: 27,
}
"""The number of each op in `csrc/cpu/program.h`."""
HOST: Final = 0
"""Instead of an op's number: it is run op by op."""
ROW_KINDS: Final = {Rows.TOKENS: 0, Rows.STATES: 1, Rows.LOGITS: 2}
ACTIVATIONS: Final = {"relu": 4, "silu": 5, "gelu": 6, "gelu_tanh": 7}
"""The number of each plain activation among `ElementOp` (`csrc/cpu/elementwise.h`)."""
OP_WORDS: Final = 12
NO_IDS: Final = torch.empty(0, dtype=torch.int64)
NO_WORDS: Final = torch.empty(0, dtype=torch.int32)


class _Words:
    """A program in the form that the library reads."""

    def __init__(self, program: Program, ropes: list[Tensor], *, shares_memory: bool) -> None:
        self.buffers = program.buffers
        self.constants: list[Tensor] = []
        self.ropes = ropes
        self._index = {buffer: index for index, buffer in enumerate(self.buffers)}
        self.is_native = [_is_native(op, shares_memory) for op in program.ops]
        rows = []
        for index, op in enumerate(program.ops):
            words = [KINDS[type(op)], *self._words(op)] if self.is_native[index] else [HOST]
            rows.append(words + [0] * (OP_WORDS - len(words)))
        self.words = torch.tensor(rows, dtype=torch.int64)
        self.reals = torch.tensor([_reals(op) for op in program.ops], dtype=torch.float64)
        described = [(ROW_KINDS[own.rows], own.width, DENSE_TYPES[own.dtype]) for own in self.buffers]
        self.sizes = torch.tensor(described, dtype=torch.int64)

    def _buffer(self, buffer: Buffer | None) -> int:
        return -1 if buffer is None else self._index[buffer]

    def _constant(self, tensor: Tensor | None) -> int:
        if tensor is None:
            return -1
        self.constants.append(tensor.contiguous())
        return len(self.constants) - 1

    def _words(self, op: Op) -> list[int]:
        buffer, constant = self._buffer, self._constant
        match op:
            case Embed():
                return [buffer(op.out), constant(op.table), op.first]
            case AddPositions():
                return [buffer(op.into), constant(op.table)]
            case Rotations():
                return [buffer(op.cos), buffer(op.sin), constant(op.frequencies)]
            case RmsNorm():
                return [buffer(op.x), buffer(op.residual), constant(op.weight), buffer(op.out)]
            case LayerNorm():
                norm = [buffer(op.x), buffer(op.residual), constant(op.weight), buffer(op.out)]
                return [*norm, constant(op.bias)]
            case Linear():
                return [buffer(op.x), op.layer.data.handle, buffer(op.out), int(op.gated)]
            case Experts():
                layers = (op.router, *(layer for expert in op.experts for layer in expert))
                routed = [buffer(op.x), constant(_handles(layers)), buffer(op.out), op.first]
                routed += [*_routing_words(op.routing), constant(op.choice_bias)]
                return [*routed, buffer(op.router_x), constant(op.scale)]
            case Absorb():
                read = [buffer(op.queries), buffer(op.rotary), buffer(op.latent)]
                return [*read, constant(_handles(op.layers)), buffer(op.out)]
            case Expand():
                return [buffer(op.x), constant(_handles(op.layers)), buffer(op.out)]
            case SquareSums():
                return [buffer(op.qkv), buffer(op.out), *op.widths]
            case WideNorm():
                norms = (op.norm.q_weight, op.norm.k_weight)
                return [buffer(op.qkv), buffer(op.sums), *map(constant, norms)]
            case StoreKv():
                weights = (None, None) if op.norm is None else (op.norm.q_weight, op.norm.k_weight)
                heads = [buffer(op.qkv), op.layer, op.spec.heads, buffer(op.cos), buffer(op.sin)]
                return [*heads, *map(constant, weights)]
            case PrepareQueries():
                heads = [buffer(op.queries), 0, op.spec.heads, buffer(op.cos), buffer(op.sin)]
                return [*heads, *map(constant, (op.weight, op.weight))]
            case Attend():
                spec, heads = op.spec, [buffer(op.qkv), op.layer, op.spec.heads, buffer(op.out), self._rope(op)]
                return [*heads, constant(spec.alibi_slopes), spec.window, constant(spec.sinks), spec.span]
            case Temper():
                return [buffer(op.qkv), op.width, op.period, op.added]
            case HeadNorm():
                return [buffer(op.into), op.first, constant(op.weight)]
            case Multiply():
                return [buffer(op.into), buffer(op.x), op.first]
            case Activate():
                return [buffer(op.into), ACTIVATIONS[op.activation]]
            case Add() | Gate():
                return [buffer(op.into), buffer(op.x)]
            case Select() | Spread():
                return [buffer(op.x), buffer(op.out)]
            case Forbid():
                return [buffer(op.into), op.first]
            case Scale() | AllReduce() | Clamp() | SoftCap():
                return [buffer(op.into)]
        raise TypeError(f"the library has no op {op.kind!r}")

    def _rope(self, op: Attend) -> int:
        frequencies = op.spec.inverse_frequencies
        return next((index for index, known in enumerate(self.ropes) if known is frequencies), -1)


def _handles(layers: tuple[PackedLinear, ...]) -> Tensor:
    return torch.tensor([layer.data.handle for layer in layers], dtype=torch.int64)


def _type_beside(pool: KvPool) -> int:
    """Return the number of the type that KV is computed in, where the pool's tensor does not say it; else 0."""
    return KV_TYPES[pool.format.computed] if pool.format.is_quantised else 0


def _is_native(op: Op, shares_memory: bool) -> bool:
    """Return whether the library runs an op.

    Args:
        shares_memory: whether the ranks do, if there are several.
    """
    if isinstance(op, Experts):
        one_best = op.routing.groups == 1 or op.routing.group_best == 1
        return op.routing.scores == "sigmoid" or op.choice_bias is not None or one_best
    return shares_memory or not isinstance(op, AllReduce)


def _routing_words(routing: Routing) -> list[int]:
    flags = int(routing.scores == "sigmoid") + 2 * int(not routing.normalised) + 4 * int(routing.group_best == 1)
    flags += 8 * int(routing.scales_inputs)
    return [routing.per_token, flags, routing.groups, routing.groups_per_token]


def _reals(op: Op) -> tuple[float, float]:
    match op:
        case Experts():
            return op.routing.factor, 0.0
        case WideNorm():
            return op.norm.eps, float(op.ranks)
        case Scale() | Rotations() | Temper():
            return op.factor, 0.0
        case RmsNorm() | LayerNorm() | HeadNorm() | PrepareQueries():
            return op.eps, 0.0
        case Clamp():
            return op.limit, 0.0
        case SoftCap():
            return op.cap, 0.0
        case StoreKv():
            return (0.0 if op.norm is None else op.norm.eps), 0.0
        case Attend():
            return op.spec.scale, op.spec.soft_cap
    return 0.0, 0.0


class _Steady(NamedTuple):
    """What must stay the same for the next step to go on from one of decode rows and nothing else."""

    tokens: TokenMemory
    words: Tensor
    work: CpuDecodeWork

    @classmethod
    def of(cls, batch: StepBatch, work: CpuDecodeWork, tokens: TokenMemory) -> _Steady | None:
        """Return that of a step; None if it is more than decode rows."""
        is_more = batch.prefill is not None or batch.state_rows is not None or batch.adapters is not None
        if is_more or work.shifts is not None or batch.logits_rows != tokens.number:
            return None
        return cls(tokens, work.words, work)


class _Library:
    """The library's functions for the steps of one program."""

    def __init__(self, module: Any, handle: int) -> None:
        waiting = (module.program_run, module.program_largest, module.program_step)
        # Other ranks are waited for; a step takes milliseconds. Other threads of the interpreter go on meanwhile.
        for call in waiting:
            call.release_gil = True
        self.run, self.largest, self.step = (partial(call, handle) for call in waiting)
        self.begin, self.go_on = partial(module.program_begin, handle), partial(module.program_go_on, handle)


class CpuProgram:
    """Implements `StepRunner` for `CpuKernels`."""

    def __init__(self, program: Program, kernels: CpuKernels, pool: KvPool, group: Collective) -> None:
        """
        Raises:
            ValueError: The library refuses the program.
        """
        self.program = program
        self._kernels = kernels
        self._pool = pool
        attending = [op.spec for op in program.ops if isinstance(op, Attend)]
        specs = {id(spec): spec for spec in attending}
        self._turning = list(specs.values())
        ropes = {id(op.frequencies): op.frequencies for op in program.ops if isinstance(op, Rotations)}
        self._words = words = _Words(program, list(ropes.values()), shares_memory=group.shared_handle != 0)
        module: Any = library()
        handle: int = module.program_new(
            kernels.context.handle,
            words.words,
            words.reals,
            words.sizes,
            words.constants,
            len(words.ropes),
            pool.data,
            pool.packed,
            group.shared_handle,
            int(kernels.buffered) + 2 * int(kernels.planning.invariant_tokens > 0) + 4 * _type_beside(pool),
            pool.format.latent,
            words.buffers.index(program.logits),
            program.first_logit,
        )
        weakref.finalize(self, module.program_delete, handle)
        self._library = _Library(module, handle)
        self._memory = ProgramMemory(words.buffers, partial(module.program_bind, handle))
        self._counting = Counting(program.ops, kernels.counters, pool.format.layer_token_bytes)
        sums = (own for op, own in zip(program.ops, words.is_native, strict=True) if isinstance(op, AllReduce))
        self.takes_largest = all(sums)
        """Whether `largest` can be asked."""
        self._read: tuple[int | None, int | None] = (None, None)
        """Numbers of tokens that a layer of this step reads: for rows that decode, for prompts."""
        calls = (partial(call, handle) for call in (module.program_adapter, module.program_adapt))
        sites = [site for op, own in zip(program.ops, words.is_native, strict=True) for site in sites_of(op, own)]
        self._adapters = ProgramAdapters(sites, *calls)
        self._held: tuple[object, ...] = ()
        """What the library points to: it is kept until the next step."""
        self._steady: _Steady | None = None
        """What the last step had, if it was one of decode rows and nothing else."""
        self._segments: dict[tuple[int, int], list[tuple[bool, int, int]]] = {}
        self._others = OpByOp(program, kernels, pool, group) if not all(words.is_native) else None

    def begin(self, batch: StepBatch) -> None:
        (ids, positions), state_rows = batch.numbers, batch.state_rows
        tokens = len(ids)
        rows = {
            Rows.TOKENS: tokens,
            Rows.STATES: tokens if state_rows is None else len(state_rows),
            Rows.LOGITS: batch.logits_rows,
        }
        before, self._steady = self._steady, None  # a step that is refused leaves nothing to go on from
        self._memory.take(rows)
        own = self._memory.tokens(ids, positions, batch.write.slots)
        kernels, pool, spec = self._kernels, self._pool, self._turning[0]
        work, steps, words = None, 0, NO_WORDS
        if batch.decode is not None:
            work, steps = kernels.planning.decode_work(batch.decode, pool, spec), batch.decode.steps
            words = work.words
        prefill = None if batch.prefill is None else prefill_state(batch.prefill, pool)
        self._read = (
            None if work is None else work.tokens + steps * batch.num_rows,
            None if prefill is None else prefill.tokens_read,
        )
        steady = None if work is None else _Steady.of(batch, work, own)
        if before is not None and steady is not None and before.tokens is own and before.words is words:
            self._library.go_on(steps)  # the library has all but what has been written into its memory
        else:
            decode_angles = [] if work is None else self._angles(work.shifts)
            prefill_angles = [] if prefill is None else self._angles(prefill.shifts)
            self._held = held = (
                *own.views,
                NO_IDS if state_rows is None else state_rows,
                words,
                work.entry_query if work is not None and decode_angles else NONE,
                work.turns if work is not None and decode_angles else NONE,
                NO_WORDS if prefill is None else prefill.words,
                decode_angles,
                prefill_angles,
            )
            self._library.begin(tokens, batch.num_rows, rows[Rows.STATES], rows[Rows.LOGITS], steps, *held)
        self._steady = steady
        if batch.adapters is not None:
            self._adapters.use(batch.adapters)
        if self._others is not None:
            self._others.begin(batch)

    @property
    def goes_on(self) -> bool:
        """Whether the last step was one of decode rows and nothing else, so that `go_on` may follow."""
        return self._steady is not None and self._steady.work.live is not None and self._others is None

    def put_ids(self, ids: Int32Array) -> None:
        """Take the token of each row for `go_on`."""
        assert self._steady is not None
        self._steady.tokens.ids[:] = ids.data

    def go_on(self, plan: LiveDecodePlan, *, takes_largest: bool) -> bytes:
        """Compute the whole step of the same rows behind the last one, instead of `begin` and `run`: each row has
        one more token, in the place behind the last one's.

        Args:
            plan: Of the last step. It goes on, too.
            takes_largest: Whether each row computes the token with its largest logit next; else `put_ids` says
                which.

        Returns:
            The ids of these tokens, packed; nothing if they are not taken.

        Raises:
            ValueError: A row has no room for another token.
        """
        steady, self._steady = self._steady, None
        assert steady is not None
        (tokens, _, work), live = steady, steady.work.live
        assert live is not None
        plan.grow(live)
        generation = self._library.step(live.handle, plan.steps, takes_largest)
        if generation >= 0:  # the pieces are others
            live.take_words(generation)
            work = self._kernels.planning.decode_work(plan, self._pool, self._turning[0])
            steady = _Steady(tokens, work.words, work)
        self._counting.ran(0, len(self.program.ops), work.tokens + plan.steps * plan.num_rows, None)
        self._steady = steady
        return bytes(tokens.ids) if takes_largest else b""

    def largest(self) -> Int32Array:
        """Return the id of the largest logit of each row of the last step, of equal ones the first: the same on
        every rank. Not where ranks do not share memory (`takes_largest`)."""
        ids = torch.empty(self._memory.rows[Rows.LOGITS], dtype=torch.int32)
        self._library.largest(ids)
        found: Int32Array = ids.numpy()
        return found

    def run(self, start: int, stop: int) -> None:
        if start == stop:
            return
        key = (start, stop)
        segments = self._segments.get(key)
        if segments is None:
            segments = self._segments[key] = self._split(start, stop)
        for is_native, first, last in segments:
            if is_native:
                self._library.run(first, last)
                self._counting.ran(first, last, *self._read)
            else:
                self._run_others(first, last)

    def value(self, buffer: Buffer) -> Tensor:
        return self._memory.value(buffer)

    def set_value(self, buffer: Buffer, value: Tensor) -> None:
        self.value(buffer).copy_(value)

    def set_adapter(self, key: bytes, layers: AdapterLayers | None) -> None:
        self._adapters.set(key, layers)
        if self._others is not None:
            self._others.set_adapter(key, layers)

    def addresses(self) -> list[int]:
        """Return where the buffers are, which steady decoding does not change."""
        return self._memory.addresses()

    def _angles(self, shifts: ShiftTable | None) -> list[Tensor]:
        """Return the angles by which queries turn for shifted items, for each rope.

        Raises:
            ValueError: A layer's attention does not depend on distances.
        """
        if shifts is None:
            return []
        turning = [turns_queries(spec) for spec in self._turning]
        if not any(turning):
            return []
        return [shifts.angles(frequencies) for frequencies in self._words.ropes]

    def _split(self, start: int, stop: int) -> list[tuple[bool, int, int]]:
        """Return the longest ranges that are all native or all not."""
        is_native, ranges, first = self._words.is_native, [], start
        for index in range(start + 1, stop + 1):
            if index == stop or is_native[index] != is_native[first]:
                ranges.append((is_native[first], first, index))
                first = index
        return ranges

    def _run_others(self, start: int, stop: int) -> None:
        """Run ops that the library does not have, in its buffers."""
        others = self._others
        assert others is not None
        for index in range(start, stop):
            op = self.program.ops[index]
            for buffer in op.buffers("reads", "changes"):
                others.set_value(buffer, self.value(buffer))
            others.run(index, index + 1)
            for buffer in op.buffers("writes", "changes"):
                self.set_value(buffer, others.value(buffer))
