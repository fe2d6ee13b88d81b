"""The doors: API keys, quotas, uploaded files and their validation, webhooks."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

big_key = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "api_keys",
        sa.Column("id", big_key, primary_key=True),
        sa.Column("public_id", sa.Text(), nullable=False, unique=True),
        sa.Column("tenant", sa.Text(), sa.ForeignKey("tenants.name"), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False, unique=True),
        sa.Column("shown_prefix", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double()),
        sa.Column("revoked_at", sa.Double()),
        sa.Column("last_used_at", sa.Double()),
    )
    _add("workers", "device_detail", sa.Text())
    op.add_column("workers", sa.Column("requests_per_s", sa.Double(), nullable=False, server_default="0"))
    _add("tenants", "max_requests_per_minute", sa.Integer())
    _add("tenants", "max_queued_prompt_tokens", sa.BigInteger())
    _add("tenants", "max_running_batches", sa.Integer())
    _add("tenants", "max_storage_bytes", sa.BigInteger())

    op.add_column("batches", sa.Column("door", sa.Text(), nullable=False, server_default="cli"))
    for column in ("errors", "reply_to", "input_file_public_id", "completion_window", "submit_options", "validated_by"):
        _add("batches", column, sa.Text())
    for column in ("output_expires_after_s", "validation_lease_expires_at"):
        _add("batches", column, sa.Double())
    op.add_column("batches", sa.Column("estimated_prompt_tokens", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("batches", sa.Column("runs_early", sa.Boolean(), nullable=False, server_default=sa.false()))
    _add("batches", "retry_from_line", sa.Integer())
    _add("files", "sha256", sa.Text())
    _add("files", "expires_at", sa.Double())
    for table in ("batches", "files"):
        # Spelled out: SQLite takes a reference with a new column, Alembic's own way would rebuild the table.
        op.execute(f"ALTER TABLE {table} ADD COLUMN api_key_id BIGINT REFERENCES api_keys (id)")
    op.create_index("ix_files_tenant", "files", ["tenant", "id"])
    for kind in ("output", "error"):
        where = sa.text(f"{kind}_file_id IS NOT NULL")
        op.create_index(
            f"ix_batches_{kind}_file", "batches", [f"{kind}_file_id"], sqlite_where=where, postgresql_where=where
        )
    op.create_index(
        "ix_batches_tenant",
        "batches",
        ["tenant", "id"],
        sqlite_where=sa.text("is_interactive IS 0"),
        postgresql_where=sa.text("is_interactive IS false"),
    )
    where = sa.text("expires_at IS NOT NULL")
    op.create_index("ix_files_expires_at", "files", ["expires_at"], sqlite_where=where, postgresql_where=where)

    op.create_table(
        "webhook_endpoints",
        sa.Column("id", big_key, primary_key=True),
        sa.Column("public_id", sa.Text(), nullable=False, unique=True),
        sa.Column("tenant", sa.Text(), sa.ForeignKey("tenants.name"), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("secret", sa.Text(), nullable=False),
        sa.Column("former_secret", sa.Text()),
        sa.Column("former_secret_until", sa.Double()),
        sa.Column("events", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.Column("disabled_at", sa.Double()),
    )
    op.create_index("ix_webhook_endpoints_tenant", "webhook_endpoints", ["tenant"])
    op.create_table(
        "webhook_deliveries",
        sa.Column("id", big_key, primary_key=True),
        sa.Column("public_id", sa.Text(), nullable=False, unique=True),
        sa.Column("endpoint_id", sa.BigInteger(), sa.ForeignKey("webhook_endpoints.id"), nullable=False),
        sa.Column("batch_id", sa.BigInteger(), sa.ForeignKey("batches.id"), nullable=False),
        sa.Column("event", sa.Text(), nullable=False),
        sa.Column("payload", sa.Text(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("next_try_at", sa.Double()),
        sa.Column("delivered_at", sa.Double()),
        sa.Column("given_up_at", sa.Double()),
        sa.Column("last_status", sa.Integer()),
        sa.Column("last_error", sa.Text()),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.UniqueConstraint("endpoint_id", "batch_id", "event", "created_at", name="uq_webhook_deliveries"),
    )
    where = sa.text("next_try_at IS NOT NULL")
    op.create_index(
        "ix_webhook_deliveries_due",
        "webhook_deliveries",
        ["next_try_at"],
        sqlite_where=where,
        postgresql_where=where,
    )


def _add(table: str, column: str, kind: sa.types.TypeEngine[Any]) -> None:
    op.add_column(table, sa.Column(column, kind))
