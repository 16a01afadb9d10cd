"""The sampler for GPUs against the reference, to the bit: emulated, and on the GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels.cuda_emulated import CXX, H200, configure, emulated_library, gpu_missing, make_emulated
from kernels.sampling_cases import INFINITY, cut_at_weights, make_draws, make_edits, make_logits
from seeds import seeds
from torch import Tensor

from trunkline.kernels.cuda import CudaKernels
from trunkline.kernels.cuda_library import CudaError
from trunkline.kernels.cuda_sampling import CudaSampling
from trunkline.kernels.reference_sampling import ReferenceSampling
from trunkline.kernels.sampling import Draws, LogitEdits, Masks

pytestmark = pytest.mark.skipif(CXX is None, reason="no C++ compiler for the emulation")

SIZES = ((1, 2), (64, 4), (1000, 6), (4097, 4), (32_003, 1), (256_000, 1))
"""Vocabularies, and rows to draw from each; of an odd size rows begin at odd addresses."""
LONG_SIZES = ((1000, 60), (2048, 30), (4097, 30), (32_000, 8), (128_256, 4), (256_000, 4))


def emulated(seed: int = 0) -> CudaSampling:
    configure(H200, seed)
    return make_emulated().sampling()


def on_gpu() -> CudaSampling:
    return CudaKernels().sampling()


def check_draws(ops: CudaSampling, device: str, vocab_size: int, rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits, draws = make_logits(rows, vocab_size, generator), make_draws(rows, vocab_size, generator)
    edits = make_edits(rows, vocab_size, generator)
    expected = ReferenceSampling().draw(logits, draws)
    moved = logits.to(device)
    assert torch.equal(ops.draw(moved, draws).cpu(), expected), vocab_size
    free = draws._replace(
        top_k=torch.zeros_like(draws.top_k),
        factors=torch.stack((draws.factors[0], torch.ones(rows), torch.full((rows,), -INFINITY))),
        limited=False,
    )
    assert torch.equal(ops.draw(moved, free).cpu(), ReferenceSampling().draw(logits, free)), vocab_size
    ReferenceSampling().edit_logits(logits, edits)
    ops.edit_logits(moved, edits)
    assert torch.equal(moved.cpu().nan_to_num(nan=7.0), logits.nan_to_num(nan=7.0)), vocab_size
    assert torch.equal(ops.draw(moved, draws).cpu(), ReferenceSampling().draw(logits, draws)), vocab_size


@pytest.mark.parametrize("seed", seeds(1))
def test_draws_and_edits_are_those_of_the_reference(seed: int) -> None:
    """Greedy and seeded rows, all limits, biases, masks, penalties; warps in another order each time."""
    ops = emulated(seed)
    for vocab_size, rows in SIZES:
        check_draws(ops, "cpu", vocab_size, rows, seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", seeds(4))
def test_draws_and_edits_of_large_batches(seed: int) -> None:
    ops = emulated(seed)
    for vocab_size, rows in LONG_SIZES:
        check_draws(ops, "cpu", vocab_size, rows, seed)


@pytest.mark.skipif(bool(gpu_missing()), reason=gpu_missing())
@pytest.mark.parametrize("seed", seeds(4))
def test_draws_and_edits_on_a_gpu(seed: int) -> None:
    ops = on_gpu()
    for vocab_size, rows in LONG_SIZES:
        check_draws(ops, "cuda", vocab_size, rows, seed)


def test_noise_alone_decides_among_equal_logits() -> None:
    """With each limit alone: only ids tell tokens apart, so that every block of 64 matters, and searches for the
    winner are long."""
    rows, vocab_size, ops = 4, 3000, emulated()
    generator = torch.Generator().manual_seed(1)
    logits = torch.zeros(rows, vocab_size)
    plain = make_draws(rows, vocab_size, generator)
    for k, p, m in ((7, 1.0, 0.0), (0, 0.01, 0.0), (0, 1.0, 0.5), (80, 0.125, 0.1), (2999, 1.0, 0.0)):
        factors = torch.tensor([1.0, p, m])[:, None].expand(3, rows).contiguous()
        factors[2].log_()
        draws = plain._replace(top_k=torch.full((rows,), k, dtype=torch.int32), factors=factors)
        assert torch.equal(ops.draw(logits, draws), ReferenceSampling().draw(logits, draws))


def test_a_limit_at_the_very_weight_of_a_token_cuts_alike() -> None:
    """top-p is the share, rounded, of the tokens before one of them: the last bit of a weight decides."""
    logits, draws = cut_at_weights(30, 10)
    assert torch.equal(emulated().draw(logits, draws), ReferenceSampling().draw(logits, draws))


class Launches:
    """The launches of a call, made again with the addresses that they had: what a captured graph does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> None:
        library, self._made = emulated_library(), list[tuple[str, tuple[Any, ...]]]()
        launch = library.call

        def record(name: str, *arguments: Any) -> None:
            if name != "draw_scratch_bytes":
                self._made.append((name, arguments))
            launch(name, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(library, "call", record)
            call()

    def replay(self) -> None:
        for name, arguments in self._made:
            emulated_library().call(name, *arguments)


def test_a_captured_draw_reads_what_its_tensors_hold_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other logits, seeds, indices and limits of as many rows, at the same addresses."""
    rows, vocab_size = 5, 2500
    configure(H200, 0)
    library = emulated_library()
    capturing = False
    ops = CudaSampling(library, lambda: 0, lambda: capturing)
    generator = torch.Generator().manual_seed(0)
    logits, draws = torch.zeros(rows, vocab_size), make_draws(rows, vocab_size, generator)
    out = torch.empty(rows, dtype=torch.int64)
    capturing = True
    with pytest.raises(CudaError, match="the memory of the sampler has to grow"):
        ops.draw_to(logits, draws, out)
    capturing = False
    ops.draw_to(logits, draws, out)
    generation = ops.graph_generation
    capturing = True
    captured = Launches(monkeypatch, lambda: ops.draw_to(logits, draws, out))
    for _ in range(3):
        logits.copy_(make_logits(rows, vocab_size, generator))
        for at, new in zip(draws[:4], make_draws(rows, vocab_size, generator)[:4], strict=True):
            at.copy_(new)
        out.fill_(-1)
        captured.replay()
        assert torch.equal(out, ReferenceSampling().draw(logits, draws))
    assert ops.graph_generation == generation
    padded = torch.zeros(rows + 1, dtype=torch.int64)[1:]
    capturing = True
    with pytest.raises(CudaError, match="arguments are not on the device"):
        ops.draw_to(logits, draws._replace(factors=draws.factors.t().contiguous().t()), padded)


def test_what_lies_outside_is_refused_or_left_out() -> None:
    ops, logits = emulated(), torch.zeros(2, 40)
    draws = make_draws(2, 40, torch.Generator().manual_seed(0))
    for changed, sentence in (
        (draws._replace(seeds=torch.zeros(1, dtype=torch.int64)), "seeds must be"),
        (draws._replace(top_k=torch.zeros(2, dtype=torch.int64)), "top_k must be"),
        (draws._replace(factors=torch.zeros(3, 1)), "factors must be"),
    ):
        with pytest.raises(ValueError, match=sentence):
            ops.draw(logits, changed)
    with pytest.raises(ValueError, match="float32 matrix"):
        ops.draw(logits.double(), draws)
    row = torch.tensor([1], dtype=torch.int32)
    with pytest.raises(ValueError, match="words for 40 tokens"):
        ops.edit_logits(logits, LogitEdits(masks=Masks(row, torch.zeros(1, 1, dtype=torch.int32))))
    edits = make_edits(2, 40, torch.Generator().manual_seed(0))
    assert edits.biases is not None
    outside: Tensor = torch.tensor([40, -1, 3], dtype=torch.int32)[: len(edits.biases.tokens)]
    rows = torch.tensor([0, 1, 0], dtype=torch.int32)[: len(outside)]
    ops.edit_logits(logits, LogitEdits(biases=edits.biases._replace(rows=rows, tokens=outside)))
    assert logits.count_nonzero() == int(len(outside) > 2)


def test_no_rows_are_no_launch() -> None:
    draws: Draws = make_draws(0, 40, torch.Generator().manual_seed(0))
    assert emulated().draw(torch.zeros(0, 40), draws).shape == (0,)
