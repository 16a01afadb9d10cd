"""Beam searches in the simulated workers: candidates, the moves of beams, and the copies they leave to do.

What every rank must do by the contract of `BeamPosition`, `Fork` and `StepPlan` (trunkline.worker.messages).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from simulation.layout import Layout
from simulation.model import VOCABULARY, log_probabilities

from trunkline.controller.reports import BeamStep
from trunkline.kvstore.beams import assign_tails, choose_beams
from trunkline.kvstore.chunks import pack_int32, unpack_int32
from trunkline.worker.messages import BeamPosition, Sampling


@dataclass
class Resident:
    """A sequence as the workers mirror it."""

    sampling: Sampling
    prompt_len: int
    first: int
    tokens: list[int]
    """From position `first` on."""
    table: list[int]
    layout: Layout
    beam_position: BeamPosition | None = None
    computed: int | None = None
    """Positions before this one were computed or found; None: nothing is planned for it yet."""
    reaches: Mapping[int, int] = field(default_factory=dict)
    """As `SimulatedWorkers.execute` was told."""
    pooled: bytes = b""
    """Hash of all hidden states that were computed of a prompt that is pooled over all of its tokens."""
    drafts: list[int] = field(default_factory=list)
    """Guesses that the present step tries behind the last token."""
    start: int = 0
    """No position before this one is computed any more."""

    @property
    def total(self) -> int:
        return self.first + len(self.tokens)


@dataclass
class Search:
    """The members of one beam search, by index."""

    width: int
    candidates: int
    stop_ids: bytes
    members: dict[int, int] = field(default_factory=dict)
    """Index → id in the batch."""
    scores: dict[int, np.float32] = field(default_factory=dict)
    copies: list[tuple[int, int, int, int]] = field(default_factory=list)
    """What the last move left to do at the start of the next step."""

    def sit(self, batch_seq_id: int, beam_position: BeamPosition) -> None:
        assert (beam_position.width, beam_position.candidates, beam_position.stop_ids) == (
            self.width,
            self.candidates,
            self.stop_ids,
        )
        assert 0 <= beam_position.index < self.width
        assert beam_position.index not in self.members, "two members have one beam_position"
        self.members[beam_position.index] = batch_seq_id
        self.scores[beam_position.index] = np.float32(beam_position.score)


class Searches:
    """All searches in the batch."""

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size
        self.by_group: dict[int, Search] = {}
        self._ended: set[int] = set()
        self.moves = 0

    def sit(self, batch_seq_id: int, beam_position: BeamPosition) -> None:
        """A member joins or is forked."""
        assert beam_position.search not in self._ended, "a search's id was used twice"
        search = self.by_group.setdefault(
            beam_position.search, Search(beam_position.width, beam_position.candidates, beam_position.stop_ids)
        )
        search.sit(batch_seq_id, beam_position)

    def leave(self, positions: list[BeamPosition]) -> None:
        """Members leave; all of a search at once, and the copies it had left to do are forgotten with it."""
        for beam_position in positions:
            del self.by_group[beam_position.search].members[beam_position.index]
        for group in {beam_position.search for beam_position in positions}:
            assert not self.by_group[group].members, "a part of a beam search left"
            del self.by_group[group]
            self._ended.add(group)

    def take_copies(self) -> list[tuple[int, int, int, int]]:
        """What the moves of the last step left to do."""
        copies = [copy for search in self.by_group.values() for copy in search.copies]
        for search in self.by_group.values():
            search.copies = []
        return copies

    def check_together(self, rows: list[int], residents: dict[int, Resident]) -> None:
        """All members of a search decode in the same steps."""
        present = set(rows)
        groups = {
            beam_position.search
            for batch_seq_id in rows
            if (beam_position := residents[batch_seq_id].beam_position) is not None
        }
        for group in groups:
            search = self.by_group[group]
            assert set(search.members) == set(range(search.width)), "a search decodes without some of its beams"
            assert set(search.members.values()) <= present, "a part of a beam search decodes"
            assert len({residents[batch_seq_id].total for batch_seq_id in search.members.values()}) == 1

    def advance(
        self, group: int, hashes: dict[int, bytes], residents: dict[int, Resident]
    ) -> tuple[BeamStep, dict[int, int]]:
        """Choose the next beams and move contents of members accordingly.

        Args:
            hashes: by id in the batch, of all tokens so far: of every member, or the first where the prompt ends.

        Returns:
            the candidates; by id in the batch, the token that its new content ends with.
        """
        search = self.by_group[group]
        indices = sorted(i for i, batch_seq_id in search.members.items() if batch_seq_id in hashes)
        assert indices in ([0], list(range(search.width))), "candidates come from all beams or from the prompt"
        scores = np.stack(
            [log_probabilities(hashes[search.members[i]]) + search.scores[i] for i in indices], dtype=np.float32
        )
        flat = scores.reshape(-1)
        best = np.argsort(-flat, kind="stable")[: search.candidates]
        parents = np.array(indices, np.int32)[best // VOCABULARY]
        tokens = (best % VOCABULARY).astype(np.int32)
        step = BeamStep(pack_int32(parents), pack_int32(tokens), flat[best].astype("<f4").tobytes())
        chosen = choose_beams(tokens, unpack_int32(search.stop_ids), search.width)
        sampled = self._move(search, parents[chosen].tolist(), tokens[chosen].tolist(), residents)
        search.scores = dict(enumerate(flat[best[chosen]]))
        return step, sampled

    def _move(
        self, search: Search, parents: list[int], tokens: list[int], residents: dict[int, Resident]
    ) -> dict[int, int]:
        members = [residents[search.members[i]] for i in range(search.width)]
        entry, offset, _, _ = members[0].layout.cell(members[0].total - 1)
        assert all(len(member.table) == entry + 1 for member in members), (
            "a beam's table does not fit what it has computed"
        )
        old = [(member.first, member.tokens, member.table) for member in members]
        tails = assign_tails(parents)
        filled = (offset + 1) % self.chunk_size
        for member, parent, token, tail in zip(members, parents, tokens, tails, strict=True):
            first, past, table = old[parent]
            member.first, member.tokens, member.table = first, [*past, token], list(table)
            if filled:
                own = old[tail][2][-1]
                if tail != parent:
                    search.copies.append((table[-1], own, 0, filled))
                member.table[-1] = own
        self.moves += 1
        return {search.members[i]: token for i, token in enumerate(tokens)}
