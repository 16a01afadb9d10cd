"""Random adapters as PEFT saves them, and the base model's checkpoint with one merged into its weights.

PEFT itself is not needed: what it computes with an adapter is, in exact numbers, what the base model computes with
`W + scale * B @ A` in place of each target's W.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from trunkline.controller.reports import AdapterReady
from trunkline.worker.messages import LoadAdapter
from trunkline.worker.model.adapter_experts import owners
from trunkline.worker.model.adapters import CONFIG_FILE, RANK_MAX, WEIGHTS_FILE, adaptable
from trunkline.worker.model.architecture import Architecture
from trunkline.worker.model.families import read_model_config
from trunkline.worker.model.tensor_index import find_prefix, read_tensor_index
from trunkline.worker.runner import Runner

ALL_LINEAR: Final = ()
"""As `targets`: every module that adapters can change."""


class PeftFolder:
    """A random adapter for a checkpoint."""

    def __init__(
        self,
        folder: Path,
        base: Path,
        targets: Sequence[str] = ALL_LINEAR,
        *,
        seed: int = 0,
        stacks_experts: bool = False,
        **settings: Any,
    ) -> None:
        """
        Args:
            targets: Ends of the names of the modules.
            stacks_experts: Whether a layer's experts have two matrices together, as always where the base has them
                in one tensor; else each has modules of its own.
            settings: Of adapter_config.json.
        """
        self.folder, self.base = folder, base
        self.settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "bias": "none", **settings}
        self.settings["target_modules"] = list(targets) or "all-linear"
        self.tensors: dict[str, Tensor] = {}
        self._scales: dict[str, float] = {}
        self._of_all: dict[str, float] = {}
        """Scales of the matrices of all experts, by module and parameter."""
        self._config = config = read_model_config(base)
        self._architecture: Architecture = config.architecture
        tensors = read_tensor_index(base)
        self._prefix = find_prefix(config.architecture, tensors)
        stacks_experts |= any(entry.member is not None for entry in tensors.values())
        generator = torch.Generator().manual_seed(seed)
        ends = tuple(f".{end}" for end in targets)
        own_start = config.architecture.names.expert.partition("{}")[0]
        for layer in self.settings.get("layers_to_transform", range(config.layers)):
            start = f"{config.architecture.prefixes[0]}{config.architecture.names.layer.format(layer)}"
            for module, (rows, columns) in adaptable(config, layer).items():
                if stacks_experts and own_start and module.startswith(own_start):
                    continue
                if not targets or f".{module}".endswith(ends):
                    self._add(f"{start}{module}", rows, columns, generator)
            if not stacks_experts or (mixture := config.mixture_of(layer)) is None:
                continue
            owner = start + owners(config.architecture.names)[-1]
            sizes = {"gate_up_proj": (2 * mixture.width, config.hidden_size)}
            sizes["down_proj"] = sizes["gate_up_proj"][1], mixture.width
            for parameter, (rows, columns) in sizes.items():
                if not targets or parameter in targets:
                    self._add_of_all(owner, parameter, rows, columns, generator)
        folder.mkdir(parents=True)
        self.write()

    def _add(self, path: str, rows: int, columns: int, generator: torch.Generator) -> None:
        rank, self._scales[path] = self._rank_and_scale(path)
        self._draw(path, (rank, columns), (rows, rank), generator)

    def _add_of_all(self, owner: str, parameter: str, rows: int, columns: int, generator: torch.Generator) -> None:
        """Add the matrices of a parameter of all experts; PEFT wraps the module once more for a second one."""
        mixture = self._config.mixture
        assert mixture is not None
        rank, self._of_all[f"{owner}.{parameter}"] = self._rank_and_scale(f"{owner}.{parameter}")
        ranks = rank * mixture.experts
        self._draw(self._module_of(f"{owner}.{parameter}"), (ranks, columns), (rows, ranks), generator)

    @staticmethod
    def _module_of(parameter: str) -> str:
        owner, _, name = parameter.rpartition(".")
        return owner if name == "down_proj" else f"{owner}.base_layer"

    def _draw(self, path: str, a: tuple[int, int], b: tuple[int, int], generator: torch.Generator) -> None:
        name = f"base_model.model.{path}.lora_{{}}.weight"
        self.tensors[name.format("A")] = torch.randn(*a, generator=generator) * 0.3
        self.tensors[name.format("B")] = torch.randn(*b, generator=generator) * 0.3

    def _rank_and_scale(self, path: str) -> tuple[int, float]:
        settings = self.settings
        ends = {name: settings.get(f"{name}_pattern", {}) for name in ("rank", "alpha")}
        rank = next((value for end, value in ends["rank"].items() if path.endswith(f".{end}")), settings["r"])
        alpha = next(
            (value for end, value in ends["alpha"].items() if path.endswith(f".{end}")), settings["lora_alpha"]
        )
        return rank, alpha / (rank**0.5 if settings.get("use_rslora") else rank)

    def write(self) -> None:
        """Write the folder as it is now."""
        (self.folder / CONFIG_FILE).write_text(json.dumps(self.settings))
        save_file(self.tensors, self.folder / WEIGHTS_FILE)

    def merged(self, folder: Path) -> Path:
        """Write the base model with the adapter in its weights; return `folder`."""
        shutil.copytree(self.base, folder)
        first = self._architecture.prefixes[0]
        for file in folder.glob("*.safetensors"):
            weights = load_file(file)
            for path, scale in self._scales.items():
                name = f"{self._prefix}{path.removeprefix(first)}.weight"
                if name in weights:
                    a, b = self._pair(path)
                    change = scale * (b @ a)
                    add(weights, name, change.T if self._architecture.transposed else change)
            for path, scale in self._of_all.items():
                self._merge_experts(weights, f"{self._prefix}{path.removeprefix(first)}", path, scale)
            save_file(weights, file, metadata={"format": "pt"})
        return folder

    def _pair(self, path: str) -> tuple[Tensor, Tensor]:
        a, b = (self.tensors[f"base_model.model.{path}.lora_{half}.weight"].double() for half in "AB")
        return a, b

    def _merge_experts(self, weights: dict[str, Tensor], name: str, path: str, scale: float) -> None:
        """Add what an adapter has for a parameter of all experts, to one tensor or to those of each expert."""
        names, mixture = self._architecture.names, self._config.mixture
        assert mixture is not None
        a, b = self._pair(self._module_of(path))
        by_expert = a.view(mixture.experts, -1, a.shape[1]), b.view(len(b), -1, mixture.experts)
        changes = scale * torch.einsum("eri,ore->eoi", *by_expert)
        layer, _, parameter = name.rpartition(owners(names)[-1])
        owner = owners(names)[0]
        linear = "input_linear" if parameter == ".gate_up_proj" else "output_linear"
        for stacked in (name, f"{layer}{owner.removesuffix('.experts')}.{linear}.weight"):
            if stacked in weights:
                lies_in_rows = self._architecture.family not in ("gpt_oss", "llama4")
                add(weights, stacked, changes if lies_in_rows else changes.mT)
        for expert, change in enumerate(changes):
            start = f"{layer}{names.expert.format(expert)}"
            if parameter == ".down_proj":
                parts = {names.down: change}
            else:
                parts = dict(zip(names.expert_gates, change.chunk(2), strict=True))
            for module, part in parts.items():
                if f"{start}{module}.weight" in weights:
                    add(weights, f"{start}{module}.weight", part)


def add(weights: dict[str, Tensor], name: str, change: Tensor) -> None:
    """Add a change to a tensor."""
    weights[name] = (weights[name].double() + change).float().contiguous()


def load(runner: Runner, name: str, folder: Path, rank_max: int = RANK_MAX) -> AdapterReady:
    """Load an adapter as the service does; wait for the report."""
    runner.adapters.load(LoadAdapter(1, name, str(folder), rank_max))
    while True:
        for report in runner.reports():
            assert isinstance(report, AdapterReady)
            return report
