"""On which GPUs there is to be a worker. The workers' side knows; it is asked in a process of its own, since a broken
driver may take that down.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs.settings import Settings, environment_of
from storage.errors import PromptmillError

# Longer than a driver takes to wake up all devices of a large machine.
ASK_TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device that a worker is pinned to. name: gpu0, or gpu0.1 for an instance of one in MIG mode."""

    name: str
    uuid: str


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """gpus: a worker for each; none: workers on the CPU. reason: why no GPU is used where one might have been.

    has_gpu: whether there is one.
    """

    gpus: tuple[Gpu, ...] = ()
    reason: str = ""
    has_gpu: bool = False


def plan_gpus(settings: Settings, artifact: Path) -> GpuPlan:
    """Ask on which GPUs to start workers. Raises PromptmillError where GPUs are wanted and cannot be used."""
    wanted = settings.worker.gpus
    if wanted == "none" and settings.engine.flavour == "cuda":
        raise PromptmillError(
            "workers on the CPU are asked for and PROMPTMILL_ENGINE_FLAVOUR is cuda; set it to auto or cpu",
            code="gpu_unavailable",
        )
    if wanted == "none" or (wanted == "auto" and settings.engine.flavour in ("cpu", "null")):
        return GpuPlan()
    if wanted == "auto" and not _has_driver():
        return GpuPlan(reason="no NVIDIA driver is installed here")  # most machines, and they need not wait to hear it
    command = [sys.executable, "-m", "workers", "devices", "--artifact", str(artifact), "--gpus", wanted]
    environment = {**os.environ, **environment_of(settings)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_TIMEOUT_S, env=environment)
    except subprocess.TimeoutExpired:
        raise PromptmillError(
            f"the NVIDIA driver did not answer within {ASK_TIMEOUT_S} s; look at nvidia-smi, or use --gpus none",
            code="gpu_unavailable",
        ) from None
    said = done.stderr.strip().splitlines()
    if done.returncode != 0:
        why = said[-1].removeprefix("error: ") if said else f"exit code {done.returncode}"
        raise PromptmillError(why, code="gpu_unavailable")
    found = json.loads(done.stdout)
    gpus = tuple(Gpu(device["name"], device["uuid"]) for device in found["devices"])
    return GpuPlan(gpus, found["reason"], bool(gpus) or found["has_gpu"])


def _has_driver() -> bool:
    """Whether the library that NVML lives in can be loaded; nothing is asked of it."""
    try:
        ctypes.CDLL("nvml.dll" if os.name == "nt" else "libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def for_gpus(settings: Settings, gpus: Sequence[Gpu]) -> Settings:
    """Where the flavour is open: workers that have a GPU use it, and others do not look for one."""
    if settings.engine.flavour != "auto":
        return settings
    flavour = "cuda" if gpus else "cpu"
    return settings.model_copy(update={"engine": settings.engine.model_copy(update={"flavour": flavour})})
