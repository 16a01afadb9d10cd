"""Logits equal those of `transformers`: one rank here, several in `test_parallel`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worker.checkpoints import make_checkpoint, transformers_logits
from worker.driver import VOCAB_SIZE, Stream, dense_logprobs, generate, run_config

from trunkline.worker.runner import Runner

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "mha": {"num_key_value_heads": 4},
    "gqa": {},
    "mqa-tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "wide-heads": {"head_dim": 16, "num_attention_heads": 8, "num_key_value_heads": 4},
    "linear-rope": {
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    },
    "llama3-rope": {"rope_parameters": LLAMA3_ROPE},
    "yarn-rope": {"rope_parameters": YARN_ROPE},
    "sharded": {"shard_size": "20KB"},
}


def largest_difference(folder: Path, stream: Stream) -> float:
    """Largest difference of a log-probability at any output position."""
    tokens = stream.prompt + stream.output
    expected = transformers_logits(folder, tokens).log_softmax(dim=-1)[len(stream.prompt) - 1 : -1]
    actual = np.stack([dense_logprobs(report, VOCAB_SIZE) for report in stream.logprobs])
    assert not np.isnan(actual).any()
    return float((torch.from_numpy(actual) - expected).abs().max())


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / name, **LAYOUTS[name])
    if name == "sharded":
        assert len(list(folder.glob("*.safetensors"))) > 2
    runner = Runner.load(run_config(folder), lambda *_: None)
    runner.pool.data.fill_(float("nan"))  # nothing that was not written may be read
    for stream in generate(runner):
        assert largest_difference(folder, stream) <= 1e-4


def test_half_types_run_and_stay_close(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "half")
    for dtype in ("bfloat16", "float16"):
        runner = Runner.load(run_config(folder, dtype=dtype), lambda *_: None)
        assert runner.block_bytes == 2 * 2 * 2 * 8 * 8 * 2
        for stream in generate(runner):
            assert largest_difference(folder, stream) < 0.5
