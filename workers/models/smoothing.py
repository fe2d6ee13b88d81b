"""Before weights are rounded: loud channels are turned down in the activations and up in the weights that read them.

ONNX Runtime rounds activations to eight bits block by block too, and a Llama's activations have a few channels that are
ten to a thousand times louder than the rest of their block, which then keeps almost no bits. Dividing a channel by s
where it is made (the norm's gain, the rows of v or up) and multiplying the column that reads it by s changes nothing
but where the rounding falls. As in SmoothQuant (arXiv 2211.10438), s is the root of the channel's loudness over its
column's; loudness is the root mean square over a short text that is followed through the layers as they are converted.
Scales are rounded to quarter powers of two, so that the last bits of one machine's sums do not show in the artifact.

Measured on SmolLM2-135M against float32, 2026-11-30 (KL divergence a token): int8 0.0082 → 0.0057, rounded by whole
rows 0.043 → 0.013 (whole powers of two are a fifth worse), int4 of block 32 0.37 → 0.22.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from workers.models.description import ModelDescription
from workers.models.reference import attend, normalize, sigmoid
from workers.models.rope import rotary_tables

Array = NDArray[np.float32]

MAX_TOKENS = 256
STEPS_PER_OCTAVE = 4
# Silent channels would ask for boundless scales.
LARGEST_EXPONENT = 6
_SILENCE = 1e-3

TEXT = """\
The river was low that summer, and the children found a boat in the reeds. In 1969, Apollo 11 landed on the Moon; Neil
Armstrong said: "That's one small step for [a] man, one giant leap for mankind."

def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

Question: What is the boiling point of water at sea level?
Answer: 100 degrees Celsius (212 °F).

Les enfants jouent dans le jardin. Die Kinder spielen im Garten. 孩子们在花园里玩。
{"name": "Ada", "age": 36, "tags": ["mathematics", "engine"]}

1. Mix flour, water, yeast and salt in a large bowl.
2. Knead the dough for ten minutes, then let it rise for an hour.
"""


class Smoother:
    """Carries the hidden states of the text from layer to layer; each layer's weights come out smoothed.

    Two weights are in memory at a time, and activations of at most 256 tokens.
    """

    def __init__(self, description: ModelDescription, read: Callable[[str], Array], token_ids: Sequence[int]) -> None:
        """read: gives a tensor of the checkpoint by name. token_ids: the text, at least one token."""
        self._description = description
        self._read = read
        usable = [token for token in token_ids if token < description.vocab_size]
        self._token_ids = usable[: min(MAX_TOKENS, description.context_length)]
        assert self._token_ids
        self._hidden = read("embedding.weight")[self._token_ids]
        cos, sin = rotary_tables(description, len(self._token_ids))
        self._cos, self._sin = cos.astype(np.float32), sin.astype(np.float32)

    def layer(self, layer: int) -> Iterator[tuple[str, Array]]:
        """Yield the layer's weights under the checkpoint's names, in the order of the data file."""
        at = f"layers.{layer}"
        epsilon = self._description.rms_norm_epsilon
        read = self._read

        gain = read(f"{at}.attention_norm.weight")
        query, key, value = (read(f"{at}.attention.{part}.weight") for part in ("q", "k", "v"))
        normed = normalize(self._hidden, gain, epsilon)
        scale = _scales(normed, [query, key, value])
        attended = self._attend(normed, query, key, value)
        output = read(f"{at}.attention.output.weight")
        output_scale = _per_kv_head(_loudness(attended) / _column_sizes([output]), self._description)
        yield f"{at}.attention_norm.weight", gain / scale
        yield f"{at}.attention.q.weight", query * scale
        yield f"{at}.attention.k.weight", key * scale
        yield f"{at}.attention.v.weight", value * scale / output_scale.reshape(-1, 1)
        group = self._description.num_heads // self._description.num_kv_heads
        yield f"{at}.attention.output.weight", output * np.repeat(output_scale, group, axis=0).reshape(-1)
        self._hidden = self._hidden + attended @ output.T

        gain = read(f"{at}.mlp_norm.weight")
        gate, up = read(f"{at}.mlp.gate.weight"), read(f"{at}.mlp.up.weight")
        normed = normalize(self._hidden, gain, epsilon)
        scale = _scales(normed, [gate, up])
        gates = normed @ gate.T
        gated = np.asarray(gates * sigmoid(gates) * (normed @ up.T), dtype=np.float32)
        yield f"{at}.mlp_norm.weight", gain / scale
        yield f"{at}.mlp.gate.weight", gate * scale
        del gate
        down = read(f"{at}.mlp.down.weight")
        down_scale = _scales(gated, [down])
        yield f"{at}.mlp.up.weight", up * scale / down_scale[:, None]
        yield f"{at}.mlp.down.weight", down * down_scale
        self._hidden = self._hidden + gated @ down.T

    def _attend(self, normed: Array, query: Array, key: Array, value: Array) -> Array:
        qkv = np.concatenate([normed @ weight.T for weight in (query, key, value)], axis=1)
        return attend(qkv, self._cos, self._sin, self._description)


def _scales(activations: Array, weights: list[Array]) -> Array:
    """One scale for each channel, around 1 in the geometric mean."""
    return _rounded(np.sqrt(_loudness(activations) / _column_sizes(weights)))


def _per_kv_head(ratios: Array, description: ModelDescription) -> Array:
    """The same for the output of attention, [KV heads, head_dim]: query heads that share a value share its scale."""
    logs = np.log2(np.sqrt(ratios)).reshape(description.num_kv_heads, -1, description.head_dim)
    return _rounded(np.exp2(logs.mean(axis=1)))


def _rounded(scales: Array) -> Array:
    logs = np.log2(scales)
    steps = np.rint((logs - logs.mean()) * STEPS_PER_OCTAVE)
    exponents = (steps / STEPS_PER_OCTAVE).clip(-LARGEST_EXPONENT, LARGEST_EXPONENT)
    return np.asarray(np.exp2(exponents), dtype=np.float32)


def _loudness(activations: Array) -> Array:
    return _above_silence(np.sqrt(np.square(activations, dtype=np.float64).mean(axis=0)))


def _column_sizes(weights: list[Array]) -> Array:
    """Largest magnitude of each column over the weights that read the channel."""
    return _above_silence(np.max([np.abs(weight).max(axis=0) for weight in weights], axis=0))


def _above_silence(values: Array) -> Array:
    lowest = _SILENCE * float(values.mean()) or 1.0
    return np.asarray(np.maximum(values, lowest), dtype=np.float32)
