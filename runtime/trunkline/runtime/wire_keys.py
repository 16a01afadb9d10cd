"""The keys by which a cluster's processes authenticate each other on the network: the file of keys, and seeds.

    {"format": 1, "generations": [{"controller": {"public": …, "secret": …}, "router": …, "worker": …}, …]}

Controllers are CURVE servers; routers and workers are clients. Workers are servers, too, for workers of other
groups, which pull KV from them. Each role has a key pair of its own, so that a router's secret does not allow to
pass for a worker, which receives the tokens of all prompts, nor for a controller
(docs/decisions/0014-wire-keys.md). A file may have only those secrets that its host needs (`part`).

Keys change by *generations*: servers use the newest, and let in clients of all that their file lists; clients try
one after the other. So files may be exchanged and processes started again in any order while two are listed.

Where a text can be kept but key pairs cannot be made, as in a Kubernetes Secret, keys are made from a *seed*:

    python -m trunkline.runtime.wire_keys --part group SEED_FILE KEY_FILE

Every line of the seed is a generation, newest first. The same line makes the same keys wherever it is read, so the
parts of a cluster agree without talking to each other. The seed gives all keys: only the step that runs this may
read it.

This module imports nothing of Trunkline, as `process.py` does not: every role reads the file.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import stat
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec
import zmq
from msgspec.structs import replace
from zmq.utils import z85

FORMAT: Final = 1
GENERATIONS_MAX: Final = 4
_FILE_BYTES_MAX: Final = 64 << 10
_KEY_BYTES: Final = 32


class WireKeysError(ValueError):
    """A file of keys that cannot be used; the text says which, why, and what to do."""


class Role(StrEnum):
    """The role that a key pair belongs to."""

    CONTROLLER = "controller"
    ROUTER = "router"
    WORKER = "worker"


PARTS: Final[dict[str, tuple[Role, ...]]] = {
    "group": (Role.CONTROLLER, Role.WORKER),
    "workers": (Role.WORKER,),
    "router": (Role.ROUTER,),
}
"""The roles whose secrets a host needs, by the part of a cluster that runs on it."""


class Pair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A CURVE key pair, in Z85."""

    public: str
    secret: str = ""
    """The secret key; "": not known on this host."""

    def __repr__(self) -> str:
        return f"Pair({self.public!r}, {'secret' if self.secret else 'no secret'})"


class Generation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The key pairs of all roles that were made together."""

    controller: Pair
    router: Pair
    worker: Pair

    def of(self, role: Role) -> Pair:
        """Return the key pair of a role."""
        match role:
            case Role.CONTROLLER:
                return self.controller
            case Role.ROUTER:
                return self.router
            case Role.WORKER:
                return self.worker

    @property
    def name(self) -> str:
        """A digest by which people can tell whether two files have the same keys; it is not secret."""
        joined = "\n".join(self.of(role).public for role in Role)
        return hashlib.blake2b(joined.encode(), digest_size=4).hexdigest()


class WireKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of a file of keys. The newest generation comes first."""

    generations: tuple[Generation, ...]
    format: int = FORMAT

    @property
    def names(self) -> str:
        """The names of the generations of keys, for logs."""
        return ", ".join(generation.name for generation in self.generations)

    def lets_in(self, role: Role) -> frozenset[str]:
        """Return the public keys of clients that may connect to a controller's sockets for a role.

        The controller's own key is one of them: its host may ask whether the group works.
        """
        return frozenset(
            generation.of(known).public for generation in self.generations for known in (role, Role.CONTROLLER)
        )

    def rotated(self) -> WireKeys:
        """Return these keys with a new generation before them.

        Raises:
            WireKeysError: There are too many generations.
        """
        if len(self.generations) >= GENERATIONS_MAX:
            raise WireKeysError(
                f"there are {len(self.generations)} generations of keys already; retire the old ones first "
                "(--retire)"
            )
        return replace(self, generations=(_generation(), *self.generations))

    def retired(self) -> WireKeys:
        """Return the newest generation only."""
        return replace(self, generations=self.generations[:1])

    def part(self, roles: Sequence[Role]) -> WireKeys:
        """Return these keys with the secrets of some roles only."""
        return replace(self, generations=tuple(_without(generation, roles) for generation in self.generations))


def _without(generation: Generation, kept: Sequence[Role]) -> Generation:
    def pair(role: Role) -> Pair:
        whole = generation.of(role)
        return whole if role in kept else Pair(whole.public)

    return Generation(pair(Role.CONTROLLER), pair(Role.ROUTER), pair(Role.WORKER))


def _generation() -> Generation:
    pairs = []
    for _ in Role:
        public, secret = zmq.curve_keypair()
        pairs.append(Pair(public.decode(), secret.decode()))
    return Generation(*pairs)


def generate() -> WireKeys:
    """Return keys for a new cluster."""
    return WireKeys((_generation(),))


def write(keys: WireKeys, path: str | Path, *, overwrite: bool = False) -> None:
    """Write a file that only its owner can read (mode 0600).

    Args:
        overwrite: Replace an existing file, so that readers see either the old or the new one.

    Raises:
        WireKeysError: The file exists, or cannot be written.
    """
    data = msgspec.json.format(msgspec.json.encode(keys), indent=2) + b"\n"
    target = Path(path)
    place = target.with_name(f".{target.name}.{os.getpid()}") if overwrite else target
    try:
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if overwrite:
            place.replace(target)
    except FileExistsError:
        raise WireKeysError(
            f"{place} exists already; a cluster whose keys are overwritten cannot be reached any more. Choose "
            "another name, or change the keys with --rotate"
        ) from None
    except OSError as error:
        raise WireKeysError(f"{place}: the keys cannot be written: {error.strerror}") from error


def load(path: str | Path) -> WireKeys:
    """Return the keys in a file that only its owner can read.

    Raises:
        WireKeysError: The file cannot be read, other users may read it, or it is not a file of keys.
    """
    try:
        with open(path, "rb") as file:
            if problem := _readers(os.fstat(file.fileno())):
                raise WireKeysError(f"{path}: {problem}")
            data = file.read(_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise WireKeysError(
            f"{path}: the wire keys cannot be read: {error.strerror}; `trunkline key wire FILE` makes some"
        ) from error
    if len(data) > _FILE_BYTES_MAX:
        raise WireKeysError(f"{path}: more than {_FILE_BYTES_MAX} bytes; this is no file of wire keys")
    try:
        keys = msgspec.json.decode(data, type=WireKeys)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        # Of the error only its kind: its text could quote the file.
        raise WireKeysError(
            f"{path}: this is no file of wire keys ({type(error).__name__}); `trunkline key wire FILE` makes one"
        ) from None
    if problem := _problem(keys):
        raise WireKeysError(f"{path}: {problem}")
    return keys


def _readers(status: os.stat_result) -> str:
    """Return why the file of keys is not safe, such as that other users can read it; "" if it is safe.

    A group may read a file of another user: volumes of secrets belong to root and to a group of the process.
    """
    mode = stat.S_IMODE(status.st_mode)
    forbidden = 0o077 if status.st_uid == os.geteuid() else 0o037
    if not stat.S_ISREG(status.st_mode):
        return "this is no file"
    if mode & forbidden:
        return f"others may read or change it (mode {mode:04o}); allow only its owner: chmod 600"
    return ""


def _problem(keys: WireKeys) -> str:
    if keys.format != FORMAT:
        return f"its format is {keys.format}; this version reads {FORMAT}"
    if not 1 <= len(keys.generations) <= GENERATIONS_MAX:
        return f"it has {len(keys.generations)} generations of keys; 1 to {GENERATIONS_MAX} are allowed"
    for number, generation in enumerate(keys.generations):
        for role in Role:
            if not _is_pair(generation.of(role)):
                return f"generation {number} has no right key pair for {role}; copy the file again from its source"
    return ""


def _is_pair(pair: Pair) -> bool:
    """Return whether the keys are well formed, and the public key belongs to the secret one, if that is known."""
    try:
        if len(pair.public) != 40 or len(z85.decode(pair.public.encode())) != _KEY_BYTES:
            return False
        return not pair.secret or zmq.curve_public(pair.secret.encode()).decode() == pair.public
    except (ValueError, KeyError, OverflowError, zmq.ZMQError):
        return False


def is_network(endpoint: str) -> bool:
    """Return whether messages to this endpoint can leave the host."""
    return not endpoint.startswith(("ipc://", "inproc://"))


def problem_of(endpoints: Sequence[str], path: str, role: Role, *, plain_tcp: bool) -> str:
    """Return why a process cannot use these endpoints with these keys; "" if it can."""
    open_ones = [endpoint for endpoint in endpoints if is_network(endpoint)]
    if path:
        try:
            keys = load(path)
        except WireKeysError as error:
            return f"wire_keys: {error}"
        if not all(generation.of(role).secret for generation in keys.generations):
            return f"wire_keys: {path} has no secret key for {role}; it was made for another part of the cluster"
        return ""
    if open_ones and not plain_tcp:
        return (
            f"endpoint {open_ones[0]} is on the network, but there are no wire keys: others could listen. "
            "Make some with `trunkline key wire FILE`, give every host the file and name it with --wire-keys; "
            "or say --plain-tcp where no other machine can reach it"
        )
    return ""


SEED_CHARACTERS_MIN: Final = 32
"""Smallest number of characters in a line of a seed: so many random letters and digits have more than 160 bits."""
_SEED_BYTES_MAX: Final = 4096


def keys_from_seed(seed: str) -> WireKeys:
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
        WireKeysError: The file cannot be read, or is not text.
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
    parser = argparse.ArgumentParser(prog="wire_keys", description="Write a file of wire keys from a seed.")
    parser.add_argument("--part", choices=sorted(PARTS), required=True, help="whose secrets are written down")
    parser.add_argument("seed_file", type=Path)
    parser.add_argument("key_file", type=Path)
    given = parser.parse_args(arguments)
    try:
        write(keys_from_seed(read_seed(given.seed_file)).part(PARTS[given.part]), given.key_file, overwrite=True)
    except WireKeysError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
