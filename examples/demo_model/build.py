"""Build the demo model with one command: ``python examples/demo_model/build.py``.

Corpus, tokenizer, training, export, evaluation and model card, in this order. A run that was
stopped continues from its checkpoint in ``--work``; remove that folder to start anew.
``--export-only`` publishes the checkpoint as it stands, also while a run goes on.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path

import torch
from card import Facts, render
from chat import Message
from corpus import Corpus, load_corpus
from evaluate import (
    copy_rows,
    copying_share,
    exact_flags,
    heldout_loss,
    paraphrases,
    question_chats,
    recall_chats,
    share,
)
from mixture import Mixture, text_rows
from model import LeanLlama, Shape
from publish import check_folder, measure, samples, write_folder
from questions import MODULES, READ_MODULES, Fact, ask, library_facts
from recall import draw_memos, notes
from start import lay_out_heads
from tokenizer import train_tokenizer
from tokenizers import Tokenizer
from train import Plan, Trainer

ROOT = Path(__file__).resolve().parents[2]
SEED = 20


def taught_modules() -> frozenset[str]:
    """Modules whose sources stay in the training text, above all those with questions."""
    return frozenset(MODULES + READ_MODULES) | {name.split(".")[0] for name in MODULES}


def tokenizer_texts(corpus: Corpus, facts: list[Fact]) -> list[str]:
    """What the merges are learned from: the library, questions with answers, made-up facts."""
    rng = random.Random(SEED)
    texts = [document.text for document in corpus.train]
    asked = [f"{ask(fact, rng)}\n{fact.answer}" for _ in range(6) for fact in facts]
    made_up = [notes(rng, draw_memos(rng, 10), []) for _ in range(100)]
    return texts + asked + made_up


def load_tokenizer(path: Path, corpus: Corpus, facts: list[Fact]) -> Tokenizer:
    """The tokenizer of this run: a checkpoint is worth nothing with any other."""
    if not path.exists():
        train_tokenizer(tokenizer_texts(corpus, facts)).save(str(path))
    return Tokenizer.from_file(str(path))


def quick_check(mixture: Mixture, corpus: Corpus, facts: list[Fact]) -> Callable[[LeanLlama], dict[str, float]]:
    """A cheap evaluation for the training log."""
    rows = text_rows(mixture.tokenizer, corpus.heldout, 512)[::30]
    asked = question_chats(paraphrases(facts)[::14])
    recalled: dict[int, list[list[Message]]] = {tokens: recall_chats(mixture, tokens, 24) for tokens in (128, 400)}
    copies = copy_rows(mixture, 16)

    def check(model: LeanLlama) -> dict[str, float]:
        @torch.no_grad()
        def scorer(ids: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return model.logits(model(ids))

        result = {
            "heldout_loss": heldout_loss(scorer, rows),
            "exact": share(exact_flags(scorer, mixture.tokenizer, asked)),
        }
        for tokens, chats in recalled.items():
            result[f"recall_{tokens}"] = share(exact_flags(scorer, mixture.tokenizer, chats))
        result["copying"] = copying_share(scorer, copies)
        return {name: round(value, 4) for name, value in result.items()}

    return check


def publish(out: Path, trainer: Trainer, corpus: Corpus, facts: list[Fact]) -> dict[str, float]:
    """Write the folder, check it, measure it, and describe it in the model card."""
    model, mixture = trainer.model, trainer.mixture
    write_folder(out, model, mixture.tokenizer, corpus.heldout, facts)
    print(f"logits differ by {check_folder(out, model, mixture.tokenizer):.1e}", flush=True)
    figures = measure(out, mixture, corpus.heldout, facts)
    answers = samples(out)
    heldout_bytes = sum(len(document.text.encode()) for document in corpus.heldout)
    heldout_tokens = text_rows(mixture.tokenizer, corpus.heldout, 31).numel()
    description = Facts(
        shape=model.shape,
        plan=trainer.plan,
        tally=trainer.tally,
        parameters=sum(p.numel() for p in model.parameters()),
        objects=len(facts),
        train_documents=len(corpus.train),
        train_tokens=len(mixture.stream),
        heldout_documents=len(corpus.heldout),
        paraphrase_lines=len((out / "paraphrases.jsonl").read_text("utf-8").splitlines()),
    )
    card = render(description, figures, answers, heldout_bytes / heldout_tokens)
    (out / "README.md").write_text(card, encoding="utf-8")
    for sample in answers:
        print(f"{sample.question}\n  f32  {sample.float32}\n  bf16 {sample.bfloat16}")
    return figures


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4005, help="optimiser steps; as shipped by default")
    parser.add_argument("--minutes", type=float, default=0.0, help="spend this time instead of steps")
    parser.add_argument("--threads", type=int, default=2, help="threads for torch")
    parser.add_argument("--out", type=Path, default=ROOT / "deploy/trunkline/deploy/demo_model")
    parser.add_argument("--work", type=Path, default=ROOT / ".cache/demo_model")
    parser.add_argument("--no-compile", action="store_true", help="for machines without g++")
    parser.add_argument("--export-only", action="store_true", help="publish the checkpoint")
    return parser.parse_args()


def main() -> None:
    """Parse, then build."""
    options = parse_options()
    options.work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    torch.set_num_threads(options.threads)
    facts = library_facts()
    corpus = load_corpus(taught_modules())
    tokenizer = load_tokenizer(options.work / "tokenizer.json", corpus, facts)
    mixture = Mixture(tokenizer, corpus.train, facts, SEED)
    model = LeanLlama(Shape())
    lay_out_heads(model)
    print(f"{len(facts)} objects, {len(mixture.stream)} tokens of library text", flush=True)
    steps = 0 if options.minutes else options.steps
    plan = Plan(steps, options.minutes, options.threads, seed=SEED)
    trainer = Trainer(model, mixture, plan, options.work / "checkpoint.pt")
    if options.export_only:
        trainer.resume()
    else:
        if not options.no_compile:
            for block in model.blocks:
                block.compile()
        trainer.run(quick_check(mixture, corpus, facts))
    # Published from a model without compiled blocks: its row shapes vary too much for them.
    plain = LeanLlama(Shape())
    plain.load_state_dict(model.state_dict())
    trainer.model = plain
    figures = publish(options.out, trainer, corpus, facts)
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
