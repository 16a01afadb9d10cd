"""The op of a step's program that is a mixture of experts, and the two ways in which it is run op by op.

one at a time   each expert's tokens through its two layers, in any form of weights; the host must know how
                many tokens each expert has, so it waits for the device once per layer
grouped         one product over all experts for each of the two layers (`ExpertStack`): tokens are sorted by
                expert on the device, which alone knows where each expert's begin; every shape follows from
                the number of tokens, so a graph can hold it. Torch has such products for some types and
                devices; for others, and for codes of 8 bits, kernels may have their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from trunkline.kernels.adapters import AdapterGroups
from trunkline.kernels.grouped import GroupedWeight
from trunkline.kernels.ops import Activation, ExpertMatrices, ExpertStack, Kernels, PackedLinear, RowAddend
from trunkline.kernels.program import Buffer, Facts, Op
from trunkline.kernels.quantisation import QuantisedWeight
from trunkline.kernels.routing import Routing

GroupedProduct = Callable[[Tensor, ExpertMatrices, Tensor], Tensor]
"""A function as `ExpertStack.multiply`."""

_SUMMED_TOKENS: Final = 1024
"""Number of tokens whose results are in float32 at a time."""
_OWN_INPUTS: Final = 16
"""The CUDA kernels' own grouped product needs a multiple of so many inputs."""
_ALIGNED_BYTES: Final = 16
"""Torch's grouped product needs rows of a multiple of so many bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts(Op):
    """A mixture of experts: this rank's part of the sum. Every rank computes the same routing."""

    kind = "experts"
    reads = ("x", "router_x")
    writes = ("out",)
    x: Buffer
    router: PackedLinear
    """A row for each expert of the layer."""
    first: int
    """Index, among the layer's experts, of the first one here."""
    experts: tuple[tuple[PackedLinear, PackedLinear], ...]
    """Gated matrix and second matrix of each expert here."""
    routing: Routing
    choice_bias: Tensor | None
    """float32 `[experts of the layer]`, added to scores for the choice alone."""
    out: Buffer
    stack: ExpertStack | None = None
    """The same experts for grouped products; None: they are computed one at a time."""
    router_x: Buffer | None = None
    """What the router reads; None: `x`."""
    scale: Tensor | None = None
    """float32 `[experts of the layer]`, factor of each expert's share."""
    place: str = ""
    """What the names of its sites begin with; "": adapters change none of its layers."""

    def sites(self) -> list[str]:
        """Return the names of its sites: the router, then both layers of each expert on this rank."""
        if not self.place:
            return [""] * (1 + 2 * len(self.experts))
        here = range(self.first, self.first + len(self.experts))
        layers = (f"{self.place}.{expert}.{side}" for expert in here for side in ("up", "down"))
        return [f"{self.place}.router", *layers]

    def facts(self) -> Facts:
        x, count, routing = self.x, self.router.out_features, self.routing
        facts: Facts = [
            ("the width of 'out'", x.width, self.out.width),
            ("the type of 'out'", x.dtype, self.out.dtype),
            ("the rows of 'out'", x.rows, self.out.rows),
        ]
        for up, down in self.experts:
            facts += [
                ("the inputs of an expert", x.width, up.in_features),
                ("the width within an expert", up.out_features, down.in_features),
                ("the outputs of an expert", x.width, down.out_features),
            ]
        if self.choice_bias is not None:
            facts.append(("the shape of the choice's bias", [count], list(self.choice_bias.shape)))
        if self.scale is not None:
            facts.append(("the shape of the shares' factors", [count], list(self.scale.shape)))
        if (own := self.router_x) is not None:
            found = (own.width, own.dtype, own.rows)
            facts.append(("the shape of what the router reads", (x.width, x.dtype, x.rows), found))
        if self.stack is not None:
            facts.append(("the experts in the stack", len(self.experts), len(self.stack.layers)))
        return [
            *facts,
            ("the inputs of the router", x.width, self.router.in_features),
            ("the experts without a group", 0, count % routing.groups),
            ("whether there are as many experts", True, routing.per_token <= count),
        ]


def run_experts(
    kernels: Kernels,
    op: Experts,
    x: Tensor,
    router_x: Tensor | None = None,
    adapted: AdapterGroups | None = None,
) -> Tensor:
    """Return this rank's part of the experts' sum for tokens `[tokens, width]`, in their type.

    Args:
        router_x: what the router reads, of the same shape and type; None: `x`.
        adapted: the tokens by adapter; None: no token has one. Where an adapter changes an expert, the experts are
            computed one at a time.
    """
    router_x = x if router_x is None else router_x
    addend = _addend(kernels, adapted, f"{op.place}.router", router_x)
    scores = kernels.linear(router_x, op.router, torch.float32, addend)
    shares, chosen = route(scores, op.routing, op.choice_bias)
    if op.scale is not None:
        shares = shares * op.scale[chosen]
    if adapted is not None and not adapted.has(op.sites()[1:]):
        adapted = None
    if op.stack is None or adapted is not None:
        return _one_at_a_time(kernels, op, x, shares, chosen, adapted)
    return _grouped(op, op.stack, x, shares, chosen)


def route(outputs: Tensor, routing: Routing, choice_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the shares and the indices of each token's experts, `[tokens, per_token]`.

    Args:
        outputs: the router's, float32 `[tokens, experts]`.
        choice_bias: float32 `[experts]`, added to the scores for the choice alone.
    """
    scores = outputs.sigmoid() if routing.scores == "sigmoid" else outputs.softmax(dim=-1)
    choice = scores if choice_bias is None else scores + choice_bias
    if routing.groups_per_token < routing.groups:
        grouped = choice.view(len(choice), routing.groups, choice.shape[-1] // routing.groups)
        best = min(routing.group_best, grouped.shape[-1])
        sums = grouped.topk(best, dim=-1).values.sum(dim=-1)
        kept = torch.zeros_like(sums, dtype=torch.bool)
        kept.scatter_(-1, sums.topk(routing.groups_per_token, dim=-1).indices, True)
        choice = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
    chosen = choice.topk(routing.per_token, dim=-1).indices
    shares = scores.gather(-1, chosen)
    if routing.normalised:
        shares = shares / (shares.sum(dim=-1, keepdim=True) + 1e-20)  # sigmoids may all be zero
    return shares * routing.factor, chosen


def _one_at_a_time(
    kernels: Kernels, op: Experts, x: Tensor, shares: Tensor, chosen: Tensor, adapted: AdapterGroups | None
) -> Tensor:
    order = chosen.view(-1).argsort(stable=True)
    tokens, share = order // op.routing.per_token, shares.view(-1)[order, None]
    # One transfer to the host per layer: up to where in `order` each expert's tokens reach.
    stops = chosen.view(-1).bincount(minlength=op.router.out_features).cumsum(0).tolist()
    out = torch.zeros_like(x, dtype=torch.float32)
    first = op.first
    start = stops[first - 1] if first else 0
    for index, (up, down) in enumerate(op.experts, first):
        stop = stops[index]
        if stop > start:
            own = tokens[start:stop]
            rows, weights = x[own], share[start:stop]
            if op.routing.scales_inputs:
                rows, weights = (rows.float() * weights).to(x.dtype), torch.ones_like(weights)
            own_adapted = None if adapted is None else adapted.within(own)
            inner = kernels.gated_linear(rows, up, _addend(kernels, own_adapted, f"{op.place}.{index}.up", rows))
            added = _addend(kernels, own_adapted, f"{op.place}.{index}.down", inner)
            made = kernels.linear(inner, down, None, added)
            out.index_add_(0, own, made.float().mul_(weights))
        start = stop
    return out.to(x.dtype)


def _addend(kernels: Kernels, adapted: AdapterGroups | None, place: str, x: Tensor) -> RowAddend | None:
    return None if adapted is None else adapted.addend(kernels, place, x)


def _grouped(op: Experts, stack: ExpertStack, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
    if not len(x):
        return torch.empty_like(x)
    count, (tokens, per_token) = len(stack.numbers), chosen.shape
    # Other ranks' experts come last, as a group that nothing is multiplied with.
    own = chosen.view(-1) - op.first
    own = own.masked_fill((own < 0) | (own >= count), count)
    ranked, order = own.sort(stable=True)
    stops = torch.searchsorted(ranked, stack.numbers, right=True, out_int32=True)
    rows = x[order // per_token]
    if op.routing.scales_inputs:
        rows = (rows.float() * shares.view(-1)[order, None]).to(x.dtype)
        shares = torch.ones_like(shares)
    inner = stack.activate(stack.multiply(rows, stack.up, stops))
    made = stack.multiply(inner, stack.down, stops)
    # Of each token and choice, its row in `made`. Rows of other ranks' experts were never written.
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    place, is_foreign = place.view(tokens, per_token), (own == count).view(tokens, per_token, 1)
    out = torch.empty_like(x)
    for start in range(0, tokens, _SUMMED_TOKENS):
        part = slice(start, start + _SUMMED_TOKENS)
        found = made[place[part]].float().masked_fill_(is_foreign[part], 0.0)
        out[part] = found.mul_(shares[part, :, None]).sum(dim=1)
    return out


def stacked(
    experts: Sequence[tuple[PackedLinear, PackedLinear]],
    dtype: torch.dtype,
    activate: Callable[[Activation, Tensor], Tensor],
    multiply: GroupedProduct,
) -> ExpertStack | None:
    """Bring experts without biases together (`Kernels.stack_experts`): numbers, or codes of 8 bits.

    Args:
        experts: their data are weight, bias and for the gated ones the activation.
        dtype: the type of what they are multiplied with.
        activate: computes an activation of `[rows, 2 * width]`.
        multiply: the kernels' own grouped product, for weights and devices for which torch has none.
    """
    sides = list(zip(*experts, strict=True))
    if any(layer.data[1] is not None for side in sides for layer in side):
        return None
    gated, seconds = sides
    widths = (gated[0].in_features, seconds[0].in_features)
    weights = [[layer.data[0] for layer in side] for side in sides]
    if all(isinstance(weight, Tensor) for side in weights for weight in side):
        weight = weights[0][0]
        capability = torch.cuda.get_device_capability(weight.device) if weight.is_cuda else None
        if has_grouped_products(weight.dtype, widths, capability):
            multiply = multiply_by_torch
        elif not has_own_products(dtype, widths):
            return None
    elif not all(_are_codes(side) for side in weights) or not has_own_products(dtype, widths):
        return None
    (up, ups), (down, downs) = (_together(side) for side in weights)
    layers = [
        tuple(replace(layer, data=(own, *layer.data[1:])) for layer, own in zip(side, parts, strict=True))
        for side, parts in zip(sides, (ups, downs), strict=True)
    ]
    numbers = torch.arange(len(experts), device=up.weight.device)
    pairs = tuple(zip(*layers, strict=True))
    return ExpertStack(up, down, multiply, numbers, pairs, partial(activate, gated[0].data[2]))


def _are_codes(weights: Sequence[Any]) -> bool:
    """Return whether weights are codes of 8 bits with scales for equal groups."""
    if all(isinstance(weight, QuantisedWeight) for weight in weights):
        return True
    return all(isinstance(weight, GroupedWeight) and weight.floats for weight in weights) and (
        len({weight.group for weight in weights}) == 1
    )


def _together(weights: Sequence[Any]) -> tuple[ExpertMatrices, list[Any]]:
    """Return weights of one kind in one tensor, and each weight as a view of its part."""
    first = weights[0]
    if isinstance(first, Tensor):
        whole = ExpertMatrices(torch.stack(list(weights)))
        return whole, list(whole.weight)
    if isinstance(first, QuantisedWeight):
        values, scale = (torch.stack(parts) for parts in zip(*weights, strict=True))
        return ExpertMatrices(values, scale[..., None]), list(map(QuantisedWeight, values, scale))
    codes, scale = (torch.stack([getattr(w, name) for w in weights]).contiguous() for name in ("codes", "scale"))
    # Their inputs are not rounded here, so nor are those of an expert alone.
    parts = [
        replace(weight, codes=own, scale=factors, float8_inputs=False)
        for weight, own, factors in zip(weights, codes, scale, strict=True)
    ]
    return ExpertMatrices(codes.view(torch.float8_e4m3fn), scale), parts


def multiply_by_torch(x: Tensor, matrices: ExpertMatrices, stops: Tensor) -> Tensor:
    """Multiply each row with one of several matrices by torch's grouped product; rows are sorted by matrix."""
    return F.grouped_mm(x, matrices.weight.mT, offs=stops)


def has_own_products(dtype: torch.dtype, widths: tuple[int, ...]) -> bool:
    """Return whether the CUDA kernels' own grouped product multiplies such matrices.

    Args:
        widths: numbers of a row in each of the matrices.
    """
    return dtype in (torch.float16, torch.bfloat16) and all(width % _OWN_INPUTS == 0 for width in widths)


def has_grouped_products(dtype: torch.dtype, widths: tuple[int, ...], capability: tuple[int, int] | None) -> bool:
    """Return whether `torch.nn.functional.grouped_mm` multiplies such matrices, and on a GPU without a wait.

    Args:
        widths: numbers of a row in each of the matrices.
        capability: the GPU's compute capability; None: there is no GPU.
    """
    aligned = all(width * dtype.itemsize % _ALIGNED_BYTES == 0 for width in widths)
    if capability is None:
        return aligned and dtype in (torch.float32, torch.bfloat16, torch.float16)
    # On other GPUs and for other types torch (2.13) copies the ends of the rows to the host.
    return aligned and dtype == torch.bfloat16 and capability[0] in (9, 10)
