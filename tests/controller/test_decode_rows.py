"""The arrays of decoding sequences against lists: tokens that arrive, stop tokens, and what the sequences get."""

from __future__ import annotations

import random
from itertools import count

import numpy as np
import pytest
from seeds import seeds

from trunkline.controller.messages import Submit
from trunkline.controller.sequences.decode_rows import DecodeRows
from trunkline.controller.sequences.sequence import Request, Sequence, SequenceGroup, Stem
from trunkline.kvstore.chunks import pack_int32
from trunkline.worker.messages import Sampling

CHUNK = 4


def sequence_of(number: int, prompt: list[int], stops: list[int], stem: Stem) -> Sequence:
    submit = Submit(number, pack_int32(prompt), len(prompt), 1000, Sampling(), stop_token_ids=stops)
    sequence = SequenceGroup(Request.of(number, submit), number, 10_000, submit.sampling).members[0]
    sequence.batch_seq_id, sequence.stem = number, stem
    return sequence


@pytest.mark.parametrize("seed", seeds(2))
def test_tokens_reach_their_sequences(seed: int) -> None:
    """Sequences come and go; each gets every token of its own in order, and stops at its own stop tokens only."""
    rng, numbers = random.Random(seed), count(1)
    rows, stem = DecodeRows(6, CHUNK, 100), Stem(None)  # type: ignore[arg-type]  # nothing here looks at trees
    live: dict[int, tuple[Sequence, list[int], list[int]]] = {}
    for _ in range(3000):
        if rows.free_count and rng.random() < 0.3:
            prompt = [rng.randrange(30) for _ in range(rng.randint(1, 9))]
            stops = rng.sample(range(30), rng.choice((0, 1, 3, 8, 9, 12)))
            sequence = sequence_of(next(numbers), prompt, stops, stem)
            live[rows.add(sequence)] = (sequence, prompt, stops)
        slots = np.array(rng.sample(sorted(live), rng.randint(0, len(live))), np.intp)
        tokens = [rng.randrange(30) for _ in slots]
        if len(slots):
            row_set = rows.row_set(slots)
            valid, accepted, stopped = rows.accept(row_set, np.array(tokens, np.int32))
            assert valid.all()
            assert accepted.tolist() == slots.tolist()
            assert stopped.tolist() == [
                token in live[slot][2] for slot, token in zip(slots.tolist(), tokens, strict=True)
            ]
        for slot, token in zip(slots.tolist(), tokens, strict=True):
            sequence, had, _ = live[slot]
            had.append(token)
            late = len(had) - (stop := int(rows.fills_at[slot]))
            if late == CHUNK or (late > 0 and rng.random() < 0.5):
                owner, key = rows.take_filled(slot)
                assert (owner, key) == (sequence, pack_int32(had[stop - CHUNK : stop]))
                assert sequence.tokens.view(0, stop).tolist() == had[:stop]
                assert rows.fills_at[slot] == stop + CHUNK
            if len(had) - sequence.tokens.count == 2 * CHUNK or rng.random() < 0.1:
                rows.flush(slot)
                assert sequence.tokens.view().tolist() == had
            if rng.random() < 0.03:
                rows.remove(sequence)
                assert sequence.tokens.view().tolist() == had
                del live[slot]
