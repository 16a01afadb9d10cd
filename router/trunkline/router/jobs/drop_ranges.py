"""The field `drop`: parts of a prompt that the model does not see."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field, StrictInt
from pydantic_core import PydanticCustomError

from trunkline.kvstore.cuts import DROPS_MAX
from trunkline.router.jobs.late_model import LateModel


class DropRange(LateModel):
    """An entry of the field `drop`: messages, or tokens, `[from, to)` that the model does not see."""

    model_config = ConfigDict(strict=True, extra="forbid")

    start: Annotated[StrictInt, Field(ge=0, le=2**31 - 1, alias="from")]
    stop: Annotated[StrictInt, Field(ge=1, le=2**31 - 1, alias="to")]


def _apart(ranges: list[DropRange]) -> list[DropRange]:
    """Check that ranges are not empty, ascend and do not overlap."""
    end = 0
    for index, given in enumerate(ranges):
        if not end <= given.start < given.stop:
            raise PydanticCustomError(
                "drop",
                "ranges must not be empty, and each must begin behind the one before it",
                {"param": f"drop[{index}]"},
            )
        end = given.stop
    return ranges


Drops = Annotated[list[DropRange], Field(max_length=DROPS_MAX), AfterValidator(_apart)]
