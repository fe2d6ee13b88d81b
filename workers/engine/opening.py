"""From an artifact and the engine's settings to a warm engine: session, cache that fits in memory, buckets run once."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import structlog

from jobs.settings import EngineSettings
from storage.errors import PromptmillError
from workers.engine.cpu import CpuRunner
from workers.engine.engine import Engine
from workers.engine.null import NullEngine
from workers.engine.request import AnyEngine
from workers.engine.scheduler import decode_buckets
from workers.engine.session import open_cpu_session
from workers.models.artifact import Artifact, kv_bytes_per_token

log = structlog.get_logger()

# Of the memory that is free once the weights are in, the KV cache may take this share; runs need some, others too.
KV_CACHE_MEMORY_SHARE = 0.6


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Rows of the KV cache, and positions of each."""

    slots: int
    context_length: int


def open_engine(
    artifact: Artifact, settings: EngineSettings, report: Callable[[str, int, int], None] = lambda *_: None
) -> AnyEngine:
    """Load the model, allocate the KV cache, warm up every bucket, start the engine's thread.

    report: called with (what is being done, steps done, steps in all).
    Raises PromptmillError `not_enough_memory` if not even one slot fits.
    """
    if settings.flavour == "null":
        log.warning("null_engine", advice="answers are made up; PROMPTMILL_ENGINE_FLAVOUR=cpu runs the model")
        return NullEngine(
            max_batch_size=settings.max_batch_size,
            context_length=min(settings.context_length or artifact.context_length, artifact.context_length),
            token_s=settings.null_token_s,
        )
    report("loading the model", 0, 1)
    session = open_cpu_session(artifact.model_path, usable_threads(settings), allow_spinning=settings.allow_spinning)
    wanted = CacheSize(
        settings.max_batch_size, min(settings.context_length or artifact.context_length, artifact.context_length)
    )
    size = fit_cache(wanted, kv_bytes_per_token(artifact.description), psutil.virtual_memory().available)
    if size != wanted:
        log.warning("kv_cache_reduced", wanted_slots=wanted.slots, slots=size.slots, context_length=size.context_length)
    buckets = decode_buckets(size.slots)
    runner = CpuRunner(
        session, artifact.description, slots=size.slots, context_length=size.context_length, buckets=buckets
    )
    runner.warm_up(lambda done, total: report("warming up", done, total))
    return Engine(
        runner,
        buckets=buckets,
        stop_token_ids=artifact.tokenizer.stop_token_ids,
        prefill_budget_tokens=settings.prefill_chunk_tokens,
        prefix_reuse=settings.prefix_reuse,
    )


def fit_cache(wanted: CacheSize, bytes_per_token: int, available_bytes: int) -> CacheSize:
    """As many slots as fit in the share of memory that the cache may take, at the context length asked for.

    Raises PromptmillError `not_enough_memory` when that is less than one.
    """
    room = int(available_bytes * KV_CACHE_MEMORY_SHARE)
    slots = min(wanted.slots, room // (bytes_per_token * wanted.context_length))
    if slots >= 1:
        return CacheSize(slots, wanted.context_length)
    longest = room // bytes_per_token
    raise PromptmillError(
        f"a context of {wanted.context_length} tokens takes {bytes_per_token * wanted.context_length >> 20} MiB of KV "
        f"cache and {room >> 20} MiB may be used; lower PROMPTMILL_ENGINE_CONTEXT_LENGTH to {longest} or less",
        code="not_enough_memory",
    )


def usable_threads(settings: EngineSettings) -> int:
    """Threads inside an operator: as set, else one for each physical core that this process may use."""
    if settings.threads:
        return settings.threads
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))
