"""What the directory learns of a request that ends (`trunkline.kvstore.next_use`). Pure."""

from __future__ import annotations

from trunkline.controller.sequences.sequence import Sequence
from trunkline.kvstore.next_use import TurnEnd


def turn_end(sequence: Sequence, chunk_size: int, output_tokens: int, now: float) -> TurnEnd:
    """Return what is known of a sequence that ends, of its client and of what it does next.

    Args:
        output_tokens: number of tokens that the sequence has drawn.
    """
    group = sequence.group
    submit, found = group.request.submit, group.found
    return TurnEnd(
        arrived=now if found is None else found.at - found.started.queued_s,
        prompt_chunks=max(0, sequence.prompt_len // chunk_size - sequence.stem.base),
        prompt_tokens=sequence.prompt_len,
        output_tokens=output_tokens,
        tenant=submit.tenant,
        expected_s=submit.next_s,
        is_last=submit.is_last,
    )
