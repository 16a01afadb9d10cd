"""First tokens of cached prompts, beside decode steps: time, and CPU time by process.

    python benchmarks/cached_prompt.py [--quick] [--rounds 20] [--programs PATH,PATH] [--model small]
                                       [--dtype bfloat16] [--tokens 2048] [--pause 0.03] [--disk-tier 0]
                                       [--stages] [--json PATH]

Runs `trunkline serve` of each program (default: this environment's) with one worker, all at once, and asks them by
turns, one request at a time, over one connection that stays open. A round sends a new prompt to each, then the
same with another last token (measured), and then with a third one, from which it decodes (measured, too: what its
first token has of its own is that the next step begins beside it, and that its end does not come with it). The
client is a plain socket, because a client library takes milliseconds of the same processors. CPU time is the
kernel's count, as in token_cpu.py, and has what a request costs behind its last token. With `--pause 0` a request
comes straight behind the one before, and what servers still do for that one is in its time. With `--stages` the
first of the two measured requests is traced, and its way from the first byte to the token told in parts
(trace_stages.py); CPU time then has the making and sending of spans in it.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import socket
import sys
import time
from contextlib import ExitStack, closing
from itertools import pairwise
from statistics import median
from typing import Final

import psutil
from otlp_collector import Collector
from report import Report, argument_parser
from server_start import PATIENCE_S, Server, serving
from small_model import small_model
from token_cpu import cpu_us, found
from trace_stages import is_whole, stages

from trunkline.runtime.tracing import wall_offset_ns

DECODED: Final = 24
LOOK_S: Final = 0.03
"""Time between two looks for spans."""


class Client:
    """One connection to a server."""

    def __init__(self, server: Server, seed: int) -> None:
        self._host, self._port = "127.0.0.1", int(server.url.rsplit(":", 1)[1])
        self._socket = socket.create_connection((self._host, self._port), PATIENCE_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._rng = random.Random(seed)
        self.sent_ns = 0
        """When the last request was sent, by the monotonic clock."""

    def prompt(self, tokens: int) -> list[int]:
        """A prompt that nobody has sent before."""
        return [self._rng.randrange(300, 4000) for _ in range(tokens)]

    def times(self, prompt: list[int], tokens: int, trace: str = "") -> list[float]:
        """Send a streamed completion; return when each token came, in seconds from the first byte sent.

        Args:
            trace: id of the trace, 32 hexadecimal digits; "": the request is not traced.

        Raises:
            SystemExit: The server did not answer with a stream.
        """
        body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
        content = json.dumps({**body, "ignore_eos": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
        head += f"traceparent: 00-{trace}-{'cd' * 8}-01\r\n" if trace else ""
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        begun, answer, times = time.perf_counter(), b"", []
        self.sent_ns = time.monotonic_ns()
        self._socket.sendall(head.encode() + content)
        while not answer.endswith(b"0\r\n\r\n"):
            part = self._socket.recv(1 << 16)
            answer += part
            if not part or not answer.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"the server did not stream: {answer[:500]!r}")
            times += [time.perf_counter() - begun] * part.count(b'"text"')
        return times


class Traces:
    """Has requests traced, and takes the spans."""

    def __init__(self) -> None:
        self._collector = Collector()
        self._offset_ns = wall_offset_ns()
        self.options = ("--otlp-endpoint", self._collector.endpoint, "--trace-sample", "0")
        """Of a server: requests are traced whose client says so."""

    def stages(self, trace: str, sent_ns: int, first_s: float) -> dict[str, float]:
        """Return the parts of a request's way in milliseconds.

        Args:
            sent_ns: By the monotonic clock.
            first_s: From then to the first token.

        Raises:
            SystemExit: The servers did not send all spans in time.
        """
        end = time.perf_counter() + PATIENCE_S
        while not is_whole(spans := self._collector.of(trace)):
            if time.perf_counter() > end:
                raise SystemExit(f"of a traced request only {sorted(seen.name for seen in spans)} came")
            time.sleep(LOOK_S)
        sent_ns += self._offset_ns
        return stages(spans, sent_ns, sent_ns + round(1e9 * first_s))

    def close(self) -> None:
        self._collector.close()


def measured(
    client: Client, roles: dict[str, psutil.Process], tokens: int, pause_s: float, traces: Traces | None
) -> dict[str, float]:
    """Return the figures of one round: milliseconds, and microseconds of CPU."""
    prompt = client.prompt(tokens)
    client.times(prompt, 2)
    time.sleep(pause_s)
    before = {role: cpu_us(process)[1] for role, process in roles.items()}
    trace = secrets.token_hex(16) if traces else ""
    first = client.times([*prompt[:-1], *client.prompt(1)], 1, trace)[0]
    sent_ns = client.sent_ns
    time.sleep(pause_s)
    spent = {f"{role} CPU": cpu_us(process)[1] - before[role] for role, process in roles.items()}
    stream = client.times([*prompt[:-1], *client.prompt(1)], DECODED)
    step = median(after - at for at, after in pairwise(stream[1:]))
    parts = traces.stages(trace, sent_ns, first) if traces else {}
    times = {"first token": 1e3 * first, "decode step": 1e3 * step, "beyond a step": 1e3 * (first - step)}
    times |= {"first of many": 1e3 * stream[0], "first of many, beyond a step": 1e3 * (stream[0] - step)}
    return {**times, **parts, **spent}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--programs", default=os.path.join(os.path.dirname(sys.executable), "trunkline"))
    parser.add_argument("--model", default="small", help="what to serve; small: the model of small_model.py")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=2048, help="of a prompt (%(default)s)")
    parser.add_argument("--pause", type=float, default=0.03, help="seconds behind each request (%(default)s)")
    parser.add_argument("--disk-tier", default="0", help="of each server, as its option")
    parser.add_argument("--stages", action="store_true", help="tell the first token's time in parts, from traces")
    arguments = parser.parse_args()
    programs, rounds = arguments.programs.split(","), 4 if arguments.quick else arguments.rounds
    model = str(small_model()) if arguments.model == "small" else arguments.model
    figures: dict[str, list[dict[str, float]]] = {program: [] for program in programs}
    with ExitStack() as stack:
        os.environ["TRUNKLINE_DTYPE"] = arguments.dtype
        traces = stack.enter_context(closing(Traces())) if arguments.stages else None
        options = ("--disk-tier", arguments.disk_tier, *(traces.options if traces else ()))
        servers = {program: stack.enter_context(serving(program, model, 1, *options)) for program in programs}
        clients, roles = {}, {}
        for program, server in servers.items():
            server.wait_until_it_serves()
            server.wait_for_a_token()
            clients[program], roles[program] = Client(server, 1), found(server)
        for turn in range(rounds):
            for program in programs[turn % len(programs) :] + programs[: turn % len(programs)]:
                client, role = clients[program], roles[program]
                figures[program].append(measured(client, role, arguments.tokens, arguments.pause, traces))
    report = Report("cached_prompt")
    for program, values in figures.items():
        case = {"program": program, "model": arguments.model, "tokens": arguments.tokens}
        for what in values[0]:
            unit = "us" if what.endswith("CPU") else "ms"
            report.add(case, what, median(value[what] for value in values), unit, rounds)
            report.add(case, f"{what}, least", min(value[what] for value in values), unit, rounds)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
