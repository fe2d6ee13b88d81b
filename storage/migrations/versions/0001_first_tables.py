"""The first tables: batches, prefixes, requests, attempts, results, workers."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

big_key = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

BATCH_STATUSES = (
    "'validating', 'failed', 'in_progress', 'finalizing', 'completed', 'expired', 'cancelling', 'cancelled'"
)
OPEN_BATCH = sa.text("status IN ('validating', 'in_progress', 'finalizing', 'cancelling')")
REQUEST_STATUSES = "'pending', 'queued', 'running', 'completed', 'failed', 'cancelled', 'expired'"


def upgrade() -> None:
    op.create_table(
        "batches",
        sa.Column("id", big_key, primary_key=True),
        sa.Column("public_id", sa.Text(), nullable=False, unique=True),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("name", sa.Text()),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("endpoint", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("metadata", sa.Text()),
        sa.Column("error_code", sa.Text()),
        sa.Column("error_message", sa.Text()),
        sa.Column("total_requests", sa.BigInteger(), nullable=False),
        sa.Column("completed_requests", sa.BigInteger(), nullable=False),
        sa.Column("failed_requests", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("in_progress_at", sa.Double()),
        sa.Column("finalizing_at", sa.Double()),
        sa.Column("completed_at", sa.Double()),
        sa.Column("failed_at", sa.Double()),
        sa.Column("expires_at", sa.Double()),
        sa.Column("expired_at", sa.Double()),
        sa.Column("cancelling_at", sa.Double()),
        sa.Column("cancelled_at", sa.Double()),
        sa.CheckConstraint(f"status IN ({BATCH_STATUSES})", name="ck_batches_status"),
    )
    op.create_index("ix_batches_fingerprint", "batches", ["tenant", "fingerprint"])
    op.create_index("ix_batches_open", "batches", ["status"], sqlite_where=OPEN_BATCH, postgresql_where=OPEN_BATCH)

    op.create_table(
        "prefixes",
        sa.Column("id", big_key, primary_key=True),
        sa.Column("sha256", sa.Text(), nullable=False, unique=True),
        sa.Column("text", sa.Text(), nullable=False),
    )

    op.create_table(
        "requests",
        sa.Column("id", big_key, primary_key=True),
        sa.Column("batch_id", sa.BigInteger(), sa.ForeignKey("batches.id"), nullable=False),
        sa.Column("line", sa.Integer(), nullable=False),
        sa.Column("custom_id", sa.Text()),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("prefix_id", sa.BigInteger(), sa.ForeignKey("prefixes.id")),
        sa.Column("body", sa.Text()),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("worker", sa.Text()),
        sa.Column("queued_at", sa.Double()),
        sa.Column("claimed_at", sa.Double()),
        sa.Column("lease_expires_at", sa.Double()),
        sa.UniqueConstraint("batch_id", "line", name="uq_requests_batch_line"),
        sa.CheckConstraint(f"status IN ({REQUEST_STATUSES})", name="ck_requests_status"),
    )
    for name, status, columns in (
        ("ix_requests_pending", "pending", ["batch_id", "prefix_id", "line"]),
        ("ix_requests_queued", "queued", ["batch_id", "queued_at"]),
        ("ix_requests_running", "running", ["lease_expires_at"]),
    ):
        where = sa.text(f"status = '{status}'")
        op.create_index(name, "requests", columns, sqlite_where=where, postgresql_where=where)

    op.create_table(
        "attempts",
        sa.Column("id", big_key, primary_key=True),
        sa.Column("request_id", sa.BigInteger(), sa.ForeignKey("requests.id"), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("worker", sa.Text(), nullable=False),
        sa.Column("device", sa.Text()),
        sa.Column("artifact_digest", sa.Text()),
        sa.Column("parameters", sa.Text()),
        sa.Column("finish_reason", sa.Text()),
        sa.Column("error_code", sa.Text()),
        sa.Column("error_message", sa.Text()),
        sa.Column("prompt_tokens", sa.Integer()),
        sa.Column("cached_tokens", sa.Integer()),
        sa.Column("completion_tokens", sa.Integer()),
        sa.Column("mean_batch_size", sa.Double()),
        sa.Column("queued_at", sa.Double()),
        sa.Column("claimed_at", sa.Double(), nullable=False),
        sa.Column("finished_at", sa.Double(), nullable=False),
        sa.Column("queue_s", sa.Double()),
        sa.Column("tokenize_s", sa.Double()),
        sa.Column("wait_s", sa.Double()),
        sa.Column("prefill_s", sa.Double()),
        sa.Column("time_to_first_token_s", sa.Double()),
        sa.Column("decode_s", sa.Double()),
        sa.Column("total_s", sa.Double()),
    )
    op.create_index("ix_attempts_request", "attempts", ["request_id"])

    op.create_table(
        "results",
        sa.Column("id", big_key, primary_key=True),
        sa.Column("request_id", sa.BigInteger(), sa.ForeignKey("requests.id"), nullable=False, unique=True),
        sa.Column("batch_id", sa.BigInteger(), sa.ForeignKey("batches.id"), nullable=False),
        sa.Column("status_code", sa.Integer()),
        sa.Column("response", sa.Text()),
        sa.Column("error_code", sa.Text()),
        sa.Column("error_message", sa.Text()),
        sa.Column("finished_at", sa.Double(), nullable=False),
    )
    op.create_index("ix_results_batch", "results", ["batch_id", "id"])

    op.create_table(
        "workers",
        sa.Column("id", big_key, primary_key=True),
        sa.Column("name", sa.Text(), nullable=False, unique=True),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("artifact_digest", sa.Text()),
        sa.Column("device", sa.Text()),
        sa.Column("max_batch_size", sa.Integer(), nullable=False),
        sa.Column("detail", sa.Text()),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("ready_at", sa.Double()),
        sa.Column("last_seen_at", sa.Double(), nullable=False),
        sa.Column("stopped_at", sa.Double()),
    )
    op.create_index("ix_workers_model", "workers", ["model", "status"])
