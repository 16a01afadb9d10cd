"""`trunkline serve` on the device, as a user has it (part `serve`): it starts, answers, finds what it has cached,
gives what a schema asks for, streams to many at once, survives the SIGKILL of a worker, and stops."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
from gpu_device import Gpu, Output, Visit
from server_start import Server

COMMAND: Final = (sys.executable, "-c", "from trunkline.deploy.main import main; main()", "serve")
"""A kit's wheels are unpacked and not installed, so there is no `trunkline` to call."""
POLL_S: Final = 0.05
STOP_S: Final = 20.0
START_S: Final = 8.0
"""Time left below which no server is started."""
TEXT: Final = "The quick brown fox jumps over the lazy dog. " * 40
SCHEMA: Final = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SAID_CHARACTERS: Final = 1500
"""Kept of what a server said before something was wrong."""


@dataclass(frozen=True)
class Way:
    """How the demo model is served."""

    name: str
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Streams:
    """As many requests at the same time, and the tokens of each."""

    count: int = 24
    tokens: int = 200


# Beside other checks: all that is free would be taken from them.
WAYS: Final = (
    Way("a tenth of the memory", ("--gpu-memory-fraction", "0.1")),
    Way("fp8 KV", ("--dtype", "bfloat16", "--kv-dtype", "fp8", "--kv-memory", "1GiB")),
)
STREAMS: Final = Streams()


class ServeError(Exception):
    """A server did not do what it has to."""


def check_serving(
    gpu: Gpu, out: Output, visit: Visit, ways: tuple[Way, ...] = WAYS, streams: Streams = STREAMS
) -> None:
    """The part `serve`. What is wrong with one way is a problem, and the next one comes."""
    for way in ways:
        if visit.seconds_left < START_S:
            out.note(f"no time was left to serve with {way.name}")
            continue
        with tempfile.TemporaryDirectory(prefix="gpu-serve-") as folder:
            try:
                check_way(gpu, out, visit, way, streams, Path(folder))
            except (ServeError, httpx.HTTPError) as error:
                said = (Path(folder) / "log").read_text(errors="replace")[-SAID_CHARACTERS:]
                out.problem(f"serve with {way.name}: {type(error).__name__}: {error}\n{said}")


def check_way(gpu: Gpu, out: Output, visit: Visit, way: Way, streams: Streams, folder: Path) -> None:
    """
    Raises:
        ServeError: something is wrong; nothing after it was tried.
        httpx.HTTPError: likewise, the server was not reached or took too long.
    """
    case = {"serve": way.name}

    def took(metric: str, since: float) -> None:
        out.add(case, metric, time.monotonic() - since, "s", 1)

    options = ("--device", gpu.worker["device"], "--disk-tier", f"{folder}/kv:1GiB", *way.options)
    began = time.monotonic()
    with started(options, folder / "log") as (process, server):
        with httpx.Client(base_url=server.url, timeout=30) as client:
            wait_until_ready(client, process, visit)
            took("ready", began)
            for metric in ("first completion", "second completion, cached"):
                began = time.monotonic()
                usage = ask(client, "/v1/completions", completion(TEXT, 48))["usage"]
                took(metric, began)
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            if cached != usage["prompt_tokens"] - 1:
                raise ServeError(f"{cached} of {usage['prompt_tokens']} tokens were cached the second time")
            began = time.monotonic()
            check_schema(client)
            took("chat with a schema", began)
            began = time.monotonic()
            tokens = sum(stream_all(client, streams))
            rate = tokens / (time.monotonic() - began)
            out.add(case, f"{streams.count} streams at once", rate, "tokens/s", 1)
            server.worker().kill()
            began = time.monotonic()
            ask(client, "/v1/completions", completion(TEXT, 48))
            took("answer after SIGKILL of the worker", began)
        began = time.monotonic()
        stop(process)
        took("stop", began)


@contextmanager
def started(options: tuple[str, ...], log: Path) -> Iterator[tuple[subprocess.Popen[bytes], Server]]:
    """A server of the demo model on a free port; nothing of it is left in the end."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with log.open("wb") as said:
        process = subprocess.Popen([*COMMAND, "--port", str(port), *options], stdout=said, stderr=said)
    server = Server(process, port)
    try:
        yield process, server
    finally:
        if process.poll() is None:
            for each in reversed(server.processes()):
                each.kill()
            process.wait()


def wait_until_ready(client: httpx.Client, process: subprocess.Popen[bytes], visit: Visit) -> None:
    """
    Raises:
        ServeError: it ends, or the part's time does.
    """
    while visit.seconds_left > 0:
        if process.poll() is not None:
            raise ServeError(f"it ended with code {process.returncode} before it was ready")
        try:
            if client.get("/health", timeout=2).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(POLL_S)
    raise ServeError("it was not ready in the part's time")


def completion(prompt: str, tokens: int) -> dict[str, Any]:
    return {"model": "trunkline-demo", "prompt": prompt, "max_tokens": tokens, "temperature": 0}


def ask(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """
    Raises:
        ServeError: the answer is an error.
    """
    answer = client.post(path, json=body)
    if answer.status_code != httpx.codes.OK:
        raise ServeError(f"{path} was answered with {answer.status_code}: {answer.text[:300]}")
    found: dict[str, Any] = answer.json()
    return found


def check_schema(client: httpx.Client) -> None:
    """
    Raises:
        ServeError: a chat's answer is not what its schema says.
    """
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    body = {"model": "trunkline-demo", "messages": [{"role": "user", "content": "Give JSON"}], "temperature": 0}
    choice = ask(client, "/v1/chat/completions", {**body, "max_tokens": 64, "response_format": form})["choices"][0]
    text = choice["message"]["content"]
    try:
        fits = isinstance(json.loads(text)["a"], int)
    except (ValueError, KeyError, TypeError):
        fits = False
    if not fits:
        raise ServeError(f"the answer does not fit its schema: {text!r} ({choice['finish_reason']})")


def stream_all(client: httpx.Client, streams: Streams) -> list[int]:
    """Tokens of each, all of them at the same time; prompts of twelve lengths share their beginnings.

    Raises:
        ServeError: one is an error, or has not as many tokens as were asked for.
    """

    def run(index: int) -> int:
        body = completion(TEXT[: 300 + 40 * (index % 12)], streams.tokens)
        body |= {"temperature": 0.7, "seed": index, "ignore_eos": True, "stream": True}
        body["stream_options"] = {"include_usage": True}
        used = 0
        with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != httpx.codes.OK:
                raise ServeError(f"stream {index} was answered with {answer.status_code}")
            for line in answer.iter_lines():
                if line.startswith("data: {") and (usage := json.loads(line[6:]).get("usage")):
                    used = usage["completion_tokens"]
        if used != streams.tokens:
            raise ServeError(f"stream {index} has {used} of {streams.tokens} tokens")
        return used

    with ThreadPoolExecutor(streams.count) as pool:
        return list(pool.map(run, range(streams.count)))


def stop(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C does.

    Raises:
        ServeError: it does not end, or says that something failed.
    """
    process.send_signal(signal.SIGINT)
    try:
        code = process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        raise ServeError(f"it did not stop within {STOP_S:.0f} s of SIGINT") from None
    if code:
        raise ServeError(f"it ended with code {code} after SIGINT")
