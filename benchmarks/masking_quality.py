"""What masking modules from each other costs in quality (Prompt Cache §3.3, §5.3).

    python benchmarks/masking_quality.py [--quick] [--json PATH] [--parts texts,facts,answers]

The demo model, float32. Documents become a context in the ways of masking_ways.py; a text goes on behind them.

- texts: held-out text (masking_texts.py): six documents of 128 tokens, and the 256 tokens that follow. `nll`: mean
  loss of these in nats; `kept`: of the context's gain, loss of `none` minus loss of `plain`, the share that is
  left; `standard_error` from the spread over stretches; `reused`: where the first tokens of moved documents are
  computed again, the share of the documents' tokens whose kept KV is used.
- facts: six documents of about 100 tokens with a made-up fact each, and a question about every fact. Likewise, of
  the answer's tokens; `exact`: answers of which every token is the likeliest.
- answers: the same questions through engine and rank, answered greedily. `plain`: a prompt without modules; the
  others: documents as modules of that scope. `all`: all documents in their order. `some`: for each question four
  of them, the one that is asked about among them, in an order of its own, packed. `holes`: these four at their
  places in the schema. `exact`: right answers; `same`: answers that equal those of `plain` on the same
  documents in the same order; `cached`: of the prompts' tokens, those that were not computed for them.

`texts` and `facts` are computed by masking_model.py, which also takes wrong positions. The first task of each is
computed by a rank, too (masking_rank.py): `difference` is the largest between the two, of a log-probability.
"""

from __future__ import annotations

import random
from typing import Final, NamedTuple

import numpy as np
import torch
from cut_texts import DEMO_MODEL
from masking_model import MaskedModel
from masking_rank import Rank
from masking_texts import ModuleTexts, Task
from masking_ways import WAYS, Way, build
from module_loop import SCOPES, ModuleLoop, ModulePrompt, Placed, Scope, packed
from numpy.typing import NDArray
from report import Report, argument_parser

from trunkline.controller.engine_config import EngineConfig

PARTS: Final = ("texts", "facts", "answers")
CHUNK: Final = 64
CONTEXT: Final = 2048
CHOSEN: Final = 4
ANSWER_TOKENS_MAX: Final = 40
DIFFERENCE_MAX: Final = 1e-3
"""Of float32 log-probabilities that two ways of computing the same may have."""


class Found(NamedTuple):
    """What a way made of tasks."""

    losses: list[float]
    """By task: mean over all targets' scored tokens."""
    exact: list[bool]
    """By target."""
    differences: list[float]
    """Of log-probabilities, by target that a rank read, too."""


# --- texts, facts


def measure(name: str, tasks: list[Task], threads: int, report: Report) -> None:
    """Every way with every task."""
    torch.set_num_threads(threads)
    model, rank = MaskedModel(DEMO_MODEL), Rank(DEMO_MODEL, blocks=256, threads=threads)
    found = {way: Found([], [], []) for way in WAYS}
    for seed, task in enumerate(tasks):
        for way, kept in found.items():
            read_task(model, rank if seed == 0 and not way.is_wrong else None, task, way, seed, kept)
    rank.close()
    plain, none = (np.array(found[Way(scope)].losses) for scope in ("plain", "none"))
    for way, kept in found.items():
        case = {"part": name, "scope": way.scope, "gaps": way.gaps, "places": way.places, "renewed": way.renewed}
        share, error = share_kept(np.array(kept.losses), plain, none)
        report.add(case, "nll", float(np.mean(kept.losses)), "nats", len(tasks))
        report.add(case, "kept", 100 * share, "%", len(tasks))
        report.add(case, "standard_error", 100 * error, "%", len(tasks))
        if way.renewed:
            report.add(case, "reused", 100 * reused(tasks, way.renewed), "%", len(tasks))
        if name == "facts":
            report.add(case, "exact", 100 * float(np.mean(kept.exact)), "%", len(tasks))
        if kept.differences:
            report.add(case, "difference", max(kept.differences), "nats", len(tasks))
        if kept.differences and max(kept.differences) > DIFFERENCE_MAX:
            raise SystemExit(f"{way}: the rank says something else, by {max(kept.differences)} nats")


def read_task(model: MaskedModel, rank: Rank | None, task: Task, way: Way, seed: int, kept: Found) -> None:
    """Add what the model says of a task's targets; and how far a rank differs."""
    context = build(model.read, task, way, seed)
    other = build(rank.read, task, way, seed) if rank else None
    losses = []
    for target in task.targets:
        _, said = model.read(target.tokens, context.end, context.seen)
        losses += (-said.logprobs[target.scored_from - 1 :]).tolist()
        kept.exact.append(bool(said.exact[target.scored_from - 1 :].all()))
        if rank and other:
            _, logprobs = rank.read(target.tokens, other.end, other.seen)
            kept.differences.append(float(np.abs(logprobs - said.logprobs).max()))
    if rank:
        rank.forget()
    kept.losses.append(float(np.mean(losses)))


def share_kept(
    losses: NDArray[np.float64], plain: NDArray[np.float64], none: NDArray[np.float64]
) -> tuple[float, float]:
    """Share of the context's gain, all tasks together, and its standard error (of a ratio, to first order)."""
    gain = none - plain
    share = float((none - losses).sum() / gain.sum())
    residuals = (none - losses) - share * gain
    spread = float(residuals.std(ddof=1)) if len(losses) > 1 else float("nan")
    return share, spread / len(losses) ** 0.5 / float(gain.mean())


def reused(tasks: list[Task], renewed: int) -> float:
    """Share of the documents' tokens whose kept KV is used."""
    lengths = np.array([len(document) for task in tasks for document in task.documents])
    return 1 - float(np.minimum(renewed, lengths - 1).sum() / lengths.sum())


# --- answers


class Asked(NamedTuple):
    """One answer through the engine."""

    tokens: list[int]
    cached: int
    total: int


class Question(NamedTuple):
    """A question behind some documents, and its answer."""

    task: Task
    chosen: list[int]
    """Documents, in the prompt's order."""
    asked: list[int]
    answer: list[int]

    def prompt(self, scope: Scope, *, has_holes: bool) -> ModulePrompt:
        """Its documents as modules.

        Args:
            has_holes: at the places that they have among all documents, instead of packed.
        """
        first = len(self.task.root)
        placed = packed([self.task.documents[index] for index in self.chosen], first)
        if has_holes:
            everything = packed(self.task.documents, first)
            placed = [everything[index] for index in sorted(self.chosen)]
            return ModulePrompt(self.task.root, placed, Placed(everything[-1].end, self.asked), scope)
        return ModulePrompt(self.task.root, placed, Placed(placed[-1].end, self.asked), scope)


def answers(tasks: list[Task], threads: int, report: Report) -> None:
    """Ask everything in every way; the engine keeps what it computed for all of them."""
    config = EngineConfig(num_blocks=1024, chunk_size=CHUNK, dtype="float32", max_context=CONTEXT)
    loop = ModuleLoop(DEMO_MODEL, config, {"dtype": "float32", "threads": threads})
    for selection in ("all", "some", "holes"):
        questions = [question for seed, task in enumerate(tasks) for question in ask_about(task, seed, selection)]
        plain = [ask(loop, q.prompt("self", has_holes=False).plain(), q.answer[-1]) for q in questions]
        add_answers(report, {"selection": selection, "impl": "plain"}, questions, plain, plain)
        # Which documents a scaffold has is fixed with the schema.
        for scope in SCOPES if selection == "all" else SCOPES[:2]:
            has_holes = selection == "holes"
            found = [ask(loop, q.prompt(scope, has_holes=has_holes), q.answer[-1]) for q in questions]
            add_answers(report, {"selection": selection, "impl": scope}, questions, found, plain)
    loop.close()


def ask_about(task: Task, seed: int, selection: str) -> list[Question]:
    """A question about each document of a task, behind a selection of them."""
    rng = random.Random(seed)
    questions = []
    for target in task.targets:
        chosen = list(range(len(task.documents)))
        if selection != "all":
            others = [index for index in chosen if index != target.document]
            chosen = [target.document, *rng.sample(others, CHOSEN - 1)]
            rng.shuffle(chosen)
        if selection == "holes":
            chosen.sort()
        split = target.scored_from
        questions.append(Question(task, chosen, target.tokens[:split], target.tokens[split:]))
    return questions


def ask(loop: ModuleLoop, prompt: ModulePrompt | list[int], stop_id: int) -> Asked:
    """The answer to a prompt and what was found of it."""
    total = len(prompt.plain() if isinstance(prompt, ModulePrompt) else prompt)
    request, tokens = loop.answer(prompt, ANSWER_TOKENS_MAX, stop_id)
    return Asked(tokens, loop.started[request].cached_tokens, total)


def add_answers(
    report: Report, case: dict[str, object], questions: list[Question], found: list[Asked], plain: list[Asked]
) -> None:
    case = {"part": "answers", **case, "questions": len(questions)}
    exact = [asked.tokens == question.answer for asked, question in zip(found, questions, strict=True)]
    same = [asked.tokens == other.tokens for asked, other in zip(found, plain, strict=True)]
    report.add(case, "exact", 100 * float(np.mean(exact)), "%", 1)
    report.add(case, "same", 100 * float(np.mean(same)), "%", 1)
    cached = sum(asked.cached for asked in found) / sum(asked.total for asked in found)
    report.add(case, "cached", 100 * cached, "%", 1)


def main() -> None:
    parser = argument_parser(__doc__, PARTS)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    wanted = arguments.parts
    texts, report = ModuleTexts(), Report("masking_quality")
    stretches, notebooks = (4, 3) if arguments.quick else (48, 40)
    if "texts" in wanted:
        measure("texts", texts.stretches(stretches), arguments.threads, report)
    if "facts" in wanted:
        measure("facts", texts.notebooks(notebooks), arguments.threads, report)
    if "answers" in wanted:
        answers(texts.notebooks(notebooks), arguments.threads, report)
    report.finish(arguments.json, wide=True)


if __name__ == "__main__":
    main()
