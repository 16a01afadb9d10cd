"""What the directory learns of a request that ends (`trunkline.kvstore.next_use`). Pure."""

from __future__ import annotations

from typing import Final

from trunkline.controller.sequences.sequence import Sequence
from trunkline.kvstore.next_use import TurnEnd

LAST_TOKENS: Final = 2
"""Number of last tokens of an answer that say how it ended: most models end calls of tools by other tokens than
texts."""


def turn_end(sequence: Sequence, chunk_size: int, now: float) -> TurnEnd:
    """Return what is known of a sequence that ends, of its client and of what it does next."""
    group, tokens = sequence.group, sequence.tokens
    submit, found = group.request.submit, group.found
    return TurnEnd(
        arrived=now if found is None else found.at - found.started.queued_s,
        prompt_chunks=max(0, sequence.prompt_len // chunk_size - sequence.stem.base),
        prompt_tokens=sequence.prompt_len,
        output_tokens=max(0, tokens.count - sequence.prompt_len),
        tenant=submit.tenant,
        ended=" ".join(map(str, tokens.view(max(sequence.prompt_len, tokens.count - LAST_TOKENS)).tolist())),
        expected_s=submit.next_s,
        is_last=submit.is_last,
        request=group.id,
    )
