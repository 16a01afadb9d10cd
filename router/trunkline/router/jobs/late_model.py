"""`LateModel`: a pydantic model whose validator is made when the first request of its kind comes.

To make those of all endpoints takes longer than most else that a router does at its start.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class LateModel(BaseModel):
    """The base of all models of requests and of their parts."""

    model_config = ConfigDict(defer_build=True)
