"""Adapters in the names of chunks: KV that was computed with an adapter has a salt that begins with its key.

      salt    mark │ key of the adapter, 16 bytes │ salt of tenant and request

A key depends on the adapter's name and on the content of its files. All that goes by salts (the tree's roots,
tiers, the routers' index, peers, texts of schemas, drafts) so keeps adapters apart from each other and from the
base model.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

KEY_BYTES: Final = 16
_MARK: Final = b"\xfa"
"""First byte of a salt with an adapter. It is in no UTF-8 text, so clients cannot send it, and it begins no other
salt."""


def adapter_key(name: str, digest: bytes) -> bytes:
    """Return the key of an adapter.

    Args:
        name: The name by which requests choose it.
        digest: Digest of its files.
    """
    key = blake2b(digest_size=KEY_BYTES, person=b"trunkline-lora")
    for part in (name.encode(), digest):
        key.update(len(part).to_bytes(4, "little") + part)
    return key.digest()


def adapter_salt(key: bytes, salt: bytes) -> bytes:
    """Return the salt of a request that uses an adapter (none: no key); `salt` is what it would have without."""
    return _MARK + key + salt if key else salt


def without_adapter(salt: bytes) -> bytes:
    """Return the salt that a request with this one would have without its adapter."""
    return salt[1 + KEY_BYTES :] if salt[:1] == _MARK else salt


def adapter_of(salt: bytes) -> bytes:
    """Return the key of the adapter that a salt is for; empty: the base model."""
    return salt[1 : 1 + KEY_BYTES] if salt[:1] == _MARK else b""
