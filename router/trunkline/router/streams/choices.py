"""From the tokens of a request to the texts that its client sees: end tokens, detokenisation, stop strings. Pure.

One sample is the usual case and takes the shortest way. Each of several samples has a detokeniser, stop strings
and an end of its own. The engine learns nothing of a stop string before the last sample is over, and tokens that
still come for a sample that has ended are dropped here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from trunkline.controller.messages import TopLogprobs
from trunkline.router.jobs.job import Job
from trunkline.router.messages import FinishReason, Hypothesis
from trunkline.router.streams.streams import Batch
from trunkline.router.text.detokenizer import StopMatcher, TokenVocabulary, make_detokenizer

FinishName = Literal["stop", "length"]


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token that counts as output, with its log-probabilities."""

    token: int
    text_offset: int
    """Characters of output before this token's own."""
    logprobs: TopLogprobs | None


class Delta(msgspec.Struct):
    """What a client gets to see next."""

    text: str = ""
    logprobs: list[TokenLogprob] = []
    finish: FinishName | None = None
    """The regular end; after a stop string the sample still runs in the engine and must be dropped there."""
    stop: str | None = None
    """The stop string that ended it, if one did."""
    tokens: Sequence[int] = ()
    """The tokens behind it; their text may come later."""
    index: int = 0
    """Which of the request's choices goes on."""
    score: float | None = None
    """A beam search's result: what it was ranked by, …"""
    cumulative_logprob: float | None = None
    """… and the sum of its tokens' log-probabilities."""


class TextAssembler:
    """Turns the tokens of one sample into its text."""

    def __init__(self, job: Job, vocabulary: TokenVocabulary, index: int = 0) -> None:
        """`index`: the choice's, for its deltas."""
        self.index = index
        self._job = job
        self._detokenizer = make_detokenizer(
            vocabulary, skip_special_tokens=job.skip_special_tokens, at_start=job.at_start
        )
        self._matcher = StopMatcher(job.stops, include=job.include_stop)
        self._min_tokens = job.sampling.min_tokens
        self._characters = 0
        self.output_tokens = 0
        """Tokens that count, those of a stop string and the end token included."""

    def feed(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[TopLogprobs | None] = (),
        reason: str | None = None,
    ) -> Delta:
        """Take the next tokens and, with the last ones, why the sample ended ("stop" or "length").

        Tokens after a stop string are dropped. Not to be called after a delta with `finish`.
        """
        wanted = self._job.sampling.logprobs >= 0
        if (
            len(tokens) == 1
            and reason is None
            and not (wanted or self._job.stops or tokens[0] in self._job.eos_ids)
        ):
            # As nearly always: what follows would come to the same.
            self.output_tokens += 1
            text = self._detokenizer.feed(tokens[0])
            self._characters += len(text)
            return Delta(text, tokens=tokens, index=self.index)
        delta = Delta(logprobs=[], tokens=tokens, index=self.index)
        for index, token in enumerate(tokens):
            self.output_tokens += 1
            if wanted:
                delta.logprobs.append(
                    TokenLogprob(token, self._characters, logprobs[index] if index < len(logprobs) else None)
                )
            ends = token in self._job.eos_ids
            if ends and not self._job.include_stop:
                # The engine ends the sample with this token; its writing is no part of the text.
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
        """Let text through the stop matcher; True if it completed a stop string."""
        if not text:
            return False
        self._characters += len(text)
        if self.output_tokens <= self._min_tokens:
            delta.text += text  # a stop string does not end what has to be longer
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
    """All samples of one request, or all results of its beam search."""

    def __init__(self, job: Job, vocabulary: TokenVocabulary) -> None:
        self.output_tokens = 0
        """Tokens generated so far that count, over all samples."""
        self.all_over = False
        """Whether every text has had its delta with `finish`."""
        self._texts = [TextAssembler(job, vocabulary, index) for index in range(job.decoding.samples)]
        self._open = set(range(job.decoding.samples))
        self._searches = job.decoding.beam is not None
        self._only = self._texts[0] if job.decoding.samples == 1 and not self._searches else None

    def feed(self, batch: Batch, reason: str | None) -> list[Delta]:
        """Return what a batch adds, by sample in order.

        Args:
            reason: the regular end of the whole request, None if it goes on or failed.
        """
        if self._only is not None:
            delta = self._only.feed(batch.tokens, batch.logprobs, reason)
            self.output_tokens = self._only.output_tokens
            if delta.finish is not None:
                self.all_over = True
            return [delta]
        deltas = self._results(batch.hypotheses or []) if self._searches else self._samples(batch, reason)
        self.output_tokens = sum([text.output_tokens for text in self._texts])
        for delta in deltas:
            if delta.finish is not None:
                self._open.discard(delta.index)
        self.all_over = not self._open
        return deltas

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
