"""What controllers have of a prompt, in tokens: of whole chunks, by tier, and of open tails. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from trunkline.controller.messages import WENT_ON_NAMES, Holder
from trunkline.kvstore.chunks import TOKEN_BYTES
from trunkline.router.routing.index import TIERS, IntArray, Match
from trunkline.router.routing.names import Chain, Names
from trunkline.router.routing.request import Left
from trunkline.router.routing.tails import Tail, Tails

ANSWER_CHUNKS: Final = 8
"""Number of chunks before the last one that is cached where a known tail is looked for, too."""


class Found(NamedTuple):
    """A request's chunks under the names of one identity."""

    names: Names
    overlaps: list[tuple[Chain, IntArray]]
    """Each chain, with how many of its chunks each controller has in each tier, `[controllers, 4]`."""
    tail: Tail | None
    """The prompt's open tail; None if the prompt is not plain."""
    matches: list[Match]
    """What controllers have of each chain."""
    peers: IntArray
    """The controllers that exchange these chunks with each other."""

    @property
    def last(self) -> Match:
        """What controllers have of the last chain."""
        return self.matches[-1]


def left_behind(found: Found | None, given: Sequence[Holder], prompt_tokens: int) -> Left | None:
    """Return which peer a conversation leaves; None: none has more than half of the prompt.

    Args:
        given: the peers of which the chosen controller pulls.
    """
    if found is None or not given:
        return None
    chain, last = found.names.chains[-1], given[-1]
    if 2 * last.stop * chain.tokens <= prompt_tokens:
        return None
    names = chain.names[max(last.start, last.stop - WENT_ON_NAMES) : last.stop]
    return Left(last.member, b"".join(names), prompt_tokens)


def own_tail(prompt: bytes, names: Names, chunk_size: int) -> Tail | None:
    """Return the open tail of a prompt; None if the prompt is not plain."""
    if not names.root:
        return None
    full = names.chains[0].names
    return Tail(full[-1] if full else names.root, prompt[len(full) * chunk_size * TOKEN_BYTES :])


def known_tails(
    prompt: bytes, found: Found, cached: IntArray, tails: Tails, now: float
) -> Iterator[tuple[str, int, int]]:
    """Yield the known tails with which a plain prompt goes on where controllers' full chunks of it end, or a few
    chunks before: there the last turn's prompt may have ended, if its answer filled its chunk.

    Args:
        cached: tokens of full chunks that each controller has.

    Yields:
        a controller's name, the number of tokens before the tail, and the number of tokens of the tail.
    """
    if not found.names.root:
        return
    chain = found.names.chains[0]
    ends = set((cached // chain.tokens).tolist())
    ends.update(range(max(0, max(ends) - ANSWER_CHUNKS), max(ends)))
    for chunks in ends:
        depth = chunks * chain.tokens
        parent = chain.names[chunks - 1] if chunks else found.names.root
        rest = prompt[depth * TOKEN_BYTES : (depth + chain.tokens) * TOKEN_BYTES]
        name, tokens = tails.find(parent, rest, now)
        if tokens:
            yield name, depth, tokens


def best_way(overlaps: Sequence[tuple[Chain, IntArray]]) -> IntArray:
    """Return the cached tokens of each controller by tier, in the way (see `Chain.way`) that has most of them."""
    ways: dict[int, IntArray] = {}
    for chain, chunks in overlaps:
        tokens = _tokens(chain, chunks)
        ways[chain.way] = ways[chain.way] + tokens if chain.way in ways else tokens
    first, *others = ways.values()
    for other in others:
        first = np.where((other.sum(axis=1) > first.sum(axis=1))[:, None], other, first)
    return first


def _tokens(chain: Chain, chunks: IntArray) -> IntArray:
    """Return how many tokens the prompt sees of the chunks that each controller has, by tier."""
    tokens = chunks * chain.tokens
    if chain.least <= 1 and chain.last_tokens == chain.tokens and not chain.unseen_tokens:
        return tokens
    counts = chunks.sum(axis=1)
    slowest = TIERS - 1 - np.argmax(chunks[:, ::-1] > 0, axis=1)
    everyone = np.arange(len(chunks))
    tokens[everyone, slowest] -= np.where(counts == len(chain.names), chain.tokens - chain.last_tokens, 0)
    # Tokens that the prompt does not see are taken off the tier with most chunks: the sum, which counts, is exact.
    unseen = np.minimum(chain.unseen_tokens, tokens.sum(axis=1))
    for _ in range(TIERS):
        fullest = tokens.argmax(axis=1)
        taken = np.minimum(unseen, tokens[everyone, fullest])
        tokens[everyone, fullest] -= taken
        unseen -= taken
    return np.where((counts >= chain.least)[:, None], tokens, 0)


def missing(found: Found, controller: int) -> list[bytes]:
    """Return the names of the chunks that the controller has yet to compute."""
    names: list[bytes] = []
    for chain, chunks in found.overlaps:
        if chain.way:
            continue  # after a cut the controller goes on in the first way if it can
        *told, expected = chunks[controller].tolist()
        # Chunks that another request is expected to compute are expected of this one, too: the other may fail.
        names += chain.names if expected else chain.names[sum(told) :]
    return names
