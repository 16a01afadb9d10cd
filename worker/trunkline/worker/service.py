"""Run a rank as a process: receive plans and send results by ZeroMQ, and notice the death of controller or peers.

      main thread      SUB: plans ──► Runner.execute ──► PUSH: results (rank 0)
                       moves, probes ──► TierService (threads of its own, also for peers' questions)
      outbox thread    outcomes of moves, answers to probes ──► PUSH
      watchdog thread  monitors the SUB connection; if the controller is gone, or has ended this rank's epoch,
                       makes the process leave

A process lives for one epoch of its group (docs/protocol.md): it says hello, is welcomed, and only then meets the
other ranks and loads.
Idle means blocked in a poll: a rank that waits costs nothing. Only while a grammar is compiled, beside the steps,
and while memory is taken for the next prompts (`pool_memory.MemoryAhead`), the main thread wakes up more often.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec
import structlog
import torch
import zmq
from zmq.utils.monitor import recv_monitor_message

from trunkline.controller.reports import LoadProgress, WorkerFailed, WorkerReady
from trunkline.runtime.process import SHORT_SLICES_NS, USUAL_SLICES, RareLog, ask_for_slices, report_status
from trunkline.runtime.tracing import start as start_tracing
from trunkline.runtime.wire_peer import HANDSHAKE_FAILED
from trunkline.worker.config import WorkerConfig
from trunkline.worker.errors import PeerLostError, RankRefusedError, WorkerError, can_never_work
from trunkline.worker.link import Link, Outbox
from trunkline.worker.messages import (
    CompileGrammar,
    ForgetGrammar,
    Leave,
    LoadAdapter,
    Refused,
    Shutdown,
    StepPlan,
    TierOrder,
    UnloadAdapter,
    Welcome,
)
from trunkline.worker.pool_memory import MemoryAhead
from trunkline.worker.runner import Runner
from trunkline.worker.step_traces import StepTraces
from trunkline.worker.tiers.tier_service import TierService

EXIT_CONFIG: Final = 2
"""Exit code of a rank whose configuration can never work: starting it again would be of no use."""
EXIT_LEFT: Final = 3
"""Exit code of a rank whose epoch is over, or whose controller is gone: nothing is wrong with it, and another
process is to take its place."""
_HELLO_EVERY_S: Final = 1.0
_READY_EVERY_S: Final = 1.0
"""Seconds between repetitions of `WorkerReady` until the first plan: a controller may start late, or restart
before it sends a plan."""
_POLL_MS: Final = 250
"""Longest sleep of the idle main thread before it looks whether the controller is gone."""
_COMPILING_POLL_MS: Final = 3
"""Longest sleep of the main thread while a grammar is compiled: a request waits for this rank's report."""
_LEAVE_WITHIN_S: Final = 0.7
"""Time that the main thread has to leave by itself once the controller is gone, or the rank has given up."""

log = structlog.get_logger()
_rare = RareLog("trunkline.worker")


class Watchdog:
    """Notices that the controller is gone, or has ended this rank's epoch; makes sure that the process leaves."""

    def __init__(self, link: Link) -> None:
        self.controller_gone = threading.Event()
        self.epoch = 0
        """The epoch of this rank; 0: none yet."""
        self._exit_code: int | None = None
        self._link = link
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def give_up(self, exit_code: int) -> None:
        """Note that the main thread is about to report a failure and to leave with this code.

        From now on an order to leave changes neither the report nor the code: the order may arrive before the
        report has been sent.
        """
        self._exit_code = exit_code

    def stop(self) -> None:
        """End the watchdog: the main thread has left its loop."""
        self._left.set()
        self._link.stop_monitor()
        self._thread.join()
        # Not by the thread, which may end first: the end of the monitoring is told, and libzmq waits for ever for
        # a monitor that is closed.
        self._link.monitor.close(linger=0)

    def _watch(self) -> None:
        leave = self._link.open_leave()
        try:
            if not self._controller_leaves(self._link.monitor, leave):
                return
            self.controller_gone.set()
            # The main thread may be in a long step or blocked in a collective whose peer has died as well; no
            # Python exception can reach it there.
            self._end_late()
        finally:
            leave.close(linger=0)  # by the thread that used it: sockets are not thread-safe

    def _controller_leaves(self, monitor: zmq.Socket[bytes], leave: zmq.Socket[bytes]) -> bool:
        """Wait until the controller is gone; return False if the main thread left first."""
        connected = False
        poller = zmq.Poller()
        poller.register(monitor, zmq.POLLIN)
        poller.register(leave, zmq.POLLIN)
        while True:
            for socket, _ in poller.poll():
                if socket is leave:
                    self._obey(leave.recv_multipart()[-1])
                    continue
                event = recv_monitor_message(monitor)
                kind = event["event"]
                if kind == zmq.EVENT_MONITOR_STOPPED:
                    return False
                if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    connected, self._link.is_refused = True, False
                    self._link.connect_leave(leave)
                elif connected:
                    return True
                elif kind & HANDSHAKE_FAILED:
                    self._link.is_refused = True
                    reason = self._link.peer.explain(event)
                    _rare.warning("the controller refuses this rank", time.monotonic(), reason=reason)

    def _end_late(self) -> None:
        """End the process unless the main thread leaves in time."""
        if not self._left.wait(_LEAVE_WITHIN_S):
            os._exit(EXIT_LEFT if self._exit_code is None else self._exit_code)

    def _obey(self, payload: bytes) -> None:
        try:
            order = msgspec.msgpack.decode(payload, type=Leave)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return
        if not 0 < self.epoch <= order.epoch:
            return
        if self._exit_code is not None:
            self._end_late()
            return
        log.warning("this rank's epoch is over", epoch=self.epoch)
        # Whatever the main thread does, also if it waits for a GPU that waits for a dead peer: its state is worth
        # nothing without the other ranks', and what is on disk says itself whether it is whole.
        os._exit(EXIT_LEFT)


def serve(config: WorkerConfig, load: Callable[[WorkerConfig, Callable[[str, float], None]], Runner]) -> int:
    """Run a rank until it is told to leave; return the exit code.

    Args:
        load: makes the runner: `loading.load_runner`.

    A failure of any kind is reported as `WorkerFailed`. The exit code is then 1; `EXIT_CONFIG` if the failure will
    come again however often the rank is started; `EXIT_LEFT` if another rank or the controller has failed.
    """
    ask_for_slices(SHORT_SLICES_NS)  # for ZeroMQ's threads and the watchdog, which begin here
    link = Link(config)
    watchdog = Watchdog(link)
    watchdog.start()
    ask_for_slices(USUAL_SLICES)
    try:
        welcome = _wait_for_welcome(link, watchdog)
        if welcome is None:
            return EXIT_LEFT if watchdog.controller_gone.is_set() else 0
        return _serve_epoch(_welcomed(config, welcome), link, watchdog, load)
    except PeerLostError as error:
        # Nothing is wrong with this rank; but without the others its epoch is over.
        watchdog.give_up(EXIT_LEFT)
        log.warning("the group is lost", error=str(error))
        link.offer(WorkerFailed(config.rank, str(error), link.incarnation, is_consequence=True))
        return EXIT_LEFT
    except RankRefusedError as error:  # the controller knows
        log.error(str(error))
        return 1
    except Exception as error:  # whatever it is, the controller must hear of it
        is_final = can_never_work(error)
        code = EXIT_CONFIG if is_final else 1
        watchdog.give_up(code)
        if is_final:
            log.error("this configuration cannot work", error=str(error))
        else:
            log.error("rank failed", error=str(error), exc_info=True)
        reason = str(error) if isinstance(error, WorkerError) else f"{type(error).__name__}: {error}"
        link.offer(WorkerFailed(config.rank, reason, link.incarnation))
        return code
    finally:
        watchdog.stop()
        link.close()


def _welcomed(config: WorkerConfig, welcome: Welcome) -> WorkerConfig:
    """Return the configuration of a rank that belongs to an epoch, with the controller's limits of a step."""
    if welcome.token_budget > 1 and welcome.max_rows > 0:
        config = msgspec.structs.replace(config, token_budget=welcome.token_budget, max_rows=welcome.max_rows)
    return config.of_epoch(welcome.epoch)


def _wait_for_welcome(link: Link, watchdog: Watchdog) -> Welcome | None:
    """Say hello until the controller welcomes this process to an epoch; return None if the process is to leave."""
    next_hello = 0.0
    report_status(link.status_path, "starting")
    while not watchdog.controller_gone.is_set():
        now = time.monotonic()
        if now >= next_hello:
            link.connect_again()
            link.say_hello()
            next_hello = now + _HELLO_EVERY_S
        message = link.receive(_POLL_MS)
        if isinstance(message, Shutdown):
            return None
        if isinstance(message, Refused):
            raise RankRefusedError(f"the controller refuses this rank: {message.reason}")
        if isinstance(message, Welcome):
            watchdog.epoch = message.epoch
            link.enter(message.epoch)
            return message
    log.error("the controller is gone")
    return None


def _serve_epoch(
    config: WorkerConfig,
    link: Link,
    watchdog: Watchdog,
    load: Callable[[WorkerConfig, Callable[[str, float], None]], Runner],
) -> int:
    outbox = Outbox(config, link)
    try:
        runner = load(config, _progress(config, link, watchdog))
        tiers = TierService(config, runner.copier, outbox.put, runner.head_shard)
        if config.rank == 0:
            tiers.try_remote()
        tracer = start_tracing(config.otlp_endpoint, "worker", f"{config.group}/rank-{config.rank}")
        traces = StepTraces(tracer, config.rank, str(config.group_label), config.epoch)
        try:
            with torch.inference_mode():  # once: `in_inference_mode`
                return _loop(config, link, watchdog, runner, tiers, traces)
        finally:
            traces.close()
    finally:
        outbox.close()


def _progress(config: WorkerConfig, link: Link, watchdog: Watchdog) -> Callable[[str, float], None]:
    def progress(stage: str, fraction: float) -> None:
        if watchdog.controller_gone.is_set():
            raise PeerLostError("the controller left while this rank was loading")
        link.offer(LoadProgress(config.rank, stage, fraction))

    return progress


def _ready(config: WorkerConfig, runner: Runner, tiers: TierService) -> WorkerReady:
    """Return the report that this rank can compute steps."""
    return WorkerReady(
        rank=config.rank,
        epoch=config.epoch,
        pid=os.getpid(),
        num_blocks=runner.num_blocks,
        block_bytes=runner.block_bytes,
        device=config.device,
        host_slots=runner.host_slots,
        swap_us_per_block=runner.swap_us_per_block,
        disk_slots=tiers.disk_slots,
        tier_problem=tiers.problem,
        has_remote=tiers.has_remote,
        exports=tiers.exports,
        **runner.windows,
    )


def _loop(
    config: WorkerConfig, link: Link, watchdog: Watchdog, runner: Runner, tiers: TierService, traces: StepTraces
) -> int:
    ready = _ready(config, runner, tiers)
    log.info("ready", blocks=runner.num_blocks, block_bytes=runner.block_bytes, device=config.device)
    report_status(config.status_path, "ready", epoch=config.epoch)
    started, next_ready = False, 0.0
    ahead = MemoryAhead(runner.pool, None if runner.copier is None else runner.copier.host)
    is_calm, prepares, patience_ms = False, False, 0
    while True:
        # Between two calm steps both processors wait for this loop, so nothing that can wait is done there. Other
        # steps come before long: a row begins a block, if nothing else happens.
        if not is_calm:
            now = time.monotonic()
            if not started and now >= next_ready:
                link.offer(ready)
                next_ready = now + _READY_EVERY_S
            runner.launched.report_ended(link.report)
            prepares = runner.is_preparing
            poll_ms = _COMPILING_POLL_MS if prepares else ahead.patience_ms(_POLL_MS)
            patience_ms = runner.launched.patience_ms(poll_ms)
        message = link.receive(patience_ms)
        is_calm = isinstance(message, StepPlan) and not prepares and _go_on(message, link, runner, traces)
        if is_calm:
            continue
        started |= message is not None and not isinstance(message, Welcome)  # which may come twice
        if isinstance(message, StepPlan):
            began = time.monotonic()
            runner.launch(message)
            runner.launched.report_ended(link.report)
            if runner.copier is not None:
                runner.copier.settle()
            ahead.note(message)
            if traces.is_on:
                traces.step(message, began, time.monotonic())
            ahead.cover()
        elif isinstance(message, TierOrder):
            tiers.take(message)
        elif isinstance(message, CompileGrammar):
            runner.compile_grammar(message)
        elif isinstance(message, ForgetGrammar):
            runner.forget_grammar(message.grammar)
        elif isinstance(message, LoadAdapter):
            runner.adapters.load(message)
        elif isinstance(message, UnloadAdapter):
            runner.adapters.unload(message.key)
        elif isinstance(message, Shutdown):
            log.info("shutting down")
            return 0
        elif watchdog.controller_gone.is_set():
            log.error("the controller is gone")
            return EXIT_LEFT
        elif message is None and not runner.is_preparing:
            ahead.touch()
            if traces.is_on:
                traces.idle()
        runner.check()
        for report in runner.reports():
            link.report(report)


def _go_on(plan: StepPlan, link: Link, runner: Runner, traces: StepTraces) -> bool:
    """Run and report a calm step, if the plan is that of one; return whether it is."""
    began = time.monotonic()
    if not runner.go_on(plan, link.report):
        return False
    if traces.is_on:
        traces.step(plan, began, time.monotonic())
    return True
