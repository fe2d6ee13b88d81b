"""Our own operators: the library builds and registers anywhere; on a GPU its kernels compute what numpy does."""

from __future__ import annotations

import dataclasses
import importlib
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest
from onnx import TensorProto, helper

from tests.checkpoints import DESCRIPTION
from tests.workers.engine.halves import DECODE, ENCODE
from workers.engine import cuda_ops
from workers.engine.cuda import prompt_tiles
from workers.engine.cuda_ops import OperatorsUnavailable, build_library, load_operators
from workers.engine.flavour import cuda_trouble, load_libraries
from workers.models.cuda_graph import OWN_DOMAIN, attention_room
from workers.models.description import CudaType

Array = npt.NDArray[Any]

needs_compiler = pytest.mark.skipif(
    sys.platform != "linux" or not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="there is no C compiler"
)


# --- the library -------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "promptmill"


@needs_compiler
def test_the_library_is_built_once_and_registers_with_a_session(cache: Path) -> None:
    library = build_library()
    assert library.parent == cache
    built_at = library.stat().st_mtime_ns
    assert build_library().stat().st_mtime_ns == built_at
    onnxruntime.SessionOptions().register_custom_ops_library(str(library))
    assert [path.name for path in cache.iterdir()] == [library.name], "nothing of the build stays behind"


@needs_compiler
def test_every_operator_is_known_to_a_session_in_both_types(cache: Path) -> None:
    """A machine without a GPU refuses them, but it knows their names."""
    if not cuda_trouble():
        pytest.skip("with a GPU they run: see below")
    shapes: Mapping[str, tuple[list[int], list[int]]] = {
        "GatedProduct": ([0], [0]),
        "RowArgmax": ([0], [TensorProto.INT64]),
        "RotateAppend": ([0, TensorProto.INT64, TensorProto.INT32, 0, 0, 0, 0], [0, 0]),
        "Attend": ([0, 0, 0, TensorProto.INT32, TensorProto.INT32, TensorProto.FLOAT], [0]),
        "AttendPrefixed": (
            [0, 0, 0, TensorProto.INT32, TensorProto.INT32, TensorProto.FLOAT, 0, TensorProto.FLOAT],
            [0],
        ),
        "AttendPrompt": ([0, 0, 0, *[TensorProto.INT32] * 4], [0]),
        "AttendShared": ([0, 0, 0, TensorProto.INT32, TensorProto.INT32], [0, TensorProto.FLOAT]),
    }
    for element, suffix in ((TensorProto.FLOAT16, "float16"), (TensorProto.BFLOAT16, "bfloat16")):
        for name, (inputs, outputs) in shapes.items():
            model = _model(
                f"{name}_{suffix}", [kind or element for kind in inputs], [kind or element for kind in outputs]
            )
            with pytest.raises(Exception, match=f"{name}_{suffix}") as refused:
                _session(build_library(), model, ["CPUExecutionProvider"])
            assert "not a registered" not in str(refused.value)
    unknown = _model("Unheard_float16", [TensorProto.FLOAT16], [TensorProto.FLOAT16])
    with pytest.raises(Exception, match=r"Unheard_float16.* not a registered"):
        _session(build_library(), unknown, ["CPUExecutionProvider"])


def test_a_machine_without_a_compiler_is_told_so(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(cache))
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(OperatorsUnavailable, match="no C compiler was found"):
        build_library()


@needs_compiler
def test_a_compiler_that_fails_is_quoted(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken-cc"
    broken.write_text("#!/bin/sh\necho it is broken >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(OperatorsUnavailable, match="it is broken"):
        build_library()
    assert not list(cache.glob("*.so"))


def test_a_library_beside_its_source_is_taken_as_it_is(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image's compiler goes again once the library is built."""
    monkeypatch.setattr(sys, "platform", "linux")
    sources = tmp_path / "native"
    shutil.copytree(cuda_ops._SOURCES, sources, ignore=shutil.ignore_patterns("*.so"))
    monkeypatch.setattr(cuda_ops, "_SOURCES", sources)
    monkeypatch.setattr(cuda_ops, "_compile", lambda source, target: _written(target))
    installed = cuda_ops.install_library()
    assert installed.parent == sources
    shutil.rmtree(cache)
    assert build_library() == installed


def _written(target: Path) -> Path:
    target.parent.mkdir(parents=True)
    target.write_bytes(b"a library")
    return target


# --- the kernels -------------------------------------------------------------------------------------------------


@pytest.fixture(params=["float16", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> Iterator[CudaType]:
    if reason := cuda_trouble():
        pytest.skip(reason)
    load_libraries()
    yield request.param


ROUNDING: Mapping[CudaType, float] = {"float16": 2**-11, "bfloat16": 2**-8}
STORED: Mapping[int, Any] = {TensorProto.INT64: np.int64, TensorProto.FLOAT: np.float32}
ELEMENTS: Mapping[CudaType, int] = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "columns"), [(1, 172), (3, 11008), (700, 1536), (5, 13)])
def test_the_gate_is_silu_times_up(dtype: CudaType, rows: int, columns: int) -> None:
    rng = np.random.default_rng(rows)
    gate, up = (_rounded(rng.normal(0, 3, (rows, columns)), dtype) for _ in range(2))
    (product,) = _run("GatedProduct", dtype, [np.concatenate([gate, up], axis=1)], [gate.shape])
    wanted = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(product, wanted, rtol=2 * ROUNDING[dtype], atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "columns"), [(1, 512), (7, 32000), (513, 49152), (4, 131), (2, 1)])
def test_the_first_of_the_largest_logits_is_found(dtype: CudaType, rows: int, columns: int) -> None:
    rng = np.random.default_rng(columns)
    logits = _rounded(rng.normal(0, 2, (rows, columns)), dtype)  # coarse rounding: there are ties
    logits[rows // 2] = -np.inf
    (found,) = _run("RowArgmax", dtype, [logits], [(rows,)], are_indices=True)
    np.testing.assert_array_equal(found, logits.argmax(axis=1))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim"), [(1, 8, 4, 8), (37, 9, 3, 64), (300, 32, 8, 128), (1100, 4, 4, 128)]
)
def test_queries_and_keys_are_turned_and_stored(
    dtype: CudaType, tokens: int, heads: int, kv_heads: int, dim: int
) -> None:
    rng = np.random.default_rng(tokens)
    blocks, size, length = 40, 32, 900
    packed = _rounded(rng.normal(0, 1, (tokens, (heads + 2 * kv_heads) * dim)), dtype)
    positions = rng.integers(0, length, (tokens, 1))
    slots = rng.permutation(blocks * size)[:tokens].astype(np.int32)
    slots[tokens // 2] = -1
    angles = rng.uniform(0, 6, (length, dim // 2))
    cosine, sine = _rounded(np.cos(angles), dtype), _rounded(np.sin(angles), dtype)
    before = _rounded(rng.normal(0, 1, (2, blocks, size, kv_heads, dim)), dtype)
    keys, values = before.copy()
    inputs = [packed, positions, slots, cosine, sine, keys, values]
    query, _ = _run("RotateAppend", dtype, inputs, [(tokens, heads * dim), (tokens, kv_heads * dim)], in_place=(5, 6))

    by_head = packed.reshape(tokens, -1, dim)
    first, second = by_head[..., : dim // 2], by_head[..., dim // 2 :]
    c, s = (table[positions[:, 0]][:, None] for table in (cosine, sine))
    turned = np.concatenate([first * c - second * s, second * c + first * s], axis=2)
    near = {"rtol": 2 * ROUNDING[dtype], "atol": 4 * ROUNDING[dtype]}
    np.testing.assert_allclose(query, turned[:, :heads].reshape(tokens, -1), **near)
    wanted = before.reshape(2, blocks * size, kv_heads, dim).copy()
    kept = slots >= 0
    wanted[0, slots[kept]] = turned[kept, heads : heads + kv_heads]
    wanted[1, slots[kept]] = by_head[kept, heads + kv_heads :]
    stored = np.stack([keys, values]).reshape(wanted.shape)
    np.testing.assert_allclose(stored, wanted, **near)
    untouched = np.setdiff1d(np.arange(blocks * size), slots[kept])
    np.testing.assert_array_equal(stored[:, untouched], wanted[:, untouched])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "group", "kv_heads", "dim", "size", "blocks"),
    [
        (5, 1, 4, 128, 128, 3),
        (300, 1, 2, 128, 128, 9),
        (70, 4, 8, 128, 64, 1),
        (33, 3, 3, 64, 256, 4),
        (9, 8, 2, 128, 128, 8),
    ],
)
def test_rows_attend_to_a_prefix_that_all_share(
    dtype: CudaType, rows: int, group: int, kv_heads: int, dim: int, size: int, blocks: int
) -> None:
    """Against float64: the parts' answers, each with its weight, are together attention to all of the prefix."""
    rng = np.random.default_rng(rows)
    query = _rounded(rng.normal(0, 1, (rows, group * kv_heads * dim)), dtype)
    keys, values = (_rounded(rng.normal(0, 1, (blocks + 4, size, kv_heads, dim)), dtype) for _ in range(2))
    table = rng.permutation(blocks + 4).astype(np.int32)
    length, scale = blocks * size, 1 / np.sqrt(dim)
    tiles = -(-rows // (128 // group)) * kv_heads
    parts = next((parts for parts in (1, 2, 4) if tiles * parts >= 128), 8)
    inputs: list[Array] = [query, keys, values, table, np.array([length], dtype=np.int32)]
    shape = (parts, kv_heads, rows * group, dim)
    answers, weights = _run(
        "AttendShared",
        dtype,
        inputs,
        [shape, shape[:3]],
        float_outputs=(1,),
        heads=(dim, group),
        attributes={"scale": float(scale)},
    )
    own_keys, own_values = (
        cache[table[:blocks]].reshape(length, kv_heads, dim).astype(float) for cache in (keys, values)
    )
    by_head = query.reshape(rows, kv_heads, group, dim)
    scores = np.einsum("rkgd,tkd->krgt", by_head, own_keys).reshape(kv_heads, rows * group, length) * scale
    exponentials = np.exp(scores)
    total = exponentials.sum(axis=2)
    wanted = np.einsum("kqt,tkd->kqd", exponentials, own_values) / total[..., None]
    assert not np.isnan(answers).any()
    shares = np.exp(weights.astype(float) - np.log(total))
    np.testing.assert_allclose(shares.sum(axis=0), 1, rtol=1e-3)
    np.testing.assert_allclose((answers * shares[..., None]).sum(axis=0), wanted, rtol=0, atol=6 * ROUNDING[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("with_prefix", [False, True])
@pytest.mark.parametrize(
    ("rows", "group", "kv_heads", "dim"),
    [
        (5, 1, 4, 128),
        (70, 4, 8, 128),
        (33, 3, 3, 64),
        (4, 2, 2, 64),
        (3, 1, 2, 64),
        (9, 8, 2, 128),
        (6, 7, 1, 64),
    ],
)
def test_a_token_attends_to_its_rows_context(
    dtype: CudaType, rows: int, group: int, kv_heads: int, dim: int, with_prefix: bool
) -> None:
    """Against float64: ragged contexts from one token to several blocks, blocks in any order, a shared prefix."""
    rng = np.random.default_rng(rows)
    size, width = 128, 5
    past = rng.integers(0, width * size, rows).astype(np.int32)
    past[:2] = (0, width * size - 1)
    tables = rng.permutation(rows * width).reshape(rows, width).astype(np.int32)
    shape = (rows * width, size, kv_heads, dim)
    query = _rounded(rng.normal(0, 1, (rows, group * kv_heads * dim)), dtype)
    keys, values = (_rounded(rng.normal(0, 1, shape), dtype) for _ in range(2))
    scale = 1 / np.sqrt(dim)
    by_head = query.reshape(rows, kv_heads, group, dim)
    # A prefix in three parts, of which the last weighs nothing.
    prefix_answer = _rounded(rng.normal(0, 0.3, (3, kv_heads, rows, group, dim)), dtype)
    prefix_weight = rng.normal(3, 1, (3, kv_heads, rows, group)).astype(np.float32)
    prefix_answer[2], prefix_weight[2] = 0, -1e30

    wanted = np.empty((rows, kv_heads, group, dim))
    for row in range(rows):
        places = tables[row].repeat(size)[: past[row] + 1], (np.arange(width * size) % size)[: past[row] + 1]
        own_keys, own_values = (cache[places].astype(np.float64) for cache in (keys, values))
        scores = np.einsum("kgd,tkd->kgt", by_head[row], own_keys) * scale
        weights = np.exp(scores)
        total, answer = weights.sum(axis=2), np.einsum("kgt,tkd->kgd", weights, own_values)
        if with_prefix:
            for part in range(2):
                mass = np.exp(prefix_weight[part, :, row].astype(np.float64))
                total, answer = total + mass, answer + mass[..., None] * prefix_answer[part, :, row]
        wanted[row] = answer / total[..., None]

    model = dataclasses.replace(DESCRIPTION, num_heads=group * kv_heads, num_kv_heads=kv_heads, head_dim=dim)
    room = np.zeros(attention_room(model, rows, width * size), dtype=np.float32)
    inputs: list[Array] = [query, keys, values, tables, past, room]
    if with_prefix:
        inputs += [
            prefix_answer.reshape(3, kv_heads, rows * group, dim),
            prefix_weight.reshape(3, kv_heads, rows * group),
        ]
    name = "AttendPrefixed" if with_prefix else "Attend"
    (answer,) = _run(
        name,
        dtype,
        inputs,
        [query.shape],
        float_inputs=(5, 7),
        heads=(dim, group),
        attributes={"scale": float(scale)},
    )
    np.testing.assert_allclose(answer, wanted.reshape(rows, -1), rtol=0, atol=4 * ROUNDING[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("group", "kv_heads", "dim", "size"), [(1, 3, 128, 128), (4, 2, 128, 128), (3, 2, 64, 256), (7, 1, 64, 64)]
)
def test_a_prompts_tokens_attend_to_what_comes_before_them(
    dtype: CudaType, group: int, kv_heads: int, dim: int, size: int
) -> None:
    """Against float64: fresh prompts and pieces of longer ones, of one token to several tiles, blocks in any order.

    What lies behind a row's tokens in its blocks is no number, and must not be seen.
    """
    rng = np.random.default_rng(dim + group)
    lengths = np.array([1, 17, 128, 129, 300, 64, 2, 383], dtype=np.int32)
    past = np.array([0, 0, 0, 40, 65, 3 * size - 64, 200, 1], dtype=np.int32)
    width = -(-int((lengths + past).max()) // size)
    tables = rng.permutation(len(lengths) * width).reshape(len(lengths), width).astype(np.int32)
    tokens, heads = int(lengths.sum()), group * kv_heads
    query = _rounded(rng.normal(0, 1, (tokens, heads * dim)), dtype)
    shape = (len(lengths) * width, size, kv_heads, dim)
    keys, values = (_rounded(rng.normal(0, 1, shape), dtype) for _ in range(2))
    cumulative = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    scale = 1 / np.sqrt(dim)

    wanted = np.empty((tokens, kv_heads, group, dim))
    positions = np.arange(width * size)
    for row, (new, before) in enumerate(zip(lengths, past, strict=True)):
        places = tables[row].repeat(size), positions % size
        for cache in (keys, values):
            cache[places[0][before + new :], places[1][before + new :]] = np.nan
        own_keys, own_values = (
            cache[places[0][: before + new], places[1][: before + new]].astype(np.float64) for cache in (keys, values)
        )
        own = query[cumulative[row] : cumulative[row + 1]].reshape(new, kv_heads, group, dim)
        scores = np.einsum("qkgd,tkd->qkgt", own, own_keys) * scale
        is_later = positions[None, : before + new] > before + np.arange(new)[:, None]
        scores[np.broadcast_to(is_later[:, None, None, :], scores.shape)] = -np.inf
        weights = np.exp(scores - scores.max(axis=3, keepdims=True))
        weights /= weights.sum(axis=3, keepdims=True)
        wanted[cumulative[row] : cumulative[row + 1]] = np.einsum("qkgt,tkd->qkgd", weights, own_values)

    inputs: list[Array] = [query, keys, values, tables, past, cumulative, prompt_tiles(lengths, past, 128 // group)]
    attributes = {"scale": float(scale)}
    (answer,) = _run("AttendPrompt", dtype, inputs, [query.shape], heads=(dim, group), attributes=attributes)
    np.testing.assert_allclose(answer, wanted.reshape(tokens, -1), rtol=0, atol=6 * ROUNDING[dtype])


@pytest.mark.gpu
def test_the_beginnings_of_blocks_are_copied_in_every_plane(dtype: CudaType) -> None:
    runtime = importlib.import_module("cuda.bindings.runtime")
    rng = np.random.default_rng(7)
    planes, blocks, words = 6, 9, 40  # words of 16 bytes in a block
    cache = rng.integers(0, 256, (planes, blocks, words * 16)).astype(np.uint8)
    copies = np.array([[3, 5, 1], [3, 6, 40], [8, 1, 17]], dtype=np.int32)
    held = []
    for array in (cache, copies):
        _, pointer = runtime.cudaMalloc(array.nbytes)
        runtime.cudaMemcpy(pointer, array.ctypes.data, array.nbytes, runtime.cudaMemcpyKind.cudaMemcpyHostToDevice)
        held.append(pointer)
    operators = load_operators(DESCRIPTION, dtype)
    operators.copy_positions(
        0, int(held[0]), int(held[1]), 3, planes=planes, plane_bytes=blocks * words * 16, block_bytes=words * 16
    )
    found = np.empty_like(cache)
    kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
    assert not int(runtime.cudaMemcpy(found.ctypes.data, held[0], found.nbytes, kind)[0])
    for source, target, count in copies:
        cache[:, target, : count * 16] = cache[:, source, : count * 16]
    np.testing.assert_array_equal(found, cache)
    for pointer in held:
        runtime.cudaFree(pointer)


@pytest.mark.gpu
def test_shapes_that_disagree_are_refused(dtype: CudaType) -> None:
    with pytest.raises(Exception, match="GatedProduct: gate and up lie side by side"):
        _run("GatedProduct", dtype, [np.zeros((2, 15), np.float32)], [(2, 7)])


def _rounded(values: Array, dtype: CudaType) -> Array:
    rounded: Array = DECODE[dtype](ENCODE[dtype](values.astype(np.float32)))
    return rounded


def _run(
    name: str,
    dtype: CudaType,
    inputs: list[Array],
    shapes: list[tuple[int, ...]],
    *,
    are_indices: bool = False,
    in_place: tuple[int, ...] = (),
    float_inputs: tuple[int, ...] = (),
    float_outputs: tuple[int, ...] = (),
    heads: tuple[int, int] = (8, 1),
    attributes: Mapping[str, float] = MappingProxyType({}),
) -> list[Array]:
    """Run one operator on the device. Floats travel as `dtype`, but those named; inputs that are written in place are
    read back.

    heads: channels of a head, and query heads to a KV head,
    that kernels are compiled for.
    """
    runtime = importlib.import_module("cuda.bindings.runtime")
    element = ELEMENTS[dtype]
    dim, group = heads
    model = dataclasses.replace(DESCRIPTION, num_heads=group, num_kv_heads=1, head_dim=dim)
    library = load_operators(model, dtype).library
    kinds = {np.dtype(np.int32): TensorProto.INT32, np.dtype(np.int64): TensorProto.INT64}
    types = [
        TensorProto.FLOAT if index in float_inputs else kinds.get(values.dtype, element)
        for index, values in enumerate(inputs)
    ]
    results = [
        TensorProto.INT64 if are_indices else TensorProto.FLOAT if index in float_outputs else element
        for index in range(len(shapes))
    ]
    session = _session(library, _model(f"{name}_{dtype}", types, results, attributes), ["CUDAExecutionProvider"])
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

    def read(pointer: Any, shape: tuple[int, ...], kind: int) -> Array:
        array = np.empty(shape, STORED.get(kind, np.uint16))
        copy(array.ctypes.data, pointer, array.nbytes, "DeviceToHost")
        return DECODE[dtype](array) if kind == element else array

    try:
        for index, (values, kind) in enumerate(zip(inputs, types, strict=True)):
            bits = np.ascontiguousarray(ENCODE[dtype](values) if kind == element else values)
            binding.bind_input(f"input_{index}", "cuda", 0, kind, list(values.shape), upload(bits))
        for index, (shape, kind) in enumerate(zip(shapes, results, strict=True)):
            # Filled with what no result holds, so that an element that nobody writes is seen.
            blank = np.full(shape, -7, STORED[kind]) if kind in STORED else np.full(shape, 0x7FC1, np.uint16)
            binding.bind_output(f"output_{index}", "cuda", 0, kind, list(shape), upload(blank))
        session.run_with_iobinding(binding)
        for index in in_place:
            inputs[index][...] = read(held[index], inputs[index].shape, types[index])
        return [read(held[len(inputs) + n], shape, results[n]) for n, shape in enumerate(shapes)]
    finally:
        for pointer in held:
            runtime.cudaFree(pointer)


def _model(
    op: str, inputs: list[int], outputs: list[int], attributes: Mapping[str, float] = MappingProxyType({})
) -> bytes:
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


def _session(library: Path, model: bytes, providers: list[Any]) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(str(library))
    return onnxruntime.InferenceSession(model, options, providers=providers)
