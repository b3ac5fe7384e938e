"""Stored answers in bounded memory.

The least recently used answers make room for new ones, and old answers are forgotten.
"""

import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from varlen.request.request import Float32Array, Prompt, RequestOptions

# Bytes of an entry beside its answer's values: key, objects, and its part of the hash table at its emptiest.
ENTRY_BYTES = 512
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class CachedAnswer:
    """The output of one prompt, as immutable bytes."""

    values: bytes
    shape: tuple[int, ...]

    @classmethod
    def of(cls, row: Float32Array) -> "CachedAnswer":
        """Return a copy of one row."""
        assert row.dtype == np.float32
        # rows may be views of a whole batch
        return cls(row.tobytes(), row.shape)

    @property
    def size(self) -> int:
        return len(self.values) + ENTRY_BYTES

    def array(self) -> Float32Array:
        """Return a read-only array that cannot be made writable."""
        return np.ndarray(self.shape, dtype=np.float32, buffer=self.values)


@dataclass(frozen=True, slots=True)
class _Entry:
    answer: CachedAnswer
    since: float


class AnswerStore:
    """Answers by key. Not thread-safe."""

    def __init__(self, clock: Callable[[], float], *, max_bytes: int, max_seconds: float) -> None:
        """Make an empty store.

        Args:
            max_bytes: largest size of all entries, keys and bookkeeping included.
            max_seconds: largest age of an answer.
        """
        self._clock = clock
        self._max_bytes = max_bytes
        self._max_seconds = max_seconds
        # least recently used first
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self.held_bytes = 0
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> CachedAnswer | None:
        """Return the answer for a key, unless it is too old."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if self._clock() - entry.since > self._max_seconds:
            self._drop(key)
            self.evictions += 1
            return None
        self._entries.move_to_end(key)
        return entry.answer

    def put(self, key: bytes, answer: CachedAnswer) -> None:
        """Store an answer; evict the least recently used ones."""
        if answer.size > self._max_bytes:
            return
        if key in self._entries:
            self._drop(key)
        while self.held_bytes + answer.size > self._max_bytes:
            self._drop(next(iter(self._entries)))
            self.evictions += 1
        self._entries[key] = _Entry(answer, self._clock())
        self.held_bytes += answer.size

    def _drop(self, key: bytes) -> None:
        self.held_bytes -= self._entries.pop(key).answer.size


def answer_key(prompt: Prompt, options: RequestOptions) -> bytes:
    """Return a digest of everything that decides the answer to a prompt, with the salt."""
    ids, types = prompt.token_ids, prompt.type_ids
    # no types are types of zero
    if types is not None and not types.any():
        types = None
    payload = prompt.payload
    # lengths first, so that nothing runs into what follows it
    digest = blake2b(
        struct.pack(
            "<Q??Qq",
            len(ids),
            options.normalize,
            types is not None,
            payload.count or 0,
            -1 if payload.tokens is None else len(payload.tokens),
        ),
        digest_size=_KEY_BYTES,
    )
    for numbers in (ids, types, payload.tokens):
        if numbers is not None:
            digest.update(numbers.astype(np.int32, copy=False).tobytes())
    digest.update(",".join(options.outputs).encode())
    # JSON may hold half a surrogate pair
    digest.update(options.cache_scope.encode(errors="surrogatepass"))
    return digest.digest()
