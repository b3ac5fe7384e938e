"""CUDA graphs of one stream: work that a GPU repeats without Python.

Everything on the stream runs in the order in which it was started. Tests put a device of their own in the place of
`CudaGraphs`.

A graph has fixed shapes, so a batch runs in the smallest captured size that holds it, a bucket. The tokens that this
adds belong to no sequence, at most an eighth from 512 on. The capacity for sequences decides the tiles of attention by
the mean length. docs/decisions/0029-gpu-executor.md has the counts.
"""

import gc
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from varlen.execution.executor import call_within
from varlen.execution.model_info import GraphUse
from varlen.execution.packing import largest_payloads
from varlen.memory.planner import Dims

_log = logging.getLogger(__name__)

_MEGABYTE = 1e6
_SMALLEST = 16
# Sizes double up to this one. It is the rows of a tile of matrix products, so fewer rows take as long.
_DOUBLING = 128
# Smallest step after that.
_SMALLEST_STEP = 64
# Sizes from one power of two to the next.
_STEPS = 8

Replay: TypeAlias = Callable[[], object]
_Size = TypeVar("_Size", bound=Hashable)
_Captured = TypeVar("_Captured")


class CudaGraphs:
    """CUDA graphs of one stream and one memory pool. One runs at a time.

    All of them share the stream's cuBLAS workspace. Some versions of torch free it when any graph of the stream is
    released, and the others would go on to use its address (pytorch#193402). So this object keeps every graph until
    `close` releases all of them.
    """

    def __init__(self, device: torch.device, timeout: float = 0.0) -> None:
        """Make a stream and a pool.

        Args:
            timeout: longest time of the work that is captured, in seconds; 0 is no limit.
        """
        self._device = device
        self._timeout = timeout
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def stream(self) -> AbstractContextManager[object]:
        """Return the context that makes the stream, and its device, current."""
        return torch.cuda.stream(self._stream)

    def capture(self, work: Callable[[], object], *, has_run: bool = False) -> Replay:
        """Return a function that starts the same work again, on the same memory.

        The work runs once before the capture, which must not compile or load kernels, unless all of it has run.

        Raises:
            ModelFaultError: the GPU does not end the work.
        """
        # weights and buffers may still be on their way
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with self.stream(), _without_collections():
            if not has_run:
                work()
            call_within(self._timeout, self._stream.synchronize)
            graph = torch.cuda.CUDAGraph()
            self._graphs.append(graph)
            # other threads of the process may use the device meanwhile
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                _end_failed_capture(graph)
                raise
            graph.capture_end()
        return graph.replay

    def copy(self, into: Tensor, source: Tensor) -> None:
        """Start a copy between the device and pinned memory."""
        into.copy_(source, non_blocking=True)

    def record(self) -> Callable[[], object]:
        """Return a function that waits until everything started before has run.

        It spins, since a thread that sleeps until an interrupt of the GPU wakes up 0.1 to 0.25 ms late.
        """
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        wait: Callable[[], object] = event.synchronize
        return wait

    def used_bytes(self) -> int:
        """Return the device memory in use, in bytes, other processes included."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def close(self) -> None:
        """Release the graphs; none may be started after that."""
        self._graphs.clear()


def on_host(tensor: Tensor) -> Tensor:
    """Return memory of the host for a copy of a tensor, pinned for a GPU."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)


def capture_each(
    graphs: CudaGraphs,
    sizes: Sequence[_Size],
    capture: Callable[[_Size], _Captured],
    *,
    progress_lines: int = 1,
) -> tuple[dict[_Size, _Captured], GraphUse]:
    """Return what was captured for each size, and what all of it costs.

    Args:
        sizes: sizes of the graphs, at least one.
        progress_lines: log lines about the progress, the last one included.
    """
    began, bytes_before = time.monotonic(), graphs.used_bytes()
    captured, use = {}, GraphUse()
    for done, size in enumerate(sizes, start=1):
        captured[size] = capture(size)
        taken = max(0, graphs.used_bytes() - bytes_before)
        use = GraphUse(done, taken, time.monotonic() - began)
        if done % -(-len(sizes) // progress_lines) == 0 or done == len(sizes):
            _log.info(
                "captured %d of %d graphs in %.1f s; %.1f MB of device memory",
                done,
                len(sizes),
                use.seconds,
                use.num_bytes / _MEGABYTE,
            )
    return captured, use


def _end_failed_capture(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture whose work has failed.

    It fails too, and its error would hide the error of the work.
    """
    try:
        graph.capture_end()
    except Exception:
        _log.debug("a capture has failed", exc_info=True)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Keep the garbage collector off.

    A capture fails if memory of the GPU is freed meanwhile.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Room(NamedTuple):
    """A capacity for sequences.

    Attributes:
        mean_length: tokens of a bucket per sequence.
        from_tokens: smallest size that has this capacity.
    """

    mean_length: int
    from_tokens: int


# Attention chooses its launch by the same means. In batches that do not fill a GPU, small tiles are as fast.
_ROOMS = (_Room(256, 2048), _Room(64, 192), _Room(16, 1024), _Room(1, 0))


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """The tokens and sequences that one graph has capacity for."""

    tokens: int
    sequences: int

    @property
    def dims(self) -> Dims:
        """The dimensions that its graph runs with."""
        payloads = largest_payloads(self.tokens, self.sequences)
        # no spans
        pooled = {"pooled": self.sequences, "pooled_tokens": 0}
        return {"tokens": self.tokens, "sequences": self.sequences, **payloads, **pooled}


class Buckets:
    """All buckets for batches of at most `max_tokens` tokens and `max_sequences` sequences.

    A longer sequence, up to `longest` tokens, has a bucket without room for others.
    """

    def __init__(self, max_tokens: int, max_sequences: int, *, longest: int = 0) -> None:
        self._max_tokens = max_tokens
        longer = [size for size in _token_sizes(longest) if size > max_tokens] if longest else []
        self._tokens = [*_token_sizes(max_tokens), *longer]
        self._max_sequences = max_sequences

    def __iter__(self) -> Iterator[Bucket]:
        """Yield each bucket once, the largest first."""
        for tokens in reversed(self._tokens):
            for sequences in reversed(self._rooms(tokens)):
                yield Bucket(tokens, sequences)

    def smallest(self, tokens: int, sequences: int) -> Bucket:
        """Return the smallest bucket for a batch; each sequence has at least one token.

        Raises:
            ValueError: the batch has more tokens or sequences than the largest bucket.
        """
        if tokens > self._tokens[-1]:
            raise ValueError(f"a batch of {tokens} tokens; allowed: up to {self._tokens[-1]}")
        if sequences > self._max_sequences:
            raise ValueError(
                f"a batch of {sequences} sequences; allowed: up to {self._max_sequences}"
            )
        size = self._tokens[bisect_left(self._tokens, tokens)]
        if size > self._max_tokens and sequences > 1:
            raise ValueError(
                f"{sequences} sequences of {tokens} tokens; allowed: up to {self._max_tokens} tokens together"
            )
        return Bucket(size, next(room for room in self._rooms(size) if room >= sequences))

    def largest_of_each_class(self) -> list[Bucket]:
        """Return the largest bucket of each mean length, the largest first.

        The bucket of a sequence that is longer than a batch is one more.
        """
        largest: dict[int, Bucket] = {}
        longest = self._tokens[-1]
        if longest > self._max_tokens:
            largest[longest] = Bucket(longest, 1)
        for bucket in self:
            if bucket.tokens > self._max_tokens:
                continue
            mean = bucket.tokens // bucket.sequences
            room = next(room for room in _ROOMS if mean >= room.mean_length)
            largest.setdefault(room.mean_length, bucket)
        return sorted(largest.values(), reverse=True)

    def _rooms(self, tokens: int) -> list[int]:
        """Return the capacities for sequences of a size, ascending."""
        if tokens > self._max_tokens:
            return [1]
        rooms = {
            min(max(1, tokens // room.mean_length), self._max_sequences)
            for room in _ROOMS
            if tokens >= room.from_tokens
        }
        return sorted(rooms)


def _token_sizes(most: int) -> Iterator[int]:
    size = _SMALLEST
    while size < most:
        yield size
        octave = 1 << (size.bit_length() - 1)
        size += size if size < _DOUBLING else max(_SMALLEST_STEP, octave // _STEPS)
    yield most
