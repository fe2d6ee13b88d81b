"""What `promptmill doctor` says about a machine's GPUs, from what the workers' side found there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jobs.doctor import Finding, _home, compute_findings
from jobs.settings import Settings

GPU: dict[str, Any] = {
    "name": "gpu0",
    "model": "NVIDIA Pretended",
    "uuid": "GPU-0",
    "memory_bytes": 80 << 30,
    "free_bytes": 79 << 30,
    "ailment": None,
    "throttling": [],
}
CPU_STARTS = {"name": "CPUExecutionProvider", "starts": True, "error": ""}
CUDA_STARTS = {"name": "CUDAExecutionProvider", "starts": True, "error": ""}
CUDA_FAILS = {"name": "CUDAExecutionProvider", "starts": False, "error": "its libraries could not be loaded"}


def findings(**found: Any) -> list[Finding]:
    machine = {
        "gpus": [],
        "driver": "580.95.05",
        "providers": [],
        "cuda_trouble": None,
        "operators_trouble": None,
        "flavours": {},
        **found,
    }
    return list(compute_findings(machine))


def test_a_machine_without_a_gpu_is_told_so_once_and_as_no_fault() -> None:
    trouble = "no NVIDIA driver is installed here; with a GPU, install driver 580 or newer"
    chosen = {"/home/artifacts/stories": {"flavour": "cpu", "reason": trouble}}
    found = findings(providers=[CUDA_FAILS, CPU_STARTS], cuda_trouble=trouble, flavours=chosen)
    assert [(each.level, each.subject) for each in found] == [
        ("note", "CUDA provider"),
        ("ok", "CPU provider"),
        ("ok", "engine"),
    ]
    assert "no NVIDIA driver" in found[0].text
    assert found[2].text == "stories runs on CPU"


def test_missing_libraries_are_named_with_the_extra_that_brings_them() -> None:
    trouble = "CUDA 13 or cuDNN 9 is not complete, libcudnn.so.9 cannot be loaded; pip install 'promptmill[cuda]'"
    (_, provider) = findings(gpus=[GPU], providers=[CUDA_FAILS], cuda_trouble=trouble)
    assert provider.level == "missing"
    assert provider.text == "there is a GPU, but CUDA 13 or cuDNN 9 is not complete, libcudnn.so.9 cannot be loaded"
    assert provider.way_out == "pip install 'promptmill[cuda]'"


def test_a_gpu_without_a_compiler_is_slower_and_no_fault() -> None:
    (_, _, built) = findings(gpus=[GPU], providers=[CUDA_STARTS])
    assert (built.level, built.subject) == ("ok", "GPU operators")
    trouble = "no C compiler was found (cc, gcc, clang); install one"
    (_, _, missing) = findings(gpus=[GPU], providers=[CUDA_STARTS], operators_trouble=trouble)
    assert missing.level == "note"
    assert missing.text.startswith("no C compiler was found (cc, gcc, clang); install one; so ONNX Runtime's own run")


def test_what_runs_each_artifact_is_said_with_the_reason() -> None:
    chosen = {
        "/a/big": {"flavour": "cuda", "reason": ""},
        "/a/small": {"flavour": "cpu", "reason": "the artifact is int8, and the CUDA engine takes float weights"},
    }
    found = findings(gpus=[GPU], providers=[CUDA_STARTS], flavours=chosen)
    assert [each.text for each in found if each.subject == "engine"] == [
        "big runs on CUDA",
        "small runs on CPU: the artifact is int8, and the CUDA engine takes float weights",
    ]


def test_a_sick_gpu_is_missing_and_a_hot_one_is_noted() -> None:
    (sick,) = findings(gpus=[{**GPU, "ailment": "it has fallen off the bus"}])
    assert (sick.level, sick.subject) == ("missing", "GPU 0")
    assert "fallen off the bus" in sick.text and "reset" in sick.way_out
    (lost,) = findings(gpus=[{"name": "gpu1", "ailment": "it has fallen off the bus"}])
    assert (lost.level, lost.subject, lost.text) == ("missing", "GPU 1", "it has fallen off the bus")
    (hot,) = findings(gpus=[{**GPU, "throttling": ["hardware_thermal"]}])
    assert (hot.level, "slowed down by hardware_thermal" in hot.text) == ("note", True)


def test_doctor_makes_no_home(home_settings: Settings, tmp_path: Path) -> None:
    finding = _home(home_settings)
    assert (finding.level, finding.text.partition(",")[0]) == ("ok", str(tmp_path / "home"))
    (tmp_path / "file").write_text("")
    wrong = _home(home_settings.model_copy(update={"home": tmp_path / "file" / "home"}))
    assert wrong.level == "missing"
    assert wrong.text == f"{tmp_path}/file/home cannot be made: {tmp_path}/file is not a folder"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
