"""Weights as the integer blocks that MatMulNBits reads, and back.

A weight is [N, K]: N outputs, K inputs. Each row is cut into blocks of block_size inputs with one float32 scale; the
last block is filled up with zeros. Symmetric: integers are stored with the operator's implied zero point 2^(bits-1)
added, and no zero points are stored (float ones make ONNX Runtime's CPU kernel several times slower; measured
2026-11-30).
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Bits = Literal[4, 8]


@dataclass(frozen=True)
class QuantizedWeight:
    """blocks: uint8 [N, ceil(K / block_size), block_size * bits / 8]. scales: float32 [N, ceil(K / block_size)]."""

    blocks: NDArray[np.uint8]
    scales: NDArray[np.float32]


def quantize(weight: NDArray[np.float32], bits: Bits, block_size: int) -> QuantizedWeight:
    """Round each block of a float32 weight [N, K] to integers of the given width."""
    rows, columns = weight.shape
    num_blocks = -(-columns // block_size)
    padded = np.zeros((rows, num_blocks * block_size), dtype=np.float32)
    padded[:, :columns] = weight
    values = padded.reshape(rows, num_blocks, block_size)
    if bits == 8:
        scales = np.abs(values).max(axis=2) / np.float32(127)
        integers = np.rint(values / _nonzero(scales)[:, :, None]).clip(-127, 127) + 128
        return QuantizedWeight(integers.astype(np.uint8), scales.astype(np.float32))
    # Four bits reach from -8 to 7. Letting the largest magnitude be -8, whatever its sign, uses all sixteen values.
    largest = np.take_along_axis(values, np.abs(values).argmax(axis=2)[:, :, None], axis=2)[:, :, 0]
    scales = (largest / np.float32(-8)).astype(np.float32)
    integers = (np.rint(values / _nonzero(scales)[:, :, None]).clip(-8, 7) + 8).astype(np.uint8)
    return QuantizedWeight(integers[:, :, 0::2] | (integers[:, :, 1::2] << 4), scales)


def dequantize(weight: QuantizedWeight, bits: Bits, columns: int) -> NDArray[np.float32]:
    """Return the float32 weight [N, columns] that the integers stand for."""
    integers = weight.blocks
    if bits == 4:
        rows, num_blocks, half = integers.shape
        unpacked = np.empty((rows, num_blocks, half * 2), dtype=np.uint8)
        unpacked[:, :, 0::2] = integers & 15
        unpacked[:, :, 1::2] = integers >> 4
        integers = unpacked
    values = (integers.astype(np.float32) - np.float32(1 << (bits - 1))) * weight.scales[:, :, None]
    return values.reshape(len(values), -1)[:, :columns]


def _nonzero(scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scales to divide by: a block of zeros has scale 0 and stays zeros."""
    return np.where(scales == 0, np.float32(1), scales)
