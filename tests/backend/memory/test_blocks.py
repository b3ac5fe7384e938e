"""KV blocks: each is free, cached or in the tables that count it."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varlen.memory.blocks import BlockPool


def take(pool, count):
    """Promise blocks and allocate them."""
    assert pool.reserve(count)
    return pool.allocate(count, reserved=count)


def store(pool, token_ids, blocks=None):
    """Put a sequence of full blocks into the pool, and release it; return its blocks."""
    blocks = blocks or take(pool, len(token_ids) // pool.block_size)
    pool.store(token_ids, blocks, begin=0, end=len(token_ids))
    pool.release(blocks)
    return blocks


def test_blocks_are_allocated_from_the_lowest_id():
    pool = BlockPool(6, 4)
    first = take(pool, 4)

    pool.release(first[1:3])

    assert first == [0, 1, 2, 3]
    assert take(pool, 3) == [1, 2, 4]


def test_a_reservation_is_kept_whatever_others_need():
    pool = BlockPool(4, 4)
    assert pool.reserve(3)

    assert not pool.reserve(2)
    assert pool.available == 1
    pool.allocate(1, reserved=0)
    assert pool.available == 0
    assert not pool.reserve(1)
    assert sorted(pool.allocate(3, reserved=3)) == [1, 2, 3]


def test_a_cancelled_reservation_is_available():
    pool = BlockPool(4, 4)
    assert pool.reserve(4)

    pool.unreserve(3)

    assert pool.available == 3
    assert pool.reserve(3)


def test_a_reservation_can_leave_some_blocks_available():
    pool = BlockPool(4, 4)

    assert not pool.reserve(3, keep=2)
    assert pool.reserve(2, keep=2)


def test_the_longest_stored_beginning_is_found():
    pool = BlockPool(8, 2)
    blocks = store(pool, [1, 2, 3, 4, 5, 6])

    assert pool.find_prefix([1, 2, 3, 4, 5, 6, 7]) == blocks
    assert pool.find_prefix([1, 2, 3, 4, 9, 9, 9]) == blocks[:2]
    assert pool.find_prefix([1, 9, 3, 4, 5, 6]) == []


def test_a_beginning_leaves_at_least_one_token():
    pool = BlockPool(8, 2)
    blocks = store(pool, [1, 2, 3, 4])

    assert pool.find_prefix([1, 2, 3, 4]) == blocks[:1]
    assert pool.find_prefix([1, 2]) == []


def test_equal_tokens_after_another_beginning_are_another_block():
    pool = BlockPool(8, 2)
    store(pool, [1, 2, 3, 4])

    assert pool.find_prefix([5, 6, 3, 4, 7]) == []
    assert pool.find_prefix([3, 4, 7]) == []


def test_a_sequence_stores_its_blocks_as_they_fill():
    pool = BlockPool(8, 4)
    tokens, blocks = list(range(12)), take(pool, 3)

    for begin, end, found in [(0, 3, 0), (3, 9, 2), (9, 10, 2), (10, 12, 3)]:
        pool.store(tokens, blocks, begin=begin, end=end)
        assert pool.find_prefix([*tokens, 99]) == blocks[:found]


def test_blocks_are_found_only_with_the_salt_that_they_were_stored_with():
    pool = BlockPool(16, 2)
    salts = ("", "a", "b", "\0", "\ud800")
    tokens, tables = [1, 2, 3, 4], {salt: take(pool, 2) for salt in salts}

    for salt, blocks in tables.items():
        # in two calls: only the first block has the salt, and the others have its key
        pool.store(tokens, blocks, begin=0, end=2, salt=salt)
        pool.store(tokens, blocks, begin=2, end=4, salt=salt)

    found = {salt: pool.find_prefix([*tokens, 5], salt=salt) for salt in salts}
    assert found == tables
    assert pool.find_prefix([*tokens, 5], salt="c") == []


def test_a_pool_without_a_prefix_cache_finds_nothing():
    pool = BlockPool(8, 2, prefix_cache=False)
    store(pool, [1, 2, 3, 4])

    assert pool.find_prefix([1, 2, 3, 4, 5]) == []
    assert pool.counts().cached == 0


def test_cached_blocks_are_evicted_when_no_block_is_free_the_least_recently_used_first():
    pool = BlockPool(5, 2)
    old, new = store(pool, [1, 2, 3, 4]), store(pool, [5, 6, 7, 8])
    assert pool.reserve(0, shared=old)
    pool.release(old)

    assert take(pool, 3) == [4, *reversed(new)]
    assert pool.find_prefix([1, 2, 3, 4, 0]) == old
    # the end of a sequence goes before its beginning
    assert take(pool, 1) == old[1:]
    assert pool.find_prefix([1, 2, 3, 4, 0]) == old[:1]


def test_shared_blocks_are_not_evicted():
    pool = BlockPool(3, 2)
    blocks = store(pool, [1, 2, 3, 4])
    assert pool.reserve(1, shared=blocks)

    assert pool.available == 0
    assert pool.allocate(1, reserved=1)[0] not in blocks
    assert pool.find_prefix([1, 2, 3, 4, 5]) == blocks


def test_sharing_unused_blocks_needs_room_for_them():
    pool = BlockPool(4, 2)
    blocks = store(pool, [1, 2, 3, 4])

    assert not pool.reserve(3, shared=blocks)
    assert pool.counts().used == 0
    assert pool.reserve(2, shared=blocks)
    # they are in use now, so another sequence shares them at no cost
    assert pool.reserve(0, shared=blocks)
    assert pool.counts().prefix_hit_tokens == 8


def test_a_beginning_that_two_sequences_computed_is_stored_once():
    pool = BlockPool(8, 2)
    first, second = take(pool, 2), take(pool, 2)
    for blocks in (first, second):
        pool.store([1, 2, 3, 4], blocks, begin=0, end=4)

    pool.release(first)
    pool.release(second)

    assert pool.counts().cached == 2
    assert pool.find_prefix([1, 2, 3, 4, 5]) == first


def test_a_copy_of_an_evicted_block_takes_its_place():
    pool = BlockPool(4, 2)
    first, second = take(pool, 2), take(pool, 2)
    for blocks in (first, second):
        pool.store([1, 2, 3, 4], blocks, begin=0, end=4)
    pool.release(first)
    evicting = take(pool, 2)

    pool.release(second)

    assert evicting == first[::-1]
    assert pool.find_prefix([1, 2, 3, 4, 5]) == second


def test_a_copy_that_was_released_is_not_found_once_others_have_used_it():
    pool = BlockPool(2, 2)
    for blocks in (first := take(pool, 1), second := take(pool, 1)):
        pool.store([1, 2], blocks, begin=0, end=2)
    pool.release(first)
    pool.release(second)

    pool.release(take(pool, 2))

    assert pool.find_prefix([1, 2, 3]) == []


def test_a_shared_block_is_copied_before_it_is_written():
    pool = BlockPool(4, 2)
    table = take(pool, 2)
    other = [*table]
    pool.fork(other)
    assert pool.reserve(1)

    copy = pool.copy_on_write(other, reserved=True)

    assert copy == (1, 2)
    assert (table, other) == ([0, 1], [0, 2])
    assert [pool.is_shared(block) for block in range(3)] == [True, False, False]


@pytest.mark.parametrize("seed", range(4))
def test_releasing_everything_makes_everything_available(seed):
    rng = random.Random(seed)
    pool = BlockPool(10, 2)
    for _ in range(50):
        tokens = [rng.randrange(2) for _ in range(2 * rng.randint(1, 8))]
        shared = pool.find_prefix(tokens)
        assert pool.reserve(len(tokens) // 2 - len(shared), shared=shared)
        count = len(tokens) // 2 - len(shared)
        rest = pool.allocate(count, reserved=count)
        pool.store(tokens, shared + rest, begin=2 * len(shared), end=len(tokens))
        pool.release(shared + rest)

    assert pool.available == 10
    assert pool.counts().used == pool.counts().reserved == 0
    assert pool.counts().prefix_hit_tokens > 0


class Tables:
    """Sequences over a pool, and what each of their blocks holds."""

    def __init__(self, num_blocks, prefix_cache):
        self.pool = BlockPool(num_blocks, 2, prefix_cache=prefix_cache)
        # tokens, block table, reserved blocks of each sequence
        self.sequences = []
        # tokens at and before the end of each full block, by id
        self.contents = {}

    def start(self, tokens, reserved):
        shared = self.pool.find_prefix(tokens)
        for place, block in enumerate(shared):
            assert self.contents[block] == tuple(tokens[: 2 * place + 2])
        before = self.pool.available
        unused = sum(not any(block in table for _, table, _ in self.sequences) for block in shared)
        fits = reserved + unused <= before
        assert self.pool.reserve(reserved, shared=shared) == fits
        if fits:
            self.sequences.append([tokens[: 2 * len(shared)], shared, reserved])
            assert self.pool.available == before - unused - reserved

    def grow(self, index, token):
        """Append a token as a scheduler does, if there is a block for it."""
        entry = self.sequences[index % len(self.sequences)]
        tokens, table, reserved = entry
        if len(tokens) % 2 == 0 or self.pool.is_shared(table[-1]):
            if not reserved and self.pool.available < 1:
                return
            owned = {block for _, other, _ in self.sequences for block in other}
            if len(tokens) % 2 == 0:
                table += self.pool.allocate(1, reserved=int(reserved > 0))
            else:
                source, destination = self.pool.copy_on_write(table, reserved=reserved > 0)
                assert (source in owned, table[-1]) == (True, destination)
            assert table[-1] not in owned
            self.contents.pop(table[-1], None)
            entry[2] -= reserved > 0
        tokens.append(token)
        self.pool.store(tokens, table, begin=len(tokens) - 1, end=len(tokens))
        if len(tokens) % 2 == 0:
            self.contents[table[-1]] = tuple(tokens)

    def fork(self, index):
        tokens, table, _ = self.sequences[index % len(self.sequences)]
        self.pool.fork(table)
        self.sequences.append([[*tokens], [*table], 0])

    def end(self, index):
        _, table, reserved = self.sequences.pop(index % len(self.sequences))
        self.pool.release(table)
        self.pool.unreserve(reserved)

    def check(self):
        pool, counts = self.pool, self.pool.counts()
        holders = Counter(block for _, table, _ in self.sequences for block in table)
        assert counts.used == len(holders)
        assert counts.reserved == sum(reserved for *_, reserved in self.sequences)
        assert pool.available == pool.num_blocks - counts.used - counts.reserved >= 0
        assert 0 <= counts.cached <= pool.num_blocks - counts.used
        for block, number in holders.items():
            assert pool.is_shared(block) == (number > 1)
        for tokens, table, _ in self.sequences:
            assert len(set(table)) == len(table) == pool.blocks_of(len(tokens))


@given(
    actions=st.lists(
        st.one_of(
            st.tuples(
                st.just("start"),
                st.lists(st.integers(0, 1), min_size=1, max_size=9),
                st.integers(0, 4),
            ),
            st.tuples(st.just("grow"), st.integers(0, 9), st.integers(0, 1)),
            st.tuples(st.just("fork"), st.integers(0, 9)),
            st.tuples(st.just("end"), st.integers(0, 9)),
        ),
        max_size=60,
    ),
    num_blocks=st.integers(1, 9),
    prefix_cache=st.booleans(),
)
def test_whatever_happens_blocks_are_conserved_and_hold_what_is_found(
    actions, num_blocks, prefix_cache
):
    tables = Tables(num_blocks, prefix_cache)

    for action, *arguments in actions:
        if action == "start" or tables.sequences:
            getattr(tables, action)(*arguments)
        tables.check()

    while tables.sequences:
        tables.end(0)
    assert tables.pool.available == num_blocks


def test_lost_contents_are_found_by_no_sequence():
    pool = BlockPool(4, 2)
    table = pool.allocate(2, reserved=0)
    pool.store([1, 2, 3, 4], table, begin=0, end=4)
    pool.release(table)
    assert pool.find_prefix([1, 2, 3, 4, 5])

    pool.forget_contents()

    assert pool.find_prefix([1, 2, 3, 4, 5]) == []
    assert pool.counts().cached == 0
    assert pool.allocate(4, reserved=0) == [0, 1, 2, 3]
