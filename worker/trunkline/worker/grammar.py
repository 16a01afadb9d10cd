"""The grammars of structured output on rank 0: compiled beside the steps, followed by the sampler.

      step thread      compile(id, kind, text) ──► jobs ──► compile thread: trial process, then xgrammar
                       poll() ◄── GrammarReady ◄───────────┘
                       fill(sequence, words): which ids may come next

A user's grammar is hostile until it has passed: `grammar_checks` refuses what xgrammar would misread; a
process of its own bounds time and memory (`grammar_trial`); only then it is compiled here. What remains
unbounded: following a grammar costs microseconds per token as a rule, but an ambiguous one can be written to
pass the trial and to become slow later. An output that meets such a token is ended by the grammar's side:
only its stop ids are allowed from there on.

Masks are filled in the step thread: a row takes about 10 us (accept and fill), less than it costs to
hand the work to another thread during the forward pass.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from trunkline.controller.messages import GrammarReady
from trunkline.kvstore.layout import Int32Array, unpack_int32
from trunkline.worker.errors import PlanError
from trunkline.worker.grammar_checks import GrammarError, prepare
from trunkline.worker.grammar_process import TrialProcess
from trunkline.worker.sequences import Sequence

if TYPE_CHECKING:
    from trunkline.worker.automaton import Grammar, Matcher, Vocabulary

COMPILE_S_MAX: Final = 15.0
"""On trial; the second compilation then takes about as long again."""
TOKEN_S_MAX: Final = 1.0
"""CPU time after which an output is let go of its grammar."""
_KEPT_MAX: Final = 64
_KEPT_BYTES_MAX: Final = 64 << 20
"""Compiled grammars kept for the next request with the same one."""

log = structlog.get_logger()


class GrammarStore:
    """Grammars by id, and where each sequence stands in its own. Everything but `_work` is the step thread's; that
    only looks up whether a job is still pending."""

    def __init__(self, model: Path, vocab_size: int, seconds_max: float = COMPILE_S_MAX) -> None:
        """Cheap: nothing is read before the first grammar.

        Args:
            model: the model's folder; its `tokenizer.json` spells the tokens.
            vocab_size: of the model.
            seconds_max: the longest that a compilation may take on trial.
        """
        self._compiler = _Compiler(model, vocab_size, seconds_max)
        self._jobs: queue.SimpleQueue[tuple[int, str, str] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[int, Grammar | str]] = queue.SimpleQueue()
        self._refused: list[GrammarReady] = []
        self._pending: set[int] = set()
        self._grammars: dict[int, Grammar] = {}
        self._outputs: dict[int, tuple[Sequence, Matcher]] = {}
        self._thread: threading.Thread | None = None

    @property
    def pending(self) -> bool:
        """Whether `poll` has something to give, now or later."""
        return bool(self._pending or self._refused)

    def compile(self, grammar: int, kind: str, text: str) -> None:
        """Begin with a grammar; `poll` says when it is ready. Does not wait."""
        try:
            prepare(kind, text)
        except GrammarError as error:
            self._refused.append(GrammarReady(grammar, str(error)))
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="grammars", daemon=True)
            self._thread.start()
        self._pending.add(grammar)
        self._jobs.put((grammar, kind, text))

    def poll(self) -> list[GrammarReady]:
        """Grammars that became ready, or turned out to have a problem, since the last call."""
        ready, self._refused = self._refused, []
        while not self._results.empty():
            grammar, result = self._results.get()
            if grammar not in self._pending:
                continue  # forgotten meanwhile
            self._pending.remove(grammar)
            if isinstance(result, str):
                ready.append(GrammarReady(grammar, result))
            else:
                self._grammars[grammar] = result
                ready.append(GrammarReady(grammar))
        return ready

    def forget(self, grammar: int) -> None:
        """No sequence uses the grammar any more."""
        self._grammars.pop(grammar, None)
        self._pending.discard(grammar)

    def forget_sequences(self, sequences: Iterable[int]) -> None:
        """Sequences that left the batch."""
        if self._outputs:
            for sequence in sequences:
                self._outputs.pop(sequence, None)

    def fill(self, sequence: Sequence, words: Int32Array) -> None:
        """Write the ids that the grammar allows as the sequence's next token; at least one.

        A sequence that is new here, or was elsewhere for a while, has its output replayed.

        Args:
            sequence: `sampling.grammar` is not 0.
            words: int32 `[ceil(vocabulary / 32)]`, one bit per id (`Matcher.fill`).

        Raises:
            PlanError: the grammar is not compiled, or the output is not known.
        """
        start = time.thread_time()
        matcher = self._matcher(sequence)
        begin = sequence.prompt_len - sequence.first + matcher.accepted
        matcher.accept(sequence.tokens[begin:])
        matcher.fill(words)
        if time.thread_time() - start > TOKEN_S_MAX:
            log.warning("a grammar is too slow to follow: the output ends", sequence=sequence.id)
            matcher.finish()

    def _matcher(self, sequence: Sequence) -> Matcher:
        known = self._outputs.get(sequence.id)
        # Another sequence may have come under the same id, or this one with other tokens.
        if known is not None and known[0] is sequence and known[1].accepted <= sequence.output_index:
            return known[1]
        grammar = self._grammars.get(sequence.sampling.grammar)
        if grammar is None:
            raise PlanError(f"sequence {sequence.id} follows grammar {sequence.sampling.grammar}: not compiled")
        if sequence.first > sequence.prompt_len:
            raise PlanError(f"sequence {sequence.id} follows a grammar, but its output is not known")
        matcher = grammar.matcher(unpack_int32(sequence.sampling.stop_ids).tolist())
        self._outputs[sequence.id] = sequence, matcher
        return matcher

    def close(self) -> None:
        """End thread and process; a compilation that is under way is abandoned."""
        if self._thread is not None:
            self._jobs.put(None)
            self._compiler.cancel()
            self._thread.join(timeout=5.0)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            grammar, kind, text = job
            if grammar not in self._pending:
                continue  # forgotten while others were compiled
            self._results.put((grammar, self._compiler.compile(kind, text)))
        self._compiler.close()


class _Compiler:
    """What the compile thread owns."""

    def __init__(self, model: Path, vocab_size: int, seconds_max: float) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._trial = TrialProcess(model, vocab_size, seconds_max)
        self._vocabulary: Vocabulary | None = None
        self._kept: OrderedDict[tuple[str, str], Grammar] = OrderedDict()

    def compile(self, kind: str, text: str) -> Grammar | str:
        """A grammar or what is wrong with it."""
        kept = self._kept.get((kind, text))
        if kept is not None:
            self._kept.move_to_end((kind, text))
            return kept
        try:
            self._trial.start()  # loads while this process does
            vocabulary = self._load()
            problem = self._trial.problem_of(kind, text)
            if problem:
                return problem
            grammar = vocabulary.compile(kind, text)
        except GrammarError as error:
            return str(error)
        except Exception as error:  # whatever it is, the request must end and the thread go on
            log.error("a grammar could not be compiled", error=str(error), exc_info=True)
            return "grammars cannot be compiled on this server"
        self._keep(kind, text, grammar)
        return grammar

    def _load(self) -> Vocabulary:
        # Here and not above: importing xgrammar takes over a second, which only this thread has.
        from trunkline.worker.automaton import Vocabulary  # noqa: PLC0415

        if self._vocabulary is None:
            self._vocabulary = Vocabulary(self._model, self._vocab_size)
        return self._vocabulary

    def _keep(self, kind: str, text: str, grammar: Grammar) -> None:
        self._kept[kind, text] = grammar
        while len(self._kept) > _KEPT_MAX or sum(g.bytes for g in self._kept.values()) > _KEPT_BYTES_MAX:
            self._kept.popitem(last=False)

    def cancel(self) -> None:
        """From another thread: make a trial that is under way end."""
        self._trial.cancel()

    def close(self) -> None:
        """End the process."""
        self._trial.close()
