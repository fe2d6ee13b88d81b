"""The objects of the API as they are sent, for the OpenAPI document and as the last check of what leaves.

Absent values are null, never left out: clients that read plain JSON find every field of OpenAI's objects.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from storage.models import BatchStatus


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileObject(_Answer):
    """bytes: of the contents. Instants are Unix seconds."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    status_details: str | None


class FileList(_Answer):
    object: Literal["list"]
    data: list[FileObject]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedFile(_Answer):
    id: str
    object: Literal["file"]
    deleted: bool


class BatchErrorEntry(_Answer):
    """What is wrong with an input. line: of the file, counted from 1; null: the file as a whole."""

    code: str
    message: str
    param: str | None
    line: int | None


class BatchErrors(_Answer):
    object: Literal["list"]
    data: list[BatchErrorEntry]


class RequestCounts(_Answer):
    """Lines. Those that were cancelled or expired before they ran are in `total` alone."""

    total: int
    completed: int
    failed: int


class InputTokensDetails(_Answer):
    cached_tokens: int


class OutputTokensDetails(_Answer):
    reasoning_tokens: int


class BatchUsage(_Answer):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Forecast(_Answer):
    """What is expected of an unfinished batch. Null: nothing is known yet.

    requests_per_s: of the last minute's results. remaining_s: until its last line. completes_at: null while nobody
    works on it. total_tokens: of all its lines when it has ended, prompts and answers.
    """

    requests_per_s: float | None
    remaining_s: float | None
    completes_at: int | None
    total_tokens: int | None


class BatchExtensions(_Answer):
    """What this server knows of a batch beyond OpenAI's object."""

    name: str | None
    priority: int
    is_paused: bool
    invalid_lines: Literal["fail_batch", "fail_line"]
    door: Literal["cli", "http", "celery", "inbox"]
    forecast: Forecast | None


class BatchObject(_Answer):
    """Instants are Unix seconds. promptmill: this server's extensions."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str | None
    completion_window: str | None
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, Any] | None
    promptmill: BatchExtensions


class BatchList(_Answer):
    object: Literal["list"]
    data: list[BatchObject]
    has_more: bool
    first_id: str | None
    last_id: str | None


class ModelObject(_Answer):
    """workers: that are ready to answer for it; an extension."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    workers: int


class ModelList(_Answer):
    object: Literal["list"]
    data: list[ModelObject]


class RetriedBatch(_Answer):
    """retried: lines that run again; 0: none could, and nothing changed."""

    retried: int
    batch: BatchObject


class ResultPage(_Answer):
    """data: lines of the output and error files, in the order they landed. cursor: for the next page's `after`."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    has_more: bool
    cursor: int
    status: BatchStatus
    is_final: bool


class RequestRecord(BaseModel):
    """One line with all its attempts. body, response: null unless they were asked for."""

    model_config = ConfigDict(extra="allow", frozen=True)

    id: str
    batch: str
    line: int
    custom_id: str | None
    model: str
    endpoint: str
    tenant: str
    status: str
    submitted_at: float
    finished_at: float | None
    status_code: int | None
    error: dict[str, Any] | None
    attempts: list[dict[str, Any]]
    body: Any
    response: Any
