"""The book-keeping of the CUDA flavour's KV cache: which block holds which tokens, and how many requests read it.

The cache is `count` blocks of `block_size` positions. A request owns a list of blocks, its table; its position p is in
block `p // block_size`. A full block can be registered under the digest of every token up to its end: then later
requests with the same beginning share it. A registered block that nobody reads stays cached until its memory is wanted,
least recently used first. Where a beginning ends within a block, that block's first positions can be copied from one of
the blocks that follow the same full ones (`Tail`). Block 0 belongs to no one: padding rows write into it. This file
moves no memory.
Invariant: free plus cached plus used blocks equal all blocks but block 0.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workers.models.description import ModelDescription
from workers.models.errors import UnsupportedModel

TokenIds = npt.NDArray[np.int32]
Digest = bytes

# What padding rows point at; its content has no meaning.
SCRATCH_BLOCK = 0
_DIGEST_BYTES = 16
# Blocks that are remembered behind the same full ones. Prompts that share a context differ behind it, so any will do.
_MOST_TAILS = 4
# Pages that FlashAttention reads directly; smaller ones are silently gathered first (measured: half the speed).
_MIN_BLOCK_SIZES = ((64, 256), (128, 128), (256, 64))


@dataclass(slots=True, eq=False)
class Tail:
    """A block by its prompt tokens. parent: digest of all before it. is_computed: their KV is there, or launched."""

    block: int
    parent: Digest
    token_ids: TokenIds
    is_computed: bool = False


def chain_digests(token_ids: TokenIds, block_size: int, known: Sequence[Digest] = ()) -> list[Digest]:
    """Return one digest for each full block of `token_ids`; each names all tokens from the first to its block's end.

    known: digests of the first blocks, where they were computed before.
    """
    digests = list(known)
    parent = digests[-1] if digests else b""
    for start in range(len(digests) * block_size, len(token_ids) - block_size + 1, block_size):
        block = token_ids[start : start + block_size].astype("<i4").tobytes()
        parent = hashlib.blake2b(parent + block, digest_size=_DIGEST_BYTES).digest()
        digests.append(parent)
    return digests


def blocks_for(tokens: int, block_size: int) -> int:
    """How many blocks hold `tokens` positions."""
    return -(-tokens // block_size)


def block_size_for(description: ModelDescription) -> int:
    """Positions in a block. Raises UnsupportedModel where the attention kernels take no such head."""
    for head_dim, block_size in _MIN_BLOCK_SIZES:
        if description.cache_head_dim <= head_dim:
            return block_size
    raise UnsupportedModel(
        f"head_dim {description.head_dim} exceeds 256, the largest that paged attention takes; use the CPU engine"
    )


class BlockPool:
    """All blocks of one engine. count: with block 0."""

    def __init__(self, count: int, block_size: int) -> None:
        assert count >= 2, "a cache needs block 0 and one more"
        self.count = count
        self.block_size = block_size
        self._free = list(range(count - 1, 0, -1))  # a stack: the lowest block is taken first
        self._readers = [0] * count
        self._digests: list[Digest | None] = [None] * count
        self._by_digest: dict[Digest, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # registered, no readers; least recently used first
        self._tails: dict[int, Tail] = {}  # by block
        self._tails_behind: dict[Digest, list[Tail]] = {}

    @property
    def available(self) -> int:
        """Blocks that can be taken now: free ones, and cached ones that would be forgotten."""
        return len(self._free) + len(self._cached)

    @property
    def cached_count(self) -> int:
        return len(self._cached)

    @property
    def used_count(self) -> int:
        return self.count - 1 - self.available

    def match(self, digests: Sequence[Digest]) -> list[int]:
        """The blocks that hold the longest known beginning, in order. Nobody's claim on them changes."""
        found: list[int] = []
        for digest in digests:
            block = self._by_digest.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def idle_among(self, blocks: Sequence[int]) -> int:
        """How many of the blocks have no reader: sharing them lowers `available` by as many."""
        return sum(self._readers[block] == 0 for block in blocks)

    def count_freed(self, tables: Sequence[Sequence[int]]) -> list[int]:
        """For each table, how many blocks it would make available if it were given back after those before it."""
        given: Counter[int] = Counter()
        freed: list[int] = []
        for table in tables:
            given.update(table)
            freed.append(sum(given[block] == self._readers[block] for block in table))
        return freed

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reader to registered blocks."""
        for block in blocks:
            assert self._digests[block] is not None, f"block {block} is not registered"
            self.hold(block)

    def hold(self, block: int) -> None:
        """Add a reader to a block that is registered or has one."""
        if self._readers[block] == 0:
            del self._cached[block]
        self._readers[block] += 1

    def note_tail(self, block: int, parent: Digest, token_ids: TokenIds) -> None:
        """Remember a block by what is about to be in it, if few are known behind the same blocks."""
        behind = self._tails_behind.get(parent, [])
        if len(behind) < _MOST_TAILS:
            assert self._readers[block] > 0 and block not in self._tails
            self._tails[block] = Tail(block, parent, token_ids)
            self._tails_behind[parent] = [*behind, self._tails[block]]

    def compute_tail(self, block: int) -> None:
        """Say that the computation of a block's prompt tokens is launched."""
        tail = self._tails.get(block)
        if tail is not None:
            tail.is_computed = True

    def best_tail(self, parent: Digest, token_ids: TokenIds) -> tuple[Tail | None, int]:
        """The block behind `parent` that begins with most of these tokens, and with how many."""
        best, length = None, 0
        for tail in self._tails_behind.get(parent, ()):
            shared = _common_length(tail.token_ids, token_ids)
            if shared > length:
                best, length = tail, shared
        return best, length

    def take(self, count: int) -> list[int] | None:
        """Take blocks for one reader, forgetting cached ones if need be; None, nothing taken, if there are too few."""
        if count > self.available:
            return None
        taken: list[int] = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._forget(block)
            self._readers[block] = 1
            taken.append(block)
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Take one reader from each block of a table. The end of a chain is forgotten before its beginning."""
        for block in reversed(blocks):
            assert self._readers[block] > 0, f"block {block} given back twice"
            self._readers[block] -= 1
            if self._readers[block] == 0:
                if self._digests[block] is None:
                    self._free.append(block)
                    self._drop_tail(block)
                else:
                    self._cached[block] = None

    def register(self, block: int, digest: Digest) -> None:
        """Say what a full block holds, so that others can share it. The first block of a content wins."""
        assert self._readers[block] > 0, f"block {block} has no reader"
        if self._digests[block] is None and digest not in self._by_digest:
            self._digests[block] = digest
            self._by_digest[digest] = block

    def forget_cached(self) -> None:
        """Free every block that only the prefix cache holds."""
        while self._cached:
            block, _ = self._cached.popitem()
            self._forget(block)
            self._free.append(block)

    def check_integrity(self) -> None:
        """Raise AssertionError if a block is lost, held twice or registered wrongly."""
        free, cached = set(self._free), set(self._cached)
        used = {block for block in range(1, self.count) if self._readers[block] > 0}
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached and not free & used and not cached & used, "a block is in two states"
        assert free | cached | used == set(range(1, self.count)), "a block is lost"
        assert all(readers >= 0 for readers in self._readers)
        assert all(self._digests[block] is None for block in free), "a free block is registered"
        registered = {digest: block for block, digest in enumerate(self._digests) if digest is not None}
        assert registered == self._by_digest
        assert cached <= set(self._by_digest.values())
        assert not free & set(self._tails), "a free block is remembered as a tail"
        assert sorted(tail.block for tails in self._tails_behind.values() for tail in tails) == sorted(self._tails)
        assert all(self._tails_behind.values()), "nothing is kept of parents without tails"

    def _forget(self, block: int) -> None:
        digest = self._digests[block]
        assert digest is not None
        del self._by_digest[digest]
        self._digests[block] = None
        self._drop_tail(block)

    def _drop_tail(self, block: int) -> None:
        tail = self._tails.pop(block, None)
        if tail is not None:
            behind = self._tails_behind[tail.parent]
            behind.remove(tail)
            if not behind:
                del self._tails_behind[tail.parent]


def _common_length(one: TokenIds, other: TokenIds) -> int:
    count = min(len(one), len(other))
    differs = np.flatnonzero(one[:count] != other[:count])
    return int(differs[0]) if differs.size else count
