"""Fork the samples and beams of a request from its prompt, and move beams from step to step. Pure.

Parallel sampling, beam search and prefix sharing need three operations on memory (PagedAttention §4.4, §5.2):
`fork` (here), `append` (`PlanBuilder.append_block`) and `free` (`KVCacheManager.leave`).

      prompt   [c0][c1][tail]          fork: c0, c1 shared; each child owns a tail, copied before it is written
                 └──┴──[tail'] …       beams: after each step, new tables are made of the old ones
"""

from __future__ import annotations

import msgspec

from trunkline.controller.allocation.kv_manager import KVCacheManager
from trunkline.controller.sequences.beam_search import BeamHistory, sample_seed
from trunkline.controller.sequences.decode_rows import DecodeRows
from trunkline.controller.sequences.plan_builder import PlanBuilder
from trunkline.controller.sequences.sequence import Phase, Sequence, SequenceGroup, TokenBuffer
from trunkline.kvstore.beams import assign_tails
from trunkline.kvstore.chunks import BlockId, blocks_for, pack_int32
from trunkline.worker.messages import BeamPosition, Fork


class Forks:
    """Forks sequences from prompts, and knows the running beam searches."""

    def __init__(self) -> None:
        self.searches: dict[int, SequenceGroup] = {}
        """The running beam searches, by the id that a search has while it is in the batch."""
        self._next_search = 1
        self._children: list[Sequence] = []
        """Forked sequences whose tails the next plan copies."""

    def place_beams(self, group: SequenceGroup) -> None:
        """Give a beam search that enters the batch a new id, and its sequences their positions."""
        if group.search is None:
            submit = group.request.submit
            assert submit.beam is not None
            output_limit = group.limit - group.prompt_len
            group.search = BeamHistory(submit.beam, submit.n, submit.stop_token_ids, output_limit)
        search_id, self._next_search = self._next_search, self._next_search + 1
        self.searches[search_id] = group
        for sequence in group.members:
            sequence.beam_position = self._position_of(group.search, search_id, sequence.sample)

    def _position_of(self, search: BeamHistory, search_id: int, index: int) -> BeamPosition:
        return BeamPosition(
            search_id, index, search.width, float(search.scores[index]), search.candidates, search.stop_ids
        )

    def leave_batch(self, sequence: Sequence) -> None:
        """Clear the ids of a sequence that has left the batch."""
        sequence.batch_seq_id = 0
        if sequence.beam_position is not None:
            self.searches.pop(sequence.beam_position.search, None)
            sequence.beam_position = None

    def fork(self, parent: Sequence, plan: PlanBuilder, kv: KVCacheManager, rows: DecodeRows) -> None:
        """Fork the other sequences of a group from the one whose prompt this step computes to the end."""
        group, chunk_size = parent.group, kv.chunk_size
        partial = parent.tokens.count % chunk_size > 0
        for index in range(1, group.request.width):
            seed = sample_seed(parent.sampling.seed, index)
            sampling = msgspec.structs.replace(parent.sampling, seed=seed, prompt_logprobs=-1)
            child = Sequence(group, index, TokenBuffer(parent.tokens.view()), sampling)
            if parent.beam_position is not None and group.search is not None:
                child.beam_position = self._position_of(group.search, parent.beam_position.search, index)
            kv.fork(parent, child, parent.tails.pop() if partial else None)
            child.phase = Phase.DECODE
            child.batch_seq_id = kv.new_batch_seq_id()
            if partial and child.beam_position is None:
                # The parent may end with its first token, so its tail is held until the copy is planned.
                kv.pool.share(parent.private[-1])
                child.tails = [parent.private[-1]]
                self._children.append(child)
            rows.add(child)
            table = pack_int32(child.block_table())
            plan.forks.append(Fork(parent.batch_seq_id, child.batch_seq_id, table, seed, child.beam_position))
            plan.forked.append(child)
            group.members.append(child)
            kv.tree.totals.forks += 1
        group.forked = True
        if group.search is not None:
            rows.read_alike(parent, group.members[1:], parent.tokens.count // chunk_size)

    def copy_tails(self, plan: PlanBuilder) -> list[BlockId]:
        """Plan the tail copies for the forks of the last plan, all at once (PagedAttention §4.3: fused block
        copy).

        A child that ends with its first token never writes, so it needs no copy.

        Returns:
            the source blocks, to be released when the plan is complete: no plan may reuse a block that it copies.
        """
        sources = []
        for child in self._children:
            if child.tails and child.group.limit > child.prompt_len + 1:  # no tails: it has left the batch
                source = child.tails.pop()
                full, count = divmod(child.prompt_len, plan.chunk_size)
                tail = child.private[full - len(child.path)]  # a block behind it may have been given early
                plan.copies.append((source, tail, 0, count))
                sources.append(source)
        self._children = []
        return sources


def restore_output(sequence: Sequence) -> int:
    """Copy a beam's output from its search into its tokens when it leaves the rows; return its length."""
    search = sequence.group.search
    assert search is not None
    sequence.tokens.truncate(sequence.prompt_len)
    sequence.tokens.extend(search.output(sequence.sample))
    return search.length


def move_beams(members: list[Sequence], parents: list[int], stored: int, kv: KVCacheManager, now: float) -> None:
    """Update the block tables of beams after a step, by the same rules as the workers (`trunkline.kvstore.beams`).

    Args:
        members: in the order of the beams.
        parents: for each new beam, the old beam that it continues.
        stored: tokens of each beam whose KV is stored at the end of the step. Blocks behind these were appended
            for later steps and stay with their member.
    """
    tails = assign_tails(parents)
    entries = blocks_for(stored, kv.chunk_size)
    partial = stored % kv.chunk_size > 0
    old = [(sequence.path, sequence.private, sequence.anchor) for sequence in members]
    moved = [i for i, parent in enumerate(parents) if parent != i or tails[i] != i]
    for i in moved:
        path, private, anchor = old[parents[i]]
        table = private[: entries - len(path)]
        if partial:
            tail_path, tail_private, _ = old[tails[i]]
            table[-1] = tail_private[entries - len(tail_path) - 1]
        own_path, own_private, _ = old[i]
        members[i].path = list(path)
        members[i].private = table + own_private[entries - len(own_path) :]
        kv.tree.hold(anchor)
        for block in members[i].private:
            kv.pool.share(block)
    for i in moved:
        _, private, anchor = old[i]
        for block in private:
            kv.pool.release(block)
        kv.tree.release(anchor, now)
