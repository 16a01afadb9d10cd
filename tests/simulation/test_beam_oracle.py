"""The oracle of beam searches against `transformers` itself, which generates with the simulated model."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from simulation.model import VOCABULARY, log_probabilities, prefix_hash
from simulation.oracle import beam_search

from trunkline.controller.messages import BeamSearch

_LIBRARY: Any = transformers
"""Its annotations describe `generate` for its own models only."""


class _Config(_LIBRARY.PretrainedConfig):  # type: ignore[misc]
    model_type = "simulated"

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.vocab_size = VOCABULARY
        self.num_hidden_layers = 1


class _Simulated(_LIBRARY.PreTrainedModel, _LIBRARY.GenerationMixin):  # type: ignore[misc]
    """The simulated model in the form that `generate` drives, without a cache."""

    config_class = _Config

    def __init__(self, config: _Config) -> None:
        super().__init__(config)
        self.anything = torch.nn.Parameter(torch.zeros(1))
        self.post_init()

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **_: Any) -> dict[str, Any]:
        return {"input_ids": input_ids}

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        rows = [log_probabilities(prefix_hash(row)) for row in input_ids.tolist()]
        return _LIBRARY.modeling_outputs.CausalLMOutput(logits=torch.from_numpy(np.stack(rows))[:, None, :])


@pytest.fixture(scope="module")
def model() -> Any:
    return _Simulated(_Config()).eval()


@pytest.mark.parametrize("width", [1, 2, 4, 6])
@pytest.mark.parametrize("early_stopping", [True, False, None])
def test_equals_transformers(model: Any, width: int, early_stopping: bool | None) -> None:
    rng = random.Random(10 * width + (2 if early_stopping is None else early_stopping))
    stopped = 0
    for _ in range(12):
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 9))]
        stop_ids = tuple(rng.sample(range(VOCABULARY), rng.choice([0, 1, 7, 7])))
        penalty, max_tokens = rng.choice([1.0, 0.0, -1.0, 2.0, 0.6]), rng.randrange(1, 16)
        beam = BeamSearch(width, penalty, early_stopping)
        settings = _LIBRARY.GenerationConfig(
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            max_new_tokens=max_tokens,
            length_penalty=penalty,
            early_stopping="never" if early_stopping is None else early_stopping,
            eos_token_id=list(stop_ids) or None,
            pad_token_id=VOCABULARY,
            use_cache=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
        found = model.generate(torch.tensor([prompt]), generation_config=settings)
        expected = beam_search(prompt, beam, max_tokens, stop_ids, n=width)
        outputs = [[t for t in row[len(prompt) :].tolist() if t != VOCABULARY] for row in found.sequences]
        assert outputs == [hypothesis.tokens for hypothesis in expected.hypotheses]
        if width > 1:
            scores = np.array([hypothesis.score for hypothesis in expected.hypotheses], np.float32)
            np.testing.assert_allclose(found.sequences_scores.numpy(), scores, rtol=2e-6)
        stopped += any(len(tokens) < max_tokens for tokens in outputs)
    assert stopped
