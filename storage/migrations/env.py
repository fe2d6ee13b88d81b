"""How Alembic runs the steps: always inside the transaction that `storage.database.upgrade_schema` hands over."""

from alembic import context

from storage.models import METADATA

context.configure(connection=context.config.attributes["connection"], target_metadata=METADATA)
with context.begin_transaction():
    context.run_migrations()
