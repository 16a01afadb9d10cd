"""The simulated model: what comes after a prefix, as pure functions of the prefix's hash.

A token's text therefore depends on its own past only, whatever else ran, was preempted, swapped or cached.
Samples agree in three of four tokens, so that equal streams, streams that part inside a chunk and streams that
part at its end are all common. Log-probabilities are float32 as in a real model, and almost never tie.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b, shake_128
from typing import Final

import numpy as np
from numpy.typing import NDArray

VOCABULARY: Final = 50
LOGIT_RANGE: Final = 6.0
"""Natural logits between the likeliest and the least likely token at most."""

Float32Array = NDArray[np.float32]

EMPTY: Final = b""
"""Hash of the prefix without tokens."""


def extend_hash(previous: bytes, token: int) -> bytes:
    return blake2b(previous + token.to_bytes(4, "little"), digest_size=8).digest()


def prefix_hash(tokens: list[int]) -> bytes:
    current = EMPTY
    for token in tokens:
        current = extend_hash(current, token)
    return current


def pool_state(pooled: bytes, state: bytes) -> bytes:
    """What is pooled of a prompt, after one more hidden state, which is the hash of the tokens up to there."""
    return blake2b(pooled + state, digest_size=8, key=b"pool").digest()


def pooled_prompt(tokens: list[int], *, over_all: bool) -> bytes:
    """What is pooled of a whole prompt: the state of its last token, or the states of all."""
    state = pooled = EMPTY
    for token in tokens:
        state = extend_hash(state, token)
        pooled = pool_state(pooled, state)
    return pooled if over_all else state


MODULES: Final = b"modules"
"""Hash of nothing that a prompt with modules sees."""


def text_token(seen: bytes, token: int) -> bytes:
    """What is stored of a token that is computed after a prompt with modules, or a text of one, has seen this."""
    return blake2b(seen + token.to_bytes(4, "little"), digest_size=8, key=b"token").digest()


def extend_seen(seen: bytes, stored: bytes) -> bytes:
    """Hash of what is seen after one more token: only the order of tokens counts, not where they stand, because a
    text serves at many places. Yet each of them counts with all that it saw itself when it was computed."""
    return blake2b(seen + stored, digest_size=8, key=b"seen").digest()


def next_token(prefix: bytes, seed: int) -> int:
    """What is sampled after this prefix with this seed."""
    value = int.from_bytes(prefix, "little")
    if value & 3:
        return (value >> 2) % VOCABULARY
    masked = seed & ((1 << 64) - 1)  # as workers do
    mixed = blake2b(prefix, digest_size=8, key=masked.to_bytes(8, "little")).digest()
    return int.from_bytes(mixed, "little") % VOCABULARY


@lru_cache(maxsize=1 << 14)
def log_probabilities(prefix: bytes) -> Float32Array:
    """float32 `[VOCABULARY]`, natural: log-softmax of the logits after this prefix."""
    raw = np.frombuffer(shake_128(prefix).digest(4 * VOCABULARY), "<u4") >> 8
    logits = (raw.astype(np.float32) / np.float32(1 << 24)) * np.float32(LOGIT_RANGE)
    shifted = logits - logits.max()
    result: Float32Array = shifted - np.log(np.exp(shifted).sum(dtype=np.float32))
    result.flags.writeable = False
    return result


def prompt_score(prefix: bytes, token: int, count: int) -> tuple[float, int, list[int], list[float]]:
    """A prompt token after its prefix: log-probability, rank from 1, the `count` likeliest ids and theirs.

    Prompts may hold any ids; the model takes them modulo its vocabulary.
    """
    values = log_probabilities(prefix)
    own = values[token % VOCABULARY]
    order = np.argsort(-values, kind="stable")[:count]
    return float(own), int((values > own).sum()) + 1, order.tolist(), values[order].tolist()
