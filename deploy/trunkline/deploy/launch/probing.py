"""How a unit is, by what its health port answers on the loopback address."""

from __future__ import annotations

import http.client
from typing import Final

_TIMEOUT_S: Final = 5.0
_BODY_BYTES_MAX: Final = 2000


def probe(port: int) -> tuple[str, str]:
    """`ready`, `unready` or `starting`, and why."""
    status, reason = _get(port, "/readyz")
    if status == 200:
        return "ready", ""
    if status == 0:
        return "starting", reason
    started, _ = _get(port, "/startupz")
    return ("unready" if started == 200 else "starting"), reason


def _get(port: int, path: str) -> tuple[int, str]:
    """The status, 0 if nobody answers, and the first line."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read(_BODY_BYTES_MAX).decode(errors="replace").strip()
        return answer.status, text.partition("\n")[0]
    except ConnectionRefusedError:
        return 0, "its health port does not answer yet"
    except (OSError, http.client.HTTPException) as error:
        return 0, f"its health port does not answer: {error or type(error).__name__}"
    finally:
        connection.close()
