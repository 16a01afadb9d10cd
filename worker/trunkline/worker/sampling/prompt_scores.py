"""Log-probabilities of a prompt's own tokens: how likely each was, given those before it."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from trunkline.controller.messages import PromptLogprobs
from trunkline.kvstore.int32_codec import Int32Array
from trunkline.worker.sampling.sampler import LOGPROB_MIN

_CHUNK_BYTES_MAX: Final = 32 << 20
"""Logits looked at together; temporaries are a few times as large."""


def score_prompt(logits: Tensor, targets: Int32Array, start: int, count: int) -> PromptLogprobs:
    """Score prompt tokens.

    Args:
        logits: float32 `[n, vocabulary]`; row i is the model's output one position before `targets[i]`.
        targets: `[n]`, the prompt's tokens at positions start … start + n - 1.
        start: position of the first target; at least 1.
        count: number of most likely tokens to report per position; at most the vocabulary's size is used.

    Returns:
        Natural logarithms, at least `LOGPROB_MIN`. A token's rank is 1 + the number of strictly likelier ones.
    """
    vocab_size = logits.shape[1]
    count = min(count, vocab_size)
    rows = max(1, _CHUNK_BYTES_MAX // (4 * vocab_size))
    own, ranks, top_ids, top_values = [], [], [], []
    for begin in range(0, len(targets), rows):
        x = logits[begin : begin + rows]
        tokens = torch.from_numpy(targets[begin : begin + rows].astype(np.int64)).to(x.device)[:, None]
        total = x.logsumexp(dim=-1, keepdim=True)
        chosen = x.gather(1, tokens)
        own.append(_array(chosen - total))
        ranks.append(1 + (x > chosen).sum(dim=-1).cpu().numpy())
        top = x.topk(count, dim=-1)
        top_ids.append(top.indices.cpu().numpy())
        top_values.append(_array(top.values - total))
    return PromptLogprobs(
        start=start,
        token_logprobs=b"".join(part.tobytes() for part in own),
        ranks=b"".join(part.astype("<i4").tobytes() for part in ranks),
        top_ids=b"".join(part.astype("<i4").tobytes() for part in top_ids),
        top_logprobs=b"".join(part.tobytes() for part in top_values),
    )


def _array(log_probs: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return log_probs.clamp_min(LOGPROB_MIN).cpu().numpy().astype("<f4")
