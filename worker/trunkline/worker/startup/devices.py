"""The device and the kernels that a rank's configuration names, or an error that says why they cannot be used."""

from __future__ import annotations

from typing import Final

import torch

from trunkline.kernels.load import KernelsUnavailableError, load_kernels
from trunkline.kernels.ops import Kernels
from trunkline.worker.config import WorkerConfig
from trunkline.worker.errors import WorkerConfigError

TORCH_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(config: WorkerConfig) -> torch.device:
    """Return the compute device that the configuration gives this rank.

    Raises:
        WorkerConfigError: There is no such GPU.
    """
    if config.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise WorkerConfigError("device is 'cuda', but torch finds no CUDA device")
    count = torch.cuda.device_count()
    if config.gpu is None or config.gpu >= count:
        raise WorkerConfigError(f"gpu is {config.gpu}, but torch sees {count}; allowed: 0 to {count - 1}")
    device = torch.device("cuda", config.gpu)
    torch.cuda.set_device(device)
    return device


def choose_kernels(config: WorkerConfig, threads: int) -> Kernels:
    """Return a new instance of the kernels that the configuration names.

    Raises:
        WorkerConfigError: They are not installed, or do not run on this machine.
    """
    try:
        return load_kernels(config.kernels, config.device, threads)
    except KernelsUnavailableError as error:
        raise WorkerConfigError(str(error)) from error
