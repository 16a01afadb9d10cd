"""What truncation costs: perplexity and recall behind cuts, on kept KV or computed anew (CachedAttention §4.3.4).

    python benchmarks/truncation_quality.py [--quick] [--json PATH] [--parts perplexity,drift,recall]

The demo model and the worker's runner read held-out text until the context of 2,048 tokens is full, drop the
oldest tokens behind the sinks so that the ratio is retained, read on until it is full again, and so on. Methods
(ca, tt, nkvt) are those of cut_reader.py; all read the same tokens.

- perplexity: of the tokens that follow the cuts, all of them up to the next cut but the first (which is foreseen
  before the cut). `truncations` 1: many stretches of text, one cut each; 12: few stretches, all twelve parts.
  `minus_tt` is the difference to token truncation on the same tokens; `standard_error` is that of this difference,
  from its spread over the parts. NKVT reads fewer stretches; `times_tt` compares it on these.
- drift: fifty cuts; `part_perplexity` by part, and whether CA minus TT grows (`minus_tt` over its last ten parts).
- recall: talks of 2,048 tokens tell facts among prose; behind one cut, questions about facts in what was kept.
  `recall`: answers that greedy decoding would give exactly. The demo model's own limit is what TT shows.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from cut_reader import METHODS, Job, Lane, Method, Reader, Scores
from cut_texts import DEMO_MODEL, Question, Texts
from numpy.typing import NDArray
from report import Report, argument_parser

CONTEXT: Final = 2048
RATIOS: Final = (0.5, 0.25)
SINKS: Final = (0, 4)
PARTS: Final = ("perplexity", "drift", "recall")
BLOCKS: Final = 1280
LAST_PARTS: Final = 10

Losses = NDArray[np.float64]
"""`[streams, parts]`: mean over a part's tokens, in nats."""


class Way(NamedTuple):
    """How a lane goes on at a cut."""

    method: Method
    sinks: int


def dropped_tokens(ratio: float) -> int:
    """By each cut."""
    return int((1 - ratio) * CONTEXT)


def read_stream(reader: Reader, stream: list[int], ratio: float, ways: list[Way]) -> dict[Way, list[float]]:
    """Mean loss of each part between cuts, by way; the parts are what the stream has behind a full context."""
    drop = dropped_tokens(ratio)
    first = Lane("ca", 0, 0)
    reader.read([Job(first, stream[:CONTEXT], is_scored=False)])
    lanes = {way: reader.fork(first, way.method, way.sinks) for way in ways}
    losses: dict[Way, list[float]] = {way: [] for way in ways}
    for start in range(CONTEXT, len(stream), drop):
        again = [job for lane in lanes.values() for job in reader.cut(lane, drop)]
        reader.read(again)
        tokens = stream[start : start + drop]
        found = reader.read([Job(lane, tokens) for lane in lanes.values()])
        for way, scores in zip(lanes, found, strict=True):
            assert scores is not None
            losses[way].append(-float(scores.logprobs.mean(dtype=np.float64)))
    for lane in (*lanes.values(), first):
        reader.release(lane)
    return losses


def read_streams(
    reader: Reader, texts: Texts, shape: tuple[int, int], ratio: float, sinks: tuple[int, ...], naive: int
) -> dict[Way, Losses]:
    """Of (streams, parts each); the naive way reads the first `naive` streams only."""
    count, parts = shape
    streams = texts.streams(count, CONTEXT + parts * dropped_tokens(ratio))
    found: dict[Way, list[list[float]]] = {}
    for index, stream in enumerate(streams):
        methods = METHODS if index < naive else METHODS[:2]
        ways = [Way(method, head) for head in sinks for method in methods]
        for way, losses in read_stream(reader, stream, ratio, ways).items():
            found.setdefault(way, []).append(losses)
    return {way: np.array(rows) for way, rows in found.items()}


def add_perplexities(report: Report, losses: dict[Way, Losses], ratio: float) -> None:
    """Perplexities over all parts, and what they are beside token truncation's."""
    for way, own in losses.items():
        count, parts = own.shape
        case = {"method": way.method, "ratio": ratio, "truncations": parts, "sinks": way.sinks}
        report.add(case, "perplexity", float(np.exp(own.mean())), "", count)
        other = losses[Way("tt", way.sinks)][:count]
        if way.method == "ca":
            difference, error = compare(own, other)
            report.add(case, "minus_tt", difference, "", count)
            report.add(case, "standard_error", error, "", count)
        if way.method == "nkvt":
            report.add(case, "times_tt", float(np.exp(own.mean() - other.mean())), "", count)


def compare(own: Losses, other: Losses) -> tuple[float, float]:
    """Difference of two perplexities of the same tokens and its standard error, from the spread over parts."""
    level = float(np.exp(other.mean()))
    differences = (own - other).ravel()
    spread = float(differences.std(ddof=1)) if len(differences) > 1 else float("nan")
    return float(np.exp(own.mean())) - level, level * spread / len(differences) ** 0.5


def perplexity(arguments: argparse.Namespace, reader: Reader, texts: Texts, report: Report) -> None:
    if arguments.quick:
        losses = read_streams(reader, texts, (3, 1), 0.5, SINKS, 1)
        add_perplexities(report, losses, 0.5)
        return
    for shape, naive in (((32, 1), 8), ((3, 12), 1)):
        for ratio in RATIOS:
            add_perplexities(report, read_streams(reader, texts, shape, ratio, SINKS, naive), ratio)


def drift(arguments: argparse.Namespace, reader: Reader, texts: Texts, report: Report) -> None:
    ratio, shape = 0.5, (1, 4) if arguments.quick else (2, 50)
    losses = read_streams(reader, texts, shape, ratio, SINKS, 1)
    add_perplexities(report, losses, ratio)
    for way, own in losses.items():
        for part, loss in enumerate(own.mean(axis=0), 1):
            case = {"method": way.method, "ratio": ratio, "sinks": way.sinks, "part": part}
            report.add(case, "part_perplexity", float(np.exp(loss)), "", len(own))
    for sinks in SINKS:
        own, other = (losses[Way(method, sinks)][:, -LAST_PARTS:] for method in METHODS[:2])
        difference, error = compare(own, other)
        case = {
            "method": "ca",
            "ratio": ratio,
            "truncations": shape[1],
            "sinks": sinks,
            "last_parts": own.shape[1],
        }
        report.add(case, "minus_tt", difference, "", shape[0])
        report.add(case, "standard_error", error, "", shape[0])


def recall(arguments: argparse.Namespace, reader: Reader, texts: Texts, report: Report) -> None:
    talks = 2 if arguments.quick else 24
    right: dict[tuple[float, Way], list[bool]] = {}
    for seed in range(talks):
        talk = texts.talk(seed, CONTEXT)
        first = Lane("ca", 0, 0)
        reader.read([Job(first, talk.tokens, is_scored=False)])
        for ratio in RATIOS[: 1 if arguments.quick else 2]:
            drop = dropped_tokens(ratio)
            asked = [question for question in talk.questions if question.place >= drop + max(SINKS) + 4]
            for way in (Way(method, head) for head in SINKS for method in METHODS):
                lane = reader.fork(first, way.method, way.sinks)
                reader.read(reader.cut(lane, drop))
                right.setdefault((ratio, way), []).extend(ask(reader, lane, asked))
                reader.release(lane)
        reader.release(first)
    for (ratio, way), flags in right.items():
        case = {
            "method": way.method,
            "ratio": ratio,
            "truncations": 1,
            "sinks": way.sinks,
            "questions": len(flags),
        }
        share = sum(flags) / len(flags)
        report.add(case, "recall", 100 * share, "%", talks)
        report.add(case, "standard_error", 100 * (share * (1 - share) / len(flags)) ** 0.5, "%", talks)


def ask(reader: Reader, lane: Lane, questions: list[Question]) -> list[bool]:
    """Which questions would be answered exactly, each asked behind the same text."""
    lanes = [reader.fork(lane) for _ in questions]
    found = reader.read([Job(own, question.tokens) for own, question in zip(lanes, questions, strict=True)])
    for own in lanes:
        reader.release(own)
    return [is_exact(scores, question) for scores, question in zip(found, questions, strict=True)]


def is_exact(scores: Scores | None, question: Question) -> bool:
    """Whether each token of the answer was the likeliest."""
    assert scores is not None
    return bool((scores.ranks[question.answer - 1 :] == 1).all())


def main() -> None:
    parser = argument_parser(__doc__, PARTS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", help="of weights and KV")
    arguments = parser.parse_args()
    wanted = arguments.parts
    texts, report = Texts(), Report(Path(__file__).stem)
    reader = Reader(DEMO_MODEL, blocks=BLOCKS, dtype=arguments.dtype, threads=arguments.threads)
    for name, measure in (("perplexity", perplexity), ("drift", drift), ("recall", recall)):
        if name in wanted:
            measure(arguments, reader, texts, report)
    reader.close()
    report.finish(arguments.json, wide=True)


if __name__ == "__main__":
    main()
