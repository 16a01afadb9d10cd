"""What benchmarks of families stand on: random checkpoints that are read, and dense models of equal bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import served_models
from models import FAMILIES, SHAPE, write_random
from small_model import VOCABULARY

from trunkline.worker.model.families import check_model


def configured(folder: Path, config: dict[str, object]) -> Path:
    """Write a folder with a configuration alone."""
    folder.mkdir()
    shared = {"vocab_size": VOCABULARY, "max_position_embeddings": 8192}
    (folder / "config.json").write_text(json.dumps({**shared, **config}))
    return folder


@pytest.mark.parametrize("name", served_models.FAMILIES)
def test_of_a_twin_a_token_reads_as_many_bytes(name: str, tmp_path: Path) -> None:
    config = dict(served_models.FAMILIES[name].config)
    folder = configured(tmp_path / "family", config)
    read = served_models.read_by_token(folder, is_packed="quantization_config" in config)
    twin = configured(tmp_path / "twin", served_models.dense_twin(folder, read))
    assert served_models.read_by_token(twin, is_packed=False) == pytest.approx(read, rel=0.01)


def test_experts_that_a_token_does_not_go_to_are_not_counted(tmp_path: Path) -> None:
    config = dict(served_models.FAMILIES["llama4"].config)
    hidden, width, heads = 5120, 8192, 128 * (40 + 8)
    experts = 3 * hidden * width * 2  # the chosen one, and that of every token
    others = 2 * heads * hidden + 16 * hidden + VOCABULARY * hidden
    read = served_models.read_by_token(configured(tmp_path / "family", config), is_packed=False)
    assert read == pytest.approx(2 * (experts + others), rel=1e-4)


@pytest.mark.parametrize("name", ["gpt-oss-mxfp4", "gemma4-experts"])
def test_random_checkpoints_are_read(name: str, tmp_path: Path) -> None:
    small = {"hidden_size": 96, "vocab_size": 128, "num_hidden_layers": 2}
    folder = write_random(tmp_path / name, {**SHAPE, **FAMILIES[name], **small})
    assert check_model(folder, 1, "bfloat16").layers == 2
