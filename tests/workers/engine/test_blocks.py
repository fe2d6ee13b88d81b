"""Blocks are never lost, never shared by mistake, and a prefix found is the prefix asked for."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from workers.engine.blocks import BlockPool, blocks_for, chain_digests

BLOCK_SIZE = 4


def tokens(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_a_digest_names_everything_before_it() -> None:
    """Equal blocks behind different beginnings must not be mistaken for each other."""
    one = chain_digests(tokens(1, 2, 3, 4, 9, 9, 9, 9), BLOCK_SIZE)
    other = chain_digests(tokens(1, 2, 3, 5, 9, 9, 9, 9), BLOCK_SIZE)
    assert len(one) == len(other) == 2
    assert not set(one) & set(other)
    assert chain_digests(tokens(1, 2, 3, 4, 8), BLOCK_SIZE) == one[:1]
    assert chain_digests(tokens(1, 2, 3, 4, 9, 9, 9, 9, 7), BLOCK_SIZE, one[:1]) == one


def test_partly_filled_blocks_have_no_digest() -> None:
    assert chain_digests(tokens(1, 2, 3), BLOCK_SIZE) == []
    assert chain_digests(tokens(), BLOCK_SIZE) == []


def test_tokens_fill_whole_blocks() -> None:
    assert [blocks_for(count, BLOCK_SIZE) for count in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_block_zero_is_never_given_out() -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    assert sorted(pool.take(3) or []) == [1, 2, 3]
    assert pool.take(1) is None


def test_the_least_recently_used_prefix_goes_first_and_its_end_before_its_beginning() -> None:
    pool = BlockPool(5, BLOCK_SIZE)
    old, new = chain_digests(tokens(*range(8)), BLOCK_SIZE), chain_digests(tokens(*range(8, 16)), BLOCK_SIZE)
    for digests in (old, new):
        table = pool.take(2)
        assert table is not None
        for block, digest in zip(table, digests, strict=True):
            pool.register(block, digest)
        pool.release(table)
    assert pool.available == pool.cached_count == 4
    assert pool.take(1) is not None
    assert len(pool.match(old)) == 1
    assert len(pool.match(new)) == 2
    pool.check_integrity()


def test_a_cached_prefix_comes_back_with_a_reader() -> None:
    pool = BlockPool(3, BLOCK_SIZE)
    digests = chain_digests(tokens(1, 2, 3, 4), BLOCK_SIZE)
    table = pool.take(1)
    assert table is not None
    pool.register(table[0], digests[0])
    pool.release(table)
    found = pool.match(digests)
    assert found == table
    assert pool.idle_among(found) == 1
    pool.share(found)
    assert pool.idle_among(found) == 0
    assert pool.take(2) is None, "a block that is read cannot be taken"
    pool.release(found)
    pool.forget_cached()
    assert pool.match(digests) == []
    assert pool.available == 2


def test_the_block_that_begins_alike_longest_is_found_behind_the_same_blocks() -> None:
    pool = BlockPool(9, BLOCK_SIZE)
    one, two, other = pool.take(3) or []
    pool.note_tail(one, b"parent", tokens(1, 2, 3, 4))
    pool.note_tail(two, b"parent", tokens(1, 9))
    pool.note_tail(other, b"elsewhere", tokens(1, 2, 3, 5))
    tail, length = pool.best_tail(b"parent", tokens(1, 2, 3, 5, 6))
    assert tail is not None and (tail.block, length, tail.is_computed) == (one, 3, False)
    pool.compute_tail(one)
    assert tail.is_computed
    assert pool.best_tail(b"parent", tokens(7, 7)) == (None, 0)
    assert pool.best_tail(b"unknown", tokens(1)) == (None, 0)
    pool.release([one])
    tail, length = pool.best_tail(b"parent", tokens(1, 2, 3))
    assert tail is not None and (tail.block, length) == (two, 1), "a block that was given back is forgotten"
    pool.check_integrity()


def test_a_registered_block_is_a_tail_until_its_memory_is_wanted() -> None:
    pool = BlockPool(3, BLOCK_SIZE)
    (block,) = pool.take(1) or []
    pool.note_tail(block, b"", tokens(1, 2, 3, 4))
    pool.compute_tail(block)
    pool.register(block, b"digest")
    pool.release([block])
    assert pool.best_tail(b"", tokens(1, 2))[1] == 2
    pool.hold(block)
    assert pool.take(2) is None, "a block that is held is not forgotten"
    pool.release([block])
    assert pool.take(2) is not None
    assert pool.best_tail(b"", tokens(1, 2)) == (None, 0)
    pool.check_integrity()


def test_few_tails_are_kept_behind_one_beginning() -> None:
    pool = BlockPool(20, BLOCK_SIZE)
    for number, block in enumerate(pool.take(19) or []):
        pool.note_tail(block, b"", tokens(number))
    assert pool.best_tail(b"", tokens(0))[1] == 1
    assert pool.best_tail(b"", tokens(18)) == (None, 0)
    pool.check_integrity()


@given(st.lists(st.integers(0, 1), max_size=30), st.lists(st.integers(0, 1), max_size=30))
def test_digests_agree_exactly_as_far_as_the_tokens_do(left: list[int], right: list[int]) -> None:
    one, other = chain_digests(tokens(*left), BLOCK_SIZE), chain_digests(tokens(*right), BLOCK_SIZE)
    for index in range(min(len(one), len(other))):
        end = (index + 1) * BLOCK_SIZE
        assert (one[index] == other[index]) == (left[:end] == right[:end])


class PoolMachine(RuleBasedStateMachine):
    """Random takers, sharers and leavers over a small pool."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9, BLOCK_SIZE)
        self.tables: list[list[int]] = []
        self.contents: dict[int, bytes] = {}

    @rule(count=st.integers(1, 5))
    def take(self, count: int) -> None:
        available = self.pool.available
        table = self.pool.take(count)
        assert (table is None) == (count > available)
        if table is not None:
            assert 0 not in table
            held = {block for other in self.tables for block in other}
            assert not held & set(table), "a block in use was given out again"
            self.tables.append(table)
            for block in table:
                self.contents.pop(block, None)
                self.pool.note_tail(block, bytes([block % 2]), tokens(block))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        block = data.draw(st.sampled_from(table))
        digest = bytes([data.draw(st.integers(0, 5))])
        self.pool.register(block, digest)
        if self.pool.match([digest]) == [block]:
            self.contents.setdefault(block, digest)

    @rule(number=st.integers(0, 5))
    def share(self, number: int) -> None:
        found = self.pool.match([bytes([number])])
        if found:
            assert self.contents[found[0]] == bytes([number])
            self.pool.share(found)
            self.tables.append(found)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.tables.remove(table)
        self.pool.release(table)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.pool.check_integrity()
        assert self.pool.used_count == len({block for table in self.tables for block in table})


TestPool = PoolMachine.TestCase


def test_blocks_that_several_tables_share_are_free_with_the_last_of_them() -> None:
    pool = BlockPool(20, 4)
    shared = pool.take(2)
    assert shared is not None
    for block, digest in zip(shared, (b"1", b"2"), strict=True):
        pool.register(block, digest)
    tables = []
    for own in (1, 2, 3):
        taken = pool.take(own)
        assert taken is not None
        tables.append([*shared, *taken])
    for _ in tables[1:]:
        pool.share(shared)
    assert pool.count_freed(tables[:2]) == [1, 2], "the third still reads what they share"
    assert pool.count_freed(tables) == [1, 2, 5]
    before = pool.available
    for table in tables:
        pool.release(table)
    assert pool.available - before == 8
