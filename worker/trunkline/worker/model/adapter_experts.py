"""LoRA of all experts of a layer in one pair of matrices, as PEFT stores it for `target_parameters`. No torch.

      X.experts.lora_A.weight               [experts * rank, in]    the rows of an expert stand together
      X.experts.lora_B.weight               [out, rank * experts]   the columns of an expert are `experts` apart
      X.experts.base_layer.lora_A.weight    the same of another parameter of the module

`transformers` has two such parameters, `gate_up_proj` and `down_proj`; shapes tell which of them a pair changes.
PEFT before 0.19 reads a parameter `[experts, out, in]` as if it were `[experts, in, out]`, and later versions make
the same mistake the other way round with Llama 4. Then A and B have changed places. Shapes tell that, too, unless
the parameter's matrices are square; then PEFT's version decides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from trunkline.worker.errors import AdapterError
from trunkline.worker.model.architecture import WeightNames
from trunkline.worker.model.model_config import Mixture, ModelConfig

BOTH_GATES: Final = "gate_up_proj"
"""Name of the parameter for gate and up, and of an expert's part of it where the checkpoint has two matrices."""
_TURNED_BEFORE: Final = (0, 19)
"""PEFT's first version that reads `[experts, out, in]` as such."""
_LIE_IN_COLUMNS: Final = ("gpt_oss", "llama4")
"""Families whose parameters are `[experts, in, out]` in `transformers`."""


class ExpertPart(NamedTuple):
    """Where the pair of one expert lies in the pair of all experts."""

    expert: int
    experts: int
    is_turned: bool
    """Whether A and B have changed places: the expert's A is its part of B, transposed, and its B that of A."""


class Stack(NamedTuple):
    """A pair of matrices for all experts of a layer."""

    parameter: str
    """Name in `transformers` of the parameter that it changes."""
    module: str
    """Name of an expert's part of that parameter, within the expert."""
    rank: int
    """Rank of each expert's pair."""
    experts: int
    is_turned: bool
    """As of `ExpertPart`."""


def both_gates(names: WeightNames) -> str:
    """Return the name, within an expert, of the matrix that holds gate and up."""
    gate, up = names.expert_gates
    return up if gate == up else BOTH_GATES


def owners(names: WeightNames) -> tuple[str, ...]:
    """Return the names of a layer's module with all experts, in the checkpoint and in `transformers`."""
    owner = names.expert.partition("{}")[0].removesuffix(".")
    return tuple(dict.fromkeys((owner, owner.replace("block_sparse_moe.", "mlp.")))) if owner else ()


def find_stack(
    path: str, a: tuple[int, ...], b: tuple[int, ...], config: ModelConfig, settings: Mapping[str, Any]
) -> Stack:
    """Return which parameter a pair of matrices for all experts changes, and how its parts lie.

    Args:
        path: Name of the module, for messages.
        a, b: Shapes of the matrices A and B.
        settings: Content of adapter_config.json.

    Raises:
        AdapterError: The pair is of another base model, or can be read in two ways.
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
    """Return each parameter's name, that of an expert's part, and the part's numbers of inputs and outputs."""
    return (
        ("gate_up_proj", both_gates(names), (hidden, 2 * mixture.width)),
        ("down_proj", names.down, (mixture.width, hidden)),
    )


def _turns_square(path: str, family: str, settings: Mapping[str, Any]) -> bool:
    """Return whether A and B have changed places where all matrices are square: PEFT's version tells."""
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
