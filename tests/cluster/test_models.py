"""Two models behind one router: real processes, with a group for each model. Each part is started by its own
command, or all by one `serve`.

The models are random checkpoints with different weights and tokenizers, so what one of them said to a prompt, or
keeps of it, is of no use to the other.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster.harness import STOP_SECONDS_MAX, wait_for
from deploy.waiting import free_ports
from router.harness import free_port
from router.model_folders import VOCAB_SIZE, write_tokenizer
from worker.checkpoints import make_checkpoint

from trunkline.router.membership.member import Member
from trunkline.router.membership.static_source import write_members

pytestmark = pytest.mark.processes

START_S = 90.0
CHUNK = 16
LONG = "Tell me about the words of this language, please. " * 4
TRAINED = {"first": "what does the function do and why", "second": "some other words of another language"}
_COMMAND = (sys.executable, "-P", "-m", "trunkline.deploy.cli.app")
_QUIET = ("--log-level", "warning", "--plain-tcp")


class Models:
    """A group for each model, and a router of both."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.ports = {name: free_ports(2) for name in TRAINED}
        self.checkpoints: dict[str, Path] = {}
        for seed, (name, text) in enumerate(TRAINED.items()):
            path = make_checkpoint(folder / f"{name}-checkpoint", vocab_size=VOCAB_SIZE, seed=seed)
            write_tokenizer(path, text)
            self.checkpoints[name] = path
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.start_all(port)

    def start_all(self, port: int) -> None:
        """Start groups and a router."""
        members = self.folder / "members.json"
        write_members(
            members,
            [
                Member(f"group-of-{name}", f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}")
                for name, port in self.ports.items()
            ],
        )
        for name in TRAINED:
            self.start_group(name)
        self.start(
            "router",
            *("router", str(self.checkpoints["first"]), "--served-model-name", "first"),
            *("--more-models", f"second={self.checkpoints['second']}"),
            *("--members", f"static:{members}", "--port", str(port), "--resume-seconds", "0", *_QUIET),
        )

    def start(self, name: str, *words: str) -> None:
        """Run a command."""
        environment = {"TMPDIR": str(self.folder), "XDG_CACHE_HOME": str(self.folder / "cache")}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*_COMMAND, *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment, "NO_COLOR": "1", "COLUMNS": "200"},
            )

    def start_group(self, name: str, *, served_as: str = "") -> None:
        self.start(
            name,
            *("group", str(self.checkpoints[name]), "--served-model-name", served_as or name),
            *("--listen", f"127.0.0.1:{self.ports[name]}", "--tp", "1", "--dtype", "float32", "--threads", "1"),
            *("--kv-memory", "8MiB", "--chunk-size", str(CHUNK), "--disk-tier", "0", *_QUIET),
        )

    def stop(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGTERM)
        self.processes[name].wait(STOP_SECONDS_MAX)

    def ready(self) -> dict[str, bool]:
        """Whether each model's group takes requests."""
        try:
            found: dict[str, bool] = httpx.get(f"{self.url}/health", timeout=60).json()["models"]
        except httpx.HTTPError:
            return {}
        return found

    def wait_ready(self, **models: bool) -> None:
        wait_for(lambda: self.ready() == models, START_S)

    def chat(self, content: str = LONG, **more: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0, **more}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=60)

    def close(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class ServedModels(Models):
    """A `serve` of both."""

    def start_all(self, port: int) -> None:
        """Start the cluster."""
        second = {"model": str(self.checkpoints["second"]), "tp": 2, "kv-memory": "6MiB", "groups": 2}
        options: dict[str, Any] = {
            "model": str(self.checkpoints["first"]),
            "served-model-name": "first",
            "port": port,
            "tp": 1,
            "dtype": "float32",
            "device": "cpu",
            "kv-memory": "8MiB",
            "chunk-size": CHUNK,
            "disk-tier": f"{self.folder / 'kv'}:64MiB",
            "models": {"second": second},
        }
        (self.folder / "serve.yaml").write_text(json.dumps(options))  # JSON is YAML
        self.start("serve", "serve", "--config", str(self.folder / "serve.yaml"))


@pytest.fixture(scope="module")
def models() -> Iterator[Models]:
    yield from running(Models)


@pytest.fixture(scope="module")
def served() -> Iterator[Models]:
    yield from running(ServedModels)


def running(kind: type[Models]) -> Iterator[Models]:
    made = kind(Path(tempfile.mkdtemp(prefix="tl-models-")))
    try:
        made.wait_ready(first=True, second=True)
        yield made
    finally:
        for log in made.folder.glob("*.log"):
            print(log.name, log.read_text(errors="replace")[-2000:])
        made.close()


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def cached(response: httpx.Response) -> int:
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_each_model_answers_by_its_name(models: Models) -> None:
    listed = httpx.get(f"{models.url}/v1/models", timeout=60).json()["data"]
    assert [card["id"] for card in listed] == ["first", "second"]
    first, second = (models.chat(model=name) for name in ("first", "second"))
    assert text_of(first) != text_of(second)
    assert max(cached(first), cached(second)) < CHUNK, "what one model keeps is of no use to the other"
    for name, before in (("first", first), ("second", second)):
        again = models.chat(model=name)
        assert (again.json()["model"], text_of(again)) == (name, text_of(before))
        assert cached(again) >= CHUNK
    assert text_of(models.chat()) == text_of(first)
    unknown = models.chat(model="third")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


def test_a_session_stays_with_its_model(models: Models) -> None:
    made = httpx.post(f"{models.url}/v1/sessions", json={"model": "second"}, timeout=60).json()
    texts = [text_of(models.chat(f"{number}. {LONG}", session_id=made["id"])) for number in range(2)]
    assert texts[0] == text_of(models.chat(f"0. {LONG}", model="second"))
    moved = models.chat("2", session_id=made["id"], model="first")
    assert moved.json()["model"] == "first"
    shown = httpx.get(f"{models.url}/v1/sessions/{made['id']}", timeout=60).json()
    assert (shown["model"], shown["turns"]) == ("first", 3)


def test_the_others_serve_while_one_models_group_is_away(models: Models) -> None:
    models.stop("second")
    models.wait_ready(first=True, second=False)
    refused = models.chat(model="second")
    assert refused.status_code == 503
    assert "group-of-second" in refused.json()["error"]["message"]
    assert "group-of-first" not in refused.json()["error"]["message"]
    assert text_of(models.chat(model="first"))
    models.start_group("second", served_as="first")  # a mistake: it has another tokenizer than that model
    problem = "its model 'first' has another tokenizer"
    wait_for(lambda: problem in httpx.get(f"{models.url}/health", timeout=60).text, START_S)
    assert text_of(models.chat(model="first"))
    models.stop("second")
    models.start_group("second")
    models.wait_ready(first=True, second=True)
    assert text_of(models.chat(model="second"))


def test_one_command_serves_both(served: Models) -> None:
    """Chat, sessions and schemas of each model, and what the cluster says of itself."""
    answers = {name: served.chat(model=name) for name in ("first", "second")}
    assert text_of(answers["first"]) != text_of(answers["second"])
    counted = {name: answer.json()["usage"]["prompt_tokens"] for name, answer in answers.items()}
    for name in ("first", "second"):
        again = served.chat(model=name)
        assert text_of(again) == text_of(answers[name])
        assert cached(again) >= CHUNK
        prompt = {"model": name, "messages": [{"role": "user", "content": LONG}]}
        tokens = httpx.post(f"{served.url}/tokenize", json=prompt, timeout=60).json()
        assert tokens["count"] == counted[name], "by the model's own tokenizer and template"
    assert counted["first"] != counted["second"]
    for name in ("first", "second"):
        made = httpx.post(f"{served.url}/v1/sessions", json={"model": name}, timeout=60).json()
        turn = served.chat(session_id=made["id"])
        assert (turn.json()["model"], text_of(turn)) == (name, text_of(answers[name]))
        assert text_of(served.chat("And now?", session_id=made["id"]))
        schema = f'<schema name="of-{name}"><module name="m">{LONG}</module></schema>'
        stored = httpx.post(f"{served.url}/v1/schemas", json={"model": name, "pml": schema}, timeout=60)
        assert stored.status_code == 201, stored.text
        prompted = served.chat("What?", model=name, pml=f'<prompt schema="of-{name}"><m/></prompt>')
        assert text_of(prompted)
        assert cached(prompted) >= CHUNK
    assert served.chat(model="third").status_code == 404
    metrics = httpx.get(f"{served.url}/metrics", timeout=60).text
    assert [f'model="{name}"' in metrics for name in ("first", "second")] == [True, True]


def test_one_commands_group_dies_and_comes_back(served: Models) -> None:
    before = text_of(served.chat(model="second"))
    groups = httpx.get(f"{served.url}/health", timeout=60).json()["controllers"]
    assert len(groups) == 3
    environment = {**os.environ, "TMPDIR": str(served.folder), "XDG_CACHE_HOME": str(served.folder / "cache")}

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*_COMMAND, *words], env=environment, capture_output=True, text=True, check=False, timeout=150
        )

    refused = command("scale", "4")
    assert "several models" in refused.stdout + refused.stderr
    assert command("drain", "0").returncode == 0
    served.wait_ready(first=False, second=True)
    assert text_of(served.chat(model="second")) == before
    assert command("undrain", "0").returncode == 0
    served.wait_ready(first=True, second=True)
    assert text_of(served.chat(model="first"))
