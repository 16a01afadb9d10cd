"""Requests and texts by hand, and what the engine says of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from msgspec.structs import replace
from simulation.driver import CallOptions, Simulation
from simulation.module_prompts import Ranges, layout
from simulation.streams import Options, Stream

from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import ModuleText
from trunkline.controller.scheduling.module_jobs import ModuleJobs
from trunkline.kvstore.chunks import unpack_int32
from trunkline.router.messages import ModulesReply

CHUNK = 4
ROOMY = EngineConfig(num_blocks=96, chunk_size=CHUNK, max_context=96, token_budget=24, max_rows=12)


WIDE = replace(ROOMY, num_blocks=2000, max_context=4096)


def words(start: int, count: int) -> list[int]:
    """Tokens that begin no other text."""
    return list(range(start, start + count))


def jobs_of(simulation: Simulation) -> ModuleJobs:
    return simulation.scheduler.encoding.jobs


def submit(
    simulation: Simulation,
    texts: Sequence[ModuleText],
    runs: Ranges,
    max_tokens: int = 4,
    own: Sequence[int] | None = None,
    **options: Unpack[Options],
) -> int:
    """A request with these texts and its own tokens (if they are not given: 500, 501, …) at these places."""
    count = sum(count for _, count in runs)
    options["layout"] = layout(texts, runs)
    return simulation.submit(words(500, count) if own is None else list(own), max_tokens, **options)


def ask(
    simulation: Simulation,
    texts: Sequence[ModuleText],
    runs: Ranges,
    max_tokens: int = 4,
    own: Sequence[int] | None = None,
    **options: Unpack[Options],
) -> Stream:
    """`submit`, from its beginning to its end; the text is the oracle's."""
    request = submit(simulation, texts, runs, max_tokens, own, **options)
    simulation.finish()
    return simulation.streams[request]


def call(simulation: Simulation, op: str, texts: list[ModuleText], **options: Unpack[CallOptions]) -> ModulesReply:
    """A call, until its answer is there and all is at rest."""
    ticket = simulation.modules_call(op, texts, **options)
    simulation.run()
    return simulation.replies[ticket]


def tiers_in(reply: ModulesReply) -> list[int]:
    return [int(tier) for tier in unpack_int32(reply.tiers)]
