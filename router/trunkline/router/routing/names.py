"""The names under which controllers publish the KV of a prompt (`trunkline.kvstore.chunks`). Pure.

A plain prompt is one chain of whole chunks. Other prompts have several chains:

- A prompt with *modules*: each text that it sees is a chain of its own. It counts only if all of it is cached,
  for otherwise it is computed again from its beginning. The prompt's own tokens follow as the last chain.
- A prompt of which something is *dropped* (`trunkline.kvstore.cuts`) goes one of two ways, and the better one
  counts: the controller goes on with the KV that it kept, which has the names of the whole history, dropped
  chunks left out, and which must reach the last dropped token; or it computes what is left as a plain prompt.

The names of chunks that were computed behind a cut depend on how much had been computed before it. As far as that
still has the names of the whole history, it can be seen from what controllers have (`with_kept`). An edited
conversation drops one range more from turn to turn, and what each turn computed is named after the ranges that it
dropped. These names are followed, from chunk to chunk, through what controllers have (`CutHistory.followed`). When
a session overflows for the second time, its one range becomes longer: its turns since the first cut are not found.
It stays at its controller all the same, because its cost is still lowest there, and because it is a session.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec
import numpy as np

from trunkline.controller.messages import PromptLayout
from trunkline.kvstore.chunks import TOKEN_BYTES, ChunkName, blocks_for, chain, chunk_name, root_name
from trunkline.kvstore.cuts import PACKED_RANGE_BYTES, ContextCut, KeptTable, cut_name
from trunkline.kvstore.module_names import Ranges, RelocationRule, modules_root, pairs, prompt_root, text_names
from trunkline.router.routing.index import Match
from trunkline.router.routing.request import RouteRequest

_AHEAD: Final = 16
"""Number of chunks whose names are made at first to see how many of them controllers have."""
_TRIES_MAX: Final = 256
"""Largest number of times that controllers' chunks are looked through to follow a history."""
KEPT_WAYS_MAX: Final = 3
"""Largest number of chains for chunks that were computed behind a cut."""
_root_name: Final = lru_cache(maxsize=1024)(root_name)


class KvIdentity(msgspec.Struct, frozen=True):
    """Model and format of a controller's KV, on which all its chunk names depend. Controllers with equal
    identities have equal names for equal KV."""

    fingerprint: bytes
    dtype: str
    chunk_size: int
    positions_shift: bool = True
    """Whether KV can be used at other positions: behind a cut, and for texts of modules that were moved."""


class Chain(msgspec.Struct, frozen=True):
    """Successive chunks of a prompt, of which those count that are cached without a gap from the first one on."""

    names: Sequence[bytes]
    tokens: int
    """Number of tokens of each chunk but the last one."""
    last_tokens: int
    """Number of tokens of the last chunk, which may have fewer than the others."""
    least: int = 1
    """Smallest number of cached chunks that counts: if fewer are cached, none counts."""
    unseen_tokens: int = 0
    """Number of tokens of the first `least` chunks together that the prompt does not see."""
    way: int = 0
    """Number of the alternative to which the chain belongs: chains with equal numbers add up, and the best of
    several alternatives counts."""
    text: int = -1
    """Index in the layout of the text whose chunks these are; -1: they are of no text."""


class Names(NamedTuple):
    """A prompt's chains for controllers of one identity."""

    chains: list[Chain]
    prompt_tokens: int
    """Number of tokens that the prompt sees."""
    root: bytes = b""
    """Name of the root of a plain prompt's chunks; empty for other prompts."""
    kept: KeptTable | None = None
    """The block table of a prompt with a cut behind which KV can be kept."""
    history: CutHistory | None = None
    """The history of such a prompt."""


class CutHistory(NamedTuple):
    """The whole history of a prompt of which ranges are dropped."""

    names: Sequence[bytes]
    """Names of its whole chunks, as if nothing had been dropped."""
    tokens: bytes
    """int32 token ids."""
    root: ChunkName
    """Root name of the whole history."""
    cut: ContextCut

    def followed(self, known: Callable[[Sequence[bytes]], int]) -> list[bytes]:
        """Return the names of the first whole chunks, as they were computed by turns that dropped the first of the
        ranges only, the later the turn the more of them.

        Args:
            known: Returns how many first ones of some names a controller has.
        """
        size = self.cut.chunk_size * TOKEN_BYTES
        names = list(self.names[: known(self.names)])
        least, most, tries = 1, _AHEAD, 0
        while len(names) < len(self.names) and tries < _TRIES_MAX:
            at = len(names)
            for number in range(least, len(self.cut.drops) + 1):
                start = self.cut.drops[number - 1][1] // self.cut.chunk_size
                if start > at:
                    return names
                tries += 1
                after = ChunkName(self.names[start - 1]) if start else self.root
                root = cut_name(after, self.cut.packed[: number * PACKED_RANGE_BYTES])
                name, ahead = names[-1] if at > start else root, list[bytes]()
                for place in range(at * size, min(len(self.names), at + most) * size, size):
                    name = chunk_name(name, root + self.tokens[place : place + size])
                    ahead.append(name)
                if depth := known(ahead):
                    names += ahead[:depth]
                    goes_on = depth == len(ahead)
                    least, most = (number, 2 * most) if goes_on else (number + 1, _AHEAD)
                    break
                most = _AHEAD
            else:
                return names
        return names

    def table(self, names: Sequence[bytes], kept: KeptTable) -> list[bytes] | None:
        """Return the names of the whole chunks of the block table, of which the first ones of the history have
        these names; None if they do not reach the last dropped range.

        Args:
            kept: The table as if all chunks had been computed before the cut.
        """
        *closed, last = self.cut.segments
        if len(names) < last.start:
            return None
        table = [name for run in closed for name in names[run.start : run.stop]] + list(names[last.start :])
        return table + kept.behind(names[-1] if len(names) > last.start else kept.root, len(table))


def prompt_names(request: RouteRequest, identity: KvIdentity) -> Names:
    """Return the names under which the KV of a prompt may be cached, and the prompt's length.

    Raises:
        ValueError: the prompt's tokens are no int32, or its drops or its layout are malformed.
    """
    size = identity.chunk_size
    if request.names is not None:
        return Names([Chain(request.names, size, size)], request.token_count)
    if len(request.tokens) % TOKEN_BYTES:
        raise ValueError(f"a prompt of {len(request.tokens)} bytes; tokens have {TOKEN_BYTES} each")
    count = len(request.tokens) // TOKEN_BYTES
    root = _root_name(identity.fingerprint, identity.dtype, size, request.salt)
    if request.layout is not None:
        chains, seen = _module_chains(request.layout, request.tokens, root, identity)
        return Names(chains, seen)
    if request.drops:
        seen = count - sum(stop - start for start, stop in request.drops)
        chains, kept, history = _cut_chains(request, root, identity)
        return Names(chains, seen, kept=kept, history=history)
    return Names([Chain(_whole_names(request, root, size), size, size)], count, root)


def _whole_names(request: RouteRequest, root: ChunkName, size: int) -> list[bytes]:
    """Return the names of a prompt's whole chunks, as if nothing were dropped, and remember them."""
    begun = {} if request.begun is None else request.begun
    names = begun[root, size] = whole_chunks(root, request.tokens, size, begun=begun.get((root, size), ()))
    return names


def whole_chunks(
    root: bytes, tokens: bytes, chunk_size: int, marker: bytes = b"", *, begun: Sequence[bytes] = ()
) -> list[bytes]:
    """Return the names of the full chunks of a plain prompt. Half of a decision's time is spent here.

    Args:
        marker: name of a prompt's root behind modules, whose texts these tokens also see; empty: they see only
            themselves.
        begun: names of the first chunks, if they are known.
    """
    size = chunk_size * TOKEN_BYTES
    names = list(begun[: len(tokens) // size])
    name = names[-1] if names else bytes(root)
    names += chain(name, tokens[size * len(names) : len(tokens) // size * size], chunk_size, marker)
    return names


def _cut_chains(
    request: RouteRequest, root: ChunkName, identity: KvIdentity
) -> tuple[list[Chain], KeptTable | None, CutHistory | None]:
    size = identity.chunk_size
    history = np.frombuffer(request.tokens, "<i4")
    cut = ContextCut(request.drops, size)
    left = np.ones(len(history), bool)
    for start, stop in request.drops:
        left[start:stop] = False
    plain = Chain(whole_chunks(root, history[left].tobytes(), size), size, size, way=1)
    if not identity.positions_shift:
        return [plain], None, None
    all_names = _whole_names(request, root, size)
    table = KeptTable.of(cut, all_names, request.tokens, root)
    # The chunk in which the last dropped range ends may be a tail without a name; then the chunks before it
    # suffice.
    least = max(1, min(len(table.names), -(-cut.closed_end // size)))
    kept = Chain(table.names, size, size, least, unseen_tokens=cut.holes)
    return [kept, plain], table, CutHistory(all_names, request.tokens, root, cut)


def with_kept(
    names: Names, matches: list[Match], look_up: Callable[[Sequence[bytes]], Match]
) -> tuple[Names, list[Match]]:
    """Return the chains of a prompt with a cut and what controllers have of them, with chains for what controllers
    have computed behind the cut: one for each number of chunks that some controller has computed before it, and
    one for chunks that were computed behind the first of its ranges."""
    table, history = names.kept, names.history
    assert table is not None, "the prompt has no cut"
    assert history is not None, "the prompt has no cut"
    counts = matches[0].counts.sum(axis=1)
    behind = counts[(counts >= table.first) & (counts < len(table.names))]
    moved = sorted(set(behind.tolist()), reverse=True)
    first, plain = names.chains[0], names.chains[-1]
    chains = [
        msgspec.structs.replace(first, names=table.moved(count), way=2 + number)
        for number, count in enumerate(moved[:KEPT_WAYS_MAX])
    ]
    if len(history.cut.drops) > 1:
        grown = history.table(history.followed(lambda names: int(look_up(names).counts.sum(axis=1).max())), table)
        if grown is not None and grown != first.names:
            chains.append(msgspec.structs.replace(first, names=grown, way=2 + len(chains)))
    found = [matches[0], *(look_up(chain.names) for chain in chains), matches[-1]]
    return names._replace(chains=[first, *chains, plain]), found


def _module_chains(
    layout: PromptLayout, own: bytes, root: ChunkName, identity: KvIdentity
) -> tuple[list[Chain], int]:
    """Return the chains of a prompt with modules, and how many tokens the prompt sees."""
    size = identity.chunk_size
    base = modules_root(root)
    moves = RelocationRule.of(identity.positions_shift, layout.relocate)
    named: list[tuple[ChunkName, int]] = []
    shown: list[tuple[ChunkName, int, Ranges]] = []
    chains: list[Chain] = []
    seen_tokens = len(own) // TOKEN_BYTES
    for index, text in enumerate(layout.texts):
        if not -1 <= text.parent < index:
            raise ValueError(f"text {index} has text {text.parent} above it, which does not come before it")
        above = named[text.parent] if text.parent >= 0 else None
        names = text_names(text.position, text.tokens, above, base, moves, size * TOKEN_BYTES)
        named.append((names.content, text.position))
        seen = pairs(text.seen)
        if seen:
            shown.append((names.content, text.position, seen))
            chains.append(_text_chain(index, names.place, text.tokens, seen, size))
            seen_tokens += sum(stop - start for start, stop in seen)
    shown.sort(key=lambda text: text[1])
    name = prompt_root(base, shown, pairs(layout.runs))
    chains.append(Chain(whole_chunks(name, own, size, name), size, size))
    return chains, seen_tokens


def _text_chain(text: int, place: ChunkName, tokens: bytes, seen: Sequence[tuple[int, int]], size: int) -> Chain:
    """Return the chain of a text's chunks up to the last one that the prompt sees."""
    chunks = blocks_for(seen[-1][1], size)
    held = tokens[: chunks * size * TOKEN_BYTES]
    names = chain(place, held, size)
    count = len(held) // TOKEN_BYTES
    unseen = count - sum(stop - start for start, stop in seen)
    return Chain(names, size, count - (len(names) - 1) * size, len(names), unseen, text=text)
