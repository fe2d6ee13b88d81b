"""From an artifact and the engine's settings to a warm engine: session, cache that fits in memory, buckets run once."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil
import structlog

from jobs.settings import EngineSettings
from storage.errors import PromptmillError
from workers.engine.cpu import CpuRunner
from workers.engine.engine import Engine
from workers.engine.flavour import CUDA_TYPES, Flavour, load_libraries
from workers.engine.null import NullEngine
from workers.engine.paged_engine import PagedEngine
from workers.engine.request import AnyEngine
from workers.engine.scheduler import decode_buckets, interactive_slots
from workers.engine.session import open_cpu_session
from workers.models.artifact import Artifact, kv_bytes_per_token
from workers.models.description import CudaType, ModelDescription

if TYPE_CHECKING:
    from workers.engine.cuda_ops import OwnOperators

log = structlog.get_logger()

# Of the memory that is free once the weights are in, the KV cache may take this share; runs need some, others too.
KV_CACHE_MEMORY_SHARE = 0.6
# Where the settings leave it open: rows beyond which more bring little, and prompt tokens of one step.
CPU_ROWS = 64
CPU_PREFILL_TOKENS = 512
CUDA_ROWS = 512
CUDA_PREFILL_TOKENS = 8448  # 33 times 256: tiles of the products then fill an H100's or H200's 132 processors evenly
CUDA_PREFIX_MIN_TOKENS = 256  # of a beginning that is read once for all rows that share it


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Rows of the KV cache, and positions of each."""

    slots: int
    context_length: int


def open_engine(
    artifact: Artifact,
    settings: EngineSettings,
    flavour: Flavour,
    report: Callable[[str, int, int], None] = lambda *_: None,
) -> AnyEngine:
    """Load the model, allocate the KV cache, warm up every bucket, start the engine's thread.

    flavour: as `choose_flavour` chose. report: called with (what is being done, steps done, steps in all).
    Raises PromptmillError `not_enough_memory` if not even one row fits, and what the device refuses.
    """
    match flavour:
        case "null":
            return _open_null(artifact, settings)
        case "cpu":
            return _open_cpu(artifact, settings, report)
        case "cuda":
            return _open_cuda(artifact, settings, report)


def _open_null(artifact: Artifact, settings: EngineSettings) -> NullEngine:
    log.warning("null_engine", advice="answers are made up; PROMPTMILL_ENGINE_FLAVOUR=auto runs the model")
    rows = settings.max_batch_size or CPU_ROWS
    return NullEngine(
        max_batch_size=rows,
        context_length=_context_length(artifact, settings),
        token_s=settings.null_token_s,
        prefill_tokens_per_s=settings.null_prefill_tokens_per_s,
        prefill_budget_tokens=settings.prefill_chunk_tokens or CUDA_PREFILL_TOKENS,
        interactive_slots=interactive_slots(rows),
    )


def _open_cpu(artifact: Artifact, settings: EngineSettings, report: Callable[[str, int, int], None]) -> Engine:
    report("loading the model", 0, 1)
    session = open_cpu_session(artifact.model_path, usable_threads(settings), allow_spinning=settings.allow_spinning)
    rows = settings.max_batch_size or CPU_ROWS
    reserve = interactive_slots(rows)
    wanted = CacheSize(rows + reserve, _context_length(artifact, settings))
    size = fit_cache(
        wanted,
        kv_bytes_per_token(artifact.description),
        psutil.virtual_memory().available,
        settings.kv_cache_mib << 20,
    )
    if size != wanted:
        log.warning("kv_cache_reduced", wanted_slots=wanted.slots, slots=size.slots, context_length=size.context_length)
    reserve = min(reserve, size.slots - 1)
    buckets = (*decode_buckets(size.slots - reserve), *([size.slots] if reserve else []))
    runner = CpuRunner(
        session, artifact.description, slots=size.slots, context_length=size.context_length, buckets=buckets
    )
    runner.warm_up(lambda done, total: report("warming up", done, total))
    return Engine(
        runner,
        buckets=buckets,
        stop_token_ids=artifact.tokenizer.stop_token_ids,
        prefill_budget_tokens=settings.prefill_chunk_tokens or CPU_PREFILL_TOKENS,
        prefix_reuse=settings.prefix_reuse,
        interactive_slots=reserve,
    )


def _open_cuda(artifact: Artifact, settings: EngineSettings, report: Callable[[str, int, int], None]) -> PagedEngine:
    """The engine closes the runner, and the runner gives the weights back: whoever has the engine has it all."""
    # Here, for with them comes ONNX: half a second that a CPU need not wait.
    from workers.engine.cuda import CudaRunner, cuda_row_buckets, upload_weights
    from workers.models.cuda_graph import artifact_entries, stored_weights

    load_libraries()
    description, dtype = artifact.description, CUDA_TYPES[artifact.dtype]
    operators = _own_operators(description, dtype)
    if artifact.dtype != dtype:
        log.info("weights_rounded", stored=artifact.dtype, used=dtype)
    rows, context_length = settings.max_batch_size or CUDA_ROWS, _context_length(artifact, settings)
    reserve = interactive_slots(rows)
    # No prefill computes more than all rows hold.
    prefill_tokens = min(settings.prefill_chunk_tokens or CUDA_PREFILL_TOKENS, rows * context_length)
    entries = artifact_entries(artifact.model_path)
    weights = upload_weights(
        description, artifact.context_length, stored_weights(entries, artifact.path, dtype), report
    )
    try:
        runner = CudaRunner(
            description,
            weights.tensors,
            dtype=dtype,
            rotary_length=artifact.context_length,
            max_rows=rows + reserve,
            row_buckets=cuda_row_buckets(rows, reserve),
            context_length=context_length,
            prefill_tokens=prefill_tokens,
            memory_bytes=settings.kv_cache_mib << 20 or None,
            prefix_min_tokens=CUDA_PREFIX_MIN_TOKENS if settings.prefix_reuse else 0,
            operators=operators,
            release_weights=weights.close,
        )
    except BaseException:
        weights.close()
        raise
    return PagedEngine(
        runner,
        stop_token_ids=artifact.tokenizer.stop_token_ids,
        prefill_budget_tokens=prefill_tokens,
        prefix_reuse=settings.prefix_reuse,
        interactive_rows=reserve,
        report=report,
    )


def _own_operators(description: ModelDescription, dtype: CudaType) -> OwnOperators | None:
    """Our own operators; None, and why, where they cannot be had."""
    from workers.engine.cuda_ops import OperatorsUnavailable, load_operators

    try:
        return load_operators(description, dtype)
    except OperatorsUnavailable as error:
        log.warning("operators_unavailable", reason=error.message, effect="about a tenth slower")
        return None


def _context_length(artifact: Artifact, settings: EngineSettings) -> int:
    return min(settings.context_length or artifact.context_length, artifact.context_length)


def fit_cache(wanted: CacheSize, bytes_per_token: int, available_bytes: int, most_bytes: int = 0) -> CacheSize:
    """As many slots as fit in the share of memory that the cache may take, at the context length asked for.

    most_bytes: what somebody allows the cache; 0: no such bound. Raises PromptmillError `not_enough_memory` when not
    even one slot fits.
    """
    room = int(available_bytes * KV_CACHE_MEMORY_SHARE)
    is_bound = 0 < most_bytes < room
    room = most_bytes if is_bound else room
    slots = min(wanted.slots, room // (bytes_per_token * wanted.context_length))
    if slots >= 1:
        return CacheSize(slots, wanted.context_length)
    longest = room // bytes_per_token
    raise PromptmillError(
        f"a context of {wanted.context_length} tokens takes {bytes_per_token * wanted.context_length >> 20} MiB of KV "
        f"cache and {room >> 20} MiB may be used; lower PROMPTMILL_ENGINE_CONTEXT_LENGTH to {longest} or less"
        + (", or raise PROMPTMILL_ENGINE_KV_CACHE_MIB" if is_bound else ""),
        code="not_enough_memory",
    )


def usable_threads(settings: EngineSettings) -> int:
    """Threads inside an operator: as set, else one for each physical core that this process may use."""
    if settings.threads:
        return settings.threads
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))
