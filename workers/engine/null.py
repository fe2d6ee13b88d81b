"""The null engine: no model. It answers with the end of the prompt, at once or at a set pace.

It is for measuring and drilling everything around a model: the queue, the database, the gateway, what a crash leaves
behind. The answer follows from the prompt alone, so that a wrong or swapped answer can be told from a right one. At a
set pace it steps like an engine on a GPU: prompts go first, up to a budget of tokens a step, and such a step gives
their first token; any other gives one token to every row. Its pretended device is one step ahead, as a real one is.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from workers.engine.loop import Row, StepLoop
from workers.engine.request import FinishReason, GenerationRequest
from workers.engine.scheduler import plan_pieces

# Tokens of an answer, unless fewer are asked for, or the end of an answer is to be ignored.
MOST_TOKENS = 16
# A step of prompts takes as long as one of so many tokens at least: its weights are read once, whatever it computes.
LEAST_PREFILL_TOKENS = 256


def null_answer(prompt_token_ids: tuple[int, ...], max_tokens: int, *, ignore_eos: bool = False) -> tuple[int, ...]:
    """What the null engine answers: the last tokens of the prompt, with `ignore_eos` as many as are asked for."""
    return prompt_token_ids[-(max_tokens if ignore_eos else min(max_tokens, MOST_TOKENS)) :]


@dataclass(slots=True, eq=False, kw_only=True)
class _Row(Row):
    """done: tokens given so far. uncomputed: prompt tokens that its first token waits for."""

    answer: tuple[int, ...]
    done: int = 0
    uncomputed: int = 0


class NullEngine(StepLoop[_Row]):
    """One thread that gives every row in hand one token a turn.

    token_s: seconds that such a turn takes; 0: none. prefill_tokens_per_s: prompts are computed at this rate, at most
    `prefill_budget_tokens` in a turn; 0: they cost nothing. interactive_slots: as `Engine`, beside `max_batch_size`.
    """

    def __init__(
        self,
        *,
        max_batch_size: int,
        context_length: int,
        token_s: float = 0.0,
        prefill_tokens_per_s: float = 0.0,
        prefill_budget_tokens: int = 8448,
        interactive_slots: int = 0,
    ) -> None:
        super().__init__(max_batch_size=max_batch_size, context_length=context_length)
        self._token_s = token_s
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._prefill_budget_tokens = prefill_budget_tokens
        self._interactive_slots = interactive_slots
        self._rows: dict[_Row, None] = {}  # owned by the engine's thread
        self._free_at = 0.0  # when the pretended device is done with what it was given
        self._steps_follow = False  # the next step was launched while the last one ran
        self._start()

    def _receive(self, request: GenerationRequest) -> _Row:
        prompt = tuple(request.prompt_token_ids)
        sampling = request.sampling
        answer = null_answer(prompt, sampling.max_tokens, ignore_eos=sampling.ignore_eos)
        uncomputed = len(prompt) if self._prefill_tokens_per_s else 0
        return _Row(request=request, prompt_tokens=len(prompt), answer=answer, uncomputed=uncomputed)

    def _admitted(self) -> list[_Row]:
        return list(self._rows)

    def _running_count(self) -> int:
        return len(self._rows)

    def _release(self, row: _Row) -> None:
        self._rows.pop(row, None)

    def _turn(self) -> None:
        self._admit()
        rows = self._prefill()
        if rows is None:
            rows = self._admitted()
            if self._token_s:
                self._wait_for_device(self._token_s)
        self._drop_given_up()
        now = time.monotonic()
        stepped = [row for row in rows if row in self._rows]
        for row in stepped:
            self._step(row, now, len(stepped))
        self._steps += 1
        self._steps_follow = bool(self._rows)

    def _prefill(self) -> list[_Row] | None:
        """Compute prompts, oldest first, up to the budget. Returns the rows that then have theirs; None: no prompts."""
        rows = [row for row in self._rows if row.uncomputed]
        pieces = plan_pieces([row.uncomputed for row in rows], self._prefill_budget_tokens)
        if not pieces:
            return None
        self._wait_for_device(max(LEAST_PREFILL_TOKENS, sum(pieces)) / self._prefill_tokens_per_s)
        for row, piece in zip(rows, pieces, strict=False):
            row.uncomputed -= piece
        return [row for row in rows if not row.uncomputed]

    def _wait_for_device(self, step_s: float) -> None:
        """A step begins when the one before it ends, as far as the host is no more than a step behind."""
        now = time.monotonic()
        self._free_at = max(self._free_at, now - step_s) + step_s if self._steps_follow else now + step_s
        time.sleep(max(0.0, self._free_at - now))

    def _admit(self) -> None:
        bulk = sum(not row.request.is_interactive for row in self._rows)
        while self._waiting and len(self._rows) < self.max_batch_size + self._interactive_slots:
            if not self._waiting[0].request.is_interactive:
                if bulk >= self.max_batch_size:
                    break  # what comes behind it is no interactive request either
                bulk += 1
            row = self._waiting.popleft()
            row.admitted_at = time.monotonic()
            self._rows[row] = None

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
