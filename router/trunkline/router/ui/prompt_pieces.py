"""Split a request's prompt, as the model would see it, into pieces with their kinds: the playground colours them.

The same code makes the prompts of real requests (`api/prompting.py`, `api/module_prompts.py`). The model computes
nothing for it, and nothing is stored.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple, TypeVar

from trunkline.router.api.blocks import renamed
from trunkline.router.api.edited_prompts import edited_prompt
from trunkline.router.api.module_prompts import Placed, modules_job, placed_prompt
from trunkline.router.api.prompting import Rendering, chat_job, completion_job, has_modules
from trunkline.router.api.requests import check_model, of_session
from trunkline.router.api.turn import SessionTurn
from trunkline.router.errors import ApiError, bad_value
from trunkline.router.http.body import parse_json_object, validate
from trunkline.router.jobs.job import Job
from trunkline.router.jobs.request_models import CHAT, COMPLETIONS, ChatRequest, CompletionRequest, Message
from trunkline.router.pml.compiled import PieceKind
from trunkline.router.service import RouterService
from trunkline.router.stores.session_store import is_stored
from trunkline.router.text.detokenizer import TokenVocabulary, make_detokenizer
from trunkline.router.text.truncation import TokenSpan
from trunkline.router.tools.plan import prepare_tools

_T = TypeVar("_T")
_OFF_LOOP_TOKENS: Final = 5_000
"""Number of tokens above which the pieces of a prompt are made in a thread."""
_MARK: Final = "\ue000"
_MARKED: Final = re.compile(f"{_MARK}([0-9]{{1,9}}){_MARK}")
_KINDS: Final[dict[PieceKind, str]] = {
    "text": "module",
    "role": "template",
    "argument": "argument",
    "gap": "text",
    "trailing": "text",
}


class Label(NamedTuple):
    """Says what a token is part of; neighbouring tokens with equal labels make a piece."""

    kind: str
    """"template", "message", "module", "argument" or "text"."""
    part: int = -1
    """Number of the message that the token is part of; -1 if none."""
    role: str = ""
    module: str | None = None
    cached: bool = False
    """Whether the token is part of a schema's text, whose KV is computed once for all requests."""
    session: bool = False
    """Whether the token comes from the stored session, as of its last turn."""
    dropped: bool = False
    """Whether the model does not see the token, because it was cut off or discarded."""


async def prompt_pieces(service: RouterService, content: bytes) -> dict[str, Any]:
    """Return the pieces of the prompt of a body for `/v1/chat/completions` (with `messages`) or `/v1/completions`.

    Raises:
        ApiError: The error that the endpoint itself would return.
    """
    fields = parse_json_object(content)
    is_chat = "messages" in fields
    with renamed((CHAT if is_chat else COMPLETIONS).read(fields).names):
        body = validate(ChatRequest, fields) if is_chat else validate(CompletionRequest, fields)
        return await _pieces(service, body)


async def _pieces(service: RouterService, body: ChatRequest | CompletionRequest) -> dict[str, Any]:
    service = check_model(service, body.model)
    turn = None
    if body.session_id is not None and is_stored(body.session_id):
        stored = await service.sessions.peek(body.session_id)
        if body.model is None:
            service = of_session(service, stored.session)
        turn = SessionTurn(service, stored.session, "chat" if isinstance(body, ChatRequest) else "text")
    if isinstance(body, ChatRequest):
        return await _chat(service, body, turn)
    return await _completion(service, body, turn)


async def _chat(service: RouterService, body: ChatRequest, turn: SessionTurn | None) -> dict[str, Any]:
    plan = prepare_tools(body.tools, body.tool_choice, body.parallel_tool_calls, service.tokenizer.tool_style)
    if has_modules(body, turn):
        placed, _, _ = await placed_prompt(service, body, plan, turn)
        return await _of_modules(service, placed, await modules_job(service, body, plan, turn))
    edited = None if turn is not None else await edited_prompt(service, body, plan)
    job = await chat_job(service, body, plan, turn, edited)
    messages = body.messages if turn is None else await turn.messages(body.messages)
    frame = await _frame(service, Rendering.of(body, plan), messages)
    vocabulary = service.tokenizer.vocabulary
    labels = await _beside(len(job.prompt), lambda: chat_labels(job.prompt, messages, frame, vocabulary))
    return await _answer(service, job, labels)


async def _frame(service: RouterService, rendering: Rendering, messages: list[Message]) -> str:
    """Return the conversation's text with a mark in the place of each message that is not empty; "" if the
    template does not accept marks as messages."""
    marked = [
        message.model_copy(update={"content": f"{_MARK}{number}{_MARK}"}) if message.content.strip() else message
        for number, message in enumerate(messages)
    ]
    try:
        return await rendering.text(service, marked)
    except ApiError:
        return ""


async def _completion(service: RouterService, body: CompletionRequest, turn: SessionTurn | None) -> dict[str, Any]:
    if has_modules(body, turn):
        placed, _, _ = await placed_prompt(service, body, turn=turn)
        return await _of_modules(service, placed, await modules_job(service, body, turn=turn))
    if len(body.prompts) != 1:
        raise bad_value("prompt", f"`prompt`: one prompt is shown at once, not {len(body.prompts)}")
    [given] = body.prompts
    job = await completion_job(service, body, given, turn)
    leading = service.tokenizer.leading_ids if body.add_special_tokens and isinstance(given, str) else ()
    special = len(leading) if tuple(job.prompt[: len(leading)]) == leading else 0
    labels = [Label("template")] * special + [Label("text")] * (len(job.prompt) - special)
    return await _answer(service, job, labels)


async def _beside(tokens: int, work: Callable[[], _T]) -> _T:
    return await asyncio.to_thread(work) if tokens > _OFF_LOOP_TOKENS else work()


async def _answer(service: RouterService, job: Job, labels: Sequence[Label]) -> dict[str, Any]:
    def make() -> list[dict[str, Any]]:
        told = mark_seen(labels, job.session_tokens, job.cut.drops)
        return pieces_of(job.prompt, told, service.tokenizer.vocabulary)

    pieces = await _beside(len(job.prompt), make)
    return _told(service, job, pieces)


def _told(service: RouterService, job: Job, pieces: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "tokens": job.seen_tokens,
        "dropped_tokens": job.cut.dropped_tokens,
        "session_tokens": job.session_tokens,
        "module_tokens": job.module_tokens,
        "max_tokens": job.max_tokens,
        "max_context": service.limits.max_context,
        "pieces": pieces,
    }


def mark_seen(labels: Sequence[Label], session_tokens: int, drops: Sequence[TokenSpan]) -> list[Label]:
    """Return a prompt's labels with the tokens marked that come from the session, and those that are dropped."""
    told = list(labels)
    for index in range(min(session_tokens, len(told))):
        told[index] = told[index]._replace(session=True)
    for start, stop in drops:
        for index in range(start, min(stop, len(told))):
            told[index] = told[index]._replace(dropped=True)
    return told


def texts_of(tokens: Sequence[int], vocabulary: TokenVocabulary) -> list[str]:
    """Return the text that each token adds; a character made of several tokens belongs to the last of them."""
    detokenizer = make_detokenizer(vocabulary, skip_special_tokens=False)
    texts = [detokenizer.feed(token) for token in tokens]
    if texts:
        texts[-1] += detokenizer.flush()
    return texts


def chat_labels(
    tokens: Sequence[int], messages: Sequence[Message], frame: str, vocabulary: TokenVocabulary
) -> list[Label]:
    """Return, for each token of a conversation, whether it belongs to a message or to the template.

    Args:
        frame: see `message_spans`.
    """
    texts = texts_of(tokens, vocabulary)
    spans = message_spans("".join(texts), [message.content for message in messages], frame)
    labels: list[Label] = []
    place, number = 0, 0
    for text in texts:
        # A token belongs to what its first character, that is no space, belongs to.
        start = place + (len(text) - len(text.lstrip()) if text.strip() else 0)
        while number < len(spans) and start >= spans[number][1]:
            number += 1
        index = spans[number][2] if number < len(spans) and start >= spans[number][0] else -1
        labels.append(Label("template") if index < 0 else Label("message", index, messages[index].role))
        place += len(text)
    return labels


def message_spans(text: str, contents: Sequence[str], frame: str) -> list[tuple[int, int, int]]:
    """Return where each message stands in a conversation's text, as (start, stop, number), ascending.

    Args:
        frame: the same conversation with marks in the places of messages. If the text is not the same around them
            (templates may look into messages), they are searched for, from the last one on; what a template has
            changed is not found then.
    """
    spans = _framed_spans(text, contents, frame)
    if spans is not None:
        return spans
    spans, end = [], len(text)
    for number in range(len(contents) - 1, -1, -1):
        content = contents[number].strip()
        start = text.rfind(content, 0, end) if content else -1
        if start >= 0:
            spans.append((start, start + len(content), number))
            end = start
    return spans[::-1]


def _framed_spans(text: str, contents: Sequence[str], frame: str) -> list[tuple[int, int, int]] | None:
    around = _MARKED.split(frame)  # text, number, text, …, text
    spans: list[tuple[int, int, int]] = []
    place = len(around[0])
    if len(around) < 3 or not text.startswith(around[0]):
        return None
    for at in range(1, len(around), 2):
        number, behind = int(around[at]), around[at + 1]
        if number >= len(contents):
            return None
        content = next((c for c in _written(contents[number]) if text.startswith(c + behind, place)), None)
        if content is None:
            return None
        spans.append((place, place + len(content), number))
        place += len(content) + len(behind)
    return spans if place == len(text) else None


def _written(content: str) -> tuple[str, ...]:
    """Return the forms in which a template may write a message: as it is, or trimmed."""
    return content, content.strip(), content.rstrip(), content.lstrip()


def pieces_of(tokens: Sequence[int], labels: Sequence[Label], vocabulary: TokenVocabulary) -> list[dict[str, Any]]:
    """Return the pieces of a prompt: runs of neighbouring tokens with equal labels."""
    texts = texts_of(tokens, vocabulary)
    pieces = []
    place = 0
    for label, same in groupby(labels):
        count = sum(1 for _ in same)
        pieces.append(_piece("".join(texts[place : place + count]), count, label))
        place += count
    return pieces


def _piece(text: str, tokens: int, label: Label) -> dict[str, Any]:
    piece: dict[str, Any] = {"text": text, "tokens": tokens, "kind": label.kind}
    if label.role:
        piece |= {"role": label.role, "message": label.part}
    if label.module is not None:
        piece["module"] = label.module
    flags = {"cached": label.cached, "session": label.session, "dropped": label.dropped}
    return piece | {name: True for name, is_so in flags.items() if is_so}


async def _of_modules(service: RouterService, placed: Placed, job: Job) -> dict[str, Any]:
    """Return the pieces of a prompt of modules, in ascending positions. The part of a parameter's place that its
    argument does not fill is no piece, because the model does not see it."""
    prompt = placed.prompt
    pieces: list[dict[str, Any]] = []
    own = 0
    for piece in prompt.pieces:
        if piece.kind == "hole":
            continue
        own += 0 if piece.cached else piece.count
        is_message = own > prompt.messages_from
        if is_message and job.session_tokens:
            break
        kind = "message" if is_message and piece.kind == "trailing" else _KINDS[piece.kind]
        in_module = piece.cached or kind in ("module", "argument")
        label = Label(kind, module=piece.path if in_module else None, cached=piece.cached)
        pieces.append(_piece(piece.text, piece.count, label))
    if job.session_tokens:
        # In the tokens that the session's last turn had, which need not be those of its messages one by one.
        behind = job.prompt[prompt.messages_from :]
        own_tokens, new = behind[: job.session_tokens], behind[job.session_tokens :]
        for tokens, is_session in ((own_tokens, True), (new, False)):
            text = "".join(texts_of(tokens, service.tokenizer.vocabulary))
            if tokens:
                pieces.append(_piece(text, len(tokens), Label("message", session=is_session)))
    return _told(service, job, pieces)
