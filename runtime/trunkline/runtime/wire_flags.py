"""Flags of ZeroMQ's calls as plain numbers: to join two of pyzmq's takes longer than to send a message."""

from __future__ import annotations

from typing import Final

import zmq

NOBLOCK: Final = int(zmq.NOBLOCK)
"""Raise `zmq.Again` rather than wait."""
MORE: Final = int(zmq.NOBLOCK) | int(zmq.SNDMORE)
"""`NOBLOCK`, and another frame of the message follows. If this one is taken, the message's others are, too."""
