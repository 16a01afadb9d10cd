"""From the tokens of a request to the pieces of text that its client gets: end tokens, detokenisation, stop
strings.

    Stream ──Batch──► Generation ──► Choices ──► TextAssembler, one per sample ──Delta──► api/
                      measures it    (pure)      (pure)

One sample is the usual case and takes the shortest way. Each of several samples has a detokeniser, stop strings
and an end of its own. The engine learns of a stop string only when the last sample is over; tokens that still
arrive for a sample that has ended are dropped here.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Final, Literal

import msgspec
import numpy as np

from trunkline.controller.messages import ENDED_CHARACTERS_MAX
from trunkline.controller.reports import PromptLogprobs, TopLogprobs
from trunkline.router.errors import ApiError, unavailable
from trunkline.router.jobs.job import Job
from trunkline.router.messages import FinishReason, Hypothesis, Started
from trunkline.router.streams.draft_counts import DraftCounts
from trunkline.router.streams.streams import TIMED_OUT, Batch, End, Stream
from trunkline.router.streams.takers import Outlet, PlainWriter
from trunkline.router.telemetry.metrics import Metrics
from trunkline.router.text.detokenizer import StopMatcher, TokenVocabulary, make_detokenizer
from trunkline.router.tools.pieces import CallStart, Piece

FinishName = Literal["stop", "length"]
_FIRST_EVENT_SECONDS_MAX: Final = 10.0
"""Longest time in seconds that the response headers wait for the first event. Until then an error can still become
the HTTP status, but proxies give up on connections that stay without headers."""
CLIENT_LEFT: Final = "client_left"
OUTCOMES: Final[dict[str, str]] = {FinishReason.ABORT: "aborted", FinishReason.ENGINE_FAILED: "failed"}
"""Names in metrics and logs of some reasons for an end. All other reasons appear there under their own names."""
_OTHER_ENDS: Final = ("stop", "length", CLIENT_LEFT, TIMED_OUT)
"""Outcomes that are no errors of controllers."""


class TokenLogprob(msgspec.Struct, frozen=True):
    """An output token with its log-probabilities."""

    token: int
    text_offset: int
    """Number of characters of output before the text of this token."""
    logprobs: TopLogprobs | None


class Delta(msgspec.Struct):
    """The next piece of a choice, for the client."""

    text: str = ""
    logprobs: list[TokenLogprob] = []
    finish: FinishName | None = None
    """Why the choice ended, in its last piece; None in all others. After a stop string the engine must still drop
    the sample."""
    stop: str | None = None
    """The stop string or expression that ended the choice, if one did."""
    tokens: Sequence[int] = ()
    """The tokens of the piece; their text may come in a later one."""
    index: int = 0
    """Index of the choice."""
    score: float | None = None
    """The value by which results of a beam search are ranked; None for other choices."""
    cumulative_logprob: float | None = None
    """The sum of the log-probabilities of a beam search result's tokens; None for other choices."""


class TextAssembler:
    """Turns the tokens of one sample into its text."""

    __slots__ = (
        *("_characters", "_detokenizer", "_eos_ids", "_is_plain", "_job", "_matcher", "_min_tokens"),
        *("index", "output_tokens"),
    )

    def __init__(self, job: Job, vocabulary: TokenVocabulary, index: int = 0) -> None:
        """`index`: index of the choice, for its deltas."""
        self.index = index
        self._job = job
        self._eos_ids = job.eos_ids
        self._detokenizer = make_detokenizer(
            vocabulary, skip_special_tokens=job.skip_special_tokens, at_start=job.at_start
        )
        self._matcher = StopMatcher(job.stops, job.stop_expressions, include=job.include_stop)
        self._is_plain = not (job.stops or job.stop_expressions or job.sampling.reports)
        """Whether nothing but an end token is looked for in what comes."""
        self._min_tokens = job.sampling.min_tokens
        self._characters = 0
        self.output_tokens = 0
        """Output tokens, including those of a stop string and the end token."""

    def plain(self, tokens: Sequence[int]) -> Delta | None:
        """Return the text of tokens that end nothing and need no further look, as nearly all; None: `feed` has to
        have them."""
        if not self._is_plain or not self._eos_ids.isdisjoint(tokens):
            return None
        text = self._detokenizer.feed(tokens[0]) if tokens else ""
        for token in tokens[1:]:
            text += self._detokenizer.feed(token)
        self.output_tokens += len(tokens)
        self._characters += len(text)
        return Delta(text, tokens=tokens, index=self.index)

    def feed(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[TopLogprobs | None] = (),
        reason: str | None = None,
    ) -> Delta:
        """Return the text of the next tokens. Tokens behind a stop string are dropped.

        Not to be called again after a delta with `finish`.

        Args:
            logprobs: one per token, if the request asks for them.
            reason: with the last tokens, why the sample ended ("stop" or "length").
        """
        if reason is None and (plain := self.plain(tokens)) is not None:
            return plain  # for speed; the general code below gives the same
        wanted = self._job.sampling.reports
        delta = Delta(logprobs=[], tokens=tokens, index=self.index)
        for index, token in enumerate(tokens):
            self.output_tokens += 1
            if wanted:
                delta.logprobs.append(
                    TokenLogprob(token, self._characters, logprobs[index] if index < len(logprobs) else None)
                )
            ends = token in self._eos_ids
            if ends and not self._job.include_stop:
                # The engine has ended the sample with this token, whose characters are no part of the text.
                delta.text += self._finish_text()
                delta.finish = "stop"
            elif not self._show(delta, self._detokenizer.feed(token)) and ends:
                delta.text += self._finish_text()
                delta.finish = "stop"
            if delta.finish is not None:
                delta.tokens = tokens[: index + 1]
                return delta
        if reason is not None and not self._show(delta, self._detokenizer.flush()):
            delta.text += self._matcher.flush()
            delta.finish = "stop" if reason == FinishReason.STOP else "length"
        return delta

    def _show(self, delta: Delta, text: str) -> bool:
        """Pass text through the stop matcher into `delta`; return whether it completed a stop string."""
        if not text:
            return False
        self._characters += len(text)
        if self.output_tokens <= self._min_tokens:
            delta.text += text  # before `min_tokens` a stop string does not end the sample
            return False
        shown = self._matcher.feed(text)
        delta.text += shown.text
        if shown.stop is None:
            return False
        delta.finish, delta.stop = "stop", shown.stop
        return True

    def _finish_text(self) -> str:
        shown = self._matcher.feed(self._detokenizer.flush())
        return shown.text if shown.stop is not None else shown.text + self._matcher.flush()


class Choices:
    """The texts of all samples of a request, or of all results of its beam search."""

    __slots__ = ("_only", "_open", "_searches", "_texts", "all_over")

    def __init__(self, job: Job, vocabulary: TokenVocabulary) -> None:
        self.all_over = False
        """Whether every text has had its delta with `finish`."""
        self._texts = [TextAssembler(job, vocabulary, index) for index in range(job.decoding.samples)]
        self._open = set(range(job.decoding.samples))
        self._searches = job.decoding.beam is not None
        self._only = self._texts[0] if job.decoding.samples == 1 and not self._searches else None

    def feed(self, batch: Batch, reason: str | None) -> list[Delta]:
        """Return what a batch adds to each choice, in the order of their indices.

        Args:
            reason: why the whole request has ended regularly; None: it goes on, or it failed.
        """
        if self._only is not None:
            delta = self._only.feed(batch.tokens, batch.logprobs, reason)
            if delta.finish is not None:
                self.all_over = True
            return [delta]
        deltas = self._results(batch.hypotheses or []) if self._searches else self._samples(batch, reason)
        for delta in deltas:
            if delta.finish is not None:
                self._open.discard(delta.index)
        self.all_over = not self._open
        return deltas

    @property
    def output_tokens(self) -> int:
        """Output tokens so far, over all samples. They count before a taker writes them."""
        if self._only is not None:
            return self._only.output_tokens
        return sum([text.output_tokens for text in self._texts])

    @property
    def only(self) -> TextAssembler | None:
        """The only text; None: there are several, or results of a search."""
        return self._only

    def _samples(self, batch: Batch, reason: str | None) -> list[Delta]:
        tokens: dict[int, list[int]] = {}
        logprobs: dict[int, list[TopLogprobs | None]] = {}
        for index, sample in enumerate(batch.samples or ()):
            tokens.setdefault(sample, []).append(batch.tokens[index])
            if batch.logprobs:
                logprobs.setdefault(sample, []).append(batch.logprobs[index])
        deltas = []
        for sample in sorted(self._open):
            end = (batch.ended or {}).get(sample, reason)
            if sample in tokens or end is not None:
                deltas.append(self._texts[sample].feed(tokens.get(sample, []), logprobs.get(sample, []), end))
        return deltas

    def _results(self, hypotheses: list[Hypothesis]) -> list[Delta]:
        deltas = []
        for text, found in zip(self._texts, hypotheses, strict=False):
            tokens = np.frombuffer(found.tokens, dtype="<i4").tolist()
            delta = text.feed(tokens, (), found.reason)
            delta.score, delta.cumulative_logprob = found.score, found.logprob
            deltas.append(delta)
        return deltas


class Generation:
    """One job on its way: reads its stream, yields text, and measures it. Always call `close` in the end; `deltas`
    does so itself."""

    def __init__(
        self,
        job: Job,
        stream: Stream,
        choices: Choices,
        metrics: Metrics,
        arrived_at: float,
        on_close: Callable[[Generation], None],
    ) -> None:
        self.job = job
        self._stream = stream
        self._choices = choices
        self._metrics = metrics
        self._on_close: Callable[[Generation], None] | None = on_close
        self._loop = asyncio.get_running_loop()
        self._arrived_at = arrived_at
        self.first_token_at: float | None = None
        """Loop time in seconds of the first token; None: there was none yet."""
        self._last_token_at: float | None = None
        self._submitted_at = self._loop.time()
        self.steps = 0
        """Number of tokens of the longest sample."""
        self.outcome = CLIENT_LEFT
        """How the generation ended. While the generation runs: the outcome that it would have if its reader left
        now."""
        self._timer: asyncio.TimerHandle | None = None
        self._called: set[str] = set()
        """Names of the tools that its answers call, as far as they were read."""
        self._written: dict[int, list[int]] = {}
        """Tokens of the answers so far, of a prompt that is remembered."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose KV was found."""
        return self._stream.cached_tokens

    @property
    def drafts(self) -> DraftCounts:
        """The drafts that steps have tried for the request so far."""
        return self._stream.drafts

    @property
    def started(self) -> Started | None:
        """The controller's report of the part of the prompt that was cached; None until it has admitted the
        request."""
        return self._stream.started

    @property
    def prefill_s(self) -> float:
        """Seconds from the end of the engine's queue to the first token."""
        if self.first_token_at is None or self.started is None:
            return 0.0
        return max(0.0, self.first_token_at - self._submitted_at - self.started.queued_s)

    @property
    def output_tokens(self) -> int:
        """Output tokens so far, over all samples."""
        return self._choices.output_tokens

    @property
    def failed_early(self) -> bool:
        """Whether it ended with an error of the controllers' before its first token."""
        return self.first_token_at is None and self.outcome not in _OTHER_ENDS

    @property
    def decode_s(self) -> float:
        """Seconds from its first token until its last."""
        if self.first_token_at is None or self._last_token_at is None:
            return 0.0
        return self._last_token_at - self.first_token_at

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the request's arrival to its first token; None: there was none."""
        return None if self.first_token_at is None else self.first_token_at - self._arrived_at

    @property
    def prompt_logprobs(self) -> Sequence[PromptLogprobs]:
        """Log-probabilities of the prompt, if the job asks for them; complete once the first token has arrived."""
        return self._stream.prompt_logprobs

    async def begin(self) -> None:
        """Wait until the controller has admitted the request.

        Raises:
            ApiError: the controller refused it; nothing was generated.
        """
        try:
            async with asyncio.timeout(_FIRST_EVENT_SECONDS_MAX):
                await self._stream.wait_first()
        except TimeoutError:
            return
        error = self._error_of(self._stream.failure)
        if error is not None:
            raise error

    async def deltas(self) -> AsyncIterator[Delta]:
        """Yield the answer piece by piece, but for what `write_to` writes. The last piece of each choice has
        `finish`.

        Raises:
            ApiError: the generation failed after it had begun.
        """
        over_at: float | None = None
        try:
            while True:
                batch = await self._stream.next()
                self._measure(batch)
                # Tokens that arrived together with a failure are still shown.
                end = batch.end
                error = self._error_of(end)
                before = self._choices.output_tokens
                deltas = self._choices.feed(batch, None if end is None or error is not None else end.reason)
                self._metrics.per_token.tokens += self._choices.output_tokens - before
                self._remember(deltas)
                over = self._choices.all_over
                if over:
                    self.outcome = next((delta.finish for delta in reversed(deltas) if delta.finish), "stop")
                    over_at = self._loop.time()
                    if end is None:
                        self.close()  # after a stop string the engine must not work while the client reads
                for delta in deltas:
                    if delta.stop is not None and not over:
                        self._stream.drop_sample(delta.index)
                    yield delta
                if over:  # the last piece has left for the client, and what is counted comes behind it
                    return
                if end is not None:
                    raise error or unavailable("the engine ended a search without results", code="engine_failed")
        finally:
            if over_at is not None:
                self._metrics.end_to_end.observe(over_at - self._arrived_at)
            self.close()

    def write_to(self, outlet: Outlet, encode: Callable[[Delta], bytes]) -> None:
        """From now on, while the reader of `deltas` waits, write plain tokens of the only choice to `outlet`. The
        reader must have passed on what it got, and gets what is left: what may end the answer, and what an outlet
        that is closed does not take.

        Args:
            encode: returns the bytes for a delta; b"": there is nothing to write.
        """

        if (text := self._choices.only) is not None:
            self._stream.take_with(PlainWriter(self, text, outlet, encode))

    def fail(self, error: Exception) -> None:
        """Have the waiting reader of `deltas` raise an error: what was taken in its place could not be written."""
        self._stream.fail(error)

    def taken(self, delta: Delta, now: float) -> None:
        """Count plain tokens that were written beside the reader. `now`: loop time in seconds."""
        count = len(delta.tokens)
        self._note(count, now)
        self._metrics.per_token.tokens += count
        if self.job.remembered is not None:
            self._remember([delta])

    def _remember(self, deltas: Sequence[Delta]) -> None:
        """Keep the tokens of answers, and remember each that is complete as the model wrote it."""
        if self.job.remembered is None:
            return
        for delta in deltas:
            written = self._written.setdefault(delta.index, [])
            written += delta.tokens
            if delta.finish is not None and delta.stop is None:
                self.job.remembered.answered(written, self.job.eos_ids)

    def heard(self, pieces: Iterable[Piece], *, is_end: bool) -> None:
        """Note which tools an answer calls, piece by piece, and with its end tell the engine: it depends on them
        when the conversation goes on."""
        self._called.update(piece.name for piece in pieces if isinstance(piece, CallStart))
        if is_end and self._called:
            self._stream.tell(" ".join(["calls", *sorted(self._called)])[:ENDED_CHARACTERS_MAX])

    def limit(self, seconds: float) -> None:
        """End the generation with an error if it is not over after `seconds`."""
        detail = f"the request took longer than {seconds:.0f} s"
        self._timer = self._loop.call_later(seconds, self._stream.cut, TIMED_OUT, detail)

    def cut(self, reason: str, detail: str) -> None:
        """End the generation with an error for its reader."""
        self._stream.cut(reason, detail)

    def close(self) -> None:
        """Abort the request if it still runs, and count the generation. May be called again."""
        self._stream.close()
        if self._timer is not None:
            self._timer.cancel()
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close(self)

    def _error_of(self, end: End | None) -> ApiError | None:
        error = None if end is None else end.error()
        if end is not None and error is not None:
            self.outcome = OUTCOMES.get(end.reason, end.reason)
        return None if error is None else self.job.decoding.in_clients_words(error)

    def _measure(self, batch: Batch) -> None:
        # The samples of a request run side by side; the longest one tells how many steps they took.
        count = max(Counter(batch.samples).values()) if batch.samples else len(batch.tokens)
        if count or batch.hypotheses is not None:
            self._note(count, self._loop.time())

    def _note(self, count: int, now: float) -> None:
        """Note the arrival of tokens, or of the results of a search. `count`: their steps, if known."""
        self.steps += count or 1
        if self._last_token_at is None:
            self.first_token_at = now
            self._loop.call_soon(self._count_first)  # once the token is on its way to the client
        elif count:
            self._metrics.per_token.between((now - self._last_token_at) / count, count)
        self._last_token_at = now

    def _count_first(self) -> None:
        """Count a prompt that has its first token."""
        metrics, job, started = self._metrics, self.job, self.started
        if started is not None:
            metrics.phases.queued.observe(started.queued_s)
            metrics.phases.prefill.observe(self.prefill_s)
        metrics.first_token.observe(self.first_token_s or 0.0)
        metrics.prompt_tokens.inc(job.seen_tokens)
        metrics.cached_tokens.inc(self.cached_tokens)
        metrics.modules.tokens.inc(job.module_tokens)
        if job.cut.drops and started is not None:
            metrics.phases.truncations.labels(started.cut or "kept").inc()
