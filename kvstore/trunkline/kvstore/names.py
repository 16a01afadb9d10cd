"""Names of chunks: a chain of hashes from a root that stands for everything that KV depends on besides the tokens.

Two chunks have the same name only if model, precision, chunk size, tenant salt and every token up to their
end agree, and, for chunks behind a cut, the cut (`trunkline.kvstore.cuts.cut_name`). So equal names in any tiers
of any processes mean the same KV (design.md section 2).

Controllers tell routers by these names which chunks they have, with one exception. A module's text serves at any
place, but the names of its chunks depend on where it was computed. So its chunks are announced under the chain
that begins with the text's place: `chain(place, tokens, chunk_size)`, whose last name may be that of a partial
chunk.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final, NewType

NAME_BYTES: Final = 16

ChunkName = NewType("ChunkName", bytes)


def root_name(model_fingerprint: bytes, dtype: str, chunk_size: int, salt: bytes = b"") -> ChunkName:
    """Return the name from which a tree's chain starts. `salt` separates tenants that must not share KV."""
    digest = blake2b(digest_size=NAME_BYTES, person=b"trunkline-root")
    for part in (model_fingerprint, dtype.encode(), str(chunk_size).encode(), salt):
        digest.update(len(part).to_bytes(4, "little") + part)
    return ChunkName(digest.digest())


def chunk_name(parent: bytes, token_bytes: bytes) -> ChunkName:
    """Return the name of the chunk of these tokens (little-endian int32) below `parent`."""
    return ChunkName(blake2b(parent + token_bytes, digest_size=NAME_BYTES).digest())


def chain(start: bytes, token_bytes: bytes, chunk_size: int) -> list[ChunkName]:
    """Return the names of the chunks of these tokens, one below the other; the last chunk may be partial.

    Args:
        start: A root's name, or the place of a text.
    """
    names: list[ChunkName] = []
    size, name = 4 * chunk_size, start
    for at in range(0, len(token_bytes), size):
        name = chunk_name(name, token_bytes[at : at + size])
        names.append(name)
    return names
