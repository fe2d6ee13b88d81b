"""Our own operators: the library builds and registers anywhere; its kernels compute what numpy does, on a
GPU and on one that the host pretends to be."""

from __future__ import annotations

import dataclasses
import importlib
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto

from tests.checkpoints import DESCRIPTION
from tests.workers.engine.halves import Array
from tests.workers.engine.operator_devices import (
    Gpu,
    OperatorDevice,
    PretendedGpu,
    has_compilers,
    operator_graph,
    operator_session,
    rounded,
)
from workers.engine import cuda_ops
from workers.engine.cuda import prompt_tiles
from workers.engine.cuda_ops import OperatorsUnavailable, build_library, load_operators
from workers.engine.flavour import cuda_trouble, load_libraries
from workers.models.cuda_graph import attention_room
from workers.models.description import CudaType

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
            model = operator_graph(
                f"{name}_{suffix}", [kind or element for kind in inputs], [kind or element for kind in outputs]
            )
            with pytest.raises(Exception, match=f"{name}_{suffix}") as refused:
                operator_session(build_library(), model, ["CPUExecutionProvider"])
            assert "not a registered" not in str(refused.value)
    unknown = operator_graph("Unheard_float16", [TensorProto.FLOAT16], [TensorProto.FLOAT16])
    with pytest.raises(Exception, match=r"Unheard_float16.* not a registered"):
        operator_session(build_library(), unknown, ["CPUExecutionProvider"])


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


@pytest.fixture(scope="module")
def pretended_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is built for the pretended device serves all tests."""
    return tmp_path_factory.mktemp("pretended")


@pytest.fixture
def device(request: pytest.FixtureRequest, pretended_folder: Path) -> OperatorDevice:
    dtype, is_real = request.param
    if not is_real:
        if sys.platform != "linux" or not has_compilers():
            pytest.skip("there are no C and C++ compilers")
        return PretendedGpu(dtype, pretended_folder)
    if reason := cuda_trouble():
        pytest.skip(reason)
    load_libraries()
    return Gpu(dtype)


def cases(names: str, small: Sequence[Sequence[Any]], large: Sequence[Sequence[Any]] = ()) -> pytest.MarkDecorator:
    """Small cases are for all devices, large ones, which take the pretended one too long, for a real GPU alone."""
    found = []
    for dtype in ("float16", "bfloat16"):
        for is_real, some in ((False, small), (True, [*small, *large])):
            marks = [pytest.mark.gpu] if is_real else []
            where = f"{dtype}-{'gpu' if is_real else 'pretended'}"
            for case in some:
                shown = "-".join(map(str, case))
                found.append(pytest.param((dtype, is_real), *case, marks=marks, id=f"{where}-{shown}"))
    return pytest.mark.parametrize(["device", *names.split()], found, indirect=["device"])


ROUNDING: Mapping[CudaType, float] = {"float16": 2**-11, "bfloat16": 2**-8}


@cases("rows columns", [(1, 172), (3, 11008), (5, 13)], [(700, 1536)])
def test_the_gate_is_silu_times_up(device: OperatorDevice, rows: int, columns: int) -> None:
    rng = np.random.default_rng(rows)
    gate, up = (rounded(rng.normal(0, 3, (rows, columns)), device.dtype) for _ in range(2))
    (product,) = device.run("GatedProduct", [np.concatenate([gate, up], axis=1)], [gate.shape])
    wanted = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(product, wanted, rtol=2 * ROUNDING[device.dtype], atol=1e-6)


@cases("rows columns", [(1, 512), (7, 32000), (4, 131), (2, 1)], [(513, 49152)])
def test_the_first_of_the_largest_logits_is_found(device: OperatorDevice, rows: int, columns: int) -> None:
    rng = np.random.default_rng(columns)
    logits = rounded(rng.normal(0, 2, (rows, columns)), device.dtype)  # coarse rounding: there are ties
    logits[rows // 2] = -np.inf
    (found,) = device.run("RowArgmax", [logits], [(rows,)], are_indices=True)
    np.testing.assert_array_equal(found, logits.argmax(axis=1))


@cases("tokens heads kv_heads dim", [(1, 8, 4, 8), (37, 9, 3, 64)], [(300, 32, 8, 128), (1100, 4, 4, 128)])
def test_queries_and_keys_are_turned_and_stored(
    device: OperatorDevice, tokens: int, heads: int, kv_heads: int, dim: int
) -> None:
    rng = np.random.default_rng(tokens)
    blocks, size, length = 40, 32, 900
    packed = rounded(rng.normal(0, 1, (tokens, (heads + 2 * kv_heads) * dim)), device.dtype)
    positions = rng.integers(0, length, (tokens, 1))
    slots = rng.permutation(blocks * size)[:tokens].astype(np.int32)
    slots[tokens // 2] = -1
    angles = rng.uniform(0, 6, (length, dim // 2))
    cosine, sine = rounded(np.cos(angles), device.dtype), rounded(np.sin(angles), device.dtype)
    before = rounded(rng.normal(0, 1, (2, blocks, size, kv_heads, dim)), device.dtype)
    keys, values = before.copy()
    inputs = [packed, positions, slots, cosine, sine, keys, values]
    query, _ = device.run("RotateAppend", inputs, [(tokens, heads * dim), (tokens, kv_heads * dim)], in_place=(5, 6))

    by_head = packed.reshape(tokens, -1, dim)
    first, second = by_head[..., : dim // 2], by_head[..., dim // 2 :]
    c, s = (table[positions[:, 0]][:, None] for table in (cosine, sine))
    turned = np.concatenate([first * c - second * s, second * c + first * s], axis=2)
    near = {"rtol": 2 * ROUNDING[device.dtype], "atol": 4 * ROUNDING[device.dtype]}
    np.testing.assert_allclose(query, turned[:, :heads].reshape(tokens, -1), **near)
    wanted = before.reshape(2, blocks * size, kv_heads, dim).copy()
    kept = slots >= 0
    wanted[0, slots[kept]] = turned[kept, heads : heads + kv_heads]
    wanted[1, slots[kept]] = by_head[kept, heads + kv_heads :]
    stored = np.stack([keys, values]).reshape(wanted.shape)
    np.testing.assert_allclose(stored, wanted, **near)
    untouched = np.setdiff1d(np.arange(blocks * size), slots[kept])
    np.testing.assert_array_equal(stored[:, untouched], wanted[:, untouched])


@cases(
    "rows group kv_heads dim size blocks",
    [(3, 1, 2, 128, 64, 3), (44, 3, 1, 64, 128, 1)],
    [
        (5, 1, 4, 128, 128, 3),
        (300, 1, 2, 128, 128, 9),
        (70, 4, 8, 128, 64, 1),
        (33, 3, 3, 64, 256, 4),
        (9, 8, 2, 128, 128, 8),
    ],
)
def test_rows_attend_to_a_prefix_that_all_share(
    device: OperatorDevice, rows: int, group: int, kv_heads: int, dim: int, size: int, blocks: int
) -> None:
    """Against float64: the parts' answers, each with its weight, are together attention to all of the prefix."""
    rng = np.random.default_rng(rows)
    query = rounded(rng.normal(0, 1, (rows, group * kv_heads * dim)), device.dtype)
    keys, values = (rounded(rng.normal(0, 1, (blocks + 4, size, kv_heads, dim)), device.dtype) for _ in range(2))
    table = rng.permutation(blocks + 4).astype(np.int32)
    length, scale = blocks * size, 1 / np.sqrt(dim)
    tiles = -(-rows // (128 // group)) * kv_heads
    parts = next((parts for parts in (1, 2, 4) if tiles * parts >= 128), 8)
    inputs: list[Array] = [query, keys, values, table, np.array([length], dtype=np.int32)]
    shape = (parts, kv_heads, rows * group, dim)
    answers, weights = device.run(
        "AttendShared",
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
    np.testing.assert_allclose(
        (answers * shares[..., None]).sum(axis=0), wanted, rtol=0, atol=6 * ROUNDING[device.dtype]
    )


@pytest.mark.parametrize("with_prefix", [False, True])
@cases(
    "rows group kv_heads dim",
    [(3, 1, 2, 128), (4, 3, 1, 64)],
    [(5, 1, 4, 128), (70, 4, 8, 128), (33, 3, 3, 64), (4, 2, 2, 64), (3, 1, 2, 64), (9, 8, 2, 128), (6, 7, 1, 64)],
)
def test_a_token_attends_to_its_rows_context(
    device: OperatorDevice, rows: int, group: int, kv_heads: int, dim: int, with_prefix: bool
) -> None:
    """Against float64: ragged contexts from one token to several blocks, blocks in any order, a shared prefix."""
    rng = np.random.default_rng(rows)
    size, width = 128, 5
    past = rng.integers(0, width * size, rows).astype(np.int32)
    past[:2] = (0, width * size - 1)
    tables = rng.permutation(rows * width).reshape(rows, width).astype(np.int32)
    shape = (rows * width, size, kv_heads, dim)
    query = rounded(rng.normal(0, 1, (rows, group * kv_heads * dim)), device.dtype)
    keys, values = (rounded(rng.normal(0, 1, shape), device.dtype) for _ in range(2))
    scale = 1 / np.sqrt(dim)
    by_head = query.reshape(rows, kv_heads, group, dim)
    # A prefix in three parts, of which the last weighs nothing.
    prefix_answer = rounded(rng.normal(0, 0.3, (3, kv_heads, rows, group, dim)), device.dtype)
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
    (answer,) = device.run(
        name,
        inputs,
        [query.shape],
        float_inputs=(5, 7),
        heads=(dim, group),
        attributes={"scale": float(scale)},
    )
    np.testing.assert_allclose(answer, wanted.reshape(rows, -1), rtol=0, atol=4 * ROUNDING[device.dtype])


@cases(
    "group kv_heads dim size lengths past",
    [(1, 1, 128, 64, (1, 17, 129), (0, 40, 65)), (3, 1, 64, 128, (43, 2, 64), (0, 200, 1))],
    [
        (group, kv_heads, dim, size, (1, 17, 128, 129, 300, 64, 2, 383), (0, 0, 0, 40, 65, 3 * size - 64, 200, 1))
        for group, kv_heads, dim, size in ((1, 3, 128, 128), (4, 2, 128, 128), (3, 2, 64, 256), (7, 1, 64, 64))
    ],
)
def test_a_prompts_tokens_attend_to_what_comes_before_them(
    device: OperatorDevice,
    group: int,
    kv_heads: int,
    dim: int,
    size: int,
    lengths: Sequence[int] | Array,
    past: Sequence[int] | Array,
) -> None:
    """Against float64: fresh prompts and pieces of longer ones, of one token to several tiles, blocks in any order.

    What lies behind a row's tokens in its blocks is no number, and must not be seen.
    """
    rng = np.random.default_rng(dim + group)
    lengths, past = np.array(lengths, dtype=np.int32), np.array(past, dtype=np.int32)
    width = -(-int((lengths + past).max()) // size)
    tables = rng.permutation(len(lengths) * width).reshape(len(lengths), width).astype(np.int32)
    tokens, heads = int(lengths.sum()), group * kv_heads
    query = rounded(rng.normal(0, 1, (tokens, heads * dim)), device.dtype)
    shape = (len(lengths) * width, size, kv_heads, dim)
    keys, values = (rounded(rng.normal(0, 1, shape), device.dtype) for _ in range(2))
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
    (answer,) = device.run("AttendPrompt", inputs, [query.shape], heads=(dim, group), attributes=attributes)
    np.testing.assert_allclose(answer, wanted.reshape(tokens, -1), rtol=0, atol=6 * ROUNDING[device.dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_beginnings_of_blocks_are_copied_in_every_plane(dtype: CudaType) -> None:
    if reason := cuda_trouble():
        pytest.skip(reason)
    load_libraries()
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
    runtime.cudaDeviceSynchronize()
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


@cases("", [()])
def test_shapes_that_disagree_are_refused(device: OperatorDevice) -> None:
    with pytest.raises(Exception, match="GatedProduct: gate and up lie side by side"):
        device.run("GatedProduct", [np.zeros((2, 15), np.float32)], [(2, 7)])
