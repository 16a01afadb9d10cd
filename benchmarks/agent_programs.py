"""What Codex and Claude Code, the programs themselves, find cached of each prompt, with the demo model.

    python benchmarks/agent_programs.py [--quick] [--programs codex,claude] [--json PATH]

The programs are looked for on the PATH: `npm install -g @openai/codex @anthropic-ai/claude-code`. A demo cluster
is served with a longer context than its own, and each program asks it something ten times (`--quick`: three times)
in one conversation. The demo model calls no tools by itself, so a proxy stands between them. It writes into the
requests that a tool is to be called where the user has asked something, with the only arguments that the tool may
have, so that nothing else runs on this machine, and which text follows its result. Nothing else is changed.

The ideal of a request is the prompt before it and that prompt's answer. Counts are those of the server's `usage`.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
from report import Report, argument_parser

Object = dict[str, Any]
CONTEXT: Final = 32_768
START_SECONDS_MAX: Final = 120.0
TURN_SECONDS_MAX: Final = 600.0
ANSWER_TOKENS: Final = 200
NOTE: Final = "the file is read, 1729"
SAID: Final = "It says 1729."
_READY: Final = re.compile(r"^Ready after .* s: (http://\S+)$", re.MULTILINE)
_PROGRAM: Final = "import sys; from trunkline.deploy import main; sys.exit(main.main())"
_CODEX: Final = """
model = "trunkline-demo"
model_provider = "trunkline"
model_context_window = {context}
approval_policy = "never"
sandbox_mode = "danger-full-access"
[model_providers.trunkline]
name = "Trunkline"
base_url = "{url}/v1"
wire_api = "responses"
"""


class Count(NamedTuple):
    """Tokens of a request."""

    prompt: int
    cached: int
    answer: int


class Proxy(ThreadingHTTPServer):
    """Passes requests on to the server, has tools called, and notes what was cached."""

    daemon_threads = True

    def __init__(self, upstream: str, note: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = upstream
        self.note = note
        # Without `tool_choice: none`, which would leave the tools out of the prompt: no call can begin.
        call = httpx.post(f"{upstream}/tokenize", json={"prompt": "<tool_call>", "add_special_tokens": False})
        self._text: Object = {"guided_choice": [SAID], "logit_bias": {str(call.json()["tokens"][0]): -100}}
        self.counts: list[Count] = []
        self.failures: list[str] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        """Where the programs find the server."""
        return f"http://127.0.0.1:{self.server_port}"

    def rewrite(self, path: str, body: Object) -> bool:
        """Have a tool called where the user has asked something; return whether a request is one of the
        conversation, and not one beside it, such as for its title."""
        if path.startswith("/v1/responses"):
            return self._rewrite_response(body)
        return path.startswith("/v1/messages") and "count_tokens" not in path and self._rewrite_message(body)

    def _rewrite_response(self, body: Object) -> bool:
        body["max_output_tokens"] = ANSWER_TOKENS
        tool = next((tool for tool in body.get("tools", []) if tool.get("name") == "exec_command"), None)
        if tool is None:
            return False
        tool["parameters"] = _only("cmd", f"cat {self.note}")
        asked = body["input"][-1].get("role") == "user"
        body |= {"tool_choice": {"type": "function", "name": tool["name"]}} if asked else self._text
        return True

    def _rewrite_message(self, body: Object) -> bool:
        body["max_tokens"] = ANSWER_TOKENS
        tool = next((tool for tool in body.get("tools", []) if tool.get("name") == "Read"), None)
        if tool is None:
            return False
        tool["input_schema"] = _only("file_path", str(self.note))
        content = body["messages"][-1]["content"]
        answered = isinstance(content, list) and any(block["type"] == "tool_result" for block in content)
        body |= self._text if answered else {"tool_choice": {"type": "tool", "name": tool["name"]}}
        return True


def _only(name: str, value: str) -> Object:
    """Return the schema of the only arguments that a tool may have."""
    return {
        "type": "object",
        "properties": {name: {"type": "string", "enum": [value]}},
        "required": [name],
        "additionalProperties": False,
    }


class _Handler(BaseHTTPRequestHandler):
    server: Proxy
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._pass(None)

    def do_HEAD(self) -> None:
        self._pass(None)

    def do_POST(self) -> None:
        self._pass(self.rfile.read(int(self.headers.get("content-length", 0))))

    def _pass(self, body: bytes | None) -> None:
        counted = False
        if body:
            fields = json.loads(body)
            counted = self.server.rewrite(self.path, fields)
            body = json.dumps(fields).encode()
        kept = ("authorization", "x-api-key", "anthropic-version", "anthropic-beta", "content-type")
        headers = {name: value for name, value in self.headers.items() if name.lower() in kept}
        answer = httpx.request(
            self.command, self.server.upstream + self.path, content=body, headers=headers, timeout=TURN_SECONDS_MAX
        )
        if answer.status_code >= 400 and self.path.startswith("/v1/"):
            self.server.failures.append(f"{answer.status_code} {self.path}: {answer.text[:300]}")
        if counted and answer.status_code == 200:
            self.server.counts.append(count_of(answer.text))
        self.send_response(answer.status_code)
        self.send_header("Content-Type", answer.headers.get("content-type", "application/json"))
        self.send_header("Content-Length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def count_of(text: str) -> Count:
    """Return the counts of an answer in either form, streamed or whole."""
    found: Object = {}
    for line in text.splitlines():
        payload = line.removeprefix("data: ")
        if payload.startswith("{"):
            event = json.loads(payload)
            for place in (event, event.get("response"), event.get("message")):
                if isinstance(place, dict) and isinstance(place.get("usage"), dict):
                    found |= {name: value for name, value in place["usage"].items() if value is not None}
    if "cache_read_input_tokens" in found:
        cached = found["cache_read_input_tokens"]
        prompt = found["input_tokens"] + cached + found.get("cache_creation_input_tokens", 0)
        return Count(prompt, cached, found["output_tokens"])
    return Count(found["input_tokens"], found["input_tokens_details"]["cached_tokens"], found["output_tokens"])


def shares(counts: list[Count]) -> list[float]:
    """Return the part of the ideal that was found of each prompt but the first."""
    pairs = itertools.pairwise(counts)
    return [min(1.0, now.cached / (before.prompt + before.answer - 1)) for before, now in pairs]


class Cluster:
    """A demo cluster with a long context."""

    def __init__(self, folder: Path) -> None:
        log = folder / "log"
        options = ["--max-context", str(CONTEXT), "--rope-scaling", "yarn", "--served-model-name"]
        options += ["trunkline-demo,claude-*", "--port", "0", "--records", f"sqlite:{folder}/records"]
        options += ["--disk-tier", f"{folder}/kv:1GiB"]
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, "serve", "demo", *options],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | {"NO_COLOR": "1", "COLUMNS": "200"},
            )
        end = time.monotonic() + START_SECONDS_MAX
        while (ready := _READY.search(log.read_text())) is None:
            if self._process.poll() is not None or time.monotonic() > end:
                self.stop()
                raise SystemExit(f"the cluster did not start:\n{log.read_text()}")
            time.sleep(0.1)
        self.url = ready[1]

    def stop(self) -> None:
        """End all its processes."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)


def ask(program: str, url: str, home: Path, turn: int) -> None:
    """Let a program ask something, in the conversation of the turns before."""
    text = f"Turn {turn}: what is in note.txt?"
    if program == "codex":
        (home / "config.toml").write_text(_CODEX.format(url=url, context=CONTEXT), encoding="utf-8")
        going_on = ["resume", "--last"] if turn else []
        command = ["codex", "exec", *going_on, "--skip-git-repo-check", text]
    else:
        command = ["claude", "-p", "--model", "claude-demo", *(["--continue"] if turn else []), text]
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "CODEX_HOME": str(home),
        "CLAUDE_CONFIG_DIR": str(home),
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "NO_PROXY": "127.0.0.1",
    }
    done = subprocess.run(
        command,
        cwd=home / "work",
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=TURN_SECONDS_MAX,
    )
    if done.returncode:
        raise SystemExit(f"{program} failed in turn {turn}:\n{done.stdout[-1000:]}{done.stderr[-1000:]}")


def measure(report: Report, program: str, cluster: Cluster, turns: int) -> None:
    """Hold one conversation and report what was found of its prompts."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "work").mkdir()
        note = home / "work" / "note.txt"
        note.write_text(NOTE, encoding="utf-8")
        proxy = Proxy(cluster.url, note)
        for turn in range(turns):
            ask(program, proxy.url, home, turn)
        proxy.shutdown()
        proxy.server_close()
    case = {"program": program}
    found = shares(proxy.counts)
    report.add(case, "requests", float(len(proxy.counts)), "1", 1)
    report.add(case, "failed requests", float(len(proxy.failures)), "1", 1)
    report.add(case, "first prompt", float(proxy.counts[0].prompt), "tokens", 1)
    report.add(case, "last prompt", float(proxy.counts[-1].prompt), "tokens", 1)
    report.add(case, "least part of the ideal", 100 * min(found), "%", 1)
    for number, (share, count) in enumerate(zip(found, proxy.counts[1:], strict=True), 2):
        print(f"{program} request {number}: {count.cached} of {count.prompt} tokens, {share:.2%} of the ideal")
    for failure in proxy.failures:
        print(failure)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--programs", default="codex,claude", help="which of them, with commas between")
    arguments = parser.parse_args()
    report = Report("agent_programs")
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder))
        try:
            for program in arguments.programs.split(","):
                if shutil.which(program) is None:
                    print(f"{program} is not installed", file=sys.stderr)
                    continue
                measure(report, program, cluster, 3 if arguments.quick else 10)
        finally:
            cluster.stop()
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
