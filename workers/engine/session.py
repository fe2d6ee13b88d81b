"""ONNX Runtime sessions. The only other places that know ONNX Runtime are the two flavours of the engine."""

from pathlib import Path

import onnxruntime

# Severity of ONNX Runtime's own log: 3 is errors. Warnings there are about nodes it chose to place or fold.
LOG_SEVERITY = 3


def open_cpu_session(path: Path, threads: int, *, allow_spinning: bool = False) -> onnxruntime.InferenceSession:
    """Open a graph on the CPU provider with the given number of threads inside an operator.

    allow_spinning: waiting threads burn their core; faster between small operators, rude to other processes.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = LOG_SEVERITY
    # Patterns are kept for each shape that is ever run, and shapes vary with every prompt.
    options.enable_mem_pattern = False
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if allow_spinning else "0")
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
