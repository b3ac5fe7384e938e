"""One vector of each sequence, as sentence-transformers makes it, for engines that return hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from varlen_bench.harness.accuracy import Vectors

if TYPE_CHECKING:
    import torch

PoolingMode = Literal["cls", "mean", "lasttoken"]
POOLING_MODES: tuple[PoolingMode, ...] = get_args(PoolingMode)


def pool_padded(hidden: torch.Tensor, mask: torch.Tensor, mode: PoolingMode) -> torch.Tensor:
    """Return vectors `[sequences, features]` of a batch that is padded on the right.

    Args:
        hidden: `[sequences, longest, features]`.
        mask: `[sequences, longest]`, 1 for each real token.
    """
    if mode == "cls":
        return hidden[:, 0]
    kept = mask.unsqueeze(-1).to(hidden.dtype)
    if mode == "mean":
        return (hidden * kept).sum(1) / kept.sum(1)
    last = (mask.sum(1) - 1).view(-1, 1, 1).expand(-1, 1, hidden.shape[2])
    return hidden.gather(1, last).squeeze(1)


def pool_rows(rows: Any, mode: PoolingMode) -> Vectors:
    """Return the vector of one sequence, from its hidden states `[tokens, features]`."""
    return np.asarray(rows.mean(axis=0) if mode == "mean" else rows[0 if mode == "cls" else -1])
