"""The one settings object: read once by each entry point from the environment, then `.env`, then defaults.

A variable is `PROMPTMILL_`, the group, the field: PROMPTMILL_ENGINE_MAX_BATCH_SIZE is `settings.engine.max_batch_size`.
Only `home` stands outside a group. Each part of the program gets its group alone. docs/settings.md has a row for each
variable.
"""

from __future__ import annotations

import difflib
import hashlib
import io
import ipaddress
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl, urlsplit

import platformdirs
from dotenv import dotenv_values
from dotenv.parser import parse_stream
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, SettingsConfigDict

from storage.addresses import wrong_in_address
from storage.errors import SettingsError

PREFIX = "PROMPTMILL_"
# The operating systems' bound on a Unix socket's path is 104 to 108 bytes; sockets get names of up to 16.
LONGEST_RUNTIME_DIR = 84
QUEUE_SCHEMES = ("redis", "rediss", "redis+socket")
# What the part after ? may set: in the words of both kombu and the redis package, which each read the URL.
TLS_OPTIONS = ("ssl_cert_reqs", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname")
CERT_REQS = ("none", "optional", "required")
# Some editors begin a file with a mark, which would be a part of the first name.
ENV_FILE_ENCODING = "utf-8-sig"
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
        env_file_encoding=ENV_FILE_ENCODING,
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
    _refuse_unknown(os.environ, "in the environment")
    if env_file is not None and not _is_there(env_file):
        env_file = None
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
    """Raise SettingsError unless a URL names a Redis. No part of the URL is repeated: it may be one of a password."""
    scheme, has_scheme, rest = url.partition("://")
    if scheme not in QUEUE_SCHEMES:
        shown = repr(scheme[:20]) if has_scheme and scheme.isalnum() else "no scheme that is known"
        raise SettingsError(
            f"PROMPTMILL_QUEUE_URL begins with {shown}; wanted: redis://host:6379/0, rediss://, or redis+socket:///path"
        )
    if scheme == "redis+socket":
        if wrong := _wrong_in_socket_url(rest):
            raise SettingsError(
                f"PROMPTMILL_QUEUE_URL: {wrong}; write it as redis+socket:///path?virtual_host=0, "
                "without a user, a password or a host"
            )
    elif wrong := _wrong_in_network_url(scheme, rest):
        raise SettingsError(
            f"PROMPTMILL_QUEUE_URL: {wrong}; write it as {scheme}://user:password@host:6379/0, with each of "
            "/ @ : ; ? # [ ] % in user and password percent-encoded (%2F %40 %3A %3B %3F %23 %5B %5D %25)"
        )


def _wrong_in_socket_url(rest: str) -> str | None:
    """What is wrong with what follows redis+socket://, in words; None: nothing."""
    path, _, query = rest.partition("?")
    if "#" in rest:
        return "it has a # in it (in a path that is %23)"
    if ";" in rest:
        return "it has a ; in it (in a path that is %3B)"
    if not path.startswith("/") or path.strip("/") == "":
        return "it has no absolute path to a socket"
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name != "virtual_host":
            return "after ? it may have virtual_host alone"
        if not _is_database_number(value.strip("/")):
            return "the database (virtual_host) is not a whole number, 0 or more"
    return None


def _wrong_in_network_url(scheme: str, rest: str) -> str | None:
    """What is wrong with what follows redis:// or rediss://, in words; None: nothing."""
    if any(each.isspace() or not each.isprintable() for each in rest):
        return "it has a space or a control character in it"
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    user, _, address = authority.rpartition("@")
    path, _, query = rest[len(authority) :].partition("?")
    # An @ behind the first / ? # is the real one, and what was taken for host and port is the start of a password.
    if "@" in rest[len(authority) :] or any(each in user for each in "@[]"):
        return "the user or the password has one of / @ ? # [ ] in it as it is"
    if ";" in rest or "#" in rest:  # kombu takes what a ; parts for several URLs
        return "it has a ; or a # in it as it is"
    return (
        wrong_in_address(address)
        or (None if _is_database_number(path.lstrip("/")) else "the database after the host is not a number, 0 or more")
        or _wrong_in_tls_options(scheme, query)
        or _unreadable(rest)
    )


def _is_database_number(text: str) -> bool:
    return text == "" or (text.isascii() and text.isdecimal() and len(text) <= 9)


def _wrong_in_tls_options(scheme: str, query: str) -> str | None:
    for name, value in parse_qsl(query, keep_blank_values=True):
        if scheme != "rediss" or name not in TLS_OPTIONS:
            return f"after ? it may have {', '.join(TLS_OPTIONS)} alone, and those with rediss://"
        if name == "ssl_cert_reqs" and value not in CERT_REQS:
            return f"ssl_cert_reqs is none of {', '.join(CERT_REQS)}"
    return None


def _unreadable(rest: str) -> str | None:
    """What only the library says that takes the URL apart, such as letters that look like a slash."""
    try:
        urlsplit(f"http://{rest}")
    except ValueError:
        return "the host has a character in it that no host has"
    return None


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


def _is_there(env_file: Path) -> bool:
    """Whether the file is there to be read. Raises SettingsError for what has its name and is no file."""
    if env_file.is_file():
        return True
    if env_file.is_dir() and (env_file / "pyvenv.cfg").exists():
        return False  # a virtual environment, as some call theirs
    if os.path.lexists(env_file):
        raise SettingsError(
            f"{env_file.absolute()} is not a file; write the settings into one of that name, move it away, or work in "
            "another folder"
        )
    return False


def _read_env_file(env_file: Path) -> Mapping[str, str | None]:
    """Names and values. Raises SettingsError for a line that is none: python-dotenv would leave it out.

    Such a line is not repeated: it may hold a password.
    """
    try:
        text = env_file.read_text(encoding=ENV_FILE_ENCODING)
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read {env_file.absolute()}: {error}; correct or remove it") from error
    for binding in parse_stream(io.StringIO(text)):
        is_ours = (binding.key or "").upper().startswith(PREFIX)
        if binding.error or (is_ours and binding.value is None):
            said = binding.original.string
            line = binding.original.line + said[: len(said) - len(said.lstrip())].count("\n")  # empty ones before it
            raise SettingsError(
                f"{env_file.absolute()}, line {line}, is no setting; write NAME=value, close the quotes that it opens, "
                "or begin it with # to leave it out"
            )
    return dotenv_values(stream=io.StringIO(text))


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
