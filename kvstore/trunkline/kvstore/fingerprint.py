"""Digests of everything on which KV depends besides the tokens, so that KV of another model or shape is never
found.

There are three, the first one inside the others. The *model's* is part of every chunk's name
(`trunkline.kvstore.chunks`): it says which model computed the KV. The *exchange's* also says which form the bytes
of a whole chunk have: groups with an equal one may take KV from each other, also if their numbers of ranks differ
(`trunkline.kvstore.shards`). The *tier's* is part of every file that a rank keeps: it also says among how many
ranks a chunk is divided.

The *tokenizer's* is the same for all models that have equal tokenizers. Routers compare theirs with that of each
group: ids of another tokenizer would mean other texts.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Final

from trunkline.kvstore.chunk_format import ChunkFormat

FINGERPRINT_BYTES: Final = 16

FORMAT: Final = 3
"""Version of the bytes that a tier keeps of a chunk, what `ChunkFormat` says in plain order, and of how chunks are
named. Kernels may pack blocks of the device pool, but unpack them on the way out. Raise the version when bytes or
names change while their description stays as it is."""


def model_fingerprint(checkpoint: bytes, quantisation: str) -> bytes:
    """Return the digest of a model and its quantisation, 16 bytes.

    Args:
        checkpoint: The digest of configuration and weights as they are stored.
        quantisation: How the weights are rounded when they are loaded; "" for not at all. Rounded weights give
            other KV.
    """
    return _digest(b"trunkline-model", checkpoint, quantisation.encode())


def tier_fingerprint(model: bytes, chunk: ChunkFormat, tp: int) -> bytes:
    """Return the digest of all that must agree for a tier's bytes to be read back, 16 bytes.

    Args:
        model: The result of `model_fingerprint`.
        chunk: The format of a whole chunk, with `positions`.
        tp: Ranks that a chunk is divided among; each has its part under the same name.
    """
    return _digest(b"trunkline-tier", model, f"{FORMAT},{tp}".encode(), chunk.of_rank(tp).text.encode())


def exchange_fingerprint(model: bytes, chunk: ChunkFormat) -> bytes:
    """Return the digest of all that must agree for groups to use each other's KV, 16 bytes: everything that the
    bytes depend on except rank and number of ranks.

    Args:
        model: The result of `model_fingerprint`.
        chunk: The format of a whole chunk, with `positions`.
    """
    return _digest(b"trunkline-kv", model, str(FORMAT).encode(), chunk.text.encode())


def tokenizer_digest(folder: str | Path) -> str:
    """Return the digest of a model's tokenizer, 16 hexadecimal digits.

    Args:
        folder: The model's folder, with `tokenizer.json`.

    Raises:
        OSError: The file cannot be read.
    """
    return blake2b(Path(folder, "tokenizer.json").read_bytes(), digest_size=8).hexdigest()


def _digest(purpose: bytes, *parts: bytes) -> bytes:
    digest = blake2b(digest_size=FINGERPRINT_BYTES, person=purpose)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()
