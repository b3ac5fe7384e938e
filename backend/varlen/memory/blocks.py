"""KV blocks: reference counts, reservations and cached prefixes. Integers only; the tensors live elsewhere.

A block is free, used by one or several block tables, or cached: unused, but a sequence with the same beginning may
share its keys and values. Cached blocks are evicted, least recently used first, when no block is free. A reservation
guarantees a number of blocks to a sequence, not their ids.

Source: block tables, sharing and copy-on-write as in PagedAttention (Kwon et al. 2023, arXiv:2309.06180),
reservations as in Orca (Yu et al. 2022, OSDI).
"""

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Iterable, MutableSequence, Sequence
from dataclasses import dataclass
from hashlib import blake2b

_KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """How many blocks are in use.

    Attributes:
        reserved: blocks that are reserved and not used yet.
        cached: unused blocks that a sequence with the same beginning may share.
        prefix_hit_tokens: tokens, so far, whose keys and values were shared instead of computed.
    """

    total: int
    used: int
    reserved: int
    cached: int
    prefix_hit_tokens: int


class BlockPool:
    """The blocks of one model's KV memory.

    One thread changes it; any thread may call `counts`.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool = True) -> None:
        """Make a pool whose blocks are free.

        Args:
            prefix_cache: whether sequences may share the blocks of an equal beginning.
        """
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._prefix_cache = prefix_cache
        # a heap: the lowest ids are used first, so that memory that was never needed is never touched
        self._free = list(range(num_blocks))
        # number of block tables that hold each block
        self._references = [0] * num_blocks
        self._reserved = 0
        # key of each full block that is stored: a hash of its tokens and of all before them
        self._key_of: dict[int, bytes] = {}
        # the block that serves each key; others with that key are not shared any further
        self._block_of: dict[bytes, int] = {}
        # unused blocks of `_block_of`, least recently used first
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._prefix_hit_tokens = 0

    @property
    def available(self) -> int:
        """Number of blocks that are neither used nor reserved."""
        return len(self._free) + len(self._cached) - self._reserved

    def counts(self) -> BlockCounts:
        cached = len(self._cached)
        return BlockCounts(
            total=self.num_blocks,
            used=self.num_blocks - len(self._free) - cached,
            reserved=self._reserved,
            cached=cached,
            prefix_hit_tokens=self._prefix_hit_tokens,
        )

    def blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def reserve(self, count: int, *, shared: Sequence[int] = (), keep: int = 0) -> bool:
        """Reserve blocks and share stored ones; return False if too few are available.

        Nothing changes then.

        Args:
            shared: blocks from `find_prefix`, which become part of a block table.
            keep: number of blocks that stay available.
        """
        unused = sum(not self._references[block] for block in shared)
        if count + unused + keep > self.available:
            return False
        self.fork(shared)
        self._reserved += count
        self._prefix_hit_tokens += len(shared) * self.block_size
        return True

    def unreserve(self, count: int) -> None:
        """Make reserved blocks available."""
        assert count <= self._reserved
        self._reserved -= count

    def allocate(self, count: int, *, reserved: int) -> list[int]:
        """Return blocks for one block table.

        They are the lowest free ones, then the cached ones that were least recently used.

        Args:
            reserved: number of them that are reserved; as many others have to be available.
        """
        self.unreserve(reserved)
        assert self.available >= count
        found = [heapq.heappop(self._free) for _ in range(min(count, len(self._free)))]
        while len(found) < count:
            block, _ = self._cached.popitem(last=False)
            del self._block_of[self._key_of.pop(block)]
            found.append(block)
        for block in found:
            self._references[block] = 1
        return found

    def fork(self, block_ids: Iterable[int]) -> None:
        """Count one more block table that holds these blocks."""
        for block in block_ids:
            if not self._references[block]:
                del self._cached[block]
            self._references[block] += 1

    def release(self, block_ids: Sequence[int]) -> list[int]:
        """Count one block table less that holds these blocks; return the unused ones.

        They are cached or free now.
        """
        unused = []
        # the last first: the beginning of a sequence is evicted after its end, which is of no use without it
        for block in reversed(block_ids):
            assert self._references[block] > 0
            self._references[block] -= 1
            if self._references[block]:
                continue
            unused.append(block)
            key = self._key_of.get(block)
            if key is not None and self._block_of.setdefault(key, block) == block:
                self._cached[block] = None
            else:
                self._key_of.pop(block, None)
                heapq.heappush(self._free, block)
        return unused

    def is_shared(self, block: int) -> bool:
        """Return whether several block tables hold a block; it must not be written."""
        return self._references[block] > 1

    def copy_on_write(self, block_ids: MutableSequence[int], *, reserved: bool) -> tuple[int, int]:
        """Replace the shared last block of a table; return source and destination.

        The caller copies the contents before either block is written.
        """
        source = block_ids[-1]
        assert self.is_shared(source)
        (block_ids[-1],) = self.allocate(1, reserved=reserved)
        self._references[source] -= 1
        return source, block_ids[-1]

    def find_prefix(self, token_ids: Sequence[int], *, salt: str = "") -> list[int]:
        """Return stored blocks of the longest known beginning, which leaves out at least one token.

        They are not part of a block table before `reserve` shares them.

        Args:
            salt: blocks that were stored with another salt are not found.
        """
        found: list[int] = []
        key = _root(salt)
        for begin in range(0, len(token_ids) - self.block_size, self.block_size):
            key = _key(key, token_ids[begin : begin + self.block_size])
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def store(
        self,
        token_ids: Sequence[int],
        block_ids: Sequence[int],
        *,
        begin: int,
        end: int,
        salt: str = "",
    ) -> None:
        """Let other sequences share the blocks that a sequence has filled.

        Args:
            begin, end: its tokens from `begin` to `end` have been computed since the last call.
            salt: sequences with another salt do not share the blocks.
        """
        if not self._prefix_cache:
            return
        size = self.block_size
        for index in range(begin // size, end // size):
            parent = self._key_of[block_ids[index - 1]] if index else _root(salt)
            key = _key(parent, token_ids[index * size : (index + 1) * size])
            self._key_of[block_ids[index]] = key
            self._block_of.setdefault(key, block_ids[index])

    def forget_contents(self) -> None:
        """Forget what blocks hold, which was lost. No block table may be in use."""
        assert not any(self._references)
        self._free = list(range(self.num_blocks))
        self._key_of.clear()
        self._block_of.clear()
        self._cached.clear()


def _root(salt: str) -> bytes:
    """Return the hash that a sequence has before its first block."""
    if not salt:
        return b""
    # JSON may hold half a surrogate pair
    text = salt.encode(errors="surrogatepass")
    return blake2b(text, digest_size=_KEY_BYTES, person=b"cache_salt").digest()


def _key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    # a cryptographic hash: no client can make two beginnings that collide
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=_KEY_BYTES).digest()
