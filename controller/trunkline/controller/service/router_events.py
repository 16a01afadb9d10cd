"""What a router's message is to the engine. Pure."""

from __future__ import annotations

from trunkline.controller.engine.events import (
    AbortRequest,
    AnswerTold,
    DropCache,
    Event,
    ForgetPrompt,
    GoesOnElsewhere,
)
from trunkline.controller.engine.validation import (
    is_request_number,
    problem_of_prefetch,
    problem_of_told,
    problem_of_went_on,
    request_of_prefetch,
)
from trunkline.controller.messages import Abort, FlushCache, Forget, Told, WentOn
from trunkline.controller.service.routers import ROUTER_SHIFT

Note = Abort | Told | WentOn | FlushCache | Forget
"""A message that needs no answer of the service: what makes no sense is ignored."""


def event_of(router: int, note: Note, vocab_size: int) -> Event | None:
    """Return the engine's event for a message of the router with this index; None: it makes no sense.

    Args:
        vocab_size: 0 if unknown.
    """
    match note:
        case Abort() if is_request_number(note.request):
            return AbortRequest(router << ROUTER_SHIFT | note.request, note.sample)
        case Told() if not problem_of_told(note):
            return AnswerTold(router << ROUTER_SHIFT | note.request, note.ended)
        case WentOn() if not problem_of_went_on(note):
            return GoesOnElsewhere(note.names, note.prompt_tokens)
        case FlushCache():
            return DropCache((router, note.ticket))
        case Forget() if not problem_of_prefetch(note, vocab_size):
            return ForgetPrompt(request_of_prefetch(note))
    return None
