"""Log-probabilities of prompts, each reported once, although a prompt may be computed more than once. Pure."""

from __future__ import annotations

from trunkline.controller.messages import PromptLogprobs

_INT32_BYTES = 4


class ScoreLedger:
    """How far the scores of each prompt have been reported. They come in the order of positions; a prompt that is
    computed again begins again at its start."""

    def __init__(self) -> None:
        self._next: dict[int, int] = {}
        """By request: the first position that has not been reported."""

    def news(self, request: int, scores: PromptLogprobs) -> PromptLogprobs | None:
        """What has not been reported of these, which is taken for reported from now on."""
        count = len(scores.token_logprobs) // _INT32_BYTES
        known = min(max(0, self._next.get(request, 0) - scores.start), count)
        if known == count:
            return None
        self._next[request] = scores.start + count
        if not known:
            return scores
        top = known * (len(scores.top_ids) // count)
        return PromptLogprobs(
            scores.start + known,
            scores.token_logprobs[known * _INT32_BYTES :],
            scores.ranks[known * _INT32_BYTES :],
            scores.top_ids[top:],
            scores.top_logprobs[top:],
        )

    def ended(self, request: int) -> None:
        """Nothing more comes of it."""
        self._next.pop(request, None)
