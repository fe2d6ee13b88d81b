"""Tables and status enums.

Conventions: columns ending in `_at` are UTC Unix seconds (double precision) by the clock passed in as `now`;
columns ending in `_s` are seconds. JSON is kept as text, written and read by `jobs`; storage does not look inside.
Status columns are written by `storage/transitions.py` alone.

The life of a request: pending (a row) -> queued (its id is in a chunk message) -> running (leased by a worker)
-> completed | failed | cancelled | expired. Its one Result row is written in the transaction that makes it final,
together with the Attempt row that says how it went.
"""

from __future__ import annotations

from enum import StrEnum

from sqlalchemy import BigInteger, CheckConstraint, Double, ForeignKey, Index, Integer, Text, UniqueConstraint, text
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


class Base(DeclarativeBase):
    pass


class Batch(Base):
    """One user's job: the lines of one input, for one model and endpoint."""

    __tablename__ = "batches"

    id: Mapped[int] = mapped_column(BigKey, primary_key=True)
    public_id: Mapped[str] = mapped_column(Text, unique=True)  # batch_<32 hex>
    tenant: Mapped[str] = mapped_column(Text, default="default")
    name: Mapped[str | None] = mapped_column(Text)
    # SHA-256 over the input's bytes and all that changes its answers: the same command again finds its batch by it.
    fingerprint: Mapped[str] = mapped_column(Text)
    endpoint: Mapped[str] = mapped_column(Text)
    model: Mapped[str] = mapped_column(Text)
    status: Mapped[str] = mapped_column(Text, default=BatchStatus.VALIDATING.value)
    priority: Mapped[int] = mapped_column(Integer, default=0)
    extra_metadata: Mapped[str | None] = mapped_column("metadata", Text)
    error_code: Mapped[str | None] = mapped_column(Text)
    error_message: Mapped[str | None] = mapped_column(Text)

    # Kept up to date in the transaction that makes a request final, so that progress costs one row read.
    total_requests: Mapped[int] = mapped_column(BigInteger, default=0)
    completed_requests: Mapped[int] = mapped_column(BigInteger, default=0)
    failed_requests: Mapped[int] = mapped_column(BigInteger, default=0)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    cached_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    completion_tokens: Mapped[int] = mapped_column(BigInteger, default=0)

    created_at: Mapped[float] = mapped_column(Double)
    in_progress_at: Mapped[float | None] = mapped_column(Double)
    finalizing_at: Mapped[float | None] = mapped_column(Double)
    completed_at: Mapped[float | None] = mapped_column(Double)
    failed_at: Mapped[float | None] = mapped_column(Double)
    expires_at: Mapped[float | None] = mapped_column(Double)
    expired_at: Mapped[float | None] = mapped_column(Double)
    cancelling_at: Mapped[float | None] = mapped_column(Double)
    cancelled_at: Mapped[float | None] = mapped_column(Double)

    __table_args__ = (
        Index("ix_batches_fingerprint", "tenant", "fingerprint"),
        # The few batches that still need work, among all that ever were.
        Index(
            "ix_batches_open",
            "status",
            sqlite_where=text("status IN ('validating', 'in_progress', 'finalizing', 'cancelling')"),
            postgresql_where=text("status IN ('validating', 'in_progress', 'finalizing', 'cancelling')"),
        ),
        CheckConstraint(f"status IN ({', '.join(repr(s.value) for s in BatchStatus)})", name="ck_batches_status"),
    )


class Prefix(Base):
    """A text that many prompts begin with, kept once: a request's first message (or prompt) is prefix + own text."""

    __tablename__ = "prefixes"

    id: Mapped[int] = mapped_column(BigKey, primary_key=True)
    sha256: Mapped[str] = mapped_column(Text, unique=True)
    text: Mapped[str] = mapped_column(Text)


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

    __table_args__ = (
        UniqueConstraint("batch_id", "line", name="uq_requests_batch_line"),
        # Partial indexes stay as small as the work in hand, however many finished rows the table holds.
        Index(
            "ix_requests_pending",  # the order of dispatch: prompts with one prefix together
            "batch_id",
            "prefix_id",
            "line",
            sqlite_where=text("status = 'pending'"),
            postgresql_where=text("status = 'pending'"),
        ),
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

    __table_args__ = (Index("ix_workers_model", "model", "status"),)
