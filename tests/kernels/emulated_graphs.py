"""Graphs of the emulated GPU: what a step launches, recorded with the addresses that it had, and launched again.

What CUDA does to a captured step is done here to tensors in main memory:

- While a graph is captured nothing is executed: launches of our library are noted, and torch's operations run only
  as far as they make new tensors. What lay in memory before stays as it is.
- A replay launches the same operations on the same memory, whatever has come to lie there, with the numbers that
  were read on the host while it was captured.
- Reading a tensor on the host, or bringing one from there, is refused during a capture.
- Memory that was allocated during a capture belongs to all graphs of a pool. Before each replay it is filled
  with ones: NaN in floating point, -1 in integers. So nothing may be left there for another step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final
from unittest.mock import patch

import torch
from kernels.cuda_emulated import emulated_library
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from trunkline.kernels.cuda import CudaKernels
from trunkline.worker.step_graphs import Replay

Launch = Callable[[], None]

_ON_THE_HOST: Final = (
    "numpy",
    "item",
    "tolist",
    "cpu",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__array__",
)
_FROM_THE_HOST: Final = ("tensor", "as_tensor", "from_numpy", "frombuffer")


class CaptureError(Exception):
    """What a CUDA graph cannot hold."""


class _NoHost(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _ON_THE_HOST + _FROM_THE_HOST:
            raise CaptureError(f"{name} during a capture: a graph cannot wait for the device, nor read the host")
        return func(*args, **(kwargs or {}))


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes torch's operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: list[Launch] = []
        self.memory: dict[int, Tensor] = {}
        """Tensors that were allocated, by their storage's address."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "local_scalar" in func.name() or "lift_fresh" in func.name():
            raise CaptureError(f"{func.name()} during a capture")
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        changed = [
            args[index]
            for index, argument in enumerate(func._schema.arguments[: len(args)])
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        # What was there before is not changed by a capture.
        is_executed = all(_address(x) in self.memory for x in changed)
        result = func(*args, **kwargs) if is_executed else changed[0]
        before = {_address(x) for x in inputs}
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        made = [x for x in outputs if _address(x) not in before]
        self.memory |= {_address(x): x for x in made}
        if func.name().startswith(("aten::empty", "aten::new_empty")):
            return result
        if changed:
            self.launches.append(lambda: func(*args, **kwargs))
        elif made:
            self.launches.append(lambda: _again(func, args, kwargs, outputs))
        return result


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _again(func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> None:
    results = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
    for target, result in zip(outputs, results, strict=True):
        target.copy_(result)


class EmulatedReplay:
    """A captured graph."""

    def __init__(self, launches: list[Launch], pool: list[Tensor]) -> None:
        self.launches = launches
        self._pool = pool
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        with _disable_current_modes(), torch.inference_mode():
            for memory in self._pool:
                storage = memory.untyped_storage()
                torch.empty(0, dtype=torch.uint8).set_(storage).fill_(255)
            for launch in self.launches:
                launch()


class EmulatedGraphs:
    """Implements `trunkline.worker.step_graphs.GraphMaker`."""

    def __init__(self, kernels: CudaKernels) -> None:
        self._kernels = kernels
        self._pool: list[Tensor] = []
        self.captured: list[EmulatedReplay] = []

    def capture(self, run: Callable[[], None]) -> Replay:
        library, recording = emulated_library(), _Recording()
        launch: Callable[..., None] = library.call

        def record(name: str, *arguments: Any) -> None:
            if name == "attention_shape":
                raise CaptureError("a kernel is loaded during a capture")
            recording.launches.append(lambda: launch(name, *arguments))

        with (
            patch.object(self._kernels, "_is_capturing", lambda: True),
            patch.object(library, "call", record),
            _NoHost(),
            recording,
        ):
            run()
        self._pool += recording.memory.values()
        made = EmulatedReplay(recording.launches, self._pool)
        self.captured.append(made)
        return made

    def forget(self) -> None:
        self._pool = []
