"""`--window-share` is refused before a process starts where it cannot work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trunkline.deploy.config.settings import ServeSettings
from trunkline.deploy.config.window_share import check_windows
from trunkline.deploy.errors import UserError
from trunkline.worker.model.families import read_model_config

GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 64,
    "sliding_window": 512,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "hidden_activation": "gelu_pytorch_tanh",
}


def check(
    folder: Path, device: str = "cpu", config: dict[str, Any] = GEMMA, *, chunk: int = 64, **settings: Any
) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    model = read_model_config(folder)
    given = ServeSettings(**{"window_share": 0.25, "kv_memory_bytes": 64 << 20, **settings})
    check_windows(given, model, model.chunk_format(chunk, "float32"), device)


def test_a_share_that_works(tmp_path: Path) -> None:
    check(tmp_path)
    check(tmp_path, "cuda", window_share=1.0)
    check(tmp_path, host_tier_bytes=1 << 30)


@pytest.mark.parametrize(
    ("device", "settings", "message"),
    [
        ("cuda", {}, "is 0.25, but memory behind windows is given back on CPUs only"),
        ("cpu", {"prefix_cache": False}, "with the prefix cache"),
        (
            "cpu",
            {"kv_memory_bytes": 4 << 20},
            r"14 of 58 blocks .* window of 512 tokens and a step of 1024 need \d+",
        ),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, device: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(tmp_path, device, **settings)


def test_layers_without_whole_pages_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="part of a layer is 1024 bytes in a chunk of 2 tokens, too little"):
        check(tmp_path, chunk=2)


def test_models_of_one_kind_of_layers_have_no_share(tmp_path: Path) -> None:
    for layers in ("sliding_attention", "full_attention"):
        with pytest.raises(UserError, match="is no model in which some layers have a window"):
            check(tmp_path, config={**GEMMA, "layer_types": [layers] * 6})


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5, float("nan")])
def test_shares_out_of_range(share: float) -> None:
    with pytest.raises(UserError, match=r"--window-share is .*; allowed are 0.001 to 1"):
        ServeSettings(window_share=share).validate()
