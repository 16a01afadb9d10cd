"""`LateModel`: a pydantic model whose validator is built when it is first used.

Building the validators of all endpoints takes longer than most of what a router does at its start.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class LateModel(BaseModel):
    """The base of all models of requests and of their parts."""

    model_config = ConfigDict(defer_build=True)
