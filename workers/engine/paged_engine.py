"""The step loop of the CUDA flavour: token ids in, token ids out, one step ahead of the device.

One thread owns the runner. While the device computes step t, the host reads step t-1 and launches step t+1; the token
that step t chooses is fed to step t+1 on the device. So what ends a request by its content (a stop token, `on_token`)
is seen one step late, and the token computed in between is dropped. What a step in flight may still touch, its rows'
blocks above all, is given back only when that step has been read.

Rows live in fixed places of a few arrays (`_Places`), so that a step costs a handful of array operations however many
rows it has; only rows with something to do for themselves are visited one by one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import structlog

from workers.engine.blocks import SCRATCH_BLOCK, BlockPool, Digest, Tail, TokenIds, blocks_for, chain_digests
from workers.engine.loop import Row, StepLoop
from workers.engine.request import (
    FinishReason,
    GenerationRequest,
    SamplingParameters,
    TokenLogprobs,
    engine_failed,
)
from workers.engine.scheduler import (
    Int32s,
    bucket_for,
    count_preempted,
    goes_first,
    holds_admission,
    plan_pieces,
    prefers_prefill,
    put_back,
    shared_prefix,
)

log = structlog.get_logger()

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]

# Steps launched and not yet read: one that runs and one that waits behind it.
STEPS_IN_FLIGHT = 2
# How far behind the head of the line a request may be admitted while those before it wait for a prefix.
_LOOKAHEAD_PER_ROW = 4
# Futures and deadlines are looked at this often, or more rarely if that takes more than a twentieth of the time.
_SWEEP_S = 0.02
_SWEEP_SHARE = 0.05
# Uniforms are drawn this many tokens ahead.
_UNIFORMS = 64
_BELOW_ONE = np.float32(1 - 2**-24)
_SEED_MASK = 2**64 - 1
# How fast the expected length of answers follows those seen: the share of one answer in the running mean.
_ANSWER_WEIGHT = 1 / 32


@dataclass(frozen=True, slots=True)
class SamplingExtras:
    """What the rarer requests ask: see `build_sampler_graph`. [n] or, for sparse pairs, [n, width]."""

    fed_counts: Float32s
    seen_ids: Int64s
    seen_counts: Float32s
    frequency_penalty: Float32s
    presence_penalty: Float32s
    bias_ids: Int64s
    bias_values: Float32s


@dataclass(frozen=True, slots=True)
class SamplingArrays:
    """How each row of a step draws its token; arrays of [n]. top_k: vocab_size keeps all, 1 is greedy."""

    inverse_temperature: Float32s
    top_k: Int64s
    top_p: Float32s
    uniform: Float32s
    extras: SamplingExtras | None


@dataclass(frozen=True, slots=True)
class PagedPrefill:
    """Prompt pieces of R rows packed into T tokens.

    token_ids: int64 [T]. lengths, past_lengths: int32 [R], tokens of each piece and computed before it. block_table:
    int32 [R, M]. finishing: int64 [S], the rows whose prompt ends in this piece and which get a token. sampling: for
    those S rows; None if all are greedy.
    """

    token_ids: Int64s
    lengths: Int32s
    past_lengths: Int32s
    block_table: Int32s
    finishing: Int64s
    sampling: SamplingArrays | None


@dataclass(frozen=True, slots=True)
class PagedDecode:
    """One token for each of n rows, run in a bucket of `rows` rows and `table_width` blocks a row.

    prefix_blocks: blocks that all rows begin with and that are to be read once for all; the tables leave them out.

    sources: int64 [n], where each row's token lies on the device: an earlier step's `first_source` plus its place
    there. past_lengths: int32 [n]. block_table: int32 [n, table_width].
    """

    rows: int
    table_width: int
    sources: Int64s
    past_lengths: Int32s
    block_table: Int32s
    sampling: SamplingArrays | None
    prefix_blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """The first `count` positions of a block, to be copied into another."""

    source: int
    target: int
    count: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """token_ids: int64 [n]. The rest where extras were asked for: logprob [n], top_ids and top_logprobs [n, k]."""

    token_ids: Int64s
    logprob: Float32s | None = None
    top_ids: Int64s | None = None
    top_logprobs: Float32s | None = None


class PagedRunner(Protocol):
    """What the device does for the engine; see `CudaRunner`. Every method is called by the engine's thread alone.

    Steps run one after the other, and a decode step may be fed by steps that have not been read.
    prefix_min_blocks, prefix_min_rows: a prefix of so many blocks that so many rows of a decode step share can be read
    once for all of them; no blocks: none.
    copies_blocks: whether `copy_blocks` can be called.
    """

    vocab_size: int
    context_length: int
    block_size: int
    max_rows: int
    row_buckets: Sequence[int]
    table_widths: Sequence[int]
    prefix_min_blocks: int
    prefix_min_rows: int
    copies_blocks: bool

    def start(self, report: Callable[[str, int, int], None]) -> int:
        """Load, allocate, warm up; returns the number of blocks, block 0 included."""
        ...

    def prefill(self, call: PagedPrefill) -> Any: ...

    def decode(self, call: PagedDecode) -> Any: ...

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy positions between blocks, behind all steps launched so far and before those to come."""
        ...

    def first_source(self, ticket: Any) -> int: ...

    def decode_source(self, *, is_prefix: bool) -> int:
        """The first source of a decode step, over a shared prefix or not."""
        ...

    def result(self, ticket: Any) -> StepResult: ...

    def check(self) -> None:
        """Raise PromptmillError `device_failed` if the device will run nothing any more."""
        ...

    def close(self) -> None:
        """Give back what `start` took. Called also when that failed."""
        ...


@dataclass(slots=True, eq=False, kw_only=True)
class _Row(Row):
    """context: the prompt, and after a preemption what was answered so far."""

    context: TokenIds
    max_new: int
    digests: list[Digest]
    place: int = -1
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    registered: int = 0
    sequence: int = 0
    is_retired: bool = False
    answered: list[int] = field(default_factory=list)  # before the last preemption
    counts: dict[int, int] = field(default_factory=dict)

    def parent(self, index: int) -> Digest:
        """The digest of all before a block."""
        return self.digests[index - 1] if index else b""


@dataclass(slots=True, eq=False)
class _Step:
    """A launched step: which places get which of its tokens, and which rows it touches."""

    ticket: Any
    places: Int64s
    touched: Int64s
    is_prefill: bool


class _Places:
    """The arrays that steps are built from; one element for each row the device can hold."""

    def __init__(self, count: int, context_length: int, max_blocks: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.rows: list[_Row | None] = [None] * count
        self.free = list(range(count - 1, -1, -1))
        self.lengths = np.zeros(count, dtype=np.int32)  # positions whose KV is computed or in flight
        self.launched = np.zeros(count, dtype=np.int64)  # new tokens chosen or in flight
        self.produced = np.zeros(count, dtype=np.int64)  # new tokens read
        self.limits = np.zeros(count, dtype=np.int64)
        self.in_flight = np.zeros(count, dtype=np.int64)
        self.is_live = np.zeros(count, dtype=bool)  # wants its tokens
        self.is_ready = np.zeros(count, dtype=bool)  # has its prompt computed
        self.obeys_stop = np.zeros(count, dtype=bool)
        self.is_attentive = np.zeros(count, dtype=bool)  # each of its tokens is looked at by the host
        self.is_interactive = np.zeros(count, dtype=bool)
        self.tables = np.full((count, max_blocks), SCRATCH_BLOCK, dtype=np.int32)
        self.block_counts = np.zeros(count, dtype=np.int64)
        self.expected_blocks = np.zeros(count, dtype=np.int64)
        self.sources = np.zeros(count, dtype=np.int64)
        self.tokens = np.zeros((count, context_length + 1), dtype=np.int32)
        self.steps = np.zeros(count, dtype=np.int64)
        self.shared_rows = np.zeros(count, dtype=np.int64)
        self.is_plain = np.ones(count, dtype=bool)
        self.wants_extras = np.zeros(count, dtype=bool)
        self.inverse_temperature = np.ones(count, dtype=np.float32)
        self.top_k = np.ones(count, dtype=np.int64)
        self.top_p = np.ones(count, dtype=np.float32)
        self.uniforms = np.zeros((count, _UNIFORMS), dtype=np.float32)
        self.uniforms_from = np.full(count, -1, dtype=np.int64)

    def settle(self, row: _Row) -> int:
        """Give a row a place and write down what it asks."""
        place = self.free.pop()
        sampling = row.request.sampling
        extras = _wants_extras(sampling)
        is_greedy = sampling.is_greedy
        answered = len(row.answered)
        row.place = place
        self.rows[place] = row
        self.lengths[place] = 0
        self.launched[place] = self.produced[place] = answered
        self.tokens[place, :answered] = row.answered
        self.limits[place] = row.max_new
        self.is_live[place] = True
        self.is_ready[place] = False
        self.obeys_stop[place] = not sampling.ignore_eos
        self.is_attentive[place] = row.request.on_token is not None or extras
        self.is_interactive[place] = row.request.is_interactive
        self.steps[place] = self.shared_rows[place] = 0
        self.is_plain[place] = is_greedy and not extras
        self.wants_extras[place] = extras
        self.inverse_temperature[place] = 1.0 if is_greedy else 1.0 / sampling.temperature
        self.top_k[place] = 1 if is_greedy else min(sampling.top_k or self.vocab_size, self.vocab_size)
        self.top_p[place] = sampling.top_p
        self.uniforms_from[place] = -1
        return place

    def hold(self, place: int, blocks: Sequence[int]) -> None:
        """Append blocks to a row's table."""
        held = int(self.block_counts[place])
        self.tables[place, held : held + len(blocks)] = blocks
        self.block_counts[place] = held + len(blocks)

    def leave(self, row: _Row) -> None:
        """Free a row's place."""
        place = row.place
        row.steps += int(self.steps[place])
        row.shared_rows += int(self.shared_rows[place])
        self.tables[place, : self.block_counts[place]] = SCRATCH_BLOCK
        self.block_counts[place] = self.expected_blocks[place] = 0
        self.is_live[place] = self.is_ready[place] = self.is_interactive[place] = False
        self.rows[place] = None
        self.free.append(place)
        row.place = -1

    def row(self, place: int) -> _Row:
        row = self.rows[place]
        assert row is not None
        return row

    def answer(self, row: _Row) -> list[int]:
        answer: list[int] = self.tokens[row.place, : self.produced[row.place]].tolist()
        return answer

    def decoding(self) -> Int64s:
        """Places that the next decode step runs."""
        return np.flatnonzero(self.is_ready & (self.launched < self.limits))

    def draw_uniforms(self, places: Int64s) -> Float32s:
        """One number in [0, 1) for each row's next token: the stream of its seed, at its position."""
        chunks = self.launched[places] // _UNIFORMS
        for index in np.flatnonzero(chunks != self.uniforms_from[places]):
            place, chunk = int(places[index]), int(chunks[index])
            seed = self.row(place).request.sampling.seed & _SEED_MASK
            stream = np.random.Generator(np.random.Philox(key=seed)).random((chunk + 1) * _UNIFORMS)
            self.uniforms[place] = np.minimum(stream[-_UNIFORMS:].astype(np.float32), _BELOW_ONE)
            self.uniforms_from[place] = chunk
        drawn: Float32s = self.uniforms[places, self.launched[places] % _UNIFORMS]
        return drawn


class PagedEngine(StepLoop[_Row]):
    """Continuous batching over a runner's paged KV cache; the same face as `Engine`.

    stop_token_ids: end a request unless it ignores them. prefill_budget_tokens: prompt tokens in one step.
    prefill_burst_tokens: prompt tokens between two decode steps at most. prefill_wanted_tokens: where not all that wait
    can be admitted, prompts are admitted this many tokens at a time. prefix_reuse: share blocks of equal beginnings.
    least_copied_tokens: where a beginning ends within a block, so many of its tokens are worth a copy, and a wait for a
    row that is about to compute them. interactive_rows: of the runner's rows, those that other requests leave free.
    interactive_burst_tokens: prompt tokens in one step, and between two decode steps, while an interactive request is
    in hand.
    Raises what `runner.start` raises.
    """

    def __init__(
        self,
        runner: PagedRunner,
        *,
        stop_token_ids: Iterable[int],
        prefill_budget_tokens: int = 8448,
        prefill_burst_tokens: int = 65536,
        prefill_wanted_tokens: int = 2048,
        prefix_reuse: bool = True,
        least_copied_tokens: int = 16,
        interactive_rows: int = 0,
        interactive_burst_tokens: int = 2048,
        report: Callable[[str, int, int], None] = lambda *_: None,
    ) -> None:
        super().__init__(max_batch_size=runner.max_rows - interactive_rows, context_length=runner.context_length)
        self._runner = runner
        self._report = report
        self._prefill_budget_tokens = prefill_budget_tokens
        self._prefill_burst_tokens = prefill_burst_tokens
        self._prefill_wanted_tokens = min(prefill_wanted_tokens, prefill_budget_tokens)
        self._prefix_reuse = prefix_reuse
        self._least_copied_tokens = least_copied_tokens
        self._interactive_rows = interactive_rows
        self._interactive_burst_tokens = interactive_burst_tokens
        self._stop_token_ids = [token for token in stop_token_ids if token < runner.vocab_size]
        self._is_stop = np.zeros(runner.vocab_size, dtype=bool)
        self._is_stop[self._stop_token_ids] = True
        self._prefilling: list[_Row] = []  # this and all below: owned by the engine's thread
        self._computing: dict[Digest, int] = {}  # contents that an admitted row is about to compute
        self._flight: deque[_Step] = deque()  # launched and not read, oldest first
        self._burst_left_tokens = prefill_burst_tokens
        self._undecoded = 0  # tokens of prefills that wait on the device for the next decode step
        self._sequence = 0
        self._answer_share = 1.0  # of the new tokens allowed, those that answers took, a running mean
        self._next_sweep_at = 0.0
        self._running = 0
        self._interactive_running = 0
        self._is_turn_of_bulk = False  # which kind is admitted next where both wait and neither goes first
        self._preemptions = 0
        self._start()

    def _receive(self, request: GenerationRequest) -> _Row:
        prompt = np.asarray(request.prompt_token_ids, dtype=np.int32)
        return _Row(
            request=request,
            prompt_tokens=prompt.size,
            context=prompt,
            max_new=min(request.sampling.max_tokens, self.context_length - prompt.size + 1),
            digests=chain_digests(prompt, self._runner.block_size) if self._prefix_reuse else [],
        )

    def _running_count(self) -> int:
        return self._running

    # --- the engine's thread ----------------------------------------------------------------------------------------

    def _set_up(self) -> None:
        runner = self._runner
        count = runner.start(self._report)
        self._pool = BlockPool(count, runner.block_size)
        self.context_length = min(runner.context_length, (count - 1) * runner.block_size)
        max_blocks = blocks_for(self.context_length, runner.block_size)
        self._places = _Places(runner.max_rows, self.context_length, max_blocks, runner.vocab_size)

    def _settle(self) -> None:
        self._read_all()

    def _fail_all(self, error: Exception) -> None:
        self._flight.clear()
        self._places.in_flight[:] = 0
        super()._fail_all(error)
        self._pool.check_integrity()

    def _tear_down(self) -> None:
        self._runner.close()

    def _turn(self) -> None:
        """Launch the next step, and read the oldest once enough are in flight or nothing can be launched."""
        self._drop_given_up()
        self._admit()
        if self._launch() and len(self._flight) < STEPS_IN_FLIGHT:
            return
        if self._flight:
            self._read(self._flight.popleft())

    def _launch(self) -> bool:
        if len(self._flight) >= STEPS_IN_FLIGHT:
            return False
        places = self._places.decoding()
        if not places.size:
            self._undecoded = 0
        can_prefill = bool(self._prefilling) and self._undecoded < self._most_undecoded()
        if prefers_prefill(
            can_prefill=can_prefill, can_decode=places.size > 0, burst_left_tokens=self._burst_left_tokens
        ):
            self._prefill()
        elif places.size:
            self._decode(places)
        else:
            return False
        return True

    def _drop_given_up(self) -> None:
        now = time.monotonic()
        if now < self._next_sweep_at:
            return
        super()._drop_given_up()
        after = time.monotonic()
        self._next_sweep_at = after + max(_SWEEP_S, (after - now) / _SWEEP_SHARE)

    def _admitted(self) -> list[_Row]:
        return [row for row in self._places.rows if row is not None and not row.is_retired]

    # --- admission --------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give places and blocks to waiting requests, interactive ones and then the oldest first.

        A request whose beginning an admitted row is about to compute is passed over until it can share it. For an
        interactive one that `goes_first`, bulk rows are preempted where blocks are short.
        """
        if not self._waiting or not self._places.free:
            return
        is_interactive = self._waiting[0].request.is_interactive
        holds_bulk = self._bulk_places() <= 0 or self._waits_for_room()
        if holds_bulk and not is_interactive:
            return
        copies: list[BlockCopy] = []
        copying: list[_Row] = []
        passed_over: deque[_Row] = deque()
        try:
            self._fill_places(holds_bulk, passed_over, copies, copying)
        finally:
            self._waiting.extendleft(reversed(passed_over))
        if copies:
            try:
                self._runner.copy_blocks(copies)
            except Exception as error:
                self._fail_run(copying, error)
            finally:
                self._pool.release([copy.source for copy in copies])

    def _fill_places(
        self, holds_bulk: bool, passed_over: deque[_Row], copies: list[BlockCopy], copying: list[_Row]
    ) -> None:
        """Seat waiting rows until one must wait for room. Adds to the last three: see `_admit`."""
        takes_turns = False
        looks = self.max_batch_size * _LOOKAHEAD_PER_ROW
        while self._waiting and self._places.free and looks:
            row = self._waiting[0]
            is_interactive = row.request.is_interactive
            if not is_interactive and (holds_bulk or self._bulk_places() <= 0):
                return  # what comes behind it is no interactive request either
            is_first = is_interactive and self._goes_first(row)
            if is_interactive and not is_first and self._is_turn_of_bulk and self._bulk_waits():
                takes_turns = True
                passed_over.append(self._waiting.popleft())
                continue
            looks -= 1
            beginning = self._find_beginning(row)
            if beginning is None:
                passed_over.append(self._waiting.popleft())
                continue
            shared, tail, length = beginning
            if tail is not None and not self._fits(row, shared, held=(tail.block,)):
                tail = None
            if tail is None and not self._fits(row, shared):
                if is_first and self._make_way(row, shared):
                    continue
                return
            if tail is not None:
                self._pool.hold(tail.block)  # until it is copied, or taking blocks could forget it
            self._seat(row, shared, copied=length if tail is not None else 0)
            self._waiting.popleft()
            if tail is not None:
                copies.append(BlockCopy(tail.block, row.blocks[len(shared)], length))
                copying.append(row)
            if not is_first:
                self._is_turn_of_bulk = is_interactive
                if takes_turns:
                    return

    def _find_beginning(self, row: _Row) -> tuple[list[int], Tail | None, int] | None:
        """Blocks to share, the block to copy the next positions from, and how many; None if the row had better wait."""
        usable = row.digests[: (len(row.context) - 1) // self._pool.block_size]
        shared = self._pool.match(usable)
        if len(shared) < len(usable) and self._is_awaited(row, usable[len(shared)]):
            return None
        tail, length = self._find_tail(row, shared)
        if tail is not None and not tail.is_computed:
            return None if self._is_awaited(row, tail) else (shared, None, 0)
        return shared, tail, length

    def _bulk_places(self) -> int:
        """Places that requests for which nobody waits may take."""
        bulk = self._running - self._interactive_running
        return min(len(self._places.free), self.max_batch_size - bulk)

    def _bulk_waits(self) -> bool:
        return bool(self._waiting) and not self._waiting[-1].request.is_interactive  # interactive ones come first

    def _goes_first(self, row: _Row) -> bool:
        """See `goes_first`; nor where a bulk request waits that would not fit beside it, and none runs."""
        places = self._places
        if self._running == self._interactive_running and self._bulk_waits():
            oldest = next(other for other in self._waiting if not other.request.is_interactive)
            room = self._pool.available - self._growth()
            if self._expected_blocks(oldest) + self._expected_blocks(row) > room:
                return False
        held = np.maximum(places.block_counts, places.expected_blocks)[places.is_interactive]
        return goes_first(
            rows=self._interactive_running,
            blocks=int(held.sum()),
            wanted_blocks=self._expected_blocks(row),
            reserved_rows=self._interactive_rows,
            all_blocks=self._pool.count - 1,
        )

    def _is_awaited(self, row: _Row, content: Digest | Tail) -> bool:
        """Whether a row had better wait for a content that another is about to compute.

        An interactive one waits for nobody but its like: bulk prompts may come long after it.
        """
        if not row.request.is_interactive:
            return isinstance(content, Tail) or content in self._computing
        others = [other for other in self._prefilling if other.request.is_interactive]
        if isinstance(content, Tail):
            return any(content.block in other.blocks for other in others)
        return any(content in other.digests[other.registered :] for other in others)

    def _make_way(self, row: _Row, shared: Sequence[int]) -> bool:
        """Preempt the youngest bulk rows for an interactive request; False if that would not make room for it.

        The oldest bulk row is left alone, so that there is always one that comes to its end.
        """
        if not self._count_in_the_way(row, shared):
            return False
        self._read_all()  # which may end rows
        if self._fits(row, shared):
            return True
        for other in self._youngest_bulk()[: self._count_in_the_way(row, shared)]:
            log.info("request_preempted", running=self._running, waiting=len(self._waiting), reason="interactive")
            self._preempt(other)
        return self._fits(row, shared)

    def _count_in_the_way(self, row: _Row, shared: Sequence[int]) -> int:
        pool, places = self._pool, self._places
        room = pool.available - pool.idle_among(shared) - self._growth()
        others = self._youngest_bulk()[:-1]
        at = [other.place for other in others]
        growth = np.maximum(places.expected_blocks[at] - places.block_counts[at], 0).tolist()
        freed = pool.count_freed([other.blocks for other in others])
        gains = [blocks + grown for blocks, grown in zip(freed, growth, strict=True)]
        return count_preempted(self._expected_blocks(row) - len(shared) - room, gains)

    def _youngest_bulk(self) -> list[_Row]:
        rows = [row for row in self._admitted() if not row.request.is_interactive]
        return sorted(rows, key=lambda row: row.sequence, reverse=True)

    def _find_tail(self, row: _Row, shared: Sequence[int]) -> tuple[Tail | None, int]:
        """The block to copy the row's next positions from, and how many; None where that is not worth a copy."""
        if not self._prefix_reuse or not self._runner.copies_blocks:
            return None, 0
        start = len(shared) * self._pool.block_size
        end = min(start + self._pool.block_size, len(row.context) - 1)  # the last token is computed, for its logits
        if end - start < self._least_copied_tokens:
            return None, 0
        tail, length = self._pool.best_tail(row.parent(len(shared)), row.context[start:end])
        return (tail, length) if length >= self._least_copied_tokens else (None, 0)

    def _waits_for_room(self) -> bool:
        """A dry run of admission that ignores prefixes: see `holds_admission`. Only bulk rows make room for others."""
        if not bool((self._places.is_ready & ~self._places.is_interactive).any()):
            return False
        room = self._pool.available - self._growth()
        admissible = tokens = 0
        for row in self._waiting:
            room -= self._expected_blocks(row)
            if room < 0 or admissible >= self._bulk_places() or tokens >= self._prefill_wanted_tokens:
                break
            admissible += 1
            tokens += len(row.context)
        return holds_admission(
            admissible=admissible,
            waiting=len(self._waiting),
            admissible_tokens=tokens,
            wanted_tokens=self._prefill_wanted_tokens,
            max_rows=self.max_batch_size,
        )

    def _growth(self) -> int:
        """Blocks that admitted rows are still expected to take."""
        return int(np.maximum(self._places.expected_blocks - self._places.block_counts, 0).sum())

    def _expected_blocks(self, row: _Row) -> int:
        share = 1.0 if row.request.sampling.ignore_eos else self._answer_share
        remaining = max(1, round(row.max_new * share) - len(row.answered))
        # The last new token is never fed, so it takes no position.
        tokens = min(len(row.context) + remaining - 1, self.context_length)
        return blocks_for(tokens, self._pool.block_size)

    def _fits(self, row: _Row, shared: Sequence[int], held: Sequence[int] = ()) -> bool:
        """Whether the row can be admitted so that all admitted ones likely end without a preemption.

        held: blocks that must not be forgotten meanwhile.
        """
        room = self._pool.available - self._pool.idle_among([*shared, *held])
        if self._running == 0:
            return blocks_for(len(row.context), self._pool.block_size) - len(shared) <= room
        return self._expected_blocks(row) - len(shared) <= room - self._growth()

    def _seat(self, row: _Row, shared: list[int], *, copied: int) -> None:
        """Give a row its place and blocks. copied: tokens behind the shared blocks that will be copied."""
        self._pool.share(shared)
        taken = self._pool.take(blocks_for(len(row.context), self._pool.block_size) - len(shared))
        assert taken is not None
        place = self._places.settle(row)
        row.blocks = [*shared, *taken]
        row.computed = len(shared) * self._pool.block_size + copied
        row.registered = len(shared)
        if row.cached is None:
            row.cached = row.computed
            row.admitted_at = time.monotonic()
        self._sequence += 1
        row.sequence = self._sequence
        self._places.hold(place, row.blocks)
        self._places.expected_blocks[place] = self._expected_blocks(row)
        for digest in row.digests[row.registered :]:
            self._computing[digest] = self._computing.get(digest, 0) + 1
        if self._prefix_reuse and self._runner.copies_blocks:
            size = self._pool.block_size
            for index in range(len(shared), len(row.blocks)):
                tokens = row.context[index * size : (index + 1) * size]
                self._pool.note_tail(row.blocks[index], row.parent(index), tokens)
        self._running += 1
        if not row.request.is_interactive:
            self._prefilling.append(row)
            return
        self._interactive_running += 1
        ahead = sum(other.request.is_interactive for other in self._prefilling)
        self._prefilling.insert(ahead, row)
        self._burst_left_tokens = self._within_interactive_burst(self._burst_left_tokens)

    def _within_interactive_burst(self, tokens: int) -> int:
        return min(tokens, self._interactive_burst_tokens) if self._interactive_running else tokens

    # --- steps ------------------------------------------------------------------------------------------------------

    def _prefill(self) -> None:
        places = self._places
        rows = self._prefilling[: self._most_undecoded() - self._undecoded]
        budget = self._within_interactive_burst(self._prefill_budget_tokens)
        pieces = plan_pieces([len(row.context) - row.computed for row in rows], budget)
        rows = rows[: len(pieces)]
        ends = [row.computed + piece for row, piece in zip(rows, pieces, strict=True)]
        at = np.array([row.place for row in rows], dtype=np.int64)
        is_finishing = np.array([end == len(row.context) for row, end in zip(rows, ends, strict=True)])
        finishing = np.flatnonzero(is_finishing)
        width = blocks_for(max(ends), self._pool.block_size)
        call = PagedPrefill(
            token_ids=np.concatenate(
                [row.context[row.computed : end] for row, end in zip(rows, ends, strict=True)]
            ).astype(np.int64),
            lengths=np.array(pieces, dtype=np.int32),
            past_lengths=np.array([row.computed for row in rows], dtype=np.int32),
            block_table=places.tables[at, :width],
            finishing=finishing,
            sampling=self._sampling(at[finishing], is_prefill=True),
        )
        try:
            ticket = self._runner.prefill(call)
        except Exception as error:
            self._fail_run(rows, error)
            return
        for row, end in zip(rows, ends, strict=True):
            row.computed = end
            self._register(row)
        done = at[finishing]
        places.lengths[at] = ends
        places.in_flight[at] += 1
        places.launched[done] += 1
        places.sources[done] = self._runner.first_source(ticket) + np.arange(done.size)
        places.is_ready[done] = True
        self._undecoded += done.size
        self._prefilling = [row for row in self._prefilling if row.computed < len(row.context)]
        self._burst_left_tokens -= sum(pieces)
        self._flight.append(_Step(ticket, done, at, is_prefill=True))
        self._steps += 1

    def _most_undecoded(self) -> int:
        """Prompts that may end before a decode step: the runner keeps the tokens of so many."""
        return self.max_batch_size + min(self._interactive_running, self._interactive_rows)

    def _register(self, row: _Row) -> None:
        """Let others share the prompt blocks whose computation is launched."""
        size = self._pool.block_size
        is_whole = row.computed == len(row.context)
        for index in range(row.registered, len(row.blocks) if is_whole else row.computed // size):
            self._pool.compute_tail(row.blocks[index])
        full = min(row.computed // self._pool.block_size, len(row.digests))
        for index in range(row.registered, full):
            self._pool.register(row.blocks[index], row.digests[index])
            self._withdraw(row.digests[index])
        row.registered = max(row.registered, full)

    def _withdraw(self, digest: Digest) -> None:
        self._computing[digest] -= 1
        if not self._computing[digest]:
            del self._computing[digest]

    def _decode(self, wanted: Int64s) -> None:
        """Launch a step for all rows that decode: two if many of them share a prefix and others do not."""
        places = self._places
        sharing, prefix = self._shared_prefix(wanted)
        if not self._grow_tables(wanted):
            # Rows were read or preempted on the way: what can run has changed.
            wanted = places.decoding()
            sharing, prefix = self._shared_prefix(wanted)
            if not wanted.size or not self._grow_tables(wanted):
                return
        self._burst_left_tokens = self._within_interactive_burst(self._prefill_burst_tokens)
        self._undecoded = 0
        parts = [(wanted[sharing], prefix), (wanted[~sharing], 0)]
        if not self._is_safe_first(wanted[sharing], wanted[~sharing], is_prefix=True):
            parts.reverse()
        for at, blocks in parts:
            if at.size:
                self._launch_decode(at, blocks)

    def _shared_prefix(self, wanted: Int64s) -> tuple[npt.NDArray[np.bool_], int]:
        places, runner = self._places, self._runner
        if wanted.size < runner.prefix_min_rows or not runner.prefix_min_blocks:
            return np.zeros(wanted.size, dtype=bool), 0
        sharing, blocks = shared_prefix(
            places.tables[wanted],
            places.lengths[wanted],
            runner.block_size,
            runner.prefix_min_blocks,
            runner.prefix_min_rows,
        )
        first, other = wanted[sharing], wanted[~sharing]
        if self._is_safe_first(first, other, is_prefix=True) or self._is_safe_first(other, first, is_prefix=False):
            return sharing, blocks
        return np.zeros(wanted.size, dtype=bool), 0  # once: then each row's token lies where its kind of step puts it

    def _is_safe_first(self, first: Int64s, second: Int64s, *, is_prefix: bool) -> bool:
        """Whether a step of the first rows leaves the tokens alone that the second ones are fed.

        is_prefix: the kind of the first step, which decides where it writes its own tokens.
        """
        if not first.size:
            return True
        begin = self._runner.decode_source(is_prefix=is_prefix)
        end = begin + bucket_for(first.size, self._runner.row_buckets)  # padding rows write theirs, too
        sources = self._places.sources[second]
        return not bool(((sources >= begin) & (sources < end)).any())

    def _launch_decode(self, at: Int64s, prefix: int) -> None:
        places, runner = self._places, self._runner
        width = bucket_for(int(places.block_counts[at].max()) - prefix, runner.table_widths)
        blocks: tuple[int, ...] = tuple(places.tables[at[0], :prefix].tolist())
        call = PagedDecode(
            rows=bucket_for(at.size, runner.row_buckets),
            table_width=width,
            sources=places.sources[at],
            past_lengths=places.lengths[at],
            block_table=_columns(places.tables, at, prefix, width),
            sampling=self._sampling(at, is_prefill=False),
            prefix_blocks=blocks,
        )
        try:
            ticket = runner.decode(call)
        except Exception as error:
            self._fail_run([places.row(int(place)) for place in at], error)
            return
        places.lengths[at] += 1
        places.launched[at] += 1
        places.in_flight[at] += 1
        places.steps[at] += 1
        places.shared_rows[at] += at.size
        places.sources[at] = runner.first_source(ticket) + np.arange(at.size)
        self._flight.append(_Step(ticket, at, at, is_prefill=False))
        self._steps += 1

    def _grow_tables(self, wanted: Int64s) -> bool:
        """Give a block to each row whose next position begins one; False if rows had to be preempted for that."""
        places, size = self._places, self._pool.block_size
        needy = wanted[places.lengths[wanted] >= places.block_counts[wanted] * size]
        for place in needy:
            taken = self._pool.take(1)
            if taken is None:
                self._make_room()
                return False
            places.row(int(place)).blocks.extend(taken)
            places.hold(int(place), taken)
        return True

    def _make_room(self) -> None:
        """Read all that is in flight, which may end rows; if that frees nothing, preempt the youngest bulk row.

        An interactive one goes only where there is no other.
        """
        self._read_all()
        while not self._pool.available:
            rows = self._admitted()
            assert len(rows) > 1, "one row alone always fits"
            youngest = max(rows, key=lambda row: (not row.request.is_interactive, row.sequence))
            log.info("request_preempted", running=self._running, waiting=len(self._waiting))
            self._preempt(youngest)

    def _preempt(self, row: _Row) -> None:
        """Take a row's blocks and let it wait at the head of its line, to compute its context again."""
        self._preemptions += 1
        self._stop_computing(row)
        row.answered = self._places.answer(row)
        self._vacate(row)
        row.blocks = []
        row.context = np.concatenate([row.context[: row.prompt_tokens], np.array(row.answered, dtype=np.int32)])
        row.digests = chain_digests(row.context, self._pool.block_size, row.digests) if self._prefix_reuse else []
        put_back(self._waiting, row)

    def _sampling(self, at: Int64s, *, is_prefill: bool) -> SamplingArrays | None:
        places = self._places
        if bool(places.is_plain[at].all()):
            return None
        extras: SamplingExtras | None = None
        if bool(places.wants_extras[at].any()):
            fed = np.zeros(at.size, dtype=np.float32)
            if not is_prefill:
                # The token fed to a decode step is counted on the device if the host has not read it yet.
                fed = (places.launched[at] - places.produced[at]).astype(np.float32)
            extras = _extras([places.row(int(place)) for place in at], fed, places.vocab_size)
        return SamplingArrays(
            inverse_temperature=places.inverse_temperature[at],
            top_k=places.top_k[at],
            top_p=places.top_p[at],
            uniform=places.draw_uniforms(at),
            extras=extras,
        )

    # --- results ----------------------------------------------------------------------------------------------------

    def _read_all(self) -> None:
        while self._flight:
            self._read(self._flight.popleft())

    def _read(self, step: _Step) -> None:
        """Wait for a step and hand its tokens to their rows."""
        places = self._places
        result = self._runner.result(step.ticket)
        now = time.monotonic()
        places.in_flight[step.touched] -= 1
        retired = step.touched[~places.is_live[step.touched]]  # before this step's tokens end others
        at = step.places
        if step.is_prefill:
            for place in at:
                row = places.row(int(place))
                row.first_token_at = row.first_token_at or now
        if at.size:
            self._take_tokens(at, result, now)
        for place in retired:
            if not places.in_flight[place]:
                self._vacate(places.row(int(place)))

    def _take_tokens(self, at: Int64s, result: StepResult, now: float) -> None:
        """Write down each live row's token, and visit the rows that end or asked to be told."""
        places = self._places
        indices = np.flatnonzero(places.is_live[at])
        at, token_ids = at[indices], result.token_ids[indices]
        produced = places.produced[at]
        places.tokens[at, produced] = token_ids
        places.produced[at] = produced + 1
        is_stop = self._is_stop[token_ids] & places.obeys_stop[at]
        is_last = produced + 1 >= places.limits[at]
        for index in np.flatnonzero(is_stop | is_last | places.is_attentive[at]):
            row = places.row(int(at[index]))
            token_id = int(token_ids[index])
            if is_stop[index]:
                places.produced[row.place] -= 1  # the stop token is no part of the answer
                self._finish(row, FinishReason.STOP, now)
                continue
            if places.wants_extras[row.place]:
                _note(row, token_id, result, int(indices[index]))
            if row.request.on_token is not None and row.request.on_token(token_id):
                self._finish(row, FinishReason.STOP, now)
            elif is_last[index]:
                self._finish(row, FinishReason.LENGTH, now)

    def _finish(self, row: _Row, reason: FinishReason, now: float) -> None:
        answer = self._places.answer(row)
        if not row.request.sampling.ignore_eos:
            self._answer_share += _ANSWER_WEIGHT * (len(answer) / row.max_new - self._answer_share)
        # Its place will add these again when it is left; by then the answer is written.
        row.steps += int(self._places.steps[row.place])
        row.shared_rows += int(self._places.shared_rows[row.place])
        self._answer(row, answer, reason, now)

    def _fail_run(self, rows: Sequence[_Row], error: Exception) -> None:
        """A launch failed: its rows end with a retryable error."""
        self._runner.check()  # if nothing can be run any more, the engine ends, and these rows with it
        log.error("model_run_failed", rows=len(rows), exc_info=error)
        for row in rows:
            if not row.is_retired:
                self._fail(row, engine_failed(error))

    def _release(self, row: _Row) -> None:
        """Take no more tokens for a row; its place and blocks go when no step in flight touches them."""
        if row.place < 0:
            return
        row.is_retired = True
        self._places.is_live[row.place] = self._places.is_ready[row.place] = False
        self._stop_computing(row)
        if not self._places.in_flight[row.place]:
            self._vacate(row)

    def _stop_computing(self, row: _Row) -> None:
        """Take a row out of prefill, and let those that waited for its blocks compute them themselves."""
        if row.computed < len(row.context):
            self._prefilling.remove(row)
        for digest in row.digests[row.registered :]:
            self._withdraw(digest)
        row.registered = len(row.digests)

    def _vacate(self, row: _Row) -> None:
        """Give back a row's place and blocks. What its full blocks hold stays known until they are wanted."""
        places, pool = self._places, self._pool
        if self._prefix_reuse and row.computed >= len(row.context):
            known = len(row.digests)
            fed = np.concatenate(
                [row.context[: row.prompt_tokens], places.tokens[row.place, : places.produced[row.place]]]
            )
            fed = fed[: min(int(places.lengths[row.place]), len(fed))]
            if len(fed) // pool.block_size > known:
                row.digests = chain_digests(fed, pool.block_size, row.digests)
                for index in range(known, len(row.digests)):
                    pool.register(row.blocks[index], row.digests[index])
        pool.release(row.blocks)
        places.leave(row)
        self._running -= 1
        self._interactive_running -= row.request.is_interactive


def _is_penalized(sampling: SamplingParameters) -> bool:
    return sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0


def _wants_extras(sampling: SamplingParameters) -> bool:
    return _is_penalized(sampling) or bool(sampling.logit_bias) or sampling.logprobs is not None


def _columns(tables: Int32s, at: Int64s, first: int, width: int) -> Int32s:
    """`width` columns of some rows' tables from column `first`, filled up where the bucket is wider than any table."""
    chosen = tables[at, first : first + width]
    missing = width - chosen.shape[1]
    return np.pad(chosen, ((0, 0), (0, missing)), constant_values=SCRATCH_BLOCK) if missing > 0 else chosen


def _extras(rows: Sequence[_Row], fed_counts: Float32s, vocab_size: int) -> SamplingExtras:
    """Sparse penalties and biases of a step's rows, filled up to the longest."""
    penalized = [row.counts if _is_penalized(row.request.sampling) else {} for row in rows]
    biases = [[pair for pair in row.request.sampling.logit_bias if 0 <= pair[0] < vocab_size] for row in rows]
    seen_ids = np.zeros((len(rows), max(1, *map(len, penalized))), dtype=np.int64)
    seen_counts = np.zeros(seen_ids.shape, dtype=np.float32)
    bias_ids = np.zeros((len(rows), max(1, *map(len, biases))), dtype=np.int64)
    bias_values = np.zeros(bias_ids.shape, dtype=np.float32)
    for index, (counts, bias) in enumerate(zip(penalized, biases, strict=True)):
        if counts:
            seen_ids[index, : len(counts)] = list(counts.keys())
            seen_counts[index, : len(counts)] = list(counts.values())
        if bias:
            bias_ids[index, : len(bias)] = [token for token, _ in bias]
            bias_values[index, : len(bias)] = [value for _, value in bias]
    return SamplingExtras(
        fed_counts=fed_counts,
        seen_ids=seen_ids,
        seen_counts=seen_counts,
        frequency_penalty=np.array([row.request.sampling.frequency_penalty for row in rows], dtype=np.float32),
        presence_penalty=np.array([row.request.sampling.presence_penalty for row in rows], dtype=np.float32),
        bias_ids=bias_ids,
        bias_values=bias_values,
    )


def _note(row: _Row, token_id: int, result: StepResult, index: int) -> None:
    """Keep what penalties and log probabilities need of a token."""
    sampling = row.request.sampling
    if _is_penalized(sampling):
        row.counts[token_id] = row.counts.get(token_id, 0) + 1
    if sampling.logprobs is None:
        return
    assert result.logprob is not None and result.top_ids is not None and result.top_logprobs is not None
    top = zip(
        result.top_ids[index, : sampling.logprobs].tolist(),
        result.top_logprobs[index, : sampling.logprobs].tolist(),
        strict=True,
    )
    row.logprobs.append(TokenLogprobs(token_id, float(result.logprob[index]), tuple(top)))
