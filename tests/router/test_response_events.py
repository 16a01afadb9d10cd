"""The events of a response in the background: what clients are told if its request is run several times."""

from __future__ import annotations

import random
from typing import Any

import pytest
from seeds import seeds

from trunkline.router.api.blocks import named_event
from trunkline.router.stores.response_events import EventLog, events_of

STEPS = 3000


class Answer:
    """An answer that runs write again, with the same texts in other pieces."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.texts = ["".join(rng.choices("ab é\n", k=rng.randint(0, 60))) for _ in range(rng.randint(1, 3))]

    def deltas(self, item: int, text: str) -> list[dict[str, Any]]:
        """A text in pieces; each character is a token."""
        cuts = sorted(self.rng.sample(range(len(text) + 1), min(len(text), self.rng.randint(0, 8))))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        kind, place = "response.output_text.delta", {"output_index": item, "content_index": 0}
        return [
            {"type": kind, **place, "delta": piece, "logprobs": [{"token": c} for c in piece]}
            for piece in pieces
            if piece
        ]

    def run(self) -> list[bytes]:
        """What one run sends, event by event."""
        events: list[dict[str, Any]] = [{"type": "response.created"}, {"type": "response.in_progress"}]
        for item, text in enumerate(self.texts):
            events.append({"type": "response.output_item.added", "output_index": item})
            events += self.deltas(item, text)
            events.append({"type": "response.output_text.done", "output_index": item, "text": text})
            events += [{"type": "response.again", "output_index": item}] * 2
        events.append({"type": "response.completed", "response": {"status": "completed"}})
        return [named_event(event["type"], {**event, "sequence_number": n}) for n, event in enumerate(events)]

    def check(self, told: list[dict[str, Any]]) -> None:
        """What a client was told is one answer, with no gap and nothing twice."""
        assert [event["sequence_number"] for event in told] == list(range(len(told)))
        assert [event["type"] for event in told[:3]] == [
            "response.created", "response.queued", "response.in_progress",
        ]  # fmt: skip
        assert told[-1]["type"] == "response.completed"
        for item, text in enumerate(self.texts):
            own = [event for event in told if event.get("output_index") == item]
            deltas = own[1:-3]
            assert [event["type"] for event in (own[0], *own[-3:])] == [
                "response.output_item.added", "response.output_text.done", "response.again", "response.again",
            ]  # fmt: skip
            assert {event["type"] for event in deltas} <= {"response.output_text.delta"}
            assert "".join(event["delta"] for event in deltas) == text
            assert "".join(each["token"] for event in deltas for each in event["logprobs"]) == text


@pytest.mark.parametrize("seed", seeds(2))
def test_runs_that_end_anywhere_tell_one_answer(seed: int) -> None:
    rng = random.Random(seed)
    steps = 0
    while steps < STEPS:
        answer = Answer(rng)
        log = EventLog()
        log.add("response.created", response={})
        log.add("response.queued", response={})
        chunks = log.flush()
        while log.end is None:
            if rng.random() < 0.5:  # another router goes on from what is stored
                log = EventLog(chunks)
            log.begin()
            run = answer.run()
            for part in run[: rng.choice([len(run), rng.randint(0, len(run))])]:
                log.take(part)
                steps += 1
                if rng.random() < 0.3:
                    chunks += log.flush()
            if log.end is not None or rng.random() < 0.5:
                chunks += log.flush()
        told = [event for chunk in chunks for event in events_of(chunk)]
        answer.check(told)
        after = rng.randint(-1, len(told))
        assert [event for chunk in chunks for event in events_of(chunk, after)] == told[after + 1 :]


def test_pieces_that_are_stored_together_are_one_event() -> None:
    log = EventLog()
    for text in ("one ", "two ", "three"):
        log.take(named_event("d", {"type": "d", "output_index": 0, "delta": text, "sequence_number": 9}))
    [chunk] = log.flush()
    assert [(event["delta"], event["sequence_number"]) for event in events_of(chunk)] == [("one two three", 0)]
    assert log.flush() == []
