"""How far results on a GPU may be from those in float64."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

LIMITS = {torch.float32: 2e-5, torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}
"""Relative error, as norms: a few roundings of the type (queries, weights and results are rounded to it)."""


def relative_error(out: Tensor, exact: Tensor) -> float:
    """Infinite if anything is NaN."""
    error = float((out.double() - exact).norm() / exact.norm().clamp_min(1e-30))
    return error if np.isfinite(error) else float("inf")
