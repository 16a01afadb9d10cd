"""`trunkline size` and the rule behind it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trunkline.deploy.cli.app import app
from trunkline.deploy.cli.sizing_cli import Demand, memory_for
from trunkline.deploy.errors import UserError
from trunkline.worker.model.families import read_model_config

LLAMA_8B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint's configuration, without weights."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def test_a_token_of_llama_3_8b_has_128_kib(folder: Path) -> None:
    found = memory_for(read_model_config(folder), Demand(3600, 8192, 60, 4), dtype="bfloat16", chunk_size=64, tp=1)
    assert found.token_bytes == 128 << 10
    assert found.session_bytes == 1 << 30
    assert found.sessions == 60
    assert found.capacity_bytes == 60 << 30
    assert found.running_bytes == 4 << 30


def test_what_runs_needs_a_window_and_a_step_where_all_layers_have_a_window(folder: Path) -> None:
    mistral = {
        **LLAMA_8B,
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 4096,
    }
    mistral["max_position_embeddings"] = 131072
    (folder / "config.json").write_text(json.dumps(mistral))
    demand = Demand(3600, 100_000, 60, 4)
    found = memory_for(read_model_config(folder), demand, dtype="bfloat16", chunk_size=64, tp=1)
    assert found.session_bytes == 1563 * 64 * (128 << 10)
    assert found.running_bytes == 4 * 89 * 64 * (128 << 10)  # 4,096 + 1,024 tokens, and what begins within them
    (folder / "config.json").write_text(json.dumps({**mistral, "sliding_window": None}))
    whole = memory_for(read_model_config(folder), demand, dtype="bfloat16", chunk_size=64, tp=1)
    assert whole.running_bytes == 4 * whole.session_bytes == 4 * found.session_bytes


def test_the_rule_is_linear_in_sessions_and_time_and_never_below_what_is_needed(folder: Path) -> None:
    model, draw = read_model_config(folder), random.Random(8)
    for _ in range(100):
        context, chunk = draw.randint(1, 8192), draw.choice([16, 32, 64, 128])
        demand = Demand(draw.uniform(1, 1e5), context, draw.uniform(1, 1e6), draw.randint(1, 512))
        found = memory_for(model, demand, dtype="float16", chunk_size=chunk, tp=draw.choice([1, 2, 4, 8]))
        assert context * found.token_bytes <= found.session_bytes < (context + chunk) * found.token_bytes
        twice = Demand(demand.sessions_per_hour * 2, context, demand.ttl_s, demand.concurrent)
        found_twice = memory_for(model, twice, dtype="float16", chunk_size=chunk, tp=1)
        assert found_twice.capacity_bytes == pytest.approx(2 * found.capacity_bytes, abs=2)


def test_more_ranks_than_kv_heads_keep_copies(folder: Path) -> None:
    model, demand = read_model_config(folder), Demand(1, 64, 1, 1)
    one, many = (memory_for(model, demand, dtype="float16", chunk_size=64, tp=tp).token_bytes for tp in (8, 16))
    assert many == 2 * one


@pytest.mark.parametrize(
    ("demand", "said"),
    [
        (Demand(0, 64, 1, 1), "--sessions-per-hour is 0"),
        (Demand(1, -5, 1, 1), "--context is -5"),
        (Demand(1, 64, float("nan"), 1), "--ttl is nan"),
        (Demand(1, 9000, 1, 1), "at most 8192 tokens"),
    ],
)
def test_what_is_no_demand_is_refused(folder: Path, demand: Demand, said: str) -> None:
    with pytest.raises(UserError, match=said):
        memory_for(read_model_config(folder), demand, dtype="float16", chunk_size=64, tp=1)


def test_the_command_says_it(folder: Path) -> None:
    told = CliRunner().invoke(app, ["size", str(folder), "--sessions-per-hour", "3600", "--ttl", "60"])
    assert told.exit_code == 0, told.output
    assert "128 KiB" in told.output
    assert "60 GiB" in told.output
    assert "15 GiB" in told.output  # a quarter
    assert CliRunner().invoke(app, ["size", str(folder), "--dtype", "int8"]).exit_code == 0
    assert CliRunner().invoke(app, ["size", str(folder), "--dtype", "fp8"]).exit_code == 0
    assert CliRunner().invoke(app, ["size", str(folder), "--dtype", "int3"]).exit_code == 2
    assert CliRunner().invoke(app, ["size", str(folder), "--context", "0"]).exit_code == 2
    assert CliRunner().invoke(app, ["size", "no/such/folder/anywhere"]).exit_code == 2
    for tp, said in (("0", "allowed are 1 to 4096"), ("3", "32 attention heads and 8 KV heads")):
        refused = CliRunner().invoke(app, ["size", str(folder), "--tp", tp])
        assert (refused.exit_code, said in refused.output) == (2, True), refused.output
