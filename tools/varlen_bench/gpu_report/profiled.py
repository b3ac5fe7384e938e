"""Each kernel twice at the shapes of a server, for a profiler."""

import torch

from varlen_bench.kernels.grid import GROUPS, QUICK, Grid
from varlen_bench.ops.call import kernels

_GROUPS = ("attention", "layernorm", "activation", "pooling", "embedding")
_CALLS = 3


@torch.inference_mode()
def run_each(grid: Grid, device: torch.device, ops: object) -> int:
    """Run the first calls of each group twice; return how many calls there were."""
    calls = [call for name in _GROUPS for call in GROUPS[name](grid, torch.bfloat16)[:_CALLS]]
    for call in calls:
        inputs = call.make(device, 0)
        call.prepare(ops, inputs)
        for _ in range(2):
            call.run(ops, inputs)
    return len(calls)


if __name__ == "__main__":
    run_each(QUICK, torch.device("cuda", 0), kernels("fused"))
    torch.cuda.synchronize()
