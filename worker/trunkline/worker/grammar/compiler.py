"""The grammars of structured output on rank 0: compiled beside the steps, followed by the sampler.

      step thread   compile(id, …) ──► GrammarQueue ─┬─ first line ──► compile thread ─┬─► trial, then xgrammar
                                                     └─ long line ───► compile thread ─┘
                    poll() ◄── GrammarReady ◄──────────────────────────┘
                    fill(sequence, words): which ids may come next

A user's grammar is hostile until it has passed: `checks` refuses what xgrammar would misread; a process of its own
bounds time and memory (`trial`); only then it is compiled here. A grammar that takes longer than a slice is tried
again by a second thread with a second process, which is started with the first such grammar; so it holds up no
ordinary one. One thing remains unbounded: following a grammar costs microseconds per token as a rule, but an
ambiguous one can be written to pass the trial and to become slow later. An output that meets such a token is ended
by the grammar's side: only its stop ids are allowed from there on.

In a line tenants take turns, one grammar at a time; a tenant's own come in the order of their arrival. So the
first grammar of a tenant waits for one slice of every other tenant at most, however many these have sent.

Grammars that were compiled or refused lately are kept: the next request with the same one has its answer at once.
Refusals cost most: a client that sends the same hostile grammar again and again gets the same sentence without a
trial. They are kept for a while only, because how long a compilation takes also depends on what else the machine
does.

Masks are filled in the step thread: a row takes about 10 us (accept and fill), less than it costs to hand the work
to another thread during the forward pass.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

import structlog

from trunkline.controller.reports import GrammarReady
from trunkline.kvstore.chunks import Int32Array, pack_int32, unpack_int32
from trunkline.worker.batch.sequences import BatchSequence
from trunkline.worker.errors import PlanError
from trunkline.worker.grammar.checks import GrammarError, prepare
from trunkline.worker.grammar.process import TooSlowError, TrialProcess, Wanted

if TYPE_CHECKING:
    from trunkline.worker.grammar.automaton import Matcher, TokenGrammar, Vocabulary

SLICE_S: Final = 0.5
"""Longest first trial of a grammar, in seconds, for which other grammars may have to wait. Ordinary schemas take
some milliseconds."""
COMPILE_S_MAX: Final = 15.0
"""Longest second trial of a grammar, in seconds; compiling it for use then takes about as long again."""
TOKEN_S_MAX: Final = 1.0
"""Largest CPU time, in seconds, that the grammar may take for one next token; a slower output is ended."""

log = structlog.get_logger()


class GrammarStore:
    """Grammars by id, and the state of each sequence in its grammar. Used by the step thread only."""

    def __init__(
        self, model: Path, vocab_size: int, seconds_max: float = COMPILE_S_MAX, slice_s: float = SLICE_S
    ) -> None:
        """Read nothing yet: the tokenizer is loaded with the first grammar.

        Args:
            model: the model's folder; its `tokenizer.json` spells the tokens.
            vocab_size: number of the model's tokens.
            seconds_max: seconds that the second trial of a grammar may take; a slower grammar is refused.
            slice_s: seconds that the first trial may take; a slower grammar waits for a second trial.
        """
        self._threads = _CompileThreads(model, vocab_size, {Line.FIRST: slice_s, Line.LONG: seconds_max})
        self._done: list[tuple[int, TokenGrammar | str]] = []
        """Grammars whose result is known without a trial."""
        self.pending: set[int] = set()
        """Grammars of which `poll` reports, now or later."""
        self._cache: GrammarCache[TokenGrammar] = GrammarCache()
        self._grammars: dict[int, TokenGrammar] = {}
        self.outputs: dict[int, tuple[BatchSequence, Matcher]] = {}
        """The state of each sequence that follows a grammar, by the sequence's id."""
        self.foretelling: set[int] = set()
        """The grammars of which `foretell` tells."""

    def compile(self, grammar: int, kind: str, text: str, *, spaced: bool = False, tenant: bytes = b"") -> None:
        """Begin to compile a grammar; `poll` says when it is ready. Does not wait.

        For a grammar that is being compiled, note that another tenant wants it, too.
        """
        if grammar in self._grammars:
            return
        wanted = Wanted(kind, text, spaced)
        known: TokenGrammar | str | None
        try:
            prepare(kind, text)
            known = self._cache.find(wanted, time.monotonic())
        except GrammarError as error:
            known = str(error)
        is_new = grammar not in self.pending
        self.pending.add(grammar)
        if known is None:
            self._threads.add(grammar, wanted, tenant, is_new=is_new)
        elif is_new:
            self._done.append((grammar, known))

    def poll(self) -> list[GrammarReady]:
        """Return the grammars that became ready or were refused since the last call."""
        ready = []
        done, self._done = self._done, []
        for grammar, wanted, result, lasts in self._threads.results():
            done.append((grammar, result))
            if not isinstance(result, str):
                self._cache.keep(wanted, result)
            elif lasts:
                self._cache.refuse(wanted, result, time.monotonic())
        for grammar, result in done:
            if grammar not in self.pending:
                continue  # forgotten meanwhile
            self.pending.remove(grammar)
            if isinstance(result, str):
                ready.append(GrammarReady(grammar, result))
            else:
                self._grammars[grammar] = result
                ready.append(GrammarReady(grammar))
        return ready

    def forget(self, grammar: int) -> None:
        """Forget a grammar that no sequence uses any more."""
        self._grammars.pop(grammar, None)
        self.foretelling.discard(grammar)
        if grammar in self.pending:
            self.pending.remove(grammar)
            self._threads.remove(grammar)

    def forget_sequences(self, sequences: Iterable[int]) -> None:
        """Forget sequences that left the batch."""
        for sequence in sequences:
            self.outputs.pop(sequence, None)

    def fill(self, sequence: BatchSequence, words: Int32Array) -> None:
        """Write the ids that the grammar allows as the sequence's next token; at least one.

        A sequence that is new here, or was elsewhere for a while, has its output replayed.

        Args:
            sequence: `sampling.grammar` is not 0.
            words: int32 `[ceil(vocabulary / 32)]`, one bit per id (`Matcher.fill`).

        Raises:
            PlanError: the grammar is not compiled, or the output is not known.
        """
        matcher = self._matcher(sequence)
        start, matcher.spent_s = time.thread_time() - matcher.spent_s, 0.0
        _follow(matcher, sequence)
        matcher.fill(words)
        if time.thread_time() - start > TOKEN_S_MAX:
            log.warning("a grammar is too slow to follow: the output ends", sequence=sequence.id)
            matcher.finish()

    def foretell(self, samples: Iterable[BatchSequence]) -> dict[int, bytes] | None:
        """Return by id what the grammars of sequences demand next of them (`Matcher.foretell`), as packed int32
        ids. To be called behind a step, for the sequences that have drawn a token in it."""
        if not (self.foretelling and self.outputs):
            return None
        found = {}
        for sequence in {one.id: one for one in samples if one.sampling.grammar in self.foretelling}.values():
            known = self.outputs.get(sequence.id)
            if known is None or known[0] is not sequence:
                continue
            matcher, start = known[1], time.thread_time()
            _follow(matcher, sequence)
            matcher.spent_s += time.thread_time() - start
            if tokens := matcher.foretell():
                found[sequence.id] = pack_int32(tokens)
        return found or None

    def _matcher(self, sequence: BatchSequence) -> Matcher:
        known = self.outputs.get(sequence.id)
        # Another sequence may have come under the same id, or this one with other tokens.
        if known is not None and known[0] is sequence and known[1].accepted <= sequence.output_index:
            return known[1]
        grammar = self._grammars.get(sequence.sampling.grammar)
        if grammar is None:
            raise PlanError(f"sequence {sequence.id} follows grammar {sequence.sampling.grammar}: not compiled")
        if sequence.first > sequence.prompt_len:
            raise PlanError(f"sequence {sequence.id} follows a grammar, but its output is not known")
        matcher = grammar.matcher(unpack_int32(sequence.sampling.stop_ids).tolist())
        self.outputs[sequence.id] = sequence, matcher
        return matcher

    def close(self) -> None:
        """End threads and processes; a compilation that is under way is abandoned."""
        self._threads.close()


def _follow(matcher: Matcher, sequence: BatchSequence) -> None:
    """Take in the output tokens that the matcher does not have yet."""
    begin = sequence.prompt_len - sequence.first + matcher.accepted
    matcher.accept(sequence.tokens[begin:])


class _CompileThreads:
    """The compile threads: one for each line of the queue, started with its first grammar."""

    def __init__(self, model: Path, vocab_size: int, seconds_max: dict[Line, float]) -> None:
        self._compilers = {
            line: _LineCompiler(model, vocab_size, seconds) for line, seconds in seconds_max.items()
        }
        self._queue = GrammarQueue()
        """The grammars that wait; like the next two fields, used under `_changed`."""
        self._wanted: dict[int, Wanted] = {}
        self._is_closed = False
        self._changed = threading.Condition()
        self._threads: dict[Line, threading.Thread] = {}
        self._results: queue.SimpleQueue[tuple[int, Wanted, TokenGrammar | str, bool]] = queue.SimpleQueue()

    def add(self, grammar: int, wanted: Wanted, tenant: bytes, *, is_new: bool) -> None:
        with self._changed:
            if not is_new and grammar not in self._queue:
                return  # it has just become ready
            self._queue.add(grammar, tenant)
            self._wanted[grammar] = wanted
            self._begin(Line.FIRST)
            self._changed.notify_all()

    def remove(self, grammar: int) -> None:
        with self._changed:
            self._queue.remove(grammar)
            self._wanted.pop(grammar, None)

    def results(self) -> list[tuple[int, Wanted, TokenGrammar | str, bool]]:
        """Return new results: a grammar, or its problem and whether that will be the same next time."""
        found = []
        while not self._results.empty():
            found.append(self._results.get())
        return found

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for compiler in self._compilers.values():
            compiler.cancel()
        for thread in self._threads.values():
            thread.join(timeout=5.0)

    def _begin(self, line: Line) -> None:
        if line not in self._threads:
            name = f"grammars-{line.name.lower()}"
            self._threads[line] = threading.Thread(target=self._work, args=(line,), name=name, daemon=True)
            self._threads[line].start()

    def _work(self, line: Line) -> None:
        compiler = self._compilers[line]
        while (job := self._next(line)) is not None:
            grammar, wanted = job
            try:
                result, lasts = compiler.compile(wanted)
            except TooSlowError as error:
                if line is Line.FIRST:
                    with self._changed:
                        self._queue.late(grammar)
                        self._begin(Line.LONG)
                        self._changed.notify_all()
                    continue
                result, lasts = str(error), True
            self.remove(grammar)
            self._results.put((grammar, wanted, result, lasts))
        compiler.close()

    def _next(self, line: Line) -> tuple[int, Wanted] | None:
        """Wait for the next grammar to try; return None when the store is closed."""
        with self._changed:
            while not self._is_closed:
                grammar = self._queue.take(line)
                if grammar is not None:
                    return grammar, self._wanted[grammar]
                self._changed.wait()
        return None


class _LineCompiler:
    """A trial process and a vocabulary: what one compile thread owns."""

    def __init__(self, model: Path, vocab_size: int, seconds_max: float) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._trial = TrialProcess(model, vocab_size, seconds_max)
        self._vocabulary: Vocabulary | None = None

    def compile(self, wanted: Wanted) -> tuple[TokenGrammar | str, bool]:
        """Return a grammar, or what is wrong with it and whether that is the grammar's own fault.

        Raises:
            TooSlowError: the grammar takes longer than this line allows.
        """
        try:
            self._trial.start()  # loads while this process does
            vocabulary = self._load()
            verdict = self._trial.verdict_on(wanted)
            if verdict.problem:
                return verdict.problem, not verdict.is_lost
            return vocabulary.compile(wanted.kind, wanted.text, spaced=wanted.spaced), True
        except TooSlowError:
            raise
        except GrammarError as error:
            return str(error), True
        except Exception as error:  # whatever it is, the request must end and the thread go on
            log.error("a grammar could not be compiled", error=str(error), exc_info=True)
            return "grammars cannot be compiled on this server", False

    def _load(self) -> Vocabulary:
        # Here and not above: importing xgrammar takes tenths of a second, which only this thread has.
        from trunkline.worker.grammar.automaton import Vocabulary  # noqa: PLC0415

        if self._vocabulary is None:
            self._vocabulary = Vocabulary(self._model, self._vocab_size)
        return self._vocabulary

    def cancel(self) -> None:
        """End a trial that is under way. Called from another thread."""
        self._trial.cancel()

    def close(self) -> None:
        """End the process."""
        self._trial.close()


KEPT_MAX: Final = 64
"""Largest number of compiled grammars that are kept for the next request with the same grammar."""
KEPT_BYTES_MAX: Final = 64 << 20
"""Largest number of bytes of the compiled grammars that are kept."""
REFUSALS_MAX: Final = 1024
REFUSED_S: Final = 600.0


class _Sized(Protocol):
    @property
    def bytes(self) -> int: ...


_Grammar = TypeVar("_Grammar", bound=_Sized)


class GrammarCache(Generic[_Grammar]):
    """Compiled grammars and refusals, found by a grammar's content. The least recently used one comes first."""

    def __init__(self) -> None:
        self._compiled: OrderedDict[bytes, _Grammar] = OrderedDict()
        self._refused: OrderedDict[bytes, tuple[str, float]] = OrderedDict()

    def find(self, wanted: Wanted, now: float) -> _Grammar | str | None:
        """Return the compiled grammar, or the problem for which it was refused; None if it has to be tried. `now`
        is in seconds."""
        digest = wanted.digest()
        compiled = self._compiled.get(digest)
        if compiled is not None:
            self._compiled.move_to_end(digest)
            return compiled
        problem, until = self._refused.get(digest, ("", now))
        if now < until:
            self._refused.move_to_end(digest)
            return problem
        self._refused.pop(digest, None)
        return None

    def keep(self, wanted: Wanted, grammar: _Grammar) -> None:
        """Keep a compiled grammar."""
        self._compiled[wanted.digest()] = grammar
        while len(self._compiled) > KEPT_MAX or sum(g.bytes for g in self._compiled.values()) > KEPT_BYTES_MAX:
            self._compiled.popitem(last=False)

    def refuse(self, wanted: Wanted, problem: str, now: float) -> None:
        """Keep the refusal of a grammar for `REFUSED_S` seconds."""
        self._refused[wanted.digest()] = problem, now + REFUSED_S
        while len(self._refused) > REFUSALS_MAX:
            self._refused.popitem(last=False)


class Line(Enum):
    """The line in which a grammar waits for its turn."""

    FIRST = auto()
    """The line for a first, short trial."""
    LONG = auto()
    """The line for a long trial, after the short one was not enough."""


class GrammarQueue:
    """The grammars that are to be compiled, by id."""

    def __init__(self) -> None:
        self._lines: dict[Line, OrderedDict[bytes, OrderedDict[int, None]]] = {
            line: OrderedDict() for line in Line
        }
        """The grammars that wait in each line, by tenant; the tenant whose turn it is comes first."""
        self._tenants: dict[int, dict[bytes, None]] = {}
        """The tenants that want each grammar, those that are being tried included."""
        self._waits: dict[int, Line] = {}

    def __contains__(self, grammar: int) -> bool:
        return grammar in self._tenants

    def __len__(self) -> int:
        return len(self._tenants)

    def add(self, grammar: int, tenant: bytes) -> None:
        """Note that a tenant wants a grammar. If several tenants want it, it is tried at the first of their
        turns."""
        if grammar not in self._tenants:
            self._tenants[grammar] = {}
            self._waits[grammar] = Line.FIRST
        self._tenants[grammar][tenant] = None
        line = self._waits.get(grammar)
        if line is not None:
            self._lines[line].setdefault(tenant, OrderedDict())[grammar] = None

    def take(self, line: Line) -> int | None:
        """Return the next grammar to try; None if none waits. The grammar stays known until `late` or `remove`."""
        waiting = self._lines[line]
        if not waiting:
            return None
        tenant, own = next(iter(waiting.items()))
        waiting.move_to_end(tenant)
        grammar = next(iter(own))
        self._leave(grammar)
        return grammar

    def late(self, grammar: int) -> None:
        """Let a grammar that took more than a slice wait for a long trial. Nothing happens if it was removed."""
        if grammar in self._tenants:
            self._waits[grammar] = Line.LONG
            for tenant in self._tenants[grammar]:
                self._lines[Line.LONG].setdefault(tenant, OrderedDict())[grammar] = None

    def remove(self, grammar: int) -> None:
        """Forget a grammar that is compiled, refused, or not wanted any more."""
        self._leave(grammar)
        self._tenants.pop(grammar, None)

    def _leave(self, grammar: int) -> None:
        line = self._waits.pop(grammar, None)
        if line is None:
            return
        waiting = self._lines[line]
        for tenant in self._tenants[grammar]:
            waiting[tenant].pop(grammar, None)
            if not waiting[tenant]:
                del waiting[tenant]
