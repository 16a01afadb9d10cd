"""A judge of prompts with modules: one forward of `transformers` over all tokens, who sees whom given as a matrix.

No cache, no order of the table, no shifts: every token has a position and a set of tokens that it sees. Families
with linear biases take no positions; their bias of a key is made here of its position and the family's own slopes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.models.falcon import modeling_falcon
from transformers.models.mpt import modeling_mpt
from worker.checkpoints import transformers_model
from worker.cuts import Logprobs
from worker.module_driver import ModulePrompt, Modules

BoolMatrix = NDArray[np.bool_]


class BlockMaskedModel:
    """`transformers` under any mask."""

    def __init__(self, folder: Path) -> None:
        self._model = transformers_model(folder)
        config = self._model.config
        self._window = getattr(config, "sliding_window", None)
        self._span = getattr(config, "attention_chunk_size", None)
        self._by_layer = len(set(getattr(config, "layer_types", None) or ["one"])) > 1

    def read(self, tokens: list[int], positions: list[int], visible: BoolMatrix) -> Logprobs:
        """What comes after each token.

        Args:
            visible: `[tokens, tokens]`: whether the first sees the second.
        """
        at = np.array(positions)
        masks = {"full_attention": _additive(visible)}
        masks["sliding_attention"] = masks["full_attention"]
        if self._window:
            masks["sliding_attention"] = _additive(visible & (at[:, None] - at < self._window))
        if self._span:
            masks["chunked_attention"] = _additive(visible & (at[:, None] // self._span == at // self._span))
        arguments: dict[str, Any] = {"attention_mask": masks if self._by_layer else masks["sliding_attention"]}
        if not isinstance(self._model, modeling_mpt.MptForCausalLM):
            arguments["position_ids"] = torch.from_numpy(at)[None]
        with torch.inference_mode(), _biases(self._model, torch.from_numpy(at)):
            logits: Tensor = self._model(torch.tensor([tokens]), use_cache=False, **arguments).logits[0]
        logprobs: Logprobs = logits.log_softmax(dim=-1).numpy()
        return logprobs


def _additive(visible: BoolMatrix) -> Tensor:
    hidden = torch.from_numpy(~visible)[None, None]
    return torch.zeros(hidden.shape).masked_fill_(hidden, torch.finfo(torch.float32).min)


@contextmanager
def _biases(model: Any, positions: Tensor) -> Iterator[None]:
    """Linear biases of keys by their positions (softmax does not mind what it adds to all keys of a query)."""
    mpt: Any = modeling_mpt
    if isinstance(model, modeling_mpt.MptForCausalLM):
        heads = model.config.n_heads
        slopes = -mpt.build_mpt_alibi_tensor(heads, 2)[:, 0, 0]
        bias = slopes[:, None, None] * positions
        with mock.patch.object(model.transformer, "build_mpt_alibi_tensor", return_value=bias):
            yield
    elif isinstance(model, modeling_falcon.FalconForCausalLM) and model.config.alibi:
        heads = model.config.num_attention_heads
        slopes = modeling_falcon.build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
        bias = slopes[:, None, None] * positions
        with mock.patch.object(modeling_falcon, "build_alibi_tensor", return_value=bias):
            yield
    else:
        yield


class TextJudge:
    """What texts and a prompt over them should say, from what sees what in the specification.

    A text that acts elsewhere than it was computed stands for itself and all that it sees, moved together.
    """

    def __init__(self, model: BlockMaskedModel, modules: Modules) -> None:
        self._model = model
        self._modules = modules

    def read(self, prompt: ModulePrompt) -> tuple[list[tuple[int, Logprobs]], Logprobs]:
        """What comes after each token of each needed text (by index), and after each own and output token."""
        texts, chain = self._modules.texts, self._modules.chain
        shown = {(part.text, part.at - texts[part.text].position): part.ranges for part in prompt.parts}
        copies = list(dict.fromkeys((index, by) for text, by in shown for index in (*chain(text), text)))
        tokens: list[int] = []
        positions: list[int] = []
        owner: list[int] = []
        seen: list[bool] = []
        for number, (index, by) in enumerate(copies):
            text = texts[index]
            tokens += text.tokens
            positions += range(text.position + by, text.end + by)
            owner += [number] * len(text.tokens)
            ranges = shown.get((index, by), [])
            seen += [any(start <= i < stop for start, stop in ranges) for i in range(len(text.tokens))]
        *before, (last_position, last) = prompt.runs
        for position, run in [*before, (last_position, last + prompt.output[:-1])]:
            tokens += run
            positions += range(position, position + len(run))
            owner += [-1] * len(run)
            seen += [True] * len(run)
        sees = [[copies.index((above, by)) for above in chain(index)] for index, by in copies]
        of = np.array(owner)
        visible = _visible(of, np.array(positions), np.array(seen), sees)
        logprobs = self._model.read(tokens, positions, visible)
        return [(index, logprobs[of == number]) for number, (index, _) in enumerate(copies)], logprobs[of == -1]


def _visible(
    owner: NDArray[np.int64], at: NDArray[np.int64], seen: BoolMatrix, sees: list[list[int]]
) -> BoolMatrix:
    """Who sees whom; `sees` says which other texts a text sees, -1 owns what is the prompt's."""
    visible = np.zeros((len(owner), len(owner)), dtype=bool)
    for token, text in enumerate(owner.tolist()):
        visible[token] = seen & (at <= at[token]) if text < 0 else (owner == text) & (at <= at[token])
        if text >= 0:
            visible[token] |= np.isin(owner, sees[text])
    return visible
