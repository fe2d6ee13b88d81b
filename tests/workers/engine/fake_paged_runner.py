"""A paged runner whose "model" is a hash: the token after a row depends on every token found through its block table.

Steps run late, as on a device: in order, each at some moment between launch and result. Its cache holds,
for each block and position, the token whose KV would be there, so a block that is shared wrongly, given away too early
or left out of a table makes an answer wrong, and the tests see it.
"""

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from storage.errors import PromptmillError
from tests.workers.engine.fake_runner import VOCAB_SIZE, next_token
from workers.engine.paged_engine import BlockCopy, PagedDecode, PagedPrefill, SamplingArrays, StepResult
from workers.engine.request import DEVICE_FAILED


@dataclass
class Ticket:
    first_source: int
    work: Callable[[], StepResult]
    answer: StepResult | None = None


class FakePagedRunner:
    vocab_size = VOCAB_SIZE

    def __init__(
        self,
        blocks: int,
        block_size: int,
        max_rows: int,
        context_length: int,
        *,
        reserved_rows: int = 0,
        prefix_min_blocks: int = 0,
        copies_blocks: bool = True,
        seed: int = 0,
    ) -> None:
        self.copies_blocks = copies_blocks
        self.copied_tokens = 0
        self.copies_fail = False
        self.block_size = block_size
        self.context_length = context_length
        self.row_buckets = [bucket for bucket in (1, 2, 4, 8, 16, 32, 64) if bucket < max_rows] + [max_rows]
        if reserved_rows:
            self.row_buckets.append(max_rows + reserved_rows)
        self.max_rows = max_rows = max_rows + reserved_rows
        widest = -(-context_length // block_size)
        self.table_widths = [width for width in (1, 2, 4, 8, 16, 32, 64) if width < widest] + [widest]
        self.prefix_min_blocks = prefix_min_blocks
        self.prefix_min_rows = 2
        self.cache = np.full((blocks, block_size), -1, dtype=np.int64)
        self.pool = np.full(4 * max_rows, -1, dtype=np.int64)
        self.ring_at = 0
        self.flight: deque[Ticket] = deque()
        self.random = random.Random(seed)
        self.prefilled_tokens = 0
        self.prefix_rows = 0
        self.calls: list[PagedPrefill | PagedDecode] = []
        self.decode_shapes: list[tuple[int, int]] = []  # (bucket, rows)
        self.most_in_flight = 0
        self.fail_on_token: int | None = None
        self.fails_to_start = False
        self.is_lost = False
        self.is_closed = False
        self.gate = threading.Event()
        self.gate.set()

    def start(self, report: Callable[[str, int, int], None]) -> int:
        if self.fails_to_start:
            raise RuntimeError("no device")
        report("warming up", 1, 1)
        return len(self.cache)

    def prefill(self, call: PagedPrefill) -> Ticket:
        self._check(call.token_ids)
        assert call.lengths.min() > 0
        assert call.block_table.max() < len(self.cache) and call.block_table.min() >= 0
        self.prefilled_tokens += len(call.token_ids)
        self.calls.append(call)
        count = len(call.finishing)
        if self.ring_at + count > 2 * self.max_rows:
            self.ring_at = 0
        first = 2 * self.max_rows + self.ring_at
        self.ring_at += count

        def work() -> StepResult:
            at = 0
            contexts = []
            for table, past, length in zip(call.block_table, call.past_lengths, call.lengths, strict=True):
                for offset in range(length):
                    self._write(table, past + offset, int(call.token_ids[at + offset]))
                at += length
                contexts.append(self._context(table, past + length))
            fed = np.zeros(count, dtype=np.int64)
            result = _choose([contexts[row] for row in call.finishing], call.sampling, fed)
            self.pool[first : first + count] = result.token_ids
            return result

        return self._launch(first, work)

    def decode(self, call: PagedDecode) -> Ticket:
        count = len(call.sources)
        assert count <= call.rows and call.rows in self.row_buckets
        assert call.block_table.shape == (count, call.table_width) and call.table_width in self.table_widths
        assert call.block_table.max() < len(self.cache) and call.block_table.min() >= 0
        self.calls.append(call)
        self.decode_shapes.append((call.rows, count))
        shared = len(call.prefix_blocks) * self.block_size
        if shared:
            assert len(call.prefix_blocks) >= self.prefix_min_blocks > 0 and count >= self.prefix_min_rows
            assert ((call.past_lengths - shared) < call.table_width * self.block_size).all()
            self.prefix_rows += count
        first = self.decode_source(is_prefix=shared > 0)

        def work() -> StepResult:
            prefix = self.cache[list(call.prefix_blocks)].reshape(-1)
            fed = self.pool[call.sources]
            assert fed.min() >= 0
            contexts = []
            for token, table, past in zip(fed, call.block_table, call.past_lengths - shared, strict=True):
                self._write(table, past, int(token))
                contexts.append(np.concatenate([prefix, self._context(table, past + 1)]))
            result = _choose(contexts, call.sampling, fed)
            self.pool[first : first + call.rows] = 0  # padding rows write, too
            self.pool[first : first + count] = result.token_ids
            return result

        return self._launch(first, work)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        assert self.copies_blocks and copies
        if self.copies_fail:
            raise RuntimeError("the copy is refused")
        self.copied_tokens += sum(copy.count for copy in copies)

        def work() -> StepResult:
            for copy in copies:
                assert 0 < copy.count <= self.block_size and copy.source != copy.target
                copied = self.cache[copy.source, : copy.count]
                assert (copied >= 0).all(), "positions are copied that nothing has been computed for"
                self.cache[copy.target, : copy.count] = copied
            return StepResult(np.zeros(0, dtype=np.int64))

        self._launch(0, work)

    def decode_source(self, *, is_prefix: bool) -> int:
        return self.max_rows if is_prefix else 0

    def first_source(self, ticket: Ticket) -> int:
        return ticket.first_source

    def result(self, ticket: Ticket) -> StepResult:
        self.gate.wait()
        self._run_until(ticket)
        assert ticket.answer is not None
        return ticket.answer

    def check(self) -> None:
        if self.is_lost:
            raise PromptmillError("the device is gone", code=DEVICE_FAILED, retryable=True)

    def close(self) -> None:
        self.is_closed = True

    def _launch(self, first_source: int, work: Callable[[], StepResult]) -> Ticket:
        ticket = Ticket(first_source, work)
        self.flight.append(ticket)
        self.most_in_flight = max(self.most_in_flight, len(self.flight))
        while self.flight and self.random.random() < 0.3:
            self._run_until(self.flight[0])
        return ticket

    def _run_until(self, ticket: Ticket) -> None:
        while ticket.answer is None:
            first = self.flight.popleft()
            first.answer = first.work()

    def _write(self, table: np.ndarray, position: int, token: int) -> None:
        block = table[position // self.block_size]
        assert block > 0, "a position of a real row fell into the scratch block"
        self.cache[block, position % self.block_size] = token

    def _context(self, table: np.ndarray, length: int) -> np.ndarray:
        needed = -(-int(length) // self.block_size)
        return self.cache[table[:needed]].reshape(-1)[:length]

    def _check(self, token_ids: np.ndarray) -> None:
        if self.fail_on_token is not None and self.fail_on_token in token_ids:
            raise RuntimeError(f"token {self.fail_on_token} breaks the model")


def _choose(contexts: list[np.ndarray], sampling: SamplingArrays | None, fed: np.ndarray) -> StepResult:
    """Greedy rows take the hash; others move on by their uniform, penalized ones by how many tokens count."""
    token_ids = np.array([next_token(context) for context in contexts], dtype=np.int64)
    if sampling is None:
        return StepResult(token_ids)
    token_ids += np.where(sampling.top_k == 1, 0, sampling.uniform * VOCAB_SIZE).astype(np.int64)
    extras = sampling.extras
    if extras is None:
        return StepResult(token_ids % VOCAB_SIZE)
    counted = extras.seen_counts.sum(axis=1) + extras.fed_counts
    token_ids += np.where(extras.frequency_penalty != 0, counted, 0).astype(np.int64)
    token_ids %= VOCAB_SIZE
    top_ids = (token_ids[:, None] + np.arange(20)) % VOCAB_SIZE
    return StepResult(token_ids, -token_ids.astype(np.float32), top_ids, -top_ids.astype(np.float32))
