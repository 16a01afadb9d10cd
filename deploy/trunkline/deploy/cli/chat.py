"""`trunkline chat`: a small client for the terminal, on the public HTTP API only.

Answers stream as server-sent events. After each one a line says how fast it came and how many prompt
tokens the cluster did not have to compute again: the second turn of a conversation should show nearly all.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
from httpx_sse import EventSource
from rich.console import Console

from trunkline.deploy.config.option_values import check_range
from trunkline.deploy.errors import DeployError
from trunkline.deploy.supervisor.run_folder import client_headers, server_url

with contextlib.suppress(ImportError):
    import readline  # noqa: F401  (importing it gives `input` history and line editing)

_PROMPT: Final = "> "


@dataclass(frozen=True)
class ChatOptions:
    """The options of `trunkline chat`. None: the server's default."""

    port: int | None = None
    url: str = ""
    """Port or address of the server (`run_folder.server_url`)."""
    model: str | None = None
    system: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    api_key_file: str = ""
    """File with a key; "" for the one that `run_folder.client_key` finds, if any."""


@dataclass
class Answer:
    """An answer, as far as it has come."""

    started_s: float
    text: str = ""
    first_token_s: float | None = None
    ended_s: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)
    stopped: bool = False

    def summary(self) -> str:
        """Return speed, reuse and waiting time in one line."""
        parts = []
        tokens = self.usage.get("completion_tokens")
        if self.first_token_s is not None:
            decoding_s = self.ended_s - self.first_token_s
            if tokens is not None and tokens > 1 and decoding_s > 0:
                parts.append(f"{tokens} tokens, {(tokens - 1) / decoding_s:.1f} tokens/s")
            parts.append(f"first after {(self.first_token_s - self.started_s) * 1000:.0f} ms")
        if "prompt_tokens" in self.usage:
            cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            parts.append(f"{cached} of {self.usage['prompt_tokens']} prompt tokens cached")
        if self.stopped:
            parts.append("stopped")
        return " · ".join(parts)


class ChatError(DeployError):
    """The server cannot be reached or refused a request."""


class Session:
    """A conversation with one server."""

    def __init__(self, client: httpx.Client, model: str, options: ChatOptions) -> None:
        self.system = options.system
        self._client = client
        self._model = model
        self._options = options
        self._turns: list[dict[str, str]] = []

    def reset(self) -> None:
        """Forget everything said so far, but not the system prompt."""
        self._turns.clear()

    def ask(self, text: str) -> Generator[Answer, None, None]:
        """Send a message, and yield the answer each time it has grown and once more when it is complete.

        Closing the iterator early disconnects, which makes the server stop computing; what came so far
        stays in the conversation.

        Raises:
            ChatError: The server refused, failed or went away. If nothing of the answer had come, the message is
                not part of the conversation.
        """
        turn = {"role": "user", "content": text}
        system = [{"role": "system", "content": self.system}] if self.system else []
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [*system, *self._turns, turn],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._options.max_tokens is not None:
            body["max_tokens"] = self._options.max_tokens
        if self._options.temperature is not None:
            body["temperature"] = self._options.temperature
        answer = Answer(started_s=time.monotonic())
        try:
            for event in self._events(body):
                if _take(answer, event):
                    yield answer
            answer.ended_s = time.monotonic()
            yield answer
        finally:
            if answer.text:
                self._turns += [turn, {"role": "assistant", "content": answer.text}]

    def _events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the JSON objects of the answer's event stream."""
        with (
            _mapped_errors(str(self._client.base_url)),
            self._client.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            if response.status_code != 200:
                response.read()
                raise ChatError(_error_text(response))
            for sent in EventSource(response).iter_sse():
                if sent.data == "[DONE]":
                    return
                event = sent.json()
                if "error" in event:
                    raise ChatError(str(event["error"].get("message", event["error"])))
                yield event
            raise ChatError("the server ended the answer before its end")


def chat(options: ChatOptions) -> int:
    """Talk until the person leaves or the input ends; return the exit code."""
    check_range("--max-tokens", options.max_tokens, 1, 1 << 30)
    check_range("--temperature", options.temperature, 0, 2)
    console = Console(stderr=True, highlight=False)
    interactive = sys.stdin.isatty()
    timeout = httpx.Timeout(10.0, read=600.0)  # a queue may be long; silence for ten minutes is not
    url = server_url(options.port, options.url)
    headers = client_headers(url, options.api_key_file)
    with _mapped_errors(url):
        opened = httpx.Client(base_url=url, timeout=timeout, headers=headers)
    with opened as client:
        session = Session(client, options.model or _first_model(client), options)
        if interactive:
            console.print("Type a message. /reset, /system TEXT, /quit. Ctrl-C stops an answer.", style="dim")
        for text in _messages(interactive):
            if text in ("/quit", "/exit"):
                break
            if text.startswith("/"):
                console.print(_command(session, text), style="dim")
                continue
            try:
                answer = _show(session, text)
            except ChatError as error:
                if not interactive:
                    raise
                console.print(f"Error: {error}", style="red", markup=False)
                continue
            console.print(answer.summary(), style="dim")
    return 0


def _show(session: Session, text: str) -> Answer:
    """Send a message, and print the answer on standard output as it grows."""
    shown = 0
    answer = Answer(started_s=time.monotonic())
    growing = session.ask(text)
    try:
        for answer in growing:
            sys.stdout.write(answer.text[shown:])
            sys.stdout.flush()
            shown = len(answer.text)
    except KeyboardInterrupt:
        answer.stopped = True
        answer.ended_s = time.monotonic()
    finally:
        growing.close()  # disconnects, if the answer is not complete
        sys.stdout.write("\n")
        sys.stdout.flush()
    return answer


def _messages(interactive: bool) -> Iterator[str]:
    """Yield the lines that were typed or piped, without empty ones."""
    while True:
        try:
            line = input(_PROMPT if interactive else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            if not interactive:
                return
            print("\n(/quit or Ctrl-D leaves)", file=sys.stderr)
            continue
        if line:
            yield line


def _command(session: Session, text: str) -> str:
    name, _, argument = text.partition(" ")
    match name:
        case "/reset":
            session.reset()
            return "The conversation starts anew."
        case "/system":
            session.system = argument.strip()
            session.reset()
            return f"System prompt: {session.system or '(none)'}. The conversation starts anew."
        case _:
            return f"There is no command {name}; there are /reset, /system TEXT and /quit."


def _take(answer: Answer, event: dict[str, Any]) -> bool:
    """Add an event to the answer; return whether the text grew."""
    if event.get("usage"):
        answer.usage = event["usage"]
    grown = False
    for choice in event.get("choices", []):
        piece = (choice.get("delta") or {}).get("content")
        if piece:
            now = time.monotonic()
            if answer.first_token_s is None:
                answer.first_token_s = now
            answer.ended_s = now
            answer.text += piece
            grown = True
    return grown


def _first_model(client: httpx.Client) -> str:
    with _mapped_errors(str(client.base_url)):
        response = client.get("/v1/models")
        if response.status_code != 200:
            raise ChatError(_error_text(response))
        models = response.json().get("data") or []
    if not models:
        raise ChatError(f"the server at {client.base_url} serves no model")
    return str(models[0]["id"])


def _error_text(response: httpx.Response) -> str:
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:200]
    return f"the server answered {response.status_code}: {message}"


@contextlib.contextmanager
def _mapped_errors(url: str) -> Iterator[None]:
    """Turn errors of the HTTP library into `ChatError`."""
    try:
        yield
    except httpx.ConnectError as error:
        raise ChatError(
            f"no server answers at {url}; start one with `trunkline serve`, or give its address with --url"
        ) from error
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise ChatError(f"{url} is no address of a server: {error}") from error
    except httpx.HTTPError as error:
        raise ChatError(f"the connection to {url} failed: {error or type(error).__name__}") from error
    except json.JSONDecodeError as error:
        raise ChatError(f"{url} does not speak the expected protocol: {error}") from error
