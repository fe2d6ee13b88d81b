"""Where settings come from, and what a wrong one says."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import redis

from jobs.queue import make_app, redis_url
from jobs.settings import (
    LONGEST_RUNTIME_DIR,
    QueueSettings,
    Settings,
    bounds_of,
    check_queue_url,
    environment_of,
    load_settings,
    variables,
)
from storage.errors import SettingsError

ROOT = Path(__file__).parents[2]


def test_without_any_variable_the_defaults_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROMPTMILL_HOME")
    settings = load_settings(env_file=None)
    assert settings.home.name == "promptmill"
    assert settings.database.url == f"sqlite:///{settings.home}/promptmill.db"
    assert settings.queue.url == ""
    assert (settings.queue.chunk_size, settings.engine.max_batch_size, settings.engine.prefix_reuse) == (32, 0, True)
    assert settings.artifacts_dir == settings.home / "artifacts"


def test_the_environment_wins_over_the_file_and_the_file_over_defaults(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    env_file = tmp_path / ".env"
    env_file.write_text("PROMPTMILL_ENGINE_THREADS=3\nPROMPTMILL_ENGINE_MAX_BATCH_SIZE=8\nOTHER_PROGRAM=1\n")
    monkeypatch.setenv("PROMPTMILL_ENGINE_MAX_BATCH_SIZE", "16")
    engine = load_settings(env_file).engine
    assert (engine.threads, engine.max_batch_size, engine.prefill_chunk_tokens) == (3, 16, 0)


def test_the_file_of_the_working_directory_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("PROMPTMILL_LOG_LEVEL=debug\n")
    monkeypatch.chdir(tmp_path)
    assert load_settings().log.level == "debug"


def test_an_empty_variable_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """As docker-compose passes variables that `.env` leaves empty."""
    monkeypatch.setenv("PROMPTMILL_ENGINE_MAX_BATCH_SIZE", "")
    assert load_settings(env_file=None).engine.max_batch_size == 0


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("PROMPTMILL_ENGINE_MAX_BATCH_SIZE", "many", "'many' is not accepted; wanted: a whole number, 0 to 4,096"),
        ("PROMPTMILL_ENGINE_MAX_BATCH_SIZE", "-1", "value '-1' is not accepted; wanted: a whole number, 0 to 4,096"),
        ("PROMPTMILL_ENGINE_PREFIX_REUSE", "perhaps", "value 'perhaps' is not accepted; wanted: true or false"),
        ("PROMPTMILL_LOG_LEVEL", "loud", "wanted: 'debug', 'info', 'warning' or 'error'"),
        ("PROMPTMILL_WORKER_LEASE_S", "1", "value '1' is not accepted; wanted: a number, 3 or more"),
        ("PROMPTMILL_WORKER_LEASE_S", "long", "value 'long' is not accepted; wanted: a number, 3 or more"),
        ("PROMPTMILL_WORKER_LEASE_S", "inf nan", "wanted: a number, 3 or more"),
        ("PROMPTMILL_WORKER_MAX_ATTEMPTS", "2.5", "wanted: a whole number, 1 to 100"),
    ],
)
def test_a_wrong_value_names_variable_value_and_wanted_form(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as raised:
        load_settings(env_file=None)
    assert raised.value.message.startswith(f"{name}: ")
    assert says in raised.value.message


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("PROMPTMILL_ENGINE_MAX_BATCHSIZE", "PROMPTMILL_ENGINE_MAX_BATCH_SIZE"),
        ("PROMPTMILL_DATABASE", "PROMPTMILL_DATABASE_URL"),
        ("PROMPTMILL_LEASE_S", "PROMPTMILL_WORKER_LEASE_S"),
    ],
)
def test_an_unknown_variable_is_an_error_that_names_the_nearest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, nearest: str
) -> None:
    """A misspelt setting that is silently ignored costs a day."""
    monkeypatch.setenv(name, "1")
    with pytest.raises(SettingsError, match=f"unknown setting {name} in the environment; .* {nearest} "):
        load_settings(env_file=None)
    monkeypatch.delenv(name)
    (tmp_path / ".env").write_text(f"{name}=1\n")
    with pytest.raises(SettingsError, match=f"unknown setting {name} in .*\\.env; .* {nearest} "):
        load_settings(tmp_path / ".env")


def test_an_unknown_variable_that_is_like_no_other_is_compared_with_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """`the nearest is PROMPTMILL_WORKER_LEASE_S` would send whoever wrote PROMPTMILL_COLOUR the wrong way."""
    for name in ("PROMPTMILL_COLOUR", "PROMPTMILL_WHATEVER_ELSE", "PROMPTMILL_X"):
        with monkeypatch.context() as changed:
            changed.setenv(name, "1")
            with pytest.raises(SettingsError) as raised:
                load_settings(env_file=None)
        assert raised.value.message == (
            f"unknown setting {name} in the environment; remove it, or see which there are (docs/settings.md)"
        )


@pytest.mark.parametrize("wrong", ["", " x ", "-7", "1e999", "9" * 30])
def test_what_is_no_number_is_answered_with_the_wanted_form_everywhere(
    monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    """No setting lets the words of the validation library through."""
    for name, (_, path) in variables().items():
        group, _, own = path.partition(".")
        if not own or Settings.model_fields[group].annotation.model_fields[own].annotation not in (int, float):  # type: ignore[union-attr]
            continue
        with monkeypatch.context() as changed:
            changed.setenv(name, wrong)
            try:
                load_settings(env_file=None)
            except SettingsError as error:
                assert "wanted: a number, " in error.message or "wanted: a whole number, " in error.message
                assert "parse" not in error.message


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / ".env").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsError, match=r"cannot read .*\.env"):
        load_settings(tmp_path / ".env")


def test_secrets_do_not_print(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMPTMILL_DATABASE_URL", "postgresql://me:hunter2@db/name")
    monkeypatch.setenv("PROMPTMILL_QUEUE_URL", "redis://:hunter2@redis/0")
    settings = load_settings(env_file=None)
    assert "hunter2" not in f"{settings} {settings!r} {settings.database!r}"
    assert settings.database.url == "postgresql://me:hunter2@db/name"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("# mine\nPROMPTMILL_LOG_LEVEL='hunter2\n", 2),
        ('PROMPTMILL_LOG_LEVEL=debug\n\nPROMPTMILL_HOME="hunter2', 3),
        ("OTHER=1\nhunter2 line\n", 2),
        ("PROMPTMILL_LOG_LEVEL\n", 1),
        ("export PROMPTMILL_LOG_LEVEL\n", 1),
        ("=hunter2\n", 1),
    ],
)
def test_a_line_of_the_file_that_is_no_setting_is_refused(tmp_path: Path, text: str, line: int) -> None:
    """It was left out, and the program went on without the setting."""
    (tmp_path / ".env").write_text(text)
    with pytest.raises(SettingsError) as raised:
        load_settings(tmp_path / ".env")
    assert raised.value.message == (
        f"{tmp_path / '.env'}, line {line}, is no setting; write NAME=value, close the quotes that it opens, "
        "or begin it with # to leave it out"
    )


def test_lines_of_other_programs_and_an_editors_mark_are_taken(tmp_path: Path) -> None:
    (tmp_path / ".env").write_bytes(b"\xef\xbb\xbfPROMPTMILL_LOG_LEVEL=debug\r\nOTHER\nexport A='b\nc' # d\n\n# e\n")
    assert load_settings(tmp_path / ".env").log.level == "debug"


def test_what_has_the_files_name_and_is_no_file_is_refused(tmp_path: Path) -> None:
    assert load_settings(tmp_path / ".env").log.level == "info"
    (tmp_path / ".env").mkdir()
    with pytest.raises(SettingsError, match=r"/\.env is not a file; .* move it away"):
        load_settings(tmp_path / ".env")
    (tmp_path / ".env" / "pyvenv.cfg").write_text("")  # a virtual environment by that name is nothing of ours
    assert load_settings(tmp_path / ".env").log.level == "info"
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    with pytest.raises(SettingsError, match="is not a file"):
        load_settings(tmp_path / "gone")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://127.0.0.1:abc/0", "the port after the host is not a number from 1 to 65,535"),
        ("redis://127.0.0.1:99999/0", "the port after the host is not a number from 1 to 65,535"),
        ("redis://127.0.0.1:0/0", "the port after the host"),
        ("redis://127.0.0.1:/0", "the port after the host"),
        ("redis://127.0.0.1:6379/abc", "the database after the host is not a number"),
        ("redis://127.0.0.1:6379/-1", "the database after the host"),
        ("redis://127.0.0.1:6379/0/1", "the database after the host"),
        ("redis://[::1", "the host is not an IPv6 address in brackets"),
        ("redis://[zz]:6379/0", "the host is not an IPv6 address in brackets"),
        ("redis://::1", "the host is an IPv6 address without its brackets"),
        ("redis://a]b:6379/0", "the host has a bracket"),
        ("redis://ho\u2100st/0", "the host has a character in it that no host has"),
        ("redis://ho st/0", "it has a space or a control character in it"),
        ("redis://host/0\n", "it has a space or a control character in it"),
        ("redis://host/0#1", "it has a ; or a # in it"),
        ("redis://host/0;redis://other/0", "it has a ; or a # in it"),
        ("redis://host/0?db=3", "after ? it may have ssl_cert_reqs"),
        ("redis://host/0?ssl_cert_reqs=none", "and those with rediss://"),
        ("rediss://host/0?ssl_cert_reqs=perhaps", "ssl_cert_reqs is none of none, optional, required"),
        ("redis+socket://host/path", "it has no absolute path to a socket"),
        ("redis+socket://", "it has no absolute path to a socket"),
        ("redis+socket:///path?virtual_host=abc", "the database (virtual_host) is not a whole number"),
        ("redis+socket:///path?db=1", "after ? it may have virtual_host alone"),
        ("redis+socket:///path#1", "it has a # in it"),
        ("redis://:hunter2/x@127.0.0.1:6379/0", "the user or the password has one of"),
        ("redis://:hunter2@x@127.0.0.1:6379/0", "the user or the password has one of"),
        ("redis://:hunter2#x@127.0.0.1:6379/0", "the user or the password has one of"),
        ("redis://:hunter2?x@127.0.0.1:6379/0", "the user or the password has one of"),
        ("redis://:hunter2[x@127.0.0.1:6379/0", "the user or the password has one of"),
        ("redis://:hunter2;x@127.0.0.1:6379/0", "it has a ; or a # in it"),
        ("redis://user:hunter2/0", "the port after the host"),
        ("redis+socket://:hunter2@/path", "it has no absolute path to a socket"),
        ("hunter2@127.0.0.1:6379/0", "begins with no scheme that is known; wanted: redis://host:6379/0"),
        (":hunter2@127.0.0.1://6379", "begins with no scheme that is known; wanted: redis://host:6379/0"),
    ],
)
def test_a_queue_url_that_is_none_is_refused_without_a_part_of_it(
    monkeypatch: pytest.MonkeyPatch, url: str, says: str
) -> None:
    """What is not a port is the rest of a password where that has a slash in it; libraries quote it in tracebacks."""
    monkeypatch.setenv("PROMPTMILL_QUEUE_URL", url)
    with pytest.raises(SettingsError) as raised:
        load_settings(env_file=None)
    said = raised.value.message
    assert said.startswith("PROMPTMILL_QUEUE_URL")
    assert says in said
    assert "write it as redis" in said or "wanted: redis://" in said
    assert not any(part in said for part in ("hunter2", "x@", "\n", "127.0.0.1"))
    assert raised.value.__cause__ is None


@pytest.mark.parametrize(
    "url",
    [
        "redis://",
        "redis://queue",
        "redis://queue:6379",
        "redis://queue:6379/",
        "redis://queue//3",
        "redis:///3",
        "redis://[::1]:6379/0",
        "redis://[fe80::1%25eth0]/0",
        "redis://me:a%40b%2Fc%3A%23%5B@queue:6379/15",
        "redis://me:a:b!$&'()*+,=@queue/0",
        "rediss://:pw@queue/0?ssl_cert_reqs=none&ssl_ca_certs=/etc/ca.pem",
        "redis+socket:///run/queue.sock",
        "redis+socket:///run/a%20b@c.sock?virtual_host=3",
    ],
)
def test_queue_urls_that_are_right_are_taken_by_both_libraries(url: str) -> None:
    check_queue_url(url)
    with contextlib.closing(make_app(QueueSettings(url=url))) as app, app.connection_for_write() as connection:
        assert connection.info()["transport"].startswith("redis")
    redis.ConnectionPool.from_url(redis_url(url))


def test_settings_cannot_be_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings(env_file=None)
    with pytest.raises(ValueError, match="frozen"):
        settings.engine.threads = 3  # type: ignore[misc]


def test_a_home_is_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Child processes may run in another folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PROMPTMILL_HOME", "here")
    assert load_settings(env_file=None).home == tmp_path / "here"
    monkeypatch.setenv("PROMPTMILL_HOME", "~/there")
    assert load_settings(env_file=None).home == Path.home() / "there"


def test_sockets_of_a_home_with_a_long_path_live_in_a_short_folder() -> None:
    short = Settings(home=Path("/srv/pm"))
    assert short.runtime_dir == Path("/srv/pm/run")
    long = Settings(home=Path("/srv") / ("x" * 90))
    other = Settings(home=Path("/srv") / ("y" * 90))
    assert len(str(long.runtime_dir)) <= LONGEST_RUNTIME_DIR
    assert long.runtime_dir != other.runtime_dir
    assert long.runtime_dir == Settings(home=Path("/srv") / ("x" * 90)).runtime_dir


def test_each_setting_has_a_row_in_the_docs() -> None:
    rows = [line for line in (ROOT / "docs" / "settings.md").read_text().splitlines() if line.startswith("| `")]
    documented = {row.split("`")[1]: row.split("|")[2].strip() for row in rows}
    assert set(documented) == set(variables())
    for name, (default, _) in variables().items():
        if default not in (None, ""):
            shown = str(default).lower() if isinstance(default, bool) else str(default).removesuffix(".0")
            assert documented[name] == f"`{shown}`", name


def test_the_bounds_of_each_number_are_in_the_docs() -> None:
    """Beside the unit: what an error would say."""
    rows = [line for line in (ROOT / "docs" / "settings.md").read_text().splitlines() if line.startswith("| `")]
    units = {row.split("`")[1]: row.split("|")[3].strip() for row in rows}
    for name, (_, path) in variables().items():
        group, _, own = path.partition(".")
        if own and (bounds := bounds_of(Settings.model_fields[group].annotation.model_fields[own])):  # type: ignore[union-attr]
            assert units[name].endswith(f", {bounds}"), name


def test_a_child_process_loads_the_same_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a parent decided, by environment or by itself, reaches its workers."""
    loaded = load_settings(env_file=None)
    engine = loaded.engine.model_copy(update={"max_batch_size": 7, "prefix_reuse": False})
    changed = loaded.model_copy(update={"engine": engine})
    for name, value in environment_of(changed).items():
        monkeypatch.setenv(name, value)
    assert load_settings(env_file=None) == changed
