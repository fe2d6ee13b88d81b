"""The null engine: no model. It answers with the end of the prompt, at once or at a set pace.

It is for measuring and drilling everything around a model: the queue, the database, the gateway, what a crash leaves
behind. The answer follows from the prompt alone, so that a wrong or swapped answer can be told from a right one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from workers.engine.loop import Row, StepLoop
from workers.engine.request import FinishReason, GenerationRequest

# Tokens of an answer, unless fewer are asked for.
MOST_TOKENS = 16


def null_answer(prompt_token_ids: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """What the null engine answers: the last tokens of the prompt."""
    return prompt_token_ids[-min(max_tokens, MOST_TOKENS) :]


@dataclass(slots=True, eq=False, kw_only=True)
class _Row(Row):
    """done: tokens given so far."""

    answer: tuple[int, ...]
    done: int = 0


class NullEngine(StepLoop[_Row]):
    """One thread that gives every row in hand one token a turn.

    token_s: seconds that a turn takes; 0: none. interactive_slots: as `Engine`, beside `max_batch_size`.
    """

    def __init__(
        self, *, max_batch_size: int, context_length: int, token_s: float = 0.0, interactive_slots: int = 0
    ) -> None:
        super().__init__(max_batch_size=max_batch_size, context_length=context_length)
        self._token_s = token_s
        self._interactive_slots = interactive_slots
        self._rows: list[_Row] = []  # owned by the engine's thread
        self._start()

    def _receive(self, request: GenerationRequest) -> _Row:
        prompt = tuple(request.prompt_token_ids)
        answer = null_answer(prompt, request.sampling.max_tokens)
        return _Row(request=request, prompt_tokens=len(prompt), answer=answer)

    def _admitted(self) -> list[_Row]:
        return list(self._rows)

    def _running_count(self) -> int:
        return len(self._rows)

    def _release(self, row: _Row) -> None:
        if row in self._rows:
            self._rows.remove(row)

    def _turn(self) -> None:
        self._admit()
        if self._token_s:
            time.sleep(self._token_s)
        self._drop_given_up()
        now = time.monotonic()
        beside = len(self._rows)
        for row in self._admitted():
            self._step(row, now, beside)
        self._steps += 1

    def _admit(self) -> None:
        bulk = sum(not row.request.is_interactive for row in self._rows)
        while self._waiting and len(self._rows) < self.max_batch_size + self._interactive_slots:
            if not self._waiting[0].request.is_interactive:
                if bulk >= self.max_batch_size:
                    break  # what comes behind it is no interactive request either
                bulk += 1
            row = self._waiting.popleft()
            row.admitted_at = time.monotonic()
            self._rows.append(row)

    def _step(self, row: _Row, now: float, beside: int) -> None:
        """Give one more token, or all of them where a turn takes no time."""
        if not row.done:
            row.first_token_at = now
        row.steps += 1
        row.shared_rows += beside
        upto = row.done + 1 if self._token_s else len(row.answer)
        is_stopped = False
        while row.done < upto and not is_stopped:
            row.done += 1
            is_stopped = row.request.on_token is not None and row.request.on_token(row.answer[row.done - 1])
        if row.done == len(row.answer) or is_stopped:
            self._answer(row, row.answer[: row.done], FinishReason.STOP, now)
