"""Where workers run: on which GPUs there is to be one each, and what a worker that starts is pinned to.

A worker sees one device. It is pinned by CUDA_VISIBLE_DEVICES with the device's UUID, since numbers change with what is
visible; what a scheduler left visible is the most there can be.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

import structlog

from workers.devices import Device, GpuError, choose, list_devices, open_nvml, visible
from workers.engine.flavour import CudaUnavailable, Flavour, choose_flavour
from workers.models.artifact import Artifact

log = structlog.get_logger()

VISIBLE = "CUDA_VISIBLE_DEVICES"
WantedFlavour = Literal["auto", "cpu", "cuda", "null"]


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """devices: a worker for each; none: workers on the CPU. reason: why no GPU is used where one might have been.

    has_gpu: whether there is one.
    """

    devices: tuple[Device, ...]
    reason: str = ""
    has_gpu: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """What a worker runs on. name: how its own name begins. device: what it is pinned to, and watches."""

    name: str
    flavour: Flavour
    device: Device | None


def plan_workers(
    gpus: str,
    flavour: WantedFlavour,
    artifact: Artifact,
    environment: MutableMapping[str, str],
    nvml: ModuleType,
    trouble: Callable[[], str | None],
) -> WorkerPlan:
    """On which GPUs there is to be a worker. gpus: `auto`, or as `choose` takes it. trouble: as `choose_flavour`.

    Raises GpuError or CudaUnavailable where GPUs are asked for and cannot be used.
    """
    if gpus == "none" or (gpus == "auto" and flavour in ("cpu", "null")):
        return WorkerPlan(())
    chosen = choose_flavour("cuda" if gpus != "auto" and flavour == "auto" else flavour, artifact, trouble)
    if gpus == "auto" and chosen.flavour != "cuda":
        return WorkerPlan((), chosen.reason, has_gpu=_find(None, environment.get(VISIBLE), nvml) is not None)
    with open_nvml(nvml):
        there = visible(list_devices(nvml), environment.get(VISIBLE))
    return WorkerPlan(tuple(choose("all" if gpus == "auto" else gpus, there)))


def place_worker(
    gpu: str | None,
    flavour: WantedFlavour,
    artifact: Artifact,
    environment: MutableMapping[str, str],
    nvml: ModuleType,
    trouble: Callable[[], str | None],
    number: int | None = None,
) -> Placement:
    """Pin this process to one device, and choose the flavour. Called before anything has touched CUDA.

    gpu: the device that it must run on; None: the first visible one where the flavour is CUDA. number: which of this
    machine's workers on the CPU it is, where there are several.
    Raises GpuError and CudaUnavailable.
    """
    device: Device | None = None
    if gpu is not None or flavour in ("auto", "cuda"):
        device = _find(gpu, environment.get(VISIBLE), nvml)
    if device is not None:
        environment[VISIBLE] = device.uuid
    chosen = choose_flavour(flavour, artifact, trouble)
    if chosen.reason:
        log.warning("gpu_not_used", reason=chosen.reason)
    if gpu is None and chosen.flavour != "cuda":
        return Placement(chosen.flavour if number is None else f"{chosen.flavour}{number}", chosen.flavour, None)
    if device is None:
        raise CudaUnavailable("CUDA works and NVML shows no device; see promptmill doctor", code="cuda_unavailable")
    return Placement(device.name, chosen.flavour, device)


def _find(gpu: str | None, variable: str | None, nvml: ModuleType) -> Device | None:
    """The device that is asked for, or the first one; None where none is asked for and none is there."""
    try:
        with open_nvml(nvml):
            there = visible(list_devices(nvml), variable)
    except GpuError:
        if gpu is None:
            return None
        raise
    if gpu is None:
        return there[0] if there else None
    found = choose(gpu, there)
    if len(found) != 1:
        raise GpuError(f"--gpu {gpu} means {len(found)} devices and a worker runs on one", code="gpu_not_found")
    return found[0]
