"""From logits to a token: the distribution asked for, the same draw for the same seed, OpenAI's formulas."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.engine.request import SamplingParameters
from workers.engine.sampling import RowSampler, _best, sample_rows

VOCAB_SIZE = 50
LOGITS = np.random.default_rng(0).normal(0, 2, VOCAB_SIZE).astype(np.float32)


def sampler(**parameters: object) -> RowSampler:
    return RowSampler(SamplingParameters(max_tokens=10, **parameters), VOCAB_SIZE)


def draw(row: RowSampler, count: int, logits: np.ndarray = LOGITS) -> list[int]:
    return [row.sample(logits.copy())[0] for _ in range(count)]


def softmax(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    return weights / weights.sum()


def test_temperature_zero_takes_the_best_token_on_both_paths() -> None:
    rows = np.stack([LOGITS, LOGITS[::-1]])
    best = [int(LOGITS.argmax()), int(LOGITS[::-1].argmax())]
    assert [token for token, _ in sample_rows(rows.copy(), [sampler(), sampler()])] == best
    assert [token for token, _ in sample_rows(rows.copy(), [sampler(logprobs=0), sampler()])] == best


@pytest.mark.parametrize("temperature", [1e-3, 1e-7, 1e-39, 5e-324])
def test_the_smallest_temperatures_take_the_best_token_too(temperature: float) -> None:
    """The inverse of the last two is infinite, and nothing times that is no number."""
    assert draw(sampler(temperature=temperature, seed=5), 9) == [int(LOGITS.argmax())] * 9


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_softmax_at_the_temperature(temperature: float) -> None:
    count = 20_000
    seen = np.bincount(draw(sampler(temperature=temperature, seed=11), count), minlength=VOCAB_SIZE) / count
    expected = softmax(LOGITS, temperature)
    assert np.abs(seen - expected).max() < 4 * math.sqrt(0.25 / count)


def test_a_seed_draws_the_same_tokens_whatever_shares_the_batch() -> None:
    alone = draw(sampler(temperature=1.0, seed=42), 30)
    mine, other = sampler(temperature=1.0, seed=42), sampler(temperature=1.3, seed=1)
    together = [sample_rows(np.stack([LOGITS, LOGITS]), [other, mine])[1][0] for _ in range(30)]
    assert alone == together
    assert alone != draw(sampler(temperature=1.0, seed=43), 30)


def test_seeds_of_any_sign_and_size_are_taken() -> None:
    for seed in (-1, 0, 2**63, 2**64 + 5):
        draw(sampler(temperature=1.0, seed=seed), 1)


@settings(max_examples=60, deadline=None)
@given(st.floats(0.05, 0.999), st.integers(0, 2**32))
def test_top_p_keeps_the_smallest_set_that_holds_the_mass(top_p: float, seed: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, VOCAB_SIZE).astype(np.float32)
    probabilities = softmax(logits)
    order = np.argsort(-probabilities, kind="stable")
    count = int(np.searchsorted(np.cumsum(probabilities[order]), top_p - 1e-6)) + 1
    allowed = set(order[: count + 1].tolist())  # one more for float32 rounding at the edge
    assert set(draw(sampler(temperature=1.0, top_p=top_p, seed=seed), 50, logits)) <= allowed


def test_a_tiny_top_p_is_greedy() -> None:
    assert set(draw(sampler(temperature=2.0, top_p=1e-9, seed=1), 50)) == {int(LOGITS.argmax())}


def test_candidates_of_top_k_stand_in_one_order_on_every_machine() -> None:
    """Largest first, equal ones by id: else the same seed would draw another token elsewhere."""
    weights = np.array([0.5, 1.0, 0.25, 0.5, 1.0, 0.5, 0.25], dtype=np.float32)
    assert _best(weights, 4).tolist() == [1, 4, 0, 3]
    assert _best(weights, 6).tolist() == [1, 4, 0, 3, 5, 2]
    assert _best(weights, 1).tolist() == [1]


def test_top_k_keeps_the_k_best() -> None:
    allowed = set(np.argsort(-LOGITS)[:3].tolist())
    assert set(draw(sampler(temperature=5.0, top_k=3, seed=1), 300)) == allowed
    assert set(draw(sampler(temperature=5.0, top_k=VOCAB_SIZE + 1, seed=1), 300)) > allowed


def test_logit_bias_forces_and_forbids() -> None:
    worst, best = int(LOGITS.argmin()), int(LOGITS.argmax())
    assert draw(sampler(logit_bias=((worst, 100.0),)), 1) == [worst]
    assert draw(sampler(logit_bias=((best, -100.0), (VOCAB_SIZE + 7, 3.0))), 1) != [best]


def test_penalties_follow_the_openai_formula() -> None:
    """logit - count * frequency - (count > 0) * presence: with two near ties the choice flips as counts grow."""
    logits = np.full(VOCAB_SIZE, -50.0, dtype=np.float32)
    logits[7], logits[8] = 1.0, 0.0
    assert draw(sampler(), 4, logits) == [7, 7, 7, 7]
    assert draw(sampler(presence_penalty=1.5), 4, logits) == [7, 8, 7, 7]
    assert draw(sampler(frequency_penalty=0.6), 5, logits) == [7, 7, 8, 7, 8]


def test_logprobs_are_those_of_the_softmax_and_the_best_come_first() -> None:
    token, logprobs = sampler(logprobs=3, temperature=1.0, seed=3).sample(LOGITS.copy())
    expected = np.log(softmax(LOGITS))
    assert logprobs is not None
    assert logprobs.token_id == token
    assert logprobs.logprob == pytest.approx(expected[token], abs=1e-5)
    assert [index for index, _ in logprobs.top] == np.argsort(-LOGITS)[:3].tolist()
    assert [value for _, value in logprobs.top] == pytest.approx(np.sort(expected)[::-1][:3].tolist(), abs=1e-5)
