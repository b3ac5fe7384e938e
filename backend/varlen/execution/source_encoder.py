"""Encodes the source texts of a step: their keys and values go into KV blocks."""

from collections.abc import Sequence

import numpy as np
import torch

from varlen.execution.bound_program import BoundProgram
from varlen.execution.packing import bounds_of, positions_of
from varlen.execution.step_packing import flat, slots_of, tables_of
from varlen.scheduling.sequence import Chunk


class SourceEncoder:
    """Runs a model's encoder, whose program only writes states. Not for two threads at once."""

    def __init__(self, bound: BoundProgram) -> None:
        self._bound = bound

    def encode(self, chunks: Sequence[Chunk]) -> None:
        """Encode the sources of the chunks that ask for it, packed into one batch."""
        new = [chunk for chunk in chunks if chunk.encodes]
        if not new:
            return
        lengths = np.fromiter((len(chunk.encodes) for chunk in new), np.int32, len(new))
        bounds = bounds_of(lengths)
        position_ids = positions_of(bounds, lengths)
        block_ids, tables = tables_of([chunk.source_block_ids for chunk in new])
        arrays = {
            "token_ids": flat([chunk.encodes for chunk in new], int(bounds[-1])),
            "position_ids": position_ids,
            "cu_seqlens": bounds,
            "slots": slots_of(block_ids, tables, position_ids, lengths, self._bound.block_size),
        }
        device = self._bound.arena.device
        inputs = {name: torch.from_numpy(each).to(device) for name, each in arrays.items()}
        # the arena has the dimensions of all programs
        dims = {"tokens": int(bounds[-1]), "sequences": len(new), "logit_rows": 0}
        self._bound.run(inputs, dims, [])
