"""The CPU flavour: one ONNX Runtime session over GroupQueryAttention, with a KV cache of fixed slots.

Every array a run touches is allocated here once and bound by address: the cache (`past_*` and `present_*` are the same
memory, so a run appends in place), the inputs and the logits. Binding by address also spares `copy_outputs_to_cpu`,
which would copy the whole cache.

GroupQueryAttention takes three shapes, and those are the calls made here: several rows without a past (a batched
prefill, right-padded), one row with a past (a chunk), many rows with one token each (a decode step).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from workers.engine.scheduler import PrefillCall
from workers.models.description import ModelDescription

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _DecodeBucket:
    """The bound buffers of one row count."""

    binding: Any
    input_ids: npt.NDArray[np.int64]  # [rows, 1]
    seqlens_k: npt.NDArray[np.int32]  # [rows]


class CpuRunner:
    """Runs forward batches on the CPU. Not thread-safe: one thread owns it.

    session: an InferenceSession over the artifact's CPU graph. slots: rows of the KV cache. context_length: positions
    of each. buckets: row counts of decode steps, ascending, the last one equal to `slots`.
    """

    def __init__(
        self, session: Any, model: ModelDescription, *, slots: int, context_length: int, buckets: Sequence[int]
    ) -> None:
        self.slots = slots
        self.context_length = context_length
        self.vocab_size = model.vocab_size
        self._session = session
        self._num_layers = model.num_layers
        shape = (slots, model.num_kv_heads, context_length, model.cache_head_dim)
        # Zeroed pages come from the kernel on first touch: memory grows with what is used, not with what is reserved.
        self._caches = [np.zeros(shape, dtype=np.float32) for _ in range(2 * model.num_layers)]
        self._cache_names = [f"{part}_{layer}" for layer in range(model.num_layers) for part in ("key", "value")]
        self._total_length = np.zeros((), dtype=np.int32)
        self._logits_indices = np.zeros(slots, dtype=np.int64)
        self._logits = np.zeros((slots, model.vocab_size), dtype=np.float32)
        self._buckets = {rows: self._bind_bucket(rows) for rows in buckets}

    def warm_up(self, report: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Run every decode bucket and a prefill once, so that no request pays for first-time work.

        report: called with (steps done, steps in all).
        """
        total = len(self._buckets) + 1
        self.prefill(PrefillCall(0, (min(16, self.context_length - 1),), 0), [np.zeros(16, np.int32)], want_logits=True)
        report(1, total)
        for done, rows in enumerate(self._buckets, start=2):
            zeros = np.zeros(rows, dtype=np.int32)
            self.decode(zeros, zeros, range(rows))
            report(done, total)

    def prefill(self, call: PrefillCall, token_ids: Sequence[npt.NDArray[np.int32]], *, want_logits: bool) -> Logits:
        """Compute KV rows for prompt tokens, and the logits after each row's last one if wanted.

        token_ids: one array for each row of the call, at least as long as its length. Rows beyond a row's length
        receive the KV of padding; they lie behind its valid positions.
        Returns float32 [rows, vocab_size], a view that the next run overwrites; one row of no meaning if not wanted.
        """
        rows, padded = len(call.lengths), call.padded_length
        assert call.past + padded <= self.context_length
        input_ids = np.zeros((rows, padded), dtype=np.int64)
        for row, length in enumerate(call.lengths):
            input_ids[row, :length] = token_ids[row][:length]
        lengths = np.array(call.lengths, dtype=np.int32)
        seqlens_k = lengths + np.int32(call.past - 1)
        wanted = rows if want_logits else 1
        self._total_length[...] = call.past + padded
        self._logits_indices[:wanted] = (np.arange(rows) * padded + lengths - 1)[:wanted]
        binding = self._session.io_binding()
        self._bind_cache(binding, call.first_slot, rows)
        return self._run(binding, input_ids, seqlens_k, wanted)

    def decode(
        self, token_ids: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32], wanted_rows: Sequence[int]
    ) -> Logits:
        """Feed one token to each of the first slots and return the logits after it.

        token_ids, lengths: int32 [bucket]; lengths are the valid positions before this token, which goes to position
        lengths[row]. A padding row needs a length too: its slot's own, so that what it writes lands behind what counts.
        Returns float32 [len(wanted_rows), vocab_size], a view that the next run overwrites.
        """
        bucket = self._buckets[len(token_ids)]
        bucket.input_ids[:, 0] = token_ids
        bucket.seqlens_k[:] = lengths
        self._total_length[...] = int(lengths.max()) + 1
        count = len(wanted_rows)
        self._logits_indices[:count] = wanted_rows
        return self._run(bucket.binding, bucket.input_ids, bucket.seqlens_k, count)

    def copy_rows(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another, in every layer."""
        for cache in self._caches:
            cache[target, :, :length] = cache[source, :, :length]

    def _run(
        self, binding: Any, input_ids: npt.NDArray[np.int64], seqlens_k: npt.NDArray[np.int32], num_logits: int
    ) -> Logits:
        logits = self._logits[:num_logits]
        _bind_input(binding, "input_ids", input_ids)
        _bind_input(binding, "seqlens_k", seqlens_k)
        _bind_input(binding, "total_sequence_length", self._total_length)
        _bind_input(binding, "logits_indices", self._logits_indices[:num_logits])
        binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        self._session.run_with_iobinding(binding)
        return logits

    def _bind_bucket(self, rows: int) -> _DecodeBucket:
        binding = self._session.io_binding()
        self._bind_cache(binding, 0, rows)
        return _DecodeBucket(binding, np.zeros((rows, 1), dtype=np.int64), np.zeros(rows, dtype=np.int32))

    def _bind_cache(self, binding: Any, first_slot: int, rows: int) -> None:
        for name, cache in zip(self._cache_names, self._caches, strict=True):
            view = cache[first_slot : first_slot + rows]
            binding.bind_input(f"past_{name}", "cpu", 0, np.float32, view.shape, view.ctypes.data)
            binding.bind_output(f"present_{name}", "cpu", 0, np.float32, view.shape, view.ctypes.data)


def _bind_input(binding: Any, name: str, array: npt.NDArray[Any]) -> None:
    binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
