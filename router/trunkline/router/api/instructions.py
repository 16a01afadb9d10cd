"""The first tokens of a prompt that are its instructions, which a cut may keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from trunkline.router.errors import ApiError
from trunkline.router.jobs.request_models import Message
from trunkline.router.service import RouterService
from trunkline.router.text.conversation_memory import common_length

if TYPE_CHECKING:
    from trunkline.router.api.prompting import Rendering

_INSTRUCTION_ROLES: Final = ("system", "developer")


async def instruction_tokens(
    service: RouterService, rendering: Rendering, messages: list[Message], text: str, tokens: Sequence[int]
) -> int:
    """Return how many first tokens of a prompt are its instructions: leading system messages and tools.

    Args:
        messages: The conversation.
        text: The conversation's text, made with `rendering`.
        tokens: The token ids of `text`.
    """
    others = (i for i, message in enumerate(messages) if message.role not in _INSTRUCTION_ROLES)
    count = next(others, len(messages))
    if not count and rendering.tools is None:
        return 0
    end = await _instruction_characters(service, rendering, messages, count, text)
    ids = await service.tokenizer.encode_async(text[:end], add_special_tokens=rendering.add_special_tokens)
    differing = (i for i, (one, other) in enumerate(zip(ids, tokens, strict=False)) if one != other)
    return next(differing, min(len(ids), len(tokens)))


async def _instruction_characters(
    service: RouterService, rendering: Rendering, messages: list[Message], count: int, text: str
) -> int:
    if count:
        try:
            alone = await rendering._replace(add_generation_prompt=False, continues=False).text(
                service, messages[:count]
            )
        except ApiError:
            alone = ""  # some templates take system messages only in front of others
        end = common_length(alone, text)
        if messages[count - 1].content.strip() in text[:end]:
            return end
    if count == len(messages):
        return len(text)
    # The instructions are the text that stays the same when the content of the first other message changes.
    first = messages[count]
    changed = first.model_copy(update={"content": "1" if first.content.startswith("0") else "0"})
    return common_length(await rendering.text(service, [*messages[:count], changed, *messages[count + 1 :]]), text)
