"""Which flavour of the engine runs an artifact on this machine, and why not the other.

`choose_flavour` decides over plain values; `cuda_trouble` looks at the machine: driver, device, libraries, ONNX
Runtime's provider. Whatever is missing is named together with what brings it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

import pynvml

from storage.errors import PromptmillError
from workers.devices import Device, GpuError, list_devices, open_nvml, visible
from workers.engine.blocks import block_size_for
from workers.models.artifact import Artifact
from workers.models.description import CudaType, DType, ModelDescription
from workers.models.errors import UnsupportedModel

# The type that an artifact's weights have on the device. Wider ones are rounded when they are loaded.
CUDA_TYPES: dict[DType, CudaType] = {"float16": "float16", "bfloat16": "bfloat16", "float32": "float16"}
PROVIDER = "CUDAExecutionProvider"
# What NVIDIA's driver must serve, as it tells its CUDA version, and the first driver that does.
CUDA_VERSION = 13000
OLDEST_DRIVER = "580"
# Paged attention reads blocks directly from this compute capability on (Ampere).
OLDEST_CAPABILITY = (8, 0)
EXTRA = "pip install 'promptmill[cuda]'"
_LIBRARIES = ("libcudart.so.13", "libcublasLt.so.13", "libcublas.so.13", "libcurand.so.10", "libcudnn.so.9")
_WINDOWS_LIBRARIES = ("cudart64_13.dll", "cublasLt64_13.dll", "cublas64_13.dll", "cudnn64_9.dll")


Flavour = Literal["cpu", "cuda", "null"]


class CudaUnavailable(PromptmillError):
    """CUDA was asked for and cannot run this artifact here."""


@dataclass(frozen=True, slots=True)
class FlavourChoice:
    """reason: why a GPU is not used, where one might have been."""

    flavour: Flavour
    reason: str = ""


def choose_flavour(
    wanted: Literal["auto", "cpu", "cuda", "null"], artifact: Artifact, trouble: Callable[[], str | None]
) -> FlavourChoice:
    """Choose what runs an artifact. trouble: asked why CUDA cannot be used here, if that matters.

    Raises CudaUnavailable where CUDA is wanted and cannot be.
    """
    if wanted == "cpu" or wanted == "null":
        return FlavourChoice(wanted)
    if wanted == "auto":
        # A machine without a GPU is told that, not how to convert a model for one.
        reason = trouble() or why_not_on_cuda(artifact.description, artifact.dtype)
        return FlavourChoice("cuda") if reason is None else FlavourChoice("cpu", reason)
    reason = why_not_on_cuda(artifact.description, artifact.dtype) or trouble()
    if reason is not None:
        raise CudaUnavailable(f"CUDA is asked for, and {reason}; or let the CPU run it", code="cuda_unavailable")
    return FlavourChoice("cuda")


def why_not_on_cuda(description: ModelDescription, dtype: DType) -> str | None:
    """Why the CUDA engine cannot run an artifact on any machine."""
    if dtype not in CUDA_TYPES:
        return f"the artifact is {dtype}, and the CUDA engine takes float weights; convert it with --dtype float16"
    try:
        block_size_for(description)
    except UnsupportedModel as error:
        return error.message
    return None


def cuda_trouble(nvml: ModuleType = pynvml) -> str | None:
    """Why CUDA cannot be used on this machine, with the way out. None: it can."""
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        with open_nvml(nvml):
            devices = list_devices(nvml)
            version = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
            reason = why_no_device(devices, variable, version, str(nvml.nvmlSystemGetDriverVersion()))
    except GpuError as error:
        return error.message
    except nvml.NVMLError as error:
        return f"the NVIDIA driver does not answer ({error}); nvidia-smi may say more"
    return reason or _why_no_provider() or _why_no_library() or _why_no_runtime()


def why_no_device(
    devices: Sequence[Device], variable: str | None, cuda_version: int, driver_version: str
) -> str | None:
    """What keeps a process from any device. variable: CUDA_VISIBLE_DEVICES. cuda_version: as the driver tells it."""
    if not devices:
        return "the NVIDIA driver shows no GPU; nvidia-smi may say more"
    found = visible(devices, variable)
    if not found:
        return f"CUDA_VISIBLE_DEVICES={variable} hides every GPU ({', '.join(device.name for device in devices)})"
    if cuda_version < CUDA_VERSION:
        major, minor = divmod(cuda_version // 10, 100)
        return (
            f"driver {driver_version} serves CUDA {major}.{minor} and 13.0 is needed; "
            f"install driver {OLDEST_DRIVER} or newer"
        )
    old = [device for device in found if device.compute_capability < OLDEST_CAPABILITY]
    if old:
        capability = ".".join(map(str, old[0].compute_capability))
        return (
            f"{old[0].name} ({old[0].model}) has compute capability {capability} and 8.0 is needed; "
            "leave it out of CUDA_VISIBLE_DEVICES"
        )
    return None


def load_libraries() -> None:
    """Load the CUDA libraries that the extra `cuda` installed, so that ONNX Runtime finds them. Does no harm twice."""
    import onnxruntime  # takes a third of a second, and most machines without a GPU never come here

    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it misses; `_why_no_library` names it
        onnxruntime.preload_dlls()


def _why_no_provider() -> str | None:
    import onnxruntime

    if PROVIDER in onnxruntime.get_available_providers():
        return None
    return (
        f"onnxruntime {onnxruntime.__version__} was built without CUDA; "
        "uninstall it and install onnxruntime-gpu of that version"
    )


def _why_no_library() -> str | None:
    load_libraries()
    missing = []
    for name in _WINDOWS_LIBRARIES if platform.system() == "Windows" else _LIBRARIES:
        try:
            ctypes.CDLL(name)
        except OSError:
            missing.append(name)
    return f"CUDA 13 or cuDNN 9 is not complete, {', '.join(missing)} cannot be loaded; {EXTRA}" if missing else None


def _why_no_runtime() -> str | None:
    """Ask the CUDA runtime itself, the last thing that can refuse."""
    try:
        runtime = importlib.import_module("cuda.bindings.runtime")
    except ImportError as error:
        return f"NVIDIA's Python bindings are not installed ({error}); {EXTRA}"
    answer, count = runtime.cudaGetDeviceCount()
    if answer != runtime.cudaError_t.cudaSuccess:
        return f"CUDA cannot use the GPU ({answer.name}); nvidia-smi may say more"
    return None if count else "CUDA sees no GPU; nvidia-smi may say more"
