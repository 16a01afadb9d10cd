"""Correctness on the GPU: mixtures of experts and layers over fp8 weights, against float64, also as graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from gpu_device import Gpu
from gpu_errors import relative_error
from torch import Tensor

from trunkline.kernels.cuda import CudaKernels
from trunkline.kernels.experts import Experts, has_own_products, route, run_experts
from trunkline.kernels.float8 import float8
from trunkline.kernels.grouped import GroupedWeight
from trunkline.kernels.ops import PackedLinear, Quantisation
from trunkline.kernels.program import Buffer, Rows
from trunkline.kernels.quantisation import QuantisedWeight
from trunkline.kernels.routing import Routing
from trunkline.kernels.scaled_products import capability_of, float8_rows, why_not, widened

FORMS = ("", "int8", "fp8", "fp8 in groups")
"""Forms of experts' weights: numbers of the model's type, or codes with a scale for each output or 16 inputs."""


def in_form(weight: Tensor, form: str) -> Tensor | GroupedWeight:
    """A matrix as layers are given it."""
    if not form.startswith("fp8"):
        return weight
    groups = weight.float().view(len(weight), -1, 16 if form == "fp8 in groups" else weight.shape[1])
    scale = groups.abs().amax(dim=-1) / 400
    codes = (groups / scale[..., None]).to(torch.float8_e4m3fn).view(weight.shape)
    return float8(codes, scale, weight.dtype)


def numbers_of(layer: PackedLinear) -> Tensor:
    """The numbers of a layer's matrix, float64."""
    weight = layer.data[0]
    if isinstance(weight, QuantisedWeight):
        return weight.values.double() * weight.scale.double()[:, None]
    return weight.dequantise(torch.float64) if isinstance(weight, GroupedWeight) else weight.double()


class Mixture(NamedTuple):
    """A random mixture of experts, or a rank's part of one."""

    kernels: CudaKernels
    op: Experts
    weights: tuple[Tensor, Tensor]
    """float64 `[experts here, 2 * width, hidden]` and `[experts here, hidden, width]`."""

    @classmethod
    def random(
        cls,
        gpu: Gpu,
        seed: int,
        dtype: torch.dtype,
        routing: Routing = Routing(3),  # noqa: B008 (frozen)
        here: range = range(9),
        bias: Tensor | None = None,
        form: str = "",
    ) -> Mixture:
        """
        Args:
            here: those of nine experts that the rank has.
            bias: of the router, float32 `[9]`.
            form: of the experts' weights; one of `FORMS`.
        """
        count, hidden, width = 9, 64, 48
        generator = torch.Generator().manual_seed(seed)
        shapes = ((count, hidden), (count, 2 * width, hidden), (count, hidden, width))
        router, up, down = (
            (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(gpu.device, dtype) for shape in shapes
        )
        up, down = up[here.start : here.stop], down[here.start : here.stop]
        kernels = gpu.kernels()
        quantisation: Quantisation = "int8" if form == "int8" else ""
        experts = [
            (
                kernels.pack_gated_linear(in_form(one, form), None, "silu", quantisation),
                kernels.pack_linear(in_form(other, form), None, quantisation),
            )
            for one, other in zip(up, down, strict=True)
        ]
        up, down = (torch.stack([numbers_of(layer) for layer in side]) for side in zip(*experts, strict=True))
        own_bias = None if bias is None else bias.to(gpu.device, dtype)
        op = Experts(
            x=Buffer("x", Rows.TOKENS, hidden, dtype),
            router=kernels.pack_linear(router, own_bias),
            first=here.start,
            experts=tuple(experts),
            routing=routing,
            choice_bias=None,
            out=Buffer("out", Rows.TOKENS, hidden, dtype),
            stack=kernels.stack_experts(experts, dtype),
        )
        return cls(kernels, op, (up, down))

    def tokens(self, count: int, seed: int = 0) -> Tensor:
        """`[count, hidden]`."""
        x = torch.randn(count, self.op.x.width, generator=torch.Generator().manual_seed(seed))
        return x.to(self.weights[0].device, self.op.x.dtype)

    def exact(self, x: Tensor) -> Tensor:
        """The sum in float64, every token through every expert, with the shares that the op computes."""
        op, here = self.op, slice(self.op.first, self.op.first + len(self.weights[0]))
        shares, chosen = route(self.kernels.linear(x, op.router, torch.float32), op.routing, op.choice_bias)
        share = torch.zeros(len(x), op.router.out_features, dtype=torch.float64, device=x.device)
        share = share.scatter_(1, chosen, shares.double()).T[here, :, None]
        within, behind = (share, (share != 0).double()) if op.routing.scales_inputs else (1.0, share)
        up, down = (weight.double().mT for weight in self.weights)
        gate, up = ((x.double() * within) @ up).chunk(2, dim=-1)
        return ((F.silu(gate) * up @ down) * behind).sum(dim=0)


def check_experts(gpu: Gpu, seed: int, dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    """Mixtures of experts by grouped products, where the device has them for this type: as they are, and as a
    graph that gets other tokens."""
    for form in FORMS:
        mixture = Mixture.random(gpu, seed, dtype, form=form)
        stack = mixture.op.stack
        if stack is None:
            continue
        name = f"experts_{form.replace(' ', '_')}" if form else "experts"
        yield from check_mixture(gpu, mixture, seed, name)
        if not form and has_own_products(dtype, (64, 48)):
            own = replace(stack, multiply=mixture.kernels.multiply_grouped)
            own_mixture = mixture._replace(op=replace(mixture.op, stack=own))
            yield from check_mixture(gpu, own_mixture, seed, "experts_by_own_products")


def check_mixture(gpu: Gpu, mixture: Mixture, seed: int, name: str) -> Iterator[tuple[str, float]]:
    kernels, op, x = mixture.kernels, mixture.op, mixture.tokens(1 + seed % 40)
    yield name, relative_error(run_experts(kernels, op, x), mixture.exact(x))
    out = torch.empty_like(x)
    graph = gpu.graph_or_call(lambda: out.copy_(run_experts(kernels, op, x)), kernels)
    for other in (1, 2):
        x.copy_(mixture.tokens(len(x), other))
        graph.replay()
        gpu.synchronize()
        yield f"{name}_as_a_graph", relative_error(out, mixture.exact(x))


def _into(kernels: CudaKernels, layer: PackedLinear, x: Tensor, out: Tensor) -> None:
    out.copy_(kernels.linear(x, layer))


def check_float8_rounding(gpu: Gpu, seed: int, dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    """Inputs are rounded to fp8 to the bit, with a factor a row or 128 numbers; infinite if any differs."""
    if dtype == torch.float32:
        return
    generator = torch.Generator().manual_seed(seed)
    for name, group in (("row", 256), ("group", 128)):
        x = torch.randn(1 + seed % 40, 256, generator=generator).mul_(3).to(gpu.device, dtype)
        rounded, expected = gpu.kernels().round_rows(x, group, len(x)), float8_rows(x.cpu(), group)
        same = torch.equal(widened(rounded).cpu(), widened(expected))
        yield f"round_float8_by_{name}", 0.0 if same else float("inf")


def check_float8(gpu: Gpu, seed: int, dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    """fp8 weights that the device multiplies as they are, as a graph that gets other rows; infinite if the trial
    refuses what the device should have."""
    generator, kernels = torch.Generator().manual_seed(seed), gpu.kernels()
    for name, group in (("float8_by_row", 256), ("float8_by_group", 128)):
        codes = (torch.randn(144, 256, generator=generator) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        scale = (0.5 + torch.rand(144, 256 // group, generator=generator)) / 1600
        weight = float8(codes.to(gpu.device), scale.to(gpu.device), dtype)
        if why_not(weight, capability_of(gpu.device)):
            continue
        layer = kernels.pack_linear(replace(weight, float8_inputs=True), None)
        x = torch.randn(1 + seed % 40, 256, generator=generator).to(gpu.device, dtype)
        out = torch.empty(len(x), 144, dtype=dtype, device=gpu.device)
        graph = gpu.graph_or_call(partial(_into, kernels, layer, x, out), kernels)
        x.mul_(3)
        graph.replay()
        gpu.synchronize()
        exact = widened(float8_rows(x.cpu(), group)).to(gpu.device) @ weight.dequantise(torch.float64).T
        yield name, relative_error(out, exact) if layer.data[0].float8_inputs else float("inf")
