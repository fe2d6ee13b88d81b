"""Slots: taken, freed, and searched for the longest beginning of a prompt."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.engine.kv_cache import SlotCache, common_prefix

TOKENS = st.lists(st.integers(0, 2), max_size=12).map(lambda ids: np.array(ids, dtype=np.int32))


@given(TOKENS, TOKENS)
def test_common_prefix_counts_leading_equal_tokens(left: np.ndarray, right: np.ndarray) -> None:
    count = common_prefix(left, right)
    assert left[:count].tolist() == right[:count].tolist()
    assert count == min(len(left), len(right)) or left[count] != right[count]


@given(st.lists(TOKENS, min_size=1, max_size=6), TOKENS.filter(lambda ids: len(ids) > 0))
def test_the_longest_prefix_is_found_and_leaves_a_token_to_compute(held: list[np.ndarray], prompt: np.ndarray) -> None:
    cache = SlotCache(len(held), 16)
    for slot, ids in zip(cache.slots, held, strict=True):
        cache.extend(slot, ids)
    slot, length = cache.longest_prefix(prompt)
    best = max(min(common_prefix(prompt, ids), len(prompt) - 1) for ids in held)
    assert length == best
    assert (slot is None) == (best == 0)


def test_free_slots_keep_their_rows_until_they_are_taken_again() -> None:
    cache = SlotCache(2, 8)
    slot = cache.take(None, below=1)
    assert slot is not None
    cache.extend(slot, [5, 6, 7])
    cache.give_back(slot)
    assert cache.longest_prefix(np.array([5, 6, 9], dtype=np.int32)) == (slot, 2)
    with pytest.raises(AssertionError, match="given back twice"):
        cache.give_back(slot)


def test_the_least_recently_used_free_slot_in_the_bucket_goes_first() -> None:
    cache = SlotCache(4, 8)
    first, second, third = (cache.take(None, below=4) for _ in range(3))
    assert first is not None and second is not None and third is not None
    for slot in (second, first, third):
        cache.give_back(slot)
    fourth = cache.take(None, below=4)
    assert fourth is not None
    assert fourth.index == 3, "a slot never used holds no prefix worth keeping"
    assert cache.take(None, below=4) is second
    assert cache.take(third, below=4) is third
    assert cache.take(None, below=1) is first
    assert cache.take(None, below=4) is None
    assert cache.free_count == 0


def test_a_slot_cannot_overflow() -> None:
    cache = SlotCache(1, 2)
    cache.extend(cache.slots[0], [1, 2])
    with pytest.raises(AssertionError, match="full"):
        cache.append(cache.slots[0], 3)
