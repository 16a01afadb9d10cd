"""Prompts whose documents are modules, without a schema (Prompt Cache §3.3).

A request that allows it (`document_modules`) has its documents computed as texts that see only themselves. Such a
text is known by its tokens, so its KV serves every prompt of the tenant that has the document, at any place and in
any order; as it sees nothing else, turning it to another place is exact. What is approximate is that documents do
not see what stands before them.

    text of the template   <system> … <user>⟨document⟩ and ⟨document⟩ question <assistant>
    texts in the layout    └── head ───────┘└── 1 ───┘     └── 2 ───┘
    the request's own                              └ run ┘          └─────── run ────────┘

What stands before the first document is a text, too, so that it is found whichever documents follow; it is exact.
What follows the documents sees everything before it. Only documents before the first answer become modules: a
prompt's own tokens are found again by the modules that they see, so a new module would cost a whole conversation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from trunkline.controller.messages import ModuleText, PromptLayout
from trunkline.kvstore.chunks import pack_int32
from trunkline.router.api.left_out import EditedPrompt
from trunkline.router.api.module_prompts import modules_job
from trunkline.router.api.prompting import Rendering, encode_text, job_for, policy_of, remembered_prompt
from trunkline.router.api.requests import check_length
from trunkline.router.api.turn import SessionTurn
from trunkline.router.jobs.generation_parameters import DialogParameters
from trunkline.router.jobs.job import Job, Modules, Prompt, wanted_tokens
from trunkline.router.jobs.request_models import ChatRequest, Message
from trunkline.router.service import RouterService
from trunkline.router.stores.model_text import ModelText
from trunkline.router.stores.session_history import PromptPart
from trunkline.router.text.document_marks import DocumentMarks
from trunkline.router.text.reasoning_styles import ThoughtState
from trunkline.router.text.tokenizer import OFF_LOOP_CHARACTERS
from trunkline.router.text.truncation import room_for
from trunkline.router.tools.plan import ToolPlan


def marks_of(body: DialogParameters) -> DocumentMarks | None:
    """Return marks for a request; None: its documents are not to be modules."""
    if not body.document_modules or body.exact or body.pml is not None or getattr(body, "drop", None):
        return None
    return DocumentMarks()


def mark_documents(body: ChatRequest, marks: DocumentMarks | None) -> ChatRequest:
    """Return a chat with marks in its `documents`: around the longest string of each."""
    if marks is None:
        return body
    documents = [dict(document) for document in body.documents or ()]
    for document in filter(None, documents):
        name = max(document, key=lambda name: len(document[name]))
        document[name] = marks.around(document[name])
    return body.model_copy(update={"documents": documents}) if documents else body


async def dialog_tokens(
    service: RouterService, body: ChatRequest, plan: ToolPlan, marks: DocumentMarks | None
) -> int:
    """Return the number of tokens of a conversation's prompt, with marked documents as modules if they can be.

    Raises:
        ApiError: 400, the template refuses the messages, or they are too long.
    """
    if body.modules is not None:
        return (await modules_job(service, body, plan)).seen_tokens
    if marks is not None:
        laid_out = await lay_out_documents(service, body, plan, body.messages, marks)
        if laid_out is not None:
            return laid_out.tokens
        body = unmarked(body, marks)
    text = await Rendering.of(body, plan).text(service, body.messages)
    remembered = await remembered_prompt(service, body, text, plan, fits=False)
    if remembered is not None:
        return len(remembered.tokens)
    return len(await encode_text(service.tokenizer, text, None, add_special_tokens=False, param="messages"))


def unmarked(body: ChatRequest, marks: DocumentMarks | None) -> ChatRequest:
    """Return a chat without marks."""
    if marks is None:
        return body
    messages = []
    for message in body.messages:
        content = marks.without(message.content)
        is_marked = content != message.content
        messages.append(message.model_copy(update={"content": content}) if is_marked else message)
    documents = [{name: marks.without(text) for name, text in each.items()} for each in body.documents or ()]
    return body.model_copy(update={"messages": messages, "documents": documents or None})


async def modular_job(
    service: RouterService,
    body: ChatRequest,
    plan: ToolPlan,
    marks: DocumentMarks | None,
    turn: SessionTurn | None = None,
    edited: EditedPrompt | None = None,
) -> Job | None:
    """Make the job of a conversation behind modules of a schema, or whose documents are modules; None if there are
    none.

    Documents cannot be modules where a template does more to a document than to show it once, where tokens of the
    prompt are scored or left out, and where the prompt must be truncated.

    Args:
        marks: The marks in the request's messages and documents; None: documents are not to be modules.
        turn: As in `chat_job`.
        edited: As in `modules_job`.

    Raises:
        ApiError: 400, naming the parameter that is wrong.
    """
    if body.modules is not None:
        return await modules_job(service, body, plan, turn, edited)
    if marks is None:
        return None
    if body.prompt_logprobs is not None or body.truncate_prompt_tokens is not None:
        return None
    if turn is not None and (body.continue_final_message or turn.session.history.discards):
        return None
    messages = body.messages if turn is None else await turn.messages(body.messages)
    laid_out = await lay_out_documents(service, body, plan, messages, marks)
    if laid_out is None:
        return None
    if turn is not None:
        laid_out = laid_out.with_tail(await turn.tokens_of_parts([laid_out.tail]))
    room = room_for(wanted_tokens(body)[1], service.limits.max_context)
    if policy_of(body, turn) is not None and laid_out.tokens + room > service.limits.max_context:
        return None
    thought: ThoughtState = "closed" if body.continue_final_message else plan.thought_behind(laid_out.tail.text)
    prompt = Prompt(laid_out.own, "messages", modules=laid_out.modules(), thought=thought)
    job = job_for(service, body, prompt, tools=plan)
    if turn is None:
        return job
    turn.check_size("messages")
    return replace(job, session_tokens=turn.reused_tokens, ttl=turn.session.ttl)


class DocumentPrompt(NamedTuple):
    """A prompt whose documents are modules."""

    texts: list[ModuleText]
    """The text before the first document, and the documents."""
    between: list[tuple[int, list[int]]]
    """Position and token ids of the texts between documents."""
    tail: PromptPart
    """What stands behind the last document."""
    tail_position: int

    @property
    def tokens(self) -> int:
        """Number of tokens of the whole prompt, which has no gaps."""
        return self.tail_position + len(self.tail.tokens)

    @property
    def own(self) -> list[int]:
        """The tokens that the request computes itself."""
        return [token for _, ids in self.between for token in ids] + self.tail.tokens

    def with_tail(self, tokens: list[int]) -> DocumentPrompt:
        """Return the prompt with other token ids for its tail."""
        return self._replace(tail=self.tail._replace(tokens=tokens))

    def modules(self) -> Modules:
        """Return the layout, for a job."""
        runs = [number for position, ids in self.between for number in (position, len(ids))]
        layout = PromptLayout(self.texts, pack_int32([*runs, self.tail_position, len(self.tail.tokens)]))
        return Modules(layout, self.tokens - len(self.own), self.tokens, "")


async def lay_out_documents(
    service: RouterService, body: ChatRequest, plan: ToolPlan, messages: list[Message], marks: DocumentMarks
) -> DocumentPrompt | None:
    """Render and encode a conversation with marked documents; None if they cannot be modules.

    Raises:
        ApiError: 400, the template refuses the messages, or they are too long.
    """
    text = await Rendering.of(body, plan).text(service, messages)
    pieces = marks.split(text)
    if pieces is None:
        return None
    check_length(len(text), "messages")
    encoded = await _encoded(service, body, pieces)
    if not encoded[-1]:
        return None
    texts: list[ModuleText] = []
    between: list[tuple[int, list[int]]] = []
    position = 0
    for index, ids in enumerate(encoded[:-1]):
        if ids and (index % 2 or not index):
            texts.append(ModuleText(pack_int32(ids), position, -1, pack_int32([0, len(ids)])))
        elif ids:
            between.append((position, ids))
        position += len(ids)
    return DocumentPrompt(texts, between, PromptPart(pieces[-1], encoded[-1], plain=False), position)


async def _encoded(service: RouterService, body: ChatRequest, pieces: Sequence[str]) -> list[list[int]]:
    """Return the token ids of the pieces of a prompt, of which every second one is a document."""
    tokenizer, plain = service.tokenizer, ModelText(service.tokenizer).encode_plain
    encoded: list[list[int]] = []
    for index, piece in enumerate(pieces):
        if not index:
            ids = await tokenizer.encode_async(piece, add_special_tokens=body.add_special_tokens)
        elif not index % 2:
            ids = await tokenizer.encode_rest(piece)
        else:
            is_long = len(piece) > OFF_LOOP_CHARACTERS
            ids = await asyncio.to_thread(plain, piece) if is_long else plain(piece)
        encoded.append(ids)
    return encoded
