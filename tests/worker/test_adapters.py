"""Adapters: rows of a batch with several, equal to `transformers` with merged weights; ranks; what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from worker.adapted_models import (
    Adapted,
    AdaptedModels,
    check,
    check_merged,
    check_unloading,
    generate_on,
    logits_beside_adapters,
)
from worker.checkpoints import Models
from worker.driver import run_config
from worker.peft_folders import PeftFolder, load
from worker.ranks import run_ranks
from worker.variants import FAMILIES

from trunkline.worker.errors import AdapterError
from trunkline.worker.loading import load_runner
from trunkline.worker.model.adapters import CONFIG_FILE, WEIGHTS_FILE, read_adapter
from trunkline.worker.model.families import read_model_config

ATTENTION: Final = ("q_proj", "v_proj", "o_proj", "qkv_proj", "query_key_value", "Wqkv", "c_attn", "dense")
ONE_OF_EACH: Final = (
    *("gqa", "biases", "gpt2", "opt-350m", "pythia", "falcon-40b", "mpt", "gemma2", "glm4", "glm4-moe"),
    *("qwen3-moe-some-dense", "phi3", "olmo2", "mixtral", "deepseek-v3", "gemma4", "gemma4-e"),
)
"""Every way in which matrices are stored, fused, gated and come together."""
TAKE_ADAPTERS: Final = tuple(name for name in FAMILIES if not name.startswith("deepseek"))
"""All without latent attention, for which adapters are refused."""
REFERENCE: Final = ("gpt2", "phi3", "glm4-moe")
"""Fused and transposed matrices, gates in one matrix, shared experts: with the reference kernels, too."""


@pytest.fixture(scope="module")
def adapted(models: Models, tmp_path_factory: pytest.TempPathFactory) -> AdaptedModels:
    """Checkpoints of a name with adapters: one of all linear layers, one of attention in a layer alone."""
    made: dict[str, Adapted] = {}
    root = tmp_path_factory.mktemp("adapters")

    def of(name: str) -> Adapted:
        if name not in made:
            base = models(name)
            whole = PeftFolder(root / f"{name}-whole", base, seed=1)
            part = PeftFolder(
                *(root / f"{name}-part", base, ATTENTION),
                seed=2,
                r=3,
                use_rslora=True,
                layers_to_transform=[1],
                rank_pattern={"v_proj": 5},
                alpha_pattern={"o_proj": 1},
            )
            merged = tuple(each.merged(root / f"{each.folder.name}-merged") for each in (whole, part))
            made[name] = Adapted(base, (whole.folder, part.folder), merged)  # type: ignore[arg-type]
        return made[name]

    return of


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        *((name, "auto") for name in ONE_OF_EACH),
        *((name, "reference") for name in REFERENCE),
        *(pytest.param(name, "auto", marks=pytest.mark.soak) for name in TAKE_ADAPTERS if name not in ONE_OF_EACH),
    ],
)
def test_equal_to_merged_weights(name: str, kernels: str, adapted: AdaptedModels) -> None:
    check_merged(adapted(name), kernels)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("tp", "names"),
    [
        (2, ("gqa", "gpt2", "falcon-40b", "phi3", "glm4-moe", "deepseek-v3")),
        (4, ("gqa", "mqa-tied", "gemma4")),
        pytest.param(2, ("pythia", "glm4", "qwen3-moe-some-dense", "mpt"), marks=pytest.mark.soak),
    ],
)
def test_ranks_give_the_same(tp: int, names: tuple[str, ...], adapted: AdaptedModels) -> None:
    cases = [adapted(name) for name in names]
    results, *_ = run_ranks(generate_on, tp, cases)
    for case, (streams, keys) in zip(cases, results, strict=True):
        check(streams, case, keys)


@pytest.mark.parametrize("fields", [{"dtype": "bfloat16"}, {"quantisation": "int8"}])
def test_half_types_and_quantised_bases(fields: dict[str, Any], adapted: AdaptedModels) -> None:
    """Rows without an adapter are the same bits as without any beside them; the others differ from them."""
    beside, alone = logits_beside_adapters(adapted("gqa"), **fields)
    assert beside[0] == alone[0]
    assert beside[1] != alone[1] != beside[2]


def test_load_unload_and_load_again(adapted: AdaptedModels) -> None:
    check_unloading(adapted("gqa"))


def test_the_name_is_a_part_of_the_key(adapted: AdaptedModels) -> None:
    model = adapted("gqa")
    runner = load_runner(run_config(model.base, pool_blocks=96), lambda *_: None)
    assert load(runner, "a", model.folders[0]).key != load(runner, "b", model.folders[0]).key
    runner.close()


def edited(**settings: Any) -> Callable[[PeftFolder], None]:
    def edit(adapter: PeftFolder) -> None:
        adapter.settings.update(settings)
        adapter.write()

    return edit


def renamed(old: str, new: str) -> Callable[[PeftFolder], None]:
    def edit(adapter: PeftFolder) -> None:
        adapter.tensors = {name.replace(old, new): each for name, each in adapter.tensors.items()}
        adapter.write()

    return edit


def half_gone(adapter: PeftFolder) -> None:
    adapter.tensors.popitem()
    adapter.write()


def emptied(adapter: PeftFolder) -> None:
    adapter.tensors.clear()
    adapter.write()


def no_json(adapter: PeftFolder) -> None:
    (adapter.folder / CONFIG_FILE).write_text("{")


def cut_off(adapter: PeftFolder) -> None:
    file = adapter.folder / WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[:-100])


def as_pickle(adapter: PeftFolder) -> None:
    (adapter.folder / WEIGHTS_FILE).rename(adapter.folder / "adapter_model.bin")


def of_another_base(adapter: PeftFolder) -> None:
    adapter.tensors = {
        name: torch.zeros(each.shape[0], 40) if ".lora_A." in name else each
        for name, each in adapter.tensors.items()
    }
    adapter.write()


REFUSED: Final[dict[str, tuple[Callable[[PeftFolder], None], str]]] = {
    "dora": (edited(use_dora=True), "use_dora is 'True'; only False"),
    "bias": (edited(bias="all"), "bias is 'all'; only 'none'"),
    "modules_to_save": (edited(modules_to_save=["lm_head"]), "modules_to_save"),
    "another kind": (edited(peft_type="IA3"), "peft_type is 'IA3'; only LORA"),
    "rank in the settings": (edited(r=5), "has rank 4; adapter_config.json says 5"),
    "no alpha": (edited(lora_alpha="x"), "lora_alpha is 'x'; expected is a number"),
    "no pattern": (edited(alpha_pattern={"(": 1}), "is no pattern"),
    "embedding": (renamed("layers.0.self_attn.q_proj", "embed_tokens"), "not embeddings or the head"),
    "lora of an embedding": (renamed("lora_A.weight", "lora_embedding_A"), "is of an embedding"),
    "magnitudes": (renamed("lora_A.weight", "lora_magnitude_vector.weight"), "is of DoRA"),
    "unknown module": (
        renamed("q_proj", "query"),
        "none that adapters can change in this model; those are self_attn",
    ),
    "layer": (renamed("layers.1.", "layers.7."), "none of this model's 2 layers"),
    "half": (half_gone, "but not the other matrix"),
    "no tensors": (emptied, "has no tensors"),
    "another base": (of_another_base, "inputs and 32 outputs, so the adapter is of another base model"),
    "cut off": (cut_off, "is cut off"),
    "no weights": (lambda adapter: (adapter.folder / WEIGHTS_FILE).unlink(), f"there is no {WEIGHTS_FILE}"),
    "a pickle": (as_pickle, "a pickle, which is not read"),
    "no settings": (lambda adapter: (adapter.folder / CONFIG_FILE).unlink(), f"there is no {CONFIG_FILE}"),
    "no JSON": (no_json, "is no JSON"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name: str, folder: Path, tmp_path: Path) -> None:
    adapter = PeftFolder(tmp_path / "adapter", folder, ("q_proj", "down_proj"))
    config = read_model_config(folder)
    assert len(read_adapter("mine", adapter.folder, config).modules) == 4
    edit, message = REFUSED[name]
    edit(adapter)
    with pytest.raises(AdapterError, match=r"^adapter 'mine' \(.*adapter") as caught:
        read_adapter("mine", adapter.folder, config)
    assert message in str(caught.value)


def test_rank_above_the_limit(folder: Path, tmp_path: Path) -> None:
    adapter = PeftFolder(tmp_path / "adapter", folder, ("q_proj",), r=9)
    with pytest.raises(AdapterError, match="rank 9; --max-lora-rank allows 8"):
        read_adapter("mine", adapter.folder, read_model_config(folder), 8)


def test_what_makes_keys_and_values_of_latents_is_no_target(models: Models, tmp_path: Path) -> None:
    adapter = PeftFolder(tmp_path / "adapter", models("deepseek-v3"), ("q_b_proj",))
    config = read_model_config(models("deepseek-v3"))
    assert len(read_adapter("mine", adapter.folder, config).modules) == 2
    renamed("q_b_proj", "kv_b_proj")(adapter)
    with pytest.raises(AdapterError, match=r"kv_b_proj' is none .* inside two products with latents\); those are"):
        read_adapter("mine", adapter.folder, config)


def test_damaged_files_are_refused_or_read(folder: Path, tmp_path: Path) -> None:
    """400 mutations of headers and settings."""
    adapter = PeftFolder(tmp_path / "adapter", folder, ("q_proj", "down_proj"))
    config, rng = read_model_config(folder), np.random.default_rng(5)
    files = {name: (adapter.folder / name).read_bytes() for name in (CONFIG_FILE, WEIGHTS_FILE)}
    refused = 0
    for _ in range(400):
        name = (CONFIG_FILE, WEIGHTS_FILE)[int(rng.integers(2))]
        data = bytearray(files[name])
        for _ in range(int(rng.integers(1, 4))):
            data[int(rng.integers(min(len(data), 1200)))] = int(rng.integers(256))
        (adapter.folder / name).write_bytes(
            data[: len(data) - int(rng.integers(2)) * int(rng.integers(len(data)))]
        )
        try:
            read_adapter("mine", adapter.folder, config)
        except AdapterError:
            refused += 1
        (adapter.folder / name).write_bytes(files[name])
    assert refused > 200
    assert json.loads(files[CONFIG_FILE])
