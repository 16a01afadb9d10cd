"""Sampling on NVIDIA GPUs (`csrc/cuda/sampling.cu`): bit for bit the tokens of the reference, without a wait.

A captured graph holds addresses. So give `draw_to` tensors of the device that stay where they are, and `limited`
if any row may ever have limits: the device reads each row's own, and rows without any skip that work.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref, c_int64

import torch
from torch import Tensor

from trunkline.kernels.cuda_library import CudaLibrary, DrawCall, EditCall
from trunkline.kernels.cuda_upload import ArgumentUpload
from trunkline.kernels.cuda_work import grown, refuse_capture
from trunkline.kernels.reference_sampling import ReferenceSampling
from trunkline.kernels.sampling import Draws, LogitEdits, Report


class CudaSampling:
    """Implements `trunkline.kernels.sampling.SamplingOps`."""

    def __init__(self, library: CudaLibrary, stream: Callable[[], int], is_capturing: Callable[[], bool]) -> None:
        """
        Args:
            stream: Returns the address of the stream to use.
        """
        self._library = library
        self._stream = stream
        self._is_capturing = is_capturing
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._generation = 0
        self._edits = {name: ArgumentUpload() for name in ("add_biases", "mask_logits", "penalise")}
        self._draws = ArgumentUpload()

    @property
    def graph_generation(self) -> int:
        """Number that changes when graphs captured so far have come to hold stale addresses."""
        return self._generation

    def edit_logits(self, logits: Tensor, edits: LogitEdits) -> None:
        _check_logits(logits)
        if edits.biases is not None:
            rows, tokens, values = edits.biases
            self._edit("add_biases", logits, {"rows": rows, "tokens": tokens, "values": values})
        if edits.masks is not None:
            rows, words = edits.masks
            if words.shape != (len(rows), -(-logits.shape[1] // 32)):
                raise ValueError(f"masks of {list(words.shape)} words for {logits.shape[1]} tokens")
            self._edit("mask_logits", logits, {"rows": rows, "words": words})
        if edits.penalties is not None:
            rows, indptr, tokens, counts, factors = edits.penalties
            named = {"rows": rows, "indptr": indptr, "tokens": tokens, "counts": counts, "values": factors}
            self._edit("penalise", logits, named)

    def _edit(self, name: str, logits: Tensor, arguments: dict[str, Tensor]) -> None:
        for kind, x in arguments.items():
            expected = {"values": torch.float32, "indptr": torch.int64}.get(kind, torch.int32)
            if x.dtype != expected:
                raise ValueError(f"{kind} must be {expected}, not {x.dtype}")
        sent = self._send(self._edits[name], list(arguments.values()), logits.device)
        call = EditCall(
            logits=logits.data_ptr(),
            row_stride=logits.stride(0),
            n=len(arguments["rows"]),
            vocab_size=logits.shape[1],
            **{kind: x.data_ptr() for kind, x in zip(arguments, sent, strict=True)},
        )
        self._library.call(name, byref(call), self._stream())

    def draw(self, logits: Tensor, draws: Draws) -> Tensor:
        out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        self.draw_to(logits, draws, out)
        return out

    def draw_to(self, logits: Tensor, draws: Draws, out: Tensor) -> None:
        """Draw into int64 `[rows]`. Tensors of the arguments may be longer than there are rows of logits."""
        _check_logits(logits)
        rows, vocab_size = logits.shape
        if rows == 0:
            return
        wanted = (torch.int64, torch.int64, torch.int32, torch.float32)
        for name, x, dtype in zip(Draws._fields, draws[:4], wanted, strict=False):
            if x.dtype != dtype or x.shape[-1] < rows:
                raise ValueError(f"{name} must be {dtype} for {rows} rows, not {x.dtype} {list(x.shape)}")
        if out.dtype != torch.int64 or not out.is_contiguous() or len(out) < rows:
            raise ValueError(f"out must be contiguous int64 for {rows} rows, not {out.dtype} {list(out.shape)}")
        seeds, index, top_k, factors = self._send(self._draws, draws[:4], logits.device)
        call = DrawCall(
            logits=logits.data_ptr(),
            seeds=seeds.data_ptr(),
            output_index=index.data_ptr(),
            top_k=top_k.data_ptr(),
            temperature=factors[0].data_ptr(),
            top_p=factors[1].data_ptr(),
            log_min_p=factors[2].data_ptr(),
            out=out.data_ptr(),
            scratch=self._reserve(rows, vocab_size, logits.device),
            row_stride=logits.stride(0),
            rows=rows,
            vocab_size=vocab_size,
            limited=draws.limited,
        )
        self._library.call("draw", byref(call), self._stream())

    def report(self, logits: Tensor, rows: Tensor, chosen: Tensor, count: int) -> Report:
        return ReferenceSampling().report(logits, rows, chosen, count)

    def _send(
        self, upload: ArgumentUpload, tensors: list[Tensor] | tuple[Tensor, ...], device: torch.device
    ) -> list[Tensor]:
        if self._is_capturing():
            for x in tensors:
                refuse_capture(x.device != device or not x.is_contiguous(), "arguments are not on the device")
            return list(tensors)
        return upload.send(tensors, device)

    def _reserve(self, rows: int, vocab_size: int, device: torch.device) -> int:
        needed = c_int64()
        self._library.call("draw_scratch_bytes", rows, vocab_size, byref(needed))
        size = grown(len(self._scratch), needed.value, 1 << 20)
        if size > len(self._scratch):
            refuse_capture(self._is_capturing(), "the memory of the sampler has to grow")
            self._scratch = torch.empty(size, dtype=torch.uint8, device=device)
            self._generation += 1
        return self._scratch.data_ptr()


def _check_logits(logits: Tensor) -> None:
    if logits.dtype != torch.float32 or logits.ndim != 2 or not 0 < logits.shape[1] < 1 << 31:
        raise ValueError(f"logits must be a float32 matrix, not {logits.dtype} {list(logits.shape)}")
    if logits.stride(1) != 1 and logits.shape[1] > 1:
        raise ValueError("the rows of logits must be contiguous")
