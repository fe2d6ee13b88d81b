"""What `promptmill key`, `tenant` and `webhook` do: who may send work, how much, and who is told of its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table

from jobs import keys, steering, webhooks
from jobs.logs import set_up_logs
from jobs.protocol import dump_json
from jobs.report import instant
from jobs.settings import load_settings
from storage import outbox, queries, transitions
from storage.database import Database, check_schema, open_database, upgrade_schema
from storage.outbox import DeliveryRow, EndpointRow
from storage.queries import ApiKeyRow, TenantRow, TenantUsage


def create_key(name: str, tenant: str, expires: str | None, as_json: bool) -> int:
    with _database("key") as database:
        expires_at = None if expires is None else steering.parse_deadline(expires, database.now(), "--expires")
        made = keys.make_key(database, tenant=tenant, name=name, expires_at=expires_at)
    if as_json:
        print(dump_json({**_describe_key(made.row), "key": made.key}))
        return 0
    print(made.key, flush=True)
    until = f", until {instant(expires_at)}" if expires_at else ""
    _say(f"{made.row.public_id} for tenant {tenant}{until}; this is the only time the key is shown")
    return 0


def list_keys(tenant: str | None, as_json: bool) -> int:
    with _database("key", only_reads=True) as database:
        with database.read() as connection:
            rows = queries.list_api_keys(connection, tenant)
        now = database.now()
    if as_json:
        for row in rows:
            print(dump_json(_describe_key(row)))
    elif rows:
        table = Table(box=None, header_style="bold")
        for column in ("id", "key", "name", "tenant", "created", "last used", "state"):
            table.add_column(column)
        for row in rows:
            table.add_row(
                row.public_id,
                f"{row.shown_prefix}...",
                row.name,
                row.tenant,
                instant(row.created_at),
                instant(row.last_used_at) or "never",
                _key_state(row, now),
            )
        _table_console().print(table)
    else:
        _say("no keys; make one: promptmill key create NAME")
    return 0


def revoke_key(named: str) -> int:
    with _database("key") as database:
        row, was_alive = keys.revoke_key(database, named)
    _say(f"{row.public_id} ({row.shown_prefix}..., {row.name}): {'revoked' if was_alive else 'was revoked before'}")
    return 0


def set_tenant(name: str, weight: float | None, quotas: Mapping[str, str | None]) -> int:
    """quotas: option without its `max_` -> a number or `none` as written; None: not given."""
    bounds = {f"max_{quota}": _bound(quota, text) for quota, text in quotas.items() if text is not None}
    with _database("tenant") as database:
        with database.write() as connection:
            if weight is not None:
                transitions.set_tenant(connection, name, weight)
            transitions.set_quotas(connection, name, bounds)
        with database.read() as connection:
            row, usage = queries.tenants(connection)[name], queries.tenant_usage(connection, name)
    _table_console().print(_tenants_table([(row, usage)]))
    return 0


def list_tenants(as_json: bool) -> int:
    with _database("tenant", only_reads=True) as database, database.read() as connection:
        rows = [(row, queries.tenant_usage(connection, name)) for name, row in queries.tenants(connection).items()]
    rows.sort(key=lambda each: each[0].name)
    if as_json:
        for row, usage in rows:
            print(dump_json(describe_tenant(row, usage)))
    elif rows:
        _table_console().print(_tenants_table(rows))
    else:
        _say("no tenants; the first batch or key makes one")
    return 0


def add_webhook(url: str, tenant: str, events: Sequence[str], as_json: bool) -> int:
    settings = load_settings()
    with _database("webhook") as database:
        allowed = webhooks.parse_networks(settings.webhook.allowed_networks)
        row = webhooks.add_endpoint(database, tenant=tenant, url=url, events=events or webhooks.EVENTS, allowed=allowed)
    if as_json:
        print(dump_json({**_describe_endpoint(row), "signing_secret": row.secret}))
        return 0
    print(row.secret, flush=True)
    _say(f"{row.public_id} hears of tenant {tenant}'s batches; the secret above signs what is sent to it")
    return 0


def list_webhooks(tenant: str | None, with_deliveries: bool, as_json: bool) -> int:
    with _database("webhook", only_reads=True) as database, database.read() as connection:
        rows = outbox.list_endpoints(connection, tenant)
        deliveries = {row.id: outbox.deliveries_of(connection, row.id) for row in rows} if with_deliveries else {}
    if as_json:
        for row in rows:
            told = {"deliveries": [_describe_delivery(each) for each in deliveries[row.id]]} if with_deliveries else {}
            print(dump_json({**_describe_endpoint(row), **told}))
        return 0
    if not rows:
        _say("no webhooks; add one: promptmill webhook add URL")
        return 0
    table = Table(box=None, header_style="bold")
    for column in ("id", "tenant", "url", "events", "created", "state"):
        table.add_column(column)
    for row in rows:
        state = f"disabled {instant(row.disabled_at)}" if row.disabled_at else "alive"
        table.add_row(row.public_id, row.tenant, row.url, row.events, instant(row.created_at), state)
    _table_console().print(table)
    for row in rows:
        if deliveries.get(row.id):
            _table_console().print(_deliveries_table(row.public_id, deliveries[row.id]))
    return 0


def remove_webhook(named: str) -> int:
    with _database("webhook") as database:
        webhooks.remove_endpoint(database, webhooks.find_endpoint(database, named))
    _say(f"{named}: removed")
    return 0


def _describe_endpoint(row: EndpointRow) -> dict[str, object]:
    return {
        "id": row.public_id,
        "tenant": row.tenant,
        "name": row.name,
        "url": row.url,
        "event_types": row.events.split(","),
        "created_at": row.created_at,
        "disabled_at": row.disabled_at,
    }


def _describe_delivery(row: DeliveryRow) -> dict[str, object]:
    return {
        "id": row.public_id,
        "event": row.event,
        "attempts": row.attempts,
        "created_at": row.created_at,
        "next_try_at": row.next_try_at,
        "delivered_at": row.delivered_at,
        "given_up_at": row.given_up_at,
        "last_status": row.last_status,
        "last_error": row.last_error,
    }


def _deliveries_table(endpoint: str, rows: Sequence[DeliveryRow]) -> Table:
    table = Table(box=None, header_style="bold", title=endpoint, title_justify="left")
    for column in ("delivery", "event", "written", "tries", "state", "last answer"):
        table.add_column(column)
    for row in rows:
        if row.delivered_at is not None:
            state = f"taken {instant(row.delivered_at)}"
        elif row.given_up_at is not None:
            state = f"given up {instant(row.given_up_at)}"
        else:
            state = f"next try {instant(row.next_try_at)}"
        said = row.last_error or (str(row.last_status) if row.last_status else "")
        table.add_row(row.public_id, row.event, instant(row.created_at), str(row.attempts), state, said)
    return table


def describe_tenant(row: TenantRow, usage: TenantUsage) -> dict[str, object]:
    """A tenant as plain values. limit None: no bound."""
    return {
        "tenant": row.name,
        "weight": row.weight,
        "requests_per_minute": {"limit": row.max_requests_per_minute},
        "queued_prompt_tokens": {"used": usage.queued_prompt_tokens, "limit": row.max_queued_prompt_tokens},
        "running_batches": {"used": usage.running_batches, "limit": row.max_running_batches},
        "storage_bytes": {"used": usage.storage_bytes, "limit": row.max_storage_bytes},
    }


def _tenants_table(rows: Sequence[tuple[TenantRow, TenantUsage]]) -> Table:
    table = Table(box=None, header_style="bold")
    table.add_column("tenant")
    for column in ("weight", "requests/min", "queued prompt tokens", "running batches", "storage bytes"):
        table.add_column(column, justify="right")
    for row, usage in rows:
        table.add_row(
            row.name,
            f"{row.weight:g}",
            "no limit" if row.max_requests_per_minute is None else f"{row.max_requests_per_minute:,}",
            _used(usage.queued_prompt_tokens, row.max_queued_prompt_tokens),
            _used(usage.running_batches, row.max_running_batches),
            _used(usage.storage_bytes, row.max_storage_bytes),
        )
    return table


def _used(used: int, limit: int | None) -> str:
    return f"{used:,} of {'any' if limit is None else f'{limit:,}'}"


def _bound(quota: str, text: str) -> int | None:
    if text.strip().lower() == "none":
        return None
    try:
        return int(text.replace("_", "").replace(",", ""))
    except ValueError:
        option = "--" + quota.replace("_", "-")
        raise steering.SteeringError(
            f"{option} {text!r} is not a whole number; write one, or none", code="invalid_option"
        ) from None


def _describe_key(row: ApiKeyRow) -> dict[str, object]:
    return {
        "id": row.public_id,
        "shown_prefix": row.shown_prefix,
        "name": row.name,
        "tenant": row.tenant,
        "created_at": row.created_at,
        "expires_at": steering.finite(row.expires_at),
        "revoked_at": row.revoked_at,
        "last_used_at": row.last_used_at,
    }


def _key_state(row: ApiKeyRow, now: float) -> str:
    if row.revoked_at is not None:
        return f"revoked {instant(row.revoked_at)}"
    if row.expires_at is not None:
        return f"expired {instant(row.expires_at)}" if row.expires_at <= now else f"until {instant(row.expires_at)}"
    return "alive"


def _say(text: str) -> None:
    Console(stderr=True).print(text, highlight=False, markup=False, soft_wrap=True)


def _table_console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=200)


@contextmanager
def _database(command: str, *, only_reads: bool = False) -> Iterator[Database]:
    """The database; its tables are made, unless the command only reads: such a one makes nothing at all."""
    settings = load_settings()
    file = settings.logs_dir / f"{command}.log"
    set_up_logs(command, level=settings.log.level, file=file, console=False, must_write=not only_reads)
    with open_database(settings.database.url) as database:
        (check_schema if only_reads else upgrade_schema)(database)
        yield database
