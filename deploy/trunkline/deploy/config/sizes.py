"""Parse and format sizes in bytes as people write them: `1GiB`, `512 MB`, `1.5g`."""

from __future__ import annotations

import re
from typing import Final

from trunkline.deploy.errors import UserError

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
    return count


def format_bytes(count: int) -> str:
    """Return `count` bytes in the largest binary unit that keeps the number at least 1, with one decimal at
    most."""
    exponent = min(4, max(0, (count.bit_length() - 1) // 10))
    value = count / 1024**exponent
    unit = ("B", "KiB", "MiB", "GiB", "TiB")[exponent]
    return f"{value:.0f} {unit}" if value == int(value) else f"{value:.1f} {unit}"
