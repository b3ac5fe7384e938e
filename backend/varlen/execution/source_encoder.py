"""Encodes the source texts of a step: their keys and values go into KV blocks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from varlen.execution.bound_program import BoundProgram
from varlen.execution.step_packing import StepArrays, source_arrays, tensors_of
from varlen.scheduling.batch import Chunk


class SourceEncoder:
    """Runs a model's encoder, whose program only writes states. Not for two threads at once."""

    def __init__(self, bound: BoundProgram) -> None:
        self._bound = bound

    def encode(self, chunks: Sequence[Chunk]) -> None:
        """Encode the sources of the chunks that ask for it, packed into one batch."""
        self.run(source_arrays(chunks, self._bound.block_size))

    def run(self, arrays: StepArrays) -> None:
        """Encode the sources of `source_arrays`, perhaps none."""
        if not arrays:
            return
        device = self._bound.arena.device
        inputs = {name: _on_device(each, device) for name, each in tensors_of(arrays).items()}
        # the arena has the dimensions of all programs
        dims = {
            "tokens": len(arrays["token_ids"]),
            "sequences": len(arrays["cu_seqlens"]) - 1,
            "logit_rows": 0,
        }
        self._bound.run(inputs, dims, [])


def _on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on a device, without waiting for it."""
    if device.type == "cpu":
        return tensor
    pinned = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
    # torch keeps pinned memory until the copy has run
    return pinned.to(device, non_blocking=True)
