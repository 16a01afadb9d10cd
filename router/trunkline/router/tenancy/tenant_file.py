"""The file of tenants, their keys and their limits, which the operator writes. It is read at the start, and again
whenever it changes.

    {"default": {"requests_per_minute": 60},
     "tenants": {"batch": {"keys": [{"sha256": "SHA-256 of a key", "name": "laptop", "role": "user",
                                     "expires": "2027-01-31T00:00:00Z"}],
                           "tokens_per_minute": 100000, "priority": 5}}}

A limit that a tenant does not have is taken from `default`, and else from the process's options. null: no limit. A
key may be given as its digest alone. If any tenant has `keys`, even an empty list, requests need a key. Tenants
with the same `salt` share their cached KV; a tenant without one shares its KV with no other.

A wrong file changes nothing. Each correct version is kept beside the sockets of the cluster, and a router that is
started while the file is wrong uses that one: a mistake in the file must not prevent the restart of a lost router.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec
import structlog
from msgspec import UNSET, UnsetType

from trunkline.router.config import TenantLimits
from trunkline.router.tenancy.auth import KEY_PREFIX, NAME, Key, KeyRole, TenantRules

BYTES_MAX: Final = 16 << 20
CHECK_SECONDS: Final = 1.0
"""Time between two checks of whether the file has changed."""
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_KEY_NAME: Final = re.compile(r"[\x21-\x7e]{0,128}")
_FIELDS: Final = ("requests", "requests_per_minute", "tokens_per_minute", "priority", "records_bytes", "pins")
_SHARES: Final = ("kv_floor", "kv_ceiling")
"""Fields that only a named tenant has: the floors of all tenants together must fit into a tier."""
FLOORS_SLACK: Final = 1e-9
"""How far the sum of all floors may exceed 1, for parts like 0.1 that are not exact as floating-point numbers."""
_log = structlog.get_logger("trunkline.router.tenancy.tenants")


class _Default(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    requests: int | UnsetType | None = UNSET
    requests_per_minute: int | UnsetType | None = UNSET
    tokens_per_minute: int | UnsetType | None = UNSET
    priority: int | UnsetType = UNSET
    records_bytes: int | UnsetType | None = UNSET
    pins: float | UnsetType | None = UNSET


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A key as the file of tenants describes it."""

    sha256: str
    name: str = ""
    role: KeyRole = KeyRole.USER
    expires: str | None = None
    """Time at which the key expires, as in RFC 3339; None: never."""
    gateway: bool = False
    created: str = ""
    """Time at which the key was made: a note for the operator."""


class _Tenant(_Default, frozen=True, forbid_unknown_fields=True):
    keys: list[str | KeyEntry] | UnsetType = UNSET
    salt: str = ""
    kv_floor: float | UnsetType | None = UNSET
    kv_ceiling: float | UnsetType | None = UNSET


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tenants: dict[str, _Tenant] = {}
    default: _Default = _Default()


def parse_rules(text: bytes, base: TenantLimits) -> TenantRules:
    """Return the rules in a file's text. `base`: the limits where the text has none.

    Raises:
        ValueError: saying what is wrong and where.
    """
    try:
        document = msgspec.json.decode(text, type=_Document)
    except msgspec.ValidationError as error:
        raise ValueError(_explained(text, str(error))) from None
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None
    default = _filled(document.default, base, "default")
    tenants: dict[str, TenantLimits] = {}
    keys: dict[str, Key] = {}
    for name, tenant in document.tenants.items():
        if not NAME.fullmatch(name) or name.startswith(KEY_PREFIX):
            raise ValueError(
                f"tenants: {name[:140]!r} is no name: 1 to 128 printable ASCII characters, no spaces, and not "
                f"beginning with {KEY_PREFIX!r}"
            )
        tenants[name] = _filled(tenant, default, f"tenants: {name}", (*_FIELDS, *_SHARES))
        if tenant.salt and not NAME.fullmatch(tenant.salt):
            raise ValueError(f"tenants: {name}: a salt's name has 1 to 128 printable ASCII characters, no spaces")
        for given in tenant.keys or ():
            digest, key = _key(name, given)
            if keys.setdefault(digest, key).tenant != name:
                raise ValueError(f"tenants: {name} and {keys[digest].tenant} have a key in common")
    floors = sum(limits.kv_share[0] for limits in tenants.values())
    if floors > 1.0 + FLOORS_SLACK:
        raise ValueError(f"tenants: the kv_floor of all tenants together is {floors:g}; a tier has 1")
    return TenantRules(
        default,
        tenants,
        keys,
        salts={name: tenant.salt for name, tenant in document.tenants.items() if tenant.salt},
        has_keys=any(tenant.keys is not UNSET for tenant in document.tenants.values()),
    )


def _explained(text: bytes, problem: str) -> str:
    """Return the decoder's message with the tenant's name and with what is allowed instead.

    The decoder itself writes `[...]` for the name, and says only what it has found.
    """
    if "Invalid enum value" in problem:
        problem += f"; allowed are {', '.join(role.value for role in KeyRole)}"
    elif "unknown field" in problem:
        tenant, key = ", ".join(_Tenant.__struct_fields__), ", ".join(KeyEntry.__struct_fields__)
        problem += f"; allowed are tenants, default; of a tenant {tenant}; of a key {key}"
    with contextlib.suppress(msgspec.DecodeError):  # then the mistake is outside of all tenants
        parts = msgspec.json.decode(text, type=dict[str, dict[str, msgspec.Raw]])
        for name, given in parts.get("tenants", {}).items():
            try:
                msgspec.json.decode(given, type=_Tenant)
            except msgspec.ValidationError:
                return f"tenants: {name if NAME.fullmatch(name) else repr(name[:140])}: {problem}"
    return problem


def _key(tenant: str, given: str | KeyEntry) -> tuple[str, Key]:
    """Return the digest of a tenant's key, and the key."""
    entry = KeyEntry(given) if isinstance(given, str) else given
    digest = entry.sha256.lower()
    if not _DIGEST.fullmatch(digest):  # it may be the key itself, so it is not shown
        raise ValueError(f"tenants: {tenant}: keys are given as their SHA-256, 64 hexadecimal digits")
    if not _KEY_NAME.fullmatch(entry.name):
        raise ValueError(f"tenants: {tenant}: a key's name has up to 128 printable ASCII characters, no spaces")
    expires = None if entry.expires is None else parse_time(entry.expires, f"tenants: {tenant}: expires")
    return digest, Key(tenant, entry.name or digest[:8], entry.role, expires, entry.gateway)


def parse_time(text: str, where: str) -> float:
    """Return Unix time in seconds from an RFC 3339 time.

    Raises:
        ValueError: the text is no RFC 3339 time, or has no time zone.
    """
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise ValueError(f"{where} is {text[:40]!r}; a time is written as 2027-01-31T12:00:00Z")
    return moment.timestamp()


def _filled(given: _Default, base: TenantLimits, where: str, fields: tuple[str, ...] = _FIELDS) -> TenantLimits:
    said = {name: value for name in fields if (value := getattr(given, name)) is not UNSET}
    limits = msgspec.structs.replace(base, **said)
    if problem := limits.problem():
        raise ValueError(f"{where}: {problem}")
    return limits


def read_rules(path: str, base: TenantLimits) -> TenantRules:
    """Return the rules of the file of tenants at `path`. `base`: the limits where the file has none.

    Raises:
        ValueError: the file cannot be read, or is wrong. The error names the file and says what is wrong.
    """
    return _read(path, base)[0]


def _read(path: str, base: TenantLimits) -> tuple[TenantRules, bytes]:
    """Return the rules of the file of tenants at `path`, and the file's text."""
    try:
        with Path(path).open("rb") as file:
            if os.fstat(file.fileno()).st_mode & stat.S_IWOTH:
                raise ValueError("everybody on this machine may change it; do `chmod o-w` first")
            text = file.read(BYTES_MAX + 1)
        if len(text) > BYTES_MAX:
            raise ValueError(f"it has more than {BYTES_MAX} bytes")
        return parse_rules(text, base), text
    except (OSError, ValueError) as error:
        raise ValueError(f"tenants file {path}: {getattr(error, 'strerror', None) or error}") from None


class TenantFile:
    """The rules in a file, reloaded when it changes. A version that is wrong is logged and changes nothing."""

    def __init__(self, path: str, base: TenantLimits, kept: str = "") -> None:
        """
        Args:
            path: path of the file of tenants.
            base: the limits where the file has none.
            kept: path where the last correct version of the file is kept; "": no version is kept.

        Raises:
            ValueError: the file cannot be read, or is wrong, and no correct version was kept.
        """
        self.problem = ""
        """Why the file as it is now is not in force, but an older version; "": it is."""
        self._path = path
        self._base = base
        self._kept = kept
        self._stamp = _stamp(path)
        self._next_check = 0.0
        try:
            self.rules = self._load()
        except ValueError as error:
            if not kept or not Path(kept).is_file():
                raise
            self.rules = read_rules(kept, base)
            self._refuse(error)

    def poll(self, now: float) -> TenantRules:
        """Return the present rules. Check at most once in `CHECK_SECONDS` whether the file has changed. `now`: in
        seconds."""
        if now >= self._next_check:
            self._next_check = now + CHECK_SECONDS
            stamp = _stamp(self._path)
            if stamp != self._stamp:
                self._stamp = stamp
                self.reload()
        return self.rules

    def reload(self) -> None:
        """Read the file now, whether it has changed or not."""
        try:
            self.rules = self._load()
        except ValueError as error:
            self._refuse(error)
        else:
            self.problem = ""
            _log.info("tenants_reloaded", tenants=len(self.rules.tenants))

    def _refuse(self, error: ValueError) -> None:
        self.problem = str(error)
        _log.error("tenants_not_reloaded", detail=self.problem)

    def _load(self) -> TenantRules:
        rules, text = _read(self._path, self._base)
        with contextlib.suppress(OSError):  # the file was removed meanwhile
            if rules.has_keys and os.stat(self._path).st_mode & stat.S_IROTH:
                _log.warning("tenants_readable_by_all", path=self._path, advice="chmod o-r")
        if self._kept:
            # Written under another name and renamed, so that it is complete; several routers may do so at once.
            new = Path(f"{self._kept}.{os.getpid()}")
            with contextlib.suppress(OSError):
                write_private(new, text)
                new.replace(self._kept)
        return rules


def write_private(path: Path, text: bytes) -> None:
    """Write a file that only its owner may read, whatever the process's umask is. An older file is replaced.

    Raises:
        OSError: the file cannot be written.
    """
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(text)


def _stamp(path: str) -> tuple[int, int, int] | None:
    """Return a value that changes with the file; None: there is no file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
