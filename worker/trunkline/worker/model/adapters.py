"""Adapters (LoRA) in PEFT's folders: what they have, and whether they fit a model. No torch.

      adapter_config.json          r, lora_alpha, use_rslora, rank_pattern, alpha_pattern; what is refused by name
      adapter_model.safetensors    base_model.model.MODULE.lora_A.weight [r, in], ….lora_B.weight [out, r]

The tensors say which modules the adapter changes; `target_modules`, `target_parameters` and
`layers_to_transform` only say how PEFT found them. Experts have modules of their own, or share two matrices
(`adapter_experts`). The content of the files is not trusted: whatever it is, the result is an adapter that fits,
or one `AdapterError`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, NamedTuple

from trunkline.kvstore.adapters import adapter_key
from trunkline.worker.errors import AdapterError, CheckpointError
from trunkline.worker.model.adapter_experts import ExpertPart, find_stack, owners
from trunkline.worker.model.model_config import ModelConfig
from trunkline.worker.model.tensor_index import TensorEntry, layer_shapes, read_header

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
RANK_MAX: Final = 64
"""Largest rank of an adapter unless an option says otherwise."""
_CONFIG_BYTES_MAX: Final = 1 << 20
_TENSOR: Final = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
_REFUSED: Final[Mapping[str, tuple[object, ...]]] = {
    "use_dora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "arrow_config": (None,),
}
"""Fields that change the computation in ways that are not implemented, and the values at which they do not."""
_SHOWN: Final = 5


class AdaptedModule(NamedTuple):
    """What an adapter has for one linear layer of the checkpoint."""

    a: str
    """Name of A in the file, `[rank, in]`."""
    b: str
    """Name of B, `[out, rank]`."""
    rank: int
    scale: float
    """Factor of `B @ A`."""
    part: ExpertPart | None = None
    """Which part of A and B it is, where these are for all experts of the layer; `rank` is the part's."""


@dataclass(frozen=True)
class Adapter:
    """An adapter that fits a model."""

    file: Path
    key: bytes
    """Of its name and its files' content (`trunkline.kvstore.adapters`)."""
    modules: Mapping[tuple[int, str], AdaptedModule]
    """By layer and name of the module within it, as the checkpoint has it; parts of matrices of all experts as in
    `adapter_experts`."""


def read_adapter(name: str, folder: Path, config: ModelConfig, rank_max: int = RANK_MAX) -> Adapter:
    """Read a PEFT folder, and check that the adapter fits a model.

    Raises:
        AdapterError: Files that are missing or damaged, another model's adapter, what is not implemented, a rank
            above `rank_max`. The message names it and says what would be accepted.
    """
    try:
        settings, raw = _read_settings(folder)
        file = folder / WEIGHTS_FILE
        if not file.is_file():
            raise AdapterError(f"there is no {WEIGHTS_FILE}{_instead(folder)}")
        modules = _modules(settings, read_header(file), config, rank_max)
        return Adapter(file, adapter_key(name, _digest(raw, file)), modules)
    except (AdapterError, CheckpointError) as error:
        raise AdapterError(f"adapter {name!r} ({folder}): {error}") from error
    except OSError as error:
        raise AdapterError(f"adapter {name!r} ({folder}) cannot be read: {error.strerror or error}") from error


def _instead(folder: Path) -> str:
    found = [path.name for path in (folder / "adapter_model.bin", folder / "adapter_model.pt") if path.is_file()]
    return f"; {found[0]} is a pickle, which is not read: save the adapter as safetensors" if found else ""


def _read_settings(folder: Path) -> tuple[dict[str, Any], bytes]:
    path = folder / CONFIG_FILE
    if not folder.is_dir():
        raise AdapterError("there is no such folder; an adapter is a folder that PEFT has saved")
    if not path.is_file():
        raise AdapterError(f"there is no {CONFIG_FILE}; an adapter is a folder that PEFT has saved")
    if path.stat().st_size > _CONFIG_BYTES_MAX:
        raise AdapterError(f"{CONFIG_FILE} has more than {_CONFIG_BYTES_MAX} bytes")
    raw = path.read_bytes()
    try:
        settings = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{CONFIG_FILE} is no JSON ({error})") from error
    if not isinstance(settings, dict):
        raise AdapterError(f"{CONFIG_FILE} is no JSON object")
    if (kind := settings.get("peft_type")) != "LORA":
        raise AdapterError(f"peft_type is {str(kind)[:80]!r}; only LORA is implemented")
    for field, accepted in _REFUSED.items():
        value = settings.get(field, accepted[0])
        if value not in accepted:
            raise AdapterError(f"{field} is {str(value)[:80]!r}; only {accepted[0]!r} is implemented")
    return settings, raw


def _digest(settings: bytes, file: Path) -> bytes:
    digest = blake2b(settings, digest_size=16)
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.digest()


def _modules(
    settings: dict[str, Any], tensors: dict[str, TensorEntry], config: ModelConfig, rank_max: int
) -> dict[tuple[int, str], AdaptedModule]:
    scales = _Scales(settings)
    halves: dict[str, dict[str, str]] = {}
    for tensor in tensors:
        found = _TENSOR.fullmatch(tensor)
        if found is None:
            raise AdapterError(f"tensor {tensor[:120]!r} is {_kind_of(tensor)}, which is not implemented")
        halves.setdefault(found[1], {})[found[2]] = tensor
    if not halves:
        raise AdapterError(f"{WEIGHTS_FILE} has no tensors")
    modules: dict[tuple[int, str], AdaptedModule] = {}
    places = _Places(config)
    for path, names in sorted(halves.items()):
        if len(names) < 2:
            raise AdapterError(f"module {path[:120]!r} has lora_{min(names)}, but not the other matrix")
        a, b = tensors[names["A"]], tensors[names["B"]]
        for entry, name in ((a, names["A"]), (b, names["B"])):
            if len(entry.shape) != 2 or not entry.is_float:
                raise AdapterError(f"{name} is {entry.dtype} {list(entry.shape)}; expected is a matrix of floats")
        if (stacked := places.find_experts(path)) is not None:
            stack = find_stack(path, a.shape, b.shape, config, settings)
            owner = path.removesuffix(".base_layer")
            scale = scales.of(f"{owner}.{stack.parameter}", stack.rank)
            _check_rank(path, stack.rank, rank_max)
            for expert in range(stack.experts):
                part = ExpertPart(expert, stack.experts, stack.is_turned)
                place = stacked, config.architecture.names.expert.format(expert) + stack.module
                _add(modules, place, AdaptedModule(names["A"], names["B"], stack.rank, scale, part), path)
            continue
        place, shape = places.find(path)
        rank = a.shape[0]
        if (b.shape[0], a.shape[1]) != shape or b.shape[1] != rank or not rank:
            raise AdapterError(
                f"module {path!r}: A is {list(a.shape)} and B {list(b.shape)}; this model's layer has {shape[1]} "
                f"inputs and {shape[0]} outputs, so the adapter is of another base model"
            )
        _check_rank(path, rank, rank_max)
        _add(modules, place, AdaptedModule(names["A"], names["B"], rank, scales.of(path, rank)), path)
    return modules


def _check_rank(path: str, rank: int, rank_max: int) -> None:
    if rank > rank_max:
        raise AdapterError(f"module {path!r} has rank {rank}; --max-lora-rank allows {rank_max}")


def _add(
    modules: dict[tuple[int, str], AdaptedModule], place: tuple[int, str], module: AdaptedModule, path: str
) -> None:
    if place in modules:
        raise AdapterError(f"module {path!r} is there twice")
    modules[place] = module


def _kind_of(tensor: str) -> str:
    if "lora_magnitude_vector" in tensor:
        return "of DoRA"
    if "lora_embedding" in tensor:
        return "of an embedding"
    return "no matrix of LoRA (lora_A, lora_B), as of modules_to_save"


class _Scales:
    """The factor of each module's matrices, as PEFT finds it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._rank = _number(settings.get("r", 8), "r")
        self._alpha = _number(settings.get("lora_alpha", 8), "lora_alpha")
        self._by_root = settings.get("use_rslora") is True
        self._patterns = {name: self._pattern(settings, name) for name in ("rank_pattern", "alpha_pattern")}

    @staticmethod
    def _pattern(settings: dict[str, Any], name: str) -> dict[str, float]:
        given = settings.get(name) or {}
        if not isinstance(given, dict):
            raise AdapterError(f"{name} is {str(given)[:80]!r}; expected is an object")
        return {pattern: _number(value, f"{name}[{pattern[:80]!r}]") for pattern, value in given.items()}

    def of(self, path: str, rank: int) -> float:
        expected, alpha = self._rank, self._alpha
        expected = self._matched("rank_pattern", path, expected)
        alpha = self._matched("alpha_pattern", path, alpha)
        if rank != expected:
            raise AdapterError(f"module {path!r} has rank {rank}; {CONFIG_FILE} says {expected:g}")
        return alpha / (math.sqrt(rank) if self._by_root else rank)

    def _matched(self, name: str, path: str, otherwise: float) -> float:
        for pattern, value in self._patterns[name].items():
            try:
                if re.fullmatch(rf"(.*\.)?({pattern})", path):
                    return value
            except re.error as error:
                raise AdapterError(f"{name}: {pattern[:80]!r} is no pattern ({error})") from error
        return otherwise


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise AdapterError(f"{name} is {str(value)[:80]!r}; expected is a number above 0")
    return float(value)


class _Places:
    """Finds the layer that a module's path is about."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        names = config.architecture.names
        start, end = (re.escape(part) for part in names.layer.split("{}"))
        prefixes = "|".join(map(re.escape, sorted(config.architecture.prefixes, key=len, reverse=True)))
        self._path = re.compile(rf"(?:{prefixes}){start}(\d{{1,6}}){end}(.+)")
        self._shapes: dict[int, dict[str, tuple[int, int]]] = {}
        self._experts = {f"{owner}{end}" for owner in owners(names) for end in ("", ".base_layer")}

    def find_experts(self, path: str) -> int | None:
        """Return the layer of a module that holds all experts of the layer; None: it is no such module."""
        found = self._path.fullmatch(path)
        if found is None or found[2] not in self._experts or int(found[1]) >= self._config.layers:
            return None
        return int(found[1]) if self._config.mixture_of(int(found[1])) is not None else None

    def find(self, path: str) -> tuple[tuple[int, str], tuple[int, int]]:
        """Return the place of a module, and its outputs and inputs.

        Raises:
            AdapterError: The model has no such layer, or one that adapters cannot change here.
        """
        found = self._path.fullmatch(path)
        layer, module = (int(found[1]), found[2]) if found else (-1, path)
        if found is None or layer >= self._config.layers:
            raise AdapterError(
                f"module {path[:120]!r} is none of this model's {self._config.layers} layers; adapters change the "
                "linear layers of attention and MLP, not embeddings or the head"
            )
        if layer not in self._shapes:
            self._shapes[layer] = adaptable(self._config, layer)
        shapes = self._shapes[layer]
        # Since transformers 5 some modules of mixtures are called otherwise than in checkpoints.
        block = module.replace("mlp.", "block_sparse_moe.", 1)
        for name in (module, block, f"{block}.layer"):
            if name in shapes:
                return (layer, name), shapes[name]
        names, kind = self._config.architecture.names, ""
        if module == names.expand:
            kind = " (each head's part of it is inside two products with latents)"
        shown = dict.fromkeys(re.sub(r"(?<=experts\.)\d+", "N", name) for name in shapes)
        raise AdapterError(
            f"module {path[:120]!r} is none that adapters can change in this model{kind}; those are "
            f"{', '.join(shown)}"
        )


def adaptable(config: ModelConfig, layer: int) -> dict[str, tuple[int, int]]:
    """Return the modules of a layer that adapters can change, with their numbers of outputs and inputs."""
    names = config.architecture.names
    found: dict[str, tuple[int, int]] = {}
    for tensor, shape in layer_shapes(config, layer):
        module = tensor.removesuffix(".weight")
        if module == tensor or len(shape) != 2 or module in (names.shared_gate, names.expand):
            continue
        rows, columns = shape
        found[module] = (columns, rows) if config.architecture.transposed else (rows, columns)
    return found
