"""`POST /tokenize` and `POST /detokenize`, in vLLM's form."""

from __future__ import annotations

import asyncio
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from trunkline.router.api.body import read_request
from trunkline.router.api.common import check_length, check_model, encode_messages, encode_text, service_of
from trunkline.router.api.models import DetokenizeRequest, TokenizeRequest
from trunkline.router.api.responses import JsonResponse
from trunkline.router.api.unsupported import check_tokenize
from trunkline.router.sampling import check_ids
from trunkline.router.tools.plan import prepare_tools

routes = APIRouter()
_OFF_LOOP_TOKENS: Final = 16_384


@routes.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """Token ids of a text or a conversation, exactly as a completion would use them."""
    service = service_of(request)
    body = await read_request(request, TokenizeRequest, service.config.max_body_bytes, check_tokenize)
    check_model(service, body.model)
    if body.messages is not None:
        check_length(sum(len(message.content) for message in body.messages), "messages")
        tokens = await encode_messages(
            service,
            body.messages,
            None,
            add_generation_prompt=body.add_generation_prompt,
            extra=body.chat_template_kwargs,
            add_special_tokens=bool(body.add_special_tokens),
            tools=prepare_tools(body.tools, None, None, service.tokenizer.tool_style).template_tools,
        )
    else:
        check_length(len(body.prompt or ""), "prompt")
        tokens = await encode_text(
            service.tokenizer,
            body.prompt or "",
            None,
            add_special_tokens=body.add_special_tokens is not False,
            param="prompt",
        )
    strings = [service.tokenizer.token_string(token) for token in tokens] if body.return_token_strs else None
    return JsonResponse(
        {
            "count": len(tokens),
            "max_model_len": service.limits.max_context,
            "tokens": tokens,
            "token_strs": strings,
        }
    )


@routes.post("/detokenize")
async def detokenize(request: Request) -> Response:
    """Text of token ids, special tokens included."""
    service = service_of(request)
    body = await read_request(request, DetokenizeRequest, service.config.max_body_bytes)
    check_model(service, body.model)
    vocab_size = service.limits.vocab_size

    def decode() -> str:
        check_ids(body.tokens, vocab_size, "tokens")
        return service.tokenizer.decode(body.tokens, skip_special_tokens=False)

    text = await asyncio.to_thread(decode) if len(body.tokens) > _OFF_LOOP_TOKENS else decode()
    return JsonResponse({"prompt": text})
