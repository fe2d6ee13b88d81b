"""Where workers run: plans for a machine's GPUs, and what one worker is pinned to. NVML and CUDA are pretended."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from tests.workers.nvml import Machine, gpu, load_fake_nvml
from workers.devices import Device, GpuError
from workers.engine.flavour import CudaUnavailable, FlavourChoice, choose_flavour, cuda_trouble, why_no_device
from workers.models.artifact import Artifact, Source
from workers.models.description import ModelDescription, TokenizerDescription
from workers.placement import VISIBLE, place_worker, plan_workers

MODEL = ModelDescription(
    architecture="llama",
    vocab_size=100,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
    context_length=128,
    rms_norm_epsilon=1e-5,
    rope_theta=10000.0,
    rope_scaling=None,
    tie_word_embeddings=False,
)
ARTIFACT = Artifact(
    path=Path("artifact"),
    model="stories",
    dtype="float16",
    context_length=128,
    description=MODEL,
    tokenizer=TokenizerDescription(1, 2, (2,), True, "plain"),
    source=Source("nowhere", ""),
    files={},
    digest="d",
)


def works() -> str | None:
    return None


def fails() -> str | None:
    return "cuDNN is missing; install it"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine(tmp_path / "nvml.json", [gpu(0), gpu(1)])
    monkeypatch.setenv("FAKE_NVML", str(found.path))
    monkeypatch.delenv(VISIBLE, raising=False)
    found.write()
    return found


@pytest.fixture
def nvml() -> ModuleType:
    return load_fake_nvml()


# --- the flavour -------------------------------------------------------------------------------------------------


def test_the_flavour_is_cuda_where_it_can_be_and_says_why_where_it_cannot() -> None:
    assert choose_flavour("auto", ARTIFACT, works) == FlavourChoice("cuda")
    assert choose_flavour("auto", ARTIFACT, fails) == FlavourChoice("cpu", "cuDNN is missing; install it")
    assert choose_flavour("cpu", ARTIFACT, works) == FlavourChoice("cpu")
    assert choose_flavour("null", ARTIFACT, fails) == FlavourChoice("null")
    with pytest.raises(CudaUnavailable, match="cuDNN is missing; install it; or let the CPU") as caught:
        choose_flavour("cuda", ARTIFACT, fails)
    assert caught.value.code == "cuda_unavailable"


def test_an_artifact_that_no_gpu_runs_is_refused_or_run_on_the_cpu() -> None:
    quantized = replace(ARTIFACT, dtype="int8")
    chosen = choose_flavour("auto", quantized, works)
    assert chosen.flavour == "cpu"
    assert "the artifact is int8" in chosen.reason and "--dtype float16" in chosen.reason
    wide = replace(ARTIFACT, description=replace(MODEL, head_dim=288))
    assert "head_dim 288 exceeds 256" in choose_flavour("auto", wide, works).reason
    assert choose_flavour("auto", quantized, fails).reason == fails(), "no GPU, no word about how to use one"
    with pytest.raises(CudaUnavailable, match="the artifact is int8"):
        choose_flavour("cuda", quantized, fails)


def device(number: int, capability: tuple[int, int] = (9, 0)) -> Device:
    return Device(f"gpu{number}", f"GPU-{number}", "NVIDIA Pretended", 80 << 30, 79 << 30, capability)


def test_a_machine_that_cannot_run_cuda_says_what_is_in_the_way() -> None:
    one = [device(0)]
    assert why_no_device(one, None, 13000, "580.95.05") is None
    assert "shows no GPU" in str(why_no_device([], None, 13000, "580.95.05"))
    assert "CUDA_VISIBLE_DEVICES=-1 hides every GPU (gpu0)" in str(why_no_device(one, "-1", 13000, "580.95.05"))
    old = str(why_no_device(one, None, 12020, "535.183.01"))
    assert old == "driver 535.183.01 serves CUDA 12.2 and 13.0 is needed; install driver 580 or newer"
    assert "compute capability 7.5" in str(why_no_device([device(0, (7, 5))], None, 13000, "580.95.05"))
    assert why_no_device([device(0, (7, 5)), device(1)], "1", 13000, "580.95.05") is None


def test_without_a_driver_cuda_is_not_tried(machine: Machine, nvml: ModuleType) -> None:
    machine.more["init_error"] = 12
    machine.write()
    assert "no NVIDIA driver" in str(cuda_trouble(nvml))


# --- plans -------------------------------------------------------------------------------------------------------


def planned(gpus: str, flavour: str, nvml: ModuleType, environment: dict[str, str] | None = None) -> list[str]:
    plan = plan_workers(gpus, flavour, ARTIFACT, environment or {}, nvml, works)  # type: ignore[arg-type]
    return [device.name for device in plan.devices]


def test_there_is_a_worker_for_each_visible_gpu(machine: Machine, nvml: ModuleType) -> None:
    assert planned("auto", "auto", nvml) == planned("all", "auto", nvml) == ["gpu0", "gpu1"]
    assert planned("auto", "cuda", nvml, {VISIBLE: "1"}) == ["gpu1"]
    assert planned("0", "auto", nvml) == ["gpu0"]
    assert planned("none", "auto", nvml) == planned("auto", "cpu", nvml) == planned("auto", "null", nvml) == []
    assert planned("all", "null", nvml) == ["gpu0", "gpu1"], "asked for by name, any flavour gets one each"
    with pytest.raises(GpuError, match="GPU '0' is not among those visible"):
        planned("0", "auto", nvml, {VISIBLE: "1"})


def test_where_no_gpu_can_be_used_workers_run_on_the_cpu_unless_gpus_were_asked_for(
    machine: Machine, nvml: ModuleType
) -> None:
    plan = plan_workers("auto", "auto", ARTIFACT, {}, nvml, fails)
    assert (plan.devices, plan.reason, plan.has_gpu) == ((), "cuDNN is missing; install it", True)
    with pytest.raises(CudaUnavailable, match="cuDNN is missing"):
        plan_workers("all", "auto", ARTIFACT, {}, nvml, fails)


# --- one worker --------------------------------------------------------------------------------------------------


def test_a_worker_is_pinned_to_one_device_by_its_uuid(machine: Machine, nvml: ModuleType) -> None:
    environment: dict[str, str] = {}
    place = place_worker("1", "auto", ARTIFACT, environment, nvml, works)
    assert (place.name, place.flavour) == ("gpu1", "cuda")
    assert environment == {VISIBLE: machine.devices[1]["uuid"]}
    # What the supervisor has pinned already is found again.
    again = place_worker(machine.devices[1]["uuid"], "cuda", ARTIFACT, environment, nvml, works)
    assert again == place


def test_a_worker_that_was_given_no_device_takes_the_first_visible_one(machine: Machine, nvml: ModuleType) -> None:
    environment = {VISIBLE: "1,0"}
    assert place_worker(None, "auto", ARTIFACT, environment, nvml, works).name == "gpu1"
    assert environment == {VISIBLE: machine.devices[1]["uuid"]}


def test_a_worker_on_the_cpu_is_not_named_after_a_gpu(machine: Machine, nvml: ModuleType) -> None:
    assert place_worker(None, "auto", ARTIFACT, {}, nvml, fails).name == "cpu"
    untouched: dict[str, str] = {}
    place = place_worker(None, "cpu", ARTIFACT, untouched, nvml, works)
    assert (place.name, place.device, untouched) == ("cpu", None, {})
    machine.more["init_error"] = 12
    machine.write()
    assert place_worker(None, "auto", ARTIFACT, {}, nvml, fails).name == "cpu"


def test_workers_on_one_cpu_are_told_apart_by_their_number(machine: Machine, nvml: ModuleType) -> None:
    """Each place has a queue of its own."""
    places = [place_worker(None, "cpu", ARTIFACT, {}, nvml, works, number) for number in (None, 0, 1)]
    assert [place.name for place in places] == ["cpu", "cpu0", "cpu1"]
    assert {place.flavour for place in places} == {"cpu"}


def test_a_worker_whose_gpu_is_gone_says_so(machine: Machine, nvml: ModuleType) -> None:
    """The code that makes it end with 69: its supervisor then waits longer before it tries again."""
    gone = machine.devices[1]["uuid"]
    machine.devices[1]["is_lost"] = True
    machine.write()
    with pytest.raises(GpuError) as caught:
        place_worker(gone, "cuda", ARTIFACT, {VISIBLE: gone}, nvml, works)
    assert caught.value.code == "gpu_not_found"
    with pytest.raises(GpuError, match="means 0 devices"):
        place_worker("none", "null", ARTIFACT, {}, nvml, works)
