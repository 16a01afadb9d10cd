"""Prefill attention on the GPU beside others' kernels (part `prefill`): new tokens after a context, causal."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from gpu_baselines import FOREIGN_ERRORS, has_flashinfer
from gpu_cases import CHUNK
from gpu_compiled import has_kernel
from gpu_device import Call, Gpu, Output, Visit
from gpu_errors import LIMITS, relative_error
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from trunkline.kernels.library_attention import AttentionLibrary, LibraryPrefill
from trunkline.kernels.ops import AttentionSpec, KvPool
from trunkline.kernels.plan import PrefillPlan

Makers = dict[str, Callable[["Prompt", Tensor, Tensor, Tensor], Callable[[], Tensor]]]
"""Of a call for a prompt, its queries `[tokens, heads, d]`, keys and values `[kv_heads, tokens, d]`."""

FLASHINFER_KERNEL: Final = "single_prefill"
"""How the names of its kernels for one prompt begin."""
BACKENDS: Final = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FA2 (torch)": SDPBackend.FLASH_ATTENTION}


@dataclass(frozen=True)
class Prompt:
    """A sequence's new tokens after those that are cached."""

    new: int
    context: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    @property
    def total(self) -> int:
        return self.context + self.new

    @property
    def operations(self) -> float:
        """Of both products, masked pairs left out."""
        pairs = self.new * self.context + self.new * (self.new + 1) / 2
        return 4.0 * self.heads * self.head_dim * pairs

    def plan(self) -> PrefillPlan:
        blocks = -(-self.total // CHUNK)
        count = np.full(blocks, CHUNK, dtype=np.int32)
        count[-1] = self.total - (blocks - 1) * CHUNK
        index, zero = np.arange(blocks, dtype=np.int32), np.zeros(blocks, dtype=np.int32)
        return PrefillPlan(
            CHUNK,
            query_indptr=np.array([0, self.new], dtype=np.int32),
            query_position=np.arange(self.context, self.total, dtype=np.int32),
            item_indptr=np.array([0, blocks], dtype=np.int32),
            block=index,
            first=zero,
            count=count,
            base=index * np.int32(CHUNK),
            shift=zero,
        )


PROMPTS: Final = (Prompt(2048, 0), Prompt(8192, 0), Prompt(512, 32768), Prompt(512, 512), Prompt(1024, 0))
"""The last ones show from which size on a library is better (`library_attention.OPERATIONS_MIN`)."""


def measure_prefill(gpu: Gpu, out: Output, visit: Visit, prompts: Sequence[Prompt] = PROMPTS) -> None:
    """FlashInfer after all others, and only if its kernel is there: compiling it takes more than this part has."""
    rounds: list[Makers] = [{name: partial(_sdpa, backend) for name, backend in BACKENDS.items()}]
    if has_flashinfer() and not has_kernel(FLASHINFER_KERNEL):
        out.note("FlashInfer was left out: its kernel for prefill is not compiled; part `compile` does that")
    else:
        rounds.append({"FlashInfer": flashinfer_prefill})
    for others in rounds:
        for prompt in prompts:
            if visit.has_used(0.9):
                out.note(f"no time was left for {prompt} beside {', '.join(others)}")
                break
            measure_prompt(gpu, out, prompt, others)
            gpu.empty_cache()


def measure_prompt(gpu: Gpu, out: Output, prompt: Prompt, others: Makers) -> None:
    """All on the same keys and values, in turn. Each result must be like that of our kernel."""
    beside = ", ".join(others)
    generator = torch.Generator(device=gpu.device).manual_seed(0)
    blocks = -(-prompt.total // CHUNK)
    data = torch.empty(
        blocks, 1, 2, prompt.kv_heads, CHUNK, prompt.head_dim, dtype=torch.bfloat16, device=gpu.device
    )
    data.normal_(generator=generator)
    q = torch.empty(prompt.new, prompt.heads, prompt.head_dim, dtype=torch.bfloat16, device=gpu.device)
    q.normal_(generator=generator)
    ours = torch.full_like(q, float("nan"))
    kernels, plan, pool = gpu.kernels(), prompt.plan(), KvPool.wrap(data)
    spec = AttentionSpec(prompt.heads, prompt.kv_heads, prompt.head_dim, prompt.head_dim**-0.5)
    calls: dict[str, Call] = {"ours": partial(kernels.prefill_attention, plan, q, pool, 0, spec, ours)}
    calls["ours"]()
    # [kv_heads, tokens, head_dim]: dense, as others want it.
    for library in gpu.libraries:
        others = {f"{library.name}, gathered and joined": partial(_given, gpu, library, pool, spec), **others}
    k, v = data[:, 0].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : prompt.total].contiguous()
    for name, make in others.items():
        try:
            call = make(prompt, q, k, v)
            error = relative_error(call(), ours.double())
        except FOREIGN_ERRORS as failure:
            out.note(f"prefill with {name} at {prompt}: {type(failure).__name__}: {str(failure)[:300]}")
            continue
        if error > 2 * LIMITS[torch.bfloat16]:
            out.problem(f"prefill at {prompt}: ours and {name} differ by {error:.2e}")
        calls[name] = call
    case = {"new": prompt.new, "context": prompt.context, "beside": beside}
    for name, spent in gpu.interleaved_us(calls, runs=9).items():
        out.add(case, name, spent, "us", 9)
        out.add(case, f"{name}, rate", prompt.operations / spent / 1e6, "TFLOP/s", 9)


def _given(
    gpu: Gpu, library: AttentionLibrary, pool: KvPool, spec: AttentionSpec, prompt: Prompt, q: Tensor, *_: Tensor
) -> Callable[[], Tensor]:
    """Our op where the prompt is given to a library: KV is gathered from the pool, and a context joined to it."""
    kernels, plan, out = (
        gpu.kernels(prefill=LibraryPrefill(library, 0)),
        prompt.plan(),
        torch.full_like(q, float("nan")),
    )

    def call() -> Tensor:
        kernels.prefill_attention(plan, q, pool, 0, spec, out)
        return out

    return call


def _sdpa(backend: SDPBackend, prompt: Prompt, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """torch's attention by one backend."""
    query = q.transpose(0, 1)[None]
    mask: Any = causal_lower_right(prompt.new, prompt.total) if prompt.context else None

    def call() -> Tensor:
        with sdpa_kernel(backend):
            out: Tensor = F.scaled_dot_product_attention(
                query, k[None], v[None], attn_mask=mask, is_causal=mask is None, enable_gqa=True
            )
        return out[0].transpose(0, 1)

    return call


def flashinfer_prefill(prompt: Prompt, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    if not has_flashinfer():
        raise ImportError("flashinfer is not installed")
    library: Any = importlib.import_module("flashinfer")
    return lambda: library.single_prefill_with_kv_cache(q, k, v, causal=True, kv_layout="HND")
