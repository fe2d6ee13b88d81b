"""The operators that the CUDA flavour adds to ONNX Runtime: built and handed over once a process.

ONNX Runtime has every operator that a Llama needs, but not as few passes over memory: on an H200 its own rotation,
cache write and gate took 37 of the 189 ms of an 8,192-token prefill. native/operators.c says what ours take and give;
native/kernels.cu computes it. The library is compiled once by the machine's C compiler and kept; the kernels are
compiled by NVRTC at each start, in less than a second, for the device at hand.

Where something of that is missing, `load_operators` says what, and the engine runs on ONNX Runtime's own operators.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from storage.errors import PromptmillError
from workers.models.cuda_graph import has_own_attention
from workers.models.description import CudaType, ModelDescription

_SOURCES = Path(__file__).parent / "native"
# In the order that promptmill_set_kernels takes them; the last four exist for heads that `has_own_attention`.
_KERNELS = (b"rotate_append", b"gated_product", b"row_argmax")
_ATTENTION = (b"attend", b"attend_join", b"attend_prompt", b"attend_shared")
# What operators.c gives these of shared memory, for heads of 128 channels; more than a kernel has unasked.
_ATTENTION_SHARED_BYTES = 64 << 10
_COPY = b"copy_positions"
# Blocks of 256 threads that share one copy within a layer's keys or values.
_COPY_BLOCKS = 8
_COMPILERS = ("cc", "gcc", "clang")
OLDEST_ARCHITECTURE = "sm_80"
_FLAGS = ("-O2", "-shared", "-fPIC")
_COMPILE_LIMIT_S = 60

# What is loaded must outlive every session.
_loaded: dict[tuple[CudaType, int, int], OwnOperators] = {}


class OperatorsUnavailable(PromptmillError):
    """The operators cannot be built or loaded here; the message says why and the way out."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="operators_unavailable")


@dataclass(frozen=True)
class OwnOperators:
    """Operators whose kernels are on the current device. library: what a session registers to have them."""

    library: Path
    _module: Any = field(repr=False)

    def copy_positions(
        self, stream: Any, cache: int, copies: int, count: int, *, planes: int, plane_bytes: int, block_bytes: int
    ) -> None:
        """Copy the beginnings of blocks within every plane of a cache, in a stream.

        cache, copies: device addresses; copies: int32 [count, 3], each a source block, a target block, and how many
        times 16 bytes. Raises OperatorsUnavailable.
        """
        driver = _bindings("driver")
        function = _checked(driver.cuModuleGetFunction(self._module, _COPY))
        values = (cache, copies, plane_bytes // 16, block_bytes // 16)
        types = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_longlong, ctypes.c_longlong)
        grid = (count, planes, _COPY_BLOCKS)
        _checked(driver.cuLaunchKernel(function, *grid, 256, 1, 1, 0, int(stream), (values, types), 0))


def load_operators(model: ModelDescription, dtype: CudaType) -> OwnOperators:
    """Make the operators ready on the current device, for this model.

    Raises OperatorsUnavailable.
    """
    library = build_library()
    heads = (model.cache_head_dim, model.num_heads // model.num_kv_heads) if has_own_attention(model) else (0, 0)
    if (dtype, *heads) not in _loaded:
        _loaded[dtype, *heads] = OwnOperators(library, _hand_over(library, dtype, *heads))
    return _loaded[dtype, *heads]


def build_library() -> Path:
    """Return the compiled library: beside its source, in the user's cache, or made there now.

    Raises OperatorsUnavailable.
    """
    if sys.platform != "linux":
        raise OperatorsUnavailable(f"they are built on Linux only, not on {sys.platform}")
    source = _SOURCES / "operators.c"
    name = f"operators-{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}.so"
    for folder in (_SOURCES, _cache_folder()):
        if (folder / name).is_file():
            return folder / name
    return _compile(source, _cache_folder() / name)


def install_library() -> Path:
    """Compile the library into the package, for an image whose compiler goes again. Raises OperatorsUnavailable."""
    library = build_library()
    if library.parent == _SOURCES:
        return library
    return Path(shutil.copy2(library, _SOURCES / library.name))


def operators_trouble() -> str | None:
    """Why a worker here would do without our own operators. None: it has them."""
    try:
        build_library()
        compile_kernels("float16", OLDEST_ARCHITECTURE, head_dim=128, group=1)
    except OperatorsUnavailable as error:
        return error.message
    return None


def compile_kernels(dtype: CudaType, architecture: str, head_dim: int = 0, group: int = 0) -> bytes:
    """Compile kernels.cu. architecture: as NVRTC names it, such as sm_90. head_dim, group: of the attention kernel; 0
    leaves it out. Raises OperatorsUnavailable.
    """
    nvrtc = _bindings("nvrtc")
    source = (_SOURCES / "kernels.cu").read_bytes()
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
    if dtype == "bfloat16":
        options.append(b"-DBFLOAT16")
    if group:
        options += [f"-DATTEND_DIM={head_dim}".encode(), f"-DATTEND_GROUP={group}".encode()]
    try:
        program = _checked(nvrtc.nvrtcCreateProgram(source, b"kernels.cu", 0, [], []))
    except RuntimeError as error:  # the bindings look for the library at the first call
        reason = " ".join(str(error).split())
        raise OperatorsUnavailable(f"NVIDIA's runtime compiler cannot be loaded ({reason})") from error
    try:
        (answer,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if int(answer):
            text = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
            nvrtc.nvrtcGetProgramLog(program, text)
            raise OperatorsUnavailable(f"the kernels do not compile for {architecture}: {bytes(text).decode()[:500]}")
        image = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc.nvrtcGetCUBIN(program, image))
        return bytes(image)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _hand_over(library: Path, dtype: CudaType, head_dim: int, group: int) -> Any:
    """Load the kernels into the current device and tell the library where they are; returns their module."""
    runtime, driver = _bindings("runtime"), _bindings("driver")
    _checked(runtime.cudaFree(0))  # makes the device's primary context current, which a module is loaded into
    device = _checked(runtime.cudaGetDevice())
    attributes = runtime.cudaDeviceAttr
    major, minor = (
        _checked(runtime.cudaDeviceGetAttribute(attribute, device))
        for attribute in (attributes.cudaDevAttrComputeCapabilityMajor, attributes.cudaDevAttrComputeCapabilityMinor)
    )
    module = _checked(driver.cuModuleLoadData(compile_kernels(dtype, f"sm_{major}{minor}", head_dim, group)))
    names = [*_KERNELS, *_ATTENTION] if group else _KERNELS
    functions = [_checked(driver.cuModuleGetFunction(module, name)) for name in names]
    if group:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        for function in functions[-len(_ATTENTION) :]:
            _checked(driver.cuFuncSetAttribute(function, attribute, _ATTENTION_SHARED_BYTES))
    launch = ctypes.cast(ctypes.CDLL("libcuda.so.1").cuLaunchKernel, ctypes.c_void_p)
    hand_over = ctypes.CDLL(str(library)).promptmill_set_kernels
    hand_over.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
    hand_over.restype = None
    pointers = (ctypes.c_void_p * len(functions))(*map(int, functions))
    hand_over(int(dtype == "bfloat16"), launch, pointers, head_dim, group)
    return module


def _compile(source: Path, target: Path) -> Path:
    named = os.environ.get("CC")
    compiler = named or next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise OperatorsUnavailable(f"no C compiler was found ({', '.join(_COMPILERS)}); install one, or name it in CC")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / target.name
            command = [compiler, *_FLAGS, "-o", str(made), str(source)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_LIMIT_S, check=False)
            if done.returncode:
                raise OperatorsUnavailable(f"{' '.join(command)} failed: {done.stderr.strip()[:500]}")
            made.replace(target)  # whole or not at all: workers start side by side
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OperatorsUnavailable(f"{target} cannot be built: {error}") from error
    return target


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "promptmill"


def _bindings(name: str) -> Any:
    try:
        return importlib.import_module(f"cuda.bindings.{name}")
    except ImportError as error:
        raise OperatorsUnavailable(f"NVIDIA's Python bindings are not complete ({error})") from error


def _checked(answer: tuple[Any, ...]) -> Any:
    error, *values = answer
    if int(error):
        raise OperatorsUnavailable(f"CUDA refused a call while the operators were loaded: {error!r}")
    return values[0] if values else None
