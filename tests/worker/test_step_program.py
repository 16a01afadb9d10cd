"""Programs of steps: every op natively as by the reference, whatever ranges run; print, refusals, memory."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from seeds import seeds
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from worker.checkpoints import Models
from worker.driver import VOCAB_SIZE, Driver, run_config

from trunkline.kernels.cpu import CpuKernels
from trunkline.kernels.cpu_program import KINDS, OP_WORDS, CpuProgram
from trunkline.kernels.experts import Experts
from trunkline.kernels.live_plan import LiveDecodePlan
from trunkline.kernels.native import ISA_VARIABLE, isa_levels, library
from trunkline.kernels.op_by_op import OpByOp, compare
from trunkline.kernels.ops import KvPool
from trunkline.kernels.program import AllReduce, Linear, Op, Program, ProgramError, printed
from trunkline.kernels.reference import ReferenceKernels
from trunkline.kernels.shared_group import SharedGroup, create_file
from trunkline.worker.batch.batch import ForwardBatch
from trunkline.worker.device import TORCH_DTYPES
from trunkline.worker.errors import PeerLostError
from trunkline.worker.loading import load_runner
from trunkline.worker.messages import Sampling
from trunkline.worker.model.checkpoint import load_weights
from trunkline.worker.model.decoder import Decoder, make_kv_pool
from trunkline.worker.model.families import check_model
from trunkline.worker.model.shard import Shard
from trunkline.worker.runner import Runner
from trunkline.worker.tensor_parallel import TensorParallel

pytestmark = pytest.mark.skipif(not isa_levels(), reason="the compiled kernels are not installed")

CPU: Final = torch.device("cpu")
GREEDY: Final = Sampling(temperature=0, logprobs=VOCAB_SIZE)
ONE_OF_EACH: Final = (
    "gqa",
    "gpt-oss",
    "llama4",
    "biases",
    "gpt2",
    "opt-350m",
    "pythia",
    "falcon-7b",
    "mpt",
    "mixtral",
    "deepseek-v3",
    "gemma2",
    "qwen3",
    "glm4-moe",
    "olmo2",
    "qwen2-moe",
    "gemma4",
    "gemma4-experts",
    "gemma4-e",
)
"""Models that together have every op, all residuals, and layers that differ in their attention."""
TOLERANCE: Final = {"float32": 2e-5, "bfloat16": 3e-2}
"""Largest difference, relative to the largest magnitude of an op's result."""


def drive(runner: Runner, seed: int) -> list[list[int]]:
    """Prompts in pieces, one on top of another's blocks, beside rows that decode; return the texts."""
    driver = Driver(runner.execute, num_blocks=64, chunk_size=8, seed=seed)
    rng = np.random.default_rng(seed)
    head, tail = (rng.integers(VOCAB_SIZE, size=size).tolist() for size in (19, 9))
    streams = [driver.add(head, GREEDY)]
    driver.run(streams, 3)
    more = [driver.add(head + tail, GREEDY, like=streams[0], shared=16), driver.add(tail, GREEDY)]
    driver.run(more, 4)
    return [stream.output for stream in (*streams, *more)]


def watch(runner: Runner, forward: Any) -> None:
    """Let a runner's steps call another function than its decoder's; none of them is calm."""
    runner._decoder.forward = forward  # type: ignore[method-assign]
    runner._calm._planner = None


def load(folder: Path, **fields: Any) -> tuple[Runner, CpuProgram]:
    runner = load_runner(run_config(folder, **fields), lambda *_: None)
    program = runner._decoder.runner
    assert isinstance(program, CpuProgram)
    return runner, program


def copied(batch: ForwardBatch) -> ForwardBatch:
    """The same step with plans of its own: kernels keep in a plan what they derive from it."""
    plans: dict[str, Any] = {name: copy.copy(getattr(batch, name)) for name in ("write", "decode", "prefill")}
    for plan in plans.values():
        if plan is not None:
            plan.state = None
    return dataclasses.replace(batch, **plans)


def reference_of(runner: Runner) -> OpByOp:
    """The same model by the reference, over a pool of its own."""
    config, kernels, decoder = runner._config, ReferenceKernels(), runner._decoder
    weights = load_weights(
        Path(config.model),
        decoder.shard,
        TORCH_DTYPES[config.dtype],
        CPU,
        kernels,
        lambda *_: None,
        config.quantisation,
    )
    pool = KvPool.wrap(torch.zeros_like(runner.pool.data), runner.pool.format)
    made = Decoder(decoder.shard, weights, kernels, TensorParallel.alone(CPU), pool).runner
    assert isinstance(made, OpByOp)
    return made


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        *((name, {}) for name in ONE_OF_EACH),
        ("gqa", {"dtype": "bfloat16", "threads": 2}),
        ("gemma2", {"dtype": "bfloat16"}),
        ("gpt2", {"dtype": "bfloat16"}),
        ("wide-heads", {"quantisation": "int8", "threads": 2}),
        ("mixtral", {"dtype": "bfloat16", "threads": 2}),
        ("qwen3-moe-some-dense", {"threads": 2}),
        ("olmo2", {"dtype": "bfloat16", "threads": 2}),
        ("mixtral-five-experts", {"quantisation": "int8", "threads": 3}),
        ("deepseek-v2", {"quantisation": "int8", "threads": 2}),
        ("deepseek-v3", {"dtype": "bfloat16", "threads": 2}),
        ("gemma4-e", {"dtype": "bfloat16", "threads": 2}),
    ],
)
def test_each_op_equals_the_reference(name: str, fields: dict[str, Any], models: Models) -> None:
    runner, native = load(models(name), **fields)
    reference, tolerance = reference_of(runner), TOLERANCE[str(fields.get("dtype", "float32"))]
    seen: set[str] = set()

    def forward(batch: ForwardBatch, *_: object) -> Tensor | None:
        """Runs the step op by op on both; what was not written is poison."""
        native.begin(batch)
        for buffer in native.program.buffers:
            native.value(buffer).fill_(float("nan"))
        for number, op, largest, size in compare(native, reference, batch, copied(batch)):
            assert largest <= tolerance * max(size, 1e-3), f"op {number}: {printed(op)}"
            seen.add(op.kind)
        return native.value(native.program.logits).clone() if batch.logits_rows else None

    watch(runner, forward)
    drive(runner, seed=3)
    assert seen == {op.kind for op in native.program.ops}


def test_the_models_have_every_op(models: Models) -> None:
    """But sums over ranks and a padded vocabulary, which the tests of several ranks have."""
    found = {type(op) for name in ONE_OF_EACH for op in load(models(name))[0]._decoder.program.ops}
    found |= {type(op) for op in load(models("mpt", attn_config={"clip_qkv": 1.0}))[0]._decoder.program.ops}
    assert {kind.kind for kind in KINDS} - {kind.kind for kind in found} == {"all_reduce", "forbid"}


@pytest.mark.parametrize("seed", seeds(3))
@pytest.mark.parametrize("name", ["gqa", "mixtral"])
def test_ranges_of_ops_give_the_same_bits(name: str, seed: int, models: Models) -> None:
    """Gates and comparisons run a program in pieces."""
    whole, _ = load(models(name))
    cut, program = load(models(name))
    rng, run = np.random.default_rng(seed), program.run

    def in_pieces(start: int, stop: int) -> None:
        cuts = sorted(rng.integers(start, stop + 1, size=rng.integers(6)).tolist())
        for first, last in zip([start, *cuts], [*cuts, stop], strict=True):
            run(first, last)

    program.run = in_pieces  # type: ignore[method-assign]
    expected: list[Tensor | None] = []
    found: list[Tensor | None] = []
    for runner, kept in ((whole, expected), (cut, found)):
        forward = runner._decoder.forward

        def watched(
            batch: ForwardBatch, *arguments: Any, forward: Callable[..., Any] = forward, kept: list[Any] = kept
        ) -> Tensor | None:
            logits = forward(batch, *arguments)
            kept.append(None if logits is None else logits.clone())
            return logits  # type: ignore[no-any-return]

        watch(runner, watched)
        drive(runner, seed=5)
    assert len(expected) == len(found)
    for one, other in zip(expected, found, strict=True):
        assert one is other or (one is not None and other is not None and torch.equal(one, other))


@pytest.mark.parametrize("isa", isa_levels())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_see_one_token_at_a_time(
    isa: str, dtype: str, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token has the same bits in any place of any batch, its sum runs over its experts in order; a token that is
    not a number spoils no other."""
    monkeypatch.setenv(ISA_VARIABLE, isa)
    runner, native = load(models("mixtral-five-experts"), dtype=dtype, threads=3)
    index = next(index for index, op in enumerate(native.program.ops) if isinstance(op, Experts))
    op = native.program.ops[index]
    assert isinstance(op, Experts)
    alone = OpByOp(native.program, runner.kernels, runner.pool, TensorParallel.alone(CPU))
    rng = np.random.default_rng(7)
    tokens = torch.from_numpy(rng.normal(size=(600, op.x.width))).to(op.x.dtype)
    tokens[-1] = float("nan")
    known: dict[int, Tensor] = {}
    forward = runner._decoder.forward

    def watched(batch: ForwardBatch, *arguments: Any) -> Tensor | None:
        native.begin(batch)
        alone.begin(batch)
        which = rng.choice(len(tokens), size=len(batch.ids), replace=False)
        native.set_value(op.x, tokens[which])
        alone.set_value(op.x, tokens[which])
        native.run(index, index + 1)
        alone.run(index, index + 1)
        out, expected = native.value(op.out), alone.value(op.out)
        for number, row in zip(which.tolist(), out, strict=True):
            assert torch.equal(row.nan_to_num(9.0), known.setdefault(number, row.clone().nan_to_num(9.0)))
            assert bool(row.isnan().all()) == (number == len(tokens) - 1)
        size = (1e-6 if dtype == "float32" else 8e-3) * float(expected.nan_to_num().abs().max())
        torch.testing.assert_close(out, expected, rtol=0, atol=size, equal_nan=True)
        return forward(batch, *arguments)

    watch(runner, watched)
    driver = Driver(runner.execute, num_blocks=64, chunk_size=8)
    prompts = [rng.integers(VOCAB_SIZE, size=size).tolist() for size in (230, 90, 5)]
    driver.run([driver.add(prompt, GREEDY) for prompt in prompts], 12, piece=230)
    assert len(known) > 300


class TwoRanks:
    """Both ranks of a group in this process, over the shared memory of the CPU kernels."""

    def __init__(self, folder: Path) -> None:
        config = check_model(folder, 2, "float32")
        path = create_file(2)
        self.shared = [SharedGroup(path, rank, 2) for rank in range(2)]
        self.decoders = []
        for rank in range(2):
            group = TensorParallel(rank, 2, CPU, backend="shared")
            group._shared = self.shared[rank]
            shard, kernels = Shard(config, rank, 2), CpuKernels()
            weights = load_weights(folder, shard, torch.float32, CPU, kernels, lambda *_: None)
            pool = make_kv_pool(64, config.chunk_format(8, "float32").of_rank(2), CPU)
            self.decoders.append(Decoder(shard, weights, kernels, group, pool))
        path.unlink()

    def forward(self, batch: ForwardBatch) -> list[Tensor | None]:
        def on(decoder: Decoder) -> Tensor | None:
            with torch.inference_mode():
                return decoder.forward(copied(batch))

        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(on, self.decoders))


@pytest.mark.parametrize("name", ["gqa", "mixtral-five-experts"])
def test_ranks_sum_within_the_call(name: str, models: Models) -> None:
    """Logits of two ranks side by side are those of one, the padded column forbidden, a rank without a token's
    experts included; a peer that leaves is noticed."""
    runner, _ = load(models(name))
    ranks = TwoRanks(models(name))
    for decoder in ranks.decoders:
        assert isinstance(decoder.runner, CpuProgram)
        assert len(decoder.runner._split(0, len(decoder.program.ops))) == 1
        assert sum(isinstance(op, AllReduce) for op in decoder.program.ops) == 2 * decoder.program.layers + 1
    forward, batches = runner._decoder.forward, []

    def watched(batch: ForwardBatch, *arguments: Any) -> Tensor | None:
        batches.append(batch)
        parts = ranks.forward(batch)
        logits = forward(batch, *arguments)
        if logits is None:
            assert parts == [None, None]
            return None
        assert parts[0] is not None
        assert parts[1] is not None
        together = torch.cat((parts[0], parts[1]), dim=1)
        torch.testing.assert_close(together[:, :VOCAB_SIZE], logits, rtol=0, atol=2e-5)
        assert together[:, VOCAB_SIZE:].eq(float("-inf")).all()
        return logits

    watch(runner, watched)
    drive(runner, seed=4)
    ranks.shared[1].close()
    with pytest.raises(PeerLostError, match="rank 1 has left"), torch.inference_mode():
        ranks.decoders[0].forward(copied(batches[-2]))
    ranks.shared[0].close()


def test_a_program_prints_all_of_itself(models: Models) -> None:
    """Twice the same text, with every field of every op; other constants give another text."""
    program = load(models("gemma2"))[0]._decoder.program
    text = str(program)
    assert text == str(load(models("gemma2"))[0]._decoder.program)
    lines = text.splitlines()
    assert len(lines) == 6 + len(program.buffers) + len(program.ops)
    start = lines.index("ops") + 1
    for index, (line, op) in enumerate(zip(lines[start:], program.ops, strict=False)):
        number, kind, *fields = line.split()
        assert (number, kind) == (str(index), op.kind)
        for field in dataclasses.fields(op):
            assert f" {field.name}=" in line
        assert fields
    for buffer in program.buffers:
        assert f"  {buffer.name}: {buffer.rows} × {buffer.width} float32" in lines
    assert str(load(models("gemma2", sliding_window=16))[0]._decoder.program) != text
    assert str(load(models("gemma2", final_logit_softcapping=20.0))[0]._decoder.program) != text


def damaged(program: Program, index: int, **fields: Any) -> tuple[Op, ...]:
    ops = list(program.ops)
    ops[index] = dataclasses.replace(ops[index], **fields)
    return tuple(ops)


def test_contradictory_programs_are_refused(models: Models) -> None:
    program = load(models("gqa"))[0]._decoder.program
    linear = next(index for index, op in enumerate(program.ops) if isinstance(op, Linear))
    store = program.stores[1]
    first = program.ops[linear]
    assert isinstance(first, Linear)
    wide = dataclasses.replace(first.out, name="wide", width=first.out.width + 1)
    twin = dataclasses.replace(first.out, dtype=torch.bfloat16)
    cases = [
        (program.ops[1:], r"op 3 \(store_kv\): 'cos_0' was not written before"),
        (program.ops[:linear] + program.ops[linear + 1 :], "'qkv' was not written before"),
        (damaged(program, linear, out=wide), "the width of out is"),
        (damaged(program, linear, out=first.x), "'x' is read and written over"),
        (damaged(program, linear, out=twin), "the type of out is"),
        (damaged(program, store, layer=0), r"stored for the layers \[0, 0\]"),
        (program.ops[:-1], "no op writes the result"),
        (damaged(program, store, cos=None), "sin"),
    ]
    for ops, words in cases:
        with pytest.raises(ProgramError, match=words):
            Program(ops, program.layers, program.states, program.logits)


@pytest.mark.skipif("amx" not in isa_levels(), reason="this processor has no matrix registers")
@pytest.mark.parametrize("name", ["gqa", "mixtral", "deepseek-v3"])
def test_layers_of_other_kernels_are_refused_before_a_step(name: str, models: Models) -> None:
    """Not in the middle of one, when earlier ops have changed what they add to."""
    runner, program = load(models(name), dtype="bfloat16")
    with pytest.raises(ValueError, match="packed for matrix registers"):
        CpuProgram(program.program, CpuKernels(isa="avx512bf16"), runner.pool, TensorParallel.alone(CPU))


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize(
    "name", ["glm4-moe", "olmo2", "deepseek-v3", pytest.param("gemma4-e", marks=pytest.mark.soak)]
)
def test_the_library_refuses_damaged_programs(name: str, seed: int, models: Models) -> None:
    """Any word of a program but the handles of packed layers, which only kernels make: refused, or harmless."""
    runner, program = load(models(name))
    words, module = program._words, library()
    rng, refused = np.random.default_rng(seed), 0
    for _ in range(1500):
        table, sizes = words.words.clone(), words.sizes.clone()
        row, column = int(rng.integers(len(table))), int(rng.integers(OP_WORDS))
        if column == 2 and table[row, 0] == KINDS[Linear]:
            continue
        if column == 0 and rng.random() < 0.5:
            sizes[int(rng.integers(len(sizes))), int(rng.integers(3))] = int(rng.choice([-1, 0, 3, 7, 1 << 40]))
        else:
            wrong = rng.choice([-2, -1, 0, 1, 5, 17, 1 << 20, 1 << 40, -(1 << 60)])
            if column == 0 and wrong == KINDS[Linear]:
                continue  # it would read another op's word as a handle
            table[row, column] = int(wrong)
        arguments = (runner.kernels.context.handle, table, words.reals, sizes, words.constants)  # type: ignore[attr-defined]
        try:
            pool = (runner.pool.data, runner.pool.packed)
            latent, logits = runner.pool.format.latent, words.buffers.index(program.program.logits)
            made = module.program_new(*arguments, len(words.ropes), *pool, 0, 0, latent, logits, 0)
        except ValueError:
            refused += 1
        else:
            module.program_delete(made)
    assert refused > 300


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what torch computes or allocates; views are neither."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) not in ("aten.slice.Tensor", "aten.detach.default"):
            self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["gqa", "gpt2", "gemma2", "mixtral", "deepseek-v3"])
def test_steady_steps_allocate_nothing(name: str, models: Models) -> None:
    """A step of rows that only decode: no tensor is made, no buffer moves, one native call."""
    runner, program = load(models(name))
    forward, seen, made = runner._decoder.forward, [], [0]

    def watched(batch: ForwardBatch, *arguments: Any) -> Tensor | None:
        with Counting() as counting:
            logits = forward(batch, *arguments)
        assert batch.decode is None or isinstance(batch.decode, LiveDecodePlan)
        made.append(-1 if batch.decode is None else sum(work.made for work in batch.decode._works.values()))
        seen.append((made[-1] < 0 or made[-1] != made[-2], counting.calls, program.addresses()))
        return logits

    watch(runner, watched)
    drive(runner, seed=1)
    steady = [(calls, addresses) for fresh, calls, addresses in seen if not fresh]
    assert len(steady) >= 3
    assert all(not calls for calls, _ in steady), steady[0][0]
    assert steady[0][1] == steady[-1][1]
    native = [program._split(0, len(program.program.ops))]
    assert [len(ranges) for ranges in native] == [1]


def steps_of(folder: Path, *, anew: bool) -> tuple[list[Tensor], int]:
    """Return the logits of each step, and how many steps passed all their tensors to the library.

    Args:
        anew: Every step does.
    """
    runner, program = load(folder)
    forward, begin, logits, begun = runner._decoder.forward, program._library.begin, [], []

    def counted(*arguments: Any) -> None:
        begun.append(arguments)
        begin(*arguments)

    def watched(batch: ForwardBatch, *arguments: Any) -> Tensor | None:
        if anew:
            program._steady = None
        found = forward(batch, *arguments)
        logits.append(torch.empty(0) if found is None else found.clone())
        return found

    program._library.begin = counted  # type: ignore[assignment]
    watch(runner, watched)
    drive(runner, seed=5)
    return logits, len(begun)


def test_a_steady_step_goes_on_from_the_last_one(models: Models) -> None:
    """Its tensors are not passed again, and its logits are those of a step that begins anew."""
    steady, begun = steps_of(models("gpt2"), anew=False)
    whole, all_begun = steps_of(models("gpt2"), anew=True)
    assert len(steady) == len(whole) == all_begun > begun
    assert all(map(torch.equal, steady, whole))


def test_a_refused_step_leaves_nothing_to_run_on(models: Models) -> None:
    """Slots and positions that do not exist are named; the step before is not run again."""
    runner, program = load(models("gpt2"))
    batches: list[ForwardBatch] = []
    forward = runner._decoder.forward

    def watched(batch: ForwardBatch, *arguments: Any) -> Tensor | None:
        batches.append(batch)
        return forward(batch, *arguments)

    watch(runner, watched)
    drive(runner, seed=2)
    good = copied(batches[-2])
    wrong = copied(good)
    wrong.write.slots = wrong.write.slots + np.int32(10_000)
    with torch.inference_mode():
        with pytest.raises(ValueError, match=r"slot .*: the pool has 64 blocks"):
            program.begin(wrong)
        calls = dict(runner.kernels.counters.calls)
        program.run(0, 1)
        short = copied(good)
        short.write.slots = short.write.slots[:1]
        with pytest.raises(ValueError, match="ids, positions and slots must be one per token"):
            program.begin(short)
        far = dataclasses.replace(good, inputs=lambda: (good.numbers[0], good.numbers[1] + 100_000))
        program.begin(far)
        with pytest.raises(ValueError, match=r"position .*: the table has"):
            program.run(0, len(program.program.ops))
        program.begin(good)
        program.run(0, len(program.program.ops))
    assert runner.kernels.counters.calls["write_kv"] > calls["write_kv"]
