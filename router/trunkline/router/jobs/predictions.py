"""What a client expects an answer to be like (OpenAI's `prediction`): drafts of its tokens."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict

PREDICTION_CHARACTERS_MAX: Final = 32 << 10
"""Largest number of characters of a prediction that count: they are encoded while other requests wait."""


class PredictedText(BaseModel):
    """A part of `prediction.content`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["text"]
    text: str


class Prediction(BaseModel):
    """The field `prediction`: what the answer will be like, in OpenAI's form."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["content"]
    content: str | list[PredictedText]

    @property
    def text(self) -> str:
        """The expected answer, `PREDICTION_CHARACTERS_MAX` characters of it."""
        content = self.content
        whole = content if isinstance(content, str) else "".join(part.text for part in content)
        return whole[:PREDICTION_CHARACTERS_MAX]
