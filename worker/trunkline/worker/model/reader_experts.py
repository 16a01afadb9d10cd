"""Readers of families with mixtures of experts. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from trunkline.worker.model import architecture as records
from trunkline.worker.model.config_fields import Fields
from trunkline.worker.model.model_config import ModelConfig
from trunkline.worker.model.reader_base import Reader, llama_like, with_attention


def _mixtral(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(raw)
    config = llama_like(fields, records.MIXTRAL, theta=1e6, norm_eps=1e-5)
    window = int(fields.nullable("sliding_window", 0))
    experts, chosen = fields.whole("num_local_experts", 8), fields.whole("num_experts_per_tok", 2)
    if not 1 <= chosen <= experts:
        raise ValueError(f"num_experts_per_tok is {chosen}; there are {experts} experts")
    config = with_attention(config, lambda _, own: replace(own, window=window))
    return replace(config, experts=experts, experts_per_token=chosen)


EXPERTS_READERS: Final[Mapping[str, Reader]] = {
    "MixtralForCausalLM": _mixtral,
}
