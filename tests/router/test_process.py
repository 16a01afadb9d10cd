"""The process itself: signals, ports, imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from router.fake_controller import FakeController
from router.harness import ANSWER, DEMO_MODEL, MESSAGES, make_answer, wait_until
from router.process_calls import router_process

from trunkline.router.config import RouterConfig, load_config
from trunkline.router.text.tokenizer import Tokenizer

pytestmark = pytest.mark.processes
CHAT: dict[str, Any] = {"messages": MESSAGES}


@pytest.fixture
def controller(place: Path, tokenizer: Tokenizer) -> Iterator[FakeController]:
    """A controller of its own."""
    fake = FakeController(f"ipc://{place}/c", make_answer(tokenizer)).start()
    yield fake
    fake.stop()


def in_background(url: str) -> tuple[threading.Thread, list[httpx.Response]]:
    results: list[httpx.Response] = []
    thread = threading.Thread(
        target=lambda: results.append(httpx.post(f"{url}/v1/chat/completions", json=CHAT, timeout=60))
    )
    thread.start()
    return thread, results


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def sleeps(pid: int) -> bool:
    """Whether a look finds almost no CPU time. A loaded machine does later what a start leaves for later."""
    before = cpu_seconds(pid)
    time.sleep(1.5)
    return cpu_seconds(pid) - before <= 0.05


def test_sigterm_drains_and_leaves(place: Path, controller: FakeController) -> None:
    with router_process(place, controller, parent_pid=os.getpid()) as (process, url):
        title = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert title.startswith(b"trunkline: router")
        assert any(sleeps(process.pid) for _ in range(10)), "an idle router sleeps"
        process.send_signal(signal.SIGINT)  # a Ctrl-C meant for the supervisor
        controller.behaviour.hold = True
        thread, results = in_background(url)
        wait_until(lambda: controller.live == 1)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{url}/health", timeout=60).status_code == 503)
        assert httpx.post(f"{url}/v1/chat/completions", json=CHAT, timeout=60).status_code == 503
        controller.behaviour.hold = False
        thread.join()
        assert results[0].json()["choices"][0]["message"]["content"] == ANSWER
        assert process.wait(60) == 0


@pytest.mark.parametrize("second", [False, True])
def test_what_does_not_finish_is_cut(place: Path, controller: FakeController, second: bool) -> None:
    with router_process(place, controller, drain_seconds=60.0 if second else 0.3) as (process, url):
        controller.behaviour.hold = True
        thread, results = in_background(url)
        wait_until(lambda: controller.live == 1)
        process.send_signal(signal.SIGINT)
        if second:
            time.sleep(0.3)
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == (1 if second else 0)
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()
        thread.join()
        if results:
            assert results[0].status_code == 503
        wait_until(lambda: controller.live == 0)


@pytest.mark.parametrize(
    ("fields", "code", "said"),
    [
        ({"port": 1, "host": "192.0.2.1"}, 1, "cannot listen on 192.0.2.1:1"),
        ({"tenants": "/nowhere/tenants.json"}, 1, "tenants.json"),
        ({"controllers": ["carrier-pigeon://1"]}, 2, "endpoints begin with ipc:// or tcp://"),
    ],
)
def test_a_start_that_fails_says_why(place: Path, fields: dict[str, Any], code: int, said: str) -> None:
    """By its exit code, too: 2 for what can never work, so that it is not tried again."""
    config = place / "router.json"
    config.write_bytes(
        msgspec.json.encode({"model_path": str(DEMO_MODEL), "controllers": ["ipc:///nowhere"], **fields})
    )
    command = [sys.executable, "-m", "trunkline.router", "--config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_needs_no_torch() -> None:
    program = f"""
import sys
from trunkline.router import __main__, server
from trunkline.router.config import RouterConfig
from trunkline.router.service import RouterService
from trunkline.router.text.tokenizer import Tokenizer
config = RouterConfig(model_path={str(DEMO_MODEL)!r}, controllers=["ipc:///tmp/none"])
server.make_server(RouterService(config, Tokenizer(config.model_path)))
assert not {{"torch", "transformers"}} & set(sys.modules), "heavy imports"
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"controllers": []}, "controllers"),
        ({"controllers": ["http://x"]}, "controllers"),
        ({"controllers": ["ipc://a", "ipc://a"]}, "twice"),
        ({"model_path": "/nowhere"}, "tokenizer.json"),
        ({"port": 70000}, "port"),
        ({"port": "x"}, "port"),
        ({"prot": 1}, "prot"),
        ({"max_context": -1}, "max_context"),
        ({"max_body_bytes": 1}, "max_body_bytes"),
        ({"max_inflight": 0}, "max_inflight"),
        ({"drain_seconds": -1}, "drain_seconds"),
        ({"request_timeout_seconds": -1}, "request_timeout_seconds"),
        ({"silence_seconds": 1}, "silence_seconds"),
        ({"log_level": "loud"}, "log_level"),
        ({"host": ""}, "host"),
        ({"tenant_limits": {"requests": 0}}, "tenant_limits: requests is 0"),
        ({"tenant_header": "X Tenant"}, "tenant_header: 'X Tenant'"),
        ({"routers": 0}, "routers: 0"),
        ({"idempotency_ttl_seconds": 0.5}, "idempotency_ttl_seconds: 0.5"),
        ({"parent_pid": -1}, "parent_pid"),
    ],
)
def test_bad_configurations(place: Path, change: dict[str, Any], message: str) -> None:
    fields = {"model_path": str(DEMO_MODEL), "controllers": ["ipc://a"]} | change
    path = place / "router.json"
    path.write_bytes(msgspec.json.encode(fields))
    with pytest.raises(ValueError, match=message):
        load_config(str(path))


def test_names(place: Path) -> None:
    config = RouterConfig(model_path=str(place), controllers=["ipc://a"], served_model_aliases=["b"])
    assert config.all_models[0].all_names == (place.name, "b")
