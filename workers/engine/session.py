"""ONNX Runtime sessions. The only other places that know ONNX Runtime are the two flavours of the engine."""

import functools
from pathlib import Path

import onnxruntime

from workers.models.artifact import AMX_MODEL_FILE, MODEL_FILE

# Severity of ONNX Runtime's own log: 3 is errors. Warnings there are about nodes it chose to place or fold.
LOG_SEVERITY = 3

_CPU_FLAGS = Path("/proc/cpuinfo")


def open_cpu_session(
    path: Path, threads: int, *, allow_spinning: bool = False, exactly: bool = False
) -> onnxruntime.InferenceSession:
    """Open a graph on the CPU provider with the given number of threads inside an operator.

    allow_spinning: waiting threads burn their core; faster between small operators, rude to other processes.
    exactly: open this graph, not the one beside it that says the same in the way this processor is fastest at.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = LOG_SEVERITY
    # Patterns are kept for each shape that is ever run, and shapes vary with every prompt.
    options.enable_mem_pattern = False
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if allow_spinning else "0")
    graph = path if exactly else fastest_graph(path)
    return onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])


def fastest_graph(path: Path) -> Path:
    """Of an artifact's graphs for the CPU, the one this processor runs fastest. path: the one that runs anywhere."""
    for_amx = path.with_name(AMX_MODEL_FILE)
    return for_amx if path.name == MODEL_FILE and for_amx.exists() and has_amx() else path


@functools.cache
def has_amx() -> bool:
    """Whether the processor multiplies integers in tiles, as Linux tells; other systems are not asked."""
    try:
        return " amx_int8" in _CPU_FLAGS.read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
