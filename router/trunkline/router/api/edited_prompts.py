"""Leave parts of a conversation out of its prompt: what edits clear, and messages that the request drops.

    messages ─► with marks around what may be cleared ─► template ─► the whole text, and the place of each part
    tokens of the whole text ─► the tokens of each part ─► plan ─► dropped ranges: a cut

The prompt keeps the names of the whole conversation, so KV that was computed before the edit is found, and used on
behind it. What the template writes around a cleared text stays: the model sees an empty result, or a call whose
texts are empty.

Behind modules of a schema the text is what the template writes of the messages alone, and its tokens are the last
of the prompt's own (`module_prompts.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pydantic_core import from_json

from trunkline.router.api.dropped_messages import dropped_spans, dropping_steps, message_ends
from trunkline.router.api.left_out import EditedPrompt, check_left_out
from trunkline.router.api.module_prompts import Placed, placed_prompt
from trunkline.router.api.prompting import Rendering, encode_text, has_modules, remembered_prompt
from trunkline.router.api.requests import check_length
from trunkline.router.api.turn import SessionTurn
from trunkline.router.jobs.request_models import ChatRequest, Message, ToolCall
from trunkline.router.service import RouterService
from trunkline.router.tenancy.auth import cache_salt
from trunkline.router.text.edits import ConversationPart, Edit, ToolUse, plan_edits
from trunkline.router.text.marked_text import Marks, PlacedText
from trunkline.router.text.token_places import RemainingText, TokenPlaces
from trunkline.router.text.tokenizer import OFF_LOOP_CHARACTERS
from trunkline.router.text.truncation import TokenSpan, merge_spans, span_tokens
from trunkline.router.tools.plan import ToolPlan
from trunkline.router.tools.readings import reads_same


class MarkedConversation(NamedTuple):
    """A conversation with marks around all that edits may clear."""

    messages: list[Message]
    parts: list[ConversationPart]
    """What stands between the marks, by number."""
    uses: list[ToolUse]


async def edited_prompt(
    service: RouterService,
    body: ChatRequest,
    plan: ToolPlan,
    edits: Sequence[Edit] = (),
    turn: SessionTurn | None = None,
) -> EditedPrompt | None:
    """Return the prompt of a conversation without what `edits` clear and `body.drop` names; None if it has
    neither. Of a prompt of modules, that is the text of the messages behind them.

    Args:
        turn: The stored turn whose whole conversation `body.messages` is; None: it is not stored.

    Raises:
        ApiError: 400, naming the parameter that is wrong.
    """
    if not edits and not body.drop:
        return None
    check_left_out(body)
    if has_modules(body, turn):
        return await _behind_modules(service, body, plan, edits, turn)
    rendering = Rendering.of(body, plan)

    async def write(messages: list[Message]) -> str:
        return await rendering.text(service, messages)

    async def ends(counts: Sequence[int]) -> list[int] | None:
        return await message_ends(service, rendering, body.messages, text, counts)

    marked = mark_conversation(body.messages) if edits else None
    placed = None if marked is None else marked[1].read(await write(marked[0].messages))
    text = await write(body.messages) if placed is None else placed.text
    check_length(len(text), "messages")
    steps = await dropping_steps(body, text, write, ends)
    special = body.add_special_tokens
    remembered = None if turn is not None else await remembered_prompt(service, body, text, plan, fits=False)
    if turn is not None:
        salt, same = cache_salt(body.cache_salt), reads_same(plan)
        tokens, remembered = await turn.tokens_of(
            text, "messages", add_special_tokens=special, salt=salt, same=same
        )
    elif remembered is not None:
        tokens = remembered.ids
    else:
        tokens = await encode_text(service.tokenizer, text, None, add_special_tokens=special, param="messages")
    stays = turn is not None or remembered is not None

    def choose() -> EditedPrompt:
        own, places = service.tokenizer.places(text, tokens, add_special_tokens=special, stays=stays)
        drops = dropped_spans(RemainingText(text, places), steps)
        whole = EditedPrompt(text, own, drops, remembered=remembered)
        return whole if marked is None or placed is None else cleared(whole, places, marked[0], placed, edits)

    return await service.large_requests.run(choose) if len(text) > OFF_LOOP_CHARACTERS else choose()


async def _behind_modules(
    service: RouterService, body: ChatRequest, plan: ToolPlan, edits: Sequence[Edit], turn: SessionTurn | None
) -> EditedPrompt:
    """Return the text of the messages behind modules, without what is left out. Errors: as in `edited_prompt`."""
    messages = body.messages if turn is None else await turn.messages(body.messages)

    async def compiled(left: list[Message]) -> Placed:
        return (await placed_prompt(service, body, plan, turn, messages=left, fits=False))[0]

    async def write(left: list[Message]) -> str:
        return "".join([part.text for part in (await compiled(left)).message_parts()])

    whole = await compiled(messages)
    parts = whole.message_parts()
    text = "".join([part.text for part in parts])
    check_length(len(text), "messages")
    marked = mark_conversation(messages) if edits else None
    placed = None if marked is None else marked[1].read(await write(marked[0].messages))
    steps = await dropping_steps(body, text, write, None)
    tokens = [token for part in parts for token in part.tokens]
    before = whole.prompt.prompt_tokens - len(tokens)
    if turn is not None:
        tokens = await turn.tokens_of_parts(parts)

    def choose() -> EditedPrompt:
        own, places = service.tokenizer.places(text, tokens, add_special_tokens=False, stays=True)
        edited = EditedPrompt(text, own, dropped_spans(RemainingText(text, places), steps), before=before)
        if marked is None or placed is None or placed.text != text:
            return edited
        return cleared(edited, places, marked[0], placed, edits)

    return await service.large_requests.run(choose) if len(text) > OFF_LOOP_CHARACTERS else choose()


def cleared(
    whole: EditedPrompt,
    places: TokenPlaces,
    conversation: MarkedConversation,
    placed: PlacedText,
    edits: Sequence[Edit],
) -> EditedPrompt:
    """Return a prompt without what edits clear, too."""
    spans: list[list[TokenSpan]] = [[] for _ in conversation.parts]
    for place in placed.places:
        spans[place.part].append(places.within(place.start, place.stop))
    tokens = [_seen(own, whole.drops) for own in spans]
    seen = whole.before + len(whole.tokens) - span_tokens(whole.drops)
    plan = plan_edits(edits, conversation.parts, conversation.uses, tokens, seen)
    chosen = [span for part in plan.cleared for span in spans[part]]
    return whole._replace(drops=merge_spans([*whole.drops, *chosen]), applied=plan.applied)


def _seen(spans: Sequence[TokenSpan], dropped: Sequence[TokenSpan]) -> int:
    """Return how many tokens of `spans` are not in `dropped`, which is merged."""
    return span_tokens(merge_spans([*spans, *dropped])) - span_tokens(dropped)


def mark_conversation(messages: Sequence[Message]) -> tuple[MarkedConversation, Marks] | None:
    """Return a conversation with marks around its thoughts, the texts in calls, and results; and the marks. None
    if the conversation itself has all characters that could be marks.

    A user's message begins a new turn of the assistant's, unless it comes with results.
    """
    marks = Marks.unused(_texts(messages))
    if marks is None:
        return None
    marking = _Marking(marks)
    for message in messages:
        marking.add(message)
    uses = [ToolUse(tool, number in marking.answered) for number, tool in enumerate(marking.tools)]
    return MarkedConversation(marking.messages, marking.parts, uses), marks


class _Marking:
    """Puts marks into the messages of a conversation, one after the other."""

    def __init__(self, marks: Marks) -> None:
        self.messages: list[Message] = []
        self.parts: list[ConversationPart] = []
        self.tools: list[str] = []
        """The tool of each use."""
        self.answered: set[int] = set()
        """Numbers of the uses with results."""
        self._marks = marks
        self._turn = 0
        self._use_of: dict[str, int] = {}

    def add(self, message: Message) -> None:
        """Take the next message."""
        if message.role == "user" and self.messages and self.messages[-1].role != "tool":
            self._turn += 1
        changed: dict[str, Any] = {}
        if message.role == "tool":
            use = self._use_of.get(message.tool_call_id or "")
            if use is not None:
                self.answered.add(use)
                changed["content"] = self._marked(message.content, ConversationPart("result", use))
        elif message.role == "assistant":
            if message.reasoning_content:
                part = ConversationPart("thought", self._turn)
                changed["reasoning_content"] = self._marked(message.reasoning_content, part)
            if message.tool_calls:
                changed["tool_calls"] = [self._call(call) for call in message.tool_calls]
        self.messages.append(message.model_copy(update=changed) if changed else message)

    def _call(self, call: ToolCall) -> ToolCall:
        use = self._use_of[call.id] = len(self.tools)
        self.tools.append(call.function.name)
        try:
            arguments = from_json(call.function.arguments, allow_inf_nan=False)
        except ValueError:
            return call
        if json.dumps(arguments, ensure_ascii=False) != call.function.arguments:
            return call  # its spaces and escapes would be others, and so would be its tokens
        marked = json.dumps(self._marked_texts(arguments, use), ensure_ascii=False)
        return call.model_copy(update={"function": call.function.model_copy(update={"arguments": marked})})

    def _marked_texts(self, value: Any, use: int) -> Any:
        """Return a JSON value with marks around all texts in it, but for the names of fields."""
        if isinstance(value, str):
            return self._marked(value, ConversationPart("input", use))
        if isinstance(value, list):
            return [self._marked_texts(item, use) for item in value]
        if isinstance(value, dict):
            return {name: self._marked_texts(item, use) for name, item in value.items()}
        return value

    def _marked(self, text: str, part: ConversationPart) -> str:
        self.parts.append(part)
        return self._marks.around(len(self.parts) - 1, text)


def _texts(messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        yield message.content
        yield message.reasoning_content or ""
        for call in message.tool_calls or ():
            yield call.function.arguments
