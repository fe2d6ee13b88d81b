"""GPUs as a pretended NVML shows them: choice, pinning, what makes one unfit, and how soon that is noticed."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.workers.nvml import Machine, gpu, load_fake_nvml
from workers.devices import (
    Device,
    DeviceMonitor,
    GpuError,
    Reading,
    ailment,
    choose,
    list_devices,
    open_nvml,
    read_device,
    throttling_reasons,
    visible,
)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine(tmp_path / "nvml.json", [gpu(0), gpu(1), gpu(2)])
    monkeypatch.setenv("FAKE_NVML", str(found.path))
    found.write()
    return found


@pytest.fixture
def nvml() -> ModuleType:
    return load_fake_nvml()


def names(devices: list[Device]) -> list[str]:
    return [device.name for device in devices]


def test_gpus_are_listed_by_their_number_and_a_lost_one_is_left_out(machine: Machine, nvml: ModuleType) -> None:
    with open_nvml(nvml):
        assert names(list_devices(nvml)) == ["gpu0", "gpu1", "gpu2"]
        machine.devices[1]["is_lost"] = True
        machine.write()
        assert names(list_devices(nvml)) == ["gpu0", "gpu2"]


def test_a_gpu_in_mig_mode_is_its_instances(machine: Machine, nvml: ModuleType) -> None:
    """CUDA cannot run on the whole of it, so neither may a worker."""
    machine.devices[1]["mig"] = [{"uuid": "MIG-a", "memory": 10 << 30}, {"uuid": "MIG-b", "memory": 20 << 30}]
    machine.write()
    with open_nvml(nvml):
        found = list_devices(nvml)
        assert names(found) == ["gpu0", "gpu1.0", "gpu1.1", "gpu2"]
        instance = found[2]
        assert (instance.uuid, instance.memory_bytes, instance.parent_uuid) == ("MIG-b", 20 << 30, found[1].parent_uuid)
        assert instance.parent_uuid == machine.devices[1]["uuid"]
        reading = read_device(nvml, instance)
        assert (reading.memory_bytes, reading.utilization_percent, reading.temperature_c) == (20 << 30, None, 40)
        assert names(choose("1", found)) == ["gpu1.0", "gpu1.1"]
        assert names(choose("gpu1.1", found)) == names(choose("MIG-b", found)) == ["gpu1.1"]
        assert names(visible(found, "1,MIG-b")) == ["gpu1.0", "gpu1.1"]


def test_gpus_are_chosen_by_number_name_or_uuid(machine: Machine, nvml: ModuleType) -> None:
    with open_nvml(nvml):
        found = list_devices(nvml)
    assert names(choose("all", found)) == ["gpu0", "gpu1", "gpu2"]
    assert choose("none", found) == []
    assert names(choose("2,0", found)) == ["gpu2", "gpu0"]
    assert names(choose("gpu1, 1", found)) == ["gpu1"]
    assert names(choose(found[2].uuid, found)) == names(choose("gpu-00000002", found)) == ["gpu2"]
    with pytest.raises(GpuError, match=r"GPU '7' is not among those visible here: gpu0 \(GPU-00000000") as caught:
        choose("0,7", found)
    assert caught.value.code == "gpu_not_found"
    with pytest.raises(GpuError, match="fits several"):
        choose("GPU-0000", found)
    with pytest.raises(GpuError, match="no NVIDIA GPU is visible"):
        choose("all", [])


@pytest.mark.parametrize(
    ("variable", "seen"),
    [
        (None, ["gpu0", "gpu1", "gpu2"]),
        ("", []),
        ("-1", []),
        ("2,0", ["gpu2", "gpu0"]),
        ("1, 7, 2", ["gpu1"]),  # CUDA ignores what stands behind an entry it does not know
        ("GPU-00000001", ["gpu1"]),
        ("GPU-0000", []),  # fits several
        ("NoDevFiles", []),
    ],
)
def test_what_a_scheduler_left_visible_is_read_as_cuda_reads_it(
    machine: Machine, nvml: ModuleType, variable: str | None, seen: list[str]
) -> None:
    with open_nvml(nvml):
        assert names(visible(list_devices(nvml), variable)) == seen


def test_a_device_is_unfit_when_it_is_lost_or_its_memory_fails_or_an_xid_says_so() -> None:
    well = Reading(uncorrectable_ecc_errors=3)
    assert ailment(well, well, []) is None
    assert ailment(well, well, [13, 31, 43, 45, 94]) is None, "a program's mistake is no fault of the device"
    assert ailment(well, well, [31, 79]) == "XID 79: it has fallen off the bus"
    assert ailment(well, Reading(uncorrectable_ecc_errors=5), []) == "2 uncorrectable memory errors"
    assert ailment(well, Reading(lost="it needs a reset"), []) == "it needs a reset"
    assert "could not be remapped" in str(ailment(well, Reading(has_failed_remapping=True), []))
    assert ailment(Reading(), Reading(uncorrectable_ecc_errors=5), []) is None, "before, it was not known"


def test_throttling_is_told_in_words_and_idling_is_none() -> None:
    assert throttling_reasons(0x1 | 0x2) == ()
    assert throttling_reasons(0x4 | 0x40) == ("power_cap", "hardware_thermal")


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (12, "no NVIDIA driver is installed"),
        (9, "not loaded"),
        (18, "restart the machine"),
        (4, "/dev/nvidia"),
        (999, "nvidia-smi"),
    ],
)
def test_a_driver_that_does_not_answer_is_explained(machine: Machine, nvml: ModuleType, code: int, says: str) -> None:
    machine.more["init_error"] = code
    machine.write()
    with pytest.raises(GpuError, match=says) as caught, open_nvml(nvml):
        pass
    assert caught.value.code == "no_gpu_driver"


class Heard:
    """What a monitor told."""

    def __init__(self) -> None:
        self.readings: list[dict[str, Any]] = []
        self.reasons: list[str] = []

    def watch(self, nvml: ModuleType, device: Device) -> DeviceMonitor:
        return DeviceMonitor(nvml, device, self.readings.append, self.reasons.append, read_every_s=0.01)


@pytest.fixture
def device(machine: Machine, nvml: ModuleType) -> Device:
    with open_nvml(nvml):
        return list_devices(nvml)[1]


def test_a_monitor_records_readings_and_goes_on_while_all_is_well(
    machine: Machine, nvml: ModuleType, device: Device
) -> None:
    heard = Heard()
    monitor = heard.watch(nvml, device)
    wait_until(lambda: heard.readings, what="a reading")
    machine.devices[1] |= {"temperature": 77, "throttling": 0x40, "xids": [31]}
    machine.write()
    wait_until(lambda: heard.readings[-1]["xids"] == [31], what="the XID")
    monitor.close()
    last = heard.readings[-1]
    assert (last["name"], last["temperature_c"], last["throttling"]) == ("gpu1", 77, ("hardware_thermal",))
    assert (last["power_w"], last["ailment"], heard.reasons) == (300.0, None, [])


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ({"is_lost": True}, "it has fallen off the bus"),
        ({"xids": [13, 119]}, "XID 119: the GPU's system processor does not answer"),
        ({"ecc": 1}, "1 uncorrectable memory errors"),
    ],
)
def test_a_monitor_says_once_that_its_device_is_sick(
    machine: Machine, nvml: ModuleType, device: Device, trouble: dict[str, Any], reason: str
) -> None:
    heard = Heard()
    monitor = heard.watch(nvml, device)
    wait_until(lambda: heard.readings, what="a reading")
    machine.devices[1] |= trouble
    machine.write()
    wait_until(lambda: heard.reasons, what="the alarm")
    assert monitor.look() == reason
    monitor.close()
    assert heard.reasons == [reason]
    assert heard.readings[-1]["ailment"] == reason


def test_a_device_that_is_sick_already_is_not_watched_but_refused(
    machine: Machine, nvml: ModuleType, device: Device
) -> None:
    machine.devices[1]["remapping_failed"] = 1
    machine.write()
    with pytest.raises(GpuError, match=r"gpu1 \(GPU-00000001.* is not fit for work") as caught:
        Heard().watch(nvml, device)
    assert caught.value.code == "gpu_sick"
