"""Calm steps on a rank: the same rows go on, each in the block that it has.

In most steps a controller has nothing to decide, and its plan is a number (`trunkline.controller.engine.calm`).
When a step has been computed, `CalmSteps.begin` looks once at all that the next ones may depend on, and for how
many it stays so. Between two of these the library is called with the tokens that were just drawn, and hardly
anything else is done: behind a step the processor's caches hold weights, so each function that is left out counts.

      step ─► begin ─► step ─► step ─► … ─► settle ─► the next step that is told more

What a calm step computes and draws is what the ordinary way does: it is the same program, and the same selection.
Only the books of the batch are left behind, which `settle` brings up to date.
"""

from __future__ import annotations

from torch import Tensor

from trunkline.worker.batch.batch import BatchBuilder, ForwardBatch
from trunkline.worker.batch.decode_planner import LivePlanner
from trunkline.worker.messages import StepPlan
from trunkline.worker.model.decoder import Decoder
from trunkline.worker.sampling.selection import Selection, Selector


class CalmSteps:
    """The calm steps of one rank, if some are under way."""

    def __init__(self, batches: BatchBuilder, decoder: Decoder, selector: Selector, epoch: int) -> None:
        self._planner: LivePlanner | None = batches.live
        self._decoder = decoder
        self._selector = selector
        self._epoch = epoch
        self._batch: ForwardBatch | None = None
        """The batch of the last step that was told more; later ones have the same rows."""
        self._logits: Tensor | None = None
        """Where logits are as long as the rows stay."""
        self._tokens: list[int] = []
        """What the last step drew for them."""
        self._left = self._made = 0
        """Numbers of calm steps that may follow, and that are not in the books."""

    def begin(self, batch: ForwardBatch, selection: Selection) -> None:
        """Let calm steps follow a step that nothing beside it waited for, if they can."""
        planner = self._planner
        if planner is None or batch.samples_changed or not self._decoder.goes_on:
            return
        self._batch, self._logits, self._tokens = batch, self._decoder.logits, selection.tokens.tolist()
        self._left = planner.calm_steps

    def takes(self, plan: StepPlan, step: int) -> bool:
        """Return whether a plan is that of a calm step with this number."""
        return self._left > 0 and plan == StepPlan(step, self._epoch)

    def step(self) -> tuple[ForwardBatch, Selection]:
        """Compute a calm step, choose its tokens and append them; return them, and the batch of its rows."""
        batch, planner = self._batch, self._planner
        assert batch is not None
        assert planner is not None
        self._left -= 1
        self._made += 1
        self._decoder.go_on(planner.plan, self._tokens)
        selection = self._selector.select(batch, self._logits)
        self._tokens = selection.tokens.tolist()
        return batch, selection

    def settle(self) -> None:
        """End the calm steps, if some are under way: enter them in the batch's books."""
        if self._made and self._planner is not None:
            self._planner.went_on(self._made)
        self._batch, self._logits, self._left, self._made = None, None, 0, 0
