"""Prompts made of modules, in Python: prompt programs, and a client for servers that keep the KV of modules.

`program.py` explains prompt programs, and `client.py` how to send them.
"""

from trunkline.prompts.client import Client, Completion, PromptSource, extra_body
from trunkline.prompts.errors import (
    PmlRequestError,
    PromptProgramError,
    RequestError,
    TrunklineError,
    UnreachableError,
)
from trunkline.prompts.items import MaxTokens
from trunkline.prompts.program import PromptCall, PromptProgram, prompt
from trunkline.prompts.schemas import Schema, SchemaEntry, SchemaModule, Schemas

__all__ = [
    "Client",
    "Completion",
    "MaxTokens",
    "PmlRequestError",
    "PromptCall",
    "PromptProgram",
    "PromptProgramError",
    "PromptSource",
    "RequestError",
    "Schema",
    "SchemaEntry",
    "SchemaModule",
    "Schemas",
    "TrunklineError",
    "UnreachableError",
    "extra_body",
    "prompt",
]
