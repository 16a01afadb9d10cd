"""Execute step plans: everything that a rank does, except for talking to the controller.

`Runner.execute` is one step: the state that a plan changes, the copies that it orders, the forward pass, the
next tokens. All ranks execute every plan in the same order. The controller has decided everything, so the ranks
need not agree on anything but the sampled ids, which rank 0 draws.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from trunkline.controller.reports import AdapterReady, GrammarReady, StepResult
from trunkline.kernels.cuda import CudaKernels
from trunkline.kernels.ops import Kernels, KvPool
from trunkline.kernels.plan import PrefillPlan, WritePlan
from trunkline.kvstore.chunks import pack_int32, unpack_int32
from trunkline.kvstore.shards import HeadShard
from trunkline.worker.batch.batch import BatchBuilder, ForwardBatch
from trunkline.worker.batch.sequences import SequenceTable
from trunkline.worker.calm_steps import CalmSteps
from trunkline.worker.config import WorkerConfig
from trunkline.worker.device import (
    TORCH_DTYPES,
    choose_kernels,
    choose_sampling,
    in_inference_mode,
)
from trunkline.worker.errors import PlanError, WorkerConfigError
from trunkline.worker.grammar.compiler import GrammarStore
from trunkline.worker.launched_steps import LaunchedStep, LaunchedSteps
from trunkline.worker.messages import CompileGrammar, StepPlan
from trunkline.worker.model.adapter_store import AdapterStore
from trunkline.worker.model.decoder import Decoder
from trunkline.worker.pool_memory import thin_blocks, windows_of
from trunkline.worker.sampling.beams import BeamSearches
from trunkline.worker.sampling.pooling import Pooler
from trunkline.worker.sampling.sampler import Sampler
from trunkline.worker.sampling.selection import Selection, Selector
from trunkline.worker.step_graphs import GraphMaker, ReplayedStep, capture_steps
from trunkline.worker.tensor_parallel import TensorParallel
from trunkline.worker.tiers.copier import MEASURED_BLOCKS, Copier
from trunkline.worker.tiers.copy_lane import LayerTrace, StepGate

_NO_REPORTS: Final = Selection(np.zeros(0, dtype=np.int32))


class Runner:
    """One rank's state and model. Not thread-safe."""

    def __init__(
        self,
        config: WorkerConfig,
        decoder: Decoder,
        kernels: Kernels,
        group: TensorParallel,
        copier: Copier | None,
    ) -> None:
        """Make a runner of parts that exist; `loading.load_runner` makes the parts."""
        self._config = config
        self._decoder, self._group = decoder, group
        self.kernels = kernels
        device = decoder.pool.data.device
        self._sequences = SequenceTable(self.num_blocks, self.window)
        live = kernels.name != "reference"
        # Prefill and decoding round differently, and which of them computes a cached prompt depends on the step's
        # other prompts. With `invariant_rows` they must not change a bit.
        as_rows = kernels.name == "cpu" and not config.invariant_rows
        self._batches = BatchBuilder(
            self._sequences,
            config.chunk_size,
            device,
            live=live,
            window=self.window,
            cached_prompts_decode=as_rows,
        )
        self._searches = BeamSearches()
        shard = decoder.shard
        vocab_size = shard.config.vocab_size
        # Rank 0 alone samples, so it alone needs grammars.
        self._grammars = GrammarStore(Path(config.model), vocab_size) if group.rank == 0 else None
        sampler = Sampler(vocab_size, device, self._grammars, choose_sampling(kernels))
        largest = decoder.largest if decoder.takes_largest else None
        self._selector = Selector(group, sampler, self._searches, shard, config.chunk_size, largest)
        self._calm = CalmSteps(self._batches, decoder, self._selector, config.epoch)
        # The states are the same on every rank, so one is enough.
        self._pooler = Pooler() if group.rank == 0 else None
        self.adapters = AdapterStore(
            shard,
            TORCH_DTYPES[config.dtype],
            device,
            # Kernels of a CPU are for one thread, and have memory for packed layers of their own.
            lambda: choose_kernels(config, 1) if kernels.name == "cpu" else kernels,
            decoder.runner.set_adapter,
        )
        self.copier = copier
        """Copies between device and host pool; None without a host pool."""
        self.swap_us_per_block = 0.0
        """Microseconds for one save and one load of a block; 0 without a host pool."""
        self.launched = LaunchedSteps(lambda: self.copier.take_moved() if self.copier else (0, 0))
        """Steps that run, and results that wait to be taken."""

    @torch.inference_mode()
    def capture_graphs(self, graphs: Callable[[], GraphMaker], longest: int) -> None:
        """Capture decode steps as graphs, where that is asked for and can be. `longest`: tokens of the longest
        sequence."""
        if self._config.cuda_graphs and isinstance(self.kernels, CudaKernels):
            self.launched.graphs = capture_steps(
                self._decoder, self.kernels, self._group, graphs, self._config.max_rows, longest
            )

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the KV pool."""
        return self._decoder.pool.blocks

    @property
    def window(self) -> int:
        """Number of tokens that any layer sees (`ModelConfig.window`); 0: all."""
        return self._decoder.shard.config.window

    @property
    def windows(self) -> dict[str, int]:
        """What the controller has to know of windows, by the names of `WorkerReady`."""
        return windows_of(self._decoder.shard.config, self.pool, self._config.window_share)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block on this rank."""
        return self._decoder.pool.format.chunk_bytes

    @property
    def host_slots(self) -> int:
        """Number of blocks that the host pool holds."""
        return self.copier.host.capacity_slots if self.copier else 0

    @property
    def head_shard(self) -> HeadShard:
        """The rank's share of the model's KV heads."""
        shard = self._decoder.shard
        return HeadShard(shard.config.kv_heads, shard.rank, shard.tp)

    @property
    def pool(self) -> KvPool:
        """The rank's KV."""
        return self._decoder.pool

    @property
    def model_path(self) -> str:
        return self._config.model

    @property
    def steps(self) -> int:
        """Number of plans executed so far, which is the number of the last one."""
        return self.launched.step

    def close(self) -> None:
        """Leave the group, end the grammar compiler, give the host pool back. Nothing works afterwards."""
        self.launched.graphs = None  # NCCL waits until no graph holds a call of its own
        self._group.close()
        self.adapters.close()
        if self._grammars is not None:
            self._grammars.close()
        if self.copier is not None:
            self.copier.close()

    def check(self) -> None:
        """Raise what stopped the copies beside the steps, if anything did.

        Raises:
            CopyError: Copies have failed, so that the rank cannot go on.
        """
        if self.copier is not None:
            self.copier.check()

    def trace_layers(self, length: int = 10_000) -> LayerTrace:
        """Keep, from now on, when the last `length` layers were computed, loaded and saved.

        Raises:
            WorkerConfigError: this rank has no host pool.
        """
        if self.copier is None:
            raise WorkerConfigError("no layers are traced without a host pool")
        self._calm.settle()
        return self.copier.start_trace(length)

    def compile_grammar(self, request: CompileGrammar) -> None:
        """Begin to compile a grammar beside the steps. On rank 0 `reports` says when it is ready."""
        if self._grammars is not None:
            self._grammars.compile(
                request.grammar, request.kind, request.text, spaced=request.spaced, tenant=request.tenant
            )
            if request.foretell:
                self._grammars.foretelling.add(request.grammar)

    def forget_grammar(self, grammar: int) -> None:
        """Forget a grammar that no sequence uses any more."""
        if self._grammars is not None:
            self._grammars.forget(grammar)

    @property
    def is_preparing(self) -> bool:
        """Whether `reports` has, or will soon have, a report."""
        return self.adapters.is_loading or (self._grammars is not None and bool(self._grammars.pending))

    def reports(self) -> list[GrammarReady | AdapterReady]:
        """Return the grammars and adapters that became ready or were refused since the last call. Does not
        wait."""
        grammars = self._grammars.poll() if self._grammars is not None and self._grammars.pending else []
        return [*grammars, *(self.adapters.poll() if self.adapters.is_loading else ())]

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Pay one-time costs of torch and of the collectives before the first request, and measure what moving a
        block costs."""
        zero, two = np.zeros(1, dtype=np.int32), np.array([0, 1], dtype=np.int32)
        batch = ForwardBatch(
            inputs=lambda: (zero, zero),
            num_rows=0,
            write=WritePlan(self._config.chunk_size, zero),
            decode=None,
            prefill=PrefillPlan(
                self._config.chunk_size, two, zero, two, zero, zero, np.ones(1, dtype=np.int32), zero, zero
            ),
            samples=[],
            samples_changed=False,
            state_rows=None,
            device=self.pool.data.device,
        )
        self._decoder.forward(batch)
        if self.copier is not None:
            self.swap_us_per_block = self.copier.measure()
            if self.pool.thin is not None:  # the measured blocks have been written
                self.pool.thin(np.arange(min(MEASURED_BLOCKS, self.pool.blocks), dtype=np.int32))
        self.kernels.counters.reset()

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Run one step to its end.

        Returns:
            The result on rank 0, None on the others.

        Raises:
            PlanError: A gap in the steps, another epoch, or a plan that does not fit the state.
            CopyError: Blocks could not be copied. After both the state is undefined: the rank must stop.
        """
        self.launch(plan)
        result = [self.launched.take() for _ in range(self.launched.count)][-1]
        if self.copier is not None:
            self.copier.settle()
        return result

    def go_on(self, plan: StepPlan, report: Callable[[StepResult], None]) -> bool:
        """Run and report a calm step, if the plan is that of one; return whether it is. To be called in inference
        mode.

        Whether copies have failed is not looked at, and nothing of the pools is taken into use.
        """
        launched = self.launched
        if not self._calm.takes(plan, launched.step + 1):
            return False
        started, counters = time.perf_counter_ns(), self.kernels.counters
        plans, read = counters.decode_plans, counters.decode_bytes_read
        tokens, batch, selection = self._calm.step()
        launched.step = plan.step
        if self._group.rank == 0:
            counted = counters.decode_plans - plans, counters.decode_bytes_read - read
            report(self._result(plan, tokens, counted, batch, selection, started))
        return True

    @in_inference_mode
    def launch(self, plan: StepPlan) -> None:
        """Run one step, or launch it where its tokens can stay on the device; `launched` has the result.

        A graph computes the step and draws its tokens, which are waited for only if they decide over drafts; or a
        graph computes it, but tokens are chosen from its logits here; or there is no graph for it.

        Raises:
            PlanError, CopyError: As `execute`.
        """
        started, launched = time.perf_counter_ns(), self.launched
        counters = self.kernels.counters
        before = counters.decode_plans, counters.decode_bytes_read
        if self.go_on(plan, launched.add_result):
            if self._group.rank != 0:
                launched.add_result(None)
            return
        self._calm.settle()
        self._check_order(plan)
        launched.make_room()
        # Drafts stand behind the newest tokens; copies may take blocks that running steps still read.
        if plan.drafts or plan.saves or plan.loads or plan.late_saves:
            launched.read_all()
        self._update_sequences(plan)
        gate = self._begin_copies(plan)
        batch = self._batches.build(plan)
        replayed = self._replay(batch, gate)
        takes_draws = replayed is not None and self._selector.leaves_to_graph(batch)
        self.launched.step = plan.step
        selection = None
        if not takes_draws or batch.guesses is not None:
            launched.read_all()
            selection = self._select(batch, gate, replayed, takes_draws=takes_draws)
        counted = counters.decode_plans - before[0], counters.decode_bytes_read - before[1]
        result = None
        if replayed is not None and selection is None:
            if self._group.rank == 0:
                result = StepResult(plan.step, plan.epoch, b"", 0, None, *counted, replayed=1)
            launched.add(LaunchedStep.of(replayed, batch.samples, result, started))
        elif selection is not None:
            if self._group.rank == 0:
                waited_us, replays = gate.waited_ns // 1000 if gate else 0, replayed is not None
                tokens = pack_int32(selection.tokens)
                result = self._result(
                    plan, tokens, counted, batch, selection, started, waited_us, replayed=replays
                )
            launched.add_result(result)
            if replayed is None and (gate is None or gate.is_open) and not self._searches.search_of:
                self._calm.begin(batch, selection)

    def _result(
        self,
        plan: StepPlan,
        tokens: bytes,
        counted: tuple[int, int],
        batch: ForwardBatch,
        selection: Selection | None,
        started_ns: int,
        waited_us: int = 0,
        *,
        replayed: bool = False,
    ) -> StepResult:
        """Return the result of a step that has ended.

        Args:
            counted: decode plans that the kernels made in it, and bytes that they read.
            selection: Has what is reported besides tokens; None: nothing is.
        """
        moved = self.copier.take_moved() if self.copier is not None else (0, 0)
        forced = None
        if selection is None:
            selection = _NO_REPORTS
        elif self._grammars is not None:
            forced = self._grammars.foretell(batch.samples)
        return StepResult(
            plan.step,
            plan.epoch,
            tokens,
            self.launched.took_us(started_ns),
            selection.logprobs,
            *counted,
            beams=selection.beams,
            prompt_logprobs=selection.prompt_logprobs,
            moved_us=moved[0],
            moved_blocks=moved[1],
            waited_us=waited_us,
            forced=forced,
            replayed=int(replayed),
        )

    def _replay(self, batch: ForwardBatch, gate: StepGate | None) -> ReplayedStep | None:
        """Launch the graph of a step; return None if it has none: prompts are computed, layers wait for copies."""
        graphs = self.launched.graphs
        is_open = gate is None or gate.is_open
        is_decoding = batch.prefill is None and batch.adapters is None
        if graphs is None or not (is_decoding and is_open and graphs.has_room(batch.num_rows)):
            return None
        replayed = graphs.launch(batch)
        if self.copier is not None and gate is not None:
            self.copier.finish(gate)
        return replayed

    def _check_order(self, plan: StepPlan) -> None:
        """Refuse plans of another epoch, and plans behind a gap."""
        if plan.epoch != self._config.epoch:
            raise PlanError(f"plan of epoch {plan.epoch}; this rank belongs to epoch {self._config.epoch}")
        if plan.step != self.launched.step + 1:
            raise PlanError(f"plan of step {plan.step} after step {self.launched.step}: a plan was lost")

    def _update_sequences(self, plan: StepPlan) -> None:
        """Let sequences leave and join, and set entries of their block tables."""
        self._sequences.apply(plan)
        if plan.leaves:
            gone = unpack_int32(plan.leaves).tolist()
            if self._searches.search_of:
                self._searches.remove(gone)
            self._selector.forget(gone)
            if self._pooler is not None:
                self._pooler.forget(gone)
        for join in plan.joins:
            if join.adapter and join.adapter not in self.adapters.keys:
                raise PlanError(f"sequence {join.sequence} uses adapter {join.adapter.hex()}, which is not loaded")
            if join.beam_position is not None:
                self._searches.add(self._sequences[join.sequence])

    def _begin_copies(self, plan: StepPlan) -> StepGate | None:
        """Begin the plan's saves and loads. Make the copies that beams of the last step left, then the plan's own.

        Returns:
            What the computation waits for; None without a host pool.
        """
        gate = self.copier.begin(plan) if self.copier is not None else None
        if self.copier is None and (plan.saves or plan.loads or plan.late_saves):
            raise PlanError("blocks are to be saved or loaded, but this rank has no host pool")
        if plan.thinned:
            thin_blocks(self.pool, unpack_int32(plan.thinned))
        orders = [unpack_int32(plan.copies, columns=4)] if plan.copies else []
        if self._searches.search_of:
            orders.insert(0, self._searches.take_copies())
        for copies in orders:
            if not len(copies):
                continue
            if self.copier is not None and gate is not None:
                self.copier.before_copies(copies, gate)
            try:
                self.kernels.copy_blocks(self.pool, copies)
            except ValueError as error:
                raise PlanError(str(error)) from error
        return gate

    def _forward(self, batch: ForwardBatch, gate: StepGate | None) -> Tensor | None:
        """Compute the batch; return this rank's columns of the logits that are asked for."""
        logits = None
        if len(batch.numbers[0]):  # a plan may only let sequences leave, or only copy blocks
            take_states = None
            if self._pooler is not None and batch.pooled:
                take_states = partial(self._pooler.take, batch.pooled)
            logits = self._decoder.forward(batch, None if gate is None or gate.is_open else gate, take_states)
        if self.copier is not None and gate is not None:
            self.copier.finish(gate)
        return logits

    def _select(
        self, batch: ForwardBatch, gate: StepGate | None, replayed: ReplayedStep | None, *, takes_draws: bool
    ) -> Selection:
        """Compute the batch, unless a graph does; choose the next tokens, the same on every rank, and append them
        to the sequences.

        Args:
            takes_draws: Whether the tokens that the graph has drawn are those to take, as far as drafts are right.
        """
        logits = self._forward(batch, gate) if replayed is None else replayed.logits
        for child in batch.children:
            self._searches.add(child)
        if replayed is not None and takes_draws:
            replayed.wait()
            selection = self._selector.take_drawn(batch, replayed.tokens.numpy())
        else:
            selection = self._selector.select(batch, logits)
        if self.launched.graphs is not None:
            self.launched.graphs.forget_tokens()
        if self._pooler is not None and batch.pooled:
            selection.logprobs = self._pooler.add_to(selection.logprobs)
        if selection.tables_changed:
            self._batches.forget_plan()
        return selection
