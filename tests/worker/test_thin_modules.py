"""Prompts with modules where few blocks have memory for layers with a window, through the real engine and a real
rank: equal to a block-masked forward of `transformers`.

Texts of modules are read in all layers, and become thin between requests: then they are computed again in their
place, or layers with a window get their KV back from host memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from worker.checkpoints import Models
from worker.driver import VOCAB_SIZE
from worker.module_group import ENGINE, LayoutJudge, ModuleGroup, random_prompts
from worker.thin_driver import windowed_layers

from trunkline.kvstore.chunks import Int32Array

BLOCKS = 90
HOST_BYTES = 1 << 22
SHARE = 0.4


@pytest.fixture(scope="module")
def gemma(models: Models) -> Path:
    return models("gemma3", sliding_window=20, head_dim=32)  # a layer of a chunk is a page


@pytest.mark.parametrize("worker", [{}, {"host_memory_bytes": HOST_BYTES}], ids=["device only", "host memory"])
def test_texts_become_thin_and_serve_again(gemma: Path, worker: dict[str, Any]) -> None:
    group = ModuleGroup(gemma, replace(ENGINE, num_blocks=BLOCKS), window_share=SHARE, **worker)
    try:
        judge, rng = LayoutJudge(gemma), np.random.default_rng(3)
        thinned = spoil(group)
        assert group.engine.config.whole_blocks == BLOCKS * SHARE
        prompts = random_prompts(5, schemas=3, count=2)
        for turn in range(2):
            answers = []
            for index, prompt in enumerate(prompts):
                answers.append(group.submit_prompt(prompt, 12, n=1 + 2 * (index == turn)))
                if index % 2:
                    group.submit_prompt(rng.integers(VOCAB_SIZE, size=230).tolist(), 8)
                    group.run()
            group.run()
            for answer in answers:
                judge.check(answer)
            group.settle()
        assert len(thinned) > 40
        texts = {(text.tokens, text.position) for prompt in prompts for text in prompt.layout.texts if text.seen}
        encoded = group.engine.counters.encoded_texts
        assert encoded > len(texts) if not worker else encoded < 2 * len(texts)
    finally:
        group.close()


def spoil(group: ModuleGroup) -> list[int]:
    """Fill what plans thin with large numbers in layers with a window, so that nothing counts it unnoticed; return
    the list of these blocks."""
    runner, thinned = group.runner, list[int]()
    layers = windowed_layers(runner)

    def fill(blocks: Int32Array) -> None:
        thinned.extend(blocks.tolist())
        for block in blocks.tolist():
            runner.pool.data[block, layers] = 1e6

    object.__setattr__(runner.pool, "thin", fill)
    return thinned
