"""Calm steps on a rank: the same rows go on, each in the block that it has.

In most steps a controller has nothing to decide, and its plan is a number (`trunkline.controller.engine.calm`).
When a step has been computed, `CalmSteps.begin` looks once at all that the next ones may depend on, and for how
many it stays so. Each of these is one call of the library, and hardly anything is done between two: behind a step
the processor's caches hold weights, so each function that is left out counts. Where all rows take their largest
logit, the library does that, too, and puts the tokens where the next step reads them.

      step ─► begin ─► step ─► step ─► … ─► settle ─► the next step that is told more

What a calm step computes and draws is what the ordinary way does: it is the same program, and the same selection.
Only the books of the batch are left behind, which `settle` brings up to date.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from trunkline.kvstore.chunks import pack_int32
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
        self._takes_largest = False
        """Whether the library draws the tokens."""
        self._drawn: list[bytes] = []
        """The tokens that it drew and that the sequences lack, step by step."""
        self._left = self._made = 0
        """Numbers of calm steps that may follow, and that are not in the books."""

    def begin(self, batch: ForwardBatch, selection: Selection) -> None:
        """Let calm steps follow a step that nothing beside it waited for, if they can."""
        planner = self._planner
        if planner is None or batch.samples_changed or not self._decoder.goes_on:
            return
        self._batch, self._logits = batch, self._decoder.logits
        self._takes_largest = self._selector.takes_largest
        self._decoder.put_ids(selection.tokens)
        self._left = planner.calm_steps

    def takes(self, plan: StepPlan, step: int) -> bool:
        """Return whether a plan is that of a calm step with this number."""
        return self._left > 0 and plan == StepPlan(step, self._epoch)

    def step(self) -> tuple[bytes, ForwardBatch, Selection | None]:
        """Compute a calm step and choose its tokens.

        Returns:
            The tokens, packed; the batch of the rows; the selection, if more than tokens may have been selected.
        """
        batch, planner = self._batch, self._planner
        assert batch is not None
        assert planner is not None
        self._left -= 1
        self._made += 1
        drawn = self._decoder.go_on(planner.plan, takes_largest=self._takes_largest)
        if self._takes_largest:
            self._drawn.append(drawn)
            return drawn, batch, None
        selection = self._selector.select(batch, self._logits)
        self._decoder.put_ids(selection.tokens)
        return pack_int32(selection.tokens), batch, selection

    def settle(self) -> None:
        """End the calm steps, if some are under way: enter them in the batch's books."""
        batch = self._batch
        if self._made and self._planner is not None:
            self._planner.went_on(self._made)
        if self._drawn and batch is not None:
            drawn = np.frombuffer(b"".join(self._drawn), np.int32).reshape(len(self._drawn), -1)
            for sequence, tokens in zip(batch.samples, drawn.T, strict=True):
                sequence.extend(tokens)
            self._drawn.clear()
        self._batch, self._logits, self._left, self._made = None, None, 0, 0
