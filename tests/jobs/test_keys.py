"""API keys: shown once, kept as digests, refused as soon as they are revoked or expired."""

from __future__ import annotations

import hashlib

import pytest
from click.testing import CliRunner
from sqlalchemy import text

from jobs import keys
from jobs.cli import cli
from jobs.keys import KeyRefused, KeyRing, make_key, revoke_key
from storage import queries
from storage.database import Database
from storage.errors import PromptmillError
from tests.conftest import wait_until


def test_a_key_is_kept_as_a_digest_alone(database: Database) -> None:
    made = make_key(database, tenant="acme", name="laptop")
    assert made.key.startswith("pm-")
    assert len(made.key) == len("pm-") + 43  # 256 bits in base64
    with database.read() as connection:
        (row,) = connection.execute(text("SELECT * FROM api_keys")).mappings()
        assert "acme" in queries.tenants(connection)
    assert row["sha256"] == hashlib.sha256(made.key.encode()).hexdigest()
    assert row["shown_prefix"] == made.key[:9]
    assert made.key not in [str(value) for value in row.values()]


def test_a_key_stands_for_its_tenant(database: Database) -> None:
    first, second = make_key(database, tenant="acme", name="a"), make_key(database, tenant="other", name="b")
    ring = KeyRing(database)
    assert ring.known(first.key) is None
    caller = ring.find(first.key)
    assert (caller.tenant, caller.api_key_id, caller.key_name) == ("acme", first.row.id, "a")
    assert ring.known(first.key) == caller
    assert ring.find(second.key).tenant == "other"


@pytest.mark.parametrize("key", ["", "pm-", "pm-" + "A" * 43, "x" * 100_000, "pm-\ud800", "Bearer pm-x", "pm-\0"])
def test_what_is_no_key_is_refused(sqlite_database: Database, key: str) -> None:
    make_key(sqlite_database, tenant="acme", name="a")
    with pytest.raises(KeyRefused) as refused:
        KeyRing(sqlite_database).find(key)
    assert refused.value.code == "invalid_api_key"
    if len(key) > 6:
        assert key not in refused.value.message


def test_a_revoked_key_is_refused_by_who_knew_it_within_seconds(database: Database) -> None:
    made = make_key(database, tenant="acme", name="a")
    ring = KeyRing(database)
    ring.find(made.key)
    row, was_alive = revoke_key(database, made.row.shown_prefix)
    assert (row.public_id, was_alive) == (made.row.public_id, True)
    assert not revoke_key(database, made.row.public_id)[1]

    def is_refused() -> bool:
        try:
            ring.find(made.key)
        except KeyRefused as error:
            return "revoked" in error.message
        return False

    wait_until(is_refused, what="the refusal")
    with pytest.raises(KeyRefused, match="revoked"):
        KeyRing(database).find(made.key)


def test_a_key_expires_also_for_who_has_just_looked_it_up(database: Database) -> None:
    made = make_key(database, tenant="acme", name="a", expires_at=database.now() + 0.7)
    ring = KeyRing(database)

    def is_refused() -> bool:
        try:
            ring.known(made.key) or ring.find(made.key)
        except KeyRefused as error:
            return "expired" in error.message
        return False

    wait_until(is_refused, what="the expiry")


def test_the_use_of_a_key_is_noted_once_a_minute(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_key(database, tenant="acme", name="a")
    monkeypatch.setattr(keys, "KNOWN_FOR_S", -1.0)  # look it up each time
    written = []
    write = Database.write

    def counted(self: Database, *, durable: bool = True) -> object:
        written.append(durable)
        return write(self, durable=durable)

    monkeypatch.setattr(Database, "write", counted)
    ring = KeyRing(database)
    for _ in range(20):
        ring.find(made.key)
    assert written == [False]
    with database.read() as connection:
        (row,) = queries.list_api_keys(connection)
    assert row.last_used_at is not None
    assert row.last_used_at == pytest.approx(database.now(), abs=60)


def test_a_key_that_two_prefixes_mean_is_not_revoked_by_guess(sqlite_database: Database) -> None:
    made = make_key(sqlite_database, tenant="acme", name="a")
    make_key(sqlite_database, tenant="acme", name="b")
    with sqlite_database.write() as connection:
        connection.execute(text("UPDATE api_keys SET shown_prefix = 'pm-aaaaaa'"))
    with pytest.raises(PromptmillError) as refused:
        revoke_key(sqlite_database, "pm-aaaaaa")
    assert refused.value.code == "key_ambiguous"
    with pytest.raises(PromptmillError) as refused:
        revoke_key(sqlite_database, "pm-zzzzzzzzzzzz")
    assert refused.value.code == "key_not_found"
    assert "zzzzzzz" not in refused.value.message
    assert KeyRing(sqlite_database).find(made.key)


def test_keys_are_made_listed_and_revoked_by_command() -> None:
    made = CliRunner().invoke(cli, ["key", "create", "laptop", "--tenant", "acme", "--expires", "30d"])
    assert made.exit_code == 0, made.output
    key = made.stdout.strip()
    assert key.startswith("pm-")
    listed = CliRunner().invoke(cli, ["key", "list", "--json"])
    assert key[:9] in listed.stdout
    assert key not in listed.stdout
    assert '"last_used_at":null' in listed.stdout
    shown = CliRunner().invoke(cli, ["key", "list", "--tenant", "acme"])
    assert "never" in shown.stdout
    assert CliRunner().invoke(cli, ["key", "revoke", key[:9]]).exit_code == 0
    assert "revoked" in CliRunner().invoke(cli, ["key", "list"]).stdout
    assert CliRunner().invoke(cli, ["key", "list", "--tenant", "nobody", "--json"]).stdout == ""


def test_tenants_are_set_and_listed_with_what_they_use() -> None:
    done = CliRunner().invoke(
        cli,
        ["tenant", "set", "acme", "--weight", "2.5", "--requests-per-minute", "60", "--storage-bytes", "1_000_000"],
    )
    assert done.exit_code == 0, done.output
    CliRunner().invoke(cli, ["tenant", "set", "acme", "--requests-per-minute", "none", "--running-batches", "4"])
    listed = CliRunner().invoke(cli, ["tenant", "list", "--json"])
    assert listed.stdout.strip() == (
        '{"tenant":"acme","weight":2.5,"requests_per_minute":{"limit":null},'
        '"queued_prompt_tokens":{"used":0,"limit":null},"running_batches":{"used":0,"limit":4},'
        '"storage_bytes":{"used":0,"limit":1000000}}'
    )
    for wrong, said in (("many", "is not a whole number"), ("-3", "not within 0"), ("1e3", "is not a whole number")):
        refused = CliRunner().invoke(cli, ["tenant", "set", "acme", "--running-batches", wrong])
        assert refused.exit_code == 2
        assert said in refused.stderr
