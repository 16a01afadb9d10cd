"""`python -m trunkline.worker.grammar.trial MODEL VOCAB_SIZE PARENT_PID`: grammars on trial, for rank 0.

A grammar is compiled here first, where it can do no harm: each in a child of this process, which has a memory
limit and is killed when a compilation takes too long. A child is there at once, while this process takes some
time to start. What passes is compiled again in rank 0, for a compiled grammar is far slower to hand over than to
make (some become hundreds of megabytes).

Lines of JSON: `TrialRequest` on stdin, `TrialVerdict` on stdout; an empty line says "ready".
"""

from __future__ import annotations

import os
import random
import resource
import select
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from select import PIPE_BUF
from typing import BinaryIO, Final

import msgspec
import numpy as np

from trunkline.runtime.process import die_with_parent
from trunkline.worker.grammar.automaton import TokenGrammar, Vocabulary, explain
from trunkline.worker.grammar.checks import GrammarError
from trunkline.worker.grammar.process import TrialRequest, TrialVerdict, Wanted

MEMORY_BYTES_MAX: Final = 1 << 30
"""Largest memory of a trial, beyond what the process has after its start."""
_NICENESS: Final = 5
_WALK_TOKENS: Final = 256
_WALK_S_MAX: Final = 1.0
"""Seconds of CPU time for all tokens of the random output: an output that takes longer would hold up all
others."""


def main() -> None:
    """Answer until stdin closes."""
    model, vocab_size, parent_pid = sys.argv[1:]
    die_with_parent(int(parent_pid))
    os.nice(_NICENESS)
    # Libraries may print: their stdout is stderr from here on, so that only answers go to the parent.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    vocabulary = Vocabulary(Path(model), int(vocab_size))
    _limit_memory()
    answers.write(b"\n")
    for line in sys.stdin.buffer:
        trial = msgspec.json.decode(line, type=TrialRequest)
        answers.write(msgspec.json.encode(_in_child(vocabulary, trial)) + b"\n")


def _in_child(vocabulary: Vocabulary, trial: TrialRequest) -> TrialVerdict:
    """Try a grammar in a process of its own."""
    own, childs = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if not child:
        try:
            die_with_parent(parent)
            os.write(childs, _try(vocabulary, trial.grammar).encode()[:PIPE_BUF] or b"\0")
        finally:
            os._exit(0)  # without any clean-up, which is the parent's
    os.close(childs)
    try:
        if not select.select([own], [], [], trial.seconds_max)[0]:
            return TrialVerdict(late=True)
        told = os.read(own, PIPE_BUF)
    finally:
        os.close(own)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if not told:
        return TrialVerdict("the grammar needs too much memory to compile")
    return TrialVerdict(told.decode(errors="replace").strip("\0"))


def _limit_memory() -> None:
    if sys.platform != "linux":
        return
    status = Path("/proc/self/status").read_text()
    used = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY_BYTES_MAX, used + MEMORY_BYTES_MAX))


def _try(vocabulary: Vocabulary, wanted: Wanted) -> str:
    """Return what is wrong with a grammar; "": nothing."""
    try:
        with _messages() as file:
            grammar = vocabulary.compile(wanted.kind, wanted.text, spaced=wanted.spaced)
            file.seek(0)
            warning = file.readline().decode(errors="replace")
        if "Warning" in warning:  # xgrammar goes on without what it warns of; a user would not want that
            return explain(wanted.kind, warning)
        return _walk(grammar)
    except GrammarError as error:
        return str(error)


@contextmanager
def _messages() -> Iterator[BinaryIO]:
    """Yield a file with what is written to stderr meanwhile."""
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield file
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def _walk(grammar: TokenGrammar) -> str:
    """Follow a random output through a grammar, to find out how slow its tokens are: in an ambiguous grammar they
    become slower and slower. Return what is wrong."""
    size, rng = grammar.vocabulary.size, random.Random(0)
    matcher = grammar.matcher([grammar.vocabulary.end])
    words = np.zeros(-(-size // 32), dtype=np.int32)
    spent = 0.0
    for _ in range(_WALK_TOKENS):
        start = time.thread_time()
        matcher.fill(words)
        spent += time.thread_time() - start
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little", count=size))
        # Short tokens: more of them fit, and ambiguity grows with their number.
        chosen = rng.choice(allowed[:64].tolist())
        if chosen == grammar.vocabulary.end and len(allowed) > 1:
            chosen = int(allowed[allowed != chosen][0])
        start = time.thread_time()
        matcher.accept([chosen])
        spent += time.thread_time() - start
        if spent > _WALK_S_MAX:
            return "the grammar is too ambiguous: to follow it takes too long per token"
    return ""


if __name__ == "__main__":
    main()
