"""The time of a call on the GPU: in a CUDA graph, and launched by Python.

No call may find in the L2 cache what a served batch would not find there. So each call of a pass has tensors of its
own, enough of them that the cache has lost a call's tensors when they are used again; where that would take too many
tensors, the cache is swept between passes.
"""

from __future__ import annotations

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
# Bytes of all sets together, in sizes of the L2 cache, from which rotation alone makes it cold.
_COLD = 4
_SWEEP = 2
# Instead of the bytes that a call touches: the cache stays as the last call left it.
WARM = 2**62

Verify = Callable[[object], None]


class GpuTimer:
    """Times calls in microseconds by CUDA's events on the current device, which `device` must be."""

    def __init__(self, device: torch.device, samples: int = SAMPLES) -> None:
        self._samples = samples
        self._cache = torch.cuda.get_device_properties(device).L2_cache_size
        size = _SWEEP * self._cache // 4
        self._swept = Tensors(torch.float32, device, seed=0).random(size)
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def num_sets(self, bytes_moved: int) -> int:
        """Return the number of sets of inputs of a pass; one if the cache may be warm."""
        if bytes_moved >= WARM:
            return 1
        wanted = -(-_COLD * self._cache // max(bytes_moved, 1))
        return max(_MIN_SETS, min(wanted, _MAX_SETS))

    def graph(
        self, call: Call, sets: Sequence[Inputs], moved: int, *, verify: Verify | None = None
    ) -> Spread:
        """Return the time of a call in a CUDA graph.

        Args:
            sets: inputs, a different one for each call of a pass.
            moved: the least bytes that a call touches, or WARM.
            verify: receives what a replay wrote for the first set, before anything is timed.
        """
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            # compiles and loads kernels, which a capture must not
            for inputs in sets:
                call(inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            # kept, so that each call writes memory of its own
            kept = [call(inputs) for inputs in sets]
        if verify is not None:
            poison(kept[0])
            graph.replay()
            torch.cuda.synchronize()
            verify(kept[0])
        spread = self._measure(graph.replay, len(sets), moved)
        graph.reset()
        return spread

    def eager(self, call: Call, sets: Sequence[Inputs], moved: int) -> Spread:
        """Return the time of a call that Python launches: the host's or the device's, whichever is longer."""
        # a list, so that all results live until the pass ends
        return self._measure(lambda: [call(inputs) for inputs in sets], len(sets), moved)

    def _measure(self, one_pass: Callable[[], object], calls: int, moved: int) -> Spread:
        sweep = moved * calls < _COLD * self._cache
        events = [(_event(), _event()) for _ in range(self._samples)]
        for _ in range(_WARM_UPS):
            one_pass()
        torch.cuda.synchronize()
        for start, end in events:
            if sweep:
                # reading leaves nothing that must be written back
                self._swept.sum()
            start.record()
            one_pass()
            end.record()
        torch.cuda.synchronize()
        return Spread.of([1e3 * start.elapsed_time(end) / calls for start, end in events])


class StandInTimer:
    """A timer that runs each call and invents its time: a microsecond longer for each measurement."""

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


Timer: TypeAlias = GpuTimer | StandInTimer


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def host_time(call: Callable[[], object], passes: int) -> Spread:
    """Return the microseconds that a call blocks its caller, by the host's clock."""
    samples = []
    for _ in range(_WARM_UPS + passes):
        began = time.perf_counter()
        call()
        samples.append(1e6 * (time.perf_counter() - began))
    return Spread.of(samples[_WARM_UPS:])


def copy_rate(timer: Timer, device: torch.device, size: int) -> float:
    """Return the bandwidth of a copy of `size` bytes on the device in GB/s; read and written bytes count."""
    return 2 * size / copy_time(timer, device, size).median / 1e3


def copy_time(timer: Timer, device: torch.device, size: int) -> Spread:
    """Return the time in a CUDA graph of copying `size` random bytes on the device."""

    def pair(seed: int) -> Inputs:
        # not torch's own generator, which a failed capture may leave unusable
        numbers = torch.Generator(device=device).manual_seed(seed)
        source = torch.empty(size, dtype=torch.uint8, device=device).random_(generator=numbers)
        return {"source": source, "target": torch.empty_like(source)}

    sets = [pair(seed) for seed in range(timer.num_sets(2 * size))]
    return timer.graph(lambda inputs: inputs["target"].copy_(inputs["source"]), sets, 2 * size)
