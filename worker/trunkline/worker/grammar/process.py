"""The process in which rank 0 tries grammars (`grammar.trial`), which limits their time and memory."""

from __future__ import annotations

import hashlib
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

_DIGEST_BYTES: Final = 16
_START_S_MAX: Final = 60.0
_GRACE_S: Final = 15.0
"""Seconds beyond its limits after which the process is killed: it should keep to its limits by itself."""


class TooSlowError(Exception):
    """A grammar takes longer than it may. The message is for the user."""


class _LostError(Exception):
    """The process died before (`was_ready` is false) or during a trial."""

    def __init__(self, *, was_ready: bool) -> None:
        super().__init__()
        self.was_ready = was_ready


class Wanted(msgspec.Struct, frozen=True):
    """A grammar as a request asks for it (`CompileGrammar`)."""

    kind: str
    text: str
    spaced: bool = False

    def digest(self) -> bytes:
        """Return a name that only the same grammar has."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=_DIGEST_BYTES).digest()


class TrialRequest(msgspec.Struct, frozen=True):
    """The question to the process: can this grammar be compiled in time?"""

    grammar: Wanted
    seconds_max: float


class TrialVerdict(msgspec.Struct, frozen=True):
    """The answer of the process to a `TrialRequest`."""

    problem: str = ""
    """What is wrong with the grammar; "": nothing."""
    late: bool = False
    """Whether the process ran out of time before it knew."""
    is_lost: bool = False
    """Whether the process itself was lost during the trial, maybe for another reason."""


class TrialProcess:
    """The process on which grammars are tried. Used by one thread (except `cancel`), which must outlive it.

    The first trial starts the process, and so does the first trial after the process was lost.
    """

    def __init__(self, model: Path, vocab_size: int, seconds_max: float) -> None:
        self._arguments = [str(model), str(vocab_size)]
        self._seconds_max = seconds_max
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._cancelled = False

    def start(self) -> None:
        """Start the process if there is none; it takes tenths of a second until it is ready.

        Raises:
            OSError: it cannot be started.
        """
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        if self._cancelled:
            raise OSError("cancelled")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "trunkline.worker.grammar.trial", *self._arguments, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        if self._cancelled:  # meanwhile, when there was no process yet to end
            self._process.kill()

    def verdict_on(self, wanted: Wanted) -> TrialVerdict:
        """Try a grammar; return what is wrong with it, if anything is.

        If the process dies, another one tries once more: the grammar need not be the reason.

        Raises:
            TooSlowError: the trial would take longer than allowed.
            OSError: the process cannot be started.
        """
        for _ in range(2):
            try:
                answer = self._ask(wanted)
            except _LostError as error:
                lost = error
                if self._cancelled:
                    break
                continue
            if answer.late:
                raise TooSlowError(f"the grammar does not compile within {self._seconds_max:.0f} seconds")
            return answer
        if not lost.was_ready:
            raise OSError("the process that tries grammars does not start") from lost
        return TrialVerdict("the grammar needs too much memory to compile", is_lost=True)

    def _ask(self, wanted: Wanted) -> TrialVerdict:
        """
        Raises:
            _LostError: the process died.
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
            process.stdin.write(msgspec.json.encode(TrialRequest(wanted, self._seconds_max)) + b"\n")
            return msgspec.json.decode(self._read_line(process, self._seconds_max + _GRACE_S), type=TrialVerdict)
        except (TimeoutError, EOFError, BrokenPipeError) as error:
            was_ready = self._ready
            self.close()
            if not isinstance(error, TimeoutError):
                raise _LostError(was_ready=was_ready) from error
            if not was_ready:
                raise OSError("the process that tries grammars does not start") from error
            return TrialVerdict(late=True)

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
        """End the present trial, and let no other one begin. Called by another thread."""
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
