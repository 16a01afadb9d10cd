"""Workers made by the fork server, as the supervisor sees them: real processes, each with a configuration that it
refuses, so that it says so and ends."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from deploy.waiting import wait_for

from trunkline.deploy.supervisor import forks
from trunkline.deploy.supervisor.forks import ForkedWorker, ForkServer, command_line
from trunkline.worker import fork_server

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only"),
]


class Supervisor:
    """What a supervisor does about its fork server."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.born: list[ForkedWorker] = []
        self.forks = ForkServer(self.selector, self.born.append)

    def fork(self, config: Path) -> ForkedWorker:
        worker = self.forks.fork(command_line("trunkline.worker", "--config", str(config)))
        assert worker is not None
        return worker

    def turn(self) -> None:
        """Take what has come."""
        for key, mask in self.selector.select(0.01):
            key.data(mask)

    def has_born(self, worker: ForkedWorker) -> bool:
        """Take what has come; return whether a worker has its process id."""
        self.turn()
        return worker.pid > 0

    def wait_for_the_end_of(self, worker: ForkedWorker) -> str:
        """Return what a worker has written until its end."""

        def has_ended() -> bool:
            self.turn()
            return worker.poll() is not None

        wait_for(has_ended)
        return worker.stdout.read().decode()

    @property
    def server(self) -> subprocess.Popen[bytes]:
        assert self.forks._server is not None
        return self.forks._server.process


@pytest.fixture(scope="module")
def supervisor() -> Iterator[Supervisor]:
    """One for all tests of this file, since each fork server imports torch. Its first one was begun before it."""
    forks.begin()
    made = Supervisor()
    yield made
    made.forks.close()
    made.selector.close()
    for worker in made.born:
        worker.stdout.close()


def test_workers_are_children_in_sessions_of_their_own(supervisor: Supervisor, tmp_path: Path) -> None:
    """Their outputs, exit codes and ends are those of workers that are started by their command lines."""
    for name in ("a", "b"):
        worker = supervisor.fork(tmp_path / name)
        assert not forks._begun
        said = supervisor.wait_for_the_end_of(worker)
        assert worker.returncode == 2
        assert (
            said
            == f"trunkline.worker: {tmp_path}/{name}: [Errno 2] No such file or directory: '{tmp_path}/{name}'\n"
        )
    assert supervisor.born[-1].pid != supervisor.born[-2].pid

    server = supervisor.server
    assert os.getsid(server.pid) == server.pid
    os.mkfifo(tmp_path / "fifo")  # a worker that reads it does not go on
    waiting = supervisor.fork(tmp_path / "fifo")
    wait_for(lambda: supervisor.has_born(waiting))
    assert os.getsid(waiting.pid) == os.getpgid(waiting.pid) == waiting.pid
    waiting.send_signal(signal.SIGTERM)
    supervisor.wait_for_the_end_of(waiting)
    assert waiting.returncode == -signal.SIGTERM


def test_what_a_worker_is_told_before_it_exists(supervisor: Supervisor, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    worker = supervisor.fork(tmp_path / "fifo")
    assert not worker.pid
    assert worker.poll() is None
    worker.send_signal(signal.SIGKILL)
    supervisor.wait_for_the_end_of(worker)
    assert worker.returncode == -signal.SIGKILL


def test_a_fork_server_that_dies_is_not_needed(supervisor: Supervisor, tmp_path: Path) -> None:
    """What it was asked for is started by its command line, and the next worker has another fork server. The same
    happens if it answers that its program is not the present one."""
    for refuses in (False, True):
        supervisor.forks._running()
        server = supervisor.server
        server.send_signal(signal.SIGSTOP)  # or it might make the worker before it dies
        worker = supervisor.fork(tmp_path / "none")
        if refuses:
            supervisor.forks._answered(supervisor.forks._unborn.popleft(), 0)
        else:
            server.kill()
        assert "No such file" in supervisor.wait_for_the_end_of(worker)
        assert worker.returncode == 2
        assert supervisor.forks._server is None
        assert server.returncode == -signal.SIGKILL


def test_what_a_worker_leaves_behind_is_reaped(supervisor: Supervisor, tmp_path: Path) -> None:
    """A child of a worker that ends while another one is made becomes the supervisor's."""
    os.mkfifo(fifo := tmp_path / "fifo")
    worker = ForkedWorker(["/bin/sh", "-c", f"(: < {fifo}) & exit 3"])
    supervisor.forks._made.append(worker)
    forks._adopt_orphans(True)
    try:
        worker.spawn()
        wait_for(lambda: worker.poll() is not None)
    finally:
        forks._adopt_orphans(False)
    assert worker.returncode == 3
    supervisor.forks.reap()
    assert worker in supervisor.forks._made, "its child runs, and is this process's"
    fifo.open("wb").close()  # the child has read all that there is

    def is_forgotten() -> bool:
        supervisor.forks.reap()
        return worker not in supervisor.forks._made

    wait_for(is_forgotten)
    with pytest.raises(ChildProcessError):
        os.waitpid(-worker.pid, os.WNOHANG)
    worker.stdout.close()


def test_changed_files_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "some_module_of_a_test.py"
    path.write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    __import__(path.stem)
    try:
        before = fork_server._files_read()
        assert fork_server._files_read() == before
        assert before[str(path)] == path.stat().st_mtime_ns
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
        assert fork_server._files_read() != before
    finally:
        del sys.modules[path.stem]


def test_other_command_lines_are_not_forked(supervisor: Supervisor) -> None:
    for argv in (
        command_line("trunkline.router", "--config", "a"),
        ("env", "A=1", *command_line("trunkline.worker", "--config", "a")),
        command_line("trunkline.worker", "a"),
    ):
        assert supervisor.forks.fork(argv) is None


def test_a_worker_that_could_not_use_a_gpu_begins_anew(tmp_path: Path) -> None:
    """Torch says so of a process that was forked from one that has asked the driver, which is imitated here."""
    code = """if True:
        import os, socket, sys
        from pathlib import Path
        import torch
        from trunkline.worker import fork_server
        torch.cuda._is_in_bad_fork = lambda: True
        fork_server._fork(socket.socket(), Path(sys.argv[1]), os.dup(1), lambda config: print("as it was forked"))
    """
    # The worker has the same output, so this ends when the worker has ended, too.
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "none")], capture_output=True, text=True, check=True
    )
    assert "No such file" in done.stdout
    assert "as it was forked" not in done.stdout
