"""Where settings come from, and what a wrong one says."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.settings import LONGEST_RUNTIME_DIR, Settings, bounds_of, environment_of, load_settings, variables
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
