"""What a client expects an answer to be like (OpenAI's `prediction`): drafts of its tokens."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, ConfigDict
from pydantic_core import PydanticCustomError

from trunkline.router.jobs.late_model import LateModel

PREDICTION_CHARACTERS_MAX: Final = 32 << 10
"""Largest number of characters of a prediction that count: they are encoded while other requests wait."""


class PredictedText(LateModel):
    """A part of `prediction.content`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["text"]
    text: str


def _parts(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise PydanticCustomError("prediction", "must be a string or a list of text parts")
    return [PredictedText(type="text", text=value)] if isinstance(value, str) else value


class Prediction(LateModel):
    """The field `prediction`: what the answer will be like, in OpenAI's form."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["content"]
    content: Annotated[list[PredictedText], BeforeValidator(_parts)]

    @property
    def text(self) -> str:
        """The expected answer, `PREDICTION_CHARACTERS_MAX` characters of it."""
        return "".join(part.text for part in self.content)[:PREDICTION_CHARACTERS_MAX]
