"""From a request to the group that is queued: its tokens as they stand in its table, and its limit. Pure."""

from __future__ import annotations

from dataclasses import replace

from trunkline.controller.allocation.cuts import cut_group
from trunkline.controller.allocation.modules import lay_out, prompt_of
from trunkline.controller.cache.radix_cache import RadixCache
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.sequences.sequence import Request, SequenceGroup
from trunkline.kvstore.module_names import RelocationRule
from trunkline.worker.messages import Sampling


def prompt_length(request: Request) -> int:
    """Tokens of its prompt, those that it does not see included."""
    return request.prompt_len if request.prompt_len >= 0 else len(request.tokens)


def from_its_start(request: Request) -> Request:
    """The request as it can be begun here. A search that comes from elsewhere starts again: only its own beams
    could say what came of it."""
    prompt_len = prompt_length(request)
    if request.beam is not None and len(request.tokens) > prompt_len:
        return replace(request, tokens=request.tokens[:prompt_len])
    return request


def limit_of(request: Request, config: EngineConfig) -> int:
    """Tokens, of those that it sees, at which each of its sequences ends."""
    dropped = sum(stop - start for start, stop in request.drops)
    return min(prompt_length(request) - dropped + request.max_tokens, config.longest_sequence)


def moves_of(config: EngineConfig, *, relocate: bool) -> RelocationRule:
    """Where texts of modules may act, if their client lets them `relocate`."""
    return RelocationRule.of(config.positions_shift, relocate)


def group_of(
    request: Request, arrival: int, limit: int, sampling: Sampling, tree: RadixCache, config: EngineConfig
) -> SequenceGroup:
    """A new group of one sequence; what it does not see and texts of modules are in its table.

    Args:
        limit: `limit_of` it; 0: it is only announced.
        sampling: the request's, with what the engine added to it.
    """
    group = SequenceGroup(request, arrival, limit, sampling)
    if request.drops:
        cut_group(group, tree, config)
    if request.layout is not None:
        moves = moves_of(config, relocate=request.layout.relocate)
        lay_out(group, prompt_of(tree, request.salt, request.layout, moves), config.max_context)
    return group
