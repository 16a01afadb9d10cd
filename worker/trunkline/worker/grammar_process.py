"""Rank 0's side of `grammar_trial`: a process that is killed when a grammar takes too much time or memory."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

_START_S_MAX: Final = 60.0


class TrialProcess:
    """The process on which grammars are tried. Used by one thread (except `cancel`), which must outlive it.

    It is started by the first trial and again by the first one after it was killed.
    """

    def __init__(self, model: Path, vocab_size: int, seconds_max: float) -> None:
        self._arguments = [str(model), str(vocab_size)]
        self._seconds_max = seconds_max
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._cancelled = False

    def start(self) -> None:
        """Start the process if there is none; it takes seconds until it is ready.

        Raises:
            OSError: it cannot be started.
        """
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        if self._cancelled:
            raise OSError("cancelled")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trunkline.worker.grammar_trial", *self._arguments, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )

    def problem_of(self, kind: str, text: str) -> str:
        """What is wrong with a grammar; "": nothing.

        Raises:
            OSError: the process cannot be started.
        """
        self.start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        try:
            if not self._ready:
                self._read_line(process, _START_S_MAX)
                self._ready = True
            process.stdin.write(msgspec.json.encode({"kind": kind, "text": text}) + b"\n")
            answer = self._read_line(process, self._seconds_max)
        except (TimeoutError, EOFError, BrokenPipeError) as error:
            was_ready = self._ready
            self.close()
            if not was_ready:
                raise OSError("the process that tries grammars does not start") from error
            if isinstance(error, TimeoutError):
                return f"the grammar does not compile within {self._seconds_max:.0f} seconds"
            return "the grammar needs too much memory to compile"
        return msgspec.json.decode(answer, type=dict[str, str])["problem"]

    def _read_line(self, process: subprocess.Popen[bytes], seconds: float) -> bytes:
        assert process.stdout is not None
        deadline, line = time.monotonic() + seconds, b""
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                raise TimeoutError(f"no answer within {seconds:.0f} s")
            part = process.stdout.read(65536)
            if not part:
                raise EOFError
            line += part
        return line

    def cancel(self) -> None:
        """From another thread: make a trial that is under way end, and no other begin."""
        self._cancelled = True
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process."""
        process, self._process, self._ready = self._process, None, False
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
