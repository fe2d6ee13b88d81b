"""A runner whose "model" is a hash: the logits after a row depend on every token of its context, in order.

Its cache holds, for each slot and position, the token whose KV would be there, padding and all. So a row that is
copied short, overwritten by padding or moved to the wrong slot answers wrongly, and the tests see it.
"""

import threading
from collections.abc import Sequence

import numpy as np

from workers.engine.scheduler import PrefillCall

VOCAB_SIZE = 97


def next_token(context: Sequence[int]) -> int:
    """The token this model puts after `context`."""
    state = 7
    for token in context:
        state = (state * 1_000_003 + int(token) + 1) % 2_147_483_647
    return state % VOCAB_SIZE


def continuation(prompt: Sequence[int], max_tokens: int, stop: frozenset[int] = frozenset()) -> tuple[list[int], str]:
    """What the engine must answer, computed one sequence at a time."""
    context, answer = list(prompt), []
    while len(answer) < max_tokens:
        token = next_token(context)
        if token in stop:
            return answer, "stop"
        answer.append(token)
        context.append(token)
    return answer, "length"


class FakeRunner:
    def __init__(self, slots: int, context_length: int) -> None:
        self.slots = slots
        self.context_length = context_length
        self.vocab_size = VOCAB_SIZE
        self.cache = np.full((slots, context_length), -1, dtype=np.int64)
        self.decode_shapes: list[tuple[int, int]] = []  # (bucket, wanted rows)
        self.prefilled_tokens = 0
        self.copied_tokens = 0
        self.fail_on_token: int | None = None  # a run that is fed this token raises
        self.gate = threading.Event()
        self.gate.set()

    def prefill(self, call: PrefillCall, token_ids: Sequence[np.ndarray], *, want_logits: bool) -> np.ndarray:
        self.gate.wait()
        assert call.past == 0 or len(call.lengths) == 1, "a past only with a single row"
        padded = max(call.lengths)
        assert call.past + padded <= self.context_length
        logits = []
        for row, (ids, length) in enumerate(zip(token_ids, call.lengths, strict=True)):
            self._check(ids)
            slot = call.first_slot + row
            self.cache[slot, call.past : call.past + padded] = 0
            self.cache[slot, call.past : call.past + length] = ids[:length]
            logits.append(self._logits(slot, call.past + length))
            self.prefilled_tokens += length
        return np.stack(logits if want_logits else logits[:1])

    def decode(self, token_ids: np.ndarray, lengths: np.ndarray, wanted_rows: Sequence[int]) -> np.ndarray:
        self.gate.wait()
        self._check(token_ids[list(wanted_rows)])
        for slot, (token, length) in enumerate(zip(token_ids, lengths, strict=True)):
            assert length < self.context_length
            self.cache[slot, length] = token
        self.decode_shapes.append((len(token_ids), len(wanted_rows)))
        return np.stack([self._logits(slot, lengths[slot] + 1) for slot in wanted_rows])

    def copy_rows(self, source: int, target: int, length: int) -> None:
        self.cache[target, :length] = self.cache[source, :length]
        self.copied_tokens += length

    def _logits(self, slot: int, length: int) -> np.ndarray:
        logits = np.zeros(VOCAB_SIZE, dtype=np.float32)
        logits[next_token(self.cache[slot, :length])] = 10.0
        return logits

    def _check(self, token_ids: np.ndarray) -> None:
        if self.fail_on_token is not None and self.fail_on_token in token_ids:
            raise RuntimeError(f"token {self.fail_on_token} breaks the model")
