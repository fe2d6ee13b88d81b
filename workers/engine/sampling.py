"""From one row of logits to the next token: bias, penalties, log probabilities, temperature, top-k, top-p, seed.

Each request draws from a counter-based generator keyed by its seed, one number a token, so what it draws depends on
nothing but its seed and position. The logits themselves may differ in the last bits between forward batches of
different shape; that is all that can make two runs of one seed differ (docs/architecture.md, "What a seed promises").
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from workers.engine.request import SamplingParameters, TokenLogprobs

Logits = npt.NDArray[np.float32]

# Candidates of a nucleus are gathered by falling thresholds relative to the best token, so that only a handful of the
# vocabulary is ever sorted; the last threshold keeps everything that float32 can tell from zero.
_NUCLEUS_THRESHOLDS = (1e-2, 1e-4, 1e-7, 0.0)
_SEED_MASK = 2**64 - 1


class RowSampler:
    """The sampling state of one request, from its first token to its last."""

    def __init__(self, parameters: SamplingParameters, vocab_size: int) -> None:
        self.parameters = parameters
        self._greedy = parameters.is_greedy
        self._penalized = parameters.frequency_penalty != 0.0 or parameters.presence_penalty != 0.0
        self._counts: dict[int, int] = {}
        bias = [(token, value) for token, value in parameters.logit_bias if 0 <= token < vocab_size]
        self._bias_ids = np.array([token for token, _ in bias], dtype=np.int64)
        self._bias_values = np.array([value for _, value in bias], dtype=np.float32)
        stream = np.random.Philox(key=parameters.seed & _SEED_MASK)
        self._uniforms = None if self._greedy else np.random.Generator(stream)
        # A plain row's token is the argmax of the untouched logits: the fast path takes all such rows at once.
        self.is_plain = self._greedy and not self._penalized and not bias and parameters.logprobs is None

    def sample(self, logits: Logits) -> tuple[int, TokenLogprobs | None]:
        """Choose the next token of this row.

        logits: float32 [vocab_size], may be changed in place.
        """
        if self._bias_ids.size:
            logits[self._bias_ids] += self._bias_values
        if self._penalized and self._counts:
            ids = np.fromiter(self._counts.keys(), dtype=np.int64, count=len(self._counts))
            counts = np.fromiter(self._counts.values(), dtype=np.float32, count=len(self._counts))
            # OpenAI's formula: logit - count * frequency_penalty - (count > 0) * presence_penalty.
            logits[ids] -= counts * np.float32(self.parameters.frequency_penalty) + np.float32(
                self.parameters.presence_penalty
            )
        token = int(logits.argmax()) if self._uniforms is None else self._draw(logits, self._uniforms)
        if self._penalized:
            self._counts[token] = self._counts.get(token, 0) + 1
        if self.parameters.logprobs is None:
            return token, None
        return token, _logprobs(logits, token, self.parameters.logprobs)

    def _draw(self, logits: Logits, uniforms: np.random.Generator) -> int:
        uniform = uniforms.random()
        best = logits.max()
        candidates: npt.NDArray[np.int64] | None = None
        weights = np.exp((logits - best) * np.float32(1.0 / self.parameters.temperature))
        top_k = self.parameters.top_k
        if 0 < top_k < weights.size:
            candidates = _best(weights, top_k)
            weights = weights[candidates]
        if self.parameters.top_p < 1.0:
            kept = _nucleus(weights, self.parameters.top_p)
            candidates = kept if candidates is None else candidates[kept]
            weights = weights[kept]
        cumulative = np.cumsum(weights, dtype=np.float64)
        # side="right" never lands on a token of weight zero; the minimum guards the last bit of rounding.
        place = min(int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right")), cumulative.size - 1)
        return place if candidates is None else int(candidates[place])


def sample_rows(logits: Logits, samplers: Sequence[RowSampler]) -> list[tuple[int, TokenLogprobs | None]]:
    """Choose one token for each row. logits: float32 [len(samplers), vocab_size], may be changed in place."""
    if all(sampler.is_plain for sampler in samplers):
        return [(token, None) for token in logits.argmax(axis=1).tolist()]
    return [sampler.sample(logits[row]) for row, sampler in enumerate(samplers)]


def _best(weights: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.int64]:
    """Indices of the `count` largest weights, largest first, equal ones by their ids: one order on every machine."""
    least = np.partition(weights, -count)[-count]
    above = np.flatnonzero(weights > least)
    level = np.flatnonzero(weights == least)[: count - above.size]
    above = above[np.argsort(-weights[above], kind="stable")]
    return np.concatenate([above, level])


def _nucleus(weights: npt.NDArray[np.float32], top_p: float) -> npt.NDArray[np.int64]:
    """Indices of the smallest set of largest weights that holds at least `top_p` of the mass, largest first."""
    wanted = top_p * float(weights.sum(dtype=np.float64))
    best = float(weights.max())
    for threshold in _NUCLEUS_THRESHOLDS:
        indices = np.flatnonzero(weights >= best * threshold)
        if threshold == 0.0 or float(weights[indices].sum(dtype=np.float64)) >= wanted:
            break
    # A stable sort by falling weight: equal weights keep the order of their ids, on every machine.
    order = np.argsort(-weights[indices], kind="stable")
    cumulative = np.cumsum(weights[indices][order], dtype=np.float64)
    count = min(int(np.searchsorted(cumulative, wanted, side="left")) + 1, order.size)
    return indices[order[:count]]


def _logprobs(logits: Logits, token: int, alternatives: int) -> TokenLogprobs:
    shifted = logits.astype(np.float64) - float(logits.max())
    normalizer = float(np.log(np.exp(shifted).sum()))
    top: tuple[tuple[int, float], ...] = ()
    if alternatives:
        count = min(alternatives, shifted.size)
        indices = np.argpartition(-shifted, count - 1)[:count]
        indices = indices[np.lexsort((indices, -shifted[indices]))]
        top = tuple((int(index), float(shifted[index]) - normalizer) for index in indices)
    return TokenLogprobs(token_id=token, logprob=float(shifted[token]) - normalizer, top=top)
