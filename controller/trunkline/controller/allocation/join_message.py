"""The message by which the workers learn of a sequence that is admitted. Pure."""

from __future__ import annotations

import msgspec

from trunkline.controller.allocation.modules import seen_tokens
from trunkline.controller.sequences.sequence import Sequence
from trunkline.kvstore.adapters import adapter_of
from trunkline.kvstore.chunks import pack_int32
from trunkline.worker.messages import Join


def first_to_compute(sequence: Sequence, chunk_size: int) -> int:
    """Return the index of the first token that a sequence computes when it is admitted.

    Even if everything is cached, the last token is computed, without storing it: its logits are needed. A prompt
    whose tokens are scored needs the logits of all its tokens.
    """
    first = 0 if sequence.recompute_from_start else min(sequence.cached_tokens, sequence.tokens.count - 1)
    if sequence.group.cut is not None:
        return max(first, sequence.group.cut.cut.first_open)
    if sequence.group.modules is not None:
        return max(first, sequence.group.modules.entries * chunk_size)
    return first


def join_message(sequence: Sequence) -> Join:
    """Return the message by which the workers learn of a sequence; they count only tokens that are seen
    (`trunkline.kvstore.cuts`)."""
    sampling = sequence.sampling
    if sampling.prompt_logprobs >= 0 and not sequence.recompute_from_start:
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=-1)  # they have been reported
    cut, modules, holes = sequence.group.cut, sequence.group.modules, sequence.group.holes
    first = 0 if sampling.needs_history else sequence.computed
    tokens, extents = sequence.tokens.view(first), sequence.stem.extents
    if cut is not None:
        extents = cut.cut.extents()
        tokens = tokens if first else cut.cut.seen(tokens)
    elif modules is not None and not first:
        tokens = seen_tokens(modules, tokens)
    return Join(
        sequence=sequence.batch_seq_id,
        tokens=pack_int32(tokens),
        first=first - holes if first else 0,
        prompt_len=sequence.prompt_len - holes,
        blocks=pack_int32(sequence.block_table()),
        sampling=sampling,
        extents=pack_int32([value for extent in extents for value in extent]) if extents else b"",
        beam_position=sequence.beam_position,
        adapter=adapter_of(sequence.salt),
    )
