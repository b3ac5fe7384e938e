"""Counters of programs that have stored their results, for kernels whose last program merges them."""

import torch
import triton
from torch import Tensor

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
