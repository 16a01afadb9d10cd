"""Flags of ZeroMQ's calls as plain numbers: to join two of pyzmq's takes longer than to send a message. And
whether there is a further message: to ask costs half of a read that raises."""

from __future__ import annotations

from typing import Final

import zmq

NOBLOCK: Final = int(zmq.NOBLOCK)
"""Raise `zmq.Again` rather than wait."""
MORE: Final = int(zmq.NOBLOCK) | int(zmq.SNDMORE)
"""`NOBLOCK`, and another frame of the message follows. If this one is taken, the message's others are, too."""
_EVENTS: Final = int(zmq.EVENTS)
_READABLE: Final = int(zmq.POLLIN)


def has_message(socket: zmq.Socket[bytes]) -> bool:
    """Return whether a read finds a message now."""
    events = socket.get(_EVENTS)
    assert isinstance(events, int)
    return bool(events & _READABLE)
