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

from trunkline.controller.adapter_messages import AdapterReady
from trunkline.worker.messages import LoadAdapter
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
        self, folder: Path, base: Path, targets: Sequence[str] = ALL_LINEAR, *, seed: int = 0, **settings: Any
    ) -> None:
        """
        Args:
            targets: Ends of the names of the modules.
            settings: Of adapter_config.json.
        """
        self.folder, self.base = folder, base
        self.settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "bias": "none", **settings}
        self.settings["target_modules"] = list(targets) or "all-linear"
        self.tensors: dict[str, Tensor] = {}
        self._scales: dict[str, float] = {}
        config = read_model_config(base)
        self._architecture: Architecture = config.architecture
        self._prefix = find_prefix(config.architecture, read_tensor_index(base))
        generator = torch.Generator().manual_seed(seed)
        chosen = self.settings.get("layers_to_transform", range(config.layers))
        for layer in chosen:
            for module, (rows, columns) in adaptable(config, layer).items():
                if not targets or f".{module}".endswith(tuple(f".{end}" for end in targets)):
                    path = (
                        f"{config.architecture.prefixes[0]}{config.architecture.names.layer.format(layer)}{module}"
                    )
                    self._add(path, rows, columns, generator)
        folder.mkdir(parents=True)
        self.write()

    def _add(self, path: str, rows: int, columns: int, generator: torch.Generator) -> None:
        settings = self.settings
        ends = {name: settings.get(f"{name}_pattern", {}) for name in ("rank", "alpha")}
        rank = next((value for end, value in ends["rank"].items() if path.endswith(f".{end}")), settings["r"])
        alpha = next(
            (value for end, value in ends["alpha"].items() if path.endswith(f".{end}")), settings["lora_alpha"]
        )
        self._scales[path] = alpha / (rank**0.5 if settings.get("use_rslora") else rank)
        name = f"base_model.model.{path}.lora_{{}}.weight"
        self.tensors[name.format("A")] = torch.randn(rank, columns, generator=generator) * 0.3
        self.tensors[name.format("B")] = torch.randn(rows, rank, generator=generator) * 0.3

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
                    a, b = (self.tensors[f"base_model.model.{path}.lora_{half}.weight"] for half in "AB")
                    change = scale * (b.double() @ a.double())
                    change = change.T if self._architecture.transposed else change
                    weights[name] = (weights[name].double() + change).float().contiguous()
            save_file(weights, file, metadata={"format": "pt"})
        return folder


def load(runner: Runner, name: str, folder: Path, rank_max: int = RANK_MAX) -> AdapterReady:
    """Load an adapter as the service does; wait for the report."""
    runner.adapters.load(LoadAdapter(1, name, str(folder), rank_max))
    while True:
        for report in runner.reports():
            assert isinstance(report, AdapterReady)
            return report
