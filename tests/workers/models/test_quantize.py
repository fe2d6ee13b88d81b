"""Blocks of integers: near the numbers they came from, exact where those are on the grid."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.models.quantize import Bits, dequantize, quantize


@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 200),
    bits=st.sampled_from([4, 8]),
    block_size=st.sampled_from([16, 32, 64, 128]),
    seed=st.integers(0, 1000),
)
def test_every_number_is_within_half_a_step(rows: int, columns: int, bits: Bits, block_size: int, seed: int) -> None:
    """A step is the block's scale; four bits reach one step less above than below, which costs at most a whole one."""
    weight = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    quantized = quantize(weight, bits, block_size)
    num_blocks = -(-columns // block_size)
    assert quantized.blocks.shape == (rows, num_blocks, block_size * bits // 8)
    assert quantized.scales.shape == (rows, num_blocks)
    error = np.abs(dequantize(quantized, bits, columns) - weight)
    steps = np.repeat(np.abs(quantized.scales), block_size, axis=1)[:, :columns]
    assert (error <= steps * (0.5001 if bits == 8 else 1.0001)).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_numbers_on_the_grid_are_kept(bits: Bits) -> None:
    """What is quantized twice is rounded once."""
    weight = np.random.default_rng(1).standard_normal((3, 100)).astype(np.float32)
    once = dequantize(quantize(weight, bits, 32), bits, 100)
    twice = dequantize(quantize(once, bits, 32), bits, 100)
    np.testing.assert_allclose(twice, once, atol=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_stay_zeros(bits: Bits) -> None:
    np.testing.assert_array_equal(dequantize(quantize(np.zeros((2, 40), np.float32), bits, 32), bits, 40), 0)


def test_integers_are_stored_as_the_operator_reads_them() -> None:
    """Eight bits around 128; four bits around 8, the first of two in the lower half of the byte."""
    row = np.zeros((1, 16), dtype=np.float32)
    row[0, :3] = [127, -127, 1]
    assert quantize(row, 8, 16).blocks[0, 0, :4].tolist() == [255, 1, 129, 128]
    row[0, :3] = [-8, 7, 1]
    assert quantize(row, 4, 16).blocks[0, 0, :2].tolist() == [0 | 15 << 4, 9 | 8 << 4]


def test_a_shared_scale_is_the_rows_largest() -> None:
    """The same bytes serve a product of plain integers, which knows one scale for each output."""
    weight = np.random.default_rng(2).standard_normal((3, 100)).astype(np.float32)
    shared = quantize(weight, 8, 32, shares_row_scale=True)
    wanted = np.abs(weight).max(axis=1, keepdims=True) / 127
    np.testing.assert_allclose(shared.scales, np.repeat(wanted, 4, axis=1), rtol=1e-6)
    assert np.abs(dequantize(shared, 8, 100) - weight).max() <= wanted.max() * 0.5001
