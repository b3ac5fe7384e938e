"""How long a call takes on the GPU: in a CUDA graph, and launched by Python.

Nothing may be in the L2 cache that a served batch would not find there. So each call of a pass has tensors
of its own, and a pass holds so many that what one call left behind is gone when its tensors come up again;
where that would take too many, the cache is swept between passes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from varlen_bench.kernels.case import Call, Inputs, generator_for

SAMPLES = 100
_WARM_UPS = 3
_FEWEST_SETS, _MOST_SETS = 4, 64
# Bytes of all sets together, in sizes of the L2 cache: from here on rotation alone makes it cold.
_COLD = 4
_SWEEP = 2
# Instead of the bytes that a call touches: it is served with a cache that its like has filled.
WARM = 2**62

Verify = Callable[[object], None]


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one call: median, 20th and 80th percentile over so many passes."""

    median: float
    p20: float
    p80: float
    passes: int

    @classmethod
    def of(cls, microseconds: Sequence[float]) -> Timing:
        """Return what the samples say."""
        low, median, high = np.percentile(microseconds, [20, 50, 80]).tolist()
        return cls(median, low, high, len(microseconds))


class Timer(Protocol):
    """Measures calls, each pass over all sets of inputs."""

    def num_sets(self, bytes_moved: int) -> int:
        """Return how many sets of inputs one pass needs."""

    def graph(
        self, call: Call, sets: Sequence[Inputs], moved: int, *, verify: Verify | None = None
    ) -> Timing:
        """Return the time of a call in a CUDA graph.

        Args:
            call: what is measured.
            sets: its inputs, a different one for each call of a pass.
            moved: the least bytes that a call touches; WARM leaves the cache as the last call left it.
            verify: gets what a replay wrote for the first set, before time is taken.
        """

    def eager(self, call: Call, sets: Sequence[Inputs], moved: int) -> Timing:
        """Return the time of a call that Python launches: the host's or the device's, whichever is longer."""


class GpuTimer:
    """A timer that uses CUDA's events on the current device, which `device` must be."""

    def __init__(self, device: torch.device, samples: int = SAMPLES) -> None:
        self._samples = samples
        self._cache = torch.cuda.get_device_properties(device).L2_cache_size
        numbers = generator_for(device, 0)
        self._swept = torch.randn(_SWEEP * self._cache // 4, device=device, generator=numbers)
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def num_sets(self, bytes_moved: int) -> int:
        """Return how many sets of inputs one pass needs; one if the cache may be warm."""
        if bytes_moved >= WARM:
            return 1
        wanted = -(-_COLD * self._cache // max(bytes_moved, 1))
        return max(_FEWEST_SETS, min(wanted, _MOST_SETS))

    def graph(
        self, call: Call, sets: Sequence[Inputs], moved: int, *, verify: Verify | None = None
    ) -> Timing:
        """Return the time of a call in a CUDA graph; see `Timer.graph`."""
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
        timing = self._measure(graph.replay, len(sets), moved)
        graph.reset()
        return timing

    def eager(self, call: Call, sets: Sequence[Inputs], moved: int) -> Timing:
        """Return the time of a call that Python launches; see `Timer.eager`."""

        def one_pass() -> None:
            kept = [call(inputs) for inputs in sets]
            kept.clear()

        return self._measure(one_pass, len(sets), moved)

    def _measure(self, one_pass: Callable[[], object], calls: int, moved: int) -> Timing:
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
        return Timing.of([1e3 * start.elapsed_time(end) / calls for start, end in events])


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def host_time(call: Callable[[], object], passes: int) -> Timing:
    """Return how long a call keeps its caller waiting, by the host's clock."""
    for _ in range(_WARM_UPS):
        call()
    samples = []
    for _ in range(passes):
        began = time.perf_counter()
        call()
        samples.append(1e6 * (time.perf_counter() - began))
    return Timing.of(samples)


def poison(result: object) -> None:
    """Overwrite every tensor of a result with what no right result holds."""
    for tensor in result if isinstance(result, tuple) else (result,):
        if isinstance(tensor, Tensor):
            tensor.fill_(float("nan") if tensor.dtype.is_floating_point else -7)


def copy_rate(timer: Timer, device: torch.device, size: int) -> float:
    """Return the bandwidth of a device-to-device copy of `size` bytes in GB/s, read and written bytes together."""
    return 2 * size / copy_time(timer, device, size).median / 1e3


def copy_time(timer: Timer, device: torch.device, size: int) -> Timing:
    """Return the time in a CUDA graph of copying `size` bytes of random data on the device."""

    def pair(seed: int) -> dict[str, Tensor]:
        # not torch's own generator, which a capture that failed may leave unusable
        numbers = generator_for(device, seed)
        source = torch.empty(size, dtype=torch.uint8, device=device).random_(generator=numbers)
        return {"source": source, "target": torch.empty_like(source)}

    sets = [pair(seed) for seed in range(timer.num_sets(2 * size))]
    return timer.graph(lambda inputs: inputs["target"].copy_(inputs["source"]), sets, 2 * size)
