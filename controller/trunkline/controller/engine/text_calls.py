"""Routers' calls about texts of modules: to encode, hold or give them up (Prompt Cache §3.3). Pure."""

from __future__ import annotations

from trunkline.controller.engine.validation import problem_of_texts
from trunkline.controller.messages import ModulesCall
from trunkline.controller.scheduling.module_calls import TextsCall
from trunkline.controller.scheduling.scheduler import Scheduler
from trunkline.router.messages import ModulesReply


def call_texts(
    call_id: int, call: ModulesCall, scheduler: Scheduler, step: int, now: float, *, is_away: bool
) -> None:
    """Begin what a router asks for, or answer it at once; answers are in `ModuleCalls.done`.

    Args:
        step: number of the next plan.
        is_away: whether the workers are lost.
    """
    calls, config = scheduler.encoding.calls, scheduler.config
    if call.op == "cancel":
        if (cancelled := calls.cancel(call_id)) is not None:
            scheduler.leave_jobs(cancelled, now)
        return
    if call.op == "unpin":
        calls.unpin(call.pin_name, now)
        calls.done.append(ModulesReply(0, call_id, "ok"))
        return
    if problem := problem_of_texts(call.texts, config):
        calls.done.append(ModulesReply(0, call_id, "failed", problem))
        return
    wanted = TextsCall.of(call_id, call, positions_shift=config.positions_shift)
    if is_away and not wanted.encodes:
        calls.postpone(wanted)  # until new workers are ready, it is not known what is on disk
    else:
        calls.begin(wanted, step, now)
