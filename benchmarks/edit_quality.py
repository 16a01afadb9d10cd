"""What it costs to go on with KV that was kept behind edits in the middle of a prompt, and what it would gain to
compute the first tokens behind each edit anew.

    python benchmarks/edit_quality.py [--quick] [--json PATH] [--parts texts,facts,stale,cleared]

The demo model, float32, by masking_model.py. A history is computed whole; then parts of its middle are cleared
(edit_texts.py), and a text goes on behind what is left. Ways:

- `full`: what is left is computed anew, as a plain prompt.
- `none`: nothing is left but the instructions: what the history is worth.
- `kept`: KV behind the edits is kept as it was computed and acts at its new places; of each piece behind an edit
  the first `window` tokens are computed anew.

`nll`: mean loss of the text's tokens in nats; `gain`: of the loss of `none` minus that of `full` the share that is
kept; `standard_error`: of that, from the spread over tasks; `kl`: divergence from `full`, in nats a token. Tasks:

- texts: held-out text, six cleared parts of 160 tokens before kept ones of 96, and the 192 tokens that follow.
- facts: six results of tools of about 160 tokens, cleared, before turns that tell a fact; questions about these.
  `exact`: answers of which every token is the likeliest.
- stale: likewise, but each result ended with an older value of the fact that is told behind it.
- cleared: questions about facts that only cleared results told. `exact` right answers remember what was cleared.

The first task's `kept` is computed by a rank, too, on the layout that cuts have; `difference` is the largest of a
log-probability.
"""

from __future__ import annotations

import argparse
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

import numpy as np
import torch
from cut_texts import DEMO_MODEL
from edit_texts import EditTask, EditTexts
from masking_model import MaskedModel, Said, State
from masking_quality import DIFFERENCE_MAX, share_kept
from masking_rank import CHUNK, Rank, RankText
from report import Report, argument_parser

PARTS: Final = ("texts", "facts", "stale", "cleared")
WINDOWS: Final = (0, 8, 16, 32, 64)

Seen = list[tuple[State, int]]
"""States, and the positions from which on they act."""


class Way(NamedTuple):
    """How the prompt goes on behind its edits."""

    name: str
    window: int = 0


WAYS: Final = (Way("full"), Way("none"), *(Way("kept", window) for window in WINDOWS))


class Found(NamedTuple):
    """What a way made of tasks."""

    losses: list[float]
    """By task: mean over all targets' scored tokens."""
    divergences: list[float]
    """Likewise, from `full`."""
    exact: list[bool]
    """By target."""


def build(model: MaskedModel, task: EditTask, way: Way, whole: State) -> tuple[Seen, int]:
    """What a new text sees, and its position.

    Args:
        whole: of the whole history, as it was computed.
    """
    if way.name == "none":
        return [(model.read(task.pieces[0], 0)[0], 0)], len(task.pieces[0])
    if way.name == "full":
        left = [token for piece in task.kept for token in piece]
        return [(model.read(left, 0)[0], 0)], len(left)
    seen: Seen = []
    end = 0
    for number, (start, stop) in enumerate(kept_ranges(task)):
        window = min(way.window, stop - start) if number else 0
        if window:
            seen.append((model.read(task.kept[number][:window], end, seen)[0], end))
        if start + window < stop:
            seen.append((part(whole, start + window, stop), end + window))
        end += stop - start
    return seen, end


def kept_ranges(task: EditTask) -> list[tuple[int, int]]:
    """Of the history's tokens."""
    ends = accumulate(map(len, task.pieces), initial=0)
    return list(pairwise(ends))[::2]


def part(state: State, start: int, stop: int) -> State:
    return State(state.keys[:, :, start:stop], state.values[:, :, start:stop])


def divergence(full: Said, other: Said, first: int) -> float:
    """Mean over the scored tokens, in nats."""
    terms = (full.distribution.exp() * (full.distribution - other.distribution)).sum(dim=1)
    return float(terms[first:].mean())


def measure(name: str, tasks: list[EditTask], threads: int, report: Report) -> None:
    """Every way with every task."""
    torch.set_num_threads(threads)
    model = MaskedModel(DEMO_MODEL)
    found = {way: Found([], [], []) for way in WAYS}
    for task in tasks:
        read_task(model, task, found)
    full, none = (np.array(found[way].losses) for way in WAYS[:2])
    for way, kept in found.items():
        case = {"part": name, "way": way.name, "window": way.window}
        report.add(case, "nll", float(np.mean(kept.losses)), "nats", len(tasks))
        if name != "cleared":
            share, error = share_kept(np.array(kept.losses), full, none)
            report.add(case, "gain", 100 * share, "%", len(tasks))
            report.add(case, "standard_error", 100 * error, "%", len(tasks))
        report.add(case, "kl", float(np.mean(kept.divergences)), "nats", len(tasks))
        if name != "texts":
            report.add(case, "exact", 100 * float(np.mean(kept.exact)), "%", len(tasks))
    difference = differs_by(model, tasks[0], threads)
    report.add({"part": name, "way": "kept"}, "difference", difference, "nats", 1)
    if difference > DIFFERENCE_MAX:
        raise SystemExit(f"{name}: the rank says something else, by {difference} nats")


def read_task(model: MaskedModel, task: EditTask, found: dict[Way, Found]) -> None:
    """Add what the model says of a task's targets."""
    whole, _ = model.read([token for piece in task.pieces for token in piece], 0)
    contexts = {way: build(model, task, way, whole) for way in WAYS}
    losses: dict[Way, list[float]] = {way: [] for way in WAYS}
    divergences: dict[Way, list[float]] = {way: [] for way in WAYS}
    for target in task.targets:
        first = target.scored_from - 1
        said = {way: model.read(target.tokens, end, seen)[1] for way, (seen, end) in contexts.items()}
        for way, own in said.items():
            losses[way] += (-own.logprobs[first:]).tolist()
            divergences[way].append(divergence(said[WAYS[0]], own, first))
            found[way].exact.append(bool(own.exact[first:].all()))
    for way, kept in found.items():
        kept.losses.append(float(np.mean(losses[way])))
        kept.divergences.append(float(np.mean(divergences[way])))


def differs_by(model: MaskedModel, task: EditTask, threads: int) -> float:
    """By how much a rank's log-probabilities differ where all KV behind the edits is kept."""
    whole, _ = model.read([token for piece in task.pieces for token in piece], 0)
    seen, end = build(model, task, Way("kept"), whole)
    rank = Rank(DEMO_MODEL, blocks=256, threads=threads)
    text, _ = rank.read([token for piece in task.pieces for token in piece], 0)
    places: list[tuple[RankText, int]] = []
    at = 0
    for start, stop in kept_ranges(task):
        blocks = text.blocks[start // CHUNK : -(-stop // CHUNK)]
        places.append((RankText(blocks, stop - start, start, start % CHUNK), at))
        at += stop - start
    differences = [0.0]
    for target in task.targets:
        _, logprobs = rank.read(target.tokens, end, places)
        differences.append(float(np.abs(logprobs - model.read(target.tokens, end, seen)[1].logprobs).max()))
    rank.close()
    return max(differences)


def tasks_of(name: str, texts: EditTexts, arguments: argparse.Namespace) -> list[EditTask]:
    if name == "texts":
        return texts.edited_stretches(4 if arguments.quick else 64)
    count = 3 if arguments.quick else 64
    return texts.conversations(count, stale=name == "stale", about_cleared=name == "cleared")


def main() -> None:
    parser = argument_parser(__doc__, PARTS)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    wanted = arguments.parts
    texts, report = EditTexts(), Report("edit_quality")
    for name in PARTS:
        if name in wanted:
            measure(name, tasks_of(name, texts, arguments), arguments.threads, report)
    report.finish(arguments.json, wide=True)


if __name__ == "__main__":
    main()
