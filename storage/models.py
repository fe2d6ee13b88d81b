"""Tables and status enums.

Conventions: columns ending in `_at` are UTC Unix seconds (double precision) by the clock passed in as `now`;
columns ending in `_s` are seconds. JSON is kept as text, written and read by `jobs`; storage does not look inside.
Status columns are written by `storage/transitions.py` alone.

The life of a request: pending (a row) -> queued (its id is in a chunk message) -> running (leased by a worker)
-> completed | failed | cancelled | expired. Its one Result row is written in the transaction that makes it final,
together with the Attempt row that says how it went. A pending request is in one of three partial indexes: fresh ones,
those that wait for their next try (`not_before`), and those that an identical request answers (`same_as`).
"""

from __future__ import annotations

from enum import StrEnum

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Double,
    ForeignKey,
    Index,
    Integer,
    Text,
    UniqueConstraint,
    false,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

# SQLite gives row ids only to INTEGER primary keys; Postgres needs 64 bits for billions of requests.
BigKey = BigInteger().with_variant(Integer, "sqlite")


class BatchStatus(StrEnum):
    """Spelled as in the OpenAI Batch API."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


class RequestStatus(StrEnum):
    PENDING = "pending"
    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


FINAL_REQUEST_STATUSES = (
    RequestStatus.COMPLETED,
    RequestStatus.FAILED,
    RequestStatus.CANCELLED,
    RequestStatus.EXPIRED,
)


class AttemptOutcome(StrEnum):
    """How one try ended. `abandoned`: its lease ran out; `released`: handed back unfinished, by a draining worker."""

    COMPLETED = "completed"
    FAILED = "failed"
    ABANDONED = "abandoned"
    RELEASED = "released"


class WorkerStatus(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


class ServedFrom(StrEnum):
    """Where an answer came from that was not computed for its request."""

    CACHE = "cache"  # an identical request of any batch, by artifact digest, prompt ids and parameters
    DUPLICATE = "duplicate"  # an identical request of the same batch
    JOB = "job"  # the same line of an earlier batch of the same job


class Door(StrEnum):
    """By which way a batch or request came in."""

    CLI = "cli"
    HTTP = "http"
    CELERY = "celery"
    INBOX = "inbox"


class FilePurpose(StrEnum):
    """Spelled as in the OpenAI Files API, the error file apart."""

    BATCH = "batch"
    BATCH_OUTPUT = "batch_output"
    BATCH_ERRORS = "batch_errors"


class Base(DeclarativeBase):
    pass


class Tenant(Base):
    """Who sends work. Tenants that wait share a model's workers in the proportion of their weights."""

    __tablename__ = "tenants"

    name: Mapped[str] = mapped_column(Text, primary_key=True)
    weight: Mapped[float] = mapped_column(Double, default=1.0)
    # Tokens dispatched so far, each divided by the weight of its time: the tenant with the least goes next.
    share_used: Mapped[float] = mapped_column(Double, default=0.0)
    # Quotas. None: no bound.
    max_requests_per_minute: Mapped[int | None] = mapped_column(Integer)
    max_queued_prompt_tokens: Mapped[int | None] = mapped_column(BigInteger)
    max_running_batches: Mapped[int | None] = mapped_column(Integer)
    max_storage_bytes: Mapped[int | None] = mapped_column(BigInteger)


class ApiKey(Base):
    """A key that stands for a tenant. The key itself is shown once and never kept."""

    __tablename__ = "api_keys"

    id: Mapped[int] = mapped_column(BigKey, primary_key=True)
    public_id: Mapped[str] = mapped_column(Text, unique=True)  # key_<24 hex>
    tenant: Mapped[str] = mapped_column(Text, ForeignKey("tenants.name"))
    name: Mapped[str] = mapped_column(Text)  # what a person calls it
    sha256: Mapped[str] = mapped_column(Text, unique=True)  # of the whole key; a key has 256 random bits
    shown_prefix: Mapped[str] = mapped_column(Text)  # its first characters, enough to tell one from another
    created_at: Mapped[float] = mapped_column(Double)
    expires_at: Mapped[float | None] = mapped_column(Double)
    revoked_at: Mapped[float | None] = mapped_column(Double)
    last_used_at: Mapped[float | None] = mapped_column(Double)  # to the minute


class Batch(Base):
    """One user's job: the lines of one input, for one model and endpoint."""

    __tablename__ = "batches"

    id: Mapped[int] = mapped_column(BigKey, primary_key=True)
    public_id: Mapped[str] = mapped_column(Text, unique=True)  # batch_<32 hex>
    tenant: Mapped[str] = mapped_column(Text, default="default")
    name: Mapped[str | None] = mapped_column(Text)
    # SHA-256 over the input's bytes and all that changes its answers: the same command again finds its batch by it.
    fingerprint: Mapped[str] = mapped_column(Text)
    idempotency_key: Mapped[str | None] = mapped_column(Text)
    endpoint: Mapped[str] = mapped_column(Text)
    model: Mapped[str] = mapped_column(Text)
    artifact_digest: Mapped[str | None] = mapped_column(Text)  # of the model asked for, when it was known
    is_interactive: Mapped[bool] = mapped_column(Boolean, server_default=false(), default=False)
    # Its lines may run as soon as they are written, while the rest is still being read (`validating`).
    runs_early: Mapped[bool] = mapped_column(Boolean, server_default=false(), default=False)
    status: Mapped[str] = mapped_column(Text, default=BatchStatus.VALIDATING.value)
    priority: Mapped[int] = mapped_column(Integer, default=0)
    extra_metadata: Mapped[str | None] = mapped_column("metadata", Text)
    error_code: Mapped[str | None] = mapped_column(Text)
    error_message: Mapped[str | None] = mapped_column(Text)
    errors: Mapped[str | None] = mapped_column(Text)  # JSON: what validation found, as in the API's errors.data
    # By which door it came (see Door), with which key, and what the API's own fields say.
    door: Mapped[str] = mapped_column(Text, server_default="cli", default="cli")
    api_key_id: Mapped[int | None] = mapped_column(BigInteger, ForeignKey("api_keys.id"))
    reply_to: Mapped[str | None] = mapped_column(Text)  # the Redis channel on which somebody waits for the answer
    input_file_public_id: Mapped[str | None] = mapped_column(Text)  # also after that file was deleted
    completion_window: Mapped[str | None] = mapped_column(Text)
    output_expires_after_s: Mapped[float | None] = mapped_column(Double)
    # JSON, for whoever validates the input file: what else the caller asked for.
    submit_options: Mapped[str | None] = mapped_column(Text)
    # Who is reading the input file, and until when that holds without a further sign: a dead reader is replaced.
    validated_by: Mapped[str | None] = mapped_column(Text)
    validation_lease_expires_at: Mapped[float | None] = mapped_column(Double)

    # Kept up to date in the transaction that makes a request final, so that progress costs one row read.
    total_requests: Mapped[int] = mapped_column(BigInteger, default=0)
    completed_requests: Mapped[int] = mapped_column(BigInteger, default=0)
    failed_requests: Mapped[int] = mapped_column(BigInteger, default=0)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    cached_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    completion_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    # Of all lines, roughly, from their lengths: what a tenant has queued is known before anything is tokenized.
    estimated_prompt_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0", default=0)

    created_at: Mapped[float] = mapped_column(Double)
    in_progress_at: Mapped[float | None] = mapped_column(Double)
    # In progress, and nothing of it is queued or claimed until it is resumed.
    paused_at: Mapped[float | None] = mapped_column(Double)
    retried_at: Mapped[float | None] = mapped_column(Double)  # attempts before it no longer count against a limit
    # A retry goes through the lines in parts: the first line it has not come to yet. None: no retry is going on.
    retry_from_line: Mapped[int | None] = mapped_column(Integer)
    finalizing_at: Mapped[float | None] = mapped_column(Double)
    completed_at: Mapped[float | None] = mapped_column(Double)
    failed_at: Mapped[float | None] = mapped_column(Double)
    # The deadline: more urgent as it comes near; then what is finished is kept and the rest expires.
    expires_at: Mapped[float | None] = mapped_column(Double)
    expired_at: Mapped[float | None] = mapped_column(Double)  # set when it passed, while the batch still finalizes
    cancelling_at: Mapped[float | None] = mapped_column(Double)
    cancelled_at: Mapped[float | None] = mapped_column(Double)
    # Prompts and answers were removed; then also the rows of requests, results and attempts. Counters stay.
    text_purged_at: Mapped[float | None] = mapped_column(Double)
    rows_purged_at: Mapped[float | None] = mapped_column(Double)
    output_file_id: Mapped[int | None] = mapped_column(BigInteger, ForeignKey("files.id"))
    error_file_id: Mapped[int | None] = mapped_column(BigInteger, ForeignKey("files.id"))

    __table_args__ = (
        Index("ix_batches_fingerprint", "tenant", "fingerprint"),
        # Deleting a file looks for the batch that names it.
        Index(
            "ix_batches_output_file",
            "output_file_id",
            sqlite_where=text("output_file_id IS NOT NULL"),
            postgresql_where=text("output_file_id IS NOT NULL"),
        ),
        Index(
            "ix_batches_error_file",
            "error_file_id",
            sqlite_where=text("error_file_id IS NOT NULL"),
            postgresql_where=text("error_file_id IS NOT NULL"),
        ),
        # A tenant's batches as it lists them: without the many single calls.
        Index(
            "ix_batches_tenant",
            "tenant",
            "id",
            sqlite_where=text("is_interactive IS 0"),
            postgresql_where=text("is_interactive IS false"),
        ),
        Index(
            "ix_batches_name",
            "tenant",
            "name",
            sqlite_where=text("name IS NOT NULL"),
            postgresql_where=text("name IS NOT NULL"),
        ),
        Index(
            "ix_batches_idempotency_key",
            "tenant",
            "idempotency_key",
            unique=True,
            sqlite_where=text("idempotency_key IS NOT NULL"),
            postgresql_where=text("idempotency_key IS NOT NULL"),
        ),
        # The few batches that still need work, among all that ever were.
        Index(
            "ix_batches_open",
            "status",
            sqlite_where=text("status IN ('validating', 'in_progress', 'finalizing', 'cancelling')"),
            postgresql_where=text("status IN ('validating', 'in_progress', 'finalizing', 'cancelling')"),
        ),
        CheckConstraint(f"status IN ({', '.join(repr(s.value) for s in BatchStatus)})", name="ck_batches_status"),
    )


class File(Base):
    """A file that users see. Its content lies in the files folder under `path`."""

    __tablename__ = "files"

    id: Mapped[int] = mapped_column(BigKey, primary_key=True)
    public_id: Mapped[str] = mapped_column(Text, unique=True)  # file-<32 hex>
    tenant: Mapped[str] = mapped_column(Text)
    purpose: Mapped[str] = mapped_column(Text)
    filename: Mapped[str] = mapped_column(Text)  # as users see it
    path: Mapped[str] = mapped_column(Text)  # relative to the files folder
    bytes: Mapped[int] = mapped_column(BigInteger)
    lines: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[float] = mapped_column(Double)
    sha256: Mapped[str | None] = mapped_column(Text)  # of the content of an upload: a repeated one finds it
    expires_at: Mapped[float | None] = mapped_column(Double)
    api_key_id: Mapped[int | None] = mapped_column(BigInteger, ForeignKey("api_keys.id"))

    __table_args__ = (
        Index("ix_files_tenant", "tenant", "id"),
        Index(
            "ix_files_expires_at",
            "expires_at",
            sqlite_where=text("expires_at IS NOT NULL"),
            postgresql_where=text("expires_at IS NOT NULL"),
        ),
    )


class Prefix(Base):
    """A text that many prompts begin with, kept once: a request's first message (or prompt) is prefix + own text."""

    __tablename__ = "prefixes"

    id: Mapped[int] = mapped_column(BigKey, primary_key=True)
    sha256: Mapped[str] = mapped_column(Text, unique=True)
    text: Mapped[str] = mapped_column(Text)


# The three kinds of pending requests.
FRESH = "status = 'pending' AND not_before IS NULL AND same_as IS NULL"
DELAYED = "status = 'pending' AND not_before IS NOT NULL"
SAME = "status = 'pending' AND same_as IS NOT NULL"


class Request(Base):
    """One line of a batch."""

    __tablename__ = "requests"

    id: Mapped[int] = mapped_column(BigKey, primary_key=True)
    batch_id: Mapped[int] = mapped_column(BigInteger, ForeignKey("batches.id"))
    line: Mapped[int] = mapped_column(Integer)  # 1-based line (or record) number in the input
    custom_id: Mapped[str | None] = mapped_column(Text)  # None: the line was unreadable or had none
    status: Mapped[str] = mapped_column(Text, default=RequestStatus.PENDING.value)
    prefix_id: Mapped[int | None] = mapped_column(BigInteger, ForeignKey("prefixes.id"))
    # The OpenAI body without its prefix; None: the line was refused before it had one.
    body: Mapped[str | None] = mapped_column(Text)
    attempt: Mapped[int] = mapped_column(Integer, default=0)
    worker: Mapped[str | None] = mapped_column(Text)
    queued_at: Mapped[float | None] = mapped_column(Double)
    claimed_at: Mapped[float | None] = mapped_column(Double)
    lease_expires_at: Mapped[float | None] = mapped_column(Double)
    # Not before this instant again: it failed, or its worker died.
    not_before: Mapped[float | None] = mapped_column(Double)
    # Its worker died: at most so many requests run together with it, itself included, and nothing else beside them.
    isolation: Mapped[int | None] = mapped_column(Integer)
    estimated_tokens: Mapped[int] = mapped_column(Integer, server_default="0", default=0)  # prompt and answer
    # 64 bits over all that the answer depends on. Finds candidates; texts are compared before one is used.
    question_hash: Mapped[int | None] = mapped_column(BigInteger)
    same_as: Mapped[int | None] = mapped_column(Integer)  # the line of this batch that asks the same and answers both

    __table_args__ = (
        UniqueConstraint("batch_id", "line", name="uq_requests_batch_line"),
        # Partial indexes stay as small as the work in hand, however many finished rows the table holds.
        Index(
            "ix_requests_pending",  # the order of dispatch: prompts with one prefix together
            "batch_id",
            "prefix_id",
            "line",
            sqlite_where=text(FRESH),
            postgresql_where=text(FRESH),
        ),
        Index(
            "ix_requests_delayed", "batch_id", "not_before", sqlite_where=text(DELAYED), postgresql_where=text(DELAYED)
        ),
        Index("ix_requests_same", "batch_id", "same_as", sqlite_where=text(SAME), postgresql_where=text(SAME)),
        Index(
            "ix_requests_queued",
            "batch_id",
            "queued_at",
            sqlite_where=text("status = 'queued'"),
            postgresql_where=text("status = 'queued'"),
        ),
        Index(
            "ix_requests_running",
            "lease_expires_at",
            sqlite_where=text("status = 'running'"),
            postgresql_where=text("status = 'running'"),
        ),
        CheckConstraint(f"status IN ({', '.join(repr(s.value) for s in RequestStatus)})", name="ck_requests_status"),
    )


class Attempt(Base):
    """One try at a request, written once, when it ended (until then the request's own row says who has it)."""

    __tablename__ = "attempts"

    id: Mapped[int] = mapped_column(BigKey, primary_key=True)
    request_id: Mapped[int] = mapped_column(BigInteger, ForeignKey("requests.id"))
    number: Mapped[int] = mapped_column(Integer)  # 1 for the first try
    outcome: Mapped[str] = mapped_column(Text)
    worker: Mapped[str] = mapped_column(Text)
    device: Mapped[str | None] = mapped_column(Text)
    artifact_digest: Mapped[str | None] = mapped_column(Text)
    parameters: Mapped[str | None] = mapped_column(Text)  # JSON: sampling parameters as used, the seed included
    finish_reason: Mapped[str | None] = mapped_column(Text)
    error_code: Mapped[str | None] = mapped_column(Text)
    error_message: Mapped[str | None] = mapped_column(Text)
    prompt_tokens: Mapped[int | None] = mapped_column(Integer)
    cached_tokens: Mapped[int | None] = mapped_column(Integer)  # of prompt_tokens, those copied instead of computed
    completion_tokens: Mapped[int | None] = mapped_column(Integer)
    mean_batch_size: Mapped[float | None] = mapped_column(Double)  # rows that shared the model's steps, on average
    # When its worker died: how the process ended (a signal is negative), and what else it had in its hands.
    exit_code: Mapped[int | None] = mapped_column(Integer)
    batch_mates: Mapped[int | None] = mapped_column(Integer)
    served_from: Mapped[str | None] = mapped_column(Text)  # None: computed
    source_request_id: Mapped[int | None] = mapped_column(BigInteger)  # whose answer served
    queued_at: Mapped[float | None] = mapped_column(Double)
    claimed_at: Mapped[float] = mapped_column(Double)
    finished_at: Mapped[float] = mapped_column(Double)
    queue_s: Mapped[float | None] = mapped_column(Double)  # queued_at to claimed_at: time in Redis
    tokenize_s: Mapped[float | None] = mapped_column(Double)
    wait_s: Mapped[float | None] = mapped_column(Double)  # in the engine's waiting line, before a slot was free
    prefill_s: Mapped[float | None] = mapped_column(Double)  # first prefill step to first token
    time_to_first_token_s: Mapped[float | None] = mapped_column(Double)  # claimed_at to first token
    decode_s: Mapped[float | None] = mapped_column(Double)  # first token to last
    total_s: Mapped[float | None] = mapped_column(Double)  # claimed_at to last token

    __table_args__ = (Index("ix_attempts_request", "request_id"),)


class Result(Base):
    """The one durable answer to a request. `id` grows in the order results landed: a cursor for followers."""

    __tablename__ = "results"

    id: Mapped[int] = mapped_column(BigKey, primary_key=True)
    request_id: Mapped[int] = mapped_column(BigInteger, ForeignKey("requests.id"), unique=True)
    batch_id: Mapped[int] = mapped_column(BigInteger, ForeignKey("batches.id"))
    status_code: Mapped[int | None] = mapped_column(Integer)  # None: never executed (cancelled, expired)
    response: Mapped[str | None] = mapped_column(Text)  # JSON body: the completion, or {"error": {...}}
    error_code: Mapped[str | None] = mapped_column(Text)
    error_message: Mapped[str | None] = mapped_column(Text)
    finished_at: Mapped[float] = mapped_column(Double)

    __table_args__ = (Index("ix_results_batch", "batch_id", "id"),)


class Answer(Base):
    """An answer that serves identical requests of later batches: the result of `request_id`."""

    __tablename__ = "answers"

    key: Mapped[str] = mapped_column(Text, primary_key=True)  # SHA-256 of artifact digest, prompt ids, parameters
    request_id: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[float] = mapped_column(Double)

    __table_args__ = (Index("ix_answers_request", "request_id"),)


class WebhookEndpoint(Base):
    """Where a tenant wants to hear of ended batches. secret: signs what is sent, so it must be kept as it is.

    former_secret: signs as well until `former_secret_until`, while the receiver is given the new one.
    """

    __tablename__ = "webhook_endpoints"

    id: Mapped[int] = mapped_column(BigKey, primary_key=True)
    public_id: Mapped[str] = mapped_column(Text, unique=True)  # we_<24 hex>
    tenant: Mapped[str] = mapped_column(Text, ForeignKey("tenants.name"))
    name: Mapped[str] = mapped_column(Text)  # what a person calls it
    url: Mapped[str] = mapped_column(Text)
    secret: Mapped[str] = mapped_column(Text)  # whsec_<base64>
    former_secret: Mapped[str | None] = mapped_column(Text)
    former_secret_until: Mapped[float | None] = mapped_column(Double)
    events: Mapped[str] = mapped_column(Text)  # comma-separated event types
    created_at: Mapped[float] = mapped_column(Double)
    updated_at: Mapped[float] = mapped_column(Double)
    disabled_at: Mapped[float | None] = mapped_column(Double)  # the receiver said that it is gone

    __table_args__ = (Index("ix_webhook_endpoints_tenant", "tenant"),)


class WebhookDelivery(Base):
    """One event for one endpoint, written in the transaction that ends the batch; sent until it is taken."""

    __tablename__ = "webhook_deliveries"

    id: Mapped[int] = mapped_column(BigKey, primary_key=True)
    public_id: Mapped[str] = mapped_column(Text, unique=True)  # evt_<32 hex>: the receiver knows a repeat by it
    endpoint_id: Mapped[int] = mapped_column(BigInteger, ForeignKey("webhook_endpoints.id"))
    batch_id: Mapped[int] = mapped_column(BigInteger, ForeignKey("batches.id"))
    event: Mapped[str] = mapped_column(Text)
    payload: Mapped[str] = mapped_column(Text)  # JSON: the very bytes that are signed and sent
    attempts: Mapped[int] = mapped_column(Integer, default=0)
    next_try_at: Mapped[float | None] = mapped_column(Double)  # None: delivered or given up
    delivered_at: Mapped[float | None] = mapped_column(Double)
    given_up_at: Mapped[float | None] = mapped_column(Double)
    last_status: Mapped[int | None] = mapped_column(Integer)  # HTTP
    last_error: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[float] = mapped_column(Double)

    __table_args__ = (
        # A batch that is retried ends once more.
        UniqueConstraint("endpoint_id", "batch_id", "event", "created_at", name="uq_webhook_deliveries"),
        Index(
            "ix_webhook_deliveries_due",
            "next_try_at",
            sqlite_where=text("next_try_at IS NOT NULL"),
            postgresql_where=text("next_try_at IS NOT NULL"),
        ),
    )


class Worker(Base):
    """A worker process as it last described itself."""

    __tablename__ = "workers"

    id: Mapped[int] = mapped_column(BigKey, primary_key=True)
    name: Mapped[str] = mapped_column(Text, unique=True)  # e.g. cpu@host-4711; one row per process
    host: Mapped[str] = mapped_column(Text)
    pid: Mapped[int] = mapped_column(Integer)
    status: Mapped[str] = mapped_column(Text)
    model: Mapped[str] = mapped_column(Text)
    artifact_digest: Mapped[str | None] = mapped_column(Text)
    device: Mapped[str | None] = mapped_column(Text)
    max_batch_size: Mapped[int] = mapped_column(Integer, default=0)
    detail: Mapped[str | None] = mapped_column(Text)  # what it is doing while starting, or why it failed
    started_at: Mapped[float] = mapped_column(Double)
    ready_at: Mapped[float | None] = mapped_column(Double)
    last_seen_at: Mapped[float] = mapped_column(Double)
    stopped_at: Mapped[float | None] = mapped_column(Double)
    exit_code: Mapped[int | None] = mapped_column(Integer)  # of its process, as whoever started it saw it
    device_detail: Mapped[str | None] = mapped_column(Text)  # JSON: the last reading of its GPU
    requests_per_s: Mapped[float] = mapped_column(Double, server_default="0", default=0.0)  # over its last beat

    __table_args__ = (Index("ix_workers_model", "model", "status"),)
