"""`/v1/files`: files of a tenant, such as inputs and results of batches, as in OpenAI's API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Final, Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from trunkline.kvstore.records import StoreAwayError
from trunkline.router.api.paging import answer_of, choice_of, components_of, make_page, page_of, page_parameters
from trunkline.router.api.requests import service_of
from trunkline.router.api.upload import FormReader
from trunkline.router.errors import bad_value
from trunkline.router.http.answers import JsonResponse
from trunkline.router.service import RouterService
from trunkline.router.stores.file_store import PREFIX, FileInfo, StoredFile
from trunkline.router.stores.owned_records import store_errors
from trunkline.router.tenancy.auth import current_identity

routes = APIRouter()
_PURPOSES: Final = ("batch", "user_data", "evals", "assistants", "fine-tune", "vision")
"""Purposes that clients may give. Only files for batches are read by the server."""
_PURPOSES_LISTED: Final = (*_PURPOSES, "batch_output")
_PURPOSE: Final = {"name": "purpose", "in": "query", "schema": {"type": "string", "enum": list(_PURPOSES_LISTED)}}
EXPIRY_S_MIN: Final = 3600
EXPIRY_S_MAX: Final = 2_592_000
_FORM: Final = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "properties": {
                    "file": {"type": "string", "format": "binary"},
                    "purpose": {"type": "string", "enum": list(_PURPOSES)},
                    "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                    "expires_after[seconds]": {
                        "type": "integer",
                        "minimum": EXPIRY_S_MIN,
                        "maximum": EXPIRY_S_MAX,
                    },
                },
                "required": ["file", "purpose"],
            }
        }
    },
}


class FileObject(msgspec.Struct, kw_only=True):
    """A file in answers to clients. Times are Unix time in seconds."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    """Time at which the file is deleted; files without `expires_after` are kept longer whenever they are read."""
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"


class FileList(msgspec.Struct, kw_only=True):
    """A page of files, the newest first."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(msgspec.Struct, kw_only=True):
    """The answer to the deletion of a file."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


SCHEMAS: Final = components_of(FileObject, FileList, FileDeleted)
"""JSON schemas of the answers, for the OpenAPI document."""


@routes.post("/v1/files", responses=answer_of(FileObject), openapi_extra={"requestBody": _FORM})
async def upload_file(request: Request) -> JsonResponse:
    """Store a file. It is written while it arrives."""
    service, owner = service_of(request), current_identity().owner
    config = service.config
    form = FormReader(request, "file", config.file_bytes_max, config.body_seconds)
    file_id = service.files.draw_id()
    parts: list[str] = []
    with store_errors("file", file_id):
        try:
            async with aclosing(form.parts()) as contents:
                async for content in contents:
                    parts.append(await service.files.add_part(owner, file_id, content))
            stored = await service.files.create(owner, file_id, _info_of(form, parts))
        except BaseException:  # the client left, too: no request will ask for these parts
            await _drop(service, owner, parts)
            raise
    return JsonResponse(_object(stored))


async def _drop(service: RouterService, owner: str, parts: list[str]) -> None:
    """Delete the parts of a file that is not made. If the store is away, they expire."""
    try:
        await service.files.drop_parts(owner, parts)
    except StoreAwayError:
        return


def _info_of(form: FormReader, parts: list[str]) -> FileInfo:
    """Return the file that a form describes.

    Raises:
        ApiError: 400, a field is missing or wrong.
    """
    if form.filename is None:
        raise bad_value("file", "`file` is required", code="missing_required_parameter")
    purpose = form.fields.get("purpose")
    if purpose is None:
        raise bad_value("purpose", "`purpose` is required", code="missing_required_parameter")
    if purpose not in _PURPOSES:
        raise bad_value("purpose", f"`purpose` is {purpose[:80]!r}; allowed are {', '.join(_PURPOSES)}")
    names = {"anchor": "expires_after[anchor]", "seconds": "expires_after[seconds]"}
    given = {name: form.fields[field] for name, field in names.items() if field in form.fields}
    ttl = expiry_after(given, "expires_after", "created_at") if given else 0.0
    return FileInfo(name=form.filename, purpose=purpose, bytes=form.file_bytes, parts=parts, ttl=ttl)


def expiry_after(given: Mapping[str, object], param: str, anchor: str) -> float:
    """Return the seconds of an `expires_after`.

    Raises:
        ApiError: 400, it is wrong.
    """
    if given.get("anchor") != anchor:
        raise bad_value(param, f"`{param}.anchor` is {str(given.get('anchor'))[:80]!r}; it must be {anchor!r}")
    seconds = str(given.get("seconds", ""))
    is_number = seconds.isascii() and seconds.isdigit() and len(seconds) < 12
    if not is_number or not EXPIRY_S_MIN <= int(seconds) <= EXPIRY_S_MAX:
        raise bad_value(
            param, f"`{param}.seconds` is {seconds[:80]!r}; allowed are {EXPIRY_S_MIN} to {EXPIRY_S_MAX}"
        )
    return float(seconds)


@routes.get(
    "/v1/files",
    responses=answer_of(FileList),
    openapi_extra={"parameters": [*page_parameters("desc"), _PURPOSE]},
)
async def list_files(request: Request) -> JsonResponse:
    """List the tenant's files, page by page, the newest first; with `purpose`, only those of a purpose."""
    page = page_of(request, "desc", prefix=PREFIX)
    purpose = choice_of(request, "purpose", "", _PURPOSES_LISTED)
    service, owner = service_of(request), current_identity().owner
    found: list[StoredFile] = []
    after = page.after
    with store_errors("file", ""):
        while len(found) <= page.limit:
            more = await service.files.page(owner, after, page.limit + 1)
            found += [file for file in more if purpose in ("", file.info.purpose)]
            if len(more) <= page.limit:
                break
            after = more[-1].id
    return JsonResponse(make_page(FileList, [_object(file) for file in found], page.limit))


@routes.get("/v1/files/{file_id}", responses=answer_of(FileObject))
async def get_file(request: Request, file_id: str) -> JsonResponse:
    """Describe a file."""
    with store_errors("file", file_id):
        return JsonResponse(_object(await service_of(request).files.get(current_identity().owner, file_id)))


@routes.get(
    "/v1/files/{file_id}/content",
    responses={200: {"description": "The file's content", "content": {"application/octet-stream": {}}}},
)
async def get_content(request: Request, file_id: str) -> Response:
    """Return a file's content. It is read from the store while it is sent."""
    files, owner = service_of(request).files, current_identity().owner
    with store_errors("file", file_id):
        stored = await files.get(owner, file_id)
        contents = files.content(owner, stored)
        first = await anext(contents, b"")  # before the status is sent: the store may be away

    async def sent() -> AsyncIterator[bytes]:
        yield first
        async for content in contents:
            yield content

    headers = {"Content-Length": str(stored.info.bytes), "X-Content-Type-Options": "nosniff"}
    headers["Content-Disposition"] = "attachment"
    return StreamingResponse(sent(), headers=headers, media_type="application/octet-stream")


@routes.delete("/v1/files/{file_id}", responses=answer_of(FileDeleted))
async def delete_file(request: Request, file_id: str) -> JsonResponse:
    """Delete a file."""
    with store_errors("file", file_id):
        await service_of(request).files.delete(current_identity().owner, file_id)
    return JsonResponse(FileDeleted(id=file_id))


def _object(stored: StoredFile) -> FileObject:
    return FileObject(
        id=stored.id,
        bytes=stored.info.bytes,
        created_at=int(stored.created),
        expires_at=int(stored.expires),
        filename=stored.info.name,
        purpose=stored.info.purpose,
    )
