"""What the router adds to a streamed token: the time from the controller's message to the client's bytes.

    python benchmarks/router_overhead.py [--quick] [--streams 64] [--step-ms 20] [--rounds 3] [--arrivals N]
                                         [--pythons PATH,PATH] [--json PATH]
    python benchmarks/router_overhead.py --cold 60 [--pythons PATH,PATH] [--quick] [--json PATH]

A router process serves the demo model's tokenizer. In place of a controller, a process of this script sends one
`Outputs` message per step with a token of each stream (`routed`). Half a step later it writes an event of the
same size to as many connections itself (`bare`): what writing and reading take without a router. Here one loop
reads both over plain HTTP/1.1 connections (`bare_streams.py`). Given is the time from the message, or from before
the first bare event, until an event had come, by two clocks: `kernel` says when it was at the client's socket,
`client` when the client had read it. `added` is the difference of `routed` and `bare`: receive, detokenise,
format. `gap` is the longest time between two events of a stream, and for `sent` between two of the controller's
steps: a pause of the whole machine is in all of them.

Steps come every `--step-ms`, far apart enough that none waits for the one before: this is latency, not throughput.
The router's CPU time is given per token from the second step to the last, and for each request: what comes before
and after. With `--arrivals N`, N further requests of one token come at once in the middle of the run: `gap` has
what their beginnings do to the streams that run, and the CPU time per token has all that these requests cost.

`--cold N` measures instead what one request costs the router when the CPU's caches hold other programs: the CPU
time of its event loop from a request's bytes to the message for the controller, from the controller's first token
to the event for the client, and of all the rest (`cold_router.py`). N requests of 2,000 token ids over one
connection go to each router.

The routers of all `--pythons` are measured by turns (each the Python of a tree of its own), so that versions can
be compared on a busy machine.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np
import zmq
from bare_streams import BareSource, Piece, read_streams
from report import Report, argument_parser
from tokenizers import Tokenizer

from trunkline.controller.messages import Abort, Ping, RouterRequest, Submit
from trunkline.router.messages import PROTOCOL, Finished, FinishReason, Outputs, RouterMessage, Started, State

DEMO_MODEL: Final = Path(__file__).resolve().parents[1] / "deploy/trunkline/deploy/demo_model"
TOKEN: Final = 300
"""What every stream says all the time: a token whose text is short and never ends inside a character."""
_IDLE: Final = State(0, "ready", "", 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4096, max_rows=256, protocol=PROTOCOL)
_STATE: Final = msgspec.structs.replace(_IDLE, fingerprint=bytes(16), dtype="bfloat16", chunk_size=64)
"""An idle controller with room for contexts of 4,096 tokens, whose chunks have names."""

COLD_FIRST: Final = 5
"""Requests before those that count."""
BARE_EVENT: Final = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1700000000,'
    b'"model":"demo_model","choices":[{"index":0,"text":"%b","logprobs":null,"finish_reason":null}]}\n\n'
)


class Sent(NamedTuple):
    """What the controller's process has noted in a run. Times as in `bare_streams.py`."""

    routed: list[float]
    """When each step's message was sent."""
    bare: list[float]
    """When the first of each step's bare events was about to be written."""
    busy: float
    """CPU time of the router's process from the second step to the last, in seconds."""


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

    def run(self, bare: BareSource, times: Connection, router: int) -> None:
        """Serve one run; what was noted goes to `times` in the end. `router`: process id."""
        while len(self._live) < self._streams:
            self._receive(1000)
        bare.accept(self._streams)
        running, self._live = self._live, []
        numbers = np.array([submit.request for submit in running], "<u4").tobytes()
        tokens = np.full(len(running), TOKEN, "<i4").tobytes()
        routed, bared = [], []
        due = time.time()
        before = 0.0
        for step in range(running[0].max_tokens):
            due += self._step_seconds
            self._receive_until(due)
            if step == 1:
                before = cpu_seconds(router)
            self._end_late()
            routed.append(time.time())
            self._send(Outputs(self._next(), numbers, tokens))
            self._receive_until(due + self._step_seconds / 2)
            bared.append(time.time())
            bare.write()
        time.sleep(self._step_seconds)  # until the last step's events are written
        busy = cpu_seconds(router) - before
        self._send(Outputs(self._next(), finished=[Finished(s.request, FinishReason.LENGTH) for s in running]))
        bare.close()
        times.send(Sent(routed, bared, busy))
        while self._receive(2000):
            pass

    def _receive_until(self, due: float) -> None:
        while (left := due - time.time()) > 0:
            self._receive(max(0, int(left * 1000)))

    def _end_late(self) -> None:
        """Answer requests that came during a run: a token and the end."""
        if late := self._live:
            self._live = []
            numbers = np.array([submit.request for submit in late], "<u4").tobytes()
            tokens = np.full(len(late), TOKEN, "<i4").tobytes()
            ends = [Finished(submit.request, FinishReason.LENGTH) for submit in late]
            self._send(Outputs(self._next(), numbers, tokens, finished=ends))

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


def control(endpoint: str, listener: socket.socket, settings: Settings, times: Connection, router: int) -> None:
    """The controller's process."""
    text = token_text()
    source = BareSource(listener, BARE_EVENT % text.encode())
    Controller(endpoint, settings.streams, settings.step_seconds).run(source, times, router)


def token_text() -> str:
    """The text of a token."""
    return Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")).decode([TOKEN])


def request(tokens: int) -> bytes:
    """A request for a stream of so many tokens."""
    fields = {"prompt": [5, 6, 7], "max_tokens": tokens, "stream": True, "ignore_eos": True, "temperature": 0}
    body = json.dumps(fields).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


def ask_late(port: int, count: int, wait_seconds: float) -> None:
    """The process of clients that come at once, later, and each want one token."""
    late = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    content = request(1)
    time.sleep(wait_seconds)
    for client in late:
        client.sendall(content)
    for client in late:
        while client.recv(65536):
            pass


def times_of(pieces: list[Piece], length: int) -> list[Piece]:
    """The piece of a stream with which each token came. `length`: of a token's text."""
    times: list[Piece] = []
    rest = b""
    for piece in pieces:
        *events, rest = (rest + piece.data).split(b"\n\n")
        for event in events:
            at = event.find(b'{"id"')
            if at >= 0:  # else the headers, or the end
                text = json.loads(event[at:])["choices"][0]["text"]
                times += [piece] * (len(text) // length)  # tokens that came late come together
    return times


class Settings(NamedTuple):
    """What is measured."""

    streams: int
    tokens: int
    step_seconds: float
    arrivals: int


def figures_of(sent: list[float], streams: list[list[Piece]], tokens: int) -> dict[str, dict[str, float]]:
    """Milliseconds by clock and name: quantiles of the time from sending to each event, and the longest gap."""
    length, found = len(token_text()), {}
    pieces = [times_of(stream, length)[:tokens] for stream in streams]
    for clock in ("noted", "arrived"):
        times = np.array([[getattr(piece, clock) for piece in stream] for stream in pieces])
        # The first step meets the streams' beginnings, which are more work.
        delays = (times - np.array(sent))[:, 1:] * 1e3
        found[clock] = {f"p{part}": float(np.percentile(delays, part)) for part in (50, 90, 99)}
        found[clock] |= {"max": float(delays.max()), "gap": float(np.diff(times[:, 1:], axis=1).max()) * 1e3}
    return found


def measure(python: str, settings: Settings) -> dict[tuple[str, str], dict[str, float]]:
    """One run with a router of its own: figures by way and clock, and the router's CPU time."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint, port = f"ipc://{folder}/controller", free_port()
        config = Path(folder, "router.json")
        config.write_text(json.dumps({"model_path": str(DEMO_MODEL), "controllers": [endpoint], "port": port}))
        router = subprocess.Popen(
            [python, "-m", "trunkline.router", "--config", str(config)], stderr=subprocess.DEVNULL
        )
        receiver, sender = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.Process(target=control, args=(endpoint, listener, settings, sender, router.pid))
        process.start()
        half = settings.tokens * settings.step_seconds / 2
        late = multiprocessing.Process(target=ask_late, args=(port, settings.arrivals, half))
        try:
            wait_for(port)
            time.sleep(1.5)  # until the router has the controller's first word
            before = cpu_seconds(router.pid)
            late.start()
            count, content = settings.streams, request(settings.tokens)
            answers = read_streams([(port, content)] * count + [(listener.getsockname()[1], content)] * count)
            sent: Sent = receiver.recv()
            beside = cpu_seconds(router.pid) - before - sent.busy
            late.join()
        finally:
            process.terminate()
            process.join()
            os.kill(router.pid, signal.SIGTERM)
            router.wait()
    found: dict[tuple[str, str], dict[str, float]] = {}
    routed = figures_of(sent.routed, answers[:count], settings.tokens)
    bare = figures_of(sent.bare, answers[count:], settings.tokens)
    for clock, name in (("arrived", "kernel"), ("noted", "client")):
        added = {part: routed[clock][part] - bare[clock][part] for part in ("p50", "p90", "p99")}
        found |= {("routed", name): routed[clock], ("bare", name): bare[clock], ("added", name): added}
    found["sent", "controller"] = {"gap": float(np.diff(sent.routed).max()) * 1e3}
    per_token = sent.busy / (settings.streams * (settings.tokens - 1))
    found["routed", "cpu"] = {"token": per_token * 1e6, "request": beside / settings.streams * 1e3}
    return found


def control_cold(endpoint: str) -> None:
    """The controller's process for `cold`."""
    Controller(endpoint, 0, 0.0).serve_cold()


class ColdRouter:
    """A router of a tree, with its controller and one client's connection (`cold_router.py`)."""

    def __init__(self, python: str, folder: Path) -> None:
        folder.mkdir()
        port = free_port()
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


def cpu_seconds(pid: int) -> float:
    """Of all threads of a process, since its start."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")  # the first number: nanoseconds on a core
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def free_port() -> int:
    """A port at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


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
    parser.add_argument("--arrivals", type=int, default=0, help="requests that come at once during the run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each tree (%(default)s; 1 with --quick)")
    parser.add_argument("--pythons", default=sys.executable, help="of the trees to compare")
    arguments = parser.parse_args()
    pythons = arguments.pythons.split(",")
    report = Report("router_overhead")
    if arguments.cold:
        cold(pythons, 10 if arguments.quick else arguments.cold, report)
        report.finish(arguments.json)
        return
    tokens, rounds = (100, 1) if arguments.quick else (500, arguments.rounds)
    settings = Settings(arguments.streams, tokens, arguments.step_ms / 1000, arguments.arrivals)
    runs: dict[str, list[dict[tuple[str, str], dict[str, float]]]] = {python: [] for python in pythons}
    for turn in range(rounds):
        for python in pythons if turn % 2 == 0 else reversed(pythons):
            runs[python].append(measure(python, settings))
    for python, found in runs.items():
        for (way, clock), figures in found[0].items():
            for name in figures:
                values = [run[way, clock][name] for run in found]
                value = max(values) if name in ("max", "gap") else float(np.median(values))
                of = {"python": python} if len(pythons) > 1 else {}
                report.add(
                    {**of, "way": way, "clock": clock}, name, value, "us" if name == "token" else "ms", rounds
                )
    report.finish(arguments.json, wide=True)


if __name__ == "__main__":
    main()
