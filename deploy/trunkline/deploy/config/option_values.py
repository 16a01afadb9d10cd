"""Parse and check the values of options before anything starts: sizes, tiers, tenants, the API key.

The key that all clients of a server share is given in a file or in the environment, never on the command line,
which every user of a machine can read.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trunkline.deploy.errors import UserError
from trunkline.kvstore.records import problem_of_records
from trunkline.kvstore.remote_stores import RemoteUrlError, find_store
from trunkline.router.config import NO_LIMITS, TenantLimits, problem_of_model_name
from trunkline.router.tenancy.auth import hash_key, is_loopback
from trunkline.router.tenancy.tenant_file import read_rules

# Not pydantic's ByteSize: there a bare letter is a decimal unit (1g is 10^9 bytes), and bits are sizes, too.
_UNITS: Final = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    # A bare letter means the binary unit, as in most tools that take a memory size.
    "k": 2**10,
    "m": 2**20,
    "g": 2**30,
    "t": 2**40,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE_MAX: Final = 1 << 60
_SIZE: Final = re.compile(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([a-zA-Z]*)\s*", re.ASCII)


def parse_bytes(text: str, option: str) -> int:
    """Return the number of bytes in `text`, the value of `option`.

    Raises:
        UserError: The text is not a size, or less than one byte.
    """
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise UserError(
            f"{option} is {text!r}, which is not a size; write a number and a unit, such as 512MiB, 1GiB or 2GB"
        )
    count = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if count < 1:
        raise UserError(f"{option} is {text!r}, which is less than one byte")
    if count > _SIZE_MAX:
        raise UserError(f"{option} is {text!r}, which is too much; allowed are up to {format_bytes(_SIZE_MAX)}")
    return count


def parse_limit(text: str, option: str) -> int:
    """Return the number of bytes in `text`, the value of `option`, where "0" means that there is no limit.

    Raises:
        UserError: The text is neither 0 nor a size.
    """
    return 0 if text.strip() == "0" else parse_bytes(text, option)


def check_range(option: str, value: float | None, least: float, most: float) -> None:
    """Check that a number that was given lies between two others. None: none was given.

    Raises:
        UserError: It does not, or is not a number (NaN).
    """
    if value is not None and not least <= value <= most:
        given, first, last = (
            number if isinstance(number, int) else f"{number:g}" for number in (value, least, most)
        )
        raise UserError(f"{option} is {given}; allowed are {first} to {last}")


def format_bytes(count: int) -> str:
    """Return `count` bytes in the largest binary unit that keeps the number at least 1, with one decimal at
    most."""
    exponent = min(4, max(0, (count.bit_length() - 1) // 10))
    value = count / 1024**exponent
    unit = ("B", "KiB", "MiB", "GiB", "TiB")[exponent]
    return f"{value:.0f} {unit}" if value == int(value) else f"{value:.1f} {unit}"


def format_duration(seconds: float) -> str:
    """Return a duration in one unit, such as `5 min`: the largest unit of which there are two at least."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


@dataclass(frozen=True)
class DiskOption:
    """The value of `--disk-tier`: `PATH:SIZE`, `SIZE` or `0`."""

    size_bytes: int
    """The size for all workers together; 0: no disk tier."""
    path: Path | None = None
    """The folder; None: one in the user's cache folder."""


def parse_disk_tier(text: str) -> DiskOption:
    """Return the value of `--disk-tier`.

    Raises:
        UserError: The text has none of the three forms.
    """
    given = text.strip()
    if given == "0":
        return DiskOption(0)
    path, colon, size = given.rpartition(":")
    if not colon:
        if "/" in given or given.startswith("~"):
            raise UserError(f"--disk-tier is {text!r}, which says no size; write PATH:SIZE, such as {given}:20GiB")
        return DiskOption(parse_bytes(given, "--disk-tier"))
    if not size.strip():
        raise UserError(f"--disk-tier is {text!r}, which says no size; write PATH:SIZE, such as {given}20GiB")
    if not path:
        raise UserError(f"--disk-tier is {text!r}; write PATH:SIZE, or SIZE alone for a folder of our own, or 0")
    if size.strip() == "0":
        raise UserError(f"--disk-tier is {text!r}; to have no disk tier, write 0 alone")
    return DiskOption(parse_bytes(size, "--disk-tier"), Path(path).expanduser().absolute())


@dataclass(frozen=True)
class FurtherModel:
    """A model besides the first one, and the options that it has of its own."""

    name: str
    """The name by which requests choose it."""
    model: str
    """MODEL, as the first one is given."""
    options: tuple[tuple[str, str | int | float | bool], ...] = ()
    """Names and values of options, as they were written."""


def parse_models(text: str) -> tuple[FurtherModel, ...]:
    """Return the models in a text of the form `NAME=MODEL,…`, or `{"NAME": "MODEL", …}`, where a mapping may stand
    for MODEL: `{"model": MODEL, OPTION: VALUE, …}`.

    Raises:
        UserError: The text has neither form, or gives a name twice.
    """
    found = _models_in_json(text) if text.lstrip().startswith("{") else _models_in_text(text)
    for index, model in enumerate(found):
        if problem := problem_of_model_name(model.name):
            raise UserError(f"--more-models: {problem}")
        if any(model.name == other.name for other in found[:index]):
            raise UserError(f"--more-models names {model.name!r} twice")
    return found


def _models_in_text(text: str) -> tuple[FurtherModel, ...]:
    found = []
    for part in parse_names(text):
        name, _, model = part.partition("=")
        if not name or not model:
            raise UserError(f"--more-models has {part!r}; write NAME=MODEL, with commas between several")
        found.append(FurtherModel(name, model))
    return tuple(found)


def _models_in_json(text: str) -> tuple[FurtherModel, ...]:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"--more-models begins like JSON, but is none: {error}") from error
    found = []
    for name, value in given.items():
        options = {"model": value} if isinstance(value, str) else dict(value) if isinstance(value, dict) else {}
        model = options.pop("model", None)
        if not isinstance(model, str) or not model:
            raise UserError(f"model {name!r} names no folder; write `{name}: MODEL` or `{name}: {{model: MODEL}}`")
        for option, of_it in options.items():
            if not isinstance(of_it, str | int | float | bool):
                raise UserError(f"model {name!r}: {option} takes one value")
        found.append(FurtherModel(name, model, tuple(options.items())))
    return tuple(found)


def nearest(given: str, allowed: list[str]) -> str:
    """Return a hint at the allowed name that is most like the given one, or at all of them."""
    found = difflib.get_close_matches(given, allowed, 1, 0.6)
    return f"did you mean {found[0]!r}?" if found else f"allowed are {', '.join(allowed)}"


def check_remote_url(url: str) -> None:
    """Check that this is the URL of a store that can be a remote tier.

    Raises:
        UserError: It is not such a URL, or the store's client is not installed. The text says what is allowed, and
            does not show the password.
    """
    try:
        store = find_store(url)
    except RemoteUrlError as error:
        raise UserError(f"--remote-tier is {redacted(url)!r}; {error}") from None
    if store.missing:
        raise UserError(f"--remote-tier: {store.missing}")


SQLITE: Final = "sqlite:"
"""What URLs of records begin with that are in a file of one host."""


def check_records_url(url: str, option: str = "--records") -> None:
    """Check that this is the URL of a store of records.

    Args:
        option: The option that gave it, for messages.

    Raises:
        UserError: It is not such a URL. The text says what is allowed, and does not show the password.
    """
    if problem := problem_of_records(url):
        raise UserError(f"{option} is {redacted(url)!r}. {problem.rstrip('.')}")


def redacted(url: str) -> str:
    """Return `url` for people and logs, without anything that may be a password, even if it is malformed."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "", url
    address = rest.partition("?")[0].partition("#")[0]
    if address.count("@") != rest.count("@"):  # a password with ? or #, or one in the query
        return f"{scheme}{separator}***"
    credentials, at, host = address.rpartition("@")
    user, colon, _ = credentials.partition(":")
    hidden = f"{user if colon and separator else ''}:***@" if at else ""
    return f"{scheme}{separator}{hidden}{host}"


API_KEY_VARIABLE: Final = "TRUNKLINE_API_KEY"
_API_KEY: Final = re.compile(r"[\x21-\x7e]{16,512}")
_KEY_FILE_BYTES_MAX: Final = 4096


def server_key(api_key_file: str) -> str:
    """Return the one key that a server's clients share; "" if there is none.

    Args:
        api_key_file: The file with the key; "" to look in the environment.

    Raises:
        UserError: The file cannot be read, or does not hold a key.
    """
    key, where = given_key(api_key_file)
    if key and not _API_KEY.fullmatch(key):  # it is not shown
        raise UserError(
            f"{where} is no key: 16 to 512 printable ASCII characters without spaces are; `trunkline key draw` "
            "makes one"
        )
    return key


def server_key_digest(api_key_file: str) -> str:
    """Return the digest of the shared key, as routers are told it; "" if there is none.

    Raises:
        UserError: As `server_key`.
    """
    key = server_key(api_key_file)
    return hash_key(key) if key else ""


def given_key(api_key_file: str) -> tuple[str, str]:
    """Return the key, "" if there is none, and where it was found: in the file, or else in the environment.

    Raises:
        UserError: The file cannot be read, or is empty.
    """
    if not api_key_file:
        return os.environ.get(API_KEY_VARIABLE, "").strip(), API_KEY_VARIABLE
    try:
        with Path(api_key_file).open("rb") as file:
            text = file.read(_KEY_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise UserError(f"--api-key-file {api_key_file}: {error.strerror or error}") from None
    key = text.decode("latin-1").strip()
    if not key:
        raise UserError(f"--api-key-file {api_key_file}: it is empty; a file with one key in one line is wanted")
    return key, f"what is in {api_key_file}"


_LIMIT_NAMES: Final = TenantLimits.__struct_fields__


def parse_tenant_limits(text: str) -> TenantLimits:
    """Return the value of `--tenant-limits`: pairs of the form `NAME=NUMBER` with commas between them.

    Raises:
        UserError: The text has another form.
    """
    given: dict[str, int] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = (part.strip() for part in pair.partition("="))
        if name not in _LIMIT_NAMES or name in given:
            raise UserError(
                f"--tenant-limits is {text!r}; it is made of NAME=NUMBER, with commas between them, and each of "
                f"these names once at most: {', '.join(_LIMIT_NAMES)}"
            )
        try:
            given[name] = int(number)
        except ValueError:
            raise UserError(f"--tenant-limits is {text!r}; {name} is a whole number, not {number!r}") from None
    limits = TenantLimits(**given)
    if problem := limits.problem():
        raise UserError(f"--tenant-limits: {problem}".replace("or null for", "or left out for"))
    return limits


def check_tenants(path: str, limits: TenantLimits) -> None:
    """Check the file of `--tenants`, if there is one.

    Raises:
        UserError: It cannot be read, or is wrong.
    """
    if path:
        try:
            read_rules(path, limits)
        except ValueError as error:
            raise UserError(f"--tenants: {error}") from None


def parse_names(text: str) -> tuple[str, ...]:
    """Return the names in a text with commas between them."""
    return tuple(filter(None, (part.strip() for part in text.split(","))))


def parse_adapters(text: str) -> tuple[tuple[str, str], ...]:
    """Return the names and folders of adapters in a text of the form `NAME=PATH,…`.

    Raises:
        UserError: The text has another form, or gives a name twice.
    """
    found: dict[str, str] = {}
    for part in parse_names(text):
        name, _, path = part.partition("=")
        if not name or not path:
            raise UserError(f"--lora has {part!r}; write NAME=PATH, with commas between several")
        if name in found:
            raise UserError(f"--lora names {name!r} twice")
        found[name] = str(Path(path).expanduser().absolute())
    return tuple(found.items())


def keys_needed(tenants: str, api_key_file: str) -> bool:
    """Return whether clients need keys: because a key is given, or because the file of tenants has some.

    Raises:
        UserError: A file cannot be read, or is wrong.
    """
    if server_key(api_key_file):
        return True
    check_tenants(tenants, NO_LIMITS)
    return bool(tenants) and read_rules(tenants, NO_LIMITS).has_keys


def check_exposure(host: str, tenants: str, api_key_file: str, *, allow_anonymous: bool) -> None:
    """Check that only this machine can connect to a server without keys.

    Raises:
        UserError: Other machines could connect.
    """
    if not (keys_needed(tenants, api_key_file) or allow_anonymous or is_loopback(host)):
        raise UserError(
            f"--host is {host}, where other machines can connect, and there are no API keys; make one with "
            "`trunkline key new --tenant NAME --file FILE` and give --tenants FILE, or set TRUNKLINE_API_KEY, "
            "or stay on 127.0.0.1; --allow-anonymous answers requests without a key"
        )
