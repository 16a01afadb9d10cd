"""Adapters of experts and routers, in two matrices for all experts, as PEFT stores `target_parameters`: equal to
`transformers` with merged weights; ranks; what is refused; folders that PEFT itself has made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file
from worker.adapted_models import (
    Adapted,
    AdaptedModels,
    check,
    check_merged,
    check_unloading,
    generate_mixed,
    generate_on,
    load_all,
    logits_beside_adapters,
)
from worker.checkpoints import Models, transformers_model
from worker.driver import run_config
from worker.peft_folders import PeftFolder
from worker.ranks import run_ranks

from trunkline.kernels.reference import ReferenceKernels
from trunkline.worker.errors import AdapterError
from trunkline.worker.loading import load_runner
from trunkline.worker.model.adapter_experts import find_stack
from trunkline.worker.model.adapter_weights import load_adapter
from trunkline.worker.model.adapters import WEIGHTS_FILE, read_adapter
from trunkline.worker.model.families import read_model_config
from trunkline.worker.model.shard import Shard

BOTH: Final = ("gate_up_proj", "down_proj")
ROUTERS: Final = ("gate", "router")


@pytest.fixture(scope="module")
def adapted(models: Models, tmp_path_factory: pytest.TempPathFactory) -> AdaptedModels:
    """Checkpoints with adapters: one of all layers, experts together; one of a parameter in a layer alone."""
    made: dict[str, Adapted] = {}
    root = tmp_path_factory.mktemp("adapters")

    def of(name: str) -> Adapted:
        if name not in made:
            base, last = models(name), read_model_config(models(name)).layers - 1
            whole = PeftFolder(root / f"{name}-whole", base, seed=1, stacks_experts=True)
            part = PeftFolder(
                *(root / f"{name}-part", base, ("gate_up_proj", "q_proj")),
                seed=2,
                stacks_experts=True,
                use_rslora=True,
                layers_to_transform=[last],
                rank_pattern={"gate_up_proj": 3},
            )
            merged = tuple(each.merged(root / f"{each.folder.name}-merged") for each in (whole, part))
            made[name] = Adapted(base, (whole.folder, part.folder), merged)  # type: ignore[arg-type]
        return made[name]

    return of


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        *((name, "auto") for name in ("qwen3-moe", "mixtral", "gpt-oss", "llama4", "gemma4-experts")),
        *((name, "reference") for name in ("qwen3-moe", "gpt-oss")),
        *(
            pytest.param(name, "auto", marks=pytest.mark.soak)
            for name in ("qwen2-moe", "olmoe", "glm4-moe", "deepseek-v3", "mistral4", "granite-moe-shared")
        ),
    ],
)
def test_experts_together_are_equal_to_merged_weights(name: str, kernels: str, adapted: AdaptedModels) -> None:
    check_merged(adapted(name), kernels)


@pytest.mark.processes
@pytest.mark.parametrize("expert_parallel", [True, False])
def test_two_ranks_give_the_same(expert_parallel: bool, adapted: AdaptedModels) -> None:
    cases = [adapted(name) for name in ("qwen3-moe", "gpt-oss")]
    results, *_ = run_ranks(partial(generate_on, expert_parallel=expert_parallel), 2, cases)
    for case, (streams, keys) in zip(cases, results, strict=True):
        check(streams, case, keys)


def test_rows_without_an_adapter_keep_their_bits(adapted: AdaptedModels) -> None:
    """Beside rows with adapters and without any."""
    beside, alone = logits_beside_adapters(adapted("qwen3-moe"), dtype="bfloat16")
    assert beside[0] == alone[0]
    assert beside[1] != alone[1]


def test_load_and_unload(adapted: AdaptedModels) -> None:
    check_unloading(adapted("qwen3-moe"))


def turned(adapter: PeftFolder) -> None:
    """Write what PEFT before 0.19 stores for parameters `[experts, out, in]`: A and B have changed places."""
    experts = 8
    for name in list(adapter.tensors):
        if ".lora_A." not in name or "experts" not in name:
            continue
        other = name.replace("lora_A", "lora_B")
        a, b = adapter.tensors[name], adapter.tensors[other]
        rank = len(a) // experts
        adapter.tensors[name] = b.view(len(b), rank, experts).permute(2, 1, 0).reshape(experts * rank, -1)
        adapter.tensors[other] = a.view(experts, rank, -1).permute(2, 1, 0).reshape(a.shape[1], -1)
    adapter.tensors = {name: each.contiguous() for name, each in adapter.tensors.items()}
    adapter.write()


def test_what_older_versions_of_peft_stored(models: Models, tmp_path: Path) -> None:
    base = models("qwen3-moe")
    adapter = PeftFolder(tmp_path / "adapter", base, BOTH, stacks_experts=True, peft_version="0.18.1")
    shard = Shard(read_model_config(base), 0, 1)

    def layers() -> dict[str, Any]:
        read = read_adapter("mine", adapter.folder, shard.config)
        return dict(load_adapter(read, shard, torch.float32, torch.device("cpu"), ReferenceKernels()))

    expected = layers()
    turned(adapter)
    assert len(expected) == 2 * 8 * shard.config.layers
    for name, layer in layers().items():
        for ours, theirs in zip(layer, expected[name], strict=True):
            assert torch.equal(ours.data[0], theirs.data[0])


@pytest.mark.parametrize(
    ("name", "version", "is_turned"),
    [
        ("qwen3-moe", "0.18.1", True),
        ("qwen3-moe", "0.19.0", False),
        ("qwen3-moe", "1.0.0.dev0", False),
        ("llama4", "0.18.0", False),
        ("llama4", "0.21.2", True),
        ("gpt-oss", None, False),
    ],
)
def test_square_matrices_go_by_the_version(
    name: str, version: str | None, is_turned: bool, models: Models
) -> None:
    config = read_model_config(models(name))
    assert config.mixture is not None
    shape, hidden = 3 * config.mixture.experts, config.hidden_size
    config = replace(config, mixture=replace(config.mixture, width=hidden))  # down_proj is as wide as it is high
    stack = find_stack("x", (shape, hidden), (hidden, shape), config, {"peft_version": version})
    assert (stack.parameter, stack.rank, stack.is_turned) == ("down_proj", 3, is_turned)
    if name != "gpt-oss":
        with pytest.raises(AdapterError, match=r"has as many inputs as outputs, so .* peft_version"):
            find_stack("x", (shape, hidden), (hidden, shape), config, {})


def other_experts(adapter: PeftFolder) -> None:
    adapter.tensors = {
        name: (each[:-1] if ".lora_A." in name else each[:, :-1]).contiguous() if "experts" in name else each
        for name, each in adapter.tensors.items()
    }
    adapter.write()


def also_one_by_one(adapter: PeftFolder) -> None:
    name = "base_model.model.model.layers.0.mlp.experts.0.down_proj.lora_{}.weight"
    config = read_model_config(adapter.base)
    assert config.mixture is not None
    adapter.tensors[name.format("A")] = torch.zeros(4, config.mixture.width)
    adapter.tensors[name.format("B")] = torch.zeros(config.hidden_size, 4)
    adapter.write()


def of_a_gate(adapter: PeftFolder) -> None:
    tensors = load_file(adapter.folder / WEIGHTS_FILE)
    save_file(
        {name.replace("mlp.experts", "mlp.shared_expert_gate"): each for name, each in tensors.items()},
        adapter.folder / WEIGHTS_FILE,
    )


REFUSED: Final[dict[str, tuple[Callable[[PeftFolder], None], str]]] = {
    "experts of another base": (
        other_experts,
        "8 experts of width 24 between 32 numbers, so the adapter is of an",
    ),
    "an expert twice": (also_one_by_one, "is there twice"),
    "not the experts": (of_a_gate, "none that adapters can change in this model; those are self_attn"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name: str, models: Models, tmp_path: Path) -> None:
    adapter = PeftFolder(tmp_path / "adapter", models("qwen3-moe"), BOTH, stacks_experts=True)
    config = read_model_config(adapter.base)
    assert len(read_adapter("mine", adapter.folder, config).modules) == 2 * 8 * config.layers
    with pytest.raises(AdapterError, match=r"has rank 4; --max-lora-rank allows 3"):
        read_adapter("mine", adapter.folder, config, 3)
    edit, message = REFUSED[name]
    edit(adapter)
    with pytest.raises(AdapterError) as caught:
        read_adapter("mine", adapter.folder, config)
    assert message in str(caught.value)
    assert "experts.7" not in str(caught.value)  # experts are named once


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "gpt-oss", "llama4", "gemma4-experts", "gqa"])
def test_folders_that_peft_itself_saves(name: str, models: Models, tmp_path: Path) -> None:
    """PEFT makes an adapter of a model of `transformers`, saves it, and merges it into the weights."""
    peft: Any = pytest.importorskip("peft", reason="peft is not installed")
    base = models(name)
    folders, merged = [], []
    for number, targets in enumerate(([*BOTH], [BOTH[number_of(name)]])):
        transformers_model.cache_clear()  # PEFT changes the model
        model = transformers_model(base)
        parameters = [
            own for own, each in model.named_parameters() if each.dim() == 3 and own.endswith(tuple(targets))
        ]
        routers = [own for own, _ in model.named_parameters() if own.removesuffix(".weight").endswith(ROUTERS)]
        torch.manual_seed(number)
        config = peft.LoraConfig(
            r=3 + number,
            lora_alpha=5,
            init_lora_weights=False,
            target_modules=["q_proj", "o_proj"],
            target_parameters=[*parameters, *(routers if number else ())] or None,
        )
        wrapped = peft.get_peft_model(model, config)
        with torch.no_grad():
            for own, each in wrapped.named_parameters():
                if ".lora_" in own:
                    each.normal_(std=0.3)
        wrapped.save_pretrained(tmp_path / f"adapter-{number}")
        folders.append(tmp_path / f"adapter-{number}")
        wrapped.merge_and_unload().save_pretrained(tmp_path / f"merged-{number}")
        merged.append(tmp_path / f"merged-{number}")
        transformers_model.cache_clear()
    model = Adapted(base, (folders[0], folders[1]), (merged[0], merged[1]))
    runner = load_runner(run_config(base, pool_blocks=96), lambda *_: None)
    keys = load_all(runner, model)
    check(generate_mixed(runner, keys), model, keys)
    runner.close()


def number_of(name: str) -> int:
    """Which of the two parameters the second adapter changes."""
    return len(name) % 2
