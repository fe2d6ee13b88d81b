"""The CPU engine and the whole path, beside llama.cpp on the same cores in the same run.

    python -m benchmarks.cpu                      # everything, about ten minutes on two cores
    python -m benchmarks.cpu engine --rows 32     # one part

Workload: SmolLM2-135M-Instruct, 128 prompt + 64 new tokens, greedy, random token ids. The peer runs the GGUF file as
it was published (Q4_1); the engine runs its int8 artifact, made from the same file. The peer is llama-cpp-python in an
interpreter of its own (--peer-python, else one is built in the cache folder).

Parts: engine (rows 1, 8, 32, 64, all requests at once), path (256 requests through submit, queue, Celery worker and
database beside the engine alone in that same process layout), prefix (512 shared + 32 own prompt tokens, 32 new, with
and without reuse), submit (100,000 short lines).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jobs.settings import load_settings
from workers.engine.opening import open_engine
from workers.engine.request import AnyEngine, Completion, GenerationRequest, SamplingParameters
from workers.models.artifact import Artifact, load_artifact
from workers.models.convert import convert
from workers.models.demo import demo_checkpoint

PROMPT_TOKENS, NEW_TOKENS = 128, 64
PEER_REQUIREMENT = "llama-cpp-python==0.3.36"
# A native build of the peer crashes on some AVX-512 machines; these flags name what is safe there.
PEER_CMAKE_ARGS = (
    "-DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON "
    "-DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON"
)

console = Console()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=[], help="engine, path, prefix, submit; all by default")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--dtype", default="int8", choices=["float32", "int8", "int4"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=2, help="the best of so many runs counts, on both sides")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--peer-python", default=os.environ.get("LLAMA_CPP_PYTHON", ""))
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "promptmill-bench")
    options = parser.parse_args()
    parts = options.parts or ["engine", "prefix", "path", "submit"]
    options.cache.mkdir(parents=True, exist_ok=True)
    console.print(f"{hardware(options.threads)}; {datetime.now(UTC):%Y-%m-%d %H:%M} UTC")
    artifact = demo_artifact(options.cache, options.dtype)
    found: dict[str, Any] = {"hardware": hardware(options.threads), "model": artifact.model, "dtype": options.dtype}
    if "engine" in parts:
        found["engine"] = engine_beside_peer(artifact, options)
    if "prefix" in parts:
        found["prefix"] = shared_prefix(artifact, options.threads)
    if "path" in parts:
        found["path"] = whole_path(artifact, options.threads)
    if "submit" in parts:
        found["submit"] = submit_lines(artifact.model)
    print(json.dumps(found))


def engine_beside_peer(artifact: Artifact, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Requests a second at each row count, ours and the peer's, taken in turns so that both see the same machine."""
    peer = None if options.no_peer else _peer(options)
    table = Table(title=f"engine: {PROMPT_TOKENS} prompt + {NEW_TOKENS} new tokens, {artifact.dtype}, all rows at once")
    for heading in ("rows", "promptmill req/s", "llama.cpp req/s", "ratio"):
        table.add_column(heading, justify="right")
    found = []
    for rows in options.rows:
        ours, theirs = 0.0, 0.0
        for _ in range(options.repeat):
            ours = max(ours, _engine_rate(artifact, rows, rows, options.threads))
            if peer is not None:
                theirs = max(theirs, peer(rows))
        ratio = ours / theirs if theirs else None
        found.append({"rows": rows, "promptmill": ours, "llama_cpp": theirs or None, "ratio": ratio})
        table.add_row(str(rows), f"{ours:.2f}", f"{theirs:.2f}" if theirs else "-", f"{ratio:.2f}" if ratio else "-")
    console.print(table)
    return found


def shared_prefix(artifact: Artifact, threads: int, requests: int = 64) -> dict[str, float]:
    """512 shared + 32 own prompt tokens, 32 new, with prefix reuse and without."""
    rng = random.Random(1)
    vocab_size = artifact.description.vocab_size
    shared = _tokens(rng, vocab_size, 512)
    prompts = [shared + _tokens(rng, vocab_size, 32) for _ in range(requests)]
    rates = {}
    for reuse in (True, False):
        engine = _open(artifact, 32, 1024, threads, prefix_reuse=reuse)
        rates[reuse] = requests / _seconds(lambda engine=engine: _generate(engine, prompts, 32))  # type: ignore[misc]
        engine.close()
    ratio = rates[True] / rates[False]
    table = Table(title=f"shared prefix: {requests} x (512 shared + 32 own, 32 new), 32 rows")
    for heading in ("reuse on, req/s", "off, req/s", "ratio"):
        table.add_column(heading, justify="right")
    table.add_row(f"{rates[True]:.2f}", f"{rates[False]:.2f}", f"{ratio:.2f}")
    console.print(table)
    return {"on": rates[True], "off": rates[False], "ratio": ratio}


def whole_path(artifact: Artifact, threads: int, requests: int = 256, rows: int = 64) -> dict[str, float]:
    """256 requests from submit to last commit on a warm worker, beside the engine alone; in turns, twice each."""
    from benchmarks.path import PathBench

    alone, path = 0.0, 0.0
    for _ in range(2):
        alone = max(alone, _engine_rate(artifact, rows, requests, threads))
        with PathBench(artifact, rows, threads) as bench:
            path = max(path, bench.requests_per_s(requests, PROMPT_TOKENS, NEW_TOKENS))
    table = Table(title=f"whole path: {requests} requests, {rows} rows, warm worker, SQLite, embedded queue server")
    for heading in ("engine alone, req/s", "whole path, req/s", "ratio"):
        table.add_column(heading, justify="right")
    table.add_row(f"{alone:.2f}", f"{path:.2f}", f"{path / alone:.3f}")
    console.print(table)
    return {"engine": alone, "path": path, "ratio": path / alone}


def submit_lines(model: str, lines: int = 100_000) -> dict[str, float]:
    """Submitting short lines, in a process of its own so that its peak memory is its own."""
    script = f"from benchmarks.cpu import _submit_alone; _submit_alone({model!r}, {lines})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout)
    table = Table(title=f"submit: {lines:,} short lines")
    for heading in ("seconds", "lines/s", "peak memory, MiB"):
        table.add_column(heading, justify="right")
    table.add_row(f"{result['seconds']:.1f}", f"{lines / result['seconds']:,.0f}", f"{result['peak_mib']:.0f}")
    console.print(table)
    return result


def _submit_alone(model: str, lines: int) -> None:
    from jobs.inputs import InputOptions
    from jobs.source import open_source
    from jobs.submit import submit
    from storage.database import open_database, upgrade_schema

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lines.jsonl"
        with path.open("w") as file:
            for n in range(lines):
                file.write(json.dumps({"custom_id": f"q{n}", "prompt": f"What is the square of {n}?"}) + "\n")
        with open_database(f"sqlite:///{folder}/bench.db") as database, open_source(path, Path(folder)) as source:
            upgrade_schema(database)
            seconds = _seconds(lambda: submit(database, source, InputOptions(model=model)))
    print(json.dumps({"seconds": seconds, "peak_mib": _peak_mib()}))


def _peak_mib() -> float:
    """This process's own peak. (`ru_maxrss` would keep its parent's across exec on Linux.)"""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    return float(line.split()[1]) / 1024


def _engine_rate(artifact: Artifact, rows: int, requests: int, threads: int) -> float:
    rng = random.Random(0)
    prompts = [_tokens(rng, artifact.description.vocab_size, PROMPT_TOKENS) for _ in range(requests)]
    engine = _open(artifact, rows, PROMPT_TOKENS + NEW_TOKENS + 8, threads)
    _generate(engine, prompts[:1], 2)
    seconds = _seconds(lambda: _generate(engine, prompts, NEW_TOKENS))
    engine.close()
    return requests / seconds


def _generate(engine: AnyEngine, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Completion]:
    sampling = SamplingParameters(max_tokens=new_tokens, ignore_eos=True)
    futures = [engine.submit(GenerationRequest(prompt, sampling)) for prompt in prompts]
    return [future.result() for future in futures]


def _open(artifact: Artifact, rows: int, context: int, threads: int, *, prefix_reuse: bool = True) -> AnyEngine:
    changes = {"max_batch_size": rows, "context_length": context, "threads": threads, "prefix_reuse": prefix_reuse}
    return open_engine(artifact, load_settings(env_file=None).engine.model_copy(update=changes), "cpu")


def demo_artifact(cache: Path, dtype: Any = "int8") -> Artifact:
    folder = cache / f"smollm2-135m-instruct-{dtype}"
    if not folder.exists():
        console.print(f"converting the demo model to {dtype}")
        convert("demo", folder, dtype=dtype, cache=cache)
    return load_artifact(folder, check_digests=False)


def _peer(options: argparse.Namespace) -> Callable[[int], float]:
    """The peer's requests a second for a row count; builds the peer where there is none (ten minutes on two cores)."""
    python = options.peer_python or str(options.cache / "peer" / "bin" / "python")
    if not Path(python).exists():
        console.print(f"building {PEER_REQUIREMENT} (needs a C++ compiler and CMake)")
        subprocess.run([sys.executable, "-m", "venv", str(options.cache / "peer")], check=True)
        environment = {**os.environ, "CMAKE_ARGS": PEER_CMAKE_ARGS}
        subprocess.run([python, "-m", "pip", "install", "--quiet", PEER_REQUIREMENT], check=True, env=environment)
    gguf = options.cache / "peer-model.gguf"
    if not gguf.exists():
        with demo_checkpoint(options.cache) as path:
            gguf.write_bytes(path.read_bytes())
    script = str(Path(__file__).with_name("llama_cpp_peer.py"))

    def rate(rows: int) -> float:
        command = [python, script, str(gguf), "--rows", str(rows), "--threads", str(options.threads)]
        command += ["--prompt-tokens", str(PROMPT_TOKENS), "--new-tokens", str(NEW_TOKENS)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return float(json.loads(done.stdout.splitlines()[-1])["requests_per_s"])

    return rate


def _tokens(rng: random.Random, vocab_size: int, count: int) -> list[int]:
    return [rng.randrange(100, vocab_size) for _ in range(count)]


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def hardware(threads: int) -> str:
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        name = lines[0].partition(":")[2].strip() if lines else name
    return f"{name}, {os.cpu_count()} cores, {threads} threads, numpy {np.__version__}"


if __name__ == "__main__":
    main()
