"""What this machine can run, found by trying: ONNX Runtime's providers and the GPUs that NVML shows.

The GPU wheel lists the CUDA provider on every machine, so a provider counts only once a session has run on it.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import onnxruntime
import pynvml
from onnx import TensorProto, helper

PROVIDERS = ("CUDAExecutionProvider", "CPUExecutionProvider")


@dataclass(frozen=True, slots=True)
class ProviderProbe:
    """error: why it does not start, in ONNX Runtime's words; empty if it does."""

    name: str
    starts: bool
    error: str


@dataclass(frozen=True, slots=True)
class GpuProbe:
    index: int
    name: str
    uuid: str
    memory_bytes: int
    free_bytes: int


def probe() -> dict[str, Any]:
    """Everything as plain values, to be printed as JSON."""
    gpus, driver = _gpus()
    return {
        "onnxruntime": onnxruntime.__version__,
        "providers": [asdict(_try_provider(name)) for name in PROVIDERS],
        "gpus": [asdict(gpu) for gpu in gpus],
        "driver": driver,
    }


def _try_provider(name: str) -> ProviderProbe:
    if name not in onnxruntime.get_available_providers():
        return ProviderProbe(name, False, "not part of the installed onnxruntime")
    onnxruntime.set_default_logger_severity(4)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        if name == "CUDAExecutionProvider":
            with contextlib.redirect_stdout(sys.stderr):  # it prints what it misses
                onnxruntime.preload_dlls()
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


def _gpus() -> tuple[list[GpuProbe], str]:
    """The GPUs and the driver's version; none and why, where there is no driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [], str(error)
    try:
        found = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            found.append(
                GpuProbe(
                    index=index,
                    name=str(pynvml.nvmlDeviceGetName(handle)),
                    uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
                    memory_bytes=int(memory.total),
                    free_bytes=int(memory.free),
                )
            )
        return found, str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()
