"""Beam searches on the workers' side: which beams go on, and how their sequences change.

Rank 0 chooses from the logits (`BeamPositions.choose`), all ranks carry it out (`RunningSearch.advance`). Members
of a search are ordinary sequences and rows; a step changes what they contain, never which they are: member i is
the search's i-th best beam, and block tables move between the members (PagedAttention §4.4). Full blocks are
referred to by as many members as go on from them; only a tail that several of them go on from is copied, at the
start of the next step. See `trunkline.kvstore.beams` for the rules, which the controller replays.
"""

from __future__ import annotations

from array import array
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trunkline.controller.reports import BeamStep
from trunkline.kvstore.beams import assign_tails, choose_beams
from trunkline.kvstore.chunks import Int32Array, pack_int32, unpack_int32
from trunkline.worker.batch.batch import ForwardBatch
from trunkline.worker.batch.sequences import BatchSequence
from trunkline.worker.errors import PlanError
from trunkline.worker.messages import BeamPosition

_TILE: Final = 256
"""Number of scores in a tile: first only the largest score of each tile is looked at."""

_NO_COPIES: Final = np.zeros((0, 4), dtype=np.int32)

IndexArray = NDArray[np.intp]


class Continuations(NamedTuple):
    """The best continuations of a search's beams, best first: three columns of one table."""

    parents: Int32Array
    """Index of the beam that each continuation continues."""
    tokens: Int32Array
    scores: NDArray[np.float32]
    """Sum of log-probabilities of each continuation."""


class RunningSearch:
    """One beam search, from the join of its members until they leave the batch."""

    def __init__(self, beam_position: BeamPosition) -> None:
        self.id = beam_position.search
        self.width = beam_position.width
        self.candidates = beam_position.candidates
        self.stop_ids = unpack_int32(beam_position.stop_ids)
        self.scores = np.zeros(beam_position.width, dtype=np.float32)
        """Scores of the members; kept up to date on rank 0 only, which alone needs them."""
        self.copies = _NO_COPIES
        """The copies that `copy_blocks` must make before the next step, int32 `[n, 4]`."""
        self._by_index: dict[int, BatchSequence] = {}

    def add(self, sequence: BatchSequence, beam_position: BeamPosition) -> None:
        """Add a member at its beam position.

        Raises:
            PlanError: the position is taken, or does not belong to this search.
        """
        if (
            beam_position.width != self.width
            or not 0 <= beam_position.index < self.width
            or beam_position.index in self._by_index
        ):
            raise PlanError(
                f"sequence {sequence.id} cannot be beam {beam_position.index} of {beam_position.width} in search "
                f"{self.id} of width {self.width}, where beams {sorted(self._by_index)} are taken"
            )
        self._by_index[beam_position.index] = sequence
        self.scores[beam_position.index] = beam_position.score

    @property
    def members(self) -> list[BatchSequence]:
        """Return the members, the best beam first.

        Raises:
            PlanError: not all of them have joined.
        """
        if len(self._by_index) < self.width:
            raise PlanError(f"search {self.id} has {len(self._by_index)} of {self.width} beams")
        return [self._by_index[index] for index in range(self.width)]

    def choose(self, found: Continuations) -> tuple[Int32Array, Int32Array]:
        """Choose the next beams and remember their scores; return `[width]` parents and tokens.

        Raises:
            PlanError: too few continuations; the vocabulary is too small for the search.
        """
        try:
            chosen = choose_beams(found.tokens, self.stop_ids, self.width)
        except ValueError as error:
            raise PlanError(f"search {self.id}: {error}") from error
        self.scores = found.scores[chosen]
        return found.parents[chosen], found.tokens[chosen]

    def advance(self, parents: list[int], tokens: list[int], chunk_size: int) -> bool:
        """Let member i go on from what member `parents[i]` was, with `tokens[i]`.

        Returns:
            Whether a block table changed. Copies that this leaves to do are in `copies`.
        """
        members = self.members
        computed = members[0].known
        entries, offsets = members[0].layout.cells(computed - 1, computed, chunk_size)
        tail, used = int(entries[0]), (int(offsets[0]) + 1) % chunk_size
        changed = False
        if parents != list(range(self.width)):
            # A full tail is shared like the blocks before it.
            tails = assign_tails(parents) if used else parents
            changed = self._permute(parents, tails, tail, used)
        for member, token in zip(members, tokens, strict=True):
            member.continue_with(token)
        return changed

    def _permute(self, parents: list[int], tails: list[int], tail: int, used: int) -> bool:
        """Move block tables, whose last entry in use is `tail` with `used` tokens in it (0: it is full)."""
        members = self.members
        if any(len(member.blocks) <= tail for member in members):
            raise PlanError(f"search {self.id}: the block table of a beam has no entry {tail}")
        old = [member.blocks for member in members]
        copies, changed = [], False
        for member, parent, owner in zip(members, parents, tails, strict=True):
            table: array[int] = old[parent][:tail]
            table.append(old[owner][tail])
            table += member.blocks[tail + 1 :]
            changed |= table != member.blocks
            member.blocks = table
            if owner != parent:
                copies.append((old[parent][tail], old[owner][tail], 0, used))
        self.copies = np.array(copies, dtype=np.int32).reshape(-1, 4)
        return changed


class _Placed(NamedTuple):
    """The places of one search's members in the batch."""

    search: RunningSearch
    places: IndexArray
    """Index of each member of the search among the samples, `[width]`."""
    lines: IndexArray
    """Index of each beam's line among the logits of all searches, `[width]`; `[1]` at the end of the prompt, when
    all beams are still the same."""


class BeamPositions:
    """Which samples of a batch belong to searches; stays valid while the samples are the same."""

    def __init__(self, batch: ForwardBatch, running: dict[int, RunningSearch]) -> None:
        """
        Raises:
            PlanError: a search of which some members are in the batch and some are not.
        """
        first_fork = batch.sampled_rows
        rows = np.array([*range(first_fork), *batch.fork_rows], dtype=np.intp)
        place = {sample.id: index for index, sample in enumerate(batch.samples)}
        found = dict.fromkeys(s.beam_position.search for s in batch.samples if s.beam_position is not None)
        self.searches: list[_Placed] = []
        beam_rows: list[int] = []
        for id_ in found:
            if id_ not in running:
                raise PlanError(f"search {id_} has ended, but some of its beams are still in the batch")
            search = running[id_]
            missing = [member.id for member in search.members if member.id not in place]
            if missing:
                raise PlanError(
                    f"search {search.id}: of its beams, {missing} are not in the batch with the others"
                )
            places = np.array([place[member.id] for member in search.members], dtype=np.intp)
            own = list(dict.fromkeys(rows[places].tolist()))
            if len(own) not in (1, search.width):
                raise PlanError(f"search {search.id}: {search.width} beams have {len(own)} rows of logits")
            self.searches.append(_Placed(search, places, np.arange(len(beam_rows), len(beam_rows) + len(own))))
            beam_rows += own
        self._select_rows(beam_rows, batch)
        others = [index for index, s in enumerate(batch.samples) if s.beam_position is None]
        self.others = np.array(others, dtype=np.intp)
        """Indices of the samples that are no beams."""
        self.other_samples = [batch.samples[index] for index in others]
        self.other_rows = rows[self.others]
        """Logits rows of the samples that are no beams."""
        self.members = sum(placed.search.width for placed in self.searches)

    def _select_rows(self, beam_rows: list[int], batch: ForwardBatch) -> None:
        first = min(beam_rows)
        if sorted(beam_rows) == list(range(first, first + len(beam_rows))):
            # Neighbours, in whatever order: no copy of their logits is needed, only other line numbers.
            self._rows: slice | Tensor = slice(first, first + len(beam_rows))
            line_of = np.array(beam_rows, dtype=np.intp) - first
            self.searches = [found._replace(lines=line_of[found.lines]) for found in self.searches]
        else:
            self._rows = torch.tensor(beam_rows)

    def choose(self, logits: Tensor) -> list[Continuations]:
        """Return the best continuations of each search, in the order of `searches`.

        Args:
            logits: float32 `[logits rows, vocabulary]`; not changed.
        """
        rows = self._rows
        beams = logits[rows if isinstance(rows, slice) else rows.to(logits.device)]
        totals = np.zeros(len(beams), dtype=np.float32)
        for placed in self.searches:
            totals[placed.lines] = placed.search.scores[: len(placed.lines)]
        scores = Scores(beams.log_softmax(dim=-1), torch.from_numpy(totals).to(beams.device))
        return [scores.best(placed.lines, placed.search.candidates) for placed in self.searches]


class Scores:
    """Scores of all continuations of some beams, made ready for finding the best ones.

    Only tiles whose largest score is among the best are looked at: the n best scores lie in the n tiles that
    come first when ordered like the scores themselves.
    """

    def __init__(self, log_probs: Tensor, totals: Tensor) -> None:
        """
        Args:
            log_probs: float32 `[lines, vocabulary]`, of each beam's continuations.
            totals: float32 `[lines]`, the beams' own scores.
        """
        lines, self._vocab_size = log_probs.shape
        padded = log_probs.new_empty(lines, -(-self._vocab_size // _TILE) * _TILE)
        padded[:, self._vocab_size :] = float("-inf")
        torch.add(log_probs, totals[:, None], out=padded[:, : self._vocab_size])
        self._tiles = padded.view(lines, -1, _TILE)
        self._largest = self._tiles.amax(dim=-1).cpu().numpy()

    def best(self, lines: IndexArray, count: int) -> Continuations:
        """Return the `count` largest scores of the lines, in order; of equal ones, those of earlier lines and
        lower ids first. Fewer if there are fewer."""
        largest = self._largest[lines]
        line, within = np.divmod(_largest_indices(largest.reshape(-1), count), largest.shape[1])
        values = self._tiles_at(lines[line], within)
        chosen = _largest_indices(values, count)
        chosen = chosen[np.argsort(-values[chosen], kind="stable")]
        tile, offset = np.divmod(chosen, _TILE)
        parents, tokens = line[tile], within[tile] * _TILE + offset
        # Padding is chosen only among continuations that are impossible, too.
        if tokens.max() >= self._vocab_size:
            present = tokens < self._vocab_size
            chosen, parents, tokens = chosen[present], parents[present], tokens[present]
        parents, tokens = parents[:count].astype(np.int32), tokens[:count].astype(np.int32)
        return Continuations(parents, tokens, values[chosen[:count]])

    def _tiles_at(self, lines: IndexArray, within: IndexArray) -> NDArray[np.float32]:
        """Return the scores of some tiles, one after the other."""
        if self._tiles.is_cuda:
            device = self._tiles.device
            found = self._tiles[torch.from_numpy(lines).to(device), torch.from_numpy(within).to(device)]
            values: NDArray[np.float32] = found.cpu().numpy()
        else:
            values = self._tiles.numpy()[lines, within]
        return values.reshape(-1)


def _largest_indices(values: NDArray[np.float32], count: int) -> IndexArray:
    """Return the ascending indices of all values not smaller than the `count`-th largest; of all, if NaN is in the
    way."""
    if count < len(values):
        threshold = np.partition(values, len(values) - count)[len(values) - count]
        found: IndexArray = (values >= threshold).nonzero()[0]
        if len(found) >= count:
            return found
    return np.arange(len(values))


class BeamSearches:
    """All searches that this worker knows, and the copies that their last steps left to do."""

    def __init__(self) -> None:
        self._running: dict[int, RunningSearch] = {}
        self.search_of: dict[int, RunningSearch] = {}
        """The search of each beam, by sequence id. While this is empty, no method need be called."""
        self._positions: BeamPositions | None = None

    def add(self, sequence: BatchSequence) -> None:
        """Note a sequence that joined or was forked.

        Raises:
            PlanError: its position in a beam search is taken.
        """
        beam_position = sequence.beam_position
        if beam_position is None:
            return
        search = self._running.get(beam_position.search)
        if search is None:
            search = self._running[beam_position.search] = RunningSearch(beam_position)
        search.add(sequence, beam_position)
        self.search_of[sequence.id] = search

    def remove(self, sequences: list[int]) -> None:
        """Note sequences that left. A search ends with the first of its beams, and copies that the search left to
        do are dropped: the blocks may have other owners already."""
        for sequence in sequences:
            search = self.search_of.pop(sequence, None)
            if search is not None:
                self._running.pop(search.id, None)
        if not self.search_of:
            self._positions = None

    def take_copies(self) -> Int32Array:
        """Return the copies to make, int32 `[n, 4]` for one call of `copy_blocks`, and forget them."""
        waiting = [search for search in self._running.values() if len(search.copies)]
        if not waiting:
            return _NO_COPIES
        copies = np.concatenate([search.copies for search in waiting])
        for search in waiting:
            search.copies = _NO_COPIES
        return copies

    def positions(self, batch: ForwardBatch) -> BeamPositions | None:
        """Return where the searches are in a batch; None if there are none.

        Raises:
            PlanError: see `BeamPositions`.
        """
        if batch.samples_changed:
            has_beams = any(sample.beam_position is not None for sample in batch.samples)
            self._positions = BeamPositions(batch, self._running) if has_beams else None
        return self._positions


def report(found: Continuations) -> BeamStep:
    """Return the controller's message about a search's step."""
    return BeamStep(pack_int32(found.parents), pack_int32(found.tokens), found.scores.astype("<f4").tobytes())
