"""A controller and its ranks as processes, ranks killed and frozen in the middle of streams: the texts are those
of an undisturbed run, and nobody but the ranks notices more than a pause.

Whoever starts lost ranks again is the test itself here: at once, as a supervisor does.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from controller.service_harness import Router
from worker.checkpoints import make_checkpoint
from worker.driver import VOCAB_SIZE, run_config

from trunkline.controller.config import ControllerConfig
from trunkline.controller.messages import FlushCache, Submit
from trunkline.kvstore.chunks import pack_int32
from trunkline.worker.messages import Sampling
from trunkline.worker.service import EXIT_LEFT

pytestmark = pytest.mark.processes

TP = 2
OUTPUT = 400
REFORMED_SECONDS_MAX = 60.0
RANDOM = random.Random(5)
PROMPTS = {i: [RANDOM.randrange(VOCAB_SIZE) for _ in range(20 + i)] for i in range(1, 7)}
SAMPLING = {i: Sampling(temperature=0.0 if i % 2 else 1.0, seed=i) for i in PROMPTS}


class Group:
    """A controller, its ranks, and a router by hand. `tend` starts ranks that have ended again."""

    def __init__(self, folder: Path) -> None:
        plan, report = f"ipc://{folder}/plan", f"ipc://{folder}/report"
        controller = ControllerConfig(
            tp=TP,
            plan_endpoint=plan,
            report_endpoint=report,
            router_endpoint=f"ipc://{folder}/router",
            chunk_size=8,
            max_context=512,
            token_budget=64,
            max_rows=8,
            index_path=str(folder / "index"),
            tier_fingerprint="17",
            step_timeout_s=2.0,
            router_silence_seconds_max=120.0,
            debug_checks=True,
            parent_pid=os.getpid(),
        )
        model = make_checkpoint(folder / "model")
        self._commands = [self._command(folder, "controller", controller)]
        for rank in range(TP):
            config = run_config(
                model,
                rank=rank,
                tp=TP,
                plan_endpoint=plan,
                report_endpoint=report,
                rendezvous=f"file://{folder}/rendezvous",
                pool_blocks=400,
                host_memory_bytes=1 << 20,
                disk_path=str(folder / f"slab-{rank}"),
                disk_bytes=4 << 20,
                tier_fingerprint="17",
                parent_pid=os.getpid(),
            )
            self._commands.append(self._command(folder, "worker", config, f"rank-{rank}"))
        self.controller = subprocess.Popen(self._commands[0])
        self.ranks = [subprocess.Popen(command) for command in self._commands[1:]]
        self.exit_codes: list[int] = []
        self.router = Router(controller)

    @staticmethod
    def _command(folder: Path, role: str, config: msgspec.Struct, name: str = "") -> list[str]:
        path = folder / f"{name or role}.json"
        path.write_bytes(msgspec.json.encode(config))
        return [sys.executable, "-m", f"trunkline.{role}", "--config", str(path)]

    def tend(self) -> None:
        for rank, process in enumerate(self.ranks):
            if (code := process.poll()) is not None:
                self.exit_codes.append(code)
                self.ranks[rank] = subprocess.Popen(self._commands[1 + rank])

    def wait(self, condition: Callable[[], bool]) -> None:
        """Read what the controller says until it has said this."""
        deadline = time.monotonic() + REFORMED_SECONDS_MAX
        while not condition():
            assert time.monotonic() < deadline, self.router.state
            assert self.controller.poll() is None, "the controller died"
            self.tend()
            if self.router.socket.poll(50):
                self.router.receive()

    def wait_ready(self) -> None:
        while True:
            try:
                self.router.wait_state("ready")
            except TimeoutError:
                self.tend()
            else:
                return

    def submit(self, request: int, prompt: int) -> None:
        tokens = PROMPTS[prompt]
        self.router.send(Submit(request, pack_int32(tokens), len(tokens), OUTPUT, SAMPLING[prompt]))

    def close(self) -> None:
        self.router.close()
        for process in [self.controller, *self.ranks]:
            process.kill()
            process.wait()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    group = Group(tmp_path)
    yield group
    group.close()


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_killed_and_frozen_ranks_are_not_noticed_in_the_texts(group: Group) -> None:
    router = group.router
    group.wait_ready()
    for prompt in PROMPTS:
        group.submit(prompt, prompt)
    group.wait(lambda: len(router.finished) == len(PROMPTS))
    expected = {prompt: router.tokens[prompt] for prompt in PROMPTS}
    assert {len(tokens) for tokens in expected.values()} == {OUTPUT}
    router.send(FlushCache(1))
    group.wait(lambda: router.flushed is not None)

    for number, victims in enumerate([[0], [1], []], start=1):
        first = 100 * number
        requests = {first + prompt: prompt for prompt in PROMPTS}
        for request, prompt in requests.items():
            group.submit(request, prompt)
        group.wait(lambda requests=requests: all(len(router.tokens.get(r, [])) > 10 for r in requests))  # type: ignore[misc]
        assert not set(requests) & set(router.finished), "nobody is in the middle of a text any more"
        old = [process.pid for process in group.ranks]
        group.exit_codes.clear()
        for rank in victims:
            group.ranks[rank].kill()
        if not victims:
            os.kill(group.ranks[1].pid, signal.SIGSTOP)
        group.wait(lambda requests=requests: set(requests) <= set(router.finished))  # type: ignore[misc]
        for request, prompt in requests.items():
            assert router.tokens[request] == expected[prompt], (victims, prompt)
            assert router.finished[request] == ("length", "")
        assert not set(old) & {process.pid for process in group.ranks}, "every rank of the old epoch has left"
        assert set(group.exit_codes) <= {-signal.SIGKILL, EXIT_LEFT, 1}
        assert not any(psutil.pid_exists(pid) for pid in old)
    state = router.wait_state("ready")
    assert state.output_tokens == 4 * len(PROMPTS) * OUTPUT, "no token is counted twice"
    assert state.blocks_total == state.blocks_free + state.blocks_cached
    group.controller.send_signal(signal.SIGTERM)
    assert group.controller.wait(timeout=20) == 0
    assert [process.wait(timeout=10) for process in group.ranks] == [0, 0]
