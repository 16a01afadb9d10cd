"""Paths of chunks to test rules for whole paths with."""

from __future__ import annotations

from trunkline.kvstore.chunks import ChunkName, TieredChunk


def grow(name: str, length: int, above: list[TieredChunk] | None = None) -> list[TieredChunk]:
    """Return a path of `length` chunks below a root; its first ones are those `above`."""
    path = list(above or [])
    while len(path) < length:
        parent = path[-1] if path else TieredChunk(None, ChunkName(b""))
        path.append(TieredChunk(parent, ChunkName(f"{name}/{len(path)}".encode())))
    return path
