"""Time of a call on the GPU, in a CUDA graph and launched by Python.

In a server, the tensors of a call are not in the L2 cache. So each call of a pass has its own set of tensors, and the
sets together exceed the cache. If that takes too many sets, the cache is swept between passes.
"""

import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from varlen_bench.harness.summary import Spread
from varlen_bench.kernels.peers import Call
from varlen_bench.ops.call import Inputs, Tensors, poison

SAMPLES = 100
_WARM_UPS = 3
_MIN_SETS, _MAX_SETS = 4, 64
# If all sets exceed this multiple of the L2 cache, no call finds its tensors there.
_COLD = 4
# A sweep reads this multiple of the L2 cache.
_SWEEP = 2
# Value of `moved` for calls that may find their tensors in the cache.
WARM = 2**62

Verify = Callable[[object], None]


class GpuTimer:
    """Times calls on the current device by CUDA events, in microseconds."""

    def __init__(self, device: torch.device, samples: int = SAMPLES) -> None:
        self._samples = samples
        self._cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        size = _SWEEP * self._cache_bytes // 4
        self._sweep = Tensors(torch.float32, device, seed=0).random(size)
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def num_sets(self, bytes_moved: int) -> int:
        """Return the sets of inputs per pass; 1 if the cache may be warm."""
        if bytes_moved >= WARM:
            return 1
        wanted = -(-_COLD * self._cache_bytes // max(bytes_moved, 1))
        return max(_MIN_SETS, min(wanted, _MAX_SETS))

    def graph(
        self, call: Call, sets: Sequence[Inputs], moved: int, *, verify: Verify | None = None
    ) -> Spread:
        """Return the time of a call in a CUDA graph.

        Args:
            sets: inputs of each call of a pass.
            moved: fewest bytes that a call reads and writes, or WARM.
            verify: called with the replayed result of the first set, before the timing.
        """
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            # compile and load kernels, which is not allowed during a capture
            for inputs in sets:
                call(inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            # keep all results, so that each call writes its own memory
            results = [call(inputs) for inputs in sets]
        if verify is not None:
            poison(results[0])
            graph.replay()
            torch.cuda.synchronize()
            verify(results[0])
        spread = self._measure(graph.replay, len(sets), moved)
        graph.reset()
        return spread

    def eager(self, call: Call, sets: Sequence[Inputs], moved: int) -> Spread:
        """Return the time of a call launched by Python, on host or device."""
        # a list keeps all results until the pass ends
        return self._measure(lambda: [call(inputs) for inputs in sets], len(sets), moved)

    def _measure(self, one_pass: Callable[[], object], calls: int, moved: int) -> Spread:
        needs_sweep = moved * calls < _COLD * self._cache_bytes
        events = [(_event(), _event()) for _ in range(self._samples)]
        for _ in range(_WARM_UPS):
            one_pass()
        torch.cuda.synchronize()
        for start, end in events:
            if needs_sweep:
                # reading leaves no dirty cache lines
                self._sweep.sum()
            start.record()
            one_pass()
            end.record()
        torch.cuda.synchronize()
        return Spread.of([1e3 * start.elapsed_time(end) / calls for start, end in events])


class FakeTimer:
    """Runs each call and makes up its time: one microsecond more per measurement."""

    def __init__(self) -> None:
        self._median = 10.0

    def num_sets(self, bytes_moved: int) -> int:  # noqa: ARG002  # a Timer
        return 2

    def graph(
        self, call: Call, sets: Sequence[Inputs], moved: int, *, verify: Verify | None = None
    ) -> Spread:
        spread = self.eager(call, sets, moved)
        if verify is not None:
            poison(call(sets[0]))
            verify(call(sets[0]))
        return spread

    def eager(self, call: Call, sets: Sequence[Inputs], moved: int) -> Spread:  # noqa: ARG002
        for inputs in sets:
            call(inputs)
        self._median += 1
        return Spread(self._median, self._median - 1, self._median + 1, 1)


Timer: TypeAlias = GpuTimer | FakeTimer


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def host_time(call: Callable[[], object], passes: int) -> Spread:
    """Return the microseconds of a call by the host's clock."""
    samples = []
    for _ in range(_WARM_UPS + passes):
        began = time.perf_counter()
        call()
        samples.append(1e6 * (time.perf_counter() - began))
    return Spread.of(samples[_WARM_UPS:])


def copy_rate(timer: Timer, device: torch.device, size: int) -> float:
    """Return the bandwidth of a copy on the device in GB/s, read plus written bytes."""
    return 2 * size / copy_time(timer, device, size).median / 1e3


def copy_time(timer: Timer, device: torch.device, size: int) -> Spread:
    """Return the time of a kernel that reads and writes `size` bytes.

    It runs in a CUDA graph and negates random numbers: a graph may give a plain copy to a copy engine, which is
    slower than the memory.

    Args:
        size: a multiple of 4.
    """

    def pair(seed: int) -> Inputs:
        # a failed capture may leave torch's default generator unusable
        generator = torch.Generator(device=device).manual_seed(seed)
        source = torch.empty(size // 4, dtype=torch.int32, device=device)
        source.random_(generator=generator)
        return {"source": source, "target": torch.empty_like(source)}

    sets = [pair(seed) for seed in range(timer.num_sets(2 * size))]
    return timer.graph(
        lambda inputs: torch.neg(inputs["source"], out=inputs["target"]), sets, 2 * size
    )
