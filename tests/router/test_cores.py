"""The pure parts between the wire and the client: text assembly, streams, the samples of a request."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router.harness import EOS, VOCAB_SIZE

from trunkline.controller.reports import TopLogprobs
from trunkline.router.http.answers import TextEvents, event
from trunkline.router.jobs.decoding import Decoding
from trunkline.router.jobs.job import Job
from trunkline.router.messages import Finished, FinishReason, Started
from trunkline.router.streams.generation import Choices, TextAssembler
from trunkline.router.streams.streams import End, Stream
from trunkline.router.text.tokenizer import Tokenizer
from trunkline.worker.messages import Sampling

quick = settings(max_examples=100, deadline=None)  # machines are shared


def job(*stops: str, include: bool = False, logprobs: int = -1, skip: bool = True) -> Job:
    return Job(
        prompt=[7],
        max_tokens=100,
        sampling=Sampling(logprobs=logprobs),
        eos_ids=frozenset({EOS}),
        stops=stops,
        include_stop=include,
        skip_special_tokens=skip,
    )


@quick
@given(data=st.data(), ids=st.lists(st.integers(6, VOCAB_SIZE - 1), max_size=40), ends=st.booleans())
def test_text_does_not_depend_on_batches(
    tokenizer: Tokenizer, data: st.DataObject, ids: list[int], ends: bool
) -> None:
    tokens = [*ids, EOS] if ends else ids
    assembler = TextAssembler(job(), tokenizer.vocabulary)
    text, rest = "", tokens
    finish = None
    while rest:
        count = data.draw(st.integers(1, len(rest)))
        delta = assembler.feed(rest[:count])
        text, rest, finish = text + delta.text, rest[count:], delta.finish
    if not ends:
        delta = assembler.feed([], reason=FinishReason.LENGTH)
        text, finish = text + delta.text, delta.finish
    assert text == tokenizer.decode(ids)
    assert finish == ("stop" if ends else "length")
    assert assembler.output_tokens == len(tokens)


def test_a_stop_string_may_end_inside_a_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three four", add_special_tokens=False)
    delta = TextAssembler(job("wo t"), tokenizer.vocabulary).feed(ids)
    assert (delta.text, delta.finish) == ("one t", "stop")
    held = TextAssembler(job("four five"), tokenizer.vocabulary)
    first = held.feed(ids)
    assert first.text == "one two three "
    assert held.feed([], reason=FinishReason.LENGTH).text == "four"


def test_held_text_comes_before_the_end_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one tw", add_special_tokens=False)
    for include in (False, True):
        delta = TextAssembler(job("two", include=include), tokenizer.vocabulary).feed([*ids, EOS, 50])
        assert (delta.text, delta.finish) == ("one tw", "stop")


def test_an_unfinished_character_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a\U00012000", add_special_tokens=False)[:-1]
    assembler = TextAssembler(job(), tokenizer.vocabulary)
    shown = assembler.feed(ids).text
    assert "\ufffd" not in shown
    assert shown + assembler.feed([], reason=FinishReason.LENGTH).text == tokenizer.decode(ids)


def test_logprobs_travel_with_their_tokens(tokenizer: Tokenizer) -> None:
    top = TopLogprobs(-1.0, b"", b"")
    assembler = TextAssembler(job(logprobs=0), tokenizer.vocabulary)
    ids = tokenizer.encode("Hello there", add_special_tokens=False)
    delta = assembler.feed(ids, [top] * len(ids))
    assert [entry.token for entry in delta.logprobs] == ids
    assert delta.logprobs[0].text_offset == 0
    assert assembler.feed([ids[0]]).logprobs[0].logprobs is None, "an engine that left them out does no harm"


class Books:
    """What a link would do when a stream lets go."""

    def __init__(self) -> None:
        self.releases: list[tuple[int, bool]] = []

    def release(self, request: int, abort: bool) -> None:
        self.releases.append((request, abort))


@quick
@given(calls=st.lists(st.sampled_from(["finish", "close", "cut", "push", "start"]), max_size=8))
def test_a_stream_is_released_exactly_once(calls: list[str]) -> None:
    books = Books()
    stream = Stream(3, books.release)
    for call in calls:
        match call:
            case "finish":
                stream.receive(Finished(3, FinishReason.STOP))
            case "close":
                stream.close()
            case "cut":
                stream.cut("timeout", "")
            case "push":
                stream.push(1, None)
            case "start":
                stream.receive(Started(1, 0))
    ends = [call for call in calls if call in ("finish", "close", "cut")]
    assert books.releases == ([(3, ends[0] != "finish")] if ends else [])
    assert stream.ended == bool(ends)


def test_a_reader_wakes_for_each_batch() -> None:
    async def scene() -> None:
        stream = Stream(1, Books().release)
        reader = asyncio.create_task(stream.next())
        await asyncio.sleep(0)
        stream.receive(Started(1, 4))
        await asyncio.sleep(0)
        assert not reader.done(), "admission alone is nothing to read"
        stream.push(5, None)
        stream.push(6, None)
        batch = await reader
        assert (batch.tokens, batch.end, stream.cached_tokens) == ([5, 6], None, 4)
        await stream.wait_first()
        stream.receive(Finished(1, FinishReason.LENGTH, "d"))
        stream.receive(Finished(1, FinishReason.ENGINE_FAILED, "later"))
        assert stream.failure == (FinishReason.LENGTH, "d", "")
        assert (await stream.next()).end == (FinishReason.LENGTH, "d", "")

    asyncio.run(scene())


@pytest.mark.parametrize("reason", list(FinishReason))
def test_every_reason_has_an_answer(reason: FinishReason) -> None:
    error = End(reason).error()
    assert (error is None) == (reason in (FinishReason.STOP, FinishReason.LENGTH))
    assert error is None or error.message


def test_events_that_differ_in_their_text_only() -> None:
    def whole(index: int, text: str) -> bytes:
        return event({"id": "x", "choices": [{"index": index, "text": text}], "last": "text"})

    texts = TextEvents(whole)
    for index in (0, 1, 0):
        for text in ("", "a", '"\\\n', "wörld 😀", "\ue000the text goes here\ue000"):
            assert texts.event(index, text) == whole(index, text)


def test_a_cut_that_is_computed_anew_on_the_way() -> None:
    stream = Stream(1, Books().release)
    stream.receive(Started(1, 40, cut="kept", exact=False))
    stream.receive(Started(1, 0, cut="kept"))
    assert stream.started == Started(1, 40, cut="kept", exact=False), "the first counts"
    stream.receive(Started(1, 0, cut="recomputed"))
    assert stream.started == Started(1, 40, cut="recomputed")


@settings(max_examples=60, deadline=None)
@given(data=st.data(), count=st.integers(2, 5))
def test_mixed_tokens_give_each_sample_its_own_text(tokenizer: Tokenizer, data: st.DataObject, count: int) -> None:
    """However the samples' tokens are mixed and cut into batches, each text is what it would be alone."""
    word = st.sampled_from(["one", " two", " STOP", " it", "\n", " wörld", "😀"])
    words = [data.draw(st.lists(word, max_size=8), label=f"sample {index}") for index in range(count)]
    rest = [[*tokenizer.encode("".join(some), add_special_tokens=False), EOS] for some in words]
    tokens = [list(ids) for ids in rest]
    job = Job([7], 100, Sampling(), frozenset({EOS}), stops=("STOP it",), decoding=Decoding(count, count))
    books = Books()
    stream = Stream(3, books.release, samples=count)
    choices = Choices(job, tokenizer.vocabulary)
    texts, finishes = [""] * count, [0] * count

    async def read() -> None:
        batch = await stream.next()
        for delta in choices.feed(batch, None if batch.end is None else batch.end.reason):
            assert not finishes[delta.index], "nothing follows an end"
            texts[delta.index] += delta.text
            finishes[delta.index] += delta.finish is not None

    while any(rest) and not choices.all_over:
        sample = data.draw(st.sampled_from([index for index in range(count) if rest[index]]))
        stream.push(rest[sample].pop(0), None, sample)
        if not rest[sample]:
            stream.finish_sample(sample, FinishReason.STOP)
        if data.draw(st.booleans()) or not any(rest):
            asyncio.run(read())
    assert choices.all_over
    assert finishes == [1] * count
    for index, ids in enumerate(tokens):
        alone = TextAssembler(job, tokenizer.vocabulary).feed(ids)
        assert texts[index] == alone.text
    assert books.releases == ([] if any(rest) else [(3, False)])


def test_a_sample_that_is_not_there() -> None:
    stream = Stream(1, Books().release, samples=2)
    for wrong in (2, -1):
        with pytest.raises(ValueError, match="sample"):
            stream.push(5, None, wrong)
        with pytest.raises(ValueError, match="sample"):
            stream.finish_sample(wrong, FinishReason.STOP)
