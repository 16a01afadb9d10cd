"""LoRA of all experts of a layer in two matrices, as PEFT stores it for `target_parameters`. No torch.

      X.experts.lora_A.weight               [experts * rank, in]    the rows of an expert stand together
      X.experts.lora_B.weight               [out, rank * experts]   the columns of an expert are `experts` apart
      X.experts.base_layer.lora_A.weight    the same of another parameter of the module

`transformers` has two such parameters, `gate_up_proj` and `down_proj`; shapes tell which of them a pair is about.
PEFT before 0.19 takes a parameter `[experts, out, in]` for one `[experts, in, out]`, and later versions take Llama
4's the other way round: then B and A have changed places, which shapes tell, too, unless a matrix is square.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from trunkline.worker.errors import AdapterError
from trunkline.worker.model.architecture import WeightNames
from trunkline.worker.model.model_config import Mixture, ModelConfig

BOTH_GATES: Final = "gate_up_proj"
"""Name of the parameter, and of an expert's part of it, where the checkpoint has a matrix for each of the two."""
_TURNED_BEFORE: Final = (0, 19)
"""Version of PEFT."""
_LIE_IN_COLUMNS: Final = ("gpt_oss", "llama4")
"""Families whose parameters are `[experts, in, out]` in `transformers`."""


class ExpertPart(NamedTuple):
    """Where the pair of an expert lies in the two matrices of all."""

    expert: int
    experts: int
    is_turned: bool
    """Whether A is the other matrix's part, transposed, and B this one's."""


class Stack(NamedTuple):
    """Two matrices of all experts of a layer."""

    parameter: str
    """Its name in `transformers`."""
    module: str
    """Name of an expert's part, in place of the checkpoint's names of an expert's layers."""
    rank: int
    """Of each expert."""
    experts: int
    is_turned: bool


def both_gates(names: WeightNames) -> str:
    """Return the name, within an expert, of the matrix of gate and up."""
    gate, up = names.expert_gates
    return up if gate == up else BOTH_GATES


def owners(names: WeightNames) -> tuple[str, ...]:
    """Return the names of a layer's module of all experts, in the checkpoint and in `transformers`."""
    owner = names.expert.partition("{}")[0].removesuffix(".")
    return tuple(dict.fromkeys((owner, owner.replace("block_sparse_moe.", "mlp.")))) if owner else ()


def find_stack(
    path: str, a: tuple[int, ...], b: tuple[int, ...], config: ModelConfig, settings: Mapping[str, Any]
) -> Stack:
    """Return what two matrices of all experts are about.

    Args:
        path: The module, for messages.
        a, b: Their shapes.
        settings: Of adapter_config.json.

    Raises:
        AdapterError: They are of another base model, or may mean two things.
    """
    mixture, names = config.mixture, config.architecture.names
    assert mixture is not None
    rank, rest = divmod(a[0], mixture.experts)
    stated = (a[1], b[0])
    for parameter, module, shape in _parameters(mixture, names, config.hidden_size):
        if stated not in (shape, shape[::-1]) or rest or not rank or b[1] != a[0]:
            continue
        is_turned = stated != shape
        if shape[0] == shape[1]:
            is_turned = _turns_square(path, config.architecture.family, settings)
        return Stack(parameter, module, rank, mixture.experts, is_turned)
    raise AdapterError(
        f"module {path!r}: A is {list(a)} and B {list(b)}; this model's layer has {mixture.experts} experts of "
        f"width {mixture.width} between {config.hidden_size} numbers, so the adapter is of another base model"
    )


def _parameters(mixture: Mixture, names: WeightNames, hidden: int) -> tuple[tuple[str, str, tuple[int, int]], ...]:
    """Return the parameters, the names of an expert's parts, and their inputs and outputs."""
    return (
        ("gate_up_proj", both_gates(names), (hidden, 2 * mixture.width)),
        ("down_proj", names.down, (mixture.width, hidden)),
    )


def _turns_square(path: str, family: str, settings: Mapping[str, Any]) -> bool:
    stated = re.match(r"(\d{1,4})\.(\d{1,4})", str(settings.get("peft_version") or ""))
    if family == "gpt_oss":
        return False
    if stated is None:
        raise AdapterError(
            f"module {path!r} has as many inputs as outputs, so which of its matrices is which follows from "
            "peft_version, which adapter_config.json does not have: save the adapter with PEFT 0.19 or later"
        )
    is_old = (int(stated[1]), int(stated[2])) < _TURNED_BEFORE
    return is_old != (family in _LIE_IN_COLUMNS)
