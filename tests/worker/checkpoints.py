"""Tiny random checkpoints of every supported family, made with `transformers`, and its logits for them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
import transformers
from simulation.streams import Stream as SimulatedStream
from torch import Tensor
from worker.driver import VOCAB_SIZE, Stream, dense_logprobs
from worker.variants import FAMILIES, LAYOUTS

MODELS: Final = LAYOUTS | FAMILIES
ABSOLUTE: Final = (
    "gpt2",
    "opt",
    "llama4",
    "ministral3",
    "mistral4",
    "granite-4-nope",
    "smollm3",
    "cohere2",
    "exaone4",
)
"""Beginnings of the names of those whose results depend on where a token stands."""
RELATIVE: Final = tuple(name for name in MODELS if not name.startswith(ABSOLUTE))
"""Those whose attention depends on distances alone, so that their KV may stand elsewhere."""
ALIKE: Final = set(MODELS) - {
    *("gpt2", "opt", "gqa", "linear-rope", "llama3-rope", "yarn-rope", "mistral", "qwen3", "pythia"),
    *("falcon-rw", "mpt", "mpt-six-heads", "gemma3", "gemma4-e", "glm4", "deepseek-v3"),
}
"""Models whose positions and windows work in the way of another one's."""
KINDS: Final = ("gqa", "gpt2", "opt-350m", "pythia", "falcon-rw", "mpt", "gemma3", "deepseek-v3")
"""Rotary, learned and linear positions, windows, norms, latents, and ways in which attention and MLP come
together."""


def with_kernels(names: Collection[str], soak: Iterable[str] = ()) -> pytest.MarkDecorator:
    """Parametrise (name, kernels): every model with the kernels that serve, one of each kind with the reference.

    Args:
        soak: Models that take no other way through what is tested; they are left to long runs.
    """
    long = set(soak)
    cases = [(name, "auto") for name in names] + [(name, "reference") for name in KINDS if name in names]
    return pytest.mark.parametrize(
        ("name", "kernels"),
        [pytest.param(*case, marks=[pytest.mark.soak] if case[0] in long else []) for case in cases],
    )


def make_checkpoint(folder: Path, name: str = "gqa", *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random checkpoint of `MODELS[name]`; return `folder`."""
    model_name, config_name, settings = MODELS[name]
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = getattr(transformers, config_name)(**{"vocab_size": VOCAB_SIZE, **tokens, **settings, **overrides})
    torch.manual_seed(seed)
    model = getattr(transformers, model_name)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
            else:  # zeros and ones would hide mistakes
                parameter.add_(torch.randn_like(parameter) * 0.2)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("score_correction_bias"):
                buffer.normal_(std=0.2)
            elif buffer_name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    model.save_pretrained(folder, max_shard_size="20KB" if name == "sharded" else "1GB")
    return folder


class Models:
    """Checkpoints that the tests of a session share; no test changes them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, name: str = "gqa", **overrides: Any) -> Path:
        """Return the folder of a checkpoint, which is written when it is first asked for."""
        own = "-".join([name, *(f"{field}={value}" for field, value in sorted(overrides.items()))])
        folder = self._folder / own
        return folder if folder.exists() else make_checkpoint(folder, name, **overrides)


@cache
def transformers_model(folder: Path) -> Any:
    """Return the model as `transformers` loads it."""
    name = json.loads((folder / "config.json").read_text())["architectures"][0]  # not all are known to AutoModel
    model: Any = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def transformers_logits(folder: Path, tokens: list[int]) -> Tensor:
    """Return the logits behind each token, float32 `[tokens, vocabulary]`."""
    with torch.inference_mode():
        logits: Tensor = transformers_model(folder)(torch.tensor([tokens])).logits[0]
        return logits


def largest_difference(folder: Path, stream: Stream) -> float:
    """Return by how much a reported log-probability differs from that of `transformers` at most."""
    tokens = stream.prompt + stream.output
    expected = transformers_logits(folder, tokens).log_softmax(dim=-1)[len(stream.prompt) - 1 : -1]
    actual = np.stack([dense_logprobs(report, VOCAB_SIZE) for report in stream.logprobs])
    assert not np.isnan(actual).any()
    return float((torch.from_numpy(actual) - expected).abs().max())


def assert_greedy(folder: Path, stream: Stream | SimulatedStream) -> None:
    """The output is what `transformers` would have generated."""
    logits = transformers_logits(folder, stream.prompt + stream.output)
    assert logits[len(stream.prompt) - 1 : -1].argmax(dim=-1).tolist() == stream.output
