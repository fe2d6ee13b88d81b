"""NVML as a file tells it: stands in for `pynvml`, in this process or, first on PYTHONPATH, in a worker's.

The file that FAKE_NVML names is read at each call, so a test can take a GPU away by writing it anew:
{"devices": [{"uuid": ..., "xids": [...], "is_lost": ..., "mig": [{"uuid": ...}]}], "init_error": 12, ...}; what is left
out has the values below.
"""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_NO_PERMISSION = 4
NVML_ERROR_NOT_FOUND = 6
NVML_ERROR_DRIVER_NOT_LOADED = 9
NVML_ERROR_TIMEOUT = 10
NVML_ERROR_LIBRARY_NOT_FOUND = 12
NVML_ERROR_GPU_IS_LOST = 15
NVML_ERROR_RESET_REQUIRED = 16
NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18
NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
NVML_VOLATILE_ECC = 0
NVML_TEMPERATURE_GPU = 0
nvmlEventTypeXidCriticalError = 8  # noqa: N816

_MACHINE: dict[str, Any] = {"devices": [], "init_error": 0, "driver": "580.95.05", "cuda": 13000}
_DEVICE: dict[str, Any] = {
    "model": "NVIDIA Pretended",
    "memory": 80 << 30,
    "used": 1 << 30,
    "capability": [9, 0],
    "utilization": 50,
    "temperature": 40,
    "power_mw": 300_000,
    "throttling": 0,
    "ecc": 0,
    "remapping_failed": 0,
    "is_lost": False,
    "xids": [],
    "mig": None,
}


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


def _machine() -> dict[str, Any]:
    return {**_MACHINE, **json.loads(Path(os.environ["FAKE_NVML"]).read_text())}


def _find(uuid: str) -> dict[str, Any]:
    for device in _machine()["devices"]:
        for each in (device, *(device.get("mig") or [])):
            if each["uuid"] == uuid:
                found = {**_DEVICE, **each}
                if found["is_lost"]:
                    raise NVMLError(NVML_ERROR_GPU_IS_LOST)
                return found
    raise NVMLError(NVML_ERROR_NOT_FOUND)


def nvmlInit() -> None:  # noqa: N802
    if error := _machine()["init_error"]:
        raise NVMLError(error)


def nvmlShutdown() -> None:  # noqa: N802
    pass


def nvmlSystemGetDriverVersion() -> str:  # noqa: N802
    return str(_machine()["driver"])


def nvmlSystemGetCudaDriverVersion_v2() -> int:  # noqa: N802
    return int(_machine()["cuda"])


def nvmlDeviceGetCount() -> int:  # noqa: N802
    return len(_machine()["devices"])


def nvmlDeviceGetHandleByIndex(index: int) -> str:  # noqa: N802
    uuid = str(_machine()["devices"][index]["uuid"])
    _find(uuid)
    return uuid


def nvmlDeviceGetHandleByUUID(uuid: str) -> str:  # noqa: N802
    _find(uuid)
    return uuid


def nvmlDeviceGetUUID(handle: str) -> str:  # noqa: N802
    return handle


def nvmlDeviceGetName(handle: str) -> str:  # noqa: N802
    return str(_find(handle)["model"])


def nvmlDeviceGetMemoryInfo(handle: str) -> SimpleNamespace:  # noqa: N802
    device = _find(handle)
    return SimpleNamespace(total=device["memory"], used=device["used"], free=device["memory"] - device["used"])


def nvmlDeviceGetCudaComputeCapability(handle: str) -> tuple[int, int]:  # noqa: N802
    major, minor = _find(handle)["capability"]
    return major, minor


def nvmlDeviceGetMigMode(handle: str) -> list[int]:  # noqa: N802
    if _find(handle)["mig"] is None:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    return [1, 1]


def nvmlDeviceGetMaxMigDeviceCount(handle: str) -> int:  # noqa: N802
    return 7


def nvmlDeviceGetMigDeviceHandleByIndex(handle: str, index: int) -> str:  # noqa: N802
    instances = _find(handle)["mig"]
    if index >= len(instances):
        raise NVMLError(NVML_ERROR_NOT_FOUND)
    return str(instances[index]["uuid"])


def nvmlDeviceGetUtilizationRates(handle: str) -> SimpleNamespace:  # noqa: N802
    if handle.startswith("MIG-"):
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    return SimpleNamespace(gpu=_find(handle)["utilization"])


def nvmlDeviceGetPowerUsage(handle: str) -> int:  # noqa: N802
    return int(_find(handle)["power_mw"])


def nvmlDeviceGetTemperature(handle: str, sensor: int) -> int:  # noqa: N802
    return int(_find(handle)["temperature"])


def nvmlDeviceGetCurrentClocksThrottleReasons(handle: str) -> int:  # noqa: N802
    return int(_find(handle)["throttling"])


def nvmlDeviceGetTotalEccErrors(handle: str, kind: int, counter: int) -> int:  # noqa: N802
    return int(_find(handle)["ecc"])


def nvmlDeviceGetRemappedRows(handle: str) -> tuple[int, int, int, int]:  # noqa: N802
    return 0, 0, 0, int(_find(handle)["remapping_failed"])


def nvmlEventSetCreate() -> dict[str, int]:  # noqa: N802
    return {}


def nvmlDeviceRegisterEvents(handle: str, kinds: int, events: dict[str, int]) -> None:  # noqa: N802
    events[handle] = len(_find(handle)["xids"])


def nvmlEventSetWait_v2(events: dict[str, int], timeout_ms: int) -> SimpleNamespace:  # noqa: N802
    until = time.monotonic() + timeout_ms / 1000
    while True:
        for handle, heard in events.items():
            xids = _find(handle)["xids"]
            if len(xids) > heard:
                events[handle] += 1
                return SimpleNamespace(eventType=nvmlEventTypeXidCriticalError, eventData=xids[heard])
        if time.monotonic() > until:
            raise NVMLError(NVML_ERROR_TIMEOUT)
        time.sleep(0.01)


def nvmlEventSetFree(events: dict[str, int]) -> None:  # noqa: N802
    events.clear()
