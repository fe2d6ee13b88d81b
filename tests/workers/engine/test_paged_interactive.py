"""Interactive requests beside bulk work on the paged engine: admitted at once, at bulk's cost alone, never for ever."""

import random
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.engine.fake_paged_runner import FakePagedRunner
from tests.workers.engine.fake_runner import continuation
from workers.engine.paged_engine import PagedDecode, PagedEngine, PagedPrefill
from workers.engine.request import Completion, GenerationRequest, SamplingParameters
from workers.engine.scheduler import count_preempted, goes_first, put_back

BULK_TOKENS = 90  # those above are interactive requests'
WAIT_S = 120


def bulk(prompt: list[int], max_tokens: int, on_token: Callable[[int], bool] | None = None) -> GenerationRequest:
    return GenerationRequest(prompt, SamplingParameters(max_tokens, ignore_eos=True), on_token=on_token)


def interactive(prompt: list[int], max_tokens: int) -> GenerationRequest:
    return GenerationRequest(prompt, SamplingParameters(max_tokens, ignore_eos=True), is_interactive=True)


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(BULK_TOKENS) for _ in range(count)]


def assert_right(prompt: list[int], max_tokens: int, completion: Completion) -> None:
    assert list(completion.completion_token_ids) == continuation(prompt, max_tokens)[0]


def close(engine: PagedEngine) -> None:
    """Close, and see that nothing is lost of blocks, places and book-keeping."""
    engine.close(drain=True)
    assert engine._pool.available == engine._pool.count - 1
    engine._pool.check_integrity()
    assert not engine._computing
    assert engine._running == engine._interactive_running == 0
    assert sorted(engine._places.free) == list(range(engine._runner.max_rows))


class Preemptions:
    """Notes each preemption, and that no interactive row ever goes while a bulk row could."""

    def __init__(self, engine: PagedEngine) -> None:
        self.count = 0
        self._engine, self._preempt = engine, engine._preempt
        engine._preempt = self  # type: ignore[assignment,method-assign]

    def __call__(self, row: Any) -> None:
        self.count += 1
        if row.request.is_interactive:
            assert all(other.request.is_interactive for other in self._engine._admitted())
        self._preempt(row)


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    rows=st.sampled_from([1, 2, 5, 12]),
    reserve=st.sampled_from([1, 2, 3]),
    blocks=st.sampled_from([25, 41, 201]),
    budget=st.sampled_from([5, 30, 512]),
    burst=st.sampled_from([1, 60, 100_000]),
    prefix_reuse=st.booleans(),
)
def test_an_interactive_request_is_computed_within_two_steps_whatever_bulk_does(
    seed: int, rows: int, reserve: int, blocks: int, budget: int, burst: int, prefix_reuse: bool
) -> None:
    """Rows, blocks and budget are full of bulk work. One decode step may come first, and no other prompt."""
    rng = random.Random(seed)
    runner = FakePagedRunner(blocks, 4, rows, 80, reserved_rows=reserve, seed=seed)
    engine = PagedEngine(
        runner,
        stop_token_ids=[],
        prefill_budget_tokens=budget,
        prefill_burst_tokens=burst,
        prefix_reuse=prefix_reuse,
        interactive_rows=reserve,
        interactive_burst_tokens=20,
    )
    preemptions = Preemptions(engine)
    asked: list[tuple[list[int], int, Future[Completion]]] = []
    launched: list[int] = []  # steps before each interactive request came
    most = min((blocks - 1) // 2, 20)  # blocks of a bulk row; interactive ones share as many among them

    def chat(_token: int) -> bool:
        """Called in the engine's thread, between two steps."""
        if len(launched) < reserve and rng.random() < 0.2:
            wanted = rng.randrange(1, max(2, most // reserve + 1))
            prompt = [BULK_TOKENS + len(launched)] * rng.randrange(1, 4 * wanted)
            new = 4 * wanted - len(prompt) + 1
            launched.append(len(runner.calls))
            asked.append((prompt, new, engine.submit(interactive(prompt, new))))
        return False

    runner.gate.clear()
    for _ in range(rng.randrange(1, 4 * rows + 2)):
        length = rng.randrange(1, 4 * most)
        prompt, new = tokens(rng, length), rng.randrange(1, 4 * most - length + 2)
        asked.append((prompt, new, engine.submit(bulk(prompt, new, chat))))
    runner.gate.set()
    at = 0
    while at < len(asked):  # interactive ones join while bulk answers
        prompt, new, future = asked[at]
        assert_right(prompt, new, future.result(WAIT_S))
        at += 1
    close(engine)
    ahead = 0  # prompt tokens of interactive requests that came before, perhaps at the same moment
    for number, before in enumerate(launched):
        own = BULK_TOKENS + number
        steps_ahead = 2 * -(-ahead // min(budget, 20))
        ahead += next(len(prompt) for prompt, _, _ in asked if prompt[0] == own)
        steps = enumerate(runner.calls[before:])
        first = next(n for n, call in steps if isinstance(call, PagedPrefill) and own in call.token_ids)
        assert first <= 1 + steps_ahead, "one step of decoding may come before it, and no bulk prompt"
    if preemptions.count:
        assert launched, "bulk rows whose length is known make way for interactive ones alone"


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    rows=st.sampled_from([1, 2, 6]),
    reserve=st.sampled_from([0, 1, 3]),
    blocks=st.sampled_from([21, 41, 101]),
    streams=st.sampled_from([1, 4, 12]),
)
def test_bulk_comes_to_its_end_beside_endless_interactive_requests(
    seed: int, rows: int, reserve: int, blocks: int, streams: int
) -> None:
    """As soon as an interactive request is answered the next one is there, more of them than the reserve has rows."""
    rng = random.Random(seed)
    runner = FakePagedRunner(blocks, 4, rows, 80, reserved_rows=reserve, seed=seed)
    engine = PagedEngine(
        runner, stop_token_ids=[], prefill_budget_tokens=30, interactive_rows=reserve, interactive_burst_tokens=15
    )
    Preemptions(engine)
    most = min((blocks - 1) // 2, 20)
    is_over = threading.Event()
    open_streams = threading.Semaphore(0)
    wrong: list[object] = []

    def go_on(stream: random.Random) -> None:
        if is_over.is_set():
            open_streams.release()
            return
        prompt, new = tokens(stream, stream.randrange(1, 20)), stream.randrange(1, 18)

        def check(future: Future[Completion]) -> None:
            answer = list(future.result().completion_token_ids)
            if answer != continuation(prompt, new)[0]:
                wrong.append((prompt, answer))
            go_on(stream)

        engine.submit(interactive(prompt, new)).add_done_callback(check)

    for stream in range(streams):
        go_on(random.Random(seed + stream))
    asked = []
    for _ in range(12):
        length = rng.randrange(1, 4 * most)
        prompt, new = tokens(rng, length), rng.randrange(1, 4 * most - length + 2)
        asked.append((prompt, new, engine.submit(bulk(prompt, new))))
    for prompt, new, future in asked:
        assert_right(prompt, new, future.result(WAIT_S))
    is_over.set()
    for _ in range(streams):
        assert open_streams.acquire(timeout=WAIT_S)
    assert not wrong
    close(engine)


class Overlapping:
    """Interactive requests, of which the next one comes before the last is answered, so that one is always in hand."""

    def __init__(self, engine: PagedEngine, new: int) -> None:
        self._engine, self._new = engine, new
        self._rng = random.Random(1)
        self.is_over = False
        self.futures: list[Future[Completion]] = []
        self._ask()

    def _ask(self) -> None:
        heard: list[int] = []

        def on_token(token_id: int) -> bool:
            heard.append(token_id)
            if len(heard) == self._new * 2 // 3 and not self.is_over:
                self._ask()
            return False

        request = replace(interactive(tokens(self._rng, 10), self._new), on_token=on_token)
        self.futures.append(self._engine.submit(request))


def test_bulk_of_short_prompts_is_admitted_while_interactive_rows_alone_decode() -> None:
    """All rows' prompts are fewer tokens than a prefill wants, and interactive rows never all end."""
    engine = PagedEngine(FakePagedRunner(4000, 16, 32, 400, reserved_rows=2), stop_token_ids=[], interactive_rows=2)
    chats = Overlapping(engine, 30)
    rng = random.Random(2)
    prompts = [tokens(rng, 50) for _ in range(96)]
    futures = [engine.submit(bulk(prompt, 5)) for prompt in prompts]
    for prompt, future in zip(prompts, futures, strict=True):
        assert_right(prompt, 5, future.result(WAIT_S))
    chats.is_over = True
    close(engine)
    assert all(future.done() for future in chats.futures)


def test_a_bulk_request_that_wants_all_blocks_has_its_turn_beside_small_interactive_ones() -> None:
    engine = PagedEngine(FakePagedRunner(21, 16, 8, 320, reserved_rows=2), stop_token_ids=[], interactive_rows=2)
    chats = Overlapping(engine, 15)
    large = engine.submit(bulk([5] * 20, 300))
    small = [engine.submit(bulk([5, n], 5)) for n in range(5)]
    assert_right([5] * 20, 300, large.result(WAIT_S))
    for n, future in enumerate(small):
        assert_right([5, n], 5, future.result(WAIT_S))
    chats.is_over = True
    close(engine)
    assert all(future.done() for future in chats.futures)


def test_the_youngest_bulk_row_makes_way_and_comes_back_with_what_it_had() -> None:
    """Four bulk rows hold all blocks. The last gives its own to an interactive one, and loses no token that it has."""
    runner = FakePagedRunner(25, 4, 4, 80, reserved_rows=1)
    engine = PagedEngine(runner, stop_token_ids=[], interactive_rows=1)
    preempted: list[int] = []
    preempt = engine._preempt

    def note(row: Any) -> None:
        preempted.append(row.request.prompt_token_ids[0])
        preempt(row)

    engine._preempt = note  # type: ignore[method-assign]
    chats: list[Future[Completion]] = []
    counts = [0, 0, 0, 0]

    def hear(number: int) -> Callable[[int], bool]:
        def on_token(_token: int) -> bool:
            counts[number] += 1
            if counts[3] == 5 and not chats:
                chats.append(engine.submit(interactive([95] * 5, 4)))
            return False

        return on_token

    runner.gate.clear()
    futures = [engine.submit(bulk([n] * 12, 13, hear(n))) for n in range(4)]
    runner.gate.set()
    completions = [future.result(WAIT_S) for future in futures]
    for n, completion in enumerate(completions):
        assert_right([n] * 12, 13, completion)
    assert_right([95] * 5, 4, chats[0].result(WAIT_S))
    close(engine)
    assert preempted == [3]
    assert counts == [13] * 4, "nobody hears a token twice"
    assert runner.prefilled_tokens < 4 * 12 + 5 + 12, "what it had computed is found again"


def launched_by(reserve: int, requests: list[GenerationRequest]) -> tuple[list[tuple[object, ...]], PagedEngine]:
    """Every step of a bulk run: what it computed, in which shape."""
    runner = FakePagedRunner(45, 4, 12, 100, reserved_rows=reserve)
    engine = PagedEngine(
        runner, stop_token_ids=[3], prefill_budget_tokens=50, prefill_wanted_tokens=40, interactive_rows=reserve
    )
    engine._answer_share = 0.2  # too many are admitted, and some preempted
    futures: list[Future[Completion]] = []

    def submit_all(_token: int) -> bool:
        """In the engine's thread, so that all are there at the same step."""
        if not futures:
            futures.extend(engine.submit(request) for request in requests)
        return False

    engine.submit(bulk([1, 2], 2, submit_all)).result(WAIT_S)
    for request, future in zip(requests, futures, strict=True):
        wanted = continuation(list(request.prompt_token_ids), request.sampling.max_tokens, frozenset([3]))
        assert list(future.result(WAIT_S).completion_token_ids) == wanted[0]
    close(engine)
    steps: list[tuple[object, ...]] = []
    for call in runner.calls:
        if isinstance(call, PagedDecode):
            steps.append(("decode", call.rows, call.table_width, call.past_lengths.tolist(), call.block_table.tolist()))
        else:
            steps.append(("prefill", call.token_ids.tolist(), call.lengths.tolist(), call.block_table.tolist()))
    return steps, engine


@pytest.mark.parametrize("seed", range(6))
def test_without_interactive_requests_the_reserve_changes_no_step(seed: int) -> None:
    """The same rows in the same steps of the same shape: the reserve costs bulk work nothing."""
    rng = random.Random(seed)
    shared = tokens(rng, 22)
    requests = []
    for _ in range(60):
        prompt = shared[: rng.randrange(23)] + tokens(rng, rng.randrange(1, 20))
        requests.append(GenerationRequest(prompt, SamplingParameters(rng.randrange(1, 50))))
    without, _ = launched_by(0, requests)
    beside, engine = launched_by(3, requests)
    assert without == beside
    assert max(step[1] for step in beside if step[0] == "decode") <= 12  # type: ignore[type-var]
    assert engine.max_batch_size == 12


def test_prompts_between_the_tokens_of_an_interactive_answer_are_few() -> None:
    """Bulk prompts are computed by the burst, but while somebody listens to tokens the burst is short."""
    runner = FakePagedRunner(2000, 16, 4, 2000, reserved_rows=1)
    engine = PagedEngine(
        runner,
        stop_token_ids=[],
        prefill_budget_tokens=400,
        prefill_burst_tokens=4000,
        interactive_rows=1,
        interactive_burst_tokens=50,
    )
    futures: list[Future[Completion]] = []

    def flood(_token: int) -> bool:
        if not futures:
            futures.append(engine.submit(interactive([BULK_TOKENS, 1], 40)))
            futures.extend(engine.submit(bulk([n] * 900, 2)) for n in range(3))
        return False

    engine.submit(bulk([7], 3, flood)).result(WAIT_S)
    assert_right([BULK_TOKENS, 1], 40, futures[0].result(WAIT_S))
    for future in futures[1:]:
        future.result(WAIT_S)
    close(engine)
    first = next(
        n for n, call in enumerate(runner.calls) if isinstance(call, PagedPrefill) and BULK_TOKENS in call.token_ids
    )
    chat = runner.calls[first:]
    decodes = [n for n, call in enumerate(chat) if isinstance(call, PagedDecode)][:39]
    sizes = [
        sum(len(call.token_ids) for call in chat[start:end] if isinstance(call, PagedPrefill))
        for start, end in zip([0, *decodes], decodes, strict=False)
    ]
    assert max(sizes) <= 50
    assert sum(sizes) > 1500, "bulk prompts went on beside it"
    longest = max(len(call.token_ids) for call in runner.calls if isinstance(call, PagedPrefill))
    assert longest == 400, "without it prompts are computed in large steps again"


def test_an_interactive_request_waits_for_no_bulk_prompt_that_begins_as_it_does() -> None:
    """It may be the last in the line; but of interactive ones that begin alike, one computes it for all."""
    runner = FakePagedRunner(400, 16, 12, 400, reserved_rows=3)
    engine = PagedEngine(
        runner, stop_token_ids=[], prefill_budget_tokens=50, interactive_rows=3, interactive_burst_tokens=50
    )
    shared = [n % BULK_TOKENS for n in range(40)]
    prompts = [[*shared, n, 95] for n in range(3)]
    chats: list[Future[Completion]] = []
    others: list[Future[Completion]] = []

    def come(_token: int) -> bool:
        """Beside them come bulk prompts, the last of which begins as they do."""
        if not others:
            others.extend(engine.submit(bulk([n] * 300, 3, chat)) for n in range(1, 9))
            others.append(engine.submit(bulk([*shared, 1], 3)))
        return False

    def chat(_token: int) -> bool:
        if not chats:
            chats.extend(engine.submit(interactive(prompt, 5)) for prompt in prompts)
        return False

    engine.submit(bulk([7], 3, come)).result(WAIT_S)
    for future in others:
        future.result(WAIT_S)
    for prompt, future in zip(prompts, chats, strict=True):
        assert_right(prompt, 5, future.result(WAIT_S))
    close(engine)
    assert [future.result().cached_tokens for future in chats] == [0, 32, 32]


def test_who_goes_first_and_who_must_go_follow_from_plain_values() -> None:
    facts = {"rows": 1, "blocks": 10, "wanted_blocks": 5, "reserved_rows": 2, "all_blocks": 30}
    assert goes_first(**facts)
    assert not goes_first(**{**facts, "rows": 2})
    assert not goes_first(**{**facts, "wanted_blocks": 6})
    assert not goes_first(**{**facts, "reserved_rows": 0})
    assert count_preempted(5, [2, 0, 4, 9]) == 3
    assert count_preempted(2, [2, 9]) == 1
    assert count_preempted(16, [2, 0, 4, 9]) == 0, "none goes in vain"
    assert count_preempted(1, []) == 0


def test_rows_are_put_back_ahead_of_their_kind() -> None:
    def row(name: str) -> Any:
        return SimpleNamespace(name=name, request=SimpleNamespace(is_interactive=name.isupper()))

    waiting = deque(map(row, "ABcd"))
    put_back(waiting, row("e"))
    put_back(waiting, row("F"))
    assert "".join(waiting_row.name for waiting_row in waiting) == "FABecd"
