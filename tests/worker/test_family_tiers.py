"""Families' KV in every tier, as it is computed and in 8 bits: what comes back says what was said before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from worker.checkpoints import Models, transformers_logits
from worker.cuts import CHUNK, draw
from worker.module_group import ENGINE, Answer, ModuleGroup

from trunkline.controller.tiers.costs import StepCosts
from trunkline.kvstore.tier import TierKind

EXACT, MEAN_INT8 = 1e-4, 0.04
"""Largest difference from `transformers`; and in 8 bits the mean one, as a token may go to another expert."""
PROMPT = 5 * CHUNK + 3


def check(folder: Path, answer: Answer, kv_dtype: str) -> None:
    """It is what `transformers` says, as far as its KV allows."""
    assert isinstance(answer.prompt, list)
    (output,) = answer.tokens
    logits = transformers_logits(folder, answer.prompt + output)[len(answer.prompt) - 1 : -1]
    apart = (torch.from_numpy(answer.logprobs) - logits.log_softmax(dim=-1)).abs()
    if kv_dtype == "auto":
        assert apart.max() <= EXACT
        assert output == logits.argmax(dim=-1).tolist()
    else:
        assert EXACT / 2 < apart.mean() <= MEAN_INT8


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("name", ["gemma4-e", "gemma4-experts", "seed-oss", "smollm3", "ernie4.5"])
def test_answers_are_the_same_from_every_tier(
    name: str, kv_dtype: str, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From host memory, from disk, and from disk after a restart; only the last tokens are computed again."""
    monkeypatch.setattr(StepCosts, "token_us", 1e6)  # computing seems to take longer than any tier
    folder, prompts = models(name), [draw(np.random.default_rng(1), PROMPT)]
    prompts.append(prompts[0][: 2 * CHUNK] + draw(np.random.default_rng(2), PROMPT))
    engine = replace(ENGINE, positions_shift=name != "smollm3")

    def serve() -> ModuleGroup:
        tiers = {"host_memory_bytes": 1 << 22, "disk_path": str(tmp_path / "slab"), "disk_bytes": 1 << 23}
        return ModuleGroup(folder, engine, tmp_path / "index.sqlite", kv_dtype=kv_dtype, **tiers)

    def ask_again(group: ModuleGroup, tier: TierKind) -> None:
        for prompt, answer in zip(prompts, said, strict=True):
            group.settle()
            group.sink(tier)
            again = group.ask(prompt, 12)
            assert again.found[tier] == len(prompt) // CHUNK * CHUNK
            assert again.tokens == answer.tokens
            np.testing.assert_allclose(again.logprobs, answer.logprobs, rtol=0, atol=1e-5)

    group = serve()
    said = [group.ask(prompt, 12) for prompt in prompts]
    for answer in said:
        check(folder, answer, kv_dtype)
    ask_again(group, TierKind.HOST)
    ask_again(group, TierKind.DISK)
    group.settle()
    group.close()
    group = serve()
    assert group.restored > 0
    ask_again(group, TierKind.DISK)
    group.close()
