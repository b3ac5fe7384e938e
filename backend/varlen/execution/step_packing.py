"""Packs the inputs of one step of generation."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from varlen.memory.usage import Dims
from varlen.sequence import Chunk


def step_dims(chunks: Sequence[Chunk]) -> Dims:
    """Return the dimensions of a step."""
    return {
        "tokens": sum(len(chunk.token_ids) for chunk in chunks),
        "sequences": len(chunks),
        "blocks": sum(len(chunk.block_ids) for chunk in chunks),
        "logit_rows": sum(len(chunk.samples) for chunk in chunks),
    }


def step_inputs(chunks: Sequence[Chunk], block_size: int) -> dict[str, Tensor]:
    """Return every input that a program of a step may read, by name.

    Args:
        chunks: of the step, at least one.
        block_size: tokens of a block.
    """
    lengths = np.fromiter((len(chunk.token_ids) for chunk in chunks), np.int32, len(chunks))
    starts = np.fromiter((chunk.start for chunk in chunks), np.int32, len(chunks))
    table_lengths = np.fromiter((len(chunk.block_ids) for chunk in chunks), np.int32, len(chunks))
    bounds, table_bounds = _bounds(lengths), _bounds(table_lengths)
    block_ids = _flat([chunk.block_ids for chunk in chunks], int(table_bounds[-1]))
    # the first token of each chunk is at its `start`
    position_ids = np.arange(bounds[-1], dtype=np.int32)
    position_ids += np.repeat(starts - bounds[:-1], lengths)
    tables = np.repeat(table_bounds[:-1], lengths)
    slots = block_ids[tables + position_ids // block_size].astype(np.int64) * block_size
    slots += position_ids % block_size
    samples = [len(chunk.samples) for chunk in chunks]
    arrays: dict[str, npt.NDArray[np.int32] | npt.NDArray[np.int64]] = {
        "token_ids": _flat([chunk.token_ids for chunk in chunks], int(bounds[-1])),
        "position_ids": position_ids,
        "slots": slots,
        "cu_seqlens": bounds,
        "context_lens": starts + lengths,
        "block_ids": block_ids,
        "cu_blocks": table_bounds,
        "logit_rows": np.repeat(bounds[1:] - 1, samples).astype(np.int32),
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _bounds(lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return cumulative starts, then the sum: `[lengths + 1]`."""
    return np.concatenate(([0], np.cumsum(lengths)), dtype=np.int32, casting="unsafe")


def _flat(rows: Sequence[Sequence[int]], count: int) -> npt.NDArray[np.int32]:
    return np.fromiter(chain.from_iterable(rows), np.int32, count)
