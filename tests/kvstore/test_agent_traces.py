"""The traces of benchmarks/agents.py: reading them, and which blocks have the same name."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest
from agent_traces import BLOCK, NONE, ChunkNames, TraceError, conversation, read_traces, synthetic, synthetic_lines
from seeds import seeds

LINE: dict[str, Any] = {
    "id": "talk",
    "tools": 640,
    "system": 100,
    "requests": [
        [0.0, 1000, 100, 0.0, 2.5, -1, 0],
        [30.0, 1200, 50, 20.0, None, 0, 15],
        [60.0, 1300, 70, None, 3.0, 3, 12],
    ],
    "agents": [
        {
            "t": 5.5,
            "first": 1,
            "kind": "Explore",
            "tools": 320,
            "system": 64,
            "requests": [[0.0, 500, 10, 0.0, 1.0, -1, 0], [4.0, 600, 10, 3.0, 1.0, 1, 7]],
        }
    ],
}


def shared(one: list[bytes], other: list[bytes]) -> int:
    """Return how many names two prompts begin with in common."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def test_requests_are_numbered_as_they_were_recorded() -> None:
    found = conversation(LINE).requests
    assert [(request.number, request.agent, request.turn, request.at_s) for request in found] == [
        (0, 0, 0, 0.0),
        (1, 1, 0, 5.5),
        (2, 1, 1, 9.5),
        (3, 0, 1, 30.0),
        (4, 0, 2, 60.0),
    ]
    assert [request.is_last for request in found] == [False, False, True, False, True]
    assert math.isnan(found[3].api_s)
    assert math.isnan(found[4].think_s)
    assert [conversation(LINE).edited(request) for request in found] == [0, 0, 0, 0, 18 - 12]


def wrong(**changes: Any) -> dict[str, Any]:
    """Return the line with other values of its second main request, or of the conversation."""
    line: dict[str, Any] = json.loads(json.dumps(LINE))
    for place, value in changes.items():
        if place in ("at", "in_", "out", "base", "keep"):
            line["requests"][1][{"at": 0, "in_": 1, "out": 2, "base": 5, "keep": 6}[place]] = value
        elif place == "first":
            line["agents"][0]["first"] = value
        else:
            line[place] = value
    return line


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (wrong(base=3), "base 3 is no earlier request"),
        (wrong(keep=16), "keeps 16 blocks of 15"),
        (wrong(base=-1), "keeps 15 blocks of 0"),
        (wrong(in_=0), "in is 0"),
        (wrong(out=1.5), "out is 1.5; it is a whole number"),
        (wrong(at=None), "t is None"),
        (wrong(at=math.inf), "t is inf"),
        (wrong(tools=True), "tools is True"),
        (wrong(requests=[]), "talk has no list of requests"),
        (wrong(requests=[[1, 2]]), "is no list of 7 numbers"),
        (wrong(agents={}), "agents is no list"),
        (wrong(first=9), "requests up to number 10, but 5 in all"),
        ([], "no object"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_place(line: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(LINE) + "\n" + json.dumps(line) + "\n")
    with pytest.raises(TraceError, match=r"^line 2: .*" + message.replace(".", r"\.")):
        read_traces(path)
    assert len(read_traces(path, 1)) == 1


def test_a_file_may_be_gzipped(tmp_path: Path) -> None:
    lines = list(synthetic_lines(3, seed=1))
    for name, opened in (("plain", open), ("packed", gzip.open)):
        with opened(tmp_path / name, "wt") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))
        assert read_traces(tmp_path / name) == synthetic(3, seed=1)


def test_an_answer_has_the_names_of_the_prompt_that_goes_on_with_it() -> None:
    names = ChunkNames(conversation(LINE), 1)
    first, second = names.prompt(0), names.prompt(3)
    assert len(first) == 15
    assert shared(first, second) == 15
    assert second[:17] == [*first, *names.answer(0)]
    assert shared(names.prompt(1), first) == 0
    assert shared(names.prompt(4), second) == 12
    assert set(names.answer(3)).isdisjoint(names.prompt(4)), "that prompt went on from an edited one"


def test_conversations_of_a_client_begin_alike() -> None:
    one, same = (conversation({**LINE, "id": name}) for name in ("one", "same"))
    tools, other = (
        conversation({**LINE, "id": "x", "system": 101}),
        conversation({**LINE, "id": "y", "tools": 641}),
    )
    prompts = [ChunkNames(talk, 1).prompt(0) for talk in (one, same, tools, other)]
    assert [shared(prompts[0], prompt) for prompt in prompts[1:]] == [740 // BLOCK, 640 // BLOCK, 0]
    apart = ChunkNames(same, 1, clients=False).prompt(0)
    assert shared(prompts[0], apart) == 0


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize("blocks", [1, 4])
def test_prompts_share_what_was_recorded_and_nothing_behind_it(seed: int, blocks: int) -> None:
    count = 0
    for talk in synthetic(12, seed):
        names = ChunkNames(talk, blocks, clients=False)
        owners: dict[bytes, tuple[int, bytes]] = {}
        for request in talk.requests:
            prompt, answer = names.prompt(request.number), names.answer(request.number)
            assert len(prompt) == request.blocks // blocks
            assert len(prompt) + len(answer) == (request.prompt + request.answer) // BLOCK // blocks
            if request.base != NONE:
                base = names.prompt(request.base)
                assert shared(prompt, base) == request.keep // blocks
                count += shared([*base, *names.answer(request.base)], prompt) > len(base)
            above = (-1, b"")
            for at, name in enumerate([*prompt, *answer]):
                assert owners.setdefault(name, above) == above, "a name stands for all before it"
                above = (at, name)
    assert count > 20, "answers are found again"
