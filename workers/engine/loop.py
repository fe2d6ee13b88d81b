"""What the engines share: a thread, the line of waiting requests, and the ways in which a request ends.

Requests are submitted from any thread and answered through futures; cancelling a future gives the request up at the
next turn. All else happens in the engine's own thread. What a turn does, and what a request holds meanwhile, is the
engine's: see `Engine`, `PagedEngine`, `NullEngine`. A request's failure ends that request alone.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import structlog

from storage.errors import PromptmillError
from workers.engine.request import (
    DEVICE_FAILED,
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
from workers.engine.scheduler import line_up

log = structlog.get_logger()


@dataclass(slots=True, eq=False, kw_only=True)
class Row:
    """A request on its way through an engine. cached: prompt tokens that were not computed; None until admitted."""

    request: GenerationRequest
    prompt_tokens: int
    future: Future[Completion] = field(default_factory=Future)
    submitted_at: float = field(default_factory=time.monotonic)
    admitted_at: float = 0.0
    first_token_at: float = 0.0
    cached: int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    steps: int = 0
    shared_rows: int = 0


RowT = TypeVar("RowT", bound=Row)


class StepLoop(ABC, Generic[RowT]):
    """An engine without its steps. A subclass sets itself up and then calls `_start`."""

    def __init__(self, *, max_batch_size: int, context_length: int) -> None:
        self.max_batch_size = max_batch_size
        self.context_length = context_length
        self._waiting: deque[RowT] = deque()  # owned by the engine's thread
        self._inbox: deque[RowT] = deque()  # guarded by _wake
        self._wake = threading.Condition()
        self._closing = False
        self._draining = False
        self._is_broken = False
        self._steps = 0
        self._last_step_at = time.monotonic()
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def submit(self, request: GenerationRequest) -> Future[Completion]:
        """Queue a request. The future gives a `Completion` or raises an EngineError; cancel it to give up.

        Raises EngineError: `context_length_exceeded` if the prompt leaves no room for one token, `engine_closed`.
        """
        prompt_tokens = len(request.prompt_token_ids)
        assert prompt_tokens > 0, "an empty prompt must be refused before the engine"
        if prompt_tokens > self.context_length - 1:
            raise prompt_too_long(prompt_tokens, self.context_length)
        row = self._receive(request)
        with self._wake:
            if self._closing or self._draining:
                raise engine_closed()
            self._inbox.append(row)
            self._wake.notify()
        return row.future

    def status(self) -> EngineStatus:
        return EngineStatus(
            running=self._running_count(),
            waiting=len(self._waiting) + len(self._inbox),
            steps=self._steps,
            last_step_at=self._last_step_at,
            is_alive=self._thread.is_alive() and not self._is_broken,
        )

    def close(self, *, drain: bool = False) -> None:
        """Stop the thread. drain: answer what was submitted first; else those requests fail with `engine_closed`."""
        with self._wake:
            self._draining = True
            self._closing = self._closing or not drain
            self._wake.notify()
        self._thread.join()

    # --- what an engine does in its own way -------------------------------------------------------------------------

    @abstractmethod
    def _receive(self, request: GenerationRequest) -> RowT:
        """Make a row of a request; called in the submitter's thread."""

    @abstractmethod
    def _turn(self) -> None:
        """Admit, step, answer."""

    @abstractmethod
    def _admitted(self) -> list[RowT]: ...

    @abstractmethod
    def _running_count(self) -> int:
        """How many are admitted; called from any thread."""

    @abstractmethod
    def _release(self, row: RowT) -> None:
        """Take back what a row that ends holds, if it was admitted."""

    def _set_up(self) -> None:
        """Called first in the engine's thread; what it raises, `_start` raises."""

    def _settle(self) -> None:
        """Called after the last turn; an error in it is one of the engine."""

    def _tear_down(self) -> None:
        """Called last in the engine's thread, when every request is answered, and after a failed `_set_up`."""

    # --- the engine's thread ----------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start the thread and wait until it is set up."""
        self._thread.start()
        self._started.result()

    def _run(self) -> None:
        """Set up, loop to the end, then leave no request unanswered. An error here is ours or the device's."""
        try:
            self._set_up()
        except BaseException as failure:
            with self._wake:
                self._closing = True
            self._end()
            self._started.set_exception(failure)
            return
        self._started.set_result(None)
        error: Exception = engine_closed()
        try:
            self._loop()
            self._settle()
        except Exception as mistake:
            log.critical("engine_broken", exc_info=mistake)
            self._is_broken = True
            is_device = isinstance(mistake, PromptmillError) and mistake.code == DEVICE_FAILED
            error = mistake if is_device else engine_failed(mistake)
        with self._wake:
            self._closing = True
            self._waiting.extend(self._inbox)
            self._inbox.clear()
        try:
            self._fail_all(error)
        finally:
            self._end()

    def _end(self) -> None:
        try:
            self._tear_down()
        except Exception as mistake:  # whoever waits is to hear of what came before it
            log.error("engine_not_torn_down", exc_info=mistake)

    def _loop(self) -> None:
        while True:
            with self._wake:
                while not (self._inbox or self._running_count() or self._waiting or self._draining):
                    self._wake.wait()
                    self._last_step_at = time.monotonic()
                line_up(self._waiting, self._inbox)
                self._inbox.clear()
                if self._closing or (self._draining and not self._running_count() and not self._waiting):
                    return
            self._turn()
            self._last_step_at = time.monotonic()

    def _drop_given_up(self) -> None:
        """End the rows whose future was cancelled or whose deadline has passed, admitted or not."""
        now = time.monotonic()
        for row in self._admitted():
            if _is_given_up(row, now):
                self._fail(row, deadline_exceeded())
        for row in [row for row in self._waiting if _is_given_up(row, now)]:
            self._waiting.remove(row)
            self._fail(row, deadline_exceeded())

    def _answer(self, row: RowT, token_ids: Sequence[int], reason: FinishReason, now: float) -> None:
        completion = Completion(
            completion_token_ids=tuple(token_ids),
            finish_reason=reason,
            logprobs=tuple(row.logprobs) if row.request.sampling.logprobs is not None else None,
            prompt_tokens=row.prompt_tokens,
            cached_tokens=row.cached or 0,
            mean_batch_size=row.shared_rows / row.steps if row.steps else 1.0,
            times=CompletionTimes(
                wait_s=row.admitted_at - row.submitted_at,
                prefill_s=row.first_token_at - row.admitted_at,
                decode_s=now - row.first_token_at,
            ),
        )
        try:
            self._release(row)
        finally:
            if row.future.set_running_or_notify_cancel():
                row.future.set_result(completion)

    def _fail(self, row: RowT, error: Exception) -> None:
        try:
            self._release(row)
        finally:
            if row.future.set_running_or_notify_cancel():
                row.future.set_exception(error)

    def _fail_all(self, error: Exception) -> None:
        # What broke the engine may have left a row half admitted: in both places, or not to be released.
        for row in dict.fromkeys([*self._admitted(), *self._waiting]):
            try:
                self._fail(row, error)
            except Exception as mistake:
                log.error("row_not_released", exc_info=mistake)
        self._waiting.clear()


def _is_given_up(row: Row, now: float) -> bool:
    deadline = row.request.deadline
    return row.future.cancelled() or (deadline is not None and now > deadline)
