"""The messages between the launcher and the agent on a host: lines of JSON on the agent's standard streams.

    → {"type": "Hello", "cluster": "demo", "host": "a", "state": ""}        one request
    ← trunkline-agent {"type": "Facts", …}                                  its reply, or several of them
    ← trunkline-agent {"type": "Done"}                                      the last one

Lines without the mark come from something else, such as a login script that greets; they are passed over. Nothing
goes by command lines: neither a name that would have to be quoted, nor a key that others could read there.
"""

from __future__ import annotations

from typing import Final

import msgspec

PROTOCOL: Final = 2
Place = tuple[str, str]
"""The place of a unit: the names of its host and of the unit."""
MARK: Final = b"trunkline-agent "
LINE_BYTES_MAX: Final = 64 << 20
"""Largest number of bytes in a line: enough for a file with the keys of very many tenants."""


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True, kw_only=True):
    """Base of requests and replies."""


class Hello(Message, frozen=True):
    """The first request, with the cluster and the host's name in it. Answered by `HostFacts`."""

    cluster: str
    host: str
    protocol: int = PROTOCOL
    state: str = ""
    """Folder for the states of clusters on the host; "": the user's own."""


class UnitRecord(msgspec.Struct, frozen=True):
    """Everything that a unit is started from, kept in its folder (`unit.json`, 0600)."""

    name: str
    kind: str
    argv: list[str]
    environment: dict[str, str]
    digest: str
    health_port: int
    version: str = ""
    """The version of Trunkline on that host, which the agent fills in."""


class Put(Message, frozen=True):
    """Write a file into the host's folder, for its owner only. Answered by `Done`."""

    name: str
    content: bytes


class CheckPorts(Message, frozen=True):
    """Find which of these ports are in use. Answered by `TakenPorts`."""

    ports: list[int]


class Begin(Message, frozen=True):
    """Start a unit that does not run. Answered by `Done` when its keeper has begun, not when it is ready."""

    unit: UnitRecord


class Signal(Message, frozen=True):
    """Tell a unit to stop (`term`), or end it (`kill`). Answered by `Done`, at once."""

    unit: str
    kind: str


class Look(Message, frozen=True):
    """Ask for the state of all units that were started and not forgotten. Answered by `UnitState`s."""

    probe: bool = True
    """Whether each unit is asked for its health."""


class Logs(Message, frozen=True):
    """Ask for the last lines that units wrote and, if `follow`, for new ones as they come. Answered by
    `LogLine`s."""

    units: list[str]
    lines: int
    follow: bool = False


class Forget(Message, frozen=True):
    """Remove the folder of a unit that does not run. Answered by `Done`."""

    unit: str


Request = Hello | Put | CheckPorts | Begin | Signal | Look | Logs | Forget


class HostFacts(Message, frozen=True):
    """The answer to `Hello`: facts about the host."""

    version: str
    protocol: int
    hostname: str
    cores: int
    memory_bytes: int
    gpus: list[str]
    """GPUs that its processes can use, as `CUDA_VISIBLE_DEVICES` names them."""
    folder: str
    """The folder of this cluster on this host."""


class TakenPorts(Message, frozen=True):
    """The ports that are in use."""

    ports: list[int]


class UnitState(Message, frozen=True):
    """The state of a unit."""

    name: str
    kind: str
    state: str
    """`starting`; `ready`; `unready`: it has started, but does not serve now; `waiting`: it died, and is started
    again soon; `stopping`; `stopped`: it ended as it should; `failed`: it is not started again; `gone`: it was
    killed with its keeper."""
    detail: str = ""
    pid: int | None = None
    restarts: int = 0
    up_s: float | None = None
    exit_code: int | None = None
    digest: str = ""
    version: str = ""
    argv: list[str] = []


class LogLine(Message, frozen=True):
    """A line that a unit wrote."""

    unit: str
    text: str


class Done(Message, frozen=True):
    """The last reply to a request."""


class Refused(Message, frozen=True):
    """The last reply to a request that could not be done; the text is for a person."""

    text: str


Reply = HostFacts | TakenPorts | UnitState | LogLine | Done | Refused

_REQUESTS: Final = msgspec.json.Decoder(Request)
_REPLIES: Final = msgspec.json.Decoder(Reply)


def encode_request(request: Request) -> bytes:
    """Return a message as a line."""
    return msgspec.json.encode(request) + b"\n"


def decode_request(line: bytes) -> Request:
    """Return the request in a line.

    Raises:
        msgspec.MsgspecError: It holds none.
    """
    request: Request = _REQUESTS.decode(line)
    return request


def encode_reply(reply: Reply) -> bytes:
    """Return a message as a line."""
    return MARK + msgspec.json.encode(reply) + b"\n"


def decode_reply(line: bytes) -> Reply | None:
    """Return the reply in a line; None if the line is not the agent's.

    Raises:
        msgspec.MsgspecError: The line has the mark but is not a reply: the agent is of another version.
    """
    return _REPLIES.decode(line[len(MARK) :]) if line.startswith(MARK) else None
