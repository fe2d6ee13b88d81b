"""The paged step loop against a runner whose answers depend on every token of the context: see fake_paged_runner.py."""

import itertools
import random
import threading
import time
from concurrent.futures import CancelledError

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.errors import PromptmillError
from tests.conftest import wait_until
from tests.workers.engine.fake_paged_runner import FakePagedRunner
from tests.workers.engine.fake_runner import VOCAB_SIZE, continuation, next_token
from workers.engine.paged_engine import PagedEngine
from workers.engine.request import FinishReason, GenerationRequest, SamplingParameters
from workers.engine.scheduler import holds_admission, plan_pieces, prefers_prefill, shared_prefix

STOP = 3


def make_engine(runner: FakePagedRunner, **options: object) -> PagedEngine:
    return PagedEngine(runner, **{"stop_token_ids": [STOP], **options})  # type: ignore[arg-type]


def ask(prompt: list[int], max_tokens: int = 8, **options: object) -> GenerationRequest:
    request_options = {key: options.pop(key) for key in ("deadline", "on_token", "is_interactive") if key in options}
    return GenerationRequest(
        prompt,
        SamplingParameters(max_tokens=max_tokens, **options),  # type: ignore[arg-type]
        **request_options,  # type: ignore[arg-type]
    )


def pool_of(engine: PagedEngine) -> tuple[int, int]:
    """Blocks available, and all that can be."""
    return engine._pool.available, engine._pool.count - 1


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    max_rows=st.sampled_from([1, 2, 3, 8, 20]),
    block_size=st.sampled_from([4, 16]),
    blocks=st.sampled_from([14, 30, 200]),
    budget=st.sampled_from([1, 7, 50, 512]),
    burst=st.sampled_from([1, 60, 100_000]),
    prefix_reuse=st.booleans(),
    reads_once=st.booleans(),
    least_copied=st.sampled_from([1, 3, 16]),
    reserve=st.sampled_from([0, 2]),
    count=st.integers(1, 50),
)
def test_every_request_gets_the_answer_it_would_get_alone(
    seed: int,
    max_rows: int,
    block_size: int,
    blocks: int,
    budget: int,
    burst: int,
    prefix_reuse: bool,
    reads_once: bool,
    least_copied: int,
    reserve: int,
    count: int,
) -> None:
    """Batching, chunks, shared blocks, preemption, look-ahead and padding are invisible: what all else serves."""
    rng = random.Random(seed)
    min_blocks = rng.randrange(1, 4) if reads_once else 0
    runner = FakePagedRunner(
        blocks, block_size, max_rows, 100, reserved_rows=reserve, prefix_min_blocks=min_blocks, seed=seed
    )
    engine = make_engine(
        runner,
        interactive_rows=reserve,
        interactive_burst_tokens=20,
        prefill_budget_tokens=budget,
        prefill_burst_tokens=burst,
        prefill_wanted_tokens=40,
        prefix_reuse=prefix_reuse,
        least_copied_tokens=least_copied,
    )
    # Answers end early, so too many are admitted and some are preempted.
    engine._answer_share = 0.2
    context_length = engine.context_length
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(40)]
    asked = []
    for _ in range(count):
        head = shared[: rng.randrange(30)] if rng.random() < 0.6 else []
        prompt = head + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 20))]
        max_tokens = rng.randrange(1, 60)
        request = ask(prompt, max_tokens, is_interactive=rng.random() < 0.3)
        asked.append((prompt, max_tokens, engine.submit(request)))
        if rng.random() < 0.1:
            time.sleep(0.001)
    for prompt, max_tokens, future in asked:
        room = context_length - len(prompt) + 1
        wanted, reason = continuation(prompt, min(max_tokens, room), frozenset([STOP]))
        completion = future.result(60)
        assert list(completion.completion_token_ids) == wanted
        assert completion.finish_reason == reason
        assert completion.prompt_tokens == len(prompt)
    engine.close(drain=True)
    available, total = pool_of(engine)
    assert available == total, "blocks were lost"
    assert runner.is_closed
    assert not engine._computing
    engine._pool.check_integrity()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), blocks=st.sampled_from([14, 40]))
def test_sampled_answers_depend_on_seed_and_position_alone(seed: int, blocks: int) -> None:
    """The uniform of token n is the n-th of the seed's stream, and penalties count every token once, whatever the
    batch, the look-ahead or a preemption did."""
    rng = random.Random(seed)
    engine = make_engine(FakePagedRunner(blocks, 4, 6, 100, seed=seed), stop_token_ids=[], prefill_budget_tokens=9)
    engine._answer_share = 0.2
    asked = []
    for index in range(12):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 12))]
        new = rng.randrange(1, min(80, engine.context_length - len(prompt)))
        penalty = 0.5 if index % 3 == 0 else 0.0
        temperature = 1.0 if index % 2 else 0.0
        logprobs = 2 if index % 4 == 0 else None
        request = ask(prompt, new, temperature=temperature, seed=index, frequency_penalty=penalty, logprobs=logprobs)
        asked.append((prompt, new, request.sampling, engine.submit(request)))
    for prompt, new, sampling, future in asked:
        stream = np.random.Generator(np.random.Philox(key=sampling.seed)).random(new).astype(np.float32)
        context, answer = list(prompt), []
        for position in range(new):
            token = next_token(context)
            if sampling.temperature:
                token += int(stream[position] * VOCAB_SIZE)
            if sampling.frequency_penalty:
                token += position
            answer.append(token % VOCAB_SIZE)
            context.append(answer[-1])
        completion = future.result(60)
        assert list(completion.completion_token_ids) == answer
        if sampling.logprobs is None:
            assert completion.logprobs is None
        else:
            assert completion.logprobs is not None
            assert [entry.token_id for entry in completion.logprobs] == answer
            assert all(len(entry.top) == 2 and entry.logprob == -entry.token_id for entry in completion.logprobs)
    engine.close()


def test_rows_are_preempted_when_blocks_run_out_and_answer_all_the_same() -> None:
    runner = FakePagedRunner(20, 4, 8, 70)
    engine = make_engine(runner, stop_token_ids=[])
    engine._answer_share = 0.0
    asked = [([n + 1] * 5, engine.submit(ask([n + 1] * 5, 50))) for n in range(8)]
    for prompt, future in asked:
        assert list(future.result(60).completion_token_ids) == continuation(prompt, 50)[0]
    assert engine._preemptions > 0
    engine.close()


def test_answers_that_are_known_to_run_to_their_limit_are_never_preempted() -> None:
    """Computing a context again costs more than waiting, so room is kept for what is certain to be asked."""
    runner = FakePagedRunner(20, 4, 8, 70)
    engine = make_engine(runner)
    engine._answer_share = 0.0
    futures = [engine.submit(ask([n + 1] * 5, 50, ignore_eos=True)) for n in range(8)]
    assert all(len(future.result(60).completion_token_ids) == 50 for future in futures)
    assert engine._preemptions == 0
    engine.close()


def test_a_preempted_row_finds_its_prompt_and_its_answer_again() -> None:
    """Where the pool has not forgotten them, no more is computed again than what ends within a block."""
    runner = FakePagedRunner(200, 4, 2, 400, copies_blocks=False)
    engine = make_engine(runner, stop_token_ids=[])
    heard: list[int] = []
    turn = engine._turn

    def turn_and_preempt() -> None:
        turn()
        if len(heard) >= 100 and not engine._preemptions:
            engine._read_all()
            engine._preempt(engine._admitted()[0])

    engine._turn = turn_and_preempt  # type: ignore[method-assign]
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    answer = engine.submit(ask(prompt, 150, on_token=heard.append)).result(60)
    assert list(answer.completion_token_ids) == heard == continuation(prompt, 150)[0]
    engine.close()
    assert engine._preemptions == 1
    assert runner.prefilled_tokens <= 8 + 2 * 4


def test_a_batch_of_short_prompts_does_not_wait_until_it_is_empty() -> None:
    """All its prompts together are fewer tokens than a prefill wants."""
    rng = random.Random(1)
    runner = FakePagedRunner(4000, 16, 32, 400)
    engine = make_engine(runner, stop_token_ids=[])
    runner.gate.clear()
    futures = [engine.submit(ask([rng.randrange(VOCAB_SIZE)] * 50, rng.randrange(1, 200))) for _ in range(256)]
    runner.gate.set()
    tokens = sum(len(future.result(60).completion_token_ids) for future in futures)
    engine.close()
    assert tokens / len(runner.decode_shapes) > 24, "rows in a step, of 32"


def test_a_shared_beginning_is_computed_once_however_the_prompts_arrive() -> None:
    shared = [n % VOCAB_SIZE for n in range(64)]
    runner = FakePagedRunner(200, 16, 8, 100)
    engine = make_engine(runner, stop_token_ids=[])
    runner.gate.clear()
    futures = [engine.submit(ask([*shared, own, own + 1], 5)) for own in range(40)]
    runner.gate.set()
    completions = [future.result(60) for future in futures]
    engine.close()
    assert runner.prefilled_tokens == 66 + 39 * 2
    assert [completion.cached_tokens for completion in completions] == [0] + [64] * 39
    for own, completion in enumerate(completions):
        assert list(completion.completion_token_ids) == continuation([*shared, own, own + 1], 5)[0]


def test_a_prefix_that_many_rows_share_is_read_once_for_all_of_them() -> None:
    """Rows with another beginning decode beside them, and a new prefix takes the place of the old."""
    runner = FakePagedRunner(400, 4, 16, 100, prefix_min_blocks=2)
    engine = make_engine(runner, stop_token_ids=[])
    asked = []
    for first in (0, 50):
        shared = [(first + n) % VOCAB_SIZE for n in range(18)]
        for own in range(12):
            prompt = [*shared, own] if own % 4 else [own, first, 7]
            asked.append((prompt, engine.submit(ask(prompt, 20 + own))))
    for prompt, future in asked:
        completion = future.result(60)
        assert list(completion.completion_token_ids) == continuation(prompt, len(completion.completion_token_ids))[0]
    engine.close()
    assert runner.prefix_rows > 100


@pytest.mark.parametrize("seed", range(12))
def test_a_step_overwrites_no_token_that_the_other_one_of_its_turn_is_fed(seed: int) -> None:
    """Rows go from the one kind of step to the other as the best prefix changes, and padding rows write tokens, too."""
    rng = random.Random(seed)
    runner = FakePagedRunner(400, 4, 16, 100, prefix_min_blocks=1, seed=seed)
    engine = make_engine(runner, stop_token_ids=[])
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(40)]
    asked = []
    for _ in range(60):
        own = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 10))]
        prompt, new = shared[: 4 * rng.randrange(1, 10)] + own, rng.randrange(1, 50)
        asked.append((prompt, new, engine.submit(ask(prompt, new))))
    for prompt, new, future in asked:
        assert list(future.result(60).completion_token_ids) == continuation(prompt, new)[0]
    engine.close()


def test_the_rows_that_share_most_are_found() -> None:
    tables = np.array([[5, 6, 9], [5, 6, 8], [1, 2, 3], [5, 7, 0]], dtype=np.int32)
    lengths = np.array([10, 10, 10, 7], dtype=np.int32)
    rows, blocks = shared_prefix(tables, lengths, 4, 1, 2)
    assert blocks == 2
    assert rows.tolist() == [True, True, False, False]
    rows, blocks = shared_prefix(tables, lengths, 4, 1, 3)
    assert blocks == 1
    assert rows.tolist() == [True, True, False, True]
    assert shared_prefix(tables, lengths, 4, 2, 3)[1] == 0
    assert shared_prefix(tables, lengths, 4, 1, 4)[1] == 0
    assert shared_prefix(tables, lengths, 4, 4, 1)[1] == 0, "no table is so wide"


def test_a_shorter_prefix_that_more_rows_share_is_taken_where_that_saves_more() -> None:
    tables = np.zeros((12, 8), dtype=np.int32)
    tables[:, :3] = (1, 2, 3)
    tables[:3, 3:5] = (4, 5)
    lengths = np.array([20] * 3 + [13] * 9, dtype=np.int32)
    rows, blocks = shared_prefix(tables, lengths, 4, 2, 2)
    assert (blocks, rows.sum()) == (3, 12), "11 times 3 blocks, rather than twice 5"
    rows, blocks = shared_prefix(tables[:4], lengths[:4], 4, 2, 2)
    assert (blocks, rows.sum()) == (5, 3), "twice 5 blocks, rather than thrice 3"


def test_a_beginning_that_ends_within_a_block_is_copied() -> None:
    """80 shared tokens in blocks of 64: a block is shared, 16 tokens are copied, and only what differs is computed."""
    shared = [n % VOCAB_SIZE for n in range(80)]
    runner = FakePagedRunner(200, 64, 16, 200)
    engine = make_engine(runner, stop_token_ids=[])
    first = engine.submit(ask([*shared, 1, 2], 5)).result(60)
    runner.gate.clear()
    futures = [engine.submit(ask([*shared, own, own + 1], 5)) for own in range(3, 40, 3)]
    wait_until(lambda: runner.copied_tokens > 0)  # before that row ends which they copy from
    runner.gate.set()
    completions = [future.result(60) for future in futures]
    engine.close()
    assert first.cached_tokens == 0
    # The first has ended, and what it had of its last block is forgotten: the next computes that anew, for all others.
    assert [completion.cached_tokens for completion in completions] == [64] + [80] * 12
    assert runner.copied_tokens == 12 * 16
    assert runner.prefilled_tokens == 82 + 18 + 12 * 2
    for own, completion in zip(range(3, 40, 3), completions, strict=True):
        assert list(completion.completion_token_ids) == continuation([*shared, own, own + 1], 5)[0]


def test_prompts_wait_for_the_beginning_of_one_that_is_admitted_with_them() -> None:
    """Shorter than a block, so that nothing is shared: it is computed once and copied all the same."""
    shared = [n % VOCAB_SIZE for n in range(70)]
    runner = FakePagedRunner(200, 128, 8, 200)
    engine = make_engine(runner, stop_token_ids=[])
    runner.gate.clear()
    futures = [engine.submit(ask([*shared, own, own + 1], 5)) for own in range(8)]
    runner.gate.set()
    completions = [future.result(60) for future in futures]
    engine.close()
    assert [completion.cached_tokens for completion in completions] == [0] + [70] * 7
    assert runner.prefilled_tokens == 72 + 7 * 2
    for own, completion in enumerate(completions):
        assert list(completion.completion_token_ids) == continuation([*shared, own, own + 1], 5)[0]


def test_a_runner_that_copies_nothing_computes_what_is_not_whole_blocks() -> None:
    shared = [n % VOCAB_SIZE for n in range(80)]
    runner = FakePagedRunner(200, 64, 8, 200, copies_blocks=False)
    engine = make_engine(runner, stop_token_ids=[])
    completions = [engine.submit(ask([*shared, own, own + 1], 5)).result(60) for own in range(4)]
    engine.close()
    assert [completion.cached_tokens for completion in completions] == [0] + [64] * 3


def test_a_copy_that_fails_fails_the_rows_it_was_for() -> None:
    shared = [n % VOCAB_SIZE for n in range(80)]
    runner = FakePagedRunner(200, 64, 8, 200)
    engine = make_engine(runner, stop_token_ids=[])
    runner.gate.clear()
    slow = engine.submit(ask([*shared, 1, 2], 60))
    wait_until(lambda: runner.prefilled_tokens == 82)
    runner.copies_fail = True
    failed = engine.submit(ask([*shared, 5, 6], 5))
    runner.gate.set()
    with pytest.raises(PromptmillError) as caught:
        failed.result(60)
    assert caught.value.retryable
    runner.copies_fail = False
    assert engine.submit(ask([*shared, 5, 6], 5)).result(60).completion_token_ids
    assert len(slow.result(60).completion_token_ids) == 60
    available, all_there_is = pool_of(engine)
    engine.close()
    assert available == all_there_is


def test_an_answer_can_be_the_beginning_of_the_next_prompt() -> None:
    """A conversation's next turn finds the blocks of the last one."""
    runner = FakePagedRunner(50, 4, 4, 100)
    engine = make_engine(runner, stop_token_ids=[])
    prompt = list(range(10))
    answer = list(engine.submit(ask(prompt, 11)).result(60).completion_token_ids)
    again = engine.submit(ask([*prompt, *answer, 5], 3)).result(60)
    engine.close()
    assert again.cached_tokens == 20
    assert list(again.completion_token_ids) == continuation([*prompt, *answer, 5], 3)[0]


def test_prefix_reuse_can_be_switched_off() -> None:
    runner = FakePagedRunner(50, 4, 4, 100)
    engine = make_engine(runner, prefix_reuse=False)
    completions = [engine.submit(ask([*range(20), own], 2)).result(60) for own in range(3)]
    engine.close()
    assert [completion.cached_tokens for completion in completions] == [0] * 3
    assert runner.prefilled_tokens == 63


def test_long_prompts_do_not_starve_rows_that_decode() -> None:
    """Between two tokens of a decoding row no more is computed than a burst and the piece that ended it."""
    runner = FakePagedRunner(1000, 16, 4, 2000)
    engine = make_engine(runner, stop_token_ids=[], prefill_budget_tokens=64, prefill_burst_tokens=100)
    prefilled_at_token: list[int] = []

    def note(_token: int) -> bool:
        prefilled_at_token.append(runner.prefilled_tokens)
        return False

    runner.gate.clear()
    first = engine.submit(ask([1, 2, 3], 60, on_token=note))
    others = [engine.submit(ask([(n * k) % VOCAB_SIZE for n in range(900)], 3)) for k in (1, 2, 5)]
    runner.gate.set()
    for future in (first, *others):
        future.result(60)
    engine.close()
    gaps = [after - before for before, after in itertools.pairwise(prefilled_at_token)]
    assert max(gaps) <= 2 * 128
    assert sum(gaps) > 1000


def test_the_host_is_one_step_ahead_and_no_more() -> None:
    runner = FakePagedRunner(100, 16, 4, 200)
    engine = make_engine(runner, stop_token_ids=[])
    for future in [engine.submit(ask([n], 50)) for n in range(8)]:
        future.result(60)
    engine.close()
    assert runner.most_in_flight == 2


def test_a_row_that_ends_at_its_limit_costs_no_step_more() -> None:
    """Only what ends by content is seen late; limits are known before the launch."""
    runner = FakePagedRunner(100, 16, 4, 200)
    engine = make_engine(runner, stop_token_ids=[])
    engine.submit(ask([1, 2], 10)).result(60)
    engine.close()
    assert len(runner.decode_shapes) == 9


def test_decode_steps_carry_little_padding_when_rows_end_at_different_times() -> None:
    """Places need not be compact: a step runs in the bucket of the rows it has."""
    runner = FakePagedRunner(1000, 16, 32, 200)
    engine = make_engine(runner, stop_token_ids=[])
    rng = random.Random(5)
    futures = [engine.submit(ask([rng.randrange(VOCAB_SIZE)] * 20, rng.randrange(5, 150))) for _ in range(64)]
    for future in futures:
        future.result(60)
    engine.close()
    for bucket, rows in runner.decode_shapes:
        assert bucket == min(size for size in runner.row_buckets if size >= rows)


def test_a_cancelled_future_gives_its_row_back() -> None:
    runner = FakePagedRunner(600, 4, 1, 2000)
    engine = make_engine(runner, stop_token_ids=[])
    started = threading.Event()

    def halt(_token: int) -> bool:
        if not started.is_set():  # the model stands still until the test has cancelled, however slow this machine is
            runner.gate.clear()
            started.set()
        return False

    endless = engine.submit(ask([1], 1900, on_token=halt))
    waiting = engine.submit(ask([2], 3))
    given_up = engine.submit(ask([4], 3))
    assert started.wait(30)
    assert endless.cancel()
    assert given_up.cancel()
    runner.gate.set()
    assert list(waiting.result(60).completion_token_ids) == continuation([2], 3)[0]
    with pytest.raises(CancelledError):
        endless.result(0)
    engine.close()


def test_a_deadline_ends_a_request_whether_it_waits_or_runs() -> None:
    engine = make_engine(FakePagedRunner(2000, 4, 1, 5000), stop_token_ids=[])
    soon = time.monotonic() + 0.05
    slow = ask([1], 4900, deadline=soon, on_token=lambda _token: time.sleep(0.002) or False)
    for future in [engine.submit(slow), engine.submit(ask([2], 3, deadline=soon))]:
        with pytest.raises(PromptmillError) as caught:
            future.result(60)
        assert caught.value.code == "deadline_exceeded"
    assert engine.submit(ask([2], 3)).result(60).finish_reason == FinishReason.LENGTH
    engine.close()


def test_a_failed_launch_ends_only_the_requests_that_were_in_it() -> None:
    runner = FakePagedRunner(50, 4, 4, 100)
    engine = make_engine(runner, stop_token_ids=[], prefill_budget_tokens=16)
    runner.fail_on_token = 96
    bad = engine.submit(ask([96] * 10, 5))
    with pytest.raises(PromptmillError) as caught:
        bad.result(60)
    assert caught.value.code == "engine_failed"
    assert caught.value.retryable
    good = engine.submit(ask([5] * 10, 1)).result(60)
    assert list(good.completion_token_ids) == continuation([5] * 10, 1)[0]
    engine.close()
    assert pool_of(engine)[0] == 49


def test_a_prompt_beyond_the_context_is_refused_with_the_numbers() -> None:
    """The context is what the blocks hold where that is less than the model's."""
    engine = make_engine(FakePagedRunner(11, 4, 2, 500))
    assert engine.context_length == 40
    with pytest.raises(PromptmillError, match="40 tokens and the context holds 40") as caught:
        engine.submit(ask([1] * 40))
    assert caught.value.code == "context_length_exceeded"
    assert len(engine.submit(ask([1] * 39, 5, ignore_eos=True)).result(60).completion_token_ids) == 2
    engine.close()


def test_on_token_can_end_a_request_and_sees_every_token_but_the_stop_token() -> None:
    engine = make_engine(FakePagedRunner(50, 4, 2, 100), stop_token_ids=[])
    seen: list[int] = []
    completion = engine.submit(ask([9], 50, on_token=lambda token: seen.append(token) or len(seen) == 4)).result(60)
    assert list(completion.completion_token_ids) == seen == continuation([9], 4)[0]
    assert completion.finish_reason == FinishReason.STOP
    engine.close()


def test_closing_hands_back_what_is_unfinished_and_draining_answers_it() -> None:
    for drain in (False, True):
        runner = FakePagedRunner(300, 4, 1, 1000)
        engine = make_engine(runner, stop_token_ids=[])
        runner.gate.clear()
        futures = [engine.submit(ask([n], 300)) for n in range(3)]
        closing = threading.Thread(target=engine.close, kwargs={"drain": drain})
        closing.start()
        wait_until(lambda: engine._draining, what="the close")  # noqa: B023
        runner.gate.set()
        closing.join()
        for future in futures:
            if drain:
                assert len(future.result(0).completion_token_ids) == 300
            else:
                with pytest.raises(PromptmillError, match="hands the request back"):
                    future.result(0)
        with pytest.raises(PromptmillError, match="closing"):
            engine.submit(ask([1]))
        assert runner.is_closed


def test_a_runner_that_cannot_start_says_why() -> None:
    runner = FakePagedRunner(20, 4, 2, 40)
    runner.fails_to_start = True
    with pytest.raises(RuntimeError, match="no device"):
        make_engine(runner)
    assert runner.is_closed


def test_a_runner_that_can_neither_start_nor_close_says_why_too() -> None:
    runner = FakePagedRunner(20, 4, 2, 40)
    runner.fails_to_start = True
    runner.close = lambda: 1 / 0  # type: ignore[assignment,method-assign]
    with pytest.raises(RuntimeError, match="no device"):
        make_engine(runner)


def test_a_broken_engine_answers_what_it_holds_and_takes_no_more() -> None:
    """A mistake of our own or a device that fails for good ends the engine, but nobody waits for ever."""
    runner = FakePagedRunner(20, 4, 2, 40)
    engine = make_engine(runner)
    runner.result = lambda ticket: 1 / 0  # type: ignore[assignment,method-assign]
    with pytest.raises(PromptmillError) as caught:
        engine.submit(ask([1, 2], 5)).result(60)
    assert caught.value.code == "engine_failed"
    engine._thread.join(60)
    assert not engine.status().is_alive
    with pytest.raises(PromptmillError, match="closing"):
        engine.submit(ask([1]))


@pytest.mark.parametrize("where", ["settle", "release", "match", "best_tail"])
def test_whatever_breaks_an_engine_everybody_hears_of_it(where: str) -> None:
    """Rows that are half admitted or cannot be released keep nobody from an answer, nor the runner from its end."""
    runner = FakePagedRunner(40, 16, 4, 100)
    engine = make_engine(runner, stop_token_ids=[])
    runner.gate.clear()
    futures = [engine.submit(ask([n, 1, 2], 90)) for n in range(3)]
    wait_until(lambda: engine.status().running == 3, what="three rows at work")
    holder = engine._places if where == "settle" else engine._pool
    original = getattr(holder, where)

    def stumble(*arguments: object) -> object:
        setattr(holder, where, original)
        raise ValueError("a mistake of ours")

    setattr(holder, where, stumble)
    futures += [engine.submit(ask([n, 9] * 20, 9)) for n in range(6)]
    runner.gate.set()
    endings = {getattr(future.exception(60), "code", "answered") for future in futures}
    engine._thread.join(60)
    assert "engine_failed" in endings and endings <= {"engine_failed", "answered"}
    assert runner.is_closed and not engine.status().is_alive


def test_a_top_k_beyond_every_integer_is_the_whole_vocabulary() -> None:
    """Lines from before it had a bound may be in a database still."""
    engine = make_engine(FakePagedRunner(40, 4, 4, 100), stop_token_ids=[])
    asked = [engine.submit(ask([5, 6], 9, temperature=1.0, top_k=top_k, seed=3)) for top_k in (0, 2**63, 10**30)]
    assert len({future.result(60).completion_token_ids for future in asked}) == 1
    engine.close()


def test_a_device_that_fails_for_good_ends_the_engine_rather_than_one_request_after_another() -> None:
    """Nobody is told that their prompt failed: whoever runs the engine gives the work to another."""
    runner = FakePagedRunner(20, 4, 2, 40)
    engine = make_engine(runner)
    runner.fail_on_token = 96
    runner.is_lost = True
    with pytest.raises(PromptmillError) as caught:
        engine.submit(ask([96] * 10, 5)).result(60)
    assert caught.value.code == "device_failed"
    wait_until(lambda: not engine.status().is_alive, what="the engine's end")
    with pytest.raises(PromptmillError, match="closing"):
        engine.submit(ask([1]))
    engine.close()


def test_times_and_batch_mates_are_reported() -> None:
    runner = FakePagedRunner(100, 16, 4, 200)
    engine = make_engine(runner, stop_token_ids=[])
    runner.gate.clear()
    futures = [engine.submit(ask([n + 1] * 20, 30)) for n in range(4)]
    runner.gate.set()
    for future in futures:
        completion = future.result(60)
        assert 1.0 <= completion.mean_batch_size <= 4.0
        assert completion.times.wait_s >= 0
        assert completion.times.prefill_s > 0
        assert completion.times.decode_s > 0
    assert futures[-1].result().mean_batch_size > 2.0
    engine.close()


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(1, 100))
def test_pieces_spend_the_budget_and_no_more(remaining: list[int], budget: int) -> None:
    pieces = plan_pieces(remaining, budget)
    assert sum(pieces) == min(budget, sum(remaining))
    assert all(0 < piece <= tokens for piece, tokens in zip(pieces, remaining, strict=False))
    assert pieces[:-1] == remaining[: len(pieces) - 1], "only the last prompt is cut"


def test_prompts_go_first_until_a_burst_is_spent() -> None:
    assert prefers_prefill(can_prefill=True, can_decode=True, burst_left_tokens=1)
    assert not prefers_prefill(can_prefill=True, can_decode=True, burst_left_tokens=0)
    assert prefers_prefill(can_prefill=True, can_decode=False, burst_left_tokens=0)
    assert not prefers_prefill(can_prefill=False, can_decode=True, burst_left_tokens=9)


def test_admission_is_held_only_where_room_is_short() -> None:
    facts = {"admissible": 2, "waiting": 9, "admissible_tokens": 100, "wanted_tokens": 2048, "max_rows": 64}
    assert holds_admission(**facts)
    assert not holds_admission(**{**facts, "admissible_tokens": 4000})
    assert not holds_admission(**{**facts, "waiting": 2})
    assert not holds_admission(**{**facts, "admissible": 8}), "of short prompts an eighth of the rows is enough"
    assert not holds_admission(**{**facts, "admissible": 1, "max_rows": 4})
