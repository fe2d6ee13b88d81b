"""Durable jobs: tenants, files, answers; pausing, retries with backoff, poison hunt, identical requests."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

big_key = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "tenants",
        sa.Column("name", sa.Text(), primary_key=True),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("share_used", sa.Double(), nullable=False),
    )
    op.execute("INSERT INTO tenants (name, weight, share_used) SELECT DISTINCT tenant, 1.0, 0.0 FROM batches")

    op.create_table(
        "files",
        sa.Column("id", big_key, primary_key=True),
        sa.Column("public_id", sa.Text(), nullable=False, unique=True),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("purpose", sa.Text(), nullable=False),
        sa.Column("filename", sa.Text(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("lines", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
    )

    op.create_table(
        "answers",
        sa.Column("key", sa.Text(), primary_key=True),
        sa.Column("request_id", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
    )
    op.create_index("ix_answers_request", "answers", ["request_id"])

    _add("batches", "idempotency_key", sa.Text())
    _add("batches", "artifact_digest", sa.Text())
    op.add_column("batches", sa.Column("is_interactive", sa.Boolean(), nullable=False, server_default=sa.false()))
    for column in ("paused_at", "retried_at", "text_purged_at", "rows_purged_at"):
        _add("batches", column, sa.Double())
    for column in ("output_file_id", "error_file_id"):
        # Spelled out: SQLite takes a reference with a new column, Alembic's own way would rebuild the table.
        op.execute(f"ALTER TABLE batches ADD COLUMN {column} BIGINT REFERENCES files (id)")
    for name, column, is_unique in (
        ("ix_batches_name", "name", False),
        ("ix_batches_idempotency_key", "idempotency_key", True),
    ):
        where = sa.text(f"{column} IS NOT NULL")
        op.create_index(
            name, "batches", ["tenant", column], unique=is_unique, sqlite_where=where, postgresql_where=where
        )

    _add("requests", "not_before", sa.Double())
    _add("requests", "isolation", sa.Integer())
    op.add_column("requests", sa.Column("estimated_tokens", sa.Integer(), nullable=False, server_default="0"))
    _add("requests", "question_hash", sa.BigInteger())
    _add("requests", "same_as", sa.Integer())
    op.drop_index("ix_requests_pending", "requests")
    for name, columns, condition in (
        ("ix_requests_pending", ["batch_id", "prefix_id", "line"], "not_before IS NULL AND same_as IS NULL"),
        ("ix_requests_delayed", ["batch_id", "not_before"], "not_before IS NOT NULL"),
        ("ix_requests_same", ["batch_id", "same_as"], "same_as IS NOT NULL"),
    ):
        where = sa.text(f"status = 'pending' AND {condition}")
        op.create_index(name, "requests", columns, sqlite_where=where, postgresql_where=where)

    _add("attempts", "exit_code", sa.Integer())
    _add("attempts", "batch_mates", sa.Integer())
    _add("attempts", "served_from", sa.Text())
    _add("attempts", "source_request_id", sa.BigInteger())
    _add("workers", "exit_code", sa.Integer())


def _add(table: str, column: str, kind: sa.types.TypeEngine[Any]) -> None:
    op.add_column(table, sa.Column(column, kind))
