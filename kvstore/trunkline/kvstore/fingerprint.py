"""What KV depends on besides the tokens, as digests: data of another model or another shape is never found.

Two of them, one inside the other. The *model's* goes into every chunk's name (`trunkline.kvstore.names`): whose KV
is it? The *tier's* goes into every file and key that holds KV: whose is it, and of which shape are the bytes?
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final, NamedTuple

FINGERPRINT_BYTES: Final = 16

FORMAT: Final = 1
"""Of what a tier keeps of a chunk: a rank's `[layers, 2, KV heads, chunk_size, head_dim]` in plain order (kernels
may pack blocks of the device pool, but unpack what leaves it). To be raised when other bytes mean the same."""


class KvShape(NamedTuple):
    """One rank's part of a chunk."""

    layers: int
    kv_heads: int
    """Of this rank."""
    chunk_size: int
    """In tokens."""
    head_dim: int


def model_fingerprint(checkpoint: bytes, quantisation: str) -> bytes:
    """The digest of a model as it is computed with, 16 bytes.

    Args:
        checkpoint: digest of configuration and weights as they are stored.
        quantisation: of the weights while they are loaded; "" for none. Rounded weights give other KV.
    """
    return _digest(b"trunkline-model", checkpoint, quantisation.encode())


def tier_fingerprint(model: bytes, dtype: str, tp: int, shape: KvShape, positions: str) -> bytes:
    """The digest of all that must agree for a tier's bytes to be read back, 16 bytes.

    Args:
        model: `model_fingerprint`.
        dtype: of the KV.
        tp: ranks that a chunk is divided among; each has its part under the same name.
        shape: of such a part.
        positions: how positions enter the keys, with all parameters, in any unambiguous form. The model's
            configuration says so, too, but here it is what the program makes of it that counts.
    """
    numbers = ",".join(map(str, (FORMAT, tp, *shape)))
    return _digest(b"trunkline-tier", model, dtype.encode(), numbers.encode(), positions.encode())


def _digest(purpose: bytes, *parts: bytes) -> bytes:
    digest = blake2b(digest_size=FINGERPRINT_BYTES, person=purpose)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()
