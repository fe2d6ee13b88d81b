"""A mixed load for minutes: no answer wrong, no block lost, no memory that only grows.

One test with three engines: the pretended runner for seconds, the CPU flavour (`make drill`), a GPU (`make test-gpu`).
SOAK_MINUTES says how long the last two last; SMOLLM2_ARTIFACT names a float32 artifact to be used instead of the
stories.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Literal

import numpy as np
import pynvml
import pytest

from benchmarks.mixed_load import (
    Agreement,
    Answered,
    LoadReport,
    Mix,
    compare_alone,
    growth,
    is_near_tie,
    run_mixed_load,
    wrong_form,
)
from benchmarks.workloads import EXAMPLES
from jobs.settings import EngineSettings
from tests.shared_data import stories_folder
from tests.workers.engine.fake_paged_runner import FakePagedRunner
from tests.workers.engine.fake_runner import VOCAB_SIZE
from workers.devices import list_devices, open_nvml, read_device, visible
from workers.engine.engine import Engine
from workers.engine.flavour import cuda_trouble, load_libraries
from workers.engine.opening import open_engine
from workers.engine.paged_engine import PagedEngine
from workers.engine.request import (
    AnyEngine,
    Completion,
    FinishReason,
    GenerationRequest,
    SamplingParameters,
    TokenLogprobs,
)
from workers.models.artifact import Artifact, kv_bytes_per_token, load_artifact
from workers.models.convert import convert
from workers.tokenizer import Tokenizer

CONTEXT = 512
ROWS = 32
MIX = Mix([], longest_prompt=400, longest_answer=100)


def minutes(default: float) -> float:
    return float(os.environ.get("SOAK_MINUTES") or default)


def assert_sound(report: LoadReport, agreement: Agreement) -> None:
    print(f"soak: {json.dumps(report.figures())}")
    print(f"soak: {json.dumps(agreement.figures())}")
    assert not report.wrong
    assert not agreement.wrong
    assert report.answered + report.cancelled + report.expired == report.submitted
    assert report.submitted < 200 or (report.interactive and report.cancelled), "the load is what it should be"
    # A near tie is rare: answers that part often do so for another reason.
    assert agreement.identical >= 0.8 * agreement.answers
    assert agreement.answers == len(report.sample) > 0


def assert_nothing_held(engine: AnyEngine) -> None:
    """After the last answer: every block and row is free, and no book-keeping is left of those that had them."""
    if isinstance(engine, Engine):
        engine._cache.check_integrity()
        assert engine._cache.free_count == engine._runner.slots
        return
    assert isinstance(engine, PagedEngine)
    engine._pool.check_integrity()
    assert engine._pool.available == engine._pool.count - 1
    assert not engine._computing and not engine._prefilling and not engine._flight
    assert sorted(engine._places.free) == list(range(engine._runner.max_rows))
    assert engine._running == engine._interactive_running == 0


# --- the pretended runner ----------------------------------------------------------------------------------------


def test_a_mixed_load_is_answered_as_each_request_alone() -> None:
    """Few blocks, so that rows are preempted, and short ones, so that tails are copied."""
    rng = random.Random(4)
    text = [rng.randrange(VOCAB_SIZE) for _ in range(700)]
    runner = FakePagedRunner(40, 8, 12, 120, reserved_rows=2, prefix_min_blocks=1)
    engine = PagedEngine(
        runner,
        stop_token_ids=[3],
        prefill_budget_tokens=60,
        least_copied_tokens=2,
        interactive_rows=2,
        interactive_burst_tokens=30,
    )
    mix = Mix(text, longest_prompt=90, longest_answer=30)
    report = run_mixed_load(engine, mix, seconds=4, seed=1, sample_size=100_000)
    engine.close(drain=True)
    assert_nothing_held(engine)
    print(f"soak: {engine._preemptions} preemptions, {runner.copied_tokens} tokens copied")
    alone = PagedEngine(FakePagedRunner(40, 8, 1, 120), stop_token_ids=[3], prefix_reuse=False)
    agreement = compare_alone(alone, report.sample, stop_token_ids=[3], tie=0.0)
    alone.close()
    assert_sound(report, agreement)
    assert agreement.identical == agreement.answers


# --- real models -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def soaked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Artifact, list[int]]:
    """An artifact, and text of the kind it knows."""
    folder = os.environ.get("SMOLLM2_ARTIFACT")
    if folder:
        artifact = load_artifact(Path(folder), check_digests=False)
        return artifact, Tokenizer(artifact).encode((EXAMPLES / "handbook.md").read_text())
    place = tmp_path_factory.mktemp("soaked")
    artifact = convert(str(stories_folder()), place / "stories", dtype="float32", cache=place)
    cases = [json.loads(line) for line in (stories_folder() / "greedy.jsonl").read_text().splitlines()]
    return artifact, [token for case in cases for token in case["prompt_token_ids"] + case["completion_token_ids"]]


def soak(
    artifact: Artifact,
    text: Sequence[int],
    flavour: Literal["cpu", "cuda"],
    *,
    seconds: float,
    tie: float,
    sample_size: int = 100,
    kv_cache_mib: int = 0,
    device_bytes: Callable[[], int | None] = lambda: None,
) -> LoadReport:
    """Load an engine as `open_engine` opens it, then compare with one of a single row that shares nothing."""
    settings = EngineSettings(max_batch_size=ROWS, context_length=CONTEXT, kv_cache_mib=kv_cache_mib)
    engine = open_engine(artifact, settings, flavour)
    mix = Mix(text, longest_prompt=MIX.longest_prompt, longest_answer=MIX.longest_answer)
    report = run_mixed_load(
        engine, mix, seconds=seconds, seed=int(seconds), sample_size=sample_size, device_bytes=device_bytes
    )
    engine.close(drain=True)
    assert_nothing_held(engine)
    if isinstance(engine, PagedEngine):
        print(f"soak: {engine._preemptions} preemptions, {engine._pool.count} blocks")
    single = EngineSettings(max_batch_size=1, context_length=CONTEXT, prefix_reuse=False)
    alone = open_engine(artifact, single, flavour)
    stop_token_ids = list(artifact.tokenizer.stop_token_ids)
    agreement = compare_alone(alone, report.sample, stop_token_ids=stop_token_ids, tie=tie)
    alone.close()
    assert_sound(report, agreement)
    return report


@pytest.mark.drill
@pytest.mark.timeout(3600)
def test_a_cpu_engine_stands_minutes_of_mixed_load(soaked: tuple[Artifact, list[int]]) -> None:
    """float32 in other batches rounds otherwise by some 1e-5."""
    report = soak(*soaked, "cpu", seconds=60 * minutes(3), tie=1e-3)
    assert report.resident_growth <= 64 << 20


@pytest.mark.gpu
@pytest.mark.timeout(7200)
def test_a_gpu_engine_stands_minutes_of_mixed_load(soaked: tuple[Artifact, list[int]]) -> None:
    """With a third of the KV cache that all rows could fill, so that blocks run out; float16 rounds by some 1e-2."""
    if reason := cuda_trouble():
        pytest.skip(reason)
    load_libraries()
    artifact, _ = soaked
    half_as_wide = kv_bytes_per_token(artifact.description) // 2
    kv_cache_mib = max(1, ROWS * CONTEXT * half_as_wide // 3 >> 20)
    with open_nvml(pynvml):
        device = visible(list_devices(pynvml), os.environ.get("CUDA_VISIBLE_DEVICES"))[0]
        report = soak(
            *soaked,
            "cuda",
            seconds=60 * minutes(20),
            tie=3e-2,
            sample_size=300,
            kv_cache_mib=kv_cache_mib,
            device_bytes=lambda: read_device(pynvml, device).memory_used_bytes,
        )
    assert report.resident_growth <= 64 << 20
    # Libraries keep a plan for each new shape of a prompt, a few KiB each; an allocation that leaks is far more.
    assert report.device_growth is not None and report.device_growth <= 64 << 20


# --- the rules ---------------------------------------------------------------------------------------------------


def entry_of(*probabilities: float, taken: int = 0) -> TokenLogprobs:
    logprobs = [math.log(probability) for probability in probabilities]
    return TokenLogprobs(taken, logprobs[taken], tuple(enumerate(logprobs)))


def test_a_greedy_choice_is_a_near_tie_only_where_both_were_as_likely() -> None:
    greedy = SamplingParameters(5)
    assert is_near_tie(entry_of(0.4, 0.399, 0.1), 1, greedy, 0, 0.01)
    assert not is_near_tie(entry_of(0.4, 0.399, 0.1), 2, greedy, 0, 0.01)
    assert not is_near_tie(entry_of(0.4, 0.399, 0.1), 7, greedy, 0, 0.01), "a token that is no candidate"


def seed_for(low: float, high: float) -> int:
    """A seed whose first number falls between these two."""
    draws = ((seed, np.random.Generator(np.random.Philox(key=seed)).random()) for seed in range(100_000))
    return next(seed for seed, draw in draws if low < draw < high)


def test_a_draw_is_a_near_tie_only_where_its_number_was_near_to_the_border() -> None:
    # Four candidates; the seed whose first number falls just below the border between the second and the third.
    entry = entry_of(0.5, 0.25, 0.15, 0.1, taken=1)
    border = SamplingParameters(5, temperature=1.0, top_k=4, seed=seed_for(0.745, 0.75))
    middle = SamplingParameters(5, temperature=1.0, top_k=4, seed=seed_for(0.62, 0.63))
    assert is_near_tie(entry, 2, border, 0, 0.01)
    assert not is_near_tie(entry, 2, middle, 0, 0.01)
    assert not is_near_tie(entry, 0, border, 0, 0.01)
    # In a nucleus of 0.75 two candidates are left, or with other arithmetic three.
    nucleus = SamplingParameters(5, temperature=1.0, top_k=4, top_p=0.75, seed=seed_for(0.9, 0.91))
    assert is_near_tie(entry, 2, nucleus, 0, 0.01)
    assert not is_near_tie(entry, 3, nucleus, 0, 0.01)


def test_a_draw_may_have_taken_a_token_in_the_place_of_one_as_likely() -> None:
    # Three candidates that end at 0.625, 0.875 and 1; a fourth token is as likely as the third.
    entry = entry_of(0.5, 0.2, 0.1, 0.0995, 0.05, taken=1)
    border = SamplingParameters(5, temperature=1.0, top_k=3, seed=seed_for(0.871, 0.875))
    middle = SamplingParameters(5, temperature=1.0, top_k=3, seed=seed_for(0.7, 0.8))
    assert is_near_tie(entry, 3, border, 0, 0.01)
    assert not is_near_tie(entry, 3, middle, 0, 0.01)
    assert not is_near_tie(entry, 4, border, 0, 0.01)
    # Of two as likely the last to come may be either: here the first of them ends where the third begins.
    either = entry_of(0.4, 0.2, 0.1995, 0.15, taken=3)
    border = SamplingParameters(5, temperature=1.0, top_k=4, seed=seed_for(0.837, 0.842))
    assert is_near_tie(either, 1, border, 0, 0.01)
    assert not is_near_tie(either, 0, border, 0, 0.01)


def completion_of(token_ids: Sequence[int], logprob: float, reason: FinishReason = FinishReason.LENGTH) -> Completion:
    """As an engine answers. The token behind each is as likely as it by a tenth."""
    logprobs = [TokenLogprobs(n, logprob, ((n, logprob), (n + 1, logprob - 0.1))) for n in token_ids]
    return Completion(tuple(token_ids), reason, tuple(logprobs), 2, 0, 1.0)


class Says:
    """Answers every request alike."""

    def __init__(self, completion: Completion) -> None:
        self._completion = completion

    def submit(self, _request: GenerationRequest) -> Future[Completion]:
        future: Future[Completion] = Future()
        future.set_result(self._completion)
        return future


@pytest.mark.parametrize(
    ("said", "alone", "tie", "is_right"),
    [
        (completion_of([5, 6], -1.0), completion_of([5, 6], -1.0), 0.0, True),
        (completion_of([5, 6], -1.0), completion_of([5, 6], -1.01), 0.02, True),
        (completion_of([5, 6], -1.0), completion_of([5, 6], -1.1), 0.02, False),
        (completion_of([5, 6], -1.0), completion_of([5, 7], -1.0), 0.02, False),
        (completion_of([5, 8], -1.0), completion_of([5, 7], -1.0), 0.2, True),
        (completion_of([5, 8], -1.0), completion_of([5, 7], -1.0), 0.0, False),
        (completion_of([5], -1.0, FinishReason.STOP), completion_of([5, 3], -1.0), 0.0, True),
        (completion_of([5], -1.0, FinishReason.STOP), completion_of([5, 9], -1.0), 0.2, False),
        (completion_of([5], -1.0, FinishReason.STOP), completion_of([5, 2], -1.0), 0.2, True),
    ],
    ids=["same", "rounding", "gap", "wrong", "tie", "tie but exact", "stop", "wrong stop", "near stop"],
)
def test_an_answer_is_held_against_the_one_given_alone(
    said: Completion, alone: Completion, tie: float, is_right: bool
) -> None:
    """Token 3 is the stop token."""
    request = GenerationRequest([1, 2], SamplingParameters(2, logprobs=0))
    agreement = compare_alone(Says(alone), [Answered(request, said)], stop_token_ids=[3], tie=tie)  # type: ignore[arg-type]
    assert bool(agreement.wrong) == (not is_right)


def test_an_answer_of_the_wrong_form_is_seen() -> None:
    request = GenerationRequest([1, 2], SamplingParameters(3, logprobs=0), on_token=lambda _token_id: False)
    right = completion_of([5, 6, 7], -1.0)
    assert not wrong_form(request, [5, 6, 7], right, 100)
    assert wrong_form(request, [5, 6], right, 100), "a token was not told"
    assert wrong_form(request, [5, 6], completion_of([5, 6], -1.0), 100), "too short"
    assert wrong_form(request, [5, 6, 7, 8], completion_of([5, 6, 7, 8], -1.0), 100), "too long"
    assert wrong_form(request, [5, 6, 7], dataclasses.replace(right, prompt_tokens=3), 100)
    assert wrong_form(request, [5, 6, 7], dataclasses.replace(right, logprobs=None), 100)


def test_growth_is_that_after_the_warm_up() -> None:
    assert growth([0, 50, 100, 100, 100, 101, 100, 100]) == 0
    assert growth(list(range(0, 80, 10))) == 40
    assert growth([7]) == 0
