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

from collections.abc import Sequence

from trunkline.router.api.dropped_messages import dropped_spans, message_ends, plan_removals
from trunkline.router.api.left_out import EditedPrompt, check_left_out
from trunkline.router.api.marked_turns import (
    KnownMarks,
    MarkedConversation,
    MarkMemory,
    mark_conversation,
    part_spans,
)
from trunkline.router.api.module_prompts import Placed, placed_prompt
from trunkline.router.api.prompting import Rendering, encode_text, has_modules, remembered_prompt
from trunkline.router.api.requests import check_length
from trunkline.router.api.turn import SessionTurn
from trunkline.router.jobs.request_models import ChatRequest, Message
from trunkline.router.request_context import current
from trunkline.router.service import RouterService
from trunkline.router.tenancy.auth import cache_salt
from trunkline.router.text.conversation_memory import beginning
from trunkline.router.text.edits import Edit, plan_edits
from trunkline.router.text.marked_text import PlacedText
from trunkline.router.text.token_places import RemainingText, TokenPlaces
from trunkline.router.text.tokenizer import OFF_LOOP_CHARACTERS
from trunkline.router.text.truncation import TokenSpan, merge_spans, span_tokens
from trunkline.router.tools.plan import ToolPlan
from trunkline.router.tools.readings import reads_same


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

    marks = _memory_of(service, body)
    marking = marks.marking() if edits else None
    shown = "" if marking is None else await write(marking.messages)
    placed = None if marking is None else marks.read(marking, shown)
    text = await write(body.messages) if placed is None else placed.text
    check_length(len(text), "messages")
    removals = await plan_removals(body, text, write, ends)
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

    def place(rest: str, ids: Sequence[int]) -> TokenPlaces:
        return service.tokenizer.places(rest, ids, add_special_tokens=False, stays=True)[1]

    def choose() -> EditedPrompt:
        if removals or placed is None or remembered is None:
            own, places = service.tokenizer.places(text, tokens, add_special_tokens=special, stays=stays)
            whole = EditedPrompt(
                text, own, dropped_spans(RemainingText(text, places), removals), remembered=remembered
            )
            spans = _spans(placed, places)
        else:
            whole = EditedPrompt(text, tokens, (), remembered=remembered)
            spans = part_spans(text, tokens, placed, marks.known, remembered.reuse.places, place)
        if marking is None or placed is None:
            return whole
        if remembered is not None:
            marks.keep(KnownMarks(marking, shown, placed, remembered.tokens, spans))
        return cleared(whole, spans, marking.conversation, placed, edits)

    return await service.large_requests.run(choose) if len(text) > OFF_LOOP_CHARACTERS else choose()


def _spans(placed: PlacedText | None, places: TokenPlaces) -> list[TokenSpan]:
    return [] if placed is None else [places.within(each.start, each.stop) for each in placed.places]


def _memory_of(service: RouterService, body: ChatRequest) -> MarkMemory:
    memory = current().conversations
    begins = service.model_name, beginning(message.content for message in body.messages)
    return MarkMemory(None if memory is None else memory.turns, cache_salt(body.cache_salt), begins, body.messages)


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
    marking = mark_conversation(messages) if edits else None
    placed = None if marking is None else marking.marks.read(await write(marking.messages))
    removals = await plan_removals(body, text, write, None)
    tokens = [token for part in parts for token in part.tokens]
    before = whole.prompt.prompt_tokens - len(tokens)
    if turn is not None:
        tokens = await turn.tokens_of_parts(parts)

    def choose() -> EditedPrompt:
        own, places = service.tokenizer.places(text, tokens, add_special_tokens=False, stays=True)
        edited = EditedPrompt(text, own, dropped_spans(RemainingText(text, places), removals), before=before)
        if marking is None or placed is None or placed.text != text:
            return edited
        return cleared(edited, _spans(placed, places), marking.conversation, placed, edits)

    return await service.large_requests.run(choose) if len(text) > OFF_LOOP_CHARACTERS else choose()


def cleared(
    whole: EditedPrompt,
    placed_spans: Sequence[TokenSpan],
    conversation: MarkedConversation,
    placed: PlacedText,
    edits: Sequence[Edit],
) -> EditedPrompt:
    """Return a prompt without what edits clear besides. `placed_spans`: the tokens of each place of `placed`."""
    spans: list[list[TokenSpan]] = [[] for _ in conversation.parts]
    for place, span in zip(placed.places, placed_spans, strict=True):
        spans[place.part].append(span)
    tokens = [_seen(own, whole.drops) for own in spans]
    seen = whole.before + len(whole.tokens) - span_tokens(whole.drops)
    plan = plan_edits(edits, conversation.parts, conversation.uses, tokens, seen)
    chosen = [span for part in plan.cleared for span in spans[part]]
    return whole._replace(drops=merge_spans([*whole.drops, *chosen]), applied=plan.applied)


def _seen(spans: Sequence[TokenSpan], dropped: Sequence[TokenSpan]) -> int:
    """Return how many tokens of `spans` are not in `dropped`, which is merged."""
    if not dropped and len(spans) == 1:
        return spans[0].stop - spans[0].start
    return span_tokens(merge_spans([*spans, *dropped])) - span_tokens(dropped)
