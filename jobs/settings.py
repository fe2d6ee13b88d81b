"""The one settings object: read once by each entry point from the environment, then `.env`, then defaults.

A variable is `PROMPTMILL_`, the group, the field: PROMPTMILL_ENGINE_MAX_BATCH_SIZE is `settings.engine.max_batch_size`.
Only `home` stands outside a group. Each part of the program gets its group alone. docs/settings.md has a row for each
variable.
"""

from __future__ import annotations

import difflib
import hashlib
import ipaddress
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import platformdirs
from dotenv import dotenv_values
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, SettingsConfigDict

from storage.errors import SettingsError

PREFIX = "PROMPTMILL_"
# The operating systems' bound on a Unix socket's path is 104 to 108 bytes; sockets get names of up to 16.
LONGEST_RUNTIME_DIR = 84
QUEUE_SCHEMES = ("redis", "rediss", "redis+socket")
# How much of two names must be the same for one to be taken for the other, misspelt.
CLOSE = 0.6


class DatabaseSettings(BaseModel):
    """Where the record is kept."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field("", repr=False)


class QueueSettings(BaseModel):
    """Redis, and how work is cut for it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field("", repr=False)
    chunk_size: int = Field(32, ge=1, le=1024)
    chunk_tokens: int = Field(65_536, ge=1)
    visibility_timeout_s: int = Field(3600, ge=60)


class WorkerSettings(BaseModel):
    """How a worker holds requests, and how it leaves."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    lease_s: float = Field(60.0, ge=3.0)
    drain_s: float = Field(30.0, ge=0.0)
    max_attempts: int = Field(3, ge=1, le=100)
    retry_backoff_s: float = Field(1.0, ge=0.0)
    answer_cache: bool = False
    gpus: str = Field("auto", min_length=1)


class EngineSettings(BaseModel):
    """How the model is run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    flavour: Literal["auto", "cpu", "cuda", "null"] = "auto"
    null_token_s: float = Field(0.0, ge=0.0, le=10.0)
    null_prefill_tokens_per_s: float = Field(0.0, ge=0.0)

    max_batch_size: int = Field(0, ge=0, le=4096)
    context_length: int = Field(2048, ge=0)
    prefill_chunk_tokens: int = Field(0, ge=0)
    kv_cache_mib: int = Field(0, ge=0)
    threads: int = Field(0, ge=0)
    prefix_reuse: bool = True
    allow_spinning: bool = True
    watchdog_s: float = Field(120.0, ge=1.0)


class GatewaySettings(BaseModel):
    """The HTTP door: where it listens, and what one call may cost."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field("127.0.0.1", min_length=1)
    port: int = Field(8000, ge=0, le=65_535)
    open_on_loopback: bool = False
    max_upload_bytes: int = Field(200_000_000, ge=1)
    max_body_bytes: int = Field(12_000_000, ge=1024)
    max_batch_lines: int = Field(50_000, ge=1)
    file_lifetime_s: float = Field(2_592_000.0, ge=0.0)
    receive_timeout_s: float = Field(30.0, ge=1.0)
    drain_s: float = Field(30.0, ge=0.0)
    refuse_impossible_deadlines: bool = False
    request_timeout_s: float = Field(600.0, ge=1.0, le=86_400.0)
    max_open_calls: int = Field(1000, ge=1)
    max_waiting_requests: int = Field(256, ge=1)
    max_wait_s: float = Field(30.0, ge=0.0)


class DoorSettings(BaseModel):
    """The doors beside HTTP: Celery by name, and the Redis inbox."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_open_calls: int = Field(256, ge=1)
    request_timeout_s: float = Field(3600.0, ge=1.0)
    result_lifetime_s: int = Field(86_400, ge=1)


class WebhookSettings(BaseModel):
    """How receivers are told of ended batches."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    allowed_networks: str = ""
    timeout_s: float = Field(10.0, ge=0.1, le=60.0)
    first_retry_s: float = Field(5.0, ge=0.01, le=300.0)

    @field_validator("allowed_networks")
    @classmethod
    def _are_networks(cls, text: str) -> str:
        for each in filter(None, map(str.strip, text.split(","))):
            try:
                ipaddress.ip_network(each)
            except ValueError:
                raise PydanticCustomError(
                    "networks", "networks such as 10.0.0.0/8, separated by commas; {each} is none", {"each": each}
                ) from None
        return text


class LogSettings(BaseModel):
    """What is logged."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    level: Literal["debug", "info", "warning", "error"] = "info"


class Settings(BaseSettings):
    """All settings; `load_settings` makes them."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter="_",
        env_nested_max_split=1,
        env_file_encoding="utf-8",
        env_ignore_empty=True,
        frozen=True,
        extra="ignore",
    )

    home: Path = Field(default_factory=lambda: Path(platformdirs.user_data_dir("promptmill", appauthor=False)))
    database: DatabaseSettings = DatabaseSettings()  # type: ignore[call-arg]  # the mypy plugin is not used
    queue: QueueSettings = QueueSettings()  # type: ignore[call-arg]
    worker: WorkerSettings = WorkerSettings()  # type: ignore[call-arg]
    engine: EngineSettings = EngineSettings()  # type: ignore[call-arg]
    gateway: GatewaySettings = GatewaySettings()  # type: ignore[call-arg]
    door: DoorSettings = DoorSettings()  # type: ignore[call-arg]
    webhook: WebhookSettings = WebhookSettings()  # type: ignore[call-arg]
    log: LogSettings = LogSettings()

    @property
    def artifacts_dir(self) -> Path:
        """Artifacts that are found by name alone."""
        return self.home / "artifacts"

    @property
    def logs_dir(self) -> Path:
        return self.home / "logs"

    @property
    def files_dir(self) -> Path:
        return self.home / "files"

    @property
    def queue_dir(self) -> Path:
        """What the embedded queue server keeps."""
        return self.home / "queue"

    @property
    def runtime_dir(self) -> Path:
        """Where sockets live: in home, or in a short folder of its own where home's path is too long for a socket."""
        inside = self.home / "run"
        if len(os.fsencode(inside)) <= LONGEST_RUNTIME_DIR:
            return inside
        digest = hashlib.sha256(os.fsencode(self.home)).hexdigest()[:12]
        return Path(tempfile.gettempdir()) / f"promptmill-{digest}"


def load_settings(env_file: Path | None = Path(".env")) -> Settings:
    """Read the environment, then `env_file` (of the working directory), then defaults.

    Raises SettingsError for an unknown variable with our prefix, and for a value of the wrong form.
    """
    if env_file is not None and not env_file.is_file():
        env_file = None
    _refuse_unknown(os.environ, "in the environment")
    if env_file is not None:
        _refuse_unknown(_read_env_file(env_file), f"in {env_file}")
    try:
        settings = Settings(_env_file=env_file)  # type: ignore[call-arg]
    except ValidationError as error:
        raise SettingsError(_explain(error)) from None  # the cause would show secrets
    if settings.queue.url:
        check_queue_url(settings.queue.url)
    home = settings.home.expanduser().absolute()
    url = settings.database.url or f"sqlite:///{home / 'promptmill.db'}"
    return settings.model_copy(
        update={"home": home, "database": settings.database.model_copy(update={"url": url})},
    )


def check_queue_url(url: str) -> None:
    """Raise SettingsError unless a URL names a Redis. The URL is not repeated: it may hold a password."""
    scheme = url.partition("://")[0]
    if scheme not in QUEUE_SCHEMES:
        raise SettingsError(
            f"PROMPTMILL_QUEUE_URL begins with {scheme[:20]!r}; wanted: redis://host:6379/0, rediss://, "
            "or redis+socket:///path"
        )


def environment_of(settings: Settings) -> dict[str, str]:
    """The variables that make a child process load these same settings."""
    environment = {f"{PREFIX}HOME": str(settings.home)}
    for variable, (_, path) in variables().items():
        group, _, name = path.partition(".")
        if name:
            environment[variable] = str(getattr(getattr(settings, group), name))
    return environment


def variables() -> dict[str, tuple[Any, str]]:
    """Every variable -> its default and the field it sets, as `group.field`."""
    found: dict[str, tuple[Any, str]] = {f"{PREFIX}HOME": (None, "home")}
    for group, group_field in Settings.model_fields.items():
        kind = group_field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            for name, field in kind.model_fields.items():
                found[f"{PREFIX}{group}_{name}".upper()] = (field.default, f"{group}.{name}")
    return found


def _read_env_file(env_file: Path) -> Mapping[str, str | None]:
    try:
        return dotenv_values(env_file, encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read {env_file}: {error}; correct or remove it") from error


def _refuse_unknown(names: Mapping[str, str | None], where: str) -> None:
    known = variables()
    for name in sorted(names):
        if name.upper().startswith(PREFIX) and name.upper() not in known:
            own = {each.removeprefix(PREFIX): each for each in known}
            near = difflib.get_close_matches(name.upper().removeprefix(PREFIX), own, n=1, cutoff=CLOSE)
            way_out = f"the nearest known one is {own[near[0]]}" if near else "remove it, or see which there are"
            raise SettingsError(f"unknown setting {name} {where}; {way_out} (docs/settings.md)")


def _explain(error: ValidationError) -> str:
    """One sentence for each wrong value. URLs are not repeated: they hold passwords."""
    sentences = []
    for problem in error.errors():
        name = PREFIX + "_".join(str(part) for part in problem["loc"]).upper()
        shown = "the value" if name.endswith("_URL") else f"value {problem['input']!r}"
        wanted = problem["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        field = _field(problem["loc"])
        if field is not None and (kind := _KINDS.get(field.annotation)) is not None:
            wanted = ", ".join(filter(None, (kind, bounds_of(field))))
        sentences.append(f"{name}: {shown} is not accepted; wanted: {wanted}")
    return "; ".join(sentences)


_KINDS: Mapping[Any, str] = {int: "a whole number", float: "a number", bool: "true or false"}


def bounds_of(field: FieldInfo) -> str:
    """What a number may be, in words; empty: whatever it likes."""
    bounds = {name: getattr(each, name) for each in field.metadata for name in ("ge", "le") if hasattr(each, name)}
    least, most = bounds.get("ge"), bounds.get("le")
    if least is None:
        return "" if most is None else f"at most {most:,g}"
    return f"{least:,g} or more" if most is None else f"{least:,g} to {most:,g}"


def _field(path: tuple[int | str, ...]) -> FieldInfo | None:
    kind: Any = Settings
    field = None
    for name in path:
        field = kind.model_fields.get(str(name)) if isinstance(kind, type) and issubclass(kind, BaseModel) else None
        if field is None:
            return None
        kind = field.annotation
    return field
