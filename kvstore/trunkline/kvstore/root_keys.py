"""The keys of roots: each says what a tree of chunks is for. Controllers and routers share them. Pure.

      s │ salt                                       plain prompts
      c │ name │ last chunk before the cut │ drops   what is left behind a cut, which does not see `drops`
      m │ name │ position of the first token         a module's text
      p │ name                                       own tokens of prompts with the same modules

A root is found by its *place*: all of a salt's key, of other keys the first byte and the name. The name of a cut
is a digest of the history before it and of the dropped ranges, so a request that sees more or less never finds KV
computed behind the cut. The history itself is not kept: a request that sends it again has the same digest.
"""

from __future__ import annotations

from typing import Final

from trunkline.kvstore.chunks import NAME_BYTES, ChunkName, chunk_name
from trunkline.kvstore.cuts import PACKED_RANGE_BYTES

SALT_ROOT: Final = b"s"
"""First byte of the key of a salt's root."""
CUT_ROOT: Final = b"c"
"""First byte of the key of a cut's root."""
TEXT_ROOT: Final = b"m"
"""First byte of the key of a text's root."""
PROMPT_ROOT: Final = b"p"
"""First byte of the key of the root of a prompt with modules."""
_PLACE_BYTES: Final = 1 + NAME_BYTES
_AFTER_BYTES: Final = _PLACE_BYTES + NAME_BYTES
_POSITION_BYTES: Final = 8


def place_of(key: bytes) -> bytes:
    """Return the part of a root's key by which the root is found."""
    return key if key.startswith(SALT_ROOT) else key[:_PLACE_BYTES]


def cut_key(name: ChunkName, after: ChunkName, drops: bytes) -> bytes:
    """Return the key of a cut's root.

    Args:
        name: the cut's name (`cut_name`).
        after: plain name of the history's last chunk before the cut.
        drops: the dropped ranges, packed.
    """
    return CUT_ROOT + name + after + drops


def after_of(cut: bytes) -> ChunkName:
    """Return the name of the last chunk before a cut, from the key of the cut's root."""
    return ChunkName(cut[_PLACE_BYTES:_AFTER_BYTES])


def drops_of(key: bytes) -> bytes:
    """Return the ranges that are not seen behind a root, packed; nothing if it is not that of a cut."""
    return key[_AFTER_BYTES:] if key.startswith(CUT_ROOT) else b""


def text_key(name: ChunkName, position: int) -> bytes:
    """Return the key of a text's root.

    Args:
        name: name of what the text sees and how it begins.
        position: position at which the text's first token is computed.
    """
    return TEXT_ROOT + name + position.to_bytes(_POSITION_BYTES, "little")


def position_of(text: bytes) -> int:
    """Return the position at which a text's first token was computed, or is to be, from the key of its root."""
    return int.from_bytes(text[_PLACE_BYTES:], "little")


def text_root_name(name: ChunkName, position: int) -> ChunkName:
    """Return the name of a text's root. It includes the position, because the KV of its chunks is rotated."""
    return chunk_name(name, position.to_bytes(_POSITION_BYTES, "little"))


def first_chunk_name(name: ChunkName, position: int, key: bytes) -> ChunkName:
    """Return the name of a text's first chunk, computed at a position."""
    root = text_root_name(name, position)
    return chunk_name(root, root + key)


def prompt_key(name: ChunkName) -> bytes:
    """Return the key of the root for the own tokens of prompts with modules."""
    return PROMPT_ROOT + name


def name_in(key: bytes) -> ChunkName | None:
    """Return the name in a key, of a salt's an empty one; None if the key is not valid."""
    kind, size = key[:1], len(key)
    is_valid = (
        kind == SALT_ROOT
        or (kind == PROMPT_ROOT and size == _PLACE_BYTES)
        or (kind == TEXT_ROOT and size == _PLACE_BYTES + _POSITION_BYTES)
        or (kind == CUT_ROOT and size > _AFTER_BYTES and not (size - _AFTER_BYTES) % PACKED_RANGE_BYTES)
    )
    if not is_valid:
        return None
    return ChunkName(b"" if kind == SALT_ROOT else key[1:_PLACE_BYTES])
