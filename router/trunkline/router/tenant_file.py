"""The file in which an operator says what tenants may do. Read at the start, and again whenever it changes.

    {"default": {"requests_per_minute": 60},
     "tenants": {"batch": {"keys": ["SHA-256 of a key"], "tokens_per_minute": 100000, "priority": 5}}}

What a tenant does not say, `default` says; what that does not say, the process's options do. null: no limit.

A file that is wrong changes nothing, also for a router that is started while it is: each version that is right is
kept beside the sockets of the cluster, and serves then. A mistake in it must not keep a lost router away.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Final

import msgspec
import structlog
from msgspec import UNSET, UnsetType

from trunkline.router.tenants import KEY_PREFIX, NAME, TenantLimits, TenantRules

BYTES_MAX: Final = 16 << 20
CHECK_SECONDS: Final = 1.0
"""Between two looks at whether the file has changed."""
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_FIELDS: Final = ("requests", "requests_per_minute", "tokens_per_minute", "priority")
_log = structlog.get_logger("trunkline.router.tenants")


class _Default(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    requests: int | UnsetType | None = UNSET
    requests_per_minute: int | UnsetType | None = UNSET
    tokens_per_minute: int | UnsetType | None = UNSET
    priority: int | UnsetType = UNSET


class _Tenant(_Default, frozen=True, forbid_unknown_fields=True):
    keys: list[str] = []


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tenants: dict[str, _Tenant] = {}
    default: _Default = _Default()


def parse_rules(text: bytes, base: TenantLimits) -> TenantRules:
    """Rules from a file's text. `base`: limits where it says nothing.

    Raises:
        ValueError: saying what is wrong, and where.
    """
    try:
        document = msgspec.json.decode(text, type=_Document)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None
    default = _filled(document.default, base, "default")
    tenants: dict[str, TenantLimits] = {}
    keys: dict[str, str] = {}
    for name, tenant in document.tenants.items():
        if not NAME.fullmatch(name) or name.startswith(KEY_PREFIX):
            raise ValueError(
                f"tenants: {name[:140]!r} is no name: 1 to 128 printable ASCII characters, no spaces, and not "
                f"beginning with {KEY_PREFIX!r}"
            )
        tenants[name] = _filled(tenant, default, f"tenants: {name}")
        for key in tenant.keys:
            digest = key.lower()
            if not _DIGEST.fullmatch(digest):  # perhaps the key itself: it is not shown
                raise ValueError(f"tenants: {name}: keys are given as their SHA-256, 64 hexadecimal digits")
            if keys.setdefault(digest, name) != name:
                raise ValueError(f"tenants: {name} and {keys[digest]} have a key in common")
    return TenantRules(default, tenants, keys)


def _filled(given: _Default, base: TenantLimits, where: str) -> TenantLimits:
    said = {name: value for name in _FIELDS if (value := getattr(given, name)) is not UNSET}
    limits = msgspec.structs.replace(base, **said)
    if problem := limits.problem():
        raise ValueError(f"{where}: {problem}")
    return limits


def read_rules(path: str, base: TenantLimits) -> TenantRules:
    """Rules from a file.

    Raises:
        ValueError: it cannot be read, or is wrong; the text names it.
    """
    return _read(path, base)[0]


def _read(path: str, base: TenantLimits) -> tuple[TenantRules, bytes]:
    """As `read_rules`, with the file's text."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(BYTES_MAX + 1)
        if len(text) > BYTES_MAX:
            raise ValueError(f"it has more than {BYTES_MAX} bytes")
        return parse_rules(text, base), text
    except (OSError, ValueError) as error:
        raise ValueError(f"tenants file {path}: {getattr(error, 'strerror', None) or error}") from None


class TenantFile:
    """Rules that follow a file. A change that cannot be read leaves them as they are, and is logged."""

    def __init__(self, path: str, base: TenantLimits, kept: str = "") -> None:
        """
        Args:
            kept: where the last version that was right is kept; "": nowhere.

        Raises:
            ValueError: as `read_rules`, and nothing was kept.
        """
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
            _log.error("tenants_not_reloaded", detail=str(error))

    def poll(self, now: float) -> TenantRules:
        """The rules; looks at the file once in `CHECK_SECONDS`. `now`: in seconds."""
        if now >= self._next_check:
            self._next_check = now + CHECK_SECONDS
            stamp = _stamp(self._path)
            if stamp != self._stamp:
                self._stamp = stamp
                self.reload()
        return self.rules

    def reload(self) -> None:
        """Read it now, whether it has changed or not."""
        try:
            self.rules = self._load()
        except ValueError as error:
            _log.error("tenants_not_reloaded", detail=str(error))
        else:
            _log.info("tenants_reloaded", tenants=len(self.rules.tenants))

    def _load(self) -> TenantRules:
        rules, text = _read(self._path, self._base)
        if self._kept:
            # Complete or not at all, and each router its own: several read the same change at the same time.
            new = Path(f"{self._kept}.{os.getpid()}")
            with contextlib.suppress(OSError):
                new.write_bytes(text)
                new.replace(self._kept)
        return rules


def _stamp(path: str) -> tuple[int, int, int] | None:
    """Changes with the file; None: there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
