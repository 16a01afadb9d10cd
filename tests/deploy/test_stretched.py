"""A context is stretched by rope scaling, with the numbers of transformers; the checkpoint stays as it is."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from trunkline.deploy.config import models
from trunkline.deploy.config.settings import ServeSettings
from trunkline.deploy.config.stretched import folder_of
from trunkline.deploy.errors import UserError
from trunkline.router.text.tokenizer import read_model_files
from trunkline.worker.model.families import check_model, read_model_config
from trunkline.worker.model.ropes import inverse_frequencies

SETTINGS = ServeSettings(model="demo", max_context=9000, rope_scaling="yarn")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def edited(folder: Path, **changes: object) -> Path:
    """A copy of the demo model without weights, whose config.json has other fields."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (models.DEMO_FOLDER / name).is_file():
            shutil.copy(models.DEMO_FOLDER / name, folder)
    raw = {**models.read_config(models.DEMO_FOLDER), **changes}
    kept = {key: value for key, value in raw.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_frequencies_equal_transformers(kind: str) -> None:
    folder = folder_of(replace(SETTINGS, rope_scaling=kind))
    rope = read_model_config(folder).attention[0].rope
    assert rope is not None
    assert rope.kind == kind
    expected, factor = ROPE_INIT_FUNCTIONS[kind](LlamaConfig.from_pretrained(folder), torch.device("cpu"))
    torch.testing.assert_close(inverse_frequencies(rope), expected, rtol=1e-6, atol=0)
    assert rope.attention_factor == pytest.approx(factor)
    plain = read_model_config(models.DEMO_FOLDER).attention[0].rope
    assert plain is not None
    assert not torch.equal(inverse_frequencies(rope), inverse_frequencies(plain))


def test_the_older_form_of_the_configuration(tmp_path: Path) -> None:
    model = edited(tmp_path / "old", rope_parameters=None, rope_theta=777.0)
    folder = folder_of(replace(SETTINGS, model=str(model)), needs_weights=False)
    rope = read_model_config(folder).attention[0].rope
    assert rope is not None
    assert (rope.kind, rope.theta, rope.factor, rope.original_max_positions) == ("yarn", 777.0, 9000 / 2048, 2048)


def test_another_model_with_the_same_weights_that_says_what_it_is() -> None:
    folder = folder_of(SETTINGS)
    assert check_model(folder, 2, "float32").max_positions == 9000
    assert models.read_config(models.DEMO_FOLDER)["max_position_embeddings"] == 2048, "the checkpoint is untouched"
    files = read_model_files(folder)
    assert (files.max_context, files.stretched_from) == (9000, 2048)
    assert read_model_files(models.DEMO_FOLDER).stretched_from == 0
    assert models.weights_digest(folder) != models.weights_digest(models.DEMO_FOLDER), "KV must not be mixed up"
    assert {path.name for path in folder.iterdir()} == {path.name for path in models.DEMO_FOLDER.iterdir()}


def test_it_is_made_once_and_another_length_is_another_folder() -> None:
    folder = folder_of(SETTINGS)
    before = folder.stat().st_mtime_ns
    assert folder_of(SETTINGS) == folder
    assert folder.stat().st_mtime_ns == before
    assert folder_of(replace(SETTINGS, max_context=9001)) != folder
    assert {path.name for path in folder.parent.iterdir()} == {
        folder.name,
        folder_of(replace(SETTINGS, max_context=9001)).name,
    }


def test_without_the_option_nothing_is_made(cache: Path) -> None:
    assert folder_of(replace(SETTINGS, rope_scaling="none")) == models.DEMO_FOLDER
    assert not cache.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_context": None}, "please give that, too"),
        ({"max_context": 2048}, "leave --rope-scaling out"),
        ({"max_context": 2048 * 1025}, "more than 1024 times"),
    ],
)
def test_what_is_refused(changes: dict[str, int | None], message: str) -> None:
    with pytest.raises(UserError, match=message):
        folder_of(replace(SETTINGS, **changes))  # type: ignore[arg-type]


def test_positions_that_are_scaled_already_are_refused(tmp_path: Path) -> None:
    scaled = {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}
    model = edited(tmp_path / "scaled", rope_parameters=scaled)
    with pytest.raises(UserError, match="not scaled yet"):
        folder_of(replace(SETTINGS, model=str(model)), needs_weights=False)


def test_a_cache_folder_that_cannot_be_written(cache: Path) -> None:
    cache.write_text("a file")
    with pytest.raises(UserError, match="cannot be made"):
        folder_of(SETTINGS)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(UserError, match="--rope-scaling is 'dynamic'; allowed are none, yarn, linear"):
        replace(SETTINGS, rope_scaling="dynamic").validate()
