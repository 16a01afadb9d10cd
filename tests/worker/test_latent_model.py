"""A Llama written with latents, as benchmarks do with the demo model, is the same model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from latent_model import write_latent
from quantisation import Model
from worker.checkpoints import make_checkpoint, transformers_model

from trunkline.kernels.load import load_kernels

TOKENS = 70


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize(("slow_pairs", "theta"), [(0, 500.0), (2, 1e20)])
def test_logits_are_those_of_the_llama(slow_pairs: int, theta: float, kernels: str, tmp_path: Path) -> None:
    """Also with pairs in the latent, which do not turn, if they do not turn in the Llama either."""
    rope = {"rope_type": "default", "rope_theta": theta}
    folder, ids = make_checkpoint(tmp_path / "llama", rope_parameters=rope), torch.arange(TOKENS) * 7 % 90 + 3
    change = write_latent(folder, tmp_path / "latent", slow_pairs)
    with torch.inference_mode():
        wanted = transformers_model(folder)(ids[None]).logits[0]
        model = Model(tmp_path / "latent", "float32", "", load_kernels(kernels, "cpu", 1), 2, change=change)
        assert float((model.score(ids) - wanted).abs().max()) <= 1e-4
