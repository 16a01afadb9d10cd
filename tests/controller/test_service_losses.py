"""A controller whose ranks are lost and replaced, over real sockets."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from controller.service_harness import Failure, Router, run_controller, start_ranks
from msgspec.structs import replace
from simulation.oracle import expected_output

from trunkline.controller.config import ControllerConfig
from trunkline.kvstore.adapters import adapter_key, adapter_salt
from trunkline.worker.messages import LEAVE_TOPIC, Leave

pytestmark = pytest.mark.processes


def test_streams_go_on_with_other_ranks(
    config: ControllerConfig, controller: subprocess.Popen[bytes], router: Router
) -> None:
    """Twice: what was said before is not said again, and what comes while nobody is there is kept."""
    prompts = {1: [1, 2, 3, 4, 5], 2: [1, 2, 3], 3: [7, 8]}
    epochs = []
    for number in (1, 2):
        ranks = start_ranks(config, steps_max=20)
        router.wait_state("ready")
        if number == 1:
            router.submit(1, prompts[1], 85, seed=1)
        while len(router.tokens.get(1, [])) < 18 * number:
            router.receive()
        ranks.end()  # its sockets close, as when the process is killed
        epochs.append(ranks.epoch)
        state = router.wait_state("starting")
        assert "is gone" in state.detail
        assert (state.running, state.waiting) == (0, number)
        router.submit(number + 1, prompts[number + 1], 30, seed=number + 1)
    ranks = start_ranks(config)
    router.wait_finished(*prompts)
    for request, prompt in prompts.items():
        assert router.tokens[request] == expected_output(prompt, request, 85 if request == 1 else 30)
        assert router.finished[request] == ("length", "")
    state = router.wait_state("ready")
    assert state.output_tokens == 85 + 30 + 30
    assert state.prompt_tokens == 5 + 3 + 2
    assert epochs[0] < epochs[1] < ranks.epoch


def test_an_adapter_that_new_ranks_cannot_load_ends_only_its_own_requests(
    config: ControllerConfig, tmp_path: Path
) -> None:
    one, two = adapter_key("one", b""), adapter_key("two", b"")
    folders = {name: tmp_path / name for name in ("one", "two")}
    for folder in folders.values():
        folder.mkdir()
    own = replace(config, adapters={name: str(folder) for name, folder in folders.items()})
    with run_controller(own, tmp_path) as (_, router):
        ranks = start_ranks(own, steps_max=6)
        assert [each.name for each in router.wait_state("ready").adapters] == ["one", "two"]
        for request, key in enumerate((b"", one, two), start=1):
            router.submit(request, [1, 2, 3, request], 30, seed=request, salt=adapter_salt(key, b"salt"))
        router.wait_running(3)
        ranks.end()
        router.wait_state("starting")
        folders["one"].rmdir()
        start_ranks(own)
        router.wait_finished(1, 2, 3)
        reason, detail = router.finished[2]
        assert (reason, detail) == ("engine_failed", "adapter 'one' cannot be loaded any more: no such folder")
        for request in (1, 3):
            assert router.tokens[request] == expected_output([1, 2, 3, request], request, 30)
        assert [each.name for each in router.wait_state("ready").adapters] == ["two"]
        router.submit(4, [1, 2, 3], 5, salt=adapter_salt(one, b"salt"))
        router.wait_finished(4)
        assert "is not loaded here" in router.finished[4][1]


PATIENT = """
from trunkline.controller.service import membership
membership.REASON_WITHIN_S = 60.0
"""


@pytest.mark.parametrize("fails_last", [False, True], ids=["failure first", "closed connection first"])
def test_failed_rank_says_why(fails_last: bool, config: ControllerConfig, tmp_path: Path) -> None:
    """And all ranks are told to leave."""
    with run_controller(config, tmp_path, prelude=PATIENT) as (_, router):
        ranks = start_ranks(config, answer=False)
        watchdog = router.context.socket(zmq.SUB)
        watchdog.subscribe(LEAVE_TOPIC)
        watchdog.connect(config.plan_endpoint)
        router.wait_state("ready")
        router.submit(1, [1, 2, 3], 9)
        router.wait_running(1)
        ranks.failure = Failure("out of memory", comes_last=fails_last)
        assert "worker rank 1 failed: out of memory" in router.wait_state("starting").detail
        while True:
            assert watchdog.poll(60_000)
            if msgspec.msgpack.decode(watchdog.recv_multipart()[-1], type=Leave).epoch >= ranks.epoch:
                break
        watchdog.close(linger=0)
        start_ranks(config)
        router.wait_finished(1)
        assert router.tokens[1] == expected_output([1, 2, 3], 0, 9)


def test_a_step_that_is_never_answered_ends_the_epoch(config: ControllerConfig, tmp_path: Path) -> None:
    with run_controller(replace(config, step_timeout_s=2.0), tmp_path) as (_, router):
        ranks = start_ranks(config, answer=False)
        router.wait_state("ready")
        router.submit(1, [1, 2, 3], 9)
        assert "not answered step 1" in router.wait_state("starting").detail
        start_ranks(config)  # the old ones are still there: they do not count, and are waited for
        ranks.end()
        router.wait_finished(1)
        assert router.tokens[1] == expected_output([1, 2, 3], 0, 9)


def test_requests_do_not_wait_for_ever(config: ControllerConfig, tmp_path: Path) -> None:
    with run_controller(replace(config, resume_seconds_max=0.5), tmp_path) as (process, router):
        ranks = start_ranks(config, answer=False)
        router.wait_state("ready")
        router.submit(1, [1, 2, 3], 9)
        router.wait_running(1)
        ranks.end()
        router.wait_finished(1)
        assert router.finished[1][0] == "engine_failed"
        assert "in time" in router.finished[1][1]
        router.submit(2, [1, 2, 3], 9)
        router.wait_finished(2)
        assert router.finished[2][0] == "engine_failed"
        assert process.poll() is None
        start_ranks(config)
        router.wait_state("ready")
        router.submit(3, [1, 2, 3], 9)
        router.wait_finished(3)
        assert router.tokens[3] == expected_output([1, 2, 3], 0, 9)


def test_a_drain_without_ranks_hands_all_requests_over(
    config: ControllerConfig, controller: subprocess.Popen[bytes], router: Router
) -> None:
    ranks = start_ranks(config, answer=False)
    router.wait_state("ready")
    router.submit(1, [1, 2, 3], 9)
    router.wait_running(1)
    ranks.end()
    router.wait_state("starting")
    controller.send_signal(signal.SIGTERM)
    router.wait_finished(1)
    assert router.finished[1][0] == "draining"
    assert controller.wait(timeout=60) == 0


def test_a_test_that_fails_leaves_nothing_behind(config: ControllerConfig, tmp_path: Path) -> None:
    """Neither the controller, nor its ranks, nor a wait for a socket that the test did not close."""
    started: list[Any] = []

    def fail() -> None:
        with run_controller(config, tmp_path) as (process, router):
            started.extend((process, start_ranks(config), router.context.socket(zmq.SUB)))
            router.wait_state("ready")
            raise AssertionError

    with pytest.raises(AssertionError):
        fail()
    process, ranks, socket = started
    assert process.returncode is not None
    assert not ranks.is_alive()
    assert socket.closed


def test_without_the_folder_of_its_index_a_group_serves_all_the_same(
    config: ControllerConfig, tmp_path: Path
) -> None:
    """The disk may be lost; what was on it is computed again."""
    index = str(tmp_path / "gone" / "index.sqlite")
    with run_controller(replace(config, index_path=index, tier_fingerprint="00"), tmp_path) as (_, router):
        start_ranks(config)
        router.wait_state("ready")
        router.submit(1, [1, 2, 3], 3)
        router.wait_finished(1)
        assert router.finished[1] == ("length", "")
