"""The step loop: token ids in, token ids out.

One thread owns the model. Requests are submitted from any thread and answered through futures; cancelling a future
gives its row back at the next turn. A turn is: admit, prefill up to a budget, decode one token for every ready row.
A request's failure ends that request alone; a failed model run ends those that were in it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import structlog

from workers.engine.kv_cache import Slot, SlotCache, TokenIds
from workers.engine.loop import Row, StepLoop
from workers.engine.request import FinishReason, GenerationRequest, engine_failed
from workers.engine.sampling import Logits, RowSampler, sample_rows
from workers.engine.scheduler import (
    MIN_LAST_TOKENS,
    MIN_REUSED_TOKENS,
    PrefillCall,
    PrefillRow,
    bucket_for,
    plan_moves,
    plan_prefill,
    waits_for_prefix,
)

log = structlog.get_logger()

# How far behind the head of the waiting line a request may be admitted while the head waits for a prefix.
_LOOKAHEAD_PER_SLOT = 4


class Runner(Protocol):
    """What a flavour does for the engine; see `CpuRunner` for shapes."""

    slots: int
    context_length: int
    vocab_size: int

    def prefill(self, call: PrefillCall, token_ids: Sequence[TokenIds], *, want_logits: bool) -> Logits: ...

    def decode(self, token_ids: TokenIds, lengths: TokenIds, wanted_rows: Sequence[int]) -> Logits: ...

    def copy_rows(self, source: int, target: int, length: int) -> None: ...


@dataclass(slots=True, eq=False, kw_only=True)
class _Row(Row):
    """slot: once it is admitted."""

    prompt: TokenIds
    sampler: RowSampler
    slot: Slot | None = None
    token_ids: list[int] = field(default_factory=list)

    @property
    def is_decoding(self) -> bool:
        return bool(self.token_ids)


class Engine(StepLoop[_Row]):
    """Continuous batching over a runner's slots.

    stop_token_ids: end a request unless it ignores them. prefill_budget_tokens: prompt tokens computed between two
    decode steps. prefix_reuse: copy KV rows of a beginning that some slot holds instead of computing them.
    interactive_slots: of the runner's slots, those that other requests leave free.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        buckets: Sequence[int],
        stop_token_ids: Iterable[int],
        prefill_budget_tokens: int = 512,
        prefix_reuse: bool = True,
        interactive_slots: int = 0,
    ) -> None:
        super().__init__(max_batch_size=runner.slots - interactive_slots, context_length=runner.context_length)
        self._runner = runner
        self._buckets = tuple(buckets)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._prefill_budget_tokens = prefill_budget_tokens
        self._prefix_reuse = prefix_reuse
        self._cache = SlotCache(runner.slots, runner.context_length)
        self._rows: list[_Row] = []  # admitted, in order of admission; owned by the engine's thread
        self._start()

    def _receive(self, request: GenerationRequest) -> _Row:
        prompt = np.asarray(request.prompt_token_ids, dtype=np.int32)
        sampler = RowSampler(request.sampling, self._runner.vocab_size)
        return _Row(request=request, prompt_tokens=prompt.size, prompt=prompt, sampler=sampler)

    def _admitted(self) -> list[_Row]:
        return list(self._rows)

    def _running_count(self) -> int:
        return len(self._rows)

    def _settle(self) -> None:
        self._cache.check_integrity()

    def _turn(self) -> None:
        self._drop_given_up()
        self._admit()
        prefilling = [row for row in self._rows if not row.is_decoding]
        if prefilling:
            self._prefill(prefilling)
        decoding = [row for row in self._rows if row.is_decoding]
        if decoding:
            self._decode(decoding)
        self._steps += 1

    def _admit(self) -> None:
        """Give free slots to waiting requests, interactive ones and then the oldest first.

        The longest beginning that some slot already holds is copied.

        A request whose beginning is being computed right now is passed over until it can be copied.
        """
        if not self._waiting or not self._cache.free_count:
            return
        passed_over: deque[_Row] = deque()
        try:
            self._fill_slots(passed_over)
        finally:
            self._waiting.extendleft(reversed(passed_over))

    def _fill_slots(self, passed_over: deque[_Row]) -> None:
        """Admit waiting rows. Adds to `passed_over`: see `_admit`."""
        looks = self._runner.slots * _LOOKAHEAD_PER_SLOT
        while self._waiting and self._cache.free_count and looks:
            looks -= 1
            if not self._waiting[0].request.is_interactive and self._bulk_rows() >= self.max_batch_size:
                return  # what comes behind it is no interactive request either
            row = self._waiting[0]  # it stays there until it is admitted, so that no error can lose it
            source, cached = self._cache.longest_prefix(row.prompt) if self._prefix_reuse else (None, 0)
            cached = min(cached, len(row.prompt) - MIN_LAST_TOKENS)
            if cached < MIN_REUSED_TOKENS:
                source, cached = None, 0
            if self._prefix_reuse and waits_for_prefix(row.prompt, cached, self._being_computed()):
                passed_over.append(self._waiting.popleft())
                continue
            below = bucket_for(len(self._rows) + 1, self._buckets)
            slot = self._cache.take(source, below)
            assert slot is not None
            if source is None or source is slot:
                self._cache.truncate(slot, cached)
            else:
                self._runner.copy_rows(source.index, slot.index, cached)
                self._cache.note_copy(source, slot, cached)
                self._cache.touch(source)
            row.slot, row.cached, row.admitted_at = slot, cached, time.monotonic()
            self._rows.append(self._waiting.popleft())

    def _bulk_rows(self) -> int:
        return sum(not row.request.is_interactive for row in self._rows)

    def _being_computed(self) -> list[TokenIds]:
        return [row.prompt for row in self._rows if not row.is_decoding]

    def _prefill(self, rows: list[_Row]) -> None:
        by_slot = {_slot(row).index: row for row in rows}
        plan = [PrefillRow(_slot(row).index, _slot(row).length, len(row.prompt) - _slot(row).length) for row in rows]
        for call in plan_prefill(plan, self._prefill_budget_tokens):
            members = [by_slot[call.first_slot + offset] for offset in range(len(call.lengths))]
            pieces = [row.prompt[call.past : call.past + n] for row, n in zip(members, call.lengths, strict=True)]
            is_last = call.past + call.lengths[0] == len(members[0].prompt)  # a batched call holds whole prompts
            try:
                logits = self._runner.prefill(call, pieces, want_logits=is_last)
            except Exception as error:
                self._fail_run(members, error)
                continue
            for row, piece in zip(members, pieces, strict=True):
                self._cache.extend(_slot(row), piece)
            if is_last:
                self._take_tokens(members, logits)

    def _decode(self, rows: list[_Row]) -> None:
        self._compact()
        bucket = bucket_for(max(_slot(row).index for row in rows) + 1, self._buckets)
        token_ids = np.zeros(bucket, dtype=np.int32)
        lengths = np.zeros(bucket, dtype=np.int32)
        for slot in self._cache.slots[:bucket]:
            if slot.length == self.context_length:
                # Only a padding row can be full; it writes one position too, so it gives up its last.
                self._cache.truncate(slot, self.context_length - 1)
            lengths[slot.index] = slot.length
        for row in rows:
            token_ids[_slot(row).index] = row.token_ids[-1]
        try:
            logits = self._runner.decode(token_ids, lengths, [_slot(row).index for row in rows])
        except Exception as error:
            self._fail_run(rows, error)
            return
        for row in rows:
            self._cache.append(_slot(row), row.token_ids[-1])
            row.steps += 1
            row.shared_rows += len(rows)
        self._take_tokens(rows, logits)

    def _compact(self) -> None:
        """Move rows from high slots to low ones where that makes the decode bucket smaller."""
        by_slot = {_slot(row).index: row for row in self._rows}
        for source, target in plan_moves(list(by_slot), self._buckets):
            row = by_slot[source]
            self._runner.copy_rows(source, target, _slot(row).length)
            self._cache.move(_slot(row), self._cache.slots[target])
            row.slot = self._cache.slots[target]

    def _take_tokens(self, rows: list[_Row], logits: Logits) -> None:
        """Choose the next token of each row and end the rows that are done."""
        now = time.monotonic()
        for row, (token_id, logprobs) in zip(rows, sample_rows(logits, [row.sampler for row in rows]), strict=True):
            if not row.is_decoding:
                row.first_token_at = now
            if token_id in self._stop_token_ids and not row.request.sampling.ignore_eos:
                self._answer(row, row.token_ids, FinishReason.STOP, now)
                continue
            row.token_ids.append(token_id)
            if logprobs is not None:
                row.logprobs.append(logprobs)
            if row.request.on_token is not None and row.request.on_token(token_id):
                self._answer(row, row.token_ids, FinishReason.STOP, now)
            elif len(row.token_ids) >= row.request.sampling.max_tokens or _slot(row).length >= self.context_length:
                self._answer(row, row.token_ids, FinishReason.LENGTH, now)

    def _fail_run(self, rows: Sequence[_Row], error: Exception) -> None:
        """A model run failed: its rows end with a retryable error, and what their slots hold is not to be trusted."""
        log.error("model_run_failed", rows=len(rows), exc_info=error)
        for row in rows:
            self._cache.truncate(_slot(row), 0)
            self._fail(row, engine_failed(error))

    def _release(self, row: _Row) -> None:
        if row.slot is not None:
            self._cache.give_back(row.slot)
            self._rows.remove(row)


def _slot(row: _Row) -> Slot:
    assert row.slot is not None
    return row.slot
