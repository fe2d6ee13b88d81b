"""GPUs as NVML shows them: which there are, which of them a process may use, how they fare, whether one is sick.

Parsing, choice and judgement are pure functions over plain values. What asks NVML is handed it, so that tests hand in
another one. A GPU is known by its UUID, which stays, and called gpu0, gpu1 by its number in nvidia-smi; an instance of
a GPU in MIG mode is called gpu0.1.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from types import ModuleType
from typing import Any

import structlog

from storage.errors import PromptmillError

log = structlog.get_logger()

# Between two readings of a device.
READ_EVERY_S = 10.0
# Between two lines in the log about a device of which nothing but the load has changed.
LOG_EVERY_S = 60.0
# How long NVML is asked to wait for an event before the thread looks around again.
EVENT_WAIT_MS = 500

# NVML's own words for "this device is gone until somebody resets it, or the machine".
_LOST = {"NVML_ERROR_GPU_IS_LOST": "it has fallen off the bus", "NVML_ERROR_RESET_REQUIRED": "it needs a reset"}
# XIDs after which the driver's catalogue asks for a reset of the GPU or worse. Those of a faulty program (13, 31, 43,
# 45), and contained memory errors (94), end the process they hit and leave the device usable.
XIDS_THAT_NEED_A_RESET = {
    46: "the GPU stopped processing",
    48: "double-bit memory error",
    62: "internal micro-controller halt",
    64: "a faulty row of memory could not be remapped",
    79: "it has fallen off the bus",
    95: "uncontained memory error",
    110: "security fault",
    119: "the GPU's system processor does not answer",
    120: "the GPU's system processor failed",
    140: "unrecovered memory error",
    143: "the GPU could not be initialized",
}
# Bits of the reasons why a GPU runs slower than it could; others (idle, clocks set by its owner) are no trouble.
THROTTLING = {
    0x04: "power_cap",
    0x08: "hardware_slowdown",
    0x20: "software_thermal",
    0x40: "hardware_thermal",
    0x80: "power_brake",
}


class GpuError(PromptmillError):
    """A GPU was asked for that is not there, or is not fit for work."""


@dataclass(frozen=True, slots=True)
class Device:
    """What CUDA can run on: a GPU, or an instance of one in MIG mode. parent_uuid: the GPU that an instance is of."""

    name: str
    uuid: str
    model: str
    memory_bytes: int
    free_bytes: int
    compute_capability: tuple[int, int]
    parent_uuid: str = ""


@dataclass(frozen=True, slots=True)
class Reading:
    """How a device fares. None: NVML does not tell, as for some values of a MIG instance. lost: why it is of no use."""

    memory_used_bytes: int | None = None
    memory_bytes: int | None = None
    utilization_percent: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    throttling: tuple[str, ...] = ()
    uncorrectable_ecc_errors: int | None = None
    has_failed_remapping: bool = False
    lost: str = ""


# --- choice ------------------------------------------------------------------------------------------------------


def visible(devices: Sequence[Device], variable: str | None) -> list[Device]:
    """The devices that CUDA would see. variable: CUDA_VISIBLE_DEVICES, None where it is not set.

    As CUDA reads it: numbers or (beginnings of) UUIDs; what stands behind an entry that names no device is ignored; the
    number of a GPU in MIG mode means its first instance.
    """
    if variable is None:
        return list(devices)
    found: list[Device] = []
    for entry in variable.split(","):
        named = _named(entry.strip(), devices)
        if not named or (not entry.strip().isdigit() and len(named) > 1):
            break
        found.append(named[0])
    return found


def choose(wanted: str, devices: Sequence[Device]) -> list[Device]:
    """The devices that somebody asks for. wanted: `all`, `none`, or numbers, names or UUIDs with commas between.

    A number is that of nvidia-smi; one of a GPU in MIG mode means all its instances. Raises GpuError.
    """
    if wanted == "none":
        return []
    there = ", ".join(f"{device.name} ({device.uuid})" for device in devices) or "none"
    if wanted == "all":
        if not devices:
            raise GpuError("no NVIDIA GPU is visible here; see promptmill doctor", code="gpu_not_found")
        return list(devices)
    chosen: list[Device] = []
    for entry in wanted.split(","):
        named = _named(entry.strip(), devices)
        if not named:
            raise GpuError(
                f"GPU {entry.strip()!r} is not among those visible here: {there}; give their numbers or UUIDs, or all",
                code="gpu_not_found",
            )
        if len(named) > 1 and entry.strip().lower().startswith(("gpu-", "mig-")):
            raise GpuError(f"{entry.strip()!r} fits several GPUs: {there}; give more of it", code="gpu_not_found")
        chosen += [device for device in named if device not in chosen]
    return chosen


def _named(entry: str, devices: Sequence[Device]) -> list[Device]:
    """The devices that a number, a name or the beginning of a UUID stands for."""
    name = f"gpu{entry}" if entry[:1].isdigit() else entry.lower()
    by_name = [device for device in devices if device.name == name or device.name.startswith(f"{name}.")]
    if by_name or not entry.lower().startswith(("gpu-", "mig-")):
        return by_name
    return [device for device in devices if device.uuid.lower().startswith(entry.lower())]


# --- judgement ---------------------------------------------------------------------------------------------------


def ailment(first: Reading, now: Reading, xids: Sequence[int]) -> str | None:
    """Why a device is not fit for work, or None. first: the reading its worker began with. xids: seen since."""
    if now.lost:
        return now.lost
    for xid in xids:
        if xid in XIDS_THAT_NEED_A_RESET:
            return f"XID {xid}: {XIDS_THAT_NEED_A_RESET[xid]}"
    before, after = first.uncorrectable_ecc_errors, now.uncorrectable_ecc_errors
    if before is not None and after is not None and after > before:
        return f"{after - before} uncorrectable memory errors"
    if now.has_failed_remapping:
        return "a faulty row of its memory could not be remapped"
    return None


def throttling_reasons(bits: int) -> tuple[str, ...]:
    """NVML's bit field as words."""
    return tuple(word for bit, word in THROTTLING.items() if bits & bit)


# --- asking NVML -------------------------------------------------------------------------------------------------


@contextmanager
def open_nvml(nvml: ModuleType) -> Iterator[None]:
    """Keep NVML open. Raises GpuError `no_gpu_driver` with what to do."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise GpuError(_driver_trouble(nvml, error), code="no_gpu_driver") from error
    try:
        yield
    finally:
        nvml.nvmlShutdown()


def _log_left_out(name: str, reason: str) -> None:
    log.warning("gpu_left_out", gpu=name, reason=reason)


def list_devices(nvml: ModuleType, leave_out: Callable[[str, str], None] = _log_left_out) -> list[Device]:
    """All devices that can be used, by number; one that is lost is left out. Call it within `open_nvml`.

    leave_out: told name and reason of each that is.
    """
    found: list[Device] = []
    for number in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(number)
            instances = _mig_instances(nvml, handle)
            if instances is None:
                found.append(_describe(nvml, handle, f"gpu{number}"))
            else:
                parent = str(nvml.nvmlDeviceGetUUID(handle))
                capability = _capability(nvml, handle)
                found += [
                    _describe(nvml, instance, f"gpu{number}.{index}", parent, capability)
                    for index, instance in instances
                ]
        except nvml.NVMLError as error:
            leave_out(f"gpu{number}", _why_lost(nvml, error) or str(error))
    return found


def read_device(nvml: ModuleType, device: Device) -> Reading:
    """Ask for everything that NVML tells of a device."""
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(device.uuid)
        # An instance has memory of its own; heat, power and errors are those of the whole GPU.
        whole = nvml.nvmlDeviceGetHandleByUUID(device.parent_uuid) if device.parent_uuid else handle
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError as error:
        lost = _why_lost(nvml, error)
        if not lost and getattr(error, "value", None) == nvml.NVML_ERROR_NOT_FOUND:
            lost = "the driver does not know it any more"
        return Reading(lost=lost)

    losses: list[str] = []

    def ask(question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return question(*arguments)
        except nvml.NVMLError as error:
            losses.append(_why_lost(nvml, error))
            return None

    rates = ask(nvml.nvmlDeviceGetUtilizationRates, handle)
    power_mw = ask(nvml.nvmlDeviceGetPowerUsage, whole)
    remapping = ask(nvml.nvmlDeviceGetRemappedRows, whole)
    ecc = ask(nvml.nvmlDeviceGetTotalEccErrors, whole, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    return Reading(
        memory_used_bytes=int(memory.used),
        memory_bytes=int(memory.total),
        utilization_percent=None if rates is None else int(rates.gpu),
        temperature_c=ask(nvml.nvmlDeviceGetTemperature, whole, nvml.NVML_TEMPERATURE_GPU),
        power_w=None if power_mw is None else power_mw / 1000,
        throttling=throttling_reasons(ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, whole) or 0),
        uncorrectable_ecc_errors=ecc,
        has_failed_remapping=remapping is not None and bool(remapping[3]),
        lost=next((loss for loss in losses if loss), ""),
    )


def driver_version(nvml: ModuleType) -> str:
    return str(nvml.nvmlSystemGetDriverVersion())


def _mig_instances(nvml: ModuleType, handle: Any) -> list[tuple[int, Any]] | None:
    """The instances of a GPU in MIG mode; None for one that is not."""
    try:
        mode, _pending = nvml.nvmlDeviceGetMigMode(handle)
        if not mode:
            return None
        most = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except nvml.NVMLError:
        return None  # of a kind that cannot be divided
    found = []
    for index in range(most):
        try:
            found.append((index, nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)))
        except nvml.NVMLError:
            continue  # not all places need be taken
    return found


def _describe(
    nvml: ModuleType, handle: Any, name: str, parent_uuid: str = "", capability: tuple[int, int] | None = None
) -> Device:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return Device(
        name=name,
        uuid=str(nvml.nvmlDeviceGetUUID(handle)),
        model=str(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(memory.total),
        free_bytes=int(memory.free),
        compute_capability=capability or _capability(nvml, handle),
        parent_uuid=parent_uuid,
    )


def _capability(nvml: ModuleType, handle: Any) -> tuple[int, int]:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return int(major), int(minor)


def _why_lost(nvml: ModuleType, error: Exception) -> str:
    value = getattr(error, "value", None)
    return next((words for name, words in _LOST.items() if value == getattr(nvml, name)), "")


def _driver_trouble(nvml: ModuleType, error: Exception) -> str:
    value = getattr(error, "value", None)
    if value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return "no NVIDIA driver is installed here; with a GPU, install driver 580 or newer"
    if value == nvml.NVML_ERROR_DRIVER_NOT_LOADED:
        return "the NVIDIA driver is installed and not loaded; load it (modprobe nvidia) or restart the machine"
    if value == nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return "the NVIDIA driver was updated while it ran and its parts do not fit; restart the machine"
    if value == nvml.NVML_ERROR_NO_PERMISSION:
        return "this user may not talk to the NVIDIA driver; give it access to /dev/nvidia*"
    return f"the NVIDIA driver does not answer ({error}); nvidia-smi may say more"


# --- watching ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Watched:
    """What the monitor remembers of its device."""

    first: Reading
    last: Reading
    xids: list[int] = field(default_factory=list)
    logged: tuple[object, ...] = ()
    logged_at: float = -float("inf")
    read_at: float = -float("inf")


class DeviceMonitor:
    """Reads a worker's device every ten seconds, hears of its XID errors at once, and says when it is sick.

    record: given each reading as plain values, for the worker's row. on_sick: called once, with the reason.
    Raises GpuError `gpu_sick` if the device is not fit for work from the start.
    """

    def __init__(
        self,
        nvml: ModuleType,
        device: Device,
        record: Callable[[dict[str, Any]], None],
        on_sick: Callable[[str], None],
        *,
        read_every_s: float = READ_EVERY_S,
    ) -> None:
        self._nvml = nvml
        self._device = device
        self._record = record
        self._on_sick = on_sick
        self._read_every_s = read_every_s
        self._stop = threading.Event()
        self._nvml_open = ExitStack()
        self._nvml_open.enter_context(open_nvml(nvml))
        first = read_device(nvml, device)
        self._watched = _Watched(first, first)
        if reason := ailment(first, first, ()):
            self._nvml_open.close()
            raise GpuError(f"{device.name} ({device.uuid}) is not fit for work: {reason}", code="gpu_sick")
        self._thread = threading.Thread(target=self._loop, name="device", daemon=True)
        self._thread.start()

    def look(self) -> str | None:
        """Read the device now. Returns why it is sick, if it is."""
        watched = self._watched
        watched.last = read_device(self._nvml, self._device)
        return ailment(watched.first, watched.last, watched.xids)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._nvml_open.close()

    def _loop(self) -> None:
        events = self._subscribe()
        watched = self._watched
        while not self._stop.is_set():
            xid = self._wait(events)
            if xid is not None:
                watched.xids.append(xid)
                log.warning("gpu_xid", gpu=self._device.name, xid=xid)
            if xid is None and time.monotonic() - watched.read_at < self._read_every_s:
                continue
            watched.read_at = time.monotonic()
            reason = self.look()
            if reason:
                log.critical("gpu_sick", gpu=self._device.name, uuid=self._device.uuid, reason=reason)
                self._on_sick(reason)  # before it is recorded, which may take a while where the database is away
            self._tell(reason)
            if reason:
                break
        if events is not None:
            self._nvml.nvmlEventSetFree(events)

    def _subscribe(self) -> Any:
        """Ask to hear of XID errors. None where the device or the platform does not tell: then readings must do."""
        nvml = self._nvml
        try:
            events = nvml.nvmlEventSetCreate()
            # Instances have no events of their own; those of the whole GPU concern them too.
            handle = nvml.nvmlDeviceGetHandleByUUID(self._device.parent_uuid or self._device.uuid)
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
        except nvml.NVMLError as error:
            log.info("gpu_events_unavailable", gpu=self._device.name, reason=str(error))
            return None
        return events

    def _wait(self, events: Any) -> int | None:
        """Wait a moment for an XID error."""
        if events is None:
            self._stop.wait(EVENT_WAIT_MS / 1000)
            return None
        nvml = self._nvml
        try:
            event = nvml.nvmlEventSetWait_v2(events, EVENT_WAIT_MS)
        except nvml.NVMLError as error:
            if getattr(error, "value", None) != nvml.NVML_ERROR_TIMEOUT:
                self._watched.read_at = -float("inf")  # the reading will say what is wrong
                self._stop.wait(EVENT_WAIT_MS / 1000)
            return None
        return int(event.eventData) if event.eventType == nvml.nvmlEventTypeXidCriticalError else None

    def _tell(self, reason: str | None) -> None:
        """The worker's row has every reading; the log has those that differ, and one a minute."""
        watched, reading = self._watched, self._watched.last
        values = {"name": self._device.name, "uuid": self._device.uuid, "model": self._device.model}
        self._record({**values, **asdict(reading), "xids": list(watched.xids), "ailment": reason})
        state = (reading.throttling, reading.uncorrectable_ecc_errors, len(watched.xids), reading.lost)
        now = time.monotonic()
        if state == watched.logged and now - watched.logged_at < LOG_EVERY_S:
            return
        watched.logged, watched.logged_at = state, now
        trouble = bool(reading.throttling or watched.xids or reading.lost)
        (log.warning if trouble else log.info)("gpu_read", gpu=self._device.name, **asdict(reading))
