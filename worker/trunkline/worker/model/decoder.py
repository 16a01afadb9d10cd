"""The decoder: runs the program of this rank's layers (`step_program`) for a batch, over the paged KV.

Decode rows come first in a batch, prefill tokens behind them; the linear layers see all at once (iteration-level
batching, PagedAttention §4.5), attention is called for each kind.

What is promised: in float32 a token's logits do not depend on the batch beyond rounding, so greedy output is
the same unless two tokens are equal to within it. They are not promised to be equal bit by bit: matrix
multiplications of other sizes and other sharers of the prefix add in another order. Compiled kernels on a CPU with
`WorkerConfig.invariant_rows` do promise it for decode rows: alone, behind each other as drafts, beside others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trunkline.kernels.cpu_program import CpuProgram
from trunkline.kernels.large_pages import advise_large_pages
from trunkline.kernels.live_plan import LiveDecodePlan
from trunkline.kernels.load import load_program
from trunkline.kernels.ops import Kernels, KvPool
from trunkline.kvstore.chunk_format import ChunkFormat
from trunkline.kvstore.chunks import Int32Array
from trunkline.worker.batch.batch import ForwardBatch
from trunkline.worker.collective_errors import COLLECTIVE_ERRORS, of_collective
from trunkline.worker.model.shard import Shard
from trunkline.worker.model.step_program import compile_step
from trunkline.worker.model.weights import Weights
from trunkline.worker.tensor_parallel import TensorParallel
from trunkline.worker.tiers.copy_lane import StepGate


class Decoder:
    """One rank's part of the model. Not reentrant; call under `torch.inference_mode`."""

    def __init__(
        self, shard: Shard, weights: Weights, kernels: Kernels, group: TensorParallel, pool: KvPool
    ) -> None:
        """
        Args:
            pool: KV pool with the rank's KV heads, of what is computed in the weights' dtype.
        """
        self.weights = weights
        self.shard = shard
        self.pool = pool
        device = pool.data.device
        dtype = getattr(torch, pool.format.computed)
        self.program = compile_step(shard, weights, dtype, device, sums=group.backend != "none")
        self.runner = load_program(self.program, kernels, pool, group)
        self._group = group
        self._stores = self.program.stores
        self._states_end = self.program.states_end

    def forward(
        self,
        batch: ForwardBatch,
        gate: StepGate | None = None,
        take_states: Callable[[Tensor], None] | None = None,
    ) -> Tensor | None:
        """Compute a step: store the new tokens' KV and return the logits that are asked for.

        Args:
            gate: Waits for each layer of KV, and is told when it is stored; None: nothing is loaded or saved.
            take_states: Gets the final hidden states, behind the last norm: `[rows of batch.state_rows, hidden]`,
                the same on every rank.

        Returns:
            float32 `[logits rows, padded vocabulary / tp]`: this rank's columns, -inf where padded; None if the
            batch asks for none. It may be overwritten, and is, by the next step.
        """
        program, runner, rows = self.program, self.runner, batch.logits_rows
        end = len(program.ops) if rows else self._states_end
        if not batch.needs_states:  # then the last layer's KV is all that is wanted of it
            end = self._stores[-1] + 1
        try:
            runner.begin(batch)
            start = 0 if gate is None else self._run_gated(gate)
            if take_states is not None and batch.needs_states:
                runner.run(start, self._states_end)
                take_states(runner.value(program.states))
                start = self._states_end
            runner.run(start, end)
        except COLLECTIVE_ERRORS as error:  # of native code that sums over ranks
            raise of_collective(error, self._group.backend) from error
        return self.logits if rows else None

    @property
    def logits(self) -> Tensor:
        """The logits of the last step, which had some."""
        return self.runner.value(self.program.logits)

    @property
    def goes_on(self) -> bool:
        """Whether `go_on` may follow the last step (`CpuProgram.goes_on`)."""
        return isinstance(self.runner, CpuProgram) and self.runner.goes_on

    def put_ids(self, ids: Int32Array) -> None:
        """Take the token of each row for `go_on`."""
        assert isinstance(self.runner, CpuProgram)
        self.runner.put_ids(ids)

    def go_on(self, plan: LiveDecodePlan, *, takes_largest: bool) -> bytes:
        """Compute the step of the same rows behind the last one, as `CpuProgram.go_on` says. Its logits are where
        those of the last one were."""
        runner = self.runner
        assert isinstance(runner, CpuProgram)
        try:
            return runner.go_on(plan, takes_largest=takes_largest)
        except COLLECTIVE_ERRORS as error:
            raise of_collective(error, self._group.backend) from error

    @property
    def takes_largest(self) -> bool:
        """Whether `largest` can be asked."""
        return isinstance(self.runner, CpuProgram) and self.runner.takes_largest

    def largest(self) -> Int32Array:
        """Return the ids of the largest logits of the last step, as `CpuProgram.largest` does."""
        runner = self.runner
        assert isinstance(runner, CpuProgram)
        try:
            return runner.largest()
        except COLLECTIVE_ERRORS as error:
            raise of_collective(error, self._group.backend) from error

    def _run_gated(self, gate: StepGate) -> int:
        """Run the layers with a gate before and behind each one's KV; return the number of ops that have run."""
        start = 0
        for layer, store in enumerate(self._stores):
            self.runner.run(start, store)
            gate.enter(layer)
            start = store + 1
            self.runner.run(store, start)
            gate.stored(layer)
        return start


def make_kv_pool(blocks: int, part: ChunkFormat, device: torch.device) -> KvPool:
    """Return the KV pool of a rank, uninitialised: ops ignore slots that nothing was written to."""
    data = torch.empty((blocks, *part.shape), dtype=getattr(torch, part.element), device=device)
    advise_large_pages(data)
    return KvPool.wrap(data, part)
