"""What this machine can run, found by trying: ONNX Runtime's providers and the GPUs that NVML shows.

The GPU wheel lists the CUDA provider on every machine, so a provider counts only once a session has run on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pynvml
from onnx import TensorProto, helper

from storage.errors import PromptmillError
from workers.devices import GpuError, ailment, driver_version, list_devices, open_nvml, read_device
from workers.engine.cuda_ops import operators_trouble
from workers.engine.flavour import choose_flavour, cuda_trouble, load_libraries
from workers.models.artifact import load_artifact

PROVIDERS = ("CUDAExecutionProvider", "CPUExecutionProvider")


@dataclass(frozen=True, slots=True)
class ProviderProbe:
    """error: why it does not start, in ONNX Runtime's words; empty if it does."""

    name: str
    starts: bool
    error: str


def probe(artifacts: Sequence[Path] = ()) -> dict[str, Any]:
    """Everything as plain values, to be printed as JSON. flavours: what would run each of the artifacts, and why."""
    devices, driver = _devices()
    trouble = cuda_trouble()
    return {
        "onnxruntime": onnxruntime.__version__,
        "providers": [asdict(_try_provider(name)) for name in PROVIDERS],
        "gpus": devices,
        "driver": driver,
        "cuda_trouble": trouble,
        "operators_trouble": None if trouble else operators_trouble(),
        "flavours": {str(path): _flavour(path, trouble) for path in artifacts},
    }


def _flavour(path: Path, trouble: str | None) -> dict[str, str]:
    try:
        return asdict(choose_flavour("auto", load_artifact(path, check_digests=False), lambda: trouble))
    except PromptmillError as error:
        return {"flavour": "", "reason": error.message}


def _try_provider(name: str) -> ProviderProbe:
    if name not in onnxruntime.get_available_providers():
        return ProviderProbe(name, False, "not part of the installed onnxruntime")
    onnxruntime.set_default_logger_severity(4)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        if name == "CUDAExecutionProvider":
            load_libraries()
        session = onnxruntime.InferenceSession(_doubling_graph(), options, providers=[name])
        session.disable_fallback()
        if session.get_providers()[0] != name:
            return ProviderProbe(name, False, "its libraries could not be loaded")
        (doubled,) = session.run(None, {"x": np.ones(4, dtype=np.float32)})
        works = bool((doubled == 2).all())
        return ProviderProbe(name, works, "" if works else "it computes wrong results")
    except Exception as error:  # whatever a driver or library throws is the answer
        return ProviderProbe(name, False, " ".join(str(error).split())[:300])


def _doubling_graph() -> bytes:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])
    doubled = helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "double", [value], [doubled])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return bytes(model.SerializeToString())


def _devices() -> tuple[list[dict[str, Any]], str]:
    """The GPUs with how they fare, and the driver's version; none and why, where there is no driver."""
    try:
        with open_nvml(pynvml):
            found: list[dict[str, Any]] = []
            lost = found.append
            for device in list_devices(pynvml, lambda name, reason: lost({"name": name, "ailment": reason})):
                reading = read_device(pynvml, device)
                found.append({**asdict(device), **asdict(reading), "ailment": ailment(reading, reading, ())})
            return found, driver_version(pynvml)
    except (GpuError, pynvml.NVMLError) as error:
        return [], str(error)
