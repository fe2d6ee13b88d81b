"""Rotary position tables with every scaling baked in, computed in float64.

Half-split convention: channel i of a head turns together with channel i + head_dim/2.
"""

import math
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from workers.models.description import FrequencyFactors, LinearScaling, Llama3Scaling, ModelDescription, YarnScaling

Array = NDArray[np.float64]


def rotary_tables(description: ModelDescription, context_length: int) -> tuple[Array, Array]:
    """Return cos and sin, float64 [context_length, head_dim / 2], for positions from 0."""
    angles = np.outer(np.arange(context_length, dtype=np.float64), _inverse_frequencies(description))
    scaling = description.rope_scaling
    gain = scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0
    return np.cos(angles) * gain, np.sin(angles) * gain


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """The gain on cos and sin where a checkpoint states none (YaRN, section 3.4; the two mscale are DeepSeek's)."""

    def gain(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if mscale and mscale_all_dim:
        return gain(mscale) / gain(mscale_all_dim)
    return gain(1.0)


def _inverse_frequencies(description: ModelDescription) -> Array:
    """Radians a position turns each channel pair, float64 [head_dim / 2]."""
    dim, theta = description.head_dim, description.rope_theta
    plain: Array = theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
    scaling = description.rope_scaling
    match scaling:
        case None:
            return plain
        case LinearScaling():
            return plain / scaling.factor
        case FrequencyFactors():
            return plain / np.asarray(scaling.factors, dtype=np.float64)
        case Llama3Scaling():
            wavelengths = 2 * np.pi / plain
            kept_cycles = scaling.original_context_length / wavelengths
            smooth = (kept_cycles - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
            smooth = np.clip(smooth, 0.0, 1.0)
            blended: Array = (1 - smooth) * plain / scaling.factor + smooth * plain
            return blended
        case YarnScaling():
            low = _yarn_channel(scaling.beta_fast, dim, theta, scaling.original_context_length)
            high = _yarn_channel(scaling.beta_slow, dim, theta, scaling.original_context_length)
            if scaling.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, dim - 1)
            if low == high:
                high += 0.001  # the ramp must not divide by zero
            ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0.0, 1.0)
            interpolated: Array = ramp * plain / scaling.factor + (1 - ramp) * plain
            return interpolated
        case _:
            assert_never(scaling)


def _yarn_channel(rotations: float, dim: int, theta: float, context_length: int) -> float:
    """The channel pair that turns the given number of times over the original context."""
    return dim * math.log(context_length / (rotations * 2 * math.pi)) / (2 * math.log(theta))
