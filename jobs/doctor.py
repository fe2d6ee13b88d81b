"""`promptmill doctor`: what this machine has for the job, what is missing, and the way out."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from jobs.artifacts import DEMO_NAME, find_artifact, known_artifacts
from jobs.queue import make_app, ping
from jobs.queue_server import find_server
from jobs.settings import Settings
from storage.database import check_schema, open_database, schema_revision
from storage.errors import PromptmillError

OLDEST_PYTHON = (3, 11)
LEAST_FREE_DISK_GIB = 2
PROBE_TIMEOUT_S = 120
GIB = 1 << 30
RESET = "reset it (nvidia-smi --gpu-reset) or restart the machine"


@dataclass(frozen=True, slots=True)
class Finding:
    """level: ok, note (works, but worth knowing), missing (something will not run)."""

    level: Literal["ok", "note", "missing"]
    subject: str
    text: str
    way_out: str = ""


def examine(settings: Settings, model: str | None = None) -> list[Finding]:
    """Look at everything a run takes; nothing is changed or started for good."""
    return [
        _python(),
        _home(settings),
        *_compute(_artifact_paths(settings, model)),
        _queue(settings),
        _database(settings),
        *_artifacts(settings, model),
    ]


def _python() -> Finding:
    text = f"{platform.python_version()} at {sys.executable}, promptmill {version('promptmill')}"
    if sys.version_info < OLDEST_PYTHON:
        return Finding("missing", "Python", text, "install Python 3.11 or newer")
    return Finding("ok", "Python", text)


def _home(settings: Settings) -> Finding:
    home, way_out = settings.home, "set PROMPTMILL_HOME to a folder of yours"
    # The first run makes it, in the folder that is there.
    nearest = next(each for each in (home, *home.parents) if os.path.lexists(each))
    if not nearest.is_dir():
        return Finding("missing", "home", f"{home} cannot be made: {nearest} is not a folder", way_out)
    if not os.access(nearest, os.W_OK | os.X_OK):
        what = "is read-only" if nearest == home else f"cannot be made: {nearest} is read-only"
        return Finding("missing", "home", f"{home} {what}", way_out)
    free_gib = shutil.disk_usage(nearest).free / GIB
    text = f"{home}, {free_gib:.0f} GiB free"
    if free_gib < LEAST_FREE_DISK_GIB:
        return Finding("note", "home", text, "make room, or set PROMPTMILL_HOME to a larger disk")
    return Finding("ok", "home", text)


def _artifact_paths(settings: Settings, model: str | None) -> list[Path]:
    try:
        named = find_artifact(model, settings.artifacts_dir).path if model is not None else None
    except PromptmillError:
        return []  # what is wrong with it is said elsewhere
    return [named] if named is not None else known_artifacts(settings.artifacts_dir)


def _compute(artifacts: Sequence[Path]) -> Iterator[Finding]:
    """Ask the workers' side, in a process of its own: a broken driver may take it down."""
    command = [sys.executable, "-m", "workers", "probe", *map(str, artifacts)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=True)
        found: dict[str, Any] = json.loads(done.stdout)
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        said = getattr(error, "stderr", "") or str(error)
        yield Finding("missing", "onnxruntime", f"cannot be used: {str(said).strip()[-300:]}", "reinstall: make setup")
        return
    yield Finding("ok", "onnxruntime", str(found["onnxruntime"]))
    yield from compute_findings(found)


def compute_findings(found: dict[str, Any]) -> Iterator[Finding]:
    """What the workers' side found, in words. found: as `python -m workers probe` prints it."""
    for gpu in found["gpus"]:
        yield _gpu(gpu, found["driver"])
    for provider in found["providers"]:
        yield _provider(provider, found)
        if provider["name"].startswith("CUDA") and found["gpus"] and not found["cuda_trouble"]:
            yield _operators(found["operators_trouble"])
    for path, chosen in found["flavours"].items():
        text = f"{Path(path).name} runs on {chosen['flavour'].upper()}" if chosen["flavour"] else Path(path).name
        # Where there is no GPU, the provider's line has said so.
        if chosen["reason"] and (found["gpus"] or not chosen["flavour"]):
            yield Finding("note", "engine", f"{text}: {chosen['reason']}")
        else:
            yield Finding("ok", "engine", text)


def _gpu(gpu: dict[str, Any], driver: str) -> Finding:
    subject = f"GPU {gpu['name'].removeprefix('gpu')}"
    if "uuid" not in gpu:
        return Finding("missing", subject, gpu["ailment"], RESET)
    text = (
        f"{gpu['model']}, {gpu['free_bytes'] / GIB:.0f} of {gpu['memory_bytes'] / GIB:.0f} GiB free, "
        f"{gpu['uuid']}, driver {driver}"
    )
    if gpu["ailment"]:
        return Finding("missing", subject, f"{text}: {gpu['ailment']}", RESET)
    if gpu["throttling"]:
        return Finding("note", subject, f"{text}, slowed down by {', '.join(gpu['throttling'])}")
    return Finding("ok", subject, text)


def _provider(provider: dict[str, Any], found: dict[str, Any]) -> Finding:
    name = provider["name"].removesuffix("ExecutionProvider")
    subject = f"{name} provider"
    trouble = found["cuda_trouble"]
    if name == "CPU":
        if provider["starts"]:
            return Finding("ok", subject, "starts and computes")
        return Finding("missing", subject, provider["error"], "reinstall: make setup")
    if not found["gpus"]:
        return Finding("note", subject, f"{trouble or 'no NVIDIA GPU was found'}; so prompts run on the CPU")
    if trouble:
        # What is wrong and the way out are two halves of one sentence.
        problem, _, way_out = trouble.rpartition("; ")
        return Finding("missing", subject, f"there is a GPU, but {problem or trouble}", way_out if problem else "")
    if provider["starts"]:
        return Finding("ok", subject, "starts and computes")
    return Finding("missing", subject, f"there is a GPU, but the provider does not start: {provider['error']}")


def _operators(trouble: str | None) -> Finding:
    if trouble is None:
        return Finding("ok", "GPU operators", "our own are built")
    return Finding("note", "GPU operators", f"{trouble}; so ONNX Runtime's own run, 5 to 15 % slower")


def _queue(settings: Settings) -> Finding:
    try:
        if settings.queue.url:
            ping(make_app(settings.queue))
            return Finding("ok", "queue", "the server in PROMPTMILL_QUEUE_URL answers")
        binary = find_server()
        text = f"embedded: {binary.path} ({'.'.join(map(str, binary.version))}, from {binary.source})"
        return Finding("ok", "queue", text)
    except PromptmillError as error:
        return Finding("missing", "queue", error.message)


def _database(settings: Settings) -> Finding:
    try:
        with open_database(settings.database.url) as database:
            revision = schema_revision(database)
            if revision is None:
                return Finding("ok", "database", f"{database.shown_url}, empty; the first run makes its tables")
            check_schema(database)
            return Finding("ok", "database", f"{database.shown_url}, schema {revision}")
    except PromptmillError as error:
        return Finding("missing", "database", error.message)


def _artifacts(settings: Settings, model: str | None) -> Iterator[Finding]:
    try:
        if model is not None:
            artifact = find_artifact(model, settings.artifacts_dir)
            yield Finding("ok", "artifact", f"{artifact.model} at {artifact.path}, digest {artifact.digest[:12]}")
            return
        found = known_artifacts(settings.artifacts_dir)
        for path in found:
            artifact = find_artifact(str(path), settings.artifacts_dir)
            yield Finding("ok", "artifact", f"{artifact.model} at {artifact.path}, digest {artifact.digest[:12]}")
        if not found:
            yield Finding(
                "note",
                "artifact",
                f"none in {settings.artifacts_dir}",
                f"promptmill convert demo {settings.artifacts_dir / DEMO_NAME}",
            )
    except PromptmillError as error:
        yield Finding("missing", "artifact", error.message)
