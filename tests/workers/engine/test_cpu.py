"""The engine over real graphs on the CPU provider: the reference's stories, and NumPy's float64 on a random model."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from jobs.settings import EngineSettings
from tests.checkpoints import DESCRIPTION, random_weights, save_huggingface
from tests.shared_data import stories_folder
from workers.engine.engine import Engine
from workers.engine.opening import open_engine
from workers.engine.request import Completion, GenerationRequest, SamplingParameters
from workers.models.artifact import Artifact
from workers.models.convert import convert
from workers.models.reference import reference_logits
from workers.models.weights import StoredWeights


@dataclass(frozen=True)
class Known:
    """One prompt of the reference and what transformers answered in float32."""

    prompt: list[int]
    answer: list[int]
    logprobs: list[float]


@pytest.fixture(scope="module")
def known() -> list[Known]:
    lines = (stories_folder() / "greedy.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [Known(r["prompt_token_ids"], r["completion_token_ids"], r["logprobs"]) for r in records]


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("stories")
    return convert(str(stories_folder()), folder / "stories", dtype="float32", cache=folder)


def open_small(artifact: Artifact, rows: int, **options: object) -> Engine:
    values = {"max_batch_size": rows, "context_length": 256, "threads": 1, "allow_spinning": False, **options}
    return open_engine(artifact, EngineSettings(**values), "cpu")


def ask(engine: Engine, prompt: Sequence[int], max_tokens: int, **options: object) -> Future[Completion]:
    return engine.submit(GenerationRequest(prompt, SamplingParameters(max_tokens=max_tokens, **options)))


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (1, {}),
        (12, {}),
        (5, {"prefill_chunk_tokens": 3}),
        (12, {"prefix_reuse": False}),
        (3, {"prefill_chunk_tokens": 7, "prefix_reuse": False}),
    ],
    ids=["alone", "all at once", "chunked", "no reuse", "few rows, chunked, no reuse"],
)
def test_float32_reproduces_every_greedy_id_and_log_probability(
    stories: Artifact, known: list[Known], rows: int, options: dict[str, object]
) -> None:
    """However the prompts are batched and cut, the answers are those of the reference implementation."""
    engine = open_small(stories, rows, **options)
    order = list(range(len(known)))
    random.Random(rows).shuffle(order)
    futures = {n: ask(engine, known[n].prompt, len(known[n].answer), logprobs=0) for n in order}
    for n, future in futures.items():
        completion = future.result(60)
        assert list(completion.completion_token_ids) == known[n].answer
        assert completion.logprobs is not None
        got = [step.logprob for step in completion.logprobs[: len(known[n].logprobs)]]
        assert got == pytest.approx(known[n].logprobs, abs=1e-4)
    engine.close()


def test_prompts_with_one_beginning_answer_as_if_it_were_computed_for_each(stories: Artifact) -> None:
    """Copied rows of the KV cache are as good as computed ones, whether prompts arrive together or one by one."""
    rng = random.Random(3)
    shared = [1] + [rng.randrange(3, 512) for _ in range(99)]
    prompts = [shared[: rng.randrange(40, 100)] + [rng.randrange(3, 512) for _ in range(5)] for _ in range(24)]
    answers = []
    for reuse in (False, True):
        engine = open_small(stories, 6, prefix_reuse=reuse)
        completions = [future.result(60) for future in [ask(engine, prompt, 20) for prompt in prompts]]
        engine.close()
        assert any(completion.cached_tokens for completion in completions) == reuse
        answers.append([completion.completion_token_ids for completion in completions])
    assert answers[0] == answers[1]


def test_a_seed_gives_the_same_answer_alone_and_in_company(stories: Artifact, known: list[Known]) -> None:
    engine = open_small(stories, 8)
    alone = ask(engine, known[0].prompt, 60, temperature=0.9, top_p=0.95, seed=7).result(60)
    company = [ask(engine, each.prompt, 60, temperature=1.1, seed=n) for n, each in enumerate(known)]
    again = ask(engine, known[0].prompt, 60, temperature=0.9, top_p=0.95, seed=7).result(60)
    other = ask(engine, known[0].prompt, 60, temperature=0.9, top_p=0.95, seed=8).result(60)
    for future in company:
        future.result(60)
    engine.close()
    assert alone.completion_token_ids == again.completion_token_ids
    assert alone.completion_token_ids != other.completion_token_ids


@pytest.fixture(scope="module", params=["float32", "bfloat16", "float16", "int8", "int4"])
def odd_artifact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Artifact]:
    """A random model with 3 KV heads and an odd vocabulary, in every dtype."""
    folder: Path = tmp_path_factory.mktemp("odd")
    save_huggingface(folder / "source", DESCRIPTION, random_weights(DESCRIPTION))
    yield convert(str(folder / "source"), folder / request.param, dtype=request.param, cache=folder)


# Log probabilities against float64 over the same stored weights. float types differ by float32 arithmetic alone;
# int8 and int4 round the activations too, in blocks (accuracy level 4) or, on AMX, whole rows.
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-5, "float16": 2e-5, "int8": 0.2, "int4": 0.3}


def test_every_shape_of_run_agrees_with_one_full_pass_in_float64(odd_artifact: Artifact) -> None:
    """Batched and single, padded and exact, prefill plus decode: all against a pass without any cache."""
    rng = random.Random(1)
    vocab_size = odd_artifact.description.vocab_size
    prompts = [[rng.randrange(vocab_size) for _ in range(length)] for length in (1, 2, 3, 9, 17, 17, 18, 31)]
    weights = StoredWeights(odd_artifact.model_path)
    for rows, budget in ((8, 512), (3, 5), (1, 512)):
        engine = open_small(odd_artifact, rows, context_length=64, prefill_chunk_tokens=budget)
        futures = [ask(engine, prompt, 6, logprobs=0, ignore_eos=True) for prompt in prompts]
        for prompt, future in zip(prompts, futures, strict=True):
            completion = future.result(60)
            assert completion.logprobs is not None
            whole = [*prompt, *completion.completion_token_ids]
            logits = reference_logits(odd_artifact.description, weights, whole)
            shifted = logits - logits.max(axis=1, keepdims=True)
            logprobs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
            wanted = [logprobs[len(prompt) - 1 + n, token] for n, token in enumerate(completion.completion_token_ids)]
            got = [step.logprob for step in completion.logprobs]
            assert got == pytest.approx(wanted, abs=TOLERANCE[odd_artifact.dtype])
        engine.close()
