"""The step loop against a runner whose answers depend on every token of the context: see fake_runner.py."""

import itertools
import random
import threading
import time
from concurrent.futures import CancelledError

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.errors import PromptmillError
from tests.conftest import wait_until
from tests.workers.engine.fake_runner import VOCAB_SIZE, FakeRunner, continuation
from workers.engine.engine import Engine
from workers.engine.request import FinishReason, GenerationRequest, SamplingParameters
from workers.engine.scheduler import decode_buckets

STOP = 3


def make_engine(runner: FakeRunner, **options: object) -> Engine:
    options = {"stop_token_ids": [STOP], **options}
    return Engine(runner, buckets=decode_buckets(runner.slots), **options)


def ask(prompt: list[int], max_tokens: int = 8, **options: object) -> GenerationRequest:
    request_options = {key: options.pop(key) for key in ("deadline", "on_token") if key in options}
    return GenerationRequest(prompt, SamplingParameters(max_tokens=max_tokens, **options), **request_options)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    slots=st.sampled_from([1, 2, 3, 8, 20]),
    context_length=st.sampled_from([90, 200]),
    budget=st.sampled_from([1, 7, 50, 512]),
    prefix_reuse=st.booleans(),
    count=st.integers(1, 50),
)
def test_every_request_gets_the_answer_it_would_get_alone(
    seed: int, slots: int, context_length: int, budget: int, prefix_reuse: bool, count: int
) -> None:
    """Batching, chunking, prefix copies, moves and padding are invisible: the one property all others serve."""
    rng = random.Random(seed)
    runner = FakeRunner(slots, context_length)
    engine = make_engine(runner, prefill_budget_tokens=budget, prefix_reuse=prefix_reuse)
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(60)]
    asked = []
    for _ in range(count):
        head = shared[: rng.randrange(61)] if rng.random() < 0.6 else []
        prompt = head + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 29))]
        max_tokens = rng.randrange(1, 80)
        asked.append((prompt, max_tokens, engine.submit(ask(prompt, max_tokens))))
        if rng.random() < 0.1:
            time.sleep(0.001)
    for prompt, max_tokens, future in asked:
        room = context_length - len(prompt) + 1
        wanted, reason = continuation(prompt, min(max_tokens, room), frozenset([STOP]))
        completion = future.result(60)
        assert list(completion.completion_token_ids) == wanted
        assert completion.finish_reason == reason
        assert completion.prompt_tokens == len(prompt)
    engine.close()


def test_decode_steps_carry_little_padding_when_rows_finish_at_different_times() -> None:
    """Rows are moved together, so a step's bucket stays within an eighth of the rows that need it."""
    runner = FakeRunner(32, 200)
    engine = make_engine(runner, stop_token_ids=[])
    rng = random.Random(5)
    futures = [
        engine.submit(ask([rng.randrange(VOCAB_SIZE) for _ in range(20)], rng.randrange(5, 150))) for _ in range(64)
    ]
    for future in futures:
        future.result(60)
    engine.close()
    decoded = sum(rows for _, rows in runner.decode_shapes)
    computed = sum(bucket for bucket, _ in runner.decode_shapes)
    assert computed <= decoded * 1.125


def test_a_shared_beginning_is_computed_once_however_the_prompts_arrive() -> None:
    shared = [n % VOCAB_SIZE for n in range(100)]
    runner = FakeRunner(8, 200)
    engine = make_engine(runner, stop_token_ids=[])
    runner.gate.clear()
    futures = [engine.submit(ask([*shared, own, own + 1], 5)) for own in range(40)]
    runner.gate.set()
    completions = [future.result(60) for future in futures]
    engine.close()
    assert runner.prefilled_tokens <= 102 + 39 * 2 + 100  # a straggler may have been admitted beside the first
    assert sum(completion.cached_tokens >= 100 for completion in completions) >= 38
    assert completions[0].cached_tokens == 0


def test_prefix_reuse_can_be_switched_off() -> None:
    shared = [n % VOCAB_SIZE for n in range(100)]
    runner = FakeRunner(8, 200)
    engine = make_engine(runner, prefix_reuse=False)
    completions = [engine.submit(ask([*shared, own], 2)).result(60) for own in range(5)]
    engine.close()
    assert runner.copied_tokens == 0
    assert [completion.cached_tokens for completion in completions] == [0] * 5


def test_long_prompts_do_not_starve_rows_that_decode() -> None:
    """Between two tokens of a decoding row no more than one budget of prompt tokens is computed."""
    runner = FakeRunner(4, 2000)
    engine = make_engine(runner, stop_token_ids=[], prefill_budget_tokens=64)
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
    assert max(gaps) <= 64
    assert sum(gaps) > 1000


def test_a_cancelled_future_gives_its_row_back() -> None:
    runner = FakeRunner(1, 2000)
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
    runner = FakeRunner(1, 5000)
    engine = make_engine(runner, stop_token_ids=[])
    soon = time.monotonic() + 0.05
    slow = ask([1], 4900, deadline=soon, on_token=lambda _token: time.sleep(0.002) or False)
    futures = [engine.submit(slow), engine.submit(ask([2], 3, deadline=soon))]
    for future in futures:
        with pytest.raises(PromptmillError) as caught:
            future.result(60)
        assert caught.value.code == "deadline_exceeded"
    assert engine.submit(ask([2], 3)).result(60).finish_reason == FinishReason.LENGTH
    engine.close()


def test_a_failed_model_run_ends_only_the_requests_that_were_in_it() -> None:
    runner = FakeRunner(4, 100)
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


def test_a_prompt_beyond_the_context_is_refused_with_the_numbers() -> None:
    engine = make_engine(FakeRunner(1, 50))
    with pytest.raises(PromptmillError, match="50 tokens and the context holds 50") as caught:
        engine.submit(ask([1] * 50))
    assert caught.value.code == "context_length_exceeded"
    assert engine.submit(ask([1] * 49, 5)).result(60).finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
    engine.close()


def test_on_token_can_end_a_request_and_sees_every_token_but_the_stop_token() -> None:
    engine = make_engine(FakeRunner(2, 200), stop_token_ids=[])
    seen: list[int] = []
    completion = engine.submit(ask([9], 50, on_token=lambda token: seen.append(token) or len(seen) == 4)).result(60)
    assert list(completion.completion_token_ids) == seen == continuation([9], 4)[0]
    assert completion.finish_reason == FinishReason.STOP
    engine.close()


def test_ignore_eos_goes_on_past_a_stop_token() -> None:
    prompt = next([n] for n in range(VOCAB_SIZE) if STOP in continuation([n], 30)[0])
    engine = make_engine(FakeRunner(2, 200))
    stopped = engine.submit(ask(prompt, 30)).result(60)
    ignoring = engine.submit(ask(prompt, 30, ignore_eos=True)).result(60)
    engine.close()
    assert stopped.finish_reason == FinishReason.STOP
    assert list(ignoring.completion_token_ids) == continuation(prompt, 30)[0]


def test_closing_hands_back_what_is_unfinished_and_draining_answers_it() -> None:
    for drain in (False, True):
        runner = FakeRunner(1, 1000)
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


def test_requests_from_many_threads_are_all_answered() -> None:
    engine = make_engine(FakeRunner(8, 200), stop_token_ids=[])
    answers: dict[int, list[int]] = {}

    def client(first: int) -> None:
        for n in range(first, first + 20):
            answers[n] = list(engine.submit(ask([n % VOCAB_SIZE, n], 5)).result(60).completion_token_ids)

    threads = [threading.Thread(target=client, args=(first,)) for first in range(0, 160, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.close()
    assert answers == {n: continuation([n % VOCAB_SIZE, n], 5)[0] for n in range(160)}


def test_times_and_batch_mates_are_reported() -> None:
    runner = FakeRunner(4, 200)
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


def test_a_broken_engine_answers_what_it_holds_and_takes_no_more() -> None:
    """A mistake of our own ends the engine, but nobody waits for ever."""
    engine = make_engine(FakeRunner(2, 100))
    engine._compact = lambda: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(PromptmillError) as caught:
        engine.submit(ask([1, 2], 5)).result(60)
    assert caught.value.code == "engine_failed"
    engine._thread.join(60)
    assert not engine.status().is_alive
    with pytest.raises(PromptmillError, match="closing"):
        engine.submit(ask([1]))
