"""`/v1/files`: what batches read and write, as OpenAI's Files API has it.

Uploads stream to the disk. Each file belongs to a tenant; another's is not there.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

from fastapi import APIRouter, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse
from starlette.types import Message, Receive, Scope, Send

from jobs.gateway.errors import ApiError, not_found, render
from jobs.gateway.identity import KnownCaller
from jobs.gateway.schemas import DeletedFile, FileList, FileObject
from jobs.gateway.state import Gateway, TheGateway
from jobs.gateway.uploads import Upload, receive_upload
from jobs.keys import Caller
from jobs.protocol import show
from jobs.quotas import check_storage
from jobs.source import GZIP_MAGIC
from storage import files
from storage.database import Connection
from storage.files import NewUpload
from storage.models import FilePurpose
from storage.queries import FileRow

router = APIRouter(prefix="/v1/files", tags=["files"])

MAX_PAGE = 10_000
LEAST_LIFETIME_S, LONGEST_LIFETIME_S = 3600, 2_592_000
# An upload whose answer was lost is repeated by SDKs within seconds; after a timeout of theirs, within ten minutes.
SAME_UPLOAD_S = 660.0
PUBLIC_ID = re.compile(r"[A-Za-z0-9_-]{1,100}")
# As users see them: OpenAI has one purpose for both kinds of results.
SHOWN_PURPOSES = {
    FilePurpose.BATCH: "batch",
    FilePurpose.BATCH_OUTPUT: "batch_output",
    FilePurpose.BATCH_ERRORS: "batch_output",
}
UPLOAD_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "dependentRequired": {
                        "expires_after[anchor]": ["expires_after[seconds]"],
                        "expires_after[seconds]": ["expires_after[anchor]"],
                    },
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {
                            "type": "integer",
                            "minimum": LEAST_LIFETIME_S,
                            "maximum": LONGEST_LIFETIME_S,
                        },
                    },
                }
            }
        },
    }
}


@router.post("", summary="Upload a batch's input", response_model=FileObject, openapi_extra=UPLOAD_BODY)
async def upload_file(http_request: Request, gateway: TheGateway, caller: KnownCaller) -> dict[str, Any]:
    """JSON Lines, plain. The same upload again within some minutes gives the same file."""
    upload = await receive_upload(
        http_request.headers.get("content-type", ""),
        http_request.stream(),
        gateway.files_dir,
        max_bytes=gateway.settings.gateway.max_upload_bytes,
    )
    return render_file(await run_in_threadpool(_keep, gateway, caller, upload))


@router.get("", summary="List files", response_model=FileList)
def list_files(
    gateway: TheGateway,
    caller: KnownCaller,
    purpose: Annotated[str | None, Query(description="Only files of this purpose.")] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = MAX_PAGE,
    order: Annotated[Literal["asc", "desc"], Query(description="By their creation.")] = "desc",
    after: Annotated[str | None, Query(description="The id of the last file of the page before.")] = None,
) -> dict[str, Any]:
    purposes = [kept for kept, shown in SHOWN_PURPOSES.items() if purpose in (None, shown)]
    with gateway.database.read() as connection:
        behind = None if after is None else _find(connection, caller, after)
        found = files.list_files(
            connection,
            caller.tenant,
            purposes=purposes,
            limit=limit + 1,
            after=behind,
            newest_first=order == "desc",
        )
    return render_list([render_file(row) for row in found[:limit]], has_more=len(found) > limit)


@router.get("/{file_id}", summary="Get a file's description", response_model=FileObject)
def get_file(file_id: str, gateway: TheGateway, caller: KnownCaller) -> dict[str, Any]:
    with gateway.database.read() as connection:
        return render_file(_find(connection, caller, file_id))


@router.get(
    "/{file_id}/content",
    summary="Get a file's contents, whole or a range of them",
    response_class=FileResponse,
    responses={
        200: {"description": "The contents.", "content": {"application/octet-stream": {}}},
        206: {
            "description": "The range asked for, or several of them.",
            "content": {"application/octet-stream": {}, "multipart/byteranges": {}},
        },
        416: {"description": "The range is beyond the end.", "content": {"text/plain": {}}},
    },
)
def get_content(file_id: str, gateway: TheGateway, caller: KnownCaller) -> Response:
    with gateway.database.read() as connection:
        row = _find(connection, caller, file_id)
    missing = ApiError(
        404,
        f"the contents of {row.public_id} are not in this gateway's files folder; gateways and workers of one database "
        "share one folder",
        code="file_content_missing",
        param="id",
    )
    path = gateway.files_dir / row.path
    try:
        stat_result = path.stat()
    except FileNotFoundError:
        raise missing from None
    return StoredFile(
        path,
        missing,
        stat_result=stat_result,
        media_type="application/octet-stream",
        headers={"content-disposition": f"attachment; filename*=utf-8''{quote(row.filename, safe='')}"},
    )


class StoredFile(FileResponse):
    """A file's contents, or `missing` when it is deleted before they are opened.

    The status is held back until the first bytes are read: from then on the open file stays whole, deleted or not.
    """

    def __init__(self, path: Path, missing: ApiError, **options: Any) -> None:
        super().__init__(path, **options)
        self._missing = missing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        held: Message | None = None

        async def send_opened(message: Message) -> None:
            nonlocal held
            if message["type"] == "http.response.start":
                held = message
                return
            if held is not None:
                start, held = held, None
                await send(start)
            await send(message)

        try:
            await super().__call__(scope, receive, send_opened)
        except FileNotFoundError:
            await render(self._missing)(scope, receive, send)


@router.delete("/{file_id}", summary="Delete a file", response_model=DeletedFile)
def delete_file(file_id: str, gateway: TheGateway, caller: KnownCaller) -> dict[str, Any]:
    """A batch that has read it already is not harmed; one that is still validating it fails."""
    with gateway.database.read() as connection:
        row = _find(connection, caller, file_id)
    gateway.database.retry(lambda connection: files.delete_rows(connection, [row.id]))
    files.remove_contents(gateway.files_dir, row.path)
    return {"id": row.public_id, "object": "file", "deleted": True}


def render_file(row: FileRow) -> dict[str, Any]:
    """The file object. `status` is for ever `processed`: a file that is shown lies whole on the disk."""
    return {
        "id": row.public_id,
        "object": "file",
        "bytes": row.bytes,
        "created_at": int(row.created_at),
        "expires_at": None if row.expires_at is None else int(row.expires_at),
        "filename": row.filename,
        "purpose": SHOWN_PURPOSES[FilePurpose(row.purpose)],
        "status": "processed",
        "status_details": None,
    }


def render_list(data: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """A page. `after` of the next one is its `last_id`."""
    return {
        "object": "list",
        "data": data,
        "has_more": has_more,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }


def _find(connection: Connection, caller: Caller, public_id: str) -> FileRow:
    found = files.find_upload(connection, caller.tenant, public_id) if is_public_id(public_id) else None
    if found is None:
        raise not_found("file", public_id)
    return found


def is_public_id(text: str) -> bool:
    """Whether a text could be one of our ids. What is none is not looked up: no database stores each character."""
    return PUBLIC_ID.fullmatch(text) is not None


def _keep(gateway: Gateway, caller: Caller, upload: Upload) -> FileRow:
    """Put an upload's contents in place and write its row. Whatever goes wrong, nothing is left behind."""
    contents = upload.contents
    database = gateway.database
    try:
        lifetime_s = _lifetime(upload.fields, gateway.settings.gateway.file_lifetime_s)
        _check_purpose(upload.fields)
        contents.put_in_place()
        _refuse_compressed(gateway, contents.path)
        now = database.now()
        new = NewUpload(
            public_id=files.make_file_id(),
            tenant=caller.tenant,
            purpose=FilePurpose.BATCH,
            filename=upload.filename,
            path=contents.path,
            bytes=contents.bytes,
            lines=contents.lines,
            sha256=contents.sha256,
            expires_at=now + lifetime_s if lifetime_s else None,
            api_key_id=caller.api_key_id,
        )

        def add(connection: Connection) -> FileRow:
            row = files.add_upload(connection, new, now, same_within_s=SAME_UPLOAD_S)
            if row.public_id == new.public_id:
                check_storage(connection, caller.tenant, row.bytes)
            return row

        row = database.retry(add)
    except BaseException:
        contents.discard()
        raise
    if row.path != contents.path:
        contents.discard()
    return row


def _check_purpose(fields: dict[str, str]) -> None:
    purpose = fields.get("purpose")
    if purpose is None:
        raise ApiError(400, 'purpose is missing; write "batch"', code="missing_required_parameter", param="purpose")
    if purpose != "batch":
        raise ApiError(
            400,
            f'purpose is {show(purpose)}; only input for batches is kept here, write "batch"',
            code="invalid_value",
            param="purpose",
        )


def _lifetime(fields: dict[str, str], default_s: float) -> float:
    """Seconds until a file expires; 0: never."""
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return default_s
    if anchor != "created_at":
        raise ApiError(
            400,
            f'expires_after.anchor is {show(anchor)}; write "created_at"',
            code="invalid_value",
            param="expires_after.anchor",
        )
    if seconds is None or not re.fullmatch(r"\d{1,9}", seconds):
        raise ApiError(
            400,
            f"expires_after.seconds is {show(seconds)}; write a whole number",
            code="invalid_value",
            param="expires_after.seconds",
        )
    if not LEAST_LIFETIME_S <= int(seconds) <= LONGEST_LIFETIME_S:
        raise ApiError(
            400,
            f"expires_after.seconds is {seconds}, which is not within {LEAST_LIFETIME_S} to {LONGEST_LIFETIME_S}",
            code="invalid_value",
            param="expires_after.seconds",
        )
    return float(seconds)


def _refuse_compressed(gateway: Gateway, path: str) -> None:
    """A gzip stream may unpack to a thousand times its size: over HTTP input comes plain."""
    with (gateway.files_dir / path).open("rb") as file:
        if file.read(2) == GZIP_MAGIC:
            raise ApiError(
                400, "the file is compressed with gzip; upload it unpacked", code="compressed_file", param="file"
            )
