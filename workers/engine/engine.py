"""The step loop: token ids in, token ids out.

One thread owns the model. Requests are submitted from any thread and answered through futures; cancelling a future
gives its row back at the next turn. A turn is: admit, prefill up to a budget, decode one token for every ready row.
A request's failure ends that request alone; a failed model run ends those that were in it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import structlog

from workers.engine.kv_cache import Slot, SlotCache, TokenIds
from workers.engine.request import (
    Completion,
    CompletionTimes,
    EngineStatus,
    FinishReason,
    GenerationRequest,
    TokenLogprobs,
    deadline_exceeded,
    engine_closed,
    engine_failed,
    prompt_too_long,
)
from workers.engine.sampling import Logits, RowSampler, sample_rows
from workers.engine.scheduler import (
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


@dataclass(slots=True, eq=False)
class _Row:
    """A request on its way through the engine."""

    request: GenerationRequest
    prompt: TokenIds
    future: Future[Completion]
    sampler: RowSampler
    submitted_at: float
    slot: Slot | None = None
    cached: int = 0
    admitted_at: float = 0.0
    first_token_at: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    steps: int = 0
    shared_rows: int = 0

    @property
    def is_decoding(self) -> bool:
        return bool(self.token_ids)


class Engine:
    """Continuous batching over a runner's slots.

    stop_token_ids: end a request unless it ignores them. prefill_budget_tokens: prompt tokens computed between two
    decode steps. prefix_reuse: copy KV rows of a beginning that some slot holds instead of computing them.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        buckets: Sequence[int],
        stop_token_ids: Iterable[int],
        prefill_budget_tokens: int = 512,
        prefix_reuse: bool = True,
    ) -> None:
        self.context_length = runner.context_length
        self.max_batch_size = runner.slots
        self._runner = runner
        self._buckets = tuple(buckets)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._prefill_budget_tokens = prefill_budget_tokens
        self._prefix_reuse = prefix_reuse
        self._cache = SlotCache(runner.slots, runner.context_length)
        self._rows: list[_Row] = []  # admitted, in order of admission; owned by the engine's thread
        self._waiting: deque[_Row] = deque()  # owned by the engine's thread
        self._inbox: deque[_Row] = deque()  # guarded by _wake
        self._wake = threading.Condition()
        self._closing = False
        self._draining = False
        self._steps = 0
        self._last_step_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest) -> Future[Completion]:
        """Queue a request. The future gives a `Completion` or raises an EngineError; cancel it to give up.

        Raises EngineError: `context_length_exceeded` if the prompt leaves no room for one token, `engine_closed`.
        """
        prompt = np.asarray(request.prompt_token_ids, dtype=np.int32)
        assert prompt.size > 0, "an empty prompt must be refused before the engine"
        if prompt.size > self.context_length - 1:
            raise prompt_too_long(prompt.size, self.context_length)
        future: Future[Completion] = Future()
        sampler = RowSampler(request.sampling, self._runner.vocab_size)
        row = _Row(request, prompt, future, sampler, time.monotonic())
        with self._wake:
            if self._closing or self._draining:
                raise engine_closed()
            self._inbox.append(row)
            self._wake.notify()
        return future

    def status(self) -> EngineStatus:
        return EngineStatus(
            running=len(self._rows),
            waiting=len(self._waiting) + len(self._inbox),
            steps=self._steps,
            last_step_at=self._last_step_at,
            is_alive=self._thread.is_alive(),
        )

    def close(self, *, drain: bool = False) -> None:
        """Stop the thread. drain: answer what was submitted first; else those requests fail with `engine_closed`."""
        with self._wake:
            self._draining = True
            self._closing = self._closing or not drain
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        """Loop to the end, then leave no request unanswered. An error here is our own mistake and ends the engine."""
        error: Exception = engine_closed()
        try:
            self._loop()
            self._cache.check_integrity()
        except Exception as mistake:
            log.critical("engine_broken", exc_info=mistake)
            error = engine_failed(mistake)
        with self._wake:
            self._closing = True
            self._waiting.extend(self._inbox)
            self._inbox.clear()
        for row in [*self._rows, *self._waiting]:
            self._fail(row, error)
        self._waiting.clear()

    def _loop(self) -> None:
        while True:
            with self._wake:
                while not (self._inbox or self._rows or self._waiting or self._draining):
                    self._wake.wait()
                    self._last_step_at = time.monotonic()
                self._waiting.extend(self._inbox)
                self._inbox.clear()
                if self._closing or (self._draining and not self._rows and not self._waiting):
                    return
            self._turn()
            self._last_step_at = time.monotonic()

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

    def _drop_given_up(self) -> None:
        """End the rows whose future was cancelled or whose deadline has passed, admitted or not."""
        now = time.monotonic()
        for row in [*self._rows, *self._waiting]:
            deadline = row.request.deadline
            if row.future.cancelled() or (deadline is not None and now > deadline):
                if row.slot is None:
                    self._waiting.remove(row)
                self._fail(row, deadline_exceeded())

    def _admit(self) -> None:
        """Give free slots to waiting requests, oldest first, copying the longest beginning some slot already holds.

        A request whose beginning is being computed right now is passed over until it can be copied.
        """
        if not self._waiting or not self._cache.free_count:
            return
        passed_over: deque[_Row] = deque()
        looks = self._runner.slots * _LOOKAHEAD_PER_SLOT
        while self._waiting and self._cache.free_count and looks:
            looks -= 1
            row = self._waiting.popleft()
            source, cached = self._cache.longest_prefix(row.prompt) if self._prefix_reuse else (None, 0)
            if cached < MIN_REUSED_TOKENS:
                source, cached = None, 0
            if self._prefix_reuse and waits_for_prefix(row.prompt, cached, self._being_computed()):
                passed_over.append(row)
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
            self._rows.append(row)
        self._waiting.extendleft(reversed(passed_over))

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
                self._finish(row, FinishReason.STOP, now)
                continue
            row.token_ids.append(token_id)
            if logprobs is not None:
                row.logprobs.append(logprobs)
            if row.request.on_token is not None and row.request.on_token(token_id):
                self._finish(row, FinishReason.STOP, now)
            elif len(row.token_ids) >= row.request.sampling.max_tokens or _slot(row).length >= self.context_length:
                self._finish(row, FinishReason.LENGTH, now)

    def _finish(self, row: _Row, reason: FinishReason, now: float) -> None:
        self._release(row)
        completion = Completion(
            completion_token_ids=tuple(row.token_ids),
            finish_reason=reason,
            logprobs=tuple(row.logprobs) if row.request.sampling.logprobs is not None else None,
            prompt_tokens=len(row.prompt),
            cached_tokens=row.cached,
            mean_batch_size=row.shared_rows / row.steps if row.steps else 1.0,
            times=CompletionTimes(
                wait_s=row.admitted_at - row.submitted_at,
                prefill_s=row.first_token_at - row.admitted_at,
                decode_s=now - row.first_token_at,
            ),
        )
        if row.future.set_running_or_notify_cancel():
            row.future.set_result(completion)

    def _fail(self, row: _Row, error: Exception) -> None:
        self._release(row)
        if row.future.set_running_or_notify_cancel():
            row.future.set_exception(error)

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
