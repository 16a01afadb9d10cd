"""Random schemas and prompts over them, laid out as `trunkline.controller.messages.PromptLayout` describes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
from worker.cuts import BLOCKS, CHUNK, draw, make_driver
from worker.module_driver import ModulePrompt, Modules, Part, Text
from worker.ranks import Rank


def random_texts(rng: np.random.Generator, count: int) -> list[Text]:
    """One behind the other with gaps, at times two at one place; any text before as parent."""
    texts: list[Text] = []
    position = extent = 0
    for _ in range(count):
        if not texts or rng.random() < 0.7:
            position = extent + int(rng.integers(0, 3))
        above = [index for index, text in enumerate(texts) if text.end <= position]
        parent = int(rng.choice([-1, *above]))
        texts.append(Text(draw(rng, int(rng.integers(1, 30))), position, parent))
        extent = max(extent, texts[-1].end)
    return texts


def random_prompt(rng: np.random.Generator, texts: list[Text]) -> ModulePrompt:
    """Some texts that do not overlap, in any order; own tokens in holes and gaps, and behind everything."""
    parts: list[Part] = []
    runs: list[tuple[int, list[int]]] = []
    end = 0
    for index, text in enumerate(texts):
        if text.position < end or rng.random() < 0.3:
            continue
        _fill(rng, runs, end, text.position)
        ranges = _ranges(rng, len(text.tokens))
        parts.append(Part(index, ranges, text.position))
        for (_, start), (stop, _) in itertools.pairwise(ranges):
            _fill(rng, runs, text.position + start, text.position + stop)
        end = text.end
    return _finished(rng, parts, runs, end)


def moved_prompt(rng: np.random.Generator, texts: list[Text]) -> ModulePrompt:
    """Some texts that see nothing but themselves, at places of its own, one of them twice."""
    parts: list[Part] = []
    runs: list[tuple[int, list[int]]] = []
    end = 0
    chosen = rng.permutation(len(texts))[: int(rng.integers(1, len(texts) + 1))].tolist()
    for index in rng.permutation([*chosen, chosen[0]]).tolist():
        at = end + int(rng.integers(0, 4))
        _fill(rng, runs, end, at)
        parts.append(Part(index, _ranges(rng, len(texts[index].tokens)), at))
        end = at + len(texts[index].tokens)
    return _finished(rng, parts, runs, end)


def chain_texts(rng: np.random.Generator) -> list[Text]:
    """Each directly behind the one before, which it sees."""
    texts: list[Text] = []
    for count in (9, 1, 30, 16, 5):
        texts.append(Text(draw(rng, count), texts[-1].end if texts else 0, len(texts) - 1))
    return texts


def chain_prompt(rng: np.random.Generator, texts: list[Text]) -> ModulePrompt:
    """All of such texts, and own tokens directly behind."""
    parts = [Part(index, [(0, len(text.tokens))], text.position) for index, text in enumerate(texts)]
    return ModulePrompt(parts, [(texts[-1].end, draw(rng, 8))])


def _finished(
    rng: np.random.Generator, parts: list[Part], runs: list[tuple[int, list[int]]], end: int
) -> ModulePrompt:
    runs.append((end + int(rng.integers(0, 4)), draw(rng, int(rng.integers(1, 12)))))
    return ModulePrompt([parts[index] for index in rng.permutation(len(parts)).tolist()], runs)


def _ranges(rng: np.random.Generator, count: int) -> list[tuple[int, int]]:
    """A whole text, or one with a hole where a placeholder stood."""
    if count < 3 or rng.random() < 0.4:
        return [(0, count)]
    start, stop = sorted(rng.choice(np.arange(1, count), size=2, replace=False).tolist())
    return [(0, start), (stop, count)]


def _fill(rng: np.random.Generator, runs: list[tuple[int, list[int]]], start: int, stop: int) -> None:
    """Own tokens, perhaps fewer than there is room for."""
    if start < stop and rng.random() < 0.8:
        runs.append((start, draw(rng, int(rng.integers(1, stop - start + 1)))))


def modules_on_rank(rank: Rank, folders: list[Path]) -> list[tuple[Any, ...]]:
    """Return, for each checkpoint, texts, a chain of texts, and what the model said of these and of prompts."""
    results = []
    for folder in folders:
        runner = rank.load(folder, chunk_size=CHUNK, pool_blocks=BLOCKS)
        driver, rng = make_driver(runner), np.random.default_rng(4)
        modules, chain = Modules(driver, random_texts(rng, 7)), Modules(driver, chain_texts(rng))
        encoded = [{index: part.encode(index) for index in range(len(part.texts))} for part in (modules, chain)]
        prompts = [random_prompt(rng, modules.texts) for _ in range(3)]
        prompts += [ModulePrompt(prompt.parts[::-1], prompt.runs) for prompt in prompts]
        modules.run(prompts, 6)
        plain = chain_prompt(rng, chain.texts)
        chain.run([plain], 6)
        runner.close()
        results.append((modules.texts, chain.texts, encoded, prompts, plain))
    return results
