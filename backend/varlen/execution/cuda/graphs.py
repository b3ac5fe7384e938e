"""CUDA graphs of one stream: work that a GPU repeats without Python.

Everything on the stream runs in the order in which it was started. Tests put a device of their own in the place of
`CudaGraphs`.
"""

import gc
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from varlen.execution.cuda.timeout import call_within
from varlen.execution.model_info import GraphUse

_log = logging.getLogger(__name__)

_MEGABYTE = 1e6

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
