"""Where our own operators can be run: on a GPU by ONNX Runtime, and on one that the host pretends to be.

On both, floats travel as two-byte numbers. The pretended one (pretended/device.cpp) runs operators.c and kernels.cu as
they are, compiled by the machine's C++ compiler for heads of one kind, and tries copies to shared memory at both ends
of the time in which they may happen.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import os
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

from tests.checkpoints import DESCRIPTION
from tests.workers.engine.halves import DECODE, ENCODE, Array
from workers.engine import cuda_ops
from workers.engine.cuda_ops import load_operators
from workers.models.cuda_graph import OWN_DOMAIN
from workers.models.description import CudaType

_KINDS = {np.dtype(np.int32): TensorProto.INT32, np.dtype(np.int64): TensorProto.INT64}
_STORED: Mapping[int, Any] = {TensorProto.INT64: np.int64, TensorProto.FLOAT: np.float32}
ELEMENTS: Mapping[CudaType, int] = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}


def rounded(values: Array, dtype: CudaType) -> Array:
    """What is left of float32 values in `dtype`."""
    kept: Array = DECODE[dtype](ENCODE[dtype](values.astype(np.float32)))
    return kept


def _blank(shape: tuple[int, ...], kind: int) -> Array:
    """Filled with what no result holds, so that an element that nobody writes is seen."""
    return np.full(shape, -7, _STORED[kind]) if kind in _STORED else np.full(shape, 0x7FC1, np.uint16)


@dataclasses.dataclass(frozen=True)
class _Run:
    """One run of an operator. bits: its inputs as they are stored; outputs are filled by the run, and so are the inputs
    that are written in place. kinds, output_kinds: their element types. heads: see `OperatorDevice.run`."""

    operator: str
    bits: list[Array]
    kinds: list[int]
    outputs: list[Array]
    output_kinds: list[int]
    in_place: tuple[int, ...]
    heads: tuple[int, int]
    attributes: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class OperatorDevice(ABC):
    """Runs one operator. dtype: of its floats."""

    dtype: CudaType

    def run(
        self,
        name: str,
        inputs: list[Array],
        shapes: Sequence[tuple[int, ...]],
        *,
        are_indices: bool = False,
        in_place: tuple[int, ...] = (),
        float_inputs: tuple[int, ...] = (),
        float_outputs: tuple[int, ...] = (),
        heads: tuple[int, int] = (8, 1),
        attributes: Mapping[str, float] = MappingProxyType({}),
    ) -> list[Array]:
        """Returns its outputs, of the shapes given. Floats travel as `dtype`, but those named; inputs that are written
        in place are read back.

        heads: channels of a head, and query heads to a KV head, that kernels are compiled for.
        """
        element = ELEMENTS[self.dtype]
        kinds = [
            TensorProto.FLOAT if index in float_inputs else _KINDS.get(values.dtype, element)
            for index, values in enumerate(inputs)
        ]
        output_kinds = [
            TensorProto.INT64 if are_indices else TensorProto.FLOAT if index in float_outputs else element
            for index in range(len(shapes))
        ]
        bits = [
            np.array(ENCODE[self.dtype](values) if kind == element else values, order="C")
            for values, kind in zip(inputs, kinds, strict=True)
        ]
        outputs = [_blank(shape, kind) for shape, kind in zip(shapes, output_kinds, strict=True)]
        name = f"{name}_{self.dtype}"
        self._fill(_Run(name, bits, kinds, outputs, output_kinds, in_place, heads, attributes))
        for index in in_place:
            inputs[index][...] = DECODE[self.dtype](bits[index])
        return [
            DECODE[self.dtype](values) if kind == element else values
            for values, kind in zip(outputs, output_kinds, strict=True)
        ]

    @abstractmethod
    def _fill(self, run: _Run) -> None:
        """Do it."""


@dataclasses.dataclass(frozen=True)
class Gpu(OperatorDevice):
    """By ONNX Runtime on the first GPU."""

    def _fill(self, run: _Run) -> None:
        runtime = importlib.import_module("cuda.bindings.runtime")
        dim, group = run.heads
        model = dataclasses.replace(DESCRIPTION, num_heads=group, num_kv_heads=1, head_dim=dim)
        library = load_operators(model, self.dtype).library
        graph = operator_graph(run.operator, run.kinds, run.output_kinds, run.attributes)
        session = operator_session(library, graph, ["CUDAExecutionProvider"])
        binding = session.io_binding()
        held: list[Any] = []

        def upload(bits: Array) -> int:
            error, pointer = runtime.cudaMalloc(max(1, bits.nbytes))
            assert not int(error)
            held.append(pointer)
            copy(pointer, bits.ctypes.data, bits.nbytes, "HostToDevice")
            return int(pointer)

        def copy(target: Any, source: Any, count: int, kind: str) -> None:
            (error,) = runtime.cudaMemcpy(target, source, count, getattr(runtime.cudaMemcpyKind, f"cudaMemcpy{kind}"))
            assert not int(error)

        try:
            for index, (bits, kind) in enumerate(zip(run.bits, run.kinds, strict=True)):
                binding.bind_input(f"input_{index}", "cuda", 0, kind, list(bits.shape), upload(bits))
            for index, (blank, kind) in enumerate(zip(run.outputs, run.output_kinds, strict=True)):
                binding.bind_output(f"output_{index}", "cuda", 0, kind, list(blank.shape), upload(blank))
            # A copy returns once the host's memory has been read, and ONNX Runtime's stream waits for no other.
            (error,) = runtime.cudaDeviceSynchronize()
            assert not int(error)
            session.run_with_iobinding(binding)
            written = [(held[index], run.bits[index]) for index in run.in_place]
            for pointer, array in [*written, *zip(held[len(run.bits) :], run.outputs, strict=True)]:
                copy(array.ctypes.data, pointer, array.nbytes, "DeviceToHost")
        finally:
            for pointer in held:
                runtime.cudaFree(pointer)


class _Tensor(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("rank", ctypes.c_int64), ("shape", ctypes.c_int64 * 4))

    @classmethod
    def of(cls, values: Array) -> _Tensor:
        assert values.flags.c_contiguous
        return cls(values.ctypes.data, values.ndim, (ctypes.c_int64 * 4)(*values.shape))


@dataclasses.dataclass(frozen=True)
class PretendedGpu(OperatorDevice):
    """By a library made for each kind of heads. folder: where these are kept."""

    folder: Path

    def _fill(self, run: _Run) -> None:
        run_operator = ctypes.CDLL(str(self._library(*run.heads))).run_operator
        late = dataclasses.replace(run, bits=[b.copy() for b in run.bits], outputs=[o.copy() for o in run.outputs])
        for at_once, each in ((1, run), (0, late)):
            message = ctypes.create_string_buffer(300)
            trouble = run_operator(
                each.operator.encode(),
                (_Tensor * len(each.bits))(*map(_Tensor.of, each.bits)),
                (_Tensor * len(each.outputs))(*map(_Tensor.of, each.outputs)),
                ctypes.c_float(each.attributes.get("scale", 0.0)),
                at_once,
                message,
                ctypes.c_size_t(len(message)),
            )
            if trouble:
                raise RuntimeError(message.value.decode())
        for one, other in zip([*run.bits, *run.outputs], [*late.bits, *late.outputs], strict=True):
            np.testing.assert_array_equal(one, other, "it depends on when copies to shared memory are done")

    def _library(self, dim: int, group: int) -> Path:
        has_attention = dim in (64, 128)
        target = self.folder / f"{self.dtype}-{dim if has_attention else 0}-{group if has_attention else 0}.so"
        if target.exists():
            return target
        native = Path(cuda_ops.__file__).parent / "native"
        kernels = self.folder / "kernels.inc"
        # Shared memory whose size a launch tells is one array of the pretended device.
        source = (native / "kernels.cu").read_text().replace("extern __shared__ __align__(128)", "extern")
        kernels.write_text(source)
        objects = self.folder / "operators.o"
        subprocess.run([_compiler("CC", "cc"), "-O1", "-fPIC", "-c", native / "operators.c", "-o", objects], check=True)
        defines = ["-DPRETENDED_DEVICE", f'-DKERNELS="{kernels}"']
        if has_attention:
            defines += [f"-DATTEND_DIM={dim}", f"-DATTEND_GROUP={group}"]
        if self.dtype == "bfloat16":
            defines.append("-DBFLOAT16")
        flags = ["-O2", "-std=c++17", "-shared", "-fPIC", "-Wall", "-Werror", "-Wno-unknown-pragmas", *defines]
        device = Path(__file__).parent / "pretended" / "device.cpp"
        subprocess.run([_compiler("CXX", "c++"), *flags, device, objects, "-o", target], check=True)
        return target


def _compiler(variable: str, name: str) -> str:
    return os.environ.get(variable) or name


def has_compilers() -> bool:
    return all(shutil.which(_compiler(*names)) for names in (("CC", "cc"), ("CXX", "c++")))


def operator_graph(
    op: str, inputs: list[int], outputs: list[int], attributes: Mapping[str, float] = MappingProxyType({})
) -> bytes:
    """A model of one operator. inputs, outputs: their element types."""
    names = [f"input_{n}" for n in range(len(inputs))], [f"output_{n}" for n in range(len(outputs))]
    graph = helper.make_graph(
        [helper.make_node(op, *names, domain=OWN_DOMAIN, **attributes)],
        "one",
        [helper.make_tensor_value_info(name, kind, None) for name, kind in zip(names[0], inputs, strict=True)],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in zip(names[1], outputs, strict=True)],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(OWN_DOMAIN, 1)]
    model: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return model


def operator_session(library: Path, model: bytes, providers: list[Any]) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(str(library))
    return onnxruntime.InferenceSession(model, options, providers=providers)
