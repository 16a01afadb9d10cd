"""The controller process over real sockets: simulated ranks on one side, a router by hand on the other."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from controller.service_harness import BLOCKS, Ranks, Router, run_controller, start_ranks
from deploy.waiting import wait_for
from msgspec.structs import replace
from simulation.oracle import expected_output

from trunkline.controller.config import ControllerConfig
from trunkline.controller.messages import Abort, FlushCache, Ping, Submit
from trunkline.controller.reports import StepResult
from trunkline.controller.service.service import EXIT_CONFIG
from trunkline.kvstore.chunks import pack_int32
from trunkline.worker.messages import Sampling

pytestmark = pytest.mark.processes


@pytest.fixture
def ranks(config: ControllerConfig, controller: subprocess.Popen[bytes]) -> Ranks:
    return start_ranks(config)


def test_one_group_serves_and_survives_nonsense(ranks: Ranks, router: Router) -> None:
    """One start for all that leaves the group as it was."""
    streams_reach_the_router(router)
    abort_and_flush_free_all_blocks(ranks, router)
    results_of_another_epoch_are_ignored(ranks, router)
    garbage_does_no_harm(router)
    absurd_requests_are_refused_one_by_one(router)


def streams_reach_the_router(router: Router) -> None:
    state = router.wait_state("ready")
    assert (state.blocks_total, state.max_context) == (BLOCKS, 96)
    prompts = {i: [i % 3, 5, 6, 7, 8, i] for i in range(1, 9)}
    for i, prompt in prompts.items():
        router.submit(i, prompt, 12, seed=i)
    router.wait_finished(*prompts)
    for i, prompt in prompts.items():
        assert router.tokens[i] == expected_output(prompt, i, 12)
        assert router.finished[i] == ("length", "")
    router.submit(20, prompts[1], 12, seed=1)
    router.wait_finished(20)
    assert router.cached[20] == 5
    assert router.tokens[20] == router.tokens[1]


def test_late_subscriber_misses_no_step(
    config: ControllerConfig, controller: subprocess.Popen[bytes], router: Router
) -> None:
    """The broadcast waits for the last rank's subscription, even if all ranks say that they are ready."""
    ranks = Ranks(config)
    ranks.holds_back = {1}
    for rank in range(config.tp):
        ranks.say_hello(rank)
    ranks.start()
    router.wait_state("starting")
    router.submit(1, [1, 2, 3], 3)
    router.wait_finished(1)
    assert router.finished[1][0] == "engine_failed"
    assert "starting" in router.finished[1][1]
    time.sleep(0.3)
    router.state = None
    router.send(Ping(0))
    while router.state is None:
        router.receive()
    assert router.state.status == "starting"
    ranks.holds_back = set()
    router.wait_state("ready")
    router.submit(2, [1, 2, 3], 3)
    router.wait_finished(2)
    wait_for(lambda: ranks.steps_seen[1] == ranks.steps_seen[0] >= 3)


def abort_and_flush_free_all_blocks(ranks: Ranks, router: Router) -> None:
    ranks.steps.last = ranks.steps_seen[0] + 2  # it says something, and cannot end by itself
    router.submit(30, [1, 2, 3, 4, 5], 80)
    while 30 not in router.tokens:
        router.receive()
    router.send(Abort(30))
    router.wait_finished(30)
    ranks.answer = True
    assert router.finished[30][0] == "abort"
    assert router.wait_state("ready").running == 0
    router.send(FlushCache(7))
    while router.flushed is None:
        router.receive()
    assert (router.flushed.ticket, router.flushed.blocks_freed > 0) == (7, True)
    assert router.wait_state("ready").blocks_free == BLOCKS


def results_of_another_epoch_are_ignored(ranks: Ranks, router: Router) -> None:
    ranks.send(StepResult(step=5, epoch=0, tokens=b"", elapsed_us=1))
    router.submit(31, [1, 2, 3], 5)
    router.wait_finished(31)
    assert router.tokens[31] == expected_output([1, 2, 3], 0, 5)


def test_silent_router_loses_its_requests(config: ControllerConfig, tmp_path: Path) -> None:
    impatient = replace(config, router_silence_seconds_max=1.5)
    with run_controller(impatient, tmp_path) as (_, router):
        ranks = start_ranks(impatient)
        router.wait_state("ready")
        ranks.answer = False  # the request cannot end by itself
        router.submit(1, [1, 2, 3], 80)
        wait_for(lambda: ranks.steps_seen[0] > 0)  # it runs, and its router says nothing any more

        def is_lost() -> bool:
            with closing(Router(impatient)) as other:  # one that asks twice may be silent for too long itself
                return other.wait_state("ready").running == 0

        wait_for(is_lost)


def test_a_controller_that_stood_still_takes_no_router_for_silent(
    config: ControllerConfig, tmp_path: Path
) -> None:
    """That time is no silence of theirs, even if what they say arrives later than the first look at them."""
    impatient = replace(config, router_silence_seconds_max=4.9)
    with run_controller(impatient, tmp_path) as (controller, router):
        ranks = start_ranks(impatient)
        router.wait_state("ready")
        ranks.answer = False
        router.submit(1, [1, 2, 3], 80)
        wait_for(lambda: ranks.steps_seen[0] > 0)
        controller.send_signal(signal.SIGSTOP)
        time.sleep(5.0)
        controller.send_signal(signal.SIGCONT)
        time.sleep(0.5)
        router.send(Ping(0))
        ranks.answer = True
        router.wait_finished(1)
        assert router.finished[1] == ("length", "")


def garbage_does_no_harm(router: Router) -> None:
    """Fields beyond the known ones are skipped, at any depth but this."""
    nested = b"\x93\xa5abort\x01" + b"\x91" * 200_000 + b"\x01"
    for payload in (
        b"",
        b"\xff\xff",
        msgspec.msgpack.encode(["submit", 1]),
        msgspec.msgpack.encode({"a": 1}),
        nested,
    ):
        router.socket.send(payload)
    router.send(Submit(32, b"\x01", 1, 5, Sampling()))
    router.wait_finished(32)
    assert router.finished[32][0] == "invalid"
    router.submit(33, [1, 2, 3], 5)
    router.wait_finished(33)
    assert router.tokens[33] == expected_output([1, 2, 3], 0, 5)


def absurd_requests_are_refused_one_by_one(router: Router) -> None:
    good = Submit(50, pack_int32([1, 2, 3]), 3, 5, Sampling())
    absurd: list[dict[str, Any]] = [
        {"stop_token_ids": [1 << 40]},
        {"tokens": pack_int32([1, -2, 3])},
        {"prompt_len": -9},
        {"max_tokens": -(1 << 63)},
        {"sampling": Sampling(temperature=float("nan"))},
    ]
    for number, change in enumerate(absurd, start=40):
        router.send(replace(good, request=number, **change))
        router.wait_finished(number)
        assert router.finished[number][0] == "invalid"
    router.send(replace(good, max_tokens=(1 << 64) - 1))
    router.wait_finished(50)
    assert len(router.tokens[50]) == 96 - 3


def test_abort_reaches_no_other_router(ranks: Ranks, router: Router, config: ControllerConfig) -> None:
    router.wait_state("ready")
    second, third = Router(config), Router(config)
    for other in (second, third):
        other.wait_state("ready")
    ranks.answer = False
    third.submit(5, [1, 2, 3], 80)
    while third.wait_state("ready").running != 1:
        time.sleep(0.02)
    for number in (2 << 32 | 5, 3 << 32 | 5, -(1 << 63)):  # bits that would turn index 1 into 3
        router.send(Abort(number))
    router.send(FlushCache(1))
    while router.flushed is None:  # by then the aborts have been read
        router.receive()
    while third.socket.poll(200):
        third.receive()
    assert not third.finished
    for other in (second, third):
        other.close()


def test_too_few_blocks_are_reported(
    config: ControllerConfig, controller: subprocess.Popen[bytes], router: Router
) -> None:
    ranks = Ranks(config, blocks=1)
    router.wait_state("starting")
    for rank in range(config.tp):
        ranks.say_hello(rank)
    ranks.start()
    while router.state is None or router.state.status != "failed":
        router.receive()
    assert "at least 2 blocks" in router.state.detail
    assert controller.wait(timeout=60) == EXIT_CONFIG


def test_draining_is_announced(ranks: Ranks, router: Router, controller: subprocess.Popen[bytes]) -> None:
    """Without being asked: a router that waited for its next ping would go on sending requests."""
    router.wait_state("ready")
    ranks.answer = False
    router.submit(1, [1, 2, 3], 80)
    router.wait_running(1)
    controller.send_signal(signal.SIGTERM)
    while router.state is None or router.state.status != "draining":
        router.receive()
    controller.send_signal(signal.SIGTERM)  # do not wait any longer
    router.wait_finished(1)
    assert router.finished[1][0] == "draining"
    assert controller.wait(timeout=60) == 0


def test_sigterm_drains(ranks: Ranks, router: Router, controller: subprocess.Popen[bytes]) -> None:
    router.wait_state("ready")
    router.submit(1, [1, 2, 3, 4, 5], 60)
    while 1 not in router.tokens:
        router.receive()
    controller.send_signal(signal.SIGTERM)
    router.submit(2, [1], 1)
    router.wait_finished(1)
    assert router.finished[1] == ("length", "")
    if 2 in router.finished and router.finished[2][0] != "length":  # it may arrive before the signal
        assert router.finished[2][0] == "draining"
    assert controller.wait(timeout=60) == 0
    assert ranks.shut_down.wait(60)


def ended(folder: Path, config: bytes) -> subprocess.CompletedProcess[str]:
    """Return a controller that ends by itself."""
    path = folder / "controller.json"
    path.write_bytes(config)
    command = [sys.executable, "-m", "trunkline.controller", "--config", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_address_in_use_is_named(config: ControllerConfig, tmp_path: Path) -> None:
    unusable = replace(config, router_endpoint=f"ipc://{tmp_path}/nowhere/router")
    done = ended(tmp_path, msgspec.json.encode(unusable))
    assert done.returncode == 1
    assert "cannot listen" in done.stderr
    assert "Traceback" not in done.stderr


def test_bad_configuration_is_named(tmp_path: Path) -> None:
    config = b'{"plan_endpoint": "ipc://a", "report_endpoint": "ipc://a", "router_endpoint": "ipc://b"}'
    done = ended(tmp_path, config)
    assert done.returncode == 2
    assert "must differ" in done.stderr
