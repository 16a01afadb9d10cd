"""Compaction of a conversation: the model sums it up, and the summary stands for it in later requests.

    conversation ─► the same prompt, and at its end: "write a summary" ─► summary ─► sealed: a compaction item

The prompt of the summary is the conversation as it was, with its tools and behind its modules, so all of it is
found in the cache. What the model sees of a conversation with such an item says `response_input.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

from msgspec.structs import replace

from trunkline.router.api.answer_fields import draft_details
from trunkline.router.api.blocks import AnswerBlocks
from trunkline.router.api.document_prompts import modular_job, unmarked
from trunkline.router.api.openai_items import Object, usage_object
from trunkline.router.api.prompt_batch import start
from trunkline.router.api.prompting import chat_job
from trunkline.router.api.response_turn import ResponseTurn
from trunkline.router.errors import unavailable
from trunkline.router.jobs.parameters import TruncationChoice
from trunkline.router.jobs.request_models import ChatRequest, Message
from trunkline.router.request_context import draw_hex
from trunkline.router.service import RouterService
from trunkline.router.stores.seals import Seal
from trunkline.router.text.document_marks import DocumentMarks
from trunkline.router.text.tokenizer import Tokenizer
from trunkline.router.text.truncation import ROOM_SHARE
from trunkline.router.tools.plan import Choice, ToolPlan

INSTRUCTION: Final = (
    "Now write a summary of this conversation, for your own use. It will take the place of everything above but "
    "the user's own messages, which stay. Say what the user wants; what was done and found so far, with the "
    "names, paths, values and decisions that matter later; what is not finished, and what comes next. Do not "
    "answer the user and do not call tools: write the summary and nothing else."
)
"""The last message of the prompt that asks the model for a summary."""
_NOT_OF_SUMMARIES: Final[dict[str, Any]] = {
    **dict.fromkeys(("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")),
    **dict.fromkeys(("response_format", "logprobs", "top_logprobs", "truncate_prompt_tokens", "min_tokens")),
    **dict.fromkeys(("max_tokens", "ignore_eos", "stop_token_ids", "allowed_token_ids")),
    "stop": [],
    "drop": [],
}
"""Parameters that are about the answer itself, with the values that ask for nothing."""


class Compaction:
    """A summary that is being written."""

    def __init__(self, answer: AnswerBlocks, seal: Seal) -> None:
        self.answer = answer
        """What the model writes."""
        self.item: Object = {"type": "compaction", "id": f"cmp_{draw_hex('item', 24)}", "encrypted_content": ""}
        """The compaction item; without its content until `sampled` is over."""
        self._seal = seal

    async def sampled(self) -> AsyncIterator[None]:
        """Yield each time when more of the summary is there; in the end complete the item.

        Raises:
            ApiError: The generation failed, or the summary is empty.
        """
        async for _ in self.answer.changes():
            yield
        summary = "".join([block.text for block in self.answer.blocks.all if block.is_text]).strip()
        if not summary:
            raise unavailable("the model wrote no summary; the conversation stays as it was", code="no_summary")
        self.item["encrypted_content"] = self._seal.seal("compaction", summary)

    async def complete(self) -> None:
        """Wait until the item is complete. Errors are those of `sampled`."""
        async for _ in self.sampled():
            pass


async def begin_compaction(
    service: RouterService,
    chat: ChatRequest,
    plan: ToolPlan,
    turn: ResponseTurn | None,
    *,
    seal: Seal,
    marks: DocumentMarks | None = None,
    tokens_max: int | None = None,
) -> Compaction:
    """Begin to have the model sum a conversation up. The caller closes the generation.

    Args:
        chat: The conversation, as it would be answered.
        plan: The plan for its tools; they are shown, but not called.
        turn: As in `chat_job`.
        seal: Seals the summary; has a key.
        marks: The marks in its messages, as in `modular_job`.
        tokens_max: Largest number of the summary's tokens; None: an eighth of the context.

    Raises:
        ApiError: 400, naming what is wrong; no engine accepted it.
    """
    context = service.limits.max_context
    most = max(1, min(context // ROOM_SHARE, tokens_max or context))
    shown = replace(plan, functions=(), choice=Choice("auto", allowed=()))
    asked = _summing_up(chat, most)
    job = await modular_job(service, asked, shown, marks, turn)
    if job is None:
        job = await chat_job(service, unmarked(asked, marks), shown, turn)
    generation = await start(service, job)
    return Compaction(AnswerBlocks(generation, shown, at_least_one=False, id_prefix="call_"), seal)


def _summing_up(chat: ChatRequest, tokens_max: int) -> ChatRequest:
    """Return the request for a summary. A conversation that does not fit is cut: a summary of its end is better
    than none."""
    *before, last = chat.messages
    if last.role == "user":  # many templates take no two messages of a user in a row
        asked = [last.model_copy(update={"content": f"{last.content}\n\n{INSTRUCTION}"})]
    else:
        asked = [last, Message(role="user", content=INSTRUCTION)]
    truncation = chat.truncation
    if truncation is None or truncation.policy() is None:
        truncation = TruncationChoice(type="auto")
    fields = {"messages": [*before, *asked], "max_completion_tokens": tokens_max, "truncation": truncation}
    return chat.model_copy(update={**_NOT_OF_SUMMARIES, **fields})


def usage_of(answer: AnswerBlocks, tokenizer: Tokenizer) -> Object:
    """Return the field `usage` of what was generated so far."""
    generation = answer.generation
    thoughts = tokenizer.count_thoughts(answer.thought, answer.tokens)
    counts = generation.job.seen_tokens, generation.cached_tokens, generation.output_tokens
    return usage_object(*counts, thoughts, draft_details(generation))
