"""What workers cannot know of prompts with modules: which sequences have them, and where each token must act."""

from __future__ import annotations

from simulation.layout import Layout
from simulation.module_oracle import own_positions, own_reaches, reaches, seen_positions

from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.scheduling.scheduler import Scheduler
from trunkline.controller.sequences.module_prompt import ModulePrompt
from trunkline.controller.sequences.sequence import Sequence
from trunkline.worker.messages import StepPlan


def joining_modules(scheduler: Scheduler, plan: StepPlan) -> dict[int, Sequence]:
    """By id in the batch, those that join with the last plan and have modules, or compute a text of one."""
    joined = {join.sequence for join in plan.joins}
    running = (sequence for sequence in scheduler.running() if sequence.batch_seq_id in joined)
    return {sequence.batch_seq_id: sequence for sequence in running if sequence.group.modules is not None}


def expected_reaches(sequence: Sequence) -> dict[int, int]:
    """By position, how far a token must have been from what it saw when it was computed. With texts that may
    relocate only own tokens' distances count."""
    layout = sequence.group.request.submit.layout
    if layout is None:
        return {}
    return own_reaches(layout) if layout.relocate else own_reaches(layout) | reaches(layout)


def check_places(sequence: Sequence, layout: Layout, config: EngineConfig) -> None:
    """Each token acts where its request says; where positions are learned, its key belongs there, too.

    Args:
        layout: as the workers were told.
    """
    request, modules = sequence.group.request, sequence.group.modules
    assert modules is not None
    if request.submit.layout is not None:
        expected = sorted([*seen_positions(request.submit.layout), *own_positions(request.submit.layout)])
    else:
        expected = _text_positions(modules)
    cells = sorted(layout.cells(len(expected)), key=lambda cell: cell.acting)
    assert [cell.acting for cell in cells] == expected, "a token acts at another position than its request says"
    assert expected[-1] < config.max_context, "a token acts where the model has no position"
    assert min(cell.frame for cell in cells) >= 0
    if not config.positions_shift:
        assert all(extent.shift == 0 for extent in layout.extents), "a text acts where it was not computed"


def _text_positions(modules: ModulePrompt) -> list[int]:
    """Of what a text sees, and of itself."""
    positions: list[int] = []
    index = modules.target
    while index >= 0:
        text = modules.texts[index]
        positions += range(text.position, text.position + text.token_count)
        index = text.parent
    return sorted(positions)
