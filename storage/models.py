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
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    false,
    text,
)

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


METADATA = MetaData()


# Who sends work. Tenants that wait share a model's workers in the proportion of their weights.
TENANTS = Table(
    "tenants",
    METADATA,
    Column("name", Text, primary_key=True),
    Column("weight", Double, nullable=False, default=1.0),
    # Tokens dispatched so far, each divided by the weight of its time: the tenant with the least goes next.
    Column("share_used", Double, nullable=False, default=0.0),
    # Quotas. None: no bound.
    Column("max_requests_per_minute", Integer),
    Column("max_queued_prompt_tokens", BigInteger),
    Column("max_running_batches", Integer),
    Column("max_storage_bytes", BigInteger),
)


# A key that stands for a tenant. The key itself is shown once and never kept.
API_KEYS = Table(
    "api_keys",
    METADATA,
    Column("id", BigKey, primary_key=True),
    Column("public_id", Text, nullable=False, unique=True),  # key_<24 hex>
    Column("tenant", Text, ForeignKey("tenants.name"), nullable=False),
    Column("name", Text, nullable=False),  # what a person calls it
    Column("sha256", Text, nullable=False, unique=True),  # of the whole key; a key has 256 random bits
    Column("shown_prefix", Text, nullable=False),  # its first characters, enough to tell one from another
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double),
    Column("revoked_at", Double),
    Column("last_used_at", Double),  # to the minute
)


# One user's job: the lines of one input, for one model and endpoint.
BATCHES = Table(
    "batches",
    METADATA,
    Column("id", BigKey, primary_key=True),
    Column("public_id", Text, nullable=False, unique=True),  # batch_<32 hex>
    Column("tenant", Text, nullable=False, default="default"),
    Column("name", Text),
    # SHA-256 over the input's bytes and all that changes its answers: the same command again finds its batch by it.
    Column("fingerprint", Text, nullable=False),
    Column("idempotency_key", Text),
    Column("endpoint", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("artifact_digest", Text),  # of the model asked for, when it was known
    Column("is_interactive", Boolean, nullable=False, server_default=false(), default=False),
    # Its lines may run as soon as they are written, while the rest is still being read (`validating`).
    Column("runs_early", Boolean, nullable=False, server_default=false(), default=False),
    Column("status", Text, nullable=False, default=BatchStatus.VALIDATING.value),
    Column("priority", Integer, nullable=False, default=0),
    Column("metadata", Text),
    Column("error_code", Text),
    Column("error_message", Text),
    Column("errors", Text),  # JSON: what validation found, as in the API's errors.data
    # By which door it came (see Door), with which key, and what the API's own fields say.
    Column("door", Text, nullable=False, server_default="cli", default="cli"),
    Column("api_key_id", BigInteger, ForeignKey("api_keys.id")),
    Column("reply_to", Text),  # the Redis channel on which somebody waits for the answer
    Column("input_file_public_id", Text),  # also after that file was deleted
    Column("completion_window", Text),
    Column("output_expires_after_s", Double),
    # JSON, for whoever validates the input file: what else the caller asked for.
    Column("submit_options", Text),
    # Who is reading the input file, and until when that holds without a further sign: a dead reader is replaced.
    Column("validated_by", Text),
    Column("validation_lease_expires_at", Double),
    # Kept up to date in the transaction that makes a request final, so that progress costs one row read.
    Column("total_requests", BigInteger, nullable=False, default=0),
    Column("completed_requests", BigInteger, nullable=False, default=0),
    Column("failed_requests", BigInteger, nullable=False, default=0),
    Column("prompt_tokens", BigInteger, nullable=False, default=0),
    Column("cached_tokens", BigInteger, nullable=False, default=0),
    Column("completion_tokens", BigInteger, nullable=False, default=0),
    # Of all lines, roughly, from their lengths: what a tenant has queued is known before anything is tokenized.
    Column("estimated_prompt_tokens", BigInteger, nullable=False, server_default="0", default=0),
    Column("created_at", Double, nullable=False),
    Column("in_progress_at", Double),
    # In progress, and nothing of it is queued or claimed until it is resumed.
    Column("paused_at", Double),
    Column("retried_at", Double),  # attempts before it no longer count against a limit
    # A retry goes through the lines in parts: the first line it has not come to yet. None: no retry is going on.
    Column("retry_from_line", Integer),
    Column("finalizing_at", Double),
    Column("completed_at", Double),
    Column("failed_at", Double),
    # The deadline: more urgent as it comes near; then what is finished is kept and the rest expires.
    Column("expires_at", Double),
    Column("expired_at", Double),  # set when it passed, while the batch still finalizes
    Column("cancelling_at", Double),
    Column("cancelled_at", Double),
    # Prompts and answers were removed; then also the rows of requests, results and attempts. Counters stay.
    Column("text_purged_at", Double),
    Column("rows_purged_at", Double),
    Column("output_file_id", BigInteger, ForeignKey("files.id")),
    Column("error_file_id", BigInteger, ForeignKey("files.id")),
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


# A file that users see. Its content lies in the files folder under `path`.
FILES = Table(
    "files",
    METADATA,
    Column("id", BigKey, primary_key=True),
    Column("public_id", Text, nullable=False, unique=True),  # file-<32 hex>
    Column("tenant", Text, nullable=False),
    Column("purpose", Text, nullable=False),
    Column("filename", Text, nullable=False),  # as users see it
    Column("path", Text, nullable=False),  # relative to the files folder
    Column("bytes", BigInteger, nullable=False),
    Column("lines", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("sha256", Text),  # of the content of an upload: a repeated one finds it
    Column("expires_at", Double),
    Column("api_key_id", BigInteger, ForeignKey("api_keys.id")),
    Index("ix_files_tenant", "tenant", "id"),
    Index(
        "ix_files_expires_at",
        "expires_at",
        sqlite_where=text("expires_at IS NOT NULL"),
        postgresql_where=text("expires_at IS NOT NULL"),
    ),
)


# A text that many prompts begin with, kept once: a request's first message (or prompt) is prefix + own text.
PREFIXES = Table(
    "prefixes",
    METADATA,
    Column("id", BigKey, primary_key=True),
    Column("sha256", Text, nullable=False, unique=True),
    Column("text", Text, nullable=False),
)


# The three kinds of pending requests.
FRESH = "status = 'pending' AND not_before IS NULL AND same_as IS NULL"
DELAYED = "status = 'pending' AND not_before IS NOT NULL"
SAME = "status = 'pending' AND same_as IS NOT NULL"


# One line of a batch.
REQUESTS = Table(
    "requests",
    METADATA,
    Column("id", BigKey, primary_key=True),
    Column("batch_id", BigInteger, ForeignKey("batches.id"), nullable=False),
    Column("line", Integer, nullable=False),  # 1-based line (or record) number in the input
    Column("custom_id", Text),  # None: the line was unreadable or had none
    Column("status", Text, nullable=False, default=RequestStatus.PENDING.value),
    Column("prefix_id", BigInteger, ForeignKey("prefixes.id")),
    # The OpenAI body without its prefix; None: the line was refused before it had one.
    Column("body", Text),
    Column("attempt", Integer, nullable=False, default=0),
    Column("worker", Text),
    Column("queued_at", Double),
    Column("claimed_at", Double),
    Column("lease_expires_at", Double),
    # Not before this instant again: it failed, or its worker died.
    Column("not_before", Double),
    # Its worker died: at most so many requests run together with it, itself included, and nothing else beside them.
    Column("isolation", Integer),
    Column("estimated_tokens", Integer, nullable=False, server_default="0", default=0),  # prompt and answer
    # 64 bits over all that the answer depends on. Finds candidates; texts are compared before one is used.
    Column("question_hash", BigInteger),
    Column("same_as", Integer),  # the line of this batch that asks the same and answers both
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
    Index("ix_requests_delayed", "batch_id", "not_before", sqlite_where=text(DELAYED), postgresql_where=text(DELAYED)),
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


# One try at a request, written once, when it ended (until then the request's own row says who has it).
ATTEMPTS = Table(
    "attempts",
    METADATA,
    Column("id", BigKey, primary_key=True),
    Column("request_id", BigInteger, ForeignKey("requests.id"), nullable=False),
    Column("number", Integer, nullable=False),  # 1 for the first try
    Column("outcome", Text, nullable=False),
    Column("worker", Text, nullable=False),
    Column("device", Text),
    Column("artifact_digest", Text),
    Column("parameters", Text),  # JSON: sampling parameters as used, the seed included
    Column("finish_reason", Text),
    Column("error_code", Text),
    Column("error_message", Text),
    Column("prompt_tokens", Integer),
    Column("cached_tokens", Integer),  # of prompt_tokens, those copied instead of computed
    Column("completion_tokens", Integer),
    Column("mean_batch_size", Double),  # rows that shared the model's steps, on average
    # When its worker died: how the process ended (a signal is negative), and what else it had in its hands.
    Column("exit_code", Integer),
    Column("batch_mates", Integer),
    Column("served_from", Text),  # None: computed
    Column("source_request_id", BigInteger),  # whose answer served
    Column("queued_at", Double),
    Column("claimed_at", Double, nullable=False),
    Column("finished_at", Double, nullable=False),
    Column("queue_s", Double),  # queued_at to claimed_at: time in Redis
    Column("tokenize_s", Double),
    Column("wait_s", Double),  # in the engine's waiting line, before a slot was free
    Column("prefill_s", Double),  # first prefill step to first token
    Column("time_to_first_token_s", Double),  # claimed_at to first token
    Column("decode_s", Double),  # first token to last
    Column("total_s", Double),  # claimed_at to last token
    Index("ix_attempts_request", "request_id"),
)


# The one durable answer to a request. `id` grows in the order results landed: a cursor for followers.
RESULTS = Table(
    "results",
    METADATA,
    Column("id", BigKey, primary_key=True),
    Column("request_id", BigInteger, ForeignKey("requests.id"), nullable=False, unique=True),
    Column("batch_id", BigInteger, ForeignKey("batches.id"), nullable=False),
    Column("status_code", Integer),  # None: never executed (cancelled, expired)
    Column("response", Text),  # JSON body: the completion, or {"error": {...}}
    Column("error_code", Text),
    Column("error_message", Text),
    Column("finished_at", Double, nullable=False),
    Index("ix_results_batch", "batch_id", "id"),
)


# An answer that serves identical requests of later batches: the result of `request_id`.
ANSWERS = Table(
    "answers",
    METADATA,
    Column("key", Text, primary_key=True),  # SHA-256 of artifact digest, prompt ids, parameters
    Column("request_id", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False),
    Index("ix_answers_request", "request_id"),
)


# Where a tenant wants to hear of ended batches. secret: signs what is sent, so it must be kept as it is.
# former_secret: signs as well until `former_secret_until`, while the receiver is given the new one.
ENDPOINTS = Table(
    "webhook_endpoints",
    METADATA,
    Column("id", BigKey, primary_key=True),
    Column("public_id", Text, nullable=False, unique=True),  # we_<24 hex>
    Column("tenant", Text, ForeignKey("tenants.name"), nullable=False),
    Column("name", Text, nullable=False),  # what a person calls it
    Column("url", Text, nullable=False),
    Column("secret", Text, nullable=False),  # whsec_<base64>
    Column("former_secret", Text),
    Column("former_secret_until", Double),
    Column("events", Text, nullable=False),  # comma-separated event types
    Column("created_at", Double, nullable=False),
    Column("updated_at", Double, nullable=False),
    Column("disabled_at", Double),  # the receiver said that it is gone
    Index("ix_webhook_endpoints_tenant", "tenant"),
)


# One event for one endpoint, written in the transaction that ends the batch; sent until it is taken.
DELIVERIES = Table(
    "webhook_deliveries",
    METADATA,
    Column("id", BigKey, primary_key=True),
    Column("public_id", Text, nullable=False, unique=True),  # evt_<32 hex>: the receiver knows a repeat by it
    Column("endpoint_id", BigInteger, ForeignKey("webhook_endpoints.id"), nullable=False),
    Column("batch_id", BigInteger, ForeignKey("batches.id"), nullable=False),
    Column("event", Text, nullable=False),
    Column("payload", Text, nullable=False),  # JSON: the very bytes that are signed and sent
    Column("attempts", Integer, nullable=False, default=0),
    Column("next_try_at", Double),  # None: delivered or given up
    Column("delivered_at", Double),
    Column("given_up_at", Double),
    Column("last_status", Integer),  # HTTP
    Column("last_error", Text),
    Column("created_at", Double, nullable=False),
    # A batch that is retried ends once more.
    UniqueConstraint("endpoint_id", "batch_id", "event", "created_at", name="uq_webhook_deliveries"),
    Index(
        "ix_webhook_deliveries_due",
        "next_try_at",
        sqlite_where=text("next_try_at IS NOT NULL"),
        postgresql_where=text("next_try_at IS NOT NULL"),
    ),
)


# A worker process as it last described itself.
WORKERS = Table(
    "workers",
    METADATA,
    Column("id", BigKey, primary_key=True),
    Column("name", Text, nullable=False, unique=True),  # e.g. cpu@host-4711; one row per process
    Column("host", Text, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("status", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("artifact_digest", Text),
    Column("device", Text),
    Column("max_batch_size", Integer, nullable=False, default=0),
    Column("detail", Text),  # what it is doing while starting, or why it failed
    Column("started_at", Double, nullable=False),
    Column("ready_at", Double),
    Column("last_seen_at", Double, nullable=False),
    Column("stopped_at", Double),
    Column("exit_code", Integer),  # of its process, as whoever started it saw it
    Column("device_detail", Text),  # JSON: the last reading of its GPU
    Column("requests_per_s", Double, nullable=False, server_default="0", default=0.0),  # over its last beat
    Index("ix_workers_model", "model", "status"),
)
