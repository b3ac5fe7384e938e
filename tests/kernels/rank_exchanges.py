"""Many exchanges of a rank with others, and what they give, computed without any exchange.

Ranks are threads or processes, which import this file. Numbers are whole, so the order of a sum changes no bit.
"""

import hashlib
import os
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import torch
from torch import Tensor, distributed

from varlen_kernels import cpu, reference
from varlen_kernels.reference.rank_memory import BUFFER_BYTES, rank_words

FORMS = {"reference": reference, "cpu": cpu}
# Some exchanges need several turns.
_LARGE_EVERY, _LARGE = 97, (3, BUFFER_BYTES // 4 + 1)


def shared_memory(path: str, size: int) -> Tensor:
    """Return the memory of some ranks in a file; a new file has zeros."""
    return torch.from_file(path, shared=True, size=rank_words(size), dtype=torch.int64)


def exchange_over_gloo(path: str, rank: int, size: int, count: int) -> str:
    """Run `exchange_all` with the ops of GPUs, over gloo, in a process of its own.

    Args:
        path: file in which the ranks find each other.
    """
    from varlen_kernels import fused_ranks

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = distributed.FileStore(path, size)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        return exchange_all(fused_ranks, torch.empty(0), rank, size, count)
    finally:
        distributed.destroy_process_group()


def exchange_all(
    form: str | ModuleType, ranks: Tensor | str, rank: int, size: int, count: int
) -> str:
    """Run a number of exchanges; return the digest of all sums.

    Args:
        form: form of the ops, or their module.
        ranks: memory of all ranks, or the path of its file.
        rank: number of this rank.
        size: number of ranks.
        count: number of exchanges, each a sum and a join.

    Raises:
        AssertionError: a join is wrong on rank 0.
    """
    ops = FORMS[form] if isinstance(form, str) else form
    memory = shared_memory(ranks, size) if isinstance(ranks, str) else ranks
    digest, wrong = hashlib.sha256(), []
    for number, (rows, columns, dtype) in enumerate(_exchanges(count)):
        x = _numbers(number, rank, rows, columns, dtype)
        digest.update(_bytes_of(ops.all_reduce(x, memory, rank=rank, size=size)))
        whole = _numbers(number, size, rows, columns, dtype)
        part = -(-columns // size)
        own = whole[:, rank * part : (rank + 1) * part].contiguous()
        join = ops.gather_columns(own, memory, rank=rank, size=size, width=columns)
        if rank == 0 and not torch.equal(join, whole):
            wrong.append(number)
    # only now, for the others would wait for a rank that ends early
    assert not wrong
    return digest.hexdigest()


def expected_sums(size: int, count: int) -> str:
    """Return the digest of the sums of `exchange_all`, computed in float64."""
    digest = hashlib.sha256()
    for number, (rows, columns, dtype) in enumerate(_exchanges(count)):
        parts = [_numbers(number, rank, rows, columns, dtype).double() for rank in range(size)]
        digest.update(_bytes_of(torch.stack(parts).sum(0).to(dtype)))
    return digest.hexdigest()


def _exchanges(count: int) -> Iterator[tuple[int, int, torch.dtype]]:
    """Yield rows, columns and dtype of each exchange, equal on all ranks."""
    random = np.random.default_rng(0)
    for number in range(count):
        rows, columns, is_half = random.integers(1, 40, 3).tolist()
        if number % _LARGE_EVERY == _LARGE_EVERY - 1:
            rows, columns = _LARGE
        yield rows, columns, torch.bfloat16 if is_half % 2 else torch.float32


def _numbers(number: int, rank: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    whole = np.random.default_rng((number, rank)).integers(-1000, 1000, (rows, columns))
    return torch.from_numpy(whole).to(dtype)


def _bytes_of(x: Tensor) -> bytes:
    return x.view(torch.uint8).numpy().tobytes()
