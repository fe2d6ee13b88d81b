"""The null engine keeps the contract of the engines that run a model; drills and measurements rest on it."""

import threading
import time
from concurrent.futures import CancelledError

import pytest

from storage.errors import PromptmillError
from tests.conftest import wait_until
from workers.engine.null import MOST_TOKENS, NullEngine
from workers.engine.request import FinishReason, GenerationRequest, SamplingParameters


def ask(prompt: list[int], max_tokens: int = 8, **options: object) -> GenerationRequest:
    return GenerationRequest(prompt, SamplingParameters(max_tokens=max_tokens), **options)


def test_it_answers_with_the_end_of_the_prompt() -> None:
    engine = NullEngine(max_batch_size=4, context_length=100)
    completions = [engine.submit(ask([n, n + 1, n + 2], 2)).result(60) for n in range(50)]
    assert [completion.completion_token_ids for completion in completions] == [(n + 1, n + 2) for n in range(50)]
    assert len(engine.submit(ask(list(range(99)), 90)).result(60).completion_token_ids) == MOST_TOKENS
    engine.close()


def test_tokens_come_one_by_one_at_the_set_pace_and_a_caller_can_stop_them() -> None:
    engine = NullEngine(max_batch_size=2, context_length=100, token_s=0.001)
    seen: list[int] = []
    completion = engine.submit(ask([1, 2, 3, 4], on_token=lambda token: seen.append(token) or token == 3)).result(60)
    engine.close()
    assert completion.completion_token_ids == (1, 2, 3) == tuple(seen)
    assert completion.finish_reason is FinishReason.STOP


def test_a_cancelled_request_gives_its_row_back_and_a_late_one_fails() -> None:
    engine = NullEngine(max_batch_size=1, context_length=100, token_s=0.5)
    started = threading.Event()
    given_up = engine.submit(ask(list(range(16)), 16, on_token=lambda _: started.set() or False))
    late = engine.submit(ask([1, 2], deadline=time.monotonic() - 1))
    assert started.wait(60)
    assert given_up.cancel()
    with pytest.raises(PromptmillError) as caught:
        late.result(60)
    assert caught.value.code == "deadline_exceeded"
    with pytest.raises(CancelledError):
        given_up.result(0)
    engine.close()


def test_closing_hands_back_and_draining_finishes() -> None:
    for drain in (False, True):
        engine = NullEngine(max_batch_size=1, context_length=100, token_s=0.01)
        futures = [engine.submit(ask([1, 2, 3, 4])) for _ in range(5)]
        wait_until(lambda: engine.status().running)  # noqa: B023
        engine.close(drain=drain)
        if drain:
            assert all(future.result(0).completion_token_ids == (1, 2, 3, 4) for future in futures)
        else:
            with pytest.raises(PromptmillError, match="hands the request back"):
                futures[-1].result(0)
        with pytest.raises(PromptmillError, match="closing"):
            engine.submit(ask([1]))


def test_a_prompt_beyond_the_context_is_refused() -> None:
    engine = NullEngine(max_batch_size=1, context_length=10)
    with pytest.raises(PromptmillError) as caught:
        engine.submit(ask([1] * 10))
    assert caught.value.code == "context_length_exceeded"
    engine.close()


def test_an_answer_whose_end_is_ignored_is_as_long_as_asked() -> None:
    engine = NullEngine(max_batch_size=1, context_length=100)
    request = GenerationRequest(list(range(64)), SamplingParameters(max_tokens=40, ignore_eos=True))
    assert engine.submit(request).result(60).completion_token_ids == tuple(range(24, 64))
    engine.close()


def test_prompts_are_computed_first_and_in_steps_of_the_budget() -> None:
    """Three prompts of 4 tokens and a budget of 8: two steps of prompts come before any second token."""
    given: list[tuple[int, int]] = []
    engine = NullEngine(
        max_batch_size=4, context_length=100, token_s=1e-4, prefill_tokens_per_s=1e7, prefill_budget_tokens=8
    )
    with engine._wake:  # all arrive together
        futures = [
            engine.submit(ask([n] * 4, 2, on_token=lambda _, n=n: given.append((n, len(given))) or False))
            for n in range(3)
        ]
    for future in futures:
        future.result(60)
    engine.close()
    assert [n for n, _ in given] == [0, 1, 2, 0, 1, 2]
    assert engine.status().steps == 3
