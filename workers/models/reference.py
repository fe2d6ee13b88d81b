"""The Llama architecture in NumPy, float64, written for reading: what a graph is checked against.

It reads the artifact's own weights, quantized ones as the numbers they stand for, so what differs from the graph is
arithmetic alone. One row, the whole sequence at once, no cache.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from workers.models.description import ModelDescription

Array = NDArray[Any]  # float64 here; smoothing follows a text in float32


class Weights(Protocol):
    """Where the weights come from; `StoredWeights` reads an artifact's."""

    def __contains__(self, name: str) -> bool: ...

    def float64(self, name: str, columns: int | None = None) -> NDArray[np.float64]: ...

    def float64_rows(self, name: str, columns: int, rows: Sequence[int]) -> NDArray[np.float64]: ...


def reference_logits(description: ModelDescription, weights: Weights, token_ids: Sequence[int]) -> NDArray[np.float64]:
    """Return logits, float64 [len(token_ids), vocab_size], at every position."""
    hidden_size = description.hidden_size
    cos, sin = weights.float64("rope.cos")[: len(token_ids)], weights.float64("rope.sin")[: len(token_ids)]
    hidden = weights.float64_rows("embedding.weight", hidden_size, token_ids)
    for layer in range(description.num_layers):
        at = f"layers.{layer}"
        normed = normalize(hidden, weights.float64(f"{at}.attention_norm.weight"), description.rms_norm_epsilon)
        qkv = normed @ weights.float64(f"{at}.attention.qkv.weight", hidden_size).T
        attended = attend(qkv, cos, sin, description)
        hidden = hidden + attended @ weights.float64(f"{at}.attention.output.weight", description.query_size).T
        normed = normalize(hidden, weights.float64(f"{at}.mlp_norm.weight"), description.rms_norm_epsilon)
        gate = normed @ weights.float64(f"{at}.mlp.gate.weight", hidden_size).T
        up = normed @ weights.float64(f"{at}.mlp.up.weight", hidden_size).T
        gated = gate * sigmoid(gate) * up
        hidden = hidden + gated @ weights.float64(f"{at}.mlp.down.weight", description.intermediate_size).T
    normed = normalize(hidden, weights.float64("norm.weight"), description.rms_norm_epsilon)
    head = "head.weight" if "head.weight" in weights else "embedding.weight"
    return normed @ weights.float64(head, hidden_size).T


def normalize(values: Array, gain: Array, epsilon: float) -> Array:
    """RMSNorm over the last axis."""
    scale: Array = 1 / np.sqrt((values * values).mean(axis=-1, keepdims=True) + epsilon)
    return values * scale * gain


def attend(qkv: Array, cos: Array, sin: Array, description: ModelDescription) -> Array:
    """Causal grouped attention with rotary positions over one row.

    qkv: [tokens, (heads + 2 * KV heads) * channels], heads filled up or not. Returns [tokens, heads * channels].
    """
    channels = qkv.shape[1] // (description.num_heads + 2 * description.num_kv_heads)
    query_end = description.num_heads * channels
    key_end = query_end + description.num_kv_heads * channels
    query = _rotate(_heads(qkv[:, :query_end], description.num_heads), cos, sin)
    key = _rotate(_heads(qkv[:, query_end:key_end], description.num_kv_heads), cos, sin)
    value = _heads(qkv[:, key_end:], description.num_kv_heads)
    group = description.num_heads // description.num_kv_heads
    key, value = np.repeat(key, group, axis=0), np.repeat(value, group, axis=0)
    scores = query @ key.swapaxes(1, 2) / np.sqrt(description.head_dim)
    future = np.triu(np.ones(scores.shape[1:], dtype=bool), k=1)
    scores = np.where(future, -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    attended: Array = weights / weights.sum(axis=-1, keepdims=True) @ value
    return attended.swapaxes(0, 1).reshape(len(qkv), -1)


def _heads(values: Array, num_heads: int) -> Array:
    """[tokens, heads * channels] → [heads, tokens, channels]."""
    return values.reshape(len(values), num_heads, -1).swapaxes(0, 1)


def _rotate(heads: Array, cos: Array, sin: Array) -> Array:
    first, second = np.split(heads, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def sigmoid(values: Array) -> Array:
    """By tanh, which does not overflow."""
    return 0.5 * (1 + np.tanh(values / 2))
