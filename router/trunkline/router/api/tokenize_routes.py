"""`POST /tokenize` and `POST /detokenize`, in vLLM's form.

Long answers are encoded in slices while they are sent. A million token ids with their texts would otherwise hold
the event loop for a tenth of a second, and be in memory twice.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Final

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from trunkline.router.api.loop_budget import LoopBudget
from trunkline.router.api.prompting import Rendering, encode_text
from trunkline.router.api.requests import check_length, check_model, read_parameters, service_of
from trunkline.router.http.answers import JsonResponse
from trunkline.router.http.body import read_request
from trunkline.router.jobs.job import check_ids
from trunkline.router.jobs.request_models import TOKENIZE, DetokenizeRequest
from trunkline.router.tenancy.auth import cache_salt
from trunkline.router.text.detokenizer import make_detokenizer
from trunkline.router.text.tokenizer import Tokenizer
from trunkline.router.tools.plan import prepare_tools
from trunkline.router.tools.readings import reads_same

routes = APIRouter()
_SLICE_TOKENS: Final = 2048
"""Number of tokens in a slice of an answer. Encoding a slice takes a few milliseconds."""
_SLICED_TOKENS: Final = 16_384
"""Number of tokens above which an answer is encoded in slices."""
_encode = msgspec.json.Encoder().encode


@routes.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """Return the token ids of a text or a conversation, as a completion would use them."""
    service = service_of(request)
    body = await read_parameters(request, TOKENIZE)
    service = check_model(service, body.model)
    if body.messages is not None:
        check_length(sum(len(message.content) for message in body.messages), "messages")
        tokenizer = service.tokenizer
        plan = prepare_tools(body.tools, None, None, tokenizer.tool_style, tokenizer.reasoning)
        continues = bool(body.continue_final_message)
        begins = body.add_generation_prompt and not continues
        rendering = Rendering(
            begins, extra=body.chat_template_kwargs, tools=plan.template_tools, continues=continues
        )
        text, param, add_special_tokens = await rendering.text(service, body.messages), "messages", False
    else:
        text, param, add_special_tokens, plan = body.prompt or "", "prompt", True, None
        check_length(len(text), param)
    if body.add_special_tokens is not None:
        add_special_tokens = body.add_special_tokens
    tokens: Sequence[int]
    prompts, salt = service.model.remembered, cache_salt(None)
    if plan is not None and prompts.is_on and not add_special_tokens:
        tokens = (await prompts.encoded(text, salt, prompts.known(text, salt, reads_same(plan)))).ids
    else:
        tokens = await encode_text(
            service.tokenizer, text, None, add_special_tokens=add_special_tokens, param=param
        )
    head = {"count": len(tokens), "max_model_len": service.limits.max_context}
    strings = service.tokenizer if body.return_token_strs else None
    if len(tokens) > _SLICED_TOKENS:
        return StreamingResponse(_written_tokens(head, tokens, strings), media_type=JsonResponse.media_type)
    return JsonResponse({**head, "tokens": list(tokens), "token_strs": strings and _strings(strings, tokens)})


@routes.post("/detokenize")
async def detokenize(request: Request) -> Response:
    """Return the text of token ids, including special tokens.

    For many ids it is the text of a completion with these tokens: each byte that is not text becomes U+FFFD
    (`detokenizer.py`). The tokenizer itself, used for few ids, may replace good bytes beside bad ones.
    """
    service = service_of(request)
    body = await read_request(request, DetokenizeRequest, service.config.max_body_bytes)
    service = check_model(service, body.model)
    vocab_size, budget = service.limits.vocab_size, LoopBudget()
    for part in _slices(body.tokens):
        check_ids(part, vocab_size, "tokens")
        await budget.yield_if_spent()
    if len(body.tokens) > _SLICED_TOKENS:
        return StreamingResponse(_written_text(service.tokenizer, body.tokens), media_type=JsonResponse.media_type)
    return JsonResponse({"prompt": service.tokenizer.decode(body.tokens, skip_special_tokens=False)})


def _slices(tokens: Sequence[int]) -> Iterator[Sequence[int]]:
    return (tokens[start : start + _SLICE_TOKENS] for start in range(0, len(tokens), _SLICE_TOKENS))


def _strings(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    return [tokenizer.token_string(token) for token in tokens]


async def _written_tokens(
    head: dict[str, Any], tokens: Sequence[int], tokenizer: Tokenizer | None
) -> AsyncIterator[bytes]:
    """Yield the answer with `tokens`, and with their strings if there is a `tokenizer`."""
    budget = LoopBudget()
    yield _encode(head)[:-1] + b',"tokens":['
    separator = b""
    for part in _slices(tokens):
        yield separator + _encode(part)[1:-1]
        separator = b","
        await budget.yield_if_spent()
    yield b'],"token_strs":' + (b"null" if tokenizer is None else b"[")
    if tokenizer is not None:
        separator = b""
        for part in _slices(tokens):
            yield separator + _encode(_strings(tokenizer, part))[1:-1]
            separator = b","
            await budget.yield_if_spent()
        yield b"]"
    yield b"}"


async def _written_text(tokenizer: Tokenizer, tokens: Sequence[int]) -> AsyncIterator[bytes]:
    """Yield the answer with the text of `tokens`."""
    detokenizer = make_detokenizer(tokenizer.vocabulary, skip_special_tokens=False, at_start=True)
    budget = LoopBudget()
    yield b'{"prompt":"'
    for part in _slices(tokens):
        yield _encode("".join(map(detokenizer.feed, part)))[1:-1]
        await budget.yield_if_spent()
    yield _encode(detokenizer.flush())[1:-1] + b'"}'
