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

# Rounding takes several arrays of the weight's size; by parts they stay small beside it.
_VALUES_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class QuantizedWeight:
    """blocks: uint8 [N, ceil(K / block_size), block_size * bits / 8]. scales: float32 [N, ceil(K / block_size)]."""

    blocks: NDArray[np.uint8]
    scales: NDArray[np.float32]


def quantize(
    weight: NDArray[np.float32], bits: Bits, block_size: int, *, shares_row_scale: bool = False
) -> QuantizedWeight:
    """Round each block of a float32 weight [N, K] to integers of the given width.

    shares_row_scale: give all blocks of a row the scale of the row; eight bits only.
    """
    rows, columns = weight.shape
    num_blocks = -(-columns // block_size)
    blocks = np.empty((rows, num_blocks, block_size * bits // 8), dtype=np.uint8)
    scales = np.empty((rows, num_blocks), dtype=np.float32)
    step = max(1, _VALUES_AT_ONCE // columns)
    for begin in range(0, rows, step):
        some = weight[begin : begin + step]
        padded = np.pad(some, ((0, 0), (0, num_blocks * block_size - columns)))
        values = padded.reshape(len(some), num_blocks, block_size)
        end = begin + len(some)
        if bits == 8:
            blocks[begin:end], scales[begin:end] = _round_to_8_bits(values, shares_row_scale)
        else:
            blocks[begin:end], scales[begin:end] = _round_to_4_bits(values)
    return QuantizedWeight(blocks, scales)


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


def _round_to_8_bits(
    values: NDArray[np.float32], shares_row_scale: bool
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """values: [rows, blocks, block_size]. Returns the stored bytes and the scales."""
    scales = (np.abs(values).max(axis=2) / 127).astype(np.float32)
    if shares_row_scale:
        scales[:] = scales.max(axis=1, keepdims=True)
    integers = np.rint(values / _nonzero(scales)[:, :, None]).clip(-127, 127) + 128
    return integers.astype(np.uint8), scales


def _round_to_4_bits(values: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Four bits reach from -8 to 7. Letting the largest magnitude be -8, whatever its sign, uses all sixteen values."""
    largest = np.take_along_axis(values, np.abs(values).argmax(axis=2)[:, :, None], axis=2)[:, :, 0]
    scales = (largest / -8).astype(np.float32)
    integers = (np.rint(values / _nonzero(scales)[:, :, None]).clip(-8, 7) + 8).astype(np.uint8)
    return integers[:, :, 0::2] | (integers[:, :, 1::2] << 4), scales


def _nonzero(scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scales to divide by: a block of zeros has scale 0 and stays zeros."""
    return np.where(scales == 0, np.float32(1), scales)
