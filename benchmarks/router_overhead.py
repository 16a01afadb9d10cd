"""What the router adds to a streamed token: the time from the controller's message to the client's bytes.

    python benchmarks/router_overhead.py [--quick] [--streams 64] [--step-ms 20] [--json PATH]
    python benchmarks/router_overhead.py --cold 60 [--pythons PATH,PATH] [--quick] [--json PATH]

A router process serves the demo model's tokenizer. In place of a controller, a process of this script sends one
`Outputs` message per step with a token of each stream, and notes when; here, all streams are read over plain
HTTP/1.1 connections. The difference is the router's: receive, detokenise, format, send. For comparison the same
messages are sent straight to a reader (`direct`): what one takes without a router. All clocks are CLOCK_MONOTONIC.

Steps come every `--step-ms`, far apart enough that none waits for the one before: this is latency, not throughput.
The router's CPU time is given per token from the second step to the last, and for each request: what comes before
and after.

`--cold N` measures instead what one request costs the router when the CPU's caches hold other programs: the CPU
time of its event loop from a request's bytes to the message for the controller, from the controller's first token
to the event for the client, and of all the rest (`cold_router.py`). N requests of 2,000 token ids over one
connection go to the routers of all `--pythons` by turns (each the Python of a tree of its own), so that versions
can be compared on a busy machine.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import zmq
from report import Report, argument_parser
from tokenizers import Tokenizer

from trunkline.controller.messages import Abort, Ping, RouterRequest, Submit
from trunkline.router.messages import PROTOCOL, Finished, FinishReason, Outputs, RouterMessage, Started, State
from trunkline.worker.messages import Sampling

DEMO_MODEL: Final = Path(__file__).resolve().parents[1] / "deploy/trunkline/deploy/demo_model"
TOKEN: Final = 300
"""What every stream says all the time: a token whose text is short and never ends inside a character."""
_STATE: Final = State(0, "ready", "", 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4096, max_rows=256, protocol=PROTOCOL)
"""An idle controller with room for contexts of 4,096 tokens."""


COLD_FIRST: Final = 5
"""Requests before those that count."""


class Controller:
    """Answers pings, takes requests and sends each a token per step. Runs in a process of its own."""

    def __init__(self, endpoint: str, streams: int, step_seconds: float) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.bind(endpoint)
        self._streams = streams
        self._step_seconds = step_seconds
        self._seq = 0
        self._router = b""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(RouterRequest)
        self._live: list[Submit] = []

    def run(self, times: Connection, router: int | None) -> None:
        """Serve one round. The time of each step's message goes to `times` in the end, with the CPU time that the
        router's process took from the second step to the last; None: there is no router."""
        while len(self._live) < self._streams:
            self._receive(1000)
        numbers = np.array([submit.request for submit in self._live], "<u4").tobytes()
        tokens = np.full(len(self._live), TOKEN, "<i4").tobytes()
        sent = []
        due = time.monotonic()
        steps, before = self._live[0].max_tokens, 0.0
        for step in range(steps):
            due += self._step_seconds
            while (left := due - time.monotonic()) > 0:
                self._receive(max(0, int(left * 1000)))
            if step == 1:
                before = cpu_seconds(router)
            sent.append(time.monotonic())
            self._send(Outputs(self._next(), numbers, tokens))
        time.sleep(self._step_seconds)  # until the last step's events are written
        busy = cpu_seconds(router) - before
        self._send(Outputs(self._next(), finished=[Finished(s.request, FinishReason.LENGTH) for s in self._live]))
        self._live.clear()
        times.send((sent, busy))
        while self._receive(2000):
            pass

    def serve_cold(self) -> None:
        """Answer each request by itself, as after a step of 15 ms: a first token with the news of its start, and a
        little later the end."""
        while True:
            while not self._live:
                self._receive(1000)
            submit = self._live.pop()
            number = np.array([submit.request], "<u4").tobytes()
            token = np.array([TOKEN], "<i4").tobytes()
            time.sleep(0.015)
            self._send(
                Outputs(self._next(), number, token, started=[Started(submit.request, submit.prompt_len - 1)])
            )
            time.sleep(0.005)
            self._send(Outputs(self._next(), finished=[Finished(submit.request, FinishReason.LENGTH)]))

    def _receive(self, timeout_ms: int) -> bool:
        if not self._socket.poll(timeout_ms):
            return False
        self._router, frame = self._socket.recv_multipart()[:2]
        message = self._decoder.decode(frame)
        if isinstance(message, Ping):
            self._send(msgspec.structs.replace(_STATE, seq=self._next()))
        elif isinstance(message, Submit):
            self._live.append(message)
            if self._streams:
                self._send(Outputs(self._next(), started=[Started(message.request, 0)]))
        elif isinstance(message, Abort):
            self._live = [submit for submit in self._live if submit.request != message.request]
        return True

    def _next(self) -> int:
        self._seq += 1
        return self._seq

    def _send(self, message: RouterMessage) -> None:
        self._socket.send_multipart([self._router, self._encoder.encode(message)])


def control(
    endpoint: str, streams: int, step_seconds: float, times: Connection, router: int | None = None
) -> None:
    """The controller's process."""
    Controller(endpoint, streams, step_seconds).run(times, router)


def read_all(port: int, streams: int, tokens: int) -> list[list[float]]:
    """When each token's event of each stream arrived. Nothing is looked at before all is over, because what this
    process does with an event would count as the router's for those that wait behind it."""
    body = json.dumps(
        {"prompt": [5, 6, 7], "max_tokens": tokens, "stream": True, "ignore_eos": True, "temperature": 0}
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    selector = selectors.DefaultSelector()
    arrivals: list[list[tuple[float, bytes]]] = []
    for _ in range(streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(head.encode() + body)
        arrivals.append([])
        selector.register(connection, selectors.EVENT_READ, (connection, arrivals[-1]))
    while selector.get_map():
        for key, _ in selector.select():
            reader, arrived = key.data
            data = reader.recv(65536)
            arrived.append((time.monotonic(), data))
            if not data:
                selector.unregister(reader)
                reader.close()
    for arrived in arrivals:
        answer = b"".join(data for _, data in arrived)
        if not answer.startswith(b"HTTP/1.1 200 "):
            raise RuntimeError(f"the router refused a request: {answer[:600]!r}")
    return [times_of(arrived)[:tokens] for arrived in arrivals]


def times_of(arrived: list[tuple[float, bytes]]) -> list[float]:
    """When each token of a stream was there, from when each piece of its answer was."""
    length = len(Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")).decode([TOKEN]))
    times: list[float] = []
    rest = b""
    for when, data in arrived:
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            at = event.find(b'{"id"')
            if at >= 0:  # else the headers, or the end
                text = json.loads(event[at:])["choices"][0]["text"]
                times += [when] * (len(text) // length)  # tokens that came late come together
    return times


def direct(folder: str, streams: int, tokens: int, step_seconds: float) -> list[float]:
    """Seconds from sending a step's message to having it decoded, without a router."""
    endpoint = f"ipc://{folder}/direct"
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.Process(target=control, args=(endpoint, streams, step_seconds, sender))
    process.start()
    dealer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    dealer.connect(endpoint)
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(RouterMessage)
    for number in range(streams):
        submit = Submit(number + 1, b"\5\0\0\0", 1, tokens, Sampling())
        dealer.send(encoder.encode(submit))
    arrived: list[float] = []
    while len(arrived) < tokens:
        message = decoder.decode(dealer.recv())
        if isinstance(message, Outputs) and message.tokens:
            arrived.append(time.monotonic())
    sent, _ = receiver.recv()
    process.join()
    dealer.close(linger=0)
    return [b - a for a, b in zip(sent, arrived, strict=True)]


def routed(folder: str, streams: int, tokens: int, step_seconds: float) -> tuple[list[float], float, float]:
    """Seconds from sending a step's message to the client's having each stream's event; the router's CPU time per
    token, and beside the tokens for each request, in seconds."""
    endpoint = f"ipc://{folder}/controller"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    config = Path(folder, "router.json")
    config.write_text(json.dumps({"model_path": str(DEMO_MODEL), "controllers": [endpoint], "port": port}))
    router = subprocess.Popen(
        [sys.executable, "-m", "trunkline.router", "--config", str(config)], stderr=subprocess.DEVNULL
    )
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.Process(target=control, args=(endpoint, streams, step_seconds, sender, router.pid))
    process.start()
    try:
        wait_for(port)
        time.sleep(1.5)  # until the router has the controller's first word
        before = cpu_seconds(router.pid)
        arrived = read_all(port, streams, tokens)
        sent, streaming = receiver.recv()
        beside = cpu_seconds(router.pid) - before - streaming
    finally:
        process.terminate()
        process.join()
        os.kill(router.pid, signal.SIGTERM)
        router.wait()
    # The first step meets the streams' beginnings, which are more work.
    delays = [b - a for stream in arrived for a, b in list(zip(sent, stream, strict=True))[1:]]
    return delays, streaming / (streams * (tokens - 1)), beside / streams


def control_cold(endpoint: str) -> None:
    """The controller's process for `cold`."""
    Controller(endpoint, 0, 0.0).serve_cold()


class ColdRouter:
    """A router of a tree, with its controller and one client's connection (`cold_router.py`)."""

    def __init__(self, python: str, folder: Path) -> None:
        folder.mkdir()
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        endpoint, path = f"ipc://{folder}/controller", folder / "router.json"
        path.write_text(json.dumps({"model_path": str(DEMO_MODEL), "controllers": [endpoint], "port": port}))
        script = Path(__file__).with_name("cold_router.py")
        self._controller = multiprocessing.Process(target=control_cold, args=(endpoint,), daemon=True)
        self._controller.start()
        self._router = subprocess.Popen(
            [python, str(script), str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        wait_for(port)
        time.sleep(1.5)  # until the router has the controller's first word
        self._client = socket.create_connection(("127.0.0.1", port))

    def ask(self, prompt: list[int]) -> None:
        """Send a request, and wait for the end of its answer."""
        body = json.dumps({"prompt": prompt, "max_tokens": 4, "temperature": 0, "stream": True})
        head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        self._client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        answer = b""
        while not answer.endswith(b"0\r\n\r\n"):
            answer += self._client.recv(1 << 16)
            if not answer.startswith(b"HTTP/1.1 200 "):
                raise RuntimeError(f"the router refused a request: {answer[:600]!r}")

    def end(self) -> list[dict[str, float]]:
        """Return each request's times, and end the processes."""
        self._client.close()
        self._router.terminate()
        times: list[dict[str, float]] = json.loads(self._router.communicate()[0])
        self._controller.terminate()
        return times


def cold(pythons: list[str], rounds: int, report: Report) -> None:
    """Measure and report requests with cold caches, by turns."""
    rng = np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as folder:
        routers = [ColdRouter(python, Path(folder, str(number))) for number, python in enumerate(pythons)]
        for turn in range(rounds + COLD_FIRST):
            prompt = rng.integers(300, 1000, 2000).tolist()
            for number in range(len(routers)):
                routers[(turn + number) % len(routers)].ask(prompt)
                time.sleep(0.02)
        for python, router in zip(pythons, routers, strict=True):
            times = router.end()[COLD_FIRST:]
            for what in times[0]:
                values = [each[what] for each in times]
                report.add({"python": python}, what, float(np.median(values)), "us", len(values))
                report.add(
                    {"python": python},
                    f"{what}, lower decile",
                    float(np.percentile(values, 10)),
                    "us",
                    len(values),
                )


def cpu_seconds(pid: int | None) -> float:
    """Of all threads of a process, since its start; None: no process."""
    if pid is None:
        return 0.0
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")  # the first number: nanoseconds on a core
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def wait_for(port: int) -> None:
    """Until somebody listens."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise TimeoutError(f"nobody listens on port {port}")


def main() -> None:
    """Measure and print."""
    parser = argument_parser(__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument(
        "--cold", type=int, default=0, metavar="N", help="measure N requests with cold caches instead"
    )
    parser.add_argument("--pythons", default=sys.executable, help="of the trees to compare with --cold")
    arguments = parser.parse_args()
    if arguments.cold:
        report = Report("router_overhead")
        cold(arguments.pythons.split(","), 10 if arguments.quick else arguments.cold, report)
        report.finish(arguments.json)
        return
    tokens = 100 if arguments.quick else 500
    report = Report("router_overhead")
    medians: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        settings = folder, arguments.streams, tokens, arguments.step_ms / 1000
        straight = direct(*settings)
        through, per_token, per_request = routed(*settings)
        for name, seconds in (("direct", straight), ("routed", through)):
            times = np.array(seconds) * 1000
            for quantile in (50, 90, 99):
                value = float(np.percentile(times, quantile))
                medians.setdefault(name, value)
                report.add({"way": name, "streams": arguments.streams}, f"p{quantile}", value, "ms", 1)
    routed_by = {"way": "routed", "streams": arguments.streams}
    report.add(routed_by, "cpu_per_token", per_token * 1e6, "us", 1)
    report.add(routed_by, "cpu_per_request", per_request * 1e3, "ms", 1)
    added = medians["routed"] - medians["direct"]
    report.add({"way": "added", "streams": arguments.streams}, "p50", added, "ms", 1)
    report.finish(arguments.json, wide=True)


if __name__ == "__main__":
    main()
