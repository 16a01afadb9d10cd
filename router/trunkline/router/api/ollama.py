"""Ollama's API: `/api/chat`, `/api/generate`, `/api/embed`, and what is served, for the clients that speak it.

    body, options ─► ChatRequest ─► chat_job ─► Generation ─► AnswerBlocks ─► lines of JSON, or one object
                     CompletionRequest (raw) ─► completion_job ─┘

A request is translated into a chat completion, or with `raw` into a plain completion, and runs as one
(`blocks.py`). Ollama's names of models have a tag: "demo" is listed as "demo:latest", and found under both names.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any, Final

from fastapi import APIRouter
from msgspec import UNSET
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from trunkline.router.api.answer_fields import cache_use, truncation_result
from trunkline.router.api.blocks import AnswerBlocks, Block, BlockChange, as_chat, as_request, session_label
from trunkline.router.api.edited_prompts import edited_prompt
from trunkline.router.api.embeddings import pooled
from trunkline.router.api.model_routes import listed_names
from trunkline.router.api.ollama_content import Message, to_messages
from trunkline.router.api.prompt_batch import start
from trunkline.router.api.prompt_reports import vector_of
from trunkline.router.api.prompting import chat_job, completion_job, encode_text
from trunkline.router.api.requests import check_length, check_model, read_parameters, service_of
from trunkline.router.http.answers import BODY_OUTLET, JsonResponse, LineStream, line, while_connected
from trunkline.router.http.body import beside_loop, validate
from trunkline.router.jobs.job import Job
from trunkline.router.jobs.ollama_models import (
    OLLAMA_CHAT,
    OLLAMA_EMBED,
    OLLAMA_EMBEDDING,
    OLLAMA_GENERATE,
    OLLAMA_SHOW,
    OllamaEmbeddingRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaRequest,
)
from trunkline.router.jobs.pooling_models import EmbeddingRequest
from trunkline.router.jobs.request_models import ChatRequest, CompletionRequest
from trunkline.router.request_context import created_at
from trunkline.router.service import RouterService
from trunkline.router.streams.generation import Generation
from trunkline.router.streams.takers import Outlet
from trunkline.router.telemetry.request_record import arrival
from trunkline.router.text.tool_styles import ToolStyle
from trunkline.router.tools.plan import ToolPlan, prepare_tools

routes = APIRouter()
Object = dict[str, Any]
API_VERSION: Final = "0.12.6"
"""The version of Ollama's API that the answers here follow: clients look at it before they use newer fields."""
_TAG: Final = ":latest"


# -- what is served


@routes.head("/api/version", include_in_schema=False)
@routes.get("/api/version")
async def version(request: Request) -> Response:
    """Return the version of Ollama's API that is spoken here, and that of the program."""
    return JsonResponse({"version": API_VERSION, "trunkline": service_of(request).version})


@routes.head("/api/tags", include_in_schema=False)
@routes.get("/api/tags")
async def tags(request: Request) -> Response:
    """List the names under which models are served."""
    service = service_of(request)
    cards = [_card(service.of_model(name), name) for name in listed_names(service)]
    modified = {"modified_at": _time(service.created)}
    return JsonResponse({"models": [card | modified for card in cards]})


@routes.head("/api/ps", include_in_schema=False)
@routes.get("/api/ps")
async def running(request: Request) -> Response:
    """List the models that are loaded: all that are served, for as long as the server runs."""
    service = service_of(request)
    models = []
    for name in listed_names(service):
        found = service.of_model(name)
        more = {"size_vram": 0, "expires_at": "9999-12-31T23:59:59Z", "context_length": found.limits.max_context}
        models.append(_card(found, name) | more)
    return JsonResponse({"models": models})


@routes.post("/api/show")
async def show(request: Request) -> Response:
    """Return what a model is, and what it can do."""
    body = await read_parameters(request, OLLAMA_SHOW)
    service = _find(service_of(request), body.model)
    tokenizer = service.tokenizer
    family = _family(service)
    capabilities = ["completion"]
    if tokenizer.has_chat_template:
        capabilities += ["tools"] + (["thinking"] if tokenizer.reasoning is not None else [])
    info = {
        "general.architecture": family,
        "general.basename": service.model_name,
        f"{family}.context_length": service.limits.max_context,
        f"{family}.embedding_length": tokenizer.files.hidden_size,
        f"{family}.vocab_size": tokenizer.vocab_size,
    }
    return JsonResponse(
        {
            "modelfile": "",
            "parameters": "",
            "template": tokenizer.files.chat_template or "",
            "details": _details(service),
            "model_info": info,
            "capabilities": capabilities,
            "modified_at": _time(service.created),
        }
    )


def _find(service: RouterService, model: str | None) -> RouterService:
    """Return the service of a model.

    Raises:
        ApiError: 404.
    """
    plain = model.removesuffix(_TAG) if model is not None else None
    is_known = plain is not None and (plain in service.models.names or service.models.adapter(plain) is not None)
    return check_model(service, plain if is_known else model)


def _family(service: RouterService) -> str:
    return service.tokenizer.files.architecture or "unknown"


def _details(service: RouterService) -> Object:
    family = _family(service)
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": "",
    }


def _card(service: RouterService, name: str) -> Object:
    """Return what lists say of a model. The router does not know the size of its weights."""
    tagged = name if ":" in name else name + _TAG
    identity = f"{service.model_name} {service.tokenizer.fingerprint}"
    digest = hashlib.sha256(identity.encode()).hexdigest()
    return {"name": tagged, "model": tagged, "size": 0, "digest": digest, "details": _details(service)}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# -- answers


@routes.post("/api/chat")
async def chat(request: Request) -> Response:
    """Answer a conversation, streamed or not."""
    service = service_of(request)
    service.check_admission()
    body = await read_parameters(request, OLLAMA_CHAT)
    service = _find(service, body.model)
    if not body.messages:
        return _looked_up(service, body, {"message": {"role": "assistant", "content": ""}})

    def translated() -> tuple[ChatRequest, ToolPlan]:
        tokenizer = service.tokenizer
        plan = prepare_tools(body.tools, None, None, tokenizer.tool_style, tokenizer.reasoning)
        return _chat(request, body, to_messages(body.messages)), plan

    translation, plan = await beside_loop(request, translated)
    job = await chat_job(service, translation, plan, edited=await edited_prompt(service, translation, plan))
    return await _answer(request, service, _ChatAnswer(service, body, plan), job)


@routes.post("/api/generate")
async def generate(request: Request) -> Response:
    """Answer a prompt, streamed or not; or continue it."""
    service = service_of(request)
    service.check_admission()
    body = await read_parameters(request, OLLAMA_GENERATE)
    service = _find(service, body.model)
    if not body.prompt:
        return _looked_up(service, body, {"response": ""})
    if body.raw:
        plan = ToolPlan(ToolStyle())
        job = await _raw_job(request, service, body)
    else:
        turns = [{"role": "system", "content": body.system}] if body.system else []
        turns.append({"role": "user", "content": body.prompt})
        plan = prepare_tools(None, None, None, service.tokenizer.tool_style, service.tokenizer.reasoning)
        chat = _chat(request, body, turns)
        job = await chat_job(service, chat, plan, edited=await edited_prompt(service, chat, plan))
    return await _answer(request, service, _GenerateAnswer(service, body, plan), job)


def _looked_up(service: RouterService, body: OllamaRequest, shape: Object) -> Response:
    """Return the answer to a request that has nothing to answer: clients load and unload models by it."""
    reason = "unload" if body.keep_alive in (0, "0") else "load"
    head = {"model": body.model or service.model_name, "created_at": _time(created_at())}
    return JsonResponse({**head, **shape, "done": True, "done_reason": reason})


def _chat(request: Request, body: OllamaRequest, messages: list[Message]) -> ChatRequest:
    fields: Object = {"messages": messages, "session_id": session_label(request, body), **body.translated()}
    if messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
        fields["continue_final_message"] = True
    return as_chat(body, fields)


async def _raw_job(request: Request, service: RouterService, body: OllamaGenerateRequest) -> Job:
    """Return the job that continues a prompt; a completion's own default would end it after 16 tokens."""
    context = service.limits.max_context
    fields = body.translated()
    check_length(len(body.prompt), "prompt")
    tokens = await encode_text(
        service.tokenizer,
        body.prompt,
        None if "truncation" in fields else service.limits,
        add_special_tokens=True,
        param="prompt",
        keep=body.prompt_slice,
    )
    room = max(1, context - len(tokens))
    fields |= {"prompt": tokens, "max_tokens": min(room, body.limit or room)}
    fields["session_id"] = session_label(request, body)
    fields.pop("enable_thinking", None)
    completion = as_request(CompletionRequest, body, fields)
    completion.truncate_prompt_tokens = None  # it has been cut
    return await completion_job(service, completion, tokens)


async def _answer(request: Request, service: RouterService, writer: _Answer, job: Job) -> Response:
    if writer.body.limit is not None:
        job = replace(job, max_tokens=min(job.max_tokens, writer.body.limit))
    generation = await start(service, job, request)
    if writer.body.stream is not False:
        return LineStream(generation, writer.lines(generation, request.scope.get(BODY_OUTLET)))
    try:
        return JsonResponse(await while_connected(request, writer.whole(generation)))
    finally:
        generation.close()


class _Answer:
    """Writes the answer to one request, whole or as lines."""

    def __init__(self, service: RouterService, body: OllamaRequest, plan: ToolPlan) -> None:
        self.body = body
        self._plan = plan
        self._model = body.model or service.model_name
        self._created_at = _time(created_at())

    def shape(self, text: str, thought: str, calls: list[Object]) -> Object:
        """Return a piece of the answer as fields of a line."""
        raise NotImplementedError

    async def whole(self, generation: Generation) -> Object:
        """Return the whole answer."""
        answer = self._blocks(generation)
        blocks = await answer.whole()
        text = "".join([block.text for block in blocks if not block.is_call and not block.is_thought])
        calls = [call for index, block in enumerate(answer.blocks.calls) for call in _calls(block, index)]
        return self._end(answer, self.shape(text, answer.thought, calls))

    async def lines(self, generation: Generation, outlet: Outlet | None) -> AsyncIterator[bytes]:
        """Yield the answer as lines, but for those that go straight to `outlet`. A call is a line once it is
        complete."""
        answer = self._blocks(generation)

        def encode(changes: list[BlockChange]) -> bytes:
            parts = []
            for change in changes:
                block = change.block
                if block.is_call and change.kind == "close":
                    calls = _calls(block, answer.blocks.calls.index(block))
                    parts += [self.shape("", "", calls)] if calls else []
                elif not block.is_call and change.text:
                    is_thought = block.is_thought
                    parts.append(self.shape("" if is_thought else change.text, change.text * is_thought, []))
            return b"".join([line({**self._head(), **part, "done": False}) for part in parts])

        async for written in answer.encoded(encode, outlet):
            yield written
        yield line(self._end(answer, self.shape("", "", [])))

    def _blocks(self, generation: Generation) -> AnswerBlocks:
        return AnswerBlocks(generation, self._plan, at_least_one=False, id_prefix="call_")

    def _head(self) -> Object:
        return {"model": self._model, "created_at": self._created_at}

    def _end(self, answer: AnswerBlocks, shape: Object) -> Object:
        generation = answer.generation
        total = asyncio.get_running_loop().time() - arrival()
        extras = {"cache": cache_use(generation), "truncation": truncation_result(generation)}
        warnings = list(self.body.warnings or ())
        broken = [block.name for block in answer.blocks.calls if block.arguments() is None]
        warnings += [f"a call of {name[:64]!r} was left out: its arguments are no JSON object" for name in broken]
        return {
            **self._head(),
            **shape,
            "done": True,
            "done_reason": answer.finish,
            "total_duration": _nanoseconds(total),
            "load_duration": 0,
            "prompt_eval_count": generation.job.seen_tokens,
            "prompt_eval_duration": _nanoseconds(generation.prefill_s),
            "eval_count": generation.output_tokens,
            "eval_duration": _nanoseconds(generation.decode_s),
            **{name: value for name, value in extras.items() if value is not UNSET},
            **({"warnings": warnings} if warnings else {}),
        }


class _ChatAnswer(_Answer):
    """An answer of `/api/chat`."""

    def shape(self, text: str, thought: str, calls: list[Object]) -> Object:
        """As in `_Answer`."""
        message: Object = {"role": "assistant", "content": text}
        if thought:
            message["thinking"] = thought
        if calls:
            message["tool_calls"] = calls
        return {"message": message}


class _GenerateAnswer(_Answer):
    """An answer of `/api/generate`."""

    def shape(self, text: str, thought: str, calls: list[Object]) -> Object:
        """As in `_Answer`; there are no calls."""
        return {"response": text, "thinking": thought} if thought else {"response": text}


def _calls(block: Block, index: int) -> list[Object]:
    """Return a complete call as `tool_calls`; empty if its arguments are no JSON object: clients carry out what
    they get. `index`: its index among the answer's calls."""
    arguments = block.arguments()
    if arguments is None:
        return []
    function = {"index": index, "name": block.name, "arguments": arguments}
    return [{"id": block.call_id, "function": function}]


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


# -- embeddings


@routes.post("/api/embed")
async def embed(request: Request) -> Response:
    """Return the embeddings of texts."""
    service = service_of(request)
    service.check_admission()
    body = await read_parameters(request, OLLAMA_EMBED)
    service = _find(service, body.model)
    fields: Object = {"input": body.input, "dimensions": body.dimensions}
    if body.truncate is not False:
        fields |= {"truncate_prompt_tokens": service.limits.max_context - 1, "truncation_side": "right"}
    vectors, tokens = await while_connected(request, _vectors(service, body, fields))
    answer = {
        "model": body.model or service.model_name,
        "embeddings": vectors,
        "total_duration": _nanoseconds(asyncio.get_running_loop().time() - arrival()),
        "load_duration": 0,
        "prompt_eval_count": tokens,
        **({"warnings": body.warnings} if body.warnings else {}),
    }
    return JsonResponse(answer)


@routes.post("/api/embeddings")
async def embeddings(request: Request) -> Response:
    """Return the embedding of a text: the older form."""
    service = service_of(request)
    service.check_admission()
    body = await read_parameters(request, OLLAMA_EMBEDDING)
    service = _find(service, body.model)
    fields: Object = {
        "input": body.prompt,
        "truncate_prompt_tokens": service.limits.max_context - 1,
        "truncation_side": "right",
    }
    [vector], _ = await while_connected(request, _vectors(service, body, fields))
    return JsonResponse({"embedding": vector, **({"warnings": body.warnings} if body.warnings else {})})


async def _vectors(
    service: RouterService, body: OllamaEmbedRequest | OllamaEmbeddingRequest, fields: Object
) -> tuple[list[list[float]], int]:
    """Return the embeddings of a request, of length 1, and the number of tokens that were read.

    Args:
        fields: What the translated request has besides the common fields.
    """
    shared = {name: getattr(body, name) for name in ("pooling", "priority", "cache_salt")}
    given = {name: value for name, value in {**shared, **fields}.items() if value is not None}
    translated = validate(EmbeddingRequest, given)
    reports = await pooled(service, translated)
    vectors = [vector_of(report, translated.dimensions).tolist() for _, report in reports]
    return vectors, sum(generation.job.seen_tokens for generation, _ in reports)
