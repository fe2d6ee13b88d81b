"""The null engine: no model. It answers with the end of the prompt, at once or at a set pace.

It is for measuring and drilling everything around a model: the queue, the database, the gateway, what a crash leaves
behind. The answer follows from the prompt alone, so that a wrong or swapped answer can be told from a right one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

import structlog

from workers.engine.request import (
    Completion,
    CompletionTimes,
    EngineStatus,
    FinishReason,
    GenerationRequest,
    deadline_exceeded,
    engine_closed,
    engine_failed,
    prompt_too_long,
)

log = structlog.get_logger()

# Tokens of an answer, unless fewer are asked for.
MOST_TOKENS = 16


def null_answer(prompt_token_ids: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """What the null engine answers: the last tokens of the prompt."""
    return prompt_token_ids[-min(max_tokens, MOST_TOKENS) :]


@dataclass(slots=True, eq=False)
class _Row:
    request: GenerationRequest
    prompt: tuple[int, ...]
    future: Future[Completion]
    submitted_at: float
    admitted_at: float = 0.0
    first_token_at: float = 0.0
    done: int = 0


class NullEngine:
    """One thread that gives every row in hand one token a turn. token_s: seconds that a turn takes; 0: none."""

    def __init__(self, *, max_batch_size: int, context_length: int, token_s: float = 0.0) -> None:
        self.context_length = context_length
        self.max_batch_size = max_batch_size
        self._token_s = token_s
        self._rows: list[_Row] = []  # owned by the engine's thread
        self._waiting: deque[_Row] = deque()  # guarded by _wake
        self._wake = threading.Condition()
        self._closing = False
        self._draining = False
        self._steps = 0
        self._last_step_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest) -> Future[Completion]:
        """As `Engine.submit`."""
        prompt = tuple(request.prompt_token_ids)
        if len(prompt) > self.context_length - 1:
            raise prompt_too_long(len(prompt), self.context_length)
        row = _Row(request, prompt, Future(), time.monotonic())
        with self._wake:
            if self._closing or self._draining:
                raise engine_closed()
            self._waiting.append(row)
            self._wake.notify()
        return row.future

    def status(self) -> EngineStatus:
        return EngineStatus(
            running=len(self._rows),
            waiting=len(self._waiting),
            steps=self._steps,
            last_step_at=self._last_step_at,
            is_alive=self._thread.is_alive(),
        )

    def close(self, *, drain: bool = False) -> None:
        """As `Engine.close`."""
        with self._wake:
            self._draining = True
            self._closing = self._closing or not drain
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        error: Exception = engine_closed()
        try:
            while self._admit():
                if self._token_s:
                    time.sleep(self._token_s)
                self._turn()
                self._steps += 1
                self._last_step_at = time.monotonic()
        except Exception as mistake:
            log.critical("engine_broken", exc_info=mistake)
            error = engine_failed(mistake)
        with self._wake:
            self._closing = True
            left = [*self._rows, *self._waiting]
            self._waiting.clear()
        self._rows.clear()
        for row in left:
            if row.future.set_running_or_notify_cancel():
                row.future.set_exception(error)

    def _admit(self) -> bool:
        """Wait for work and fill the rows. False: it is time to end."""
        with self._wake:
            while not (self._rows or self._waiting or self._draining):
                self._wake.wait()
                self._last_step_at = time.monotonic()
            if self._closing or (self._draining and not self._rows and not self._waiting):
                return False
            while self._waiting and len(self._rows) < self.max_batch_size:
                row = self._waiting.popleft()
                row.admitted_at = time.monotonic()
                self._rows.append(row)
        return True

    def _turn(self) -> None:
        now = time.monotonic()
        beside = len(self._rows)
        going_on: list[_Row] = []
        for row in self._rows:
            deadline = row.request.deadline
            if row.future.cancelled() or (deadline is not None and now > deadline):
                if row.future.set_running_or_notify_cancel():
                    row.future.set_exception(deadline_exceeded())
            elif self._step(row, now, beside):
                going_on.append(row)
        self._rows = going_on

    def _step(self, row: _Row, now: float, beside: int) -> bool:
        """One more token, or all of them where a turn takes no time. True: the row has more to come."""
        answer = null_answer(row.prompt, row.request.sampling.max_tokens)
        if not row.done:
            row.first_token_at = now
        upto = row.done + 1 if self._token_s else len(answer)
        is_stopped = False
        while row.done < upto and not is_stopped:
            row.done += 1
            is_stopped = row.request.on_token is not None and row.request.on_token(answer[row.done - 1])
        if row.done < len(answer) and not is_stopped:
            return True
        completion = Completion(
            completion_token_ids=answer[: row.done],
            finish_reason=FinishReason.STOP,
            logprobs=None,
            prompt_tokens=len(row.prompt),
            cached_tokens=0,
            mean_batch_size=float(beside),
            times=CompletionTimes(
                wait_s=row.admitted_at - row.submitted_at,
                prefill_s=row.first_token_at - row.admitted_at,
                decode_s=now - row.first_token_at,
            ),
        )
        if row.future.set_running_or_notify_cancel():
            row.future.set_result(completion)
        return False
