"""What a model folder may be, and the errors that say what it may not; no torch involved."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from worker.checkpoints import Models, assert_greedy, largest_difference, make_checkpoint
from worker.driver import generate, run_config

from trunkline.worker.errors import (
    CheckpointError,
    ModelError,
    ParallelismError,
    UnsupportedModelError,
)
from trunkline.worker.loading import load_runner
from trunkline.worker.model.families import check_model, read_model_config
from trunkline.worker.model.ropes import inverse_frequencies


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    raw.update(changes)
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.0, 1.7, 3.0, 9.0],
}


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may damage."""
    return shutil.copytree(folder, tmp_path / "model")


def test_a_good_model(folder: Path) -> None:
    config = check_model(folder, 2, "bfloat16")
    assert (config.heads, config.kv_heads, config.head_dim, config.vocab_size) == (4, 2, 8, 101)
    assert (config.max_positions, config.tied_embeddings, config.architecture.family) == (512, False, "llama")
    assert config.chunk_format(64, "bfloat16").of_rank(2).chunk_bytes == 2 * 2 * 1 * 64 * 8 * 2
    check_model(folder, 4, "float32")  # fewer KV heads than ranks: replicated


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        (
            {"architectures": ["GPT7"]},
            UnsupportedModelError,
            "GPT7; supported: Cohere2ForCausalLM, ",
        ),
        (
            {"architectures": ["Qwen2_5_VLForConditionalGeneration"]},
            UnsupportedModelError,
            "Qwen2_5_VLForConditionalGeneration (its positions have three dimensions",
        ),
        ({"architectures": None}, UnsupportedModelError, "none named"),
        ({"hidden_act": "relu"}, UnsupportedModelError, "hidden_act 'relu' is not supported; supported: silu"),
        ({"partial_rotary_factor": 0.5}, UnsupportedModelError, "partial_rotary_factor"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            UnsupportedModelError,
            "'dynamic' is not supported; supported: default, linear, llama3",
        ),
        ({"rope_parameters": {"rope_type": "longrope"}}, ModelError, "'short_factor' is missing"),
        (
            {"rope_parameters": LONGROPE | {"long_factor": [1.0]}},
            ModelError,
            "long_factor has 1 entries; 4 positive",
        ),
        ({"quantization_config": {"bits": 4}}, UnsupportedModelError, "quantization_config: quant_method is None"),
        ({"num_hidden_layers": None}, ModelError, "'num_hidden_layers' is missing"),
        ({"num_key_value_heads": 3}, ModelError, "4 attention heads cannot share 3 KV heads"),
        ({"hidden_size": "wide"}, ModelError, "hidden_size is 'wide'; it should be a whole number"),
        ({"rms_norm_eps": [1]}, ModelError, "rms_norm_eps is [1]; it should be a number"),
        ({"num_hidden_layers": 3}, CheckpointError, "9 of 30 tensors are missing: model.layers.2"),
        ({"vocab_size": 102}, CheckpointError, "[101, 32]; config.json implies [102, 32]"),
        ({"attention_bias": True}, CheckpointError, "q_proj.bias"),
    ],
)
def test_bad_configs(copy: Path, changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    edit(copy, **changes)
    with pytest.raises(kind) as error:
        check_model(copy, 1, "float32")
    assert message in str(error.value)


@pytest.mark.parametrize("tp", [3, 5, 8, 0])
def test_what_cannot_be_split(folder: Path, tp: int) -> None:
    with pytest.raises(ParallelismError) as error:
        check_model(folder, tp, "float32")
    if tp:
        assert "4 attention heads" in str(error.value)
        assert "possible for this model: 1, 2, 4" in str(error.value)


def test_bad_files(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="int8"):
        check_model(copy, 1, "int8")
    weights = copy / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match="cut off"):
        check_model(copy, 1, "float32")
    for start in (b"", b"version https://git-lfs.github.com/spec/v1", (2).to_bytes(8, "little") + b"[]"):
        weights.write_bytes(start)
        with pytest.raises(CheckpointError, match=r"not a whole|malformed"):
            check_model(copy, 1, "float32")
    weights.unlink()
    with pytest.raises(CheckpointError, match="neither"):
        check_model(copy, 1, "float32")
    with pytest.raises(ModelError, match="not a model folder"):
        check_model(tmp_path / "nowhere", 1, "float32")
    (copy / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        check_model(copy, 1, "float32")
    sharded = make_checkpoint(tmp_path / "sharded", "sharded")
    check_model(sharded, 1, "float32")
    sorted(sharded.glob("*.safetensors"))[1].unlink()
    with pytest.raises(CheckpointError, match=r"1 of \d+ weight files are missing: model-00002"):
        check_model(sharded, 1, "float32")


@pytest.mark.parametrize("name", ["gqa", "linear-rope", "llama3-rope", "yarn-rope"])
def test_inverse_frequencies_equal_transformers(name: str, models: Models) -> None:
    folder = models(name)
    rope = read_model_config(folder).attention[0].rope
    assert rope is not None
    if rope.kind == "default":
        expected, factor = 1.0 / 10000.0 ** (torch.arange(0, 8, 2).float() / 8), 1.0
    else:
        config = LlamaConfig.from_pretrained(folder)
        expected, factor = ROPE_INIT_FUNCTIONS[rope.kind](config, torch.device("cpu"))
    torch.testing.assert_close(inverse_frequencies(rope), expected, rtol=1e-6, atol=0)
    assert rope.attention_factor == pytest.approx(factor)


@pytest.mark.parametrize(("original", "max_context"), [(16, 0), (64, 64)])
def test_longrope_is_chosen_once(original: int, max_context: int, tmp_path: Path) -> None:
    """By the context that is served, where `transformers` goes by each text's length: here they agree."""
    settings: dict[str, Any] = {"rope_parameters": LONGROPE, "original_max_position_embeddings": original}
    folder = make_checkpoint(tmp_path / "model", "phi3", partial_rotary_factor=1.0, **settings)
    config = check_model(folder, 1, "float32", max_context)
    rope = config.attention[0].rope
    assert rope is not None
    assert rope.is_long == (not max_context)
    own = read_model_config(folder)
    assert (config.chunk_format(8, "float32") == own.chunk_format(8, "float32")) == rope.is_long
    for stream in generate(load_runner(run_config(folder, max_context=max_context), lambda *_: None)):
        assert largest_difference(folder, stream) <= 1e-4
        assert_greedy(folder, stream)


def test_older_rope_form(copy: Path) -> None:
    edit(copy, rope_parameters=None, rope_theta=777.0, rope_scaling={"type": "linear", "factor": 2.0})
    rope = read_model_config(copy).attention[0].rope
    assert rope is not None
    assert (rope.kind, rope.factor, rope.theta) == ("linear", 2.0, 777.0)


@pytest.mark.processes
def test_preflight_needs_no_torch(folder: Path) -> None:
    code = (
        "import sys, pathlib; from trunkline.worker.model.families import check_model;"
        f"check_model(pathlib.Path({str(folder)!r}), 1, 'float32'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
