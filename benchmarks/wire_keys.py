"""What wire keys (CURVE) cost per message between a router and a controller.

    python benchmarks/wire_keys.py [--quick] [--json PATH]

A process of this script listens as a controller does and sends every message back; here, a router's socket sends
one after the other (`round_trip`), then as many as there are at once (`cpu`: processor time of both processes per
message and direction, ZeroMQ's own threads included). Ways: `ipc` is what one host uses; `tcp` has no keys; `keys`
is tcp with keys. 100 bytes is a decode step, 64 KiB a long prompt. Runs are interleaved. `handshake` is the time
from connecting to the first answer.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections import defaultdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import psutil
import zmq
from report import Report, parse_arguments

from trunkline.runtime.wire_gate import MESSAGE_BYTES_MAX, Gate
from trunkline.runtime.wire_keys import Role, generate, write
from trunkline.runtime.wire_peer import WirePeer

WAYS: Final = ("ipc", "tcp", "keys")
SIZES: Final = (100, 64 << 10)
BURST: Final = 64
"""Messages on their way at once while processor time is measured."""
_TIMEOUT_MS: Final = 20_000


def serve(way: str, folder: str, where: Connection) -> None:
    """A controller's socket that sends back what comes; runs in a process of its own."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    gate = Gate(context, keys_of(way, folder))
    socket = context.socket(zmq.ROUTER)
    gate.bind(
        socket, f"ipc://{folder}/echo" if way == "ipc" else "tcp://127.0.0.1:*", Role.ROUTER, MESSAGE_BYTES_MAX
    )
    gate.open()
    where.send(socket.getsockopt_string(zmq.LAST_ENDPOINT))
    while True:
        socket.send_multipart(socket.recv_multipart())


def keys_of(way: str, folder: str) -> str:
    """The file of a way's keys, if it has any."""
    return str(Path(folder, "keys")) if way == "keys" else ""


class Wire:
    """One way between two processes."""

    def __init__(self, way: str, folder: str) -> None:
        receiver, sender = multiprocessing.Pipe(duplex=False)
        self._process = multiprocessing.Process(target=serve, args=(way, folder, sender), daemon=True)
        self._process.start()
        endpoint = receiver.recv()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.handshakes = []
        for _ in range(9):
            socket = self._context.socket(zmq.DEALER)
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.RCVTIMEO, _TIMEOUT_MS)
            began = time.perf_counter()
            WirePeer(keys_of(way, folder)).connect(socket, endpoint)
            socket.send(b"")
            socket.recv()
            self.handshakes.append(time.perf_counter() - began)
            self._socket = socket
        self._measured = [psutil.Process(), psutil.Process(self._process.pid)]

    def round_trip(self, size: int, count: int) -> float:
        """Median seconds of a message and its answer."""
        payload, seconds = bytes(size), []
        for _ in range(count):
            began = time.perf_counter()
            self._socket.send(payload)
            self._socket.recv()
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)

    def processor(self, size: int, count: int) -> float:
        """Seconds of processor time per message, both ends together."""
        payload, before = bytes(size), self._busy()
        for number in range(count + BURST):
            if number < count:
                self._socket.send(payload)
            if number >= BURST:
                self._socket.recv()
        return (self._busy() - before) / (2 * count)

    def _busy(self) -> float:
        return sum(float(sum(process.cpu_times()[:2])) for process in self._measured)

    def close(self) -> None:
        """End both processes' parts."""
        self._process.terminate()
        self._process.join()
        self._context.destroy(linger=0)


def main() -> None:
    """Measure and print."""
    arguments = parse_arguments(__doc__)
    runs, trips, burst_bytes = (3, 300, 64 << 20) if arguments.quick else (9, 2000, 512 << 20)
    report = Report("wire_keys")
    found: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        write(generate(), Path(folder, "keys"))
        wires = {way: Wire(way, folder) for way in WAYS}
        try:
            for _ in range(runs):
                for size in SIZES:
                    count = min(burst_bytes // size, 100 * trips)
                    for way, wire in wires.items():
                        found[way, size, "round_trip"].append(wire.round_trip(size, trips))
                        found[way, size, "cpu"].append(wire.processor(size, count))
        finally:
            for wire in wires.values():
                wire.close()
    for (way, size, metric), values in found.items():
        report.add({"way": way, "bytes": size}, metric, statistics.median(values) * 1e6, "us", runs)
    for way, wire in wires.items():
        seconds = statistics.median(wire.handshakes)
        report.add({"way": way}, "handshake", seconds * 1e6, "us", len(wire.handshakes))
    report.finish(arguments.json, wide=True)


if __name__ == "__main__":
    main()
