"""Splits of a decode step: how many programs read one context.

A GPU holds a wave of programs at once. A last wave that is nearly empty takes about as long as a full one, so the
number of splits is chosen to fill waves. More splits also start more programs, which have no keys where contexts are
short, so of nearly equal predictions the fewest splits win. The number follows from shapes and the device only, so a
CUDA graph stays valid. The shape of the block tables bounds it: a graph of short contexts starts few programs.
The last program of several merges their results: it finds itself by a counter of those that have stored theirs.
Source: Dao et al. 2023, "Flash-Decoding for long-context inference", which fills one wave.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

# Splits of one context: a program of the merge reads the results of all.
MAX_SPLITS = 32
# Fewest keys of a split where programs run in several waves: shorter ones cost more in the merge than they gain.
_LONG_SPLIT = 256
# The same where one wave holds all programs, which then wait for memory more than they share it.
_SHORT_SPLIT = 64
# Start of a program beside its keys, as a part of its context.
_START = 1 / 32
# The next three are microseconds. A wave of an H200 reads contexts of 1,024 keys at 4.24 TB/s: 242 MB with heads of 64,
# 277 MB with heads of 128.
_WAVE = 60.0
# Start and end of a program without keys, measured on an H200 as 1.4 to 1.8 ns each.
_SPARE_PROGRAM = 1.6e-3
# Merge by the last program of a head; predicted: a fence, an atomic addition and a read of the results.
_MERGE = 1.5
# Predicted times within this factor of the least count as equal.
_NEARLY_LEAST = 1.06
# An H100 or H200, where the device is unknown.
_MULTIPROCESSORS = 132
# Shared memory of a multiprocessor of an A100.
_SHARED_BYTES = 164 << 10


@dataclass(frozen=True, slots=True)
class Splits:
    """How the context of a token is divided.

    Attributes:
        count: programs of one token and key head.
        min_keys: fewest keys of a split; with a short context some programs have no keys.
    """

    count: int
    min_keys: int


@cache
def choose_splits(programs: int, wave: int, longest: int) -> Splits:
    """Return the fewest splits whose predicted time is within 6 % of the least.

    The longest context has keys for all of them.

    Args:
        programs: programs of one split each.
        wave: number of programs that the device holds at once.
        longest: keys of the longest context.
    """
    times = [predicted_time(programs, wave, count) for count in range(1, MAX_SPLITS + 1)]
    enough = _NEARLY_LEAST * min(times)
    count = next(count for count, time in enumerate(times, start=1) if time <= enough)
    min_keys = _SHORT_SPLIT if programs * count <= wave else _LONG_SPLIT
    return Splits(max(1, min(count, -(-longest // min_keys))), min_keys)


def predicted_time(programs: int, wave: int, splits: int) -> float:
    """Return the time of a step with contexts of 1,024 keys, in microseconds.

    All splits but the first one count as programs without keys too, as they are with short contexts.
    """
    waves = -(-programs * splits // wave)
    reading = waves * (1 / splits + _START) * _WAVE
    return reading + programs * (splits - 1) * _SPARE_PROGRAM + _MERGE * (splits > 1)


@cache
def wave_of(device: torch.device, resident: int) -> int:
    """Return the number of programs that a GPU, or else an H100, holds at once.

    Args:
        resident: programs of a launch that a multiprocessor with the shared memory of an A100 holds.
    """
    if device.type != "cuda":
        return _MULTIPROCESSORS * resident
    properties = torch.cuda.get_device_properties(device)
    # such as 100 KiB of an L4, on which fewer fit
    share = min(1.0, properties.shared_memory_per_multiprocessor / _SHARED_BYTES)
    return int(properties.multi_processor_count) * max(1, int(resident * share))


# Fewest counters that are allocated.
_FEWEST_ARRIVALS = 4096
# Counters by device and stream, whose kernels run one after another. All are kept: graphs hold their addresses.
_arrivals: dict[tuple[torch.device, int], list[Tensor]] = {}


def arrivals_of(device: torch.device, count: int) -> Tensor:
    """Return at least `count` counters of the current stream, int32.

    They are 0 when a kernel starts, and it leaves them so.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    kept = _arrivals.setdefault((device, stream), [])
    if kept and len(kept[-1]) >= count:
        return kept[-1]
    size = max(_FEWEST_ARRIVALS, triton.next_power_of_2(count))
    counters = torch.zeros(size, dtype=torch.int32, device=device)
    # memory of a capture is of its graph, which sets it to 0 in every replay
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        kept.append(counters)
    return counters
