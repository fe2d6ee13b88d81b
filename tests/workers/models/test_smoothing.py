"""Smoothing changes where the rounding falls, and nothing else."""

from pathlib import Path

import numpy as np
import pytest

from tests.checkpoints import DESCRIPTION, Weights, random_weights, save_huggingface
from workers.models.artifact import Artifact
from workers.models.convert import convert
from workers.models.description import DType
from workers.models.reference import reference_logits
from workers.models.smoothing import LARGEST_EXPONENT, STEPS_PER_OCTAVE, Smoother
from workers.models.verify import graph_logits
from workers.models.weights import StoredWeights

TOKENS = [int(token) for token in np.random.default_rng(3).integers(0, DESCRIPTION.vocab_size, 64)]
PROMPT = TOKENS[:16]


def loud_weights() -> Weights:
    """Random weights with a few channels a hundred times louder than the rest, as trained models have them."""
    weights = random_weights(DESCRIPTION)
    for layer in range(DESCRIPTION.num_layers):
        inputs = {"attention_norm": ("attention.q", "attention.k", "attention.v"), "mlp_norm": ("mlp.gate", "mlp.up")}
        for norm, readers in inputs.items():
            weights[f"layers.{layer}.{norm}.weight"][[3, 40]] *= 100
            for reader in readers:
                weights[f"layers.{layer}.{reader}.weight"][:, [3, 40]] /= 100
        weights[f"layers.{layer}.mlp.up.weight"][[7, 70]] *= 100
        weights[f"layers.{layer}.mlp.down.weight"][:, [7, 70]] /= 100
    return weights


def smooth(weights: Weights) -> Weights:
    smoother = Smoother(DESCRIPTION, weights.__getitem__, TOKENS)
    found = dict(weights)
    for layer in range(DESCRIPTION.num_layers):
        found |= dict(smoother.layer(layer))
    return found


def convert_weights(folder: Path, weights: Weights, dtype: DType) -> Artifact:
    source = save_huggingface(folder / "source", DESCRIPTION, weights)
    return convert(str(source), folder / "model", dtype=dtype, cache=folder)


def test_the_float_model_stays_what_it_was(tmp_path: Path) -> None:
    """To float32 rounding: what one channel is divided by, the column that reads it is multiplied by."""
    weights = loud_weights()
    smoothed = smooth(weights)
    before = convert_weights(tmp_path / "before", weights, "float32")
    after = convert_weights(tmp_path / "after", smoothed, "float32")
    wanted = reference_logits(DESCRIPTION, StoredWeights(before.model_path), PROMPT)
    found = reference_logits(DESCRIPTION, StoredWeights(after.model_path), PROMPT)
    np.testing.assert_allclose(found, wanted, atol=1e-6 * wanted.std())
    for name, values in smoothed.items():
        assert values.dtype == np.float32
        assert values.shape == weights[name].shape
        steps = np.log2(np.abs(values / weights[name])) * STEPS_PER_OCTAVE
        np.testing.assert_allclose(steps, np.rint(steps), atol=1e-4)
        assert np.abs(steps).max() <= 2 * LARGEST_EXPONENT * STEPS_PER_OCTAVE


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_loud_channels_cost_less_once_smoothed(tmp_path: Path, dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = loud_weights()
    exact = convert_weights(tmp_path / "exact", weights, "float32")
    wanted = reference_logits(DESCRIPTION, StoredWeights(exact.model_path), PROMPT)

    def error(artifact: Artifact) -> float:
        return float(
            np.sqrt(np.square(graph_logits(artifact, artifact.model_path, PROMPT, 2) - wanted).mean()) / wanted.std()
        )

    smoothed = error(convert_weights(tmp_path / "smoothed", weights, dtype))
    monkeypatch.setattr("workers.models.smoothing.TEXT", "")
    plain = error(convert_weights(tmp_path / "plain", weights, dtype))
    assert smoothed < plain * 0.7


def test_silent_channels_and_short_texts_are_survived() -> None:
    """A channel that is always zero asks for no scale at all."""
    weights = random_weights(DESCRIPTION)
    weights["layers.0.attention_norm.weight"][:] = 0
    weights["layers.1.mlp.up.weight"][5] = 0
    smoother = Smoother(DESCRIPTION, weights.__getitem__, TOKENS[:1])
    for layer in range(DESCRIPTION.num_layers):
        for _, values in smoother.layer(layer):
            assert np.isfinite(values).all()
