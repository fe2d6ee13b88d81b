"""The CUDA runner: its layout of control memory on a pretended device. Answers of a real one: test_on_device.py.

The pretended device keeps "device" memory on the host and computes the hash model of fake_runner.py from nothing but
the addresses that the runner bound, replaying captured graphs with the binding they were captured with. Samplers run
for real, on the CPU.
"""

import ctypes
import dataclasses
import enum
import gc
import itertools
import json
import random
import sys
import threading
from functools import partial, partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from benchmarks import gpu as benchmark
from benchmarks.mixed_load import Mix, compare_alone, run_mixed_load
from benchmarks.random_artifact import write_random_artifact
from jobs.settings import EngineSettings
from tests.checkpoints import DESCRIPTION, random_weights, save_huggingface
from tests.workers.engine.fake_runner import VOCAB_SIZE, continuation, next_token
from tests.workers.nvml import Machine, gpu, load_fake_nvml
from workers.engine import cuda
from workers.engine.blocks import block_size_for
from workers.engine.cuda import CudaRunner, DeviceTensor, cuda_row_buckets, cuda_table_widths
from workers.engine.cuda_ops import OperatorsUnavailable
from workers.engine.opening import open_engine
from workers.engine.paged_engine import PagedDecode, PagedEngine
from workers.engine.request import GenerationRequest, SamplingParameters
from workers.engine.sampling import RowSampler
from workers.models.artifact import Artifact
from workers.models.convert import convert
from workers.models.cuda_graph import (
    Decoder,
    Operators,
    artifact_entries,
    build_decoder_graph,
    build_sampler_graph,
    decoder_weights,
    stored_weights,
    tile_tokens,
    weight_parts,
    weight_shapes,
)
from workers.models.description import ModelDescription
from workers.models.errors import UnsupportedModel

TINY = ModelDescription(
    architecture="llama",
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
    context_length=120,
    rms_norm_epsilon=1e-5,
    rope_theta=10000.0,
    rope_scaling=None,
    tie_word_embeddings=False,
)


# --- the pretended device ----------------------------------------------------------------------------------------


class Error(enum.IntEnum):
    cudaSuccess = 0  # noqa: N815
    cudaErrorMemoryAllocation = 2  # noqa: N815


class PretendedCuda:
    """`cuda.bindings.runtime` over host memory.

    What is done in the default stream happens when it is waited for and no sooner, as on a busy device; what is done in
    other streams, which do not wait for it, at once.
    """

    cudaError_t = Error  # noqa: N815
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2)  # noqa: N815
    cudaStreamNonBlocking = cudaEventBlockingSync = 1  # noqa: N815
    cudaEventDisableTiming = 2  # noqa: N815
    cudaHostAllocDefault = 0  # noqa: N815

    def __init__(self, free_bytes: int) -> None:
        self.free_bytes = free_bytes
        self.memory: dict[int, Any] = {}
        self.objects: list[object] = []
        self.pending: list[tuple[int, bytes]] = []

    def cudaMalloc(self, count: int) -> tuple[Error, int]:  # noqa: N802
        if count > 1 << 30:
            return Error.cudaErrorMemoryAllocation, 0
        buffer = (ctypes.c_uint8 * count)()
        self.memory[ctypes.addressof(buffer)] = buffer
        return Error.cudaSuccess, ctypes.addressof(buffer)

    def cudaHostAlloc(self, count: int, flags: int) -> tuple[Error, int]:  # noqa: N802
        return self.cudaMalloc(count)

    def cudaFree(self, pointer: int) -> tuple[Error]:  # noqa: N802
        del self.memory[pointer]
        return (Error.cudaSuccess,)

    cudaFreeHost = cudaFree  # noqa: N815

    def cudaMemcpy(self, target: int, source: int, count: int, kind: int) -> tuple[Error]:  # noqa: N802
        assert kind == self.cudaMemcpyKind.cudaMemcpyHostToDevice
        self.pending.append((target, ctypes.string_at(source, count)))
        return (Error.cudaSuccess,)

    def cudaMemcpyAsync(self, target: int, source: int, count: int, kind: int, stream: int) -> tuple[Error]:  # noqa: N802
        assert not self.pending, "the memory that a step works on is still being written in another stream"
        ctypes.memmove(target, source, count)
        return (Error.cudaSuccess,)

    def cudaMemset(self, pointer: int, value: int, count: int) -> tuple[Error]:  # noqa: N802
        self.pending.append((pointer, bytes([value]) * count))
        return (Error.cudaSuccess,)

    def cudaMemGetInfo(self) -> tuple[Error, int, int]:  # noqa: N802
        return Error.cudaSuccess, self.free_bytes, 2 * self.free_bytes

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[Error, int]:  # noqa: N802
        return self.create(77)

    def cudaEventCreateWithFlags(self, flags: int) -> tuple[Error, object]:  # noqa: N802
        return self.create(object())

    def cudaEventQuery(self, event: object) -> tuple[Error]:  # noqa: N802
        return (Error.cudaSuccess,)

    def cudaEventRecord(self, event: object, stream: int) -> tuple[Error]:  # noqa: N802
        return (Error.cudaSuccess,)

    cudaEventSynchronize = cudaStreamSynchronize = cudaEventQuery  # noqa: N815

    def cudaEventDestroy(self, event: object) -> tuple[Error]:  # noqa: N802
        self.objects.remove(event)
        return (Error.cudaSuccess,)

    cudaStreamDestroy = cudaEventDestroy  # noqa: N815

    def create(self, thing: object) -> tuple[Error, object]:
        self.objects.append(thing)
        return Error.cudaSuccess, thing

    def cudaDeviceSynchronize(self) -> tuple[Error]:  # noqa: N802
        for target, values in self.pending:
            ctypes.memmove(target, values, len(values))
        self.pending.clear()
        return (Error.cudaSuccess,)


_TYPES = {1: np.float32, 6: np.int32, 7: np.int64, 10: np.float16}


class Binding:
    def __init__(self) -> None:
        self.places: dict[str, tuple[int, list[int], int]] = {}
        self.metadata: dict[str, np.ndarray] = {}

    def bind_input(self, name: str, device: str, index: int, kind: int, shape: list[int], pointer: int) -> None:
        assert device == "cuda" and pointer
        self.places[name] = (kind, shape, pointer)

    bind_output = bind_input

    def bind_ortvalue_input(self, name: str, value: np.ndarray) -> None:
        assert name.endswith("metadata")
        self.metadata[name] = value

    def array(self, name: str) -> np.ndarray:
        kind, shape, pointer = self.places[name]
        count = int(np.prod(shape)) * np.dtype(_TYPES[kind]).itemsize
        memory = (ctypes.c_uint8 * count).from_address(pointer)
        return np.frombuffer(memory, dtype=_TYPES[kind]).reshape(shape)


class RunOptions:
    def __init__(self) -> None:
        self.entries: dict[str, str] = {}

    def add_run_config_entry(self, name: str, value: str) -> None:
        self.entries[name] = value


class Session:
    def __init__(self, model: bytes, options: object, providers: list[Any]) -> None:
        self.graph = onnx.load_from_string(model).graph
        self.is_decoder = any(value.name == "token_pool" for value in self.graph.input)
        self.captured: dict[str, dict[str, Any]] = {}
        if not self.is_decoder:
            real = onnxruntime.SessionOptions()
            real.intra_op_num_threads = 1
            self.sampler = onnxruntime.InferenceSession(model, real, providers=["CPUExecutionProvider"])

    def disable_fallback(self) -> None:
        pass

    def io_binding(self) -> Binding:
        return Binding()

    def run_with_iobinding(self, binding: Binding, options: RunOptions) -> None:
        assert options.entries["disable_synchronize_execution_providers"] == "1"
        graph_id = options.entries["gpu_graph_id"]
        if not self.is_decoder:
            names = [value.name for value in self.graph.input]
            answers = self.sampler.run(None, {name: binding.array(name) for name in names})
            for value, answer in zip(self.graph.output, answers, strict=True):
                binding.array(value.name)[...] = answer
            return
        if graph_id != "-1":
            # A captured graph keeps the addresses it was captured with, whatever binding comes later.
            kept = Binding()
            kept.places, kept.metadata = self.captured.setdefault(
                graph_id,
                (dict(binding.places), dict(binding.metadata)),  # type: ignore[arg-type]
            )
            binding = kept
        missing = {value.name for value in self.graph.input} - set(binding.places) - set(binding.metadata)
        assert not missing, f"not bound: {missing}"
        _run_decoder(binding)


def _run_decoder(binding: Binding) -> None:
    pool, sources = binding.array("token_pool"), binding.array("token_sources")
    fed = pool[sources].copy()
    past = binding.array("past_lengths")
    attends_alone = "cumulative_lengths" not in binding.places  # with our own operator: one token a row
    cumulative = np.arange(len(past) + 1) if attends_alone else binding.array("cumulative_lengths")
    if "no_slots" in binding.places:
        assert (binding.array("no_slots") == -1).all(), "PagedAttention stores nothing that we have stored"
        assert binding.array("no_slots").shape == fed.shape
    table, cache, slots = binding.array("block_table"), binding.array("key_0"), binding.array("slots")
    flat = cache[:, :, 0, 0].reshape(-1).copy()  # the cache itself is written below
    flat[slots] = fed
    cache[:, :, 0, 0] = flat.reshape(cache.shape[:2])
    prefix = np.zeros(0, dtype=np.int64)
    if "prefix_table" in binding.places:
        (length,) = binding.array("prefix_length")
        assert length and length % cache.shape[1] == 0
        shared = binding.array("prefix_table")[: length // cache.shape[1]]
        prefix = cache[shared, :, 0, 0].reshape(-1).astype(np.int64)
    room = table.shape[1] * cache.shape[1]
    if "tiles" in binding.places:
        most_new, longest = 1 << 20, room
        _check_tiles(binding.array("tiles"), cumulative)
    else:
        most_new, longest, _ = (1, room, 1) if attends_alone else binding.metadata["attention_metadata"]
    contexts: list[np.ndarray] = []
    for row, (start, end) in enumerate(itertools.pairwise(cumulative)):
        assert end - start <= most_new
        assert past[row] + end - start <= longest
        values = cache[table[row], :, 0, 0].reshape(-1).astype(np.int64)
        for offset in range(end - start):
            own = values[: past[row] + offset + 1]
            if "positions" in binding.places and past[row]:
                assert binding.array("positions")[start + offset, 0] == prefix.size + len(own) - 1
            contexts.append(np.concatenate([prefix, own]))
    indices = binding.array("logits_indices")
    chosen = [next_token(contexts[index]) for index in indices]
    logits = binding.array("logits")
    logits[...] = 0
    logits[np.arange(len(chosen)), chosen] = 10.0
    binding.array("next_ids")[...] = chosen
    binding.array("fed_ids")[...] = fed


def _check_tiles(tiles: np.ndarray, cumulative: np.ndarray) -> None:
    """Every token is in one tile, and in one alone."""
    times = np.zeros(cumulative[-1], dtype=int)
    for row, first in tiles:
        begin = cumulative[row] + first
        times[begin : min(begin + tile_tokens(TINY), cumulative[row + 1])] += 1
    assert (times == 1).all()


class PretendedOperators:
    """Our own operators, as far as they are called from Python, over host memory."""

    library = Path("operators.so")
    copied = 0

    def copy_positions(
        self, stream: int, cache: int, copies: int, count: int, *, planes: int, plane_bytes: int, block_bytes: int
    ) -> None:
        memory = (ctypes.c_uint8 * (count * 12)).from_address(copies)
        for source, target, words in np.frombuffer(memory, dtype=np.int32).reshape(count, 3).tolist():
            assert 0 < words * 16 <= block_bytes
            self.copied += 1
            for plane in range(planes):
                base = cache + plane * plane_bytes
                ctypes.memmove(base + target * block_bytes, base + source * block_bytes, words * 16)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> PretendedCuda:
    pretended = PretendedCuda(free_bytes=cuda.RESERVED_BYTES + (1 << 20))
    monkeypatch.setattr(cuda, "_load_cuda", lambda: pretended)
    stub = SimpleNamespace(
        InferenceSession=Session,
        RunOptions=RunOptions,
        SessionOptions=lambda: SimpleNamespace(
            add_session_config_entry=lambda *_: None, register_custom_ops_library=lambda _: None
        ),
        set_default_logger_severity=lambda _: None,
        OrtValue=SimpleNamespace(ortvalue_from_numpy=lambda values: values),
    )
    monkeypatch.setitem(sys.modules, "onnxruntime", stub)
    return pretended


def make_runner(model: ModelDescription = TINY, **options: Any) -> CudaRunner:
    weights = {name: DeviceTensor(1, shape) for name, shape in weight_shapes(model, 120).items()}
    chosen = {
        "max_rows": 6,
        "context_length": 120,
        "prefill_tokens": 64,
        "block_size": 16,
        "split_min_rows": 3,
        **options,
    }
    return CudaRunner(model, weights, dtype="float16", rotary_length=120, **chosen)


@pytest.mark.parametrize("prefix_min_tokens", [0, 16])
@pytest.mark.parametrize(
    ("operators", "head_dim"), [(None, 16), (PretendedOperators(), 16), (PretendedOperators(), 64)]
)
def test_the_engine_answers_right_through_the_addresses_that_the_runner_binds(
    device: PretendedCuda, operators: PretendedOperators | None, head_dim: int, prefix_min_tokens: int
) -> None:
    """Token sources, padding rows, tables of every bucket, control copies: one wrong offset and an answer is wrong.

    With ONNX Runtime's operators alone, with our own, and with heads that our own attention is made for.
    """
    model = _with_heads(head_dim)
    runner = make_runner(model, prefix_min_tokens=prefix_min_tokens, prefix_min_rows=2, operators=operators)
    engine = PagedEngine(runner, stop_token_ids=[3], prefill_budget_tokens=64, least_copied_tokens=2)
    rng = random.Random(1)
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(40)]
    asked = []
    for index in range(40):
        prompt = shared[: rng.randrange(40)] + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 30))]
        asked.append((prompt, engine.submit(GenerationRequest(prompt, SamplingParameters(1 + index)))))
    for index, (prompt, future) in enumerate(asked):
        assert list(future.result(60).completion_token_ids) == continuation(prompt, 1 + index, frozenset([3]))[0]
    engine.close()
    assert operators is None or operators.copied > 1, "beginnings that end within a block are copied"
    assert not device.memory, "device or pinned memory was not given back"
    assert not device.objects, "a stream or an event was not given back"


def test_a_prefix_of_any_length_is_read_once_for_all_rows_by_our_own_attention_only(device: PretendedCuda) -> None:
    """48 tokens of rows whose own tables may be as wide as the other 72 need."""
    assert not make_runner(prefix_min_tokens=16).prefix_min_blocks
    assert not make_runner(prefix_min_tokens=16, operators=PretendedOperators()).prefix_min_blocks
    assert not make_runner(_with_heads(64), operators=PretendedOperators()).prefix_min_blocks, "no row is so long"
    runner = make_runner(
        _with_heads(64), prefix_min_tokens=32, prefix_min_rows=2, operators=PretendedOperators(), max_rows=4
    )
    assert runner.prefix_min_blocks == 2
    read = set()
    decode = runner.decode

    def note(call: PagedDecode) -> Any:
        read.add(len(call.prefix_blocks))
        return decode(call)

    runner.decode = note  # type: ignore[method-assign]
    engine = PagedEngine(runner, stop_token_ids=[], prefill_budget_tokens=64)
    shared = [n % VOCAB_SIZE for n in range(49)]
    futures = [engine.submit(GenerationRequest([*shared, own], SamplingParameters(69))) for own in range(4)]
    for own, future in enumerate(futures):
        assert list(future.result(60).completion_token_ids) == continuation([*shared, own], 69)[0]
    engine.close()
    assert 3 in read


def test_prompts_are_cut_into_tiles_of_which_the_longest_to_read_comes_first() -> None:
    lengths, past = np.array([1, 300, 128], dtype=np.int32), np.array([500, 0, 100], dtype=np.int32)
    tiles = cuda.prompt_tiles(lengths, past, 128)
    assert tiles.tolist() == [[0, 0], [1, 256], [1, 128], [2, 0], [1, 0]]
    assert tiles.dtype == np.int32


class Refusing(PretendedOperators):
    def copy_positions(self, *_: Any, **__: Any) -> None:
        raise OperatorsUnavailable("the driver refuses")


class Forgetting(PretendedOperators):
    """The last plane stays as it was."""

    def copy_positions(self, *given: Any, planes: int, **options: Any) -> None:
        super().copy_positions(*given, planes=planes - 1, **options)


class Overdoing(PretendedOperators):
    """Whole blocks, however much of them was to be copied."""

    def copy_positions(
        self, stream: int, cache: int, copies: int, count: int, *, planes: int, plane_bytes: int, block_bytes: int
    ) -> None:
        entries = np.frombuffer((ctypes.c_uint8 * (count * 12)).from_address(copies), dtype=np.int32).reshape(count, 3)
        entries[:, 2] = block_bytes // 16
        super().copy_positions(
            stream, cache, copies, count, planes=planes, plane_bytes=plane_bytes, block_bytes=block_bytes
        )


@pytest.mark.parametrize("operators", [Refusing, Forgetting, Overdoing])
def test_a_device_that_does_not_copy_as_told_computes_instead(
    device: PretendedCuda, operators: type[PretendedOperators]
) -> None:
    runner = make_runner(operators=operators())
    engine = PagedEngine(runner, stop_token_ids=[3], prefill_budget_tokens=64)
    assert not runner.copies_blocks
    prompt = [5] * 30
    asked = engine.submit(GenerationRequest(prompt, SamplingParameters(5)))
    assert list(asked.result(60).completion_token_ids) == continuation(prompt, 5, frozenset([3]))[0]
    engine.close()


def test_no_prefill_is_larger_than_all_rows_together(device: PretendedCuda) -> None:
    """Its tokens would find no place; nobody who chooses few rows should have to think of that."""
    runner = make_runner(max_rows=2, context_length=16, prefill_tokens=64)
    engine = PagedEngine(runner, stop_token_ids=[3], prefill_budget_tokens=32)
    asked = engine.submit(GenerationRequest([1, 2, 3], SamplingParameters(5)))
    assert list(asked.result(60).completion_token_ids) == continuation([1, 2, 3], 5, frozenset([3]))[0]
    engine.close()


def test_sampled_rows_take_the_token_that_the_sampler_drew(device: PretendedCuda) -> None:
    """The one-hot logits leave no choice but a bias; log probabilities and penalties come along."""
    engine = PagedEngine(make_runner(), stop_token_ids=[], prefill_budget_tokens=64)
    plain = [engine.submit(GenerationRequest([n, 5], SamplingParameters(20))) for n in range(3)]
    warm = [engine.submit(GenerationRequest([n, 6], SamplingParameters(20, temperature=0.05))) for n in range(3)]
    forced = SamplingParameters(
        20, temperature=0.7, top_p=0.5, seed=9, logit_bias=((11, 50.0),), logprobs=3, presence_penalty=0.1
    )
    told = engine.submit(GenerationRequest([1, 2, 3], forced)).result(60)
    for n in range(3):
        assert list(plain[n].result(60).completion_token_ids) == continuation([n, 5], 20)[0]
        assert list(warm[n].result(60).completion_token_ids) == continuation([n, 6], 20)[0]
    engine.close()
    assert told.completion_token_ids == (11,) * 20
    assert told.logprobs is not None
    assert all(entry.token_id == 11 and entry.logprob > -1e-3 for entry in told.logprobs)
    assert all(len(entry.top) == 3 and entry.top[0][0] == 11 for entry in told.logprobs)


def test_many_rows_are_drawn_in_parts(device: PretendedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampler's memory grows with the rows that it draws for at once; each row keeps what it asked for."""
    monkeypatch.setattr(cuda, "_DRAWN_AT_ONCE", 2 * VOCAB_SIZE)
    monkeypatch.setattr(cuda, "_DRAWN_ROWS", 2)
    runner = make_runner(max_rows=7)
    drawn: list[int] = []
    monkeypatch.setattr(
        Session, "run_with_iobinding", partialmethod(_noting_drawn_rows, drawn, Session.run_with_iobinding)
    )
    engine = PagedEngine(runner, stop_token_ids=[], prefill_budget_tokens=64)
    asked = []
    for n in range(14):
        wants = SamplingParameters(9, temperature=0.7, seed=n, logit_bias=((n, 50.0),), logprobs=n % 4, top_p=0.9)
        asked.append(engine.submit(GenerationRequest([n, 5], wants if n % 3 else SamplingParameters(9))))
    for n, future in enumerate(asked):
        completion = future.result(60)
        assert list(completion.completion_token_ids) == ([n] * 9 if n % 3 else continuation([n, 5], 9)[0])
        assert completion.logprobs is None or [len(entry.top) for entry in completion.logprobs] == [n % 4] * 9
    engine.close()
    assert max(drawn) == 2 and len(drawn) > 9 * 3


def _noting_drawn_rows(session: Any, drawn: list[int], run: Any, binding: Binding, options: RunOptions) -> None:
    if not session.is_decoder:
        drawn.append(binding.places["logits"][1][0])
    run(session, binding, options)


def test_room_is_left_for_all_that_samplers_take(device: PretendedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the cache is sized, as many rows are drawn as ever are at once, with extras and without."""
    seen: list[tuple[bool, int]] = []
    run, told = Session.run_with_iobinding, device.cudaMemGetInfo

    def note(session: Session, binding: Binding, options: RunOptions) -> None:
        if not session.is_decoder:
            seen.append(("bias_ids" in binding.places, binding.places["logits"][1][0]))
        run(session, binding, options)

    def ask() -> tuple[Error, int, int]:
        asked.append(list(seen))
        return told()

    asked: list[list[tuple[bool, int]]] = []
    monkeypatch.setattr(Session, "run_with_iobinding", note)
    monkeypatch.setattr(device, "cudaMemGetInfo", ask)
    runner = make_runner()
    runner.start()
    runner.close()
    assert asked == [[(False, 6), (True, 6)]]


def test_many_penalized_tokens_make_the_sampling_buffers_grow(
    device: PretendedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "_SPARSE_WIDTH", 1)
    engine = PagedEngine(make_runner(), stop_token_ids=[], prefill_budget_tokens=64)
    bias = tuple((token, 0.0) for token in range(VOCAB_SIZE))
    request = GenerationRequest([1, 2], SamplingParameters(60, logit_bias=bias * 40, frequency_penalty=1e-6))
    assert list(engine.submit(request).result(60).completion_token_ids) == continuation([1, 2], 60)[0]
    engine.close()
    assert not device.memory


@pytest.mark.parametrize("refusing", ["cudaMalloc", "cudaHostAlloc"])
@pytest.mark.parametrize("allocations", [0, 5])
def test_sampling_buffers_that_cannot_grow_stay_in_use(
    device: PretendedCuda, monkeypatch: pytest.MonkeyPatch, refusing: str, allocations: int
) -> None:
    """The step that wanted larger ones fails, and no later one writes through memory that was given back."""
    monkeypatch.setattr(cuda, "_SPARSE_WIDTH", 1)
    engine = PagedEngine(make_runner(), stop_token_ids=[], prefill_budget_tokens=64)
    allocate, copy = getattr(device, refusing), device.cudaMemcpyAsync
    left = [allocations]

    def refuse(*arguments: Any) -> tuple[Error, int]:
        left[0] -= 1
        return (Error.cudaErrorMemoryAllocation, 0) if left[0] == -1 else allocate(*arguments)

    def is_held(pointer: int) -> bool:
        return any(start <= pointer < start + len(held) for start, held in device.memory.items())

    def copy_held(target: int, source: int, *others: Any) -> tuple[Error]:
        assert is_held(target) and is_held(source)
        return copy(target, source, *others)

    monkeypatch.setattr(device, refusing, refuse)
    monkeypatch.setattr(device, "cudaMemcpyAsync", copy_held)
    bias = tuple((token, 1.0) for token in range(VOCAB_SIZE))
    greedy = SamplingParameters(9, logit_bias=bias * 4)
    asked = [engine.submit(GenerationRequest([n, 1], greedy)) for n in range(6)]
    assert any(future.exception(60) is not None for future in asked)
    for n in range(40):
        answer = engine.submit(GenerationRequest([n, 2], SamplingParameters(4, temperature=0.01))).result(60)
        assert list(answer.completion_token_ids) == continuation([n, 2], 4)[0]
    assert (
        list(engine.submit(GenerationRequest([7, 1], greedy)).result(60).completion_token_ids)
        == (continuation([7, 1], 9)[0])
    )
    engine.close()
    assert not device.memory


def test_launches_that_fail_take_no_place_of_the_ring_of_tokens(
    device: PretendedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts whose computation is refused, one after the other, between others that wait for their first decode."""
    run, bad = Session.run_with_iobinding, VOCAB_SIZE - 1

    def refuse(session: Session, binding: Binding, options: RunOptions) -> None:
        is_prefill = session.is_decoder and options.entries["gpu_graph_id"] == "-1"
        if is_prefill and (binding.array("token_pool")[binding.array("token_sources")] == bad).any():
            raise RuntimeError("failed to allocate memory")
        run(session, binding, options)

    monkeypatch.setattr(Session, "run_with_iobinding", refuse)
    engine = PagedEngine(
        make_runner(max_rows=4, prefix_min_tokens=0),
        stop_token_ids=[],
        prefill_budget_tokens=8,
        prefill_wanted_tokens=1,
    )
    gate, turn = threading.Event(), engine._turn
    monkeypatch.setattr(engine, "_turn", lambda: (gate.wait(), turn()))
    prompts = [[k, 1, 2, 3] for k in range(2)] + [[k, bad, 2, 3] for k in range(6)] + [[k, 1, 2, 4] for k in (7, 8)]
    futures = [engine.submit(GenerationRequest(prompt, SamplingParameters(6))) for prompt in prompts]
    gate.set()
    for prompt, future in zip(prompts, futures, strict=True):
        if bad in prompt:
            assert getattr(future.exception(60), "code", None) == "engine_failed"
        else:
            assert list(future.result(60).completion_token_ids) == continuation(prompt, 6)[0]
    engine.close()


def test_a_device_without_room_says_so(device: PretendedCuda) -> None:
    device.free_bytes = cuda.RESERVED_BYTES
    with pytest.raises(cuda.CudaError, match="KV cache") as caught:
        PagedEngine(make_runner(), stop_token_ids=[])
    assert caught.value.code == "not_enough_memory"
    assert not device.memory


def test_the_cache_takes_what_is_free_unless_told_otherwise(device: PretendedCuda) -> None:
    block_bytes = 2 * 2 * 16 * 32 * 2
    device.free_bytes = cuda.RESERVED_BYTES + 20 * block_bytes
    runner = make_runner()
    assert runner.start() == 21  # the block that the largest prefill used is given back first
    runner.close()
    runner = make_runner(memory_bytes=10 * block_bytes)
    assert runner.start() == 11
    runner.close()


# --- from an artifact --------------------------------------------------------------------------------------------


@pytest.fixture
def artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Artifact:
    """A random one in float32, which is rounded as it is loaded; converted before the device is pretended."""
    monkeypatch.setattr("workers.engine.opening.load_libraries", lambda: None)
    return _convert_random(tmp_path, DESCRIPTION)


@pytest.fixture
def longer_artifact(tmp_path: Path) -> Artifact:
    return _convert_random(tmp_path, dataclasses.replace(DESCRIPTION, context_length=512))


def _convert_random(folder: Path, description: ModelDescription) -> Artifact:
    source = save_huggingface(folder / "source", description, random_weights(description))
    return convert(str(source), folder / "artifact", dtype="float32", cache=folder)


def test_a_random_artifact_has_every_weight_that_the_engine_loads(tmp_path: Path, device: PretendedCuda) -> None:
    """What benchmarks run where a model's own weights are not at hand."""
    artifact = write_random_artifact(tmp_path, "tiny", TINY, 120)
    weights = stored_weights(artifact_entries(artifact.model_path), tmp_path / "tiny", "float16")
    uploaded = cuda.upload_weights(TINY, 120, weights)
    assert set(uploaded.tensors) == set(weight_shapes(TINY, 120))
    uploaded.close()
    assert not device.memory


def test_an_artifact_becomes_a_running_engine_and_leaves_nothing_behind(
    artifact: Artifact, device: PretendedCuda
) -> None:
    """Weights, cache, streams, events: who closes the engine gives all of it back."""
    heard: list[tuple[str, int, int]] = []
    settings = EngineSettings(max_batch_size=4, kv_cache_mib=1)
    engine = open_engine(artifact, settings, "cuda", lambda *progress: heard.append(progress))
    assert isinstance(engine, PagedEngine)
    assert (engine.max_batch_size, engine.context_length) == (4, artifact.context_length)
    asked = [engine.submit(GenerationRequest([n, 5], SamplingParameters(9, ignore_eos=True))) for n in range(9)]
    for n, future in enumerate(asked):
        assert list(future.result(60).completion_token_ids) == continuation([n, 5], 9)[0]
    engine.close()
    assert not device.memory and not device.objects
    stages = [stage for stage, _, _ in heard]
    assert stages[0] == "loading the model" and stages[-1] == "warming up"
    assert all(done <= total for _, done, total in heard)


def test_a_model_too_large_for_the_device_is_refused_with_the_sizes(artifact: Artifact, device: PretendedCuda) -> None:
    device.free_bytes = cuda.RESERVED_BYTES + 1000
    with pytest.raises(cuda.CudaError, match="the weights take 0 MiB, and 0 MiB of the GPU's") as caught:
        open_engine(artifact, EngineSettings(max_batch_size=4), "cuda")
    assert caught.value.code == "not_enough_memory"
    assert not device.memory


def test_weights_that_cannot_be_loaded_leave_nothing_behind(
    artifact: Artifact, device: PretendedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "cudaMemcpy", lambda *_: (Error.cudaErrorMemoryAllocation,))
    with pytest.raises(cuda.CudaError, match="cudaMemcpy failed"):
        open_engine(artifact, EngineSettings(max_batch_size=4), "cuda")
    assert not device.memory


# --- graphs ------------------------------------------------------------------------------------------------------


def test_buckets_grow_by_a_quarter_and_end_at_the_maximum() -> None:
    assert cuda_row_buckets(512)[:8] == (1, 2, 4, 8, 16, 24, 32, 40)
    for max_rows in (1, 2, 7, 64, 100, 512):
        buckets = cuda_row_buckets(max_rows)
        assert buckets[-1] == max_rows
        assert list(buckets) == sorted(set(buckets))
        assert all(above <= below * 1.5 for below, above in itertools.pairwise(buckets) if below >= 16)
    assert cuda_row_buckets(512, 32) == (*cuda_row_buckets(512), 544), "a reserve changes nothing below it"
    assert cuda_table_widths(20) == (2, 4, 8, 16, 20)
    assert cuda_table_widths(1) == (2,)


def test_blocks_are_as_large_as_the_attention_kernels_want_them() -> None:
    sizes = {head_dim: block_size_for(_with_heads(head_dim)) for head_dim in (64, 128, 256)}
    assert sizes == {64: 256, 128: 128, 256: 64}
    with pytest.raises(UnsupportedModel, match="exceeds 256"):
        block_size_for(_with_heads(288))


def _with_heads(head_dim: int) -> ModelDescription:
    return ModelDescription(**{**TINY.to_json(), "head_dim": head_dim})


def test_the_decoder_takes_every_weight_as_input_and_nothing_else_large() -> None:
    model = build_decoder_graph(TINY, "float16", 120)
    names = {value.name for value in model.graph.input}
    assert set(decoder_weights(TINY, 120, Decoder.STEP, Operators.STOCK)) <= names
    assert all(list(tensor.dims) == [64] for tensor in model.graph.initializer)
    assert sum(node.op_type == "PagedAttention" for node in model.graph.node) == 2


@pytest.mark.parametrize(
    ("head_dim", "kind", "attention"),
    [
        (16, Decoder.STEP, "PagedAttention"),
        (64, Decoder.STEP, "PagedAttention"),
        (64, Decoder.DECODE, "Attend_float16"),
        (64, Decoder.PROMPT, "AttendPrompt_float16"),
        (64, Decoder.PREFIX, "AttendPrefixed_float16"),
    ],
)
def test_our_own_operators_take_the_place_of_several(head_dim: int, kind: Decoder, attention: str) -> None:
    model = build_decoder_graph(_with_heads(head_dim), "float16", 120, kind, Operators.FUSED)
    ops = [node.op_type for node in model.graph.node]
    for name in ("RotateAppend_float16", "GatedProduct_float16", attention):
        assert ops.count(name) == 2, "once a layer"
    assert ops.count("RowArgmax_float16") == 1
    assert not {"QuickGelu", "RotaryEmbedding", "ArgMax"} & set(ops)


@pytest.mark.parametrize("kind", Decoder)
@pytest.mark.parametrize("operators", Operators)
def test_a_decoder_takes_every_weight_once_whole_or_in_parts(kind: Decoder, operators: Operators) -> None:
    parts, wholes = weight_parts(TINY), weight_shapes(TINY, 120)
    rows = dict.fromkeys(wholes, 0)
    for name, shape in decoder_weights(TINY, 120, kind, operators).items():
        whole = name if name in wholes else parts[name].whole
        assert shape[1:] == wholes[whole][1:]
        rows[whole] += shape[0]
    assert rows == {name: shape[0] for name, shape in wholes.items()}


@pytest.mark.parametrize("with_extras", [False, True])
def test_the_sampler_draws_what_the_cpu_flavour_draws(with_extras: bool) -> None:
    """The same logits and seed give the same token and log probabilities on both flavours."""
    vocab_size, rows = 1000, 40
    model = build_sampler_graph("float32", vocab_size, with_extras=with_extras)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    asked = [
        SamplingParameters(
            max_tokens=5,
            temperature=(0.0, 0.7, 1.0, 1.5)[row % 4],
            top_p=(1.0, 0.9, 0.5)[row % 3],
            top_k=(0, 0, 1, 5)[(row // 4) % 4] if row % 3 else 0,
            seed=row,
            frequency_penalty=0.3 if with_extras and row % 2 else 0.0,
            presence_penalty=0.5 if with_extras and row % 3 == 0 else 0.0,
            logit_bias=((3, 2.0), (7, -100.0)) if with_extras and row % 5 == 1 else (),
            logprobs=3 if with_extras else None,
        )
        for row in range(rows)
    ]
    samplers = [RowSampler(parameters, vocab_size) for parameters in asked]
    uniforms = [np.random.Generator(np.random.Philox(key=parameters.seed)).random(5) for parameters in asked]
    said: list[list[int]] = [[] for _ in asked]

    def column(values: list[float], kind: type = np.float32) -> np.ndarray:
        return np.array(values, dtype=kind)[:, None]

    for step in range(5):
        logits = (rng.standard_normal((rows, vocab_size)) * 4).astype(np.float32)
        wanted = [sampler.sample(logits[row].copy()) for row, sampler in enumerate(samplers)]
        is_greedy = [parameters.temperature <= 0 or parameters.top_k == 1 for parameters in asked]
        feeds: dict[str, np.ndarray] = {
            "logits": logits,
            "inverse_temperature": column(
                [1 / parameters.temperature if parameters.temperature else 1 for parameters in asked]
            ),
            "top_k": column(
                [
                    1 if greedy else parameters.top_k or vocab_size
                    for greedy, parameters in zip(is_greedy, asked, strict=True)
                ],
                np.int64,
            ),
            "top_p": column([parameters.top_p for parameters in asked]),
            "uniform": column([draws[step] for draws in uniforms]),
        }
        if with_extras:
            seen = [tokens[:-1] for tokens in said]  # the last one is fed to this step and not read yet
            feeds |= {
                "fed_ids": np.array([tokens[-1] if tokens else 0 for tokens in said], dtype=np.int64),
                "fed_counts": column([1.0 if tokens else 0.0 for tokens in said]),
                "seen_ids": np.array([tokens + [0] * (5 - len(tokens)) for tokens in seen], dtype=np.int64),
                "seen_counts": np.array([[1.0] * len(t) + [0.0] * (5 - len(t)) for t in seen], dtype=np.float32),
                "frequency_penalty": column([parameters.frequency_penalty for parameters in asked]),
                "presence_penalty": column([parameters.presence_penalty for parameters in asked]),
                "bias_ids": np.array(
                    [[3, 7] if parameters.logit_bias else [0, 0] for parameters in asked], dtype=np.int64
                ),
                "bias_values": np.array(
                    [[2, -100] if parameters.logit_bias else [0, 0] for parameters in asked], dtype=np.float32
                ),
            }
        answers = session.run(None, feeds)
        assert answers[0].tolist() == [token for token, _ in wanted]
        for row in range(rows) if with_extras else []:
            logprobs = wanted[row][1]
            assert logprobs is not None
            assert answers[1][row, 0] == pytest.approx(logprobs.logprob, abs=1e-4)
            assert answers[2][row, :3].tolist() == [token for token, _ in logprobs.top]
            assert answers[3][row, :3] == pytest.approx([value for _, value in logprobs.top], abs=1e-4)
        for row, (token, _) in enumerate(wanted):
            said[row].append(token)


# --- under load, and measured ------------------------------------------------------------------------------------


def test_a_mixed_load_is_answered_right_through_the_runner(artifact: Artifact, device: PretendedCuda) -> None:
    """The load that a GPU is soaked with: `open_engine`, the reserve for interactive requests, samplers with extras."""
    settings = EngineSettings(max_batch_size=6, kv_cache_mib=1)
    engine = open_engine(artifact, settings, "cuda")
    assert isinstance(engine, PagedEngine)
    assert engine._runner.max_rows == 7
    mix = Mix([n * n % VOCAB_SIZE for n in range(200)], longest_prompt=40, longest_answer=15)
    report = run_mixed_load(engine, mix, seconds=2, seed=3, sample_size=1000)
    engine.close(drain=True)
    assert not report.wrong
    alone = open_engine(artifact, EngineSettings(max_batch_size=1, prefix_reuse=False), "cuda")
    agreement = compare_alone(alone, report.sample, stop_token_ids=artifact.tokenizer.stop_token_ids, tie=0.0)
    alone.close()
    assert agreement.identical == len(report.sample) > 0
    assert not agreement.wrong
    assert not device.memory and not device.objects


def test_the_benchmark_tells_every_figure_that_it_measured(
    longer_artifact: Artifact,
    device: PretendedCuda,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On a pretended device, which NVML shows; its speeds mean nothing."""
    nvml = load_fake_nvml()
    Machine(tmp_path / "machine.json", [gpu(0, utilization=97)]).write()
    monkeypatch.setenv("FAKE_NVML", str(tmp_path / "machine.json"))
    monkeypatch.setattr(benchmark, "watched_device", partial(benchmark.watched_device, nvml))
    monkeypatch.setattr(benchmark, "load_libraries", lambda: None)
    monkeypatch.setattr(benchmark, "load_operators", lambda *_: None)
    peer = {"results": {"one": [{"requests_per_s": 1e-9}, {"requests_per_s": 2e-9}]}}
    (tmp_path / "peer.txt").write_text(f"a table\n{json.dumps(peer)}\n")
    try:
        benchmark.main(
            f"--artifact {longer_artifact.path} --workloads one mixed --minutes 0.02 --max-rows 4 --kv-cache-mib 1 "
            f"--context-length 256 --prefill-tokens 256 --peer {tmp_path / 'peer.txt'}".split()
        )
    finally:
        gc.unfreeze()
    printed = capsys.readouterr().out
    report = json.loads(printed.strip().splitlines()[-1])
    figures = {figure["name"]: figure for figure in report["figures"]}
    assert figures["one request alone, of the peer's time"]["is_met"] is True
    assert figures["mixed, growth of device memory, MiB"]["measured"] == 0.0
    assert 0 < figures["KV cache, of the memory left for it"]["measured"] <= 1.0
    assert report["results"]["mixed"]["runs"][0]["device"]["utilization_percent"] == 97
    assert "start, seconds" in printed
    assert not device.memory and not device.objects
