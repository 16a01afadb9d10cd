"""From trained weights to the shipped folder, and the checks and figures of what ships.

Everything measured here is measured on the files just written, loaded the way a user loads
them: a figure in the model card is a figure of the shipped weights.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from chat import Message, answer, encode_chat, prompt_ids, question
from corpus import Document
from evaluate import (
    RECALL_TOKENS,
    Paraphrase,
    Scorer,
    exact_flags,
    heldout_loss,
    paraphrases,
    perplexity,
    question_chats,
    recall_chats,
    share,
)
from mixture import Mixture, text_rows
from model import LeanLlama, export, published_model
from questions import Fact, ask
from smalltalk import SYSTEM_PROMPTS
from tokenizer import save_tokenizer
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

HELDOUT_BYTES_MAX = 200_000
PARAPHRASE_BYTES_MAX = 300_000
FOLDER_BYTES_MAX = 16_000_000
HELDOUT_NOTE = (
    "# Part of the Python standard library and its documentation, held out of training.\n"
    "# Copyright (c) Python Software Foundation; all rights reserved; PSF License Agreement.\n"
)
SAMPLE_QUESTIONS = (
    "What does os.path.join do?",
    "What does len do?",
    "What is `print()` for?",
    "Could you describe what sorted does?",
    "What is str.split used for?",
    "Please describe json.dumps.",
    "random.shuffle?",
    "Tell me what itertools.chain is for.",
    "what's collections.deque",
    "Can you tell me about functools.lru_cache?",
    "Explain what subprocess.run does in Python.",
    "I would like to know what shutil.copytree does.",
    "What is asyncio?",
    "Hello",
    "Who are you?",
    "Thanks",
    "What is the capital of Portugal?",
)


@dataclass(frozen=True)
class Sample:
    """A question and the greedy answers of the shipped weights."""

    question: str
    float32: str
    bfloat16: str


def heldout_text(documents: tuple[Document, ...]) -> str:
    """Whole held-out documents, source and prose in turn, up to the size limit."""
    prose = [document for document in documents if document.prose]
    source = [document for document in documents if not document.prose]
    random.Random(3).shuffle(source)
    text = HELDOUT_NOTE
    for document in [*prose[:2], *source, *prose[2:]]:
        part = f"\n# ---- {document.name}\n\n{document.text}"
        if len((text + part).encode()) <= HELDOUT_BYTES_MAX:
            text += part
    return text


def paraphrase_lines(items: list[Paraphrase]) -> str:
    """JSON lines of held-out questions, thinned evenly to the size limit."""
    lines = [
        json.dumps({"question": item.question, "answer": item.answer, "name": item.name}) + "\n" for item in items
    ]
    while sum(len(line) for line in lines) > PARAPHRASE_BYTES_MAX:
        lines = [line for index, line in enumerate(lines) if index % 20]
    return "".join(lines)


def write_folder(
    folder: Path,
    model: LeanLlama,
    tokenizer: Tokenizer,
    heldout: tuple[Document, ...],
    facts: list[Fact],
) -> None:
    """Write all shipped files but the model card."""
    folder.mkdir(parents=True, exist_ok=True)
    export(model, folder)
    save_tokenizer(tokenizer, folder, model.shape.context_tokens)
    (folder / "heldout.txt").write_text(heldout_text(heldout), encoding="utf-8")
    lines = paraphrase_lines(paraphrases(facts))
    (folder / "paraphrases.jsonl").write_text(lines, encoding="utf-8")
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors writes 0600, which other users of a package cannot read
    size = sum(path.stat().st_size for path in folder.iterdir())
    if size > FOLDER_BYTES_MAX:
        raise ValueError(f"the folder has {size} bytes, at most {FOLDER_BYTES_MAX} may ship")


def check_folder(folder: Path, model: LeanLlama, tokenizer: Tokenizer) -> float:
    """Same tokens and same function as in training; returns the largest logit difference."""
    chat = [Message("system", "Be concise."), question("What does len do?"), answer("Ten.\n 4")]
    published = AutoTokenizer.from_pretrained(folder)
    dicts = [{"role": message.role, "content": message.content} for message in chat]
    whole = published.apply_chat_template(dicts, return_dict=False)
    asked = published.apply_chat_template(dicts[:2], add_generation_prompt=True, return_dict=False)
    if whole != encode_chat(tokenizer, chat)[0] or asked != prompt_ids(tokenizer, chat[:2]):
        raise ValueError("the published chat template differs from the training format")
    ids = torch.tensor([whole])
    with torch.no_grad():
        expected = model.logits(model(ids))
        found = published_model(model, torch.float32)(ids).logits
    difference = float((expected - found).abs().max())
    if difference > 1e-2:
        raise ValueError(f"published weights compute another function: {difference}")
    return difference


def folder_scorer(folder: Path, dtype: torch.dtype) -> Scorer:
    """Logits of the shipped weights at one precision."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)

    @torch.no_grad()
    def scorer(ids: Tensor) -> Tensor:
        logits: Tensor = model(ids, use_cache=False).logits
        return logits

    return scorer


def _varied_chats(items: list[Paraphrase], mixture: Mixture) -> Iterator[tuple[str, list[list[Message]]]]:
    """The paraphrases in other surroundings: a short or long system prompt, and history."""
    rng = random.Random(5)
    single = question_chats(items)
    short = [[Message("system", rng.choice(SYSTEM_PROMPTS)), *chat] for chat in single]
    yield "exact, short system prompt", short
    long = [[Message("system", "\n".join(mixture.prose(500))), *chat] for chat in single]
    yield "exact, system prompt of about 500 tokens of prose", long
    history = []
    for index, chat in enumerate(single):
        earlier = [turn for k in range(1, 6) for turn in single[(index + 37 * k) % len(single)]]
        history.append(earlier + chat)
    yield "exact, after five other questions and answers", history


def measure(folder: Path, mixture: Mixture, heldout: tuple[Document, ...], facts: list[Fact]) -> dict[str, float]:
    """All figures of the model card, by name."""
    tokenizer = mixture.tokenizer
    items = paraphrases(facts)
    figures: dict[str, float] = {}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        scorer = folder_scorer(folder, dtype)
        flags = exact_flags(scorer, tokenizer, question_chats(items))
        figures[f"exact, held-out paraphrases, {name}"] = share(flags)
    scorer = folder_scorer(folder, torch.bfloat16)
    rng = random.Random(9)
    known = [[question(ask(fact, rng)), answer(fact.answer)] for fact in facts[::4]]
    figures["exact, templates of training"] = share(exact_flags(scorer, tokenizer, known))
    for name, chats in _varied_chats(items[::6], mixture):
        figures[name] = share(exact_flags(scorer, tokenizer, chats, rows=4))
    for tokens in RECALL_TOKENS:
        chats = recall_chats(mixture, tokens, 48)
        flags = exact_flags(scorer, tokenizer, chats, rows=4)
        figures[f"recall, about {tokens} tokens"] = share(flags)
    shipped = Document("heldout.txt", (folder / "heldout.txt").read_text("utf-8"), prose=False)
    for name, documents, length in (
        ("all held-out documents", heldout, 512),
        ("heldout.txt", (shipped,), 512),
        ("heldout.txt", (shipped,), 2047),
    ):
        loss = heldout_loss(scorer, text_rows(tokenizer, documents, length), batch=4)
        figures[f"loss, {name}, windows of {length}"] = loss
        figures[f"perplexity, {name}, windows of {length}"] = perplexity(loss)
    return figures


def samples(folder: Path) -> list[Sample]:
    """Greedy answers at both precisions, by the ordinary generation of ``transformers``."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    replies: list[list[str]] = []
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        column = []
        for text in SAMPLE_QUESTIONS:
            prompt = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
            )
            encoded = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
            written = model.generate(**encoded, max_new_tokens=96)[0].tolist()  # type: ignore[misc]
            reply = written[encoded["input_ids"].shape[1] :]
            column.append(str(tokenizer.decode(reply, skip_special_tokens=True)))
        replies.append(column)
    return [Sample(text, first, second) for text, first, second in zip(SAMPLE_QUESTIONS, *replies, strict=True)]
