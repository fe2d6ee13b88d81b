"""Rotary tables: each scaling against its own paper's or reference code's formula, written out here once more."""

import dataclasses
import math

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.checkpoints import DESCRIPTION
from workers.models.description import FrequencyFactors, LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from workers.models.rope import rotary_tables, yarn_attention_factor

HEAD_DIM = DESCRIPTION.head_dim
THETA = 500000.0


def angles(scaling: RopeScaling | None) -> NDArray[np.float64]:
    """Radians that one position turns each channel pair."""
    description = dataclasses.replace(DESCRIPTION, rope_theta=THETA, rope_scaling=scaling)
    cos, sin = rotary_tables(description, 2)
    found: NDArray[np.float64] = np.arctan2(sin[1], cos[1])
    return found


def test_without_scaling_frequencies_fall_from_one_to_near_one_over_theta() -> None:
    wanted = [THETA ** (-2 * pair / HEAD_DIM) for pair in range(HEAD_DIM // 2)]
    np.testing.assert_allclose(angles(None), wanted, rtol=1e-12)


def test_position_zero_does_not_turn() -> None:
    cos, sin = rotary_tables(DESCRIPTION, 4)
    assert cos.shape == sin.shape == (4, HEAD_DIM // 2)
    np.testing.assert_array_equal(cos[0], 1)
    np.testing.assert_array_equal(sin[0], 0)


def test_linear_scaling_divides_positions() -> None:
    np.testing.assert_allclose(angles(LinearScaling(4.0)), angles(None) / 4, rtol=1e-12)


def test_factors_divide_one_frequency_each() -> None:
    factors = tuple(float(factor) for factor in range(1, HEAD_DIM // 2 + 1))
    np.testing.assert_allclose(angles(FrequencyFactors(factors)), angles(None) / factors, rtol=1e-12)


def test_llama3_scaling_keeps_high_frequencies_and_divides_low_ones() -> None:
    """The three branches of Meta's `apply_scaling`."""
    factor, low, high, original = 8.0, 1.0, 4.0, 8192
    wanted = []
    for frequency in angles(None):
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            wanted.append(frequency)
        elif wavelength > original / low:
            wanted.append(frequency / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            wanted.append((1 - smooth) * frequency / factor + smooth * frequency)
    found = angles(Llama3Scaling(factor, low, high, original))
    np.testing.assert_allclose(found, wanted, rtol=1e-9)
    assert found[0] == pytest.approx(angles(None)[0])
    assert found[-1] == pytest.approx(angles(None)[-1] / factor)


def test_yarn_interpolates_between_the_channels_that_turn_32_times_and_once() -> None:
    """The authors' `find_correction_range` and `linear_ramp_mask`; cos and sin carry the attention factor."""
    factor, original = 4.0, 2048
    gain = yarn_attention_factor(factor)
    assert gain == pytest.approx(0.1 * math.log(4.0) + 1)

    def channel(rotations: float) -> float:
        return HEAD_DIM * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(THETA))

    low, high = max(math.floor(channel(32)), 0), min(math.ceil(channel(1)), HEAD_DIM - 1)
    ramp = np.clip((np.arange(HEAD_DIM // 2) - low) / (high - low), 0, 1)
    wanted = angles(None) / factor * ramp + angles(None) * (1 - ramp)
    description = dataclasses.replace(
        DESCRIPTION, rope_theta=THETA, rope_scaling=YarnScaling(factor, original, attention_factor=gain)
    )
    cos, sin = rotary_tables(description, 8)
    np.testing.assert_allclose(np.arctan2(sin[1], cos[1]), wanted, rtol=1e-12)
    np.testing.assert_allclose(np.hypot(cos, sin), gain, rtol=1e-12)


def test_deepseek_states_its_attention_factor_as_a_ratio() -> None:
    assert yarn_attention_factor(40.0, 1.0, 1.0) == 1.0
    assert yarn_attention_factor(1.0) == 1.0
