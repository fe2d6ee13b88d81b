"""The CUDA engine alone: token ids in, token ids out, random weights of a known shape, or an artifact.

    python -m benchmarks.gpu --workloads W1 W2 W3 W4 one        Llama-2-7B shape
    python -m benchmarks.gpu --shape llama3-8b --workloads W1
    python -m benchmarks.gpu --artifact FOLDER --workloads small questions
    python -m benchmarks.gpu --workloads W1 W5                  W1 by the engine alone, then through the whole path
    python -m benchmarks.gpu --workloads W1 W2 W3 W4 one mixed W5 --peer PEER      every figure, beside those wanted

Prints a table, then the figures that are wanted, then one JSON line. Each workload is run `--repeat` times with fresh
prompts, so the prefix cache is cold; the best run counts, and all are in the JSON line. `W1-sampled` is W1 at
temperature 0.8 and top-p 0.95; `W2-odd` is W2 with a shared beginning that ends within a block; `questions` are asked
about a handbook and answered until the model ends, and held against the peer's answers; `mixed` is a load of all kinds
for `--minutes`, interactive requests among them (benchmarks/mixed_load.py). W5 comes last, when the engine has left the
device to a worker: W1's requests from submit to the last commit, through an embedded Redis, Celery and SQLite, on an
artifact that is given or written for it. PEER is what `benchmarks.gpu_peer` printed, for the ratios. Random
weights need torch.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pynvml

from benchmarks.mixed_load import Mix, first_difference, run_mixed_load
from benchmarks.workloads import QUESTIONS, Workload, make_workload
from workers.devices import GpuError, list_devices, open_nvml, visible
from workers.engine.cuda import CudaRunner, DeviceTensor, UploadedWeights, cuda_row_buckets, upload_weights
from workers.engine.cuda_ops import load_operators
from workers.engine.flavour import load_libraries
from workers.engine.paged_engine import PagedDecode, PagedEngine, PagedPrefill
from workers.engine.request import GenerationRequest, SamplingParameters
from workers.engine.scheduler import interactive_slots
from workers.models.artifact import Artifact, load_artifact
from workers.models.cuda_graph import artifact_entries, stored_weights, weight_shapes
from workers.models.description import Llama3Scaling, ModelDescription
from workers.models.rope import rotary_tables

LLAMA2_7B = ModelDescription(
    architecture="llama",
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    context_length=4096,
    rms_norm_epsilon=1e-5,
    rope_theta=10000.0,
    rope_scaling=None,
    tie_word_embeddings=False,
)
LLAMA3_8B = ModelDescription(
    architecture="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    context_length=8192,
    rms_norm_epsilon=1e-5,
    rope_theta=500000.0,
    rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192),
    tie_word_embeddings=False,
)
SHAPES = {"llama2-7b": LLAMA2_7B, "llama3-8b": LLAMA3_8B}
# Requests a second beside the peer's on the same card, by shape.
WANTED_OF_PEER = {
    "llama2-7b": {"W1": 1.05, "W2": 1.5, "W3": 1.0, "W4": 1.0},
    "llama3-8b": {"W1": 1.0},
    "artifact": {"small": 1.0, QUESTIONS: 1.0},
}
MOST_TIME_ALONE = 1.15  # one request, of the peer's time
LEAST_OF_ENGINE = 0.95  # W5 of W1
LEAST_CACHE_SHARE = 0.95
LEAST_UTILIZATION = 90.0
LEAST_BUSY_SHARE = 0.8  # of a small model's run
MOST_GROWTH_MIB = 64.0
MOST_START_S = 60.0


@dataclass
class Trace:
    """What a run's steps were: [kind, rows, tokens, table width, launched_at, read_at], seconds."""

    steps: list[list[Any]] = field(default_factory=list)


class TracedRunner(CudaRunner):
    """A runner that notes when each step was launched and read, as long as `is_traced`."""

    trace = Trace()
    is_traced = True

    def prefill(self, call: PagedPrefill) -> Any:
        ticket = super().prefill(call)
        self._note(ticket, ["prefill", len(call.lengths), len(call.token_ids), call.block_table.shape[1]])
        return ticket

    def decode(self, call: PagedDecode) -> Any:
        ticket = super().decode(call)
        self._note(ticket, ["decode", len(call.sources), call.rows, call.table_width])
        return ticket

    def result(self, ticket: Any) -> Any:
        answer = super().result(ticket)
        if ticket.slot in self._open:
            self._open.pop(ticket.slot).append(time.perf_counter())
        return answer

    def _note(self, ticket: Any, step: list[Any]) -> None:
        if not self.is_traced:
            return
        step.append(time.perf_counter())
        self.trace.steps.append(step)
        self._open[ticket.slot] = step

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._open: dict[Any, list[Any]] = {}


def random_weights(model: ModelDescription, rotary_length: int) -> tuple[dict[str, DeviceTensor], Any]:
    """Weights on the device, small enough that activations stay in range; returns what keeps them alive too."""
    torch: Any = importlib.import_module("torch")
    generator = torch.Generator(device="cuda").manual_seed(0)
    kept = {}
    cos, sin = rotary_tables(model, rotary_length)
    for name, shape in weight_shapes(model, rotary_length).items():
        if name.startswith("rope."):
            table = cos if name == "rope.cos" else sin
            kept[name] = torch.from_numpy(table.astype(np.float16)).cuda()
        elif "norm" in name:
            kept[name] = torch.ones(shape, dtype=torch.float16, device="cuda")
        else:
            kept[name] = torch.empty(shape, dtype=torch.float16, device="cuda").normal_(0, 0.02, generator=generator)
    torch.cuda.synchronize()
    return {name: DeviceTensor(tensor.data_ptr(), tuple(tensor.shape)) for name, tensor in kept.items()}, kept


def run_workload(
    engine: PagedEngine, workload: Workload, **sampling: Any
) -> tuple[dict[str, Any], list[tuple[int, ...]]]:
    """Submit everything at once and wait for the last answer. Returns figures, and the answers.

    The engine's stop tokens are those of the workload.
    """
    requests = [
        GenerationRequest(prompt, SamplingParameters(new, ignore_eos=not workload.stop_token_ids, **sampling))
        for prompt, new in zip(workload.prompts, workload.new_tokens, strict=True)
    ]
    start = time.perf_counter()
    futures = [engine.submit(request) for request in requests]
    completions = [future.result() for future in futures]
    seconds = time.perf_counter() - start
    answers = [completion.completion_token_ids for completion in completions]
    workload.check(answers)
    made = sum(map(len, answers))
    figures = {
        "seconds": round(seconds, 4),
        "requests_per_s": round(len(requests) / seconds, 2),
        "new_tokens_per_s": round(made / seconds),
        "cached_tokens": sum(completion.cached_tokens for completion in completions),
        "first_token_s_median": round(
            statistics.median(completion.times.wait_s + completion.times.prefill_s for completion in completions), 4
        ),
    }
    return figures, answers


def summarize(steps: list[list[Any]], seconds: float) -> dict[str, Any]:
    """Time between the ends of consecutive steps, by kind: what each kind took of the run, which took `seconds`."""
    taken: dict[str, list[float]] = {"prefill": [], "decode": []}
    tokens = {"prefill": 0, "decode": 0}
    padded = 0
    for before, step in zip([None, *steps], steps, strict=False):
        start = step[4] if before is None else max(before[5], step[4])
        taken[step[0]].append(step[5] - start)
        tokens[step[0]] += step[2] if step[0] == "prefill" else step[1]
        padded += step[2] if step[0] == "decode" else 0
    return {
        kind: {
            "steps": len(times),
            "seconds": round(sum(times), 3),
            "median_ms": round(1e3 * statistics.median(times), 3) if times else None,
            "tokens": tokens[kind],
        }
        for kind, times in taken.items()
    } | {
        "padded_decode_rows": padded,
        # From launch to read, so the device was busy for no more than that.
        "busy_share": round(sum(map(sum, taken.values())) / seconds, 3),
    }


def run_path(given: argparse.Namespace, artifact: Artifact | None, folder: Path) -> dict[str, Any]:
    """W5: a worker of the same rows and context, started as `promptmill up` starts it.

    folder: where an artifact of random weights is written if none is given.
    """
    from benchmarks.path import PathBench
    from benchmarks.random_artifact import write_random_artifact

    if artifact is None:
        artifact = write_random_artifact(folder, given.shape, SHAPES[given.shape], max(given.context_length, 4096))
    engine = {
        "flavour": "cuda",
        "context_length": min(given.context_length, artifact.context_length),
        "prefill_chunk_tokens": given.prefill_tokens,
    }
    at = time.perf_counter()
    with PathBench(artifact, given.max_rows, 0, engine=engine) as bench, watched_device() as watch:
        start_s = round(time.perf_counter() - at, 2)
        runs: list[dict[str, Any]] = []
        for turn in range(given.repeat):
            _ = watch and watch.mean()
            timeline = bench.burst(512, 128, 64, seed=turn)
            run: dict[str, Any] = {"requests_per_s": round(512 / timeline.done, 2), "seconds": round(timeline.done, 4)}
            run["timeline_ms"] = {name: round(seconds * 1e3, 1) for name, seconds in asdict(timeline).items()}
            runs.append(run | {"new_tokens_per_s": round(64 * 512 / timeline.done), "device": watch and watch.mean()})
            print(f"{given.label} W5 512 x (128 prompt, 64 new), whole path: {json.dumps(runs[-1])}", flush=True)
    return {"best": max(run["requests_per_s"] for run in runs), "start_s": start_s, "runs": runs}


def kernel_times(run: Callable[[], Any]) -> list[tuple[str, int, float]]:
    """Name, launches and milliseconds of the kernels of one run, longest first. The profiler is torch's."""
    profiler: Any = importlib.import_module("torch.profiler")
    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as profile:
        run()
    found = [(item.key, item.count, item.device_time_total / 1e3) for item in profile.key_averages()]
    return sorted(((name, count, round(ms, 2)) for name, count, ms in found if ms), key=lambda kernel: -kernel[2])


def print_kernels(title: str, kernels: list[tuple[str, int, float]], most: int = 24) -> None:
    total = sum(ms for _, _, ms in kernels)
    print(f"{title}: {total:.0f} ms of kernels")
    for name, count, ms in sorted(kernels, key=lambda kernel: -kernel[2])[:most]:
        print(f"  {ms:9.1f} ms {100 * ms / total:5.1f} % {count:7}  {name[:110]}", flush=True)


class Watch:
    """Samples what NVML tells of the device, ten times a second. Within `open_nvml`."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._lock = threading.Lock()
        self._sums = (0, 0.0, 0.0)  # samples, percent, watts
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def mean(self) -> dict[str, float] | None:
        """Since the last call."""
        with self._lock:
            (count, percent, watts), self._sums = self._sums, (0, 0.0, 0.0)
        if not count:
            return None
        return {"utilization_percent": round(percent / count, 1), "power_w": round(watts / count)}

    def used_bytes(self) -> int:
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    def close(self) -> None:
        self._done.set()
        self._thread.join()

    def _loop(self) -> None:
        while not self._done.wait(0.1):
            rates = self._nvml.nvmlDeviceGetUtilizationRates(self._handle)
            watts = self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000
            with self._lock:
                count, percent, summed = self._sums
                self._sums = (count + 1, percent + rates.gpu, summed + watts)


@contextmanager
def watched_device(nvml: Any = pynvml) -> Iterator[Watch | None]:
    """The device that CUDA shows as the first. None where NVML tells nothing of it."""
    with ExitStack() as stack:
        try:
            stack.enter_context(open_nvml(nvml))
            device = visible(list_devices(nvml), os.environ.get("CUDA_VISIBLE_DEVICES"))[0]
            handle = nvml.nvmlDeviceGetHandleByUUID(device.uuid)
            nvml.nvmlDeviceGetUtilizationRates(handle)
            nvml.nvmlDeviceGetPowerUsage(handle)
        except (GpuError, IndexError, nvml.NVMLError) as error:
            print(f"NVML tells nothing of the device: {error}", flush=True)
            yield None
            return
        watch = Watch(nvml, handle)
        try:
            yield watch
        finally:
            watch.close()


def run_mixed(engine: PagedEngine, given: argparse.Namespace, vocab_size: int, watch: Watch | None) -> dict[str, Any]:
    """A load of all kinds: how soon interactive requests are answered beside it, and what grows."""
    rng = random.Random(7)
    mix = Mix(
        [rng.randrange(5, vocab_size) for _ in range(20_000)],
        longest_prompt=min(2048, engine.context_length - 1),
        longest_answer=512,
    )
    before = engine._preemptions
    report = run_mixed_load(
        engine,
        mix,
        seconds=60 * given.minutes,
        seed=1,
        sample_size=0,
        device_bytes=lambda: None if watch is None else watch.used_bytes(),
    )
    assert not report.wrong, report.wrong[:5]
    figures = report.figures()
    return figures | {
        "new_tokens_per_s": round(report.new_tokens / report.seconds),
        "preemptions": engine._preemptions - before,
        "device": None if watch is None else watch.mean(),
    }


@dataclass(frozen=True)
class Figure:
    """Something that is wanted. is_met: None where it was not measured."""

    name: str
    measured: float | None
    wanted: str
    is_met: bool | None


def figures_of(report: dict[str, Any], peer: dict[str, Any] | None) -> list[Figure]:
    """The figures that are wanted of a run, from its report and what the peer's run printed."""
    results: dict[str, Any] = report["results"]
    figures: list[Figure] = []

    def add(name: str, measured: float | None, bound: float, *, is_most: bool = False) -> None:
        is_met = None if measured is None else bool(measured <= bound if is_most else measured >= bound)
        figures.append(Figure(name, measured, f"{'<=' if is_most else '>='} {bound:g}", is_met))

    shape = "artifact" if report["options"]["artifact"] else report["shape"]
    for name, least in WANTED_OF_PEER[shape].items():
        if name in results:
            theirs = _best_of_peer(peer, name)
            ratio = round(results[name]["best"] / theirs, 3) if theirs else None
            add(f"{name}, requests/s, of the peer's", ratio, least)
    if "one" in results:
        theirs = _best_of_peer(peer, "one")
        ratio = round(theirs / results["one"]["best"], 3) if theirs else None
        add("one request alone, of the peer's time", ratio, MOST_TIME_ALONE, is_most=True)
    if "W5" in results:
        add("W5, of the engine alone", report.get("w5_of_w1"), LEAST_OF_ENGINE)
    for name in ("W1", "W2", "W3", "W4"):
        if name in results:
            told = [run["device"]["utilization_percent"] for run in results[name]["runs"] if run["device"]]
            mean = round(statistics.mean(told), 1) if told else None
            add(f"{name}, utilization by NVML, percent", mean, LEAST_UTILIZATION)
    for name in ("small", QUESTIONS):
        if name in results:
            shares = [run["steps"]["busy_share"] for run in results[name]["runs"]]
            add(f"{name}, share of the run with a step in flight", max(shares), LEAST_BUSY_SHARE)
    cache = report["kv_cache"]
    if cache["holds_all_rows"]:
        figures.append(Figure("KV cache, of the memory left for it", cache["share"], "every row in full", True))
    else:
        add("KV cache, of the memory left for it", cache["share"], LEAST_CACHE_SHARE)
    add("start, seconds", report["start_s"], MOST_START_S, is_most=True)
    if "mixed" in results:
        (run,) = results["mixed"]["runs"]
        add("mixed, growth of resident memory, MiB", run["resident_growth_mib"], MOST_GROWTH_MIB, is_most=True)
        add("mixed, growth of device memory, MiB", run["device_growth_mib"], MOST_GROWTH_MIB, is_most=True)
    return figures


def _best_of_peer(peer: dict[str, Any] | None, name: str) -> float | None:
    runs = peer["results"].get(name, []) if peer else []
    return max((float(run["requests_per_s"]) for run in runs), default=None)


def agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> dict[str, int]:
    """How many answers are the same, and how many tokens come before the first difference of each."""
    pairs = list(zip(ours, theirs, strict=True))
    return {
        "answers": len(pairs),
        "same": sum(list(one) == list(other) for one, other in pairs),
        "tokens": sum(map(len, theirs)),
        "same_tokens": sum(first_difference(one, other) for one, other in pairs),
    }


def read_peer(path: Path) -> dict[str, Any]:
    """The JSON line at the end of what `benchmarks.gpu_peer` printed."""
    peer: dict[str, Any] = json.loads(path.read_text().strip().splitlines()[-1])
    return peer


def print_figures(figures: Sequence[Figure]) -> None:
    words = {True: "yes", False: "NO", None: "not measured"}
    print(f"\n{'figure':<48}{'measured':>12}{'wanted':>20}  met")
    for figure in figures:
        measured = "-" if figure.measured is None else f"{figure.measured:g}"
        print(f"{figure.name:<48}{measured:>12}{figure.wanted:>20}  {words[figure.is_met]}")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, default="llama2-7b")
    parser.add_argument("--artifact", type=Path, help="of float weights")
    parser.add_argument("--workloads", nargs="+", default=["W1", "W2", "W3", "W4", "one"])
    parser.add_argument("--max-rows", type=int, default=512)
    parser.add_argument("--context-length", type=int, default=4096)
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--row-buckets", type=int, nargs="+")
    parser.add_argument("--table-widths", type=int, nargs="+")
    parser.add_argument("--prefill-tokens", type=int, default=8448)
    parser.add_argument("--burst-tokens", type=int, default=65536)
    parser.add_argument("--wanted-tokens", type=int, default=2048)
    parser.add_argument("--prefix-min-tokens", type=int, default=256, help="0: no beginning is read once for many rows")
    parser.add_argument("--prefix-min-rows", type=int, default=32)
    parser.add_argument("--split-min-rows", type=int, default=384)
    parser.add_argument("--no-copies", action="store_true", help="compute what a shared beginning leaves of a block")
    parser.add_argument("--stock-operators", action="store_true", help="ONNX Runtime's operators alone")
    parser.add_argument("--kernels", action="store_true", help="then say which kernels a run spends its time in")
    parser.add_argument(
        "--interactive-rows", type=int, help="rows beside --max-rows; as a worker has them unless given"
    )
    parser.add_argument("--kv-cache-mib", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long the mixed load lasts")
    parser.add_argument("--peer", type=Path, help="what benchmarks.gpu_peer printed on this card in this hour")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--trace", type=Path, help="write every step of the last runs here, as JSON")
    parser.add_argument("--label", default="")
    given = parser.parse_args(arguments)

    peer = read_peer(given.peer) if given.peer else None
    report: dict[str, Any] = {"label": given.label, "shape": given.shape, "options": vars(given) | {"trace": None}}
    report["options"] |= {
        name: str(given.__dict__[name]) if given.__dict__[name] else None for name in ("artifact", "peer")
    }
    reserve = interactive_slots(given.max_rows) if given.interactive_rows is None else given.interactive_rows
    buckets = tuple(given.row_buckets or cuda_row_buckets(given.max_rows)) + (
        (given.max_rows + reserve,) if reserve else ()
    )
    at = time.perf_counter()
    load_libraries()
    uploaded: UploadedWeights | None = None
    artifact = load_artifact(given.artifact, check_digests=False) if given.artifact else None
    if artifact is not None:
        model, rotary_length, kept = artifact.description, artifact.context_length, None
        entries = artifact_entries(artifact.model_path)
        uploaded = upload_weights(model, rotary_length, stored_weights(entries, given.artifact, "float16"))
        weights = uploaded.tensors
    else:
        model, rotary_length = SHAPES[given.shape], max(given.context_length, 4096)
        weights, kept = random_weights(model, rotary_length)
    report["weights_s"] = round(time.perf_counter() - at, 2)
    at = time.perf_counter()
    runner = TracedRunner(
        model,
        weights,
        dtype="float16",
        rotary_length=rotary_length,
        max_rows=given.max_rows + reserve,
        context_length=min(given.context_length, rotary_length),
        prefill_tokens=given.prefill_tokens,
        block_size=given.block_size,
        row_buckets=buckets,
        memory_bytes=given.kv_cache_mib << 20 or None,
        table_widths=given.table_widths,
        prefix_min_tokens=given.prefix_min_tokens,
        prefix_min_rows=given.prefix_min_rows,
        split_min_rows=given.split_min_rows,
        operators=None if given.stock_operators else load_operators(model, "float16"),
    )
    runner.copies_blocks = runner.copies_blocks and not given.no_copies
    engine = PagedEngine(
        runner,
        stop_token_ids=artifact.tokenizer.stop_token_ids if artifact else [2],
        prefill_budget_tokens=given.prefill_tokens,
        prefill_burst_tokens=given.burst_tokens,
        prefill_wanted_tokens=given.wanted_tokens,
        interactive_rows=reserve,
    )
    report["start_s"] = round(time.perf_counter() - at, 2)
    report["blocks"] = runner.num_blocks
    report["kv_cache"] = {
        "bytes": runner.cache_bytes,
        # Without block 0, which holds nothing.
        "share": round(runner.cache_bytes * (1 - 1 / runner.num_blocks) / runner.room_bytes, 3),
        "holds_all_rows": runner.num_blocks > runner.max_rows * runner.max_blocks,
    }
    print(
        f"{given.label} weights {report['weights_s']} s, start {report['start_s']} s, {runner.num_blocks} blocks",
        flush=True,
    )
    run_workload(engine, make_workload("one", model, 99))
    gc.collect()
    gc.freeze()  # as a worker does once it is warm: no collection walks what stays for ever
    results: dict[str, Any] = {}
    traces: dict[str, Any] = {}
    with watched_device() as watch:
        for name in given.workloads:
            if name == "W5":
                continue
            runner.is_traced = name != "mixed"  # a note of each of its steps would be all that grows
            if name == "mixed":
                run = run_mixed(engine, given, model.vocab_size, watch)
                results[name] = {"best": run["requests_per_s"], "runs": [run]}
                print(f"{given.label} {name} for {given.minutes:g} minutes: {json.dumps(run)}", flush=True)
                continue
            runs = []
            for turn in range(given.repeat):
                workload = make_workload(name.removesuffix("-sampled"), model, turn + 1, artifact)
                sampling = {"temperature": 0.8, "top_p": 0.95} if name.endswith("-sampled") else {}
                runner.trace.steps.clear()
                _ = watch and watch.mean()
                run, answers = run_workload(engine, workload, **sampling)
                theirs = peer["results"].get(name, []) if peer else []
                if turn < len(theirs) and "answers" in theirs[turn]:
                    run["beside_peer"] = agreement(answers, theirs[turn]["answers"])
                run |= {"steps": summarize(runner.trace.steps, run["seconds"]), "device": watch and watch.mean()}
                run["preemptions"] = engine._preemptions
                runs.append(run)
                print(f"{given.label} {name} {workload.description}: {json.dumps(run)}", flush=True)
            if given.kernels:
                workload = make_workload(name.removesuffix("-sampled"), model, 50, artifact)
                results_of_kernels = kernel_times(lambda work=workload: run_workload(engine, work))  # type: ignore[misc]
                runs[-1]["kernels"] = results_of_kernels
                print_kernels(f"{given.label} {name}", results_of_kernels)
            traces[name] = [list(step) for step in runner.trace.steps]
            results[name] = {"best": max(run["requests_per_s"] for run in runs), "runs": runs}
    engine.close()
    if uploaded is not None:
        uploaded.close()
    # Whatever else holds device memory goes too, before a worker asks for it.
    del kept, weights
    if "W5" in given.workloads:
        if "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()
        with tempfile.TemporaryDirectory(prefix="pmg") as folder:
            results["W5"] = run_path(given, artifact, Path(folder))
        if "W1" in results:
            report["w5_of_w1"] = round(results["W5"]["best"] / results["W1"]["best"], 3)
            print(f"the whole path is {report['w5_of_w1']} of the engine alone", flush=True)
    report["results"] = results
    if given.trace:
        given.trace.write_text(json.dumps(traces))
    print(f"\n{'workload':<12}{'req/s':>10}{'seconds':>10}{'new tok/s':>12}")
    for name, result in results.items():
        best = max(result["runs"], key=lambda run: float(run["requests_per_s"]))
        print(f"{name:<12}{best['requests_per_s']:>10}{best['seconds']:>10}{best['new_tokens_per_s']:>12}")
    figures = figures_of(report, peer)
    print_figures(figures)
    report["figures"] = [asdict(figure) for figure in figures]
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1:])
