"""The message by which the workers learn of a sequence that is admitted. Pure."""

from __future__ import annotations

from trunkline.controller.allocation.modules import seen_tokens
from trunkline.controller.sequences.sequence import Sequence
from trunkline.kvstore.adapters import adapter_of
from trunkline.kvstore.chunks import pack_int32
from trunkline.worker.messages import Join, Sampling


def join_message(sequence: Sequence, sampling: Sampling) -> Join:
    """Return the message by which the workers learn of a sequence; they count only tokens that are seen
    (`trunkline.kvstore.cuts`)."""
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
