"""Make wire keys from a secret text, where a text can be kept but key pairs cannot be made: a Kubernetes Secret.

    python -m trunkline.runtime.wire_seed --part group SEED_FILE KEY_FILE

Every line of the seed is a generation of keys, newest first (`wire_keys.py`). The same line makes the same keys
wherever it is read, so the parts of a cluster agree without talking to each other; each writes only the secrets of
its own part. The seed gives all keys: only the step that runs this may read it.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import zmq
from zmq.utils import z85

from trunkline.runtime.wire_keys import (
    GENERATIONS_MAX,
    PARTS,
    Generation,
    Pair,
    Role,
    WireKeys,
    WireKeysError,
    write,
)

SEED_CHARACTERS_MIN: Final = 32
"""Of random letters and digits: more than 160 bits."""
_SEED_BYTES_MAX: Final = 4096


def keys_of(seed: str) -> WireKeys:
    """Return the keys that a seed stands for.

    Raises:
        WireKeysError: A line has too few characters, or there are too few or too many lines.
    """
    lines = [line for line in map(str.strip, seed.splitlines()) if line]
    if not 1 <= len(lines) <= GENERATIONS_MAX:
        raise WireKeysError(
            f"the seed has {len(lines)} lines; 1 to {GENERATIONS_MAX} are allowed, the newest first"
        )
    for number, line in enumerate(lines, 1):
        if len(line) < SEED_CHARACTERS_MIN:
            raise WireKeysError(
                f"line {number} of the seed has {len(line)} characters; it must have {SEED_CHARACTERS_MIN} random "
                "ones at least, as `openssl rand -hex 32` makes them"
            )
    return WireKeys(tuple(Generation(*(_pair(line, role) for role in Role)) for line in lines))


def _pair(line: str, role: Role) -> Pair:
    # Any 32 bytes are a secret key of Curve25519; its own clamping takes out the bits that may not vary.
    secret = hashlib.blake2b(line.encode(), digest_size=32, person=f"tl-{role.value}".encode()).digest()
    text = z85.encode(secret)
    return Pair(zmq.curve_public(text).decode(), text.decode())


def read_seed(path: str | Path) -> str:
    """Return the text of a seed.

    Raises:
        WireKeysError: It cannot be read, or is not text.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(_SEED_BYTES_MAX + 1)
    except OSError as error:
        raise WireKeysError(f"{path}: the seed cannot be read: {error.strerror}") from error
    if len(data) > _SEED_BYTES_MAX:
        raise WireKeysError(f"{path}: more than {_SEED_BYTES_MAX} bytes; this is no seed")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise WireKeysError(f"{path}: the seed is no text; make one with `openssl rand -hex 32`") from None


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the file of keys, in place of one that exists."""
    parser = argparse.ArgumentParser(prog="wire_seed", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--part", choices=sorted(PARTS), required=True, help="whose secrets are written down")
    parser.add_argument("seed_file", type=Path)
    parser.add_argument("key_file", type=Path)
    given = parser.parse_args(arguments)
    try:
        write(keys_of(read_seed(given.seed_file)).part(PARTS[given.part]), given.key_file, overwrite=True)
    except WireKeysError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
