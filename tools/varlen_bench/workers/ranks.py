"""Worker: one of the processes that exchange numbers, in every way that is compared.

A sample is the mean time of some exchanges in a row. All processes run the same orders at the same time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
import torch.distributed
from torch import Tensor

from varlen_bench.harness.worker import Message, run_worker
from varlen_kernels import cpu
from varlen_kernels.cpu.calls.machine_code import address_of
from varlen_kernels.cpu.calls.run_calls import extent_of, run_calls
from varlen_kernels.reference.rank_memory import LONGEST_WAIT, rank_words
from varlen_kernels.reference.ranks import failed_rank

# Replaces a tensor by the sum of the tensors of all ranks, a number of times.
Exchange: TypeAlias = Callable[[Tensor, int], None]

# Exchanges before the first sample: both processes run by then.
_WARMUP = 20
# A process that waits longer for another one fails.
_LONGEST_WAIT_SECONDS = 60


def start(argument: Message) -> Callable[[Message], Message]:
    """Join the other ranks; return the function that measures one case.

    Args:
        argument: `rank` and `size`, and the `folder` through which ranks find each other.
    """
    rank, size, folder = argument["rank"], argument["size"], Path(argument["folder"])
    ways = {
        "step": lambda: in_step(_memory(folder, size), rank, size),
        "op": lambda: as_op(_memory(folder, size), rank, size),
        "gloo": lambda: with_gloo(folder, rank, size),
    }
    joined: dict[str, Exchange] = {}

    def answer(order: Message) -> Message:
        system = order["system"]
        if system not in joined:
            joined[system] = ways[system]()
        shape = order["rows"], order["columns"]
        check(joined[system], shape, rank, size)
        return {"seconds": samples(joined[system], shape, order["samples"], order["exchanges"])}

    return answer


def in_step(memory: Tensor, rank: int, size: int) -> Exchange:
    """Return the exchange of a step: rows of a table for compiled code."""
    function = address_of("all_reduce")

    def exchange(x: Tensor, count: int) -> None:
        row = [function, 1, 1]
        for tensor in (x, memory, x):
            row += (tensor.data_ptr(), *extent_of(tensor.shape))
        run_calls(np.array([[*row, rank, size]] * count, np.int64), 1)
        _raise_if_lost(memory)

    return exchange


def as_op(memory: Tensor, rank: int, size: int) -> Exchange:
    """Return the exchange as an op that Python calls."""

    def exchange(x: Tensor, count: int) -> None:
        for _ in range(count):
            cpu.all_reduce(x, memory, rank=rank, size=size, out=x)
        _raise_if_lost(memory)

    return exchange


def with_gloo(folder: Path, rank: int, size: int) -> Exchange:
    """Return the exchange of torch.distributed with gloo, on the loopback interface only."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    meeting = (folder / "gloo").absolute().as_uri()
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)

    def exchange(x: Tensor, count: int) -> None:
        for _ in range(count):
            torch.distributed.all_reduce(x)

    return exchange


def check(exchange: Exchange, shape: tuple[int, int], rank: int, size: int) -> None:
    """Run an exchange whose result is known.

    Raises:
        RuntimeError: the sum is wrong.
    """
    x = torch.full(shape, float(rank + 1))
    exchange(x, 1)
    if not (x == size * (size + 1) / 2).all():
        raise RuntimeError(f"rank {rank} got a wrong sum of {shape} numbers")


def samples(exchange: Exchange, shape: tuple[int, int], count: int, exchanges: int) -> list[float]:
    """Return the seconds of an exchange, several times: each is the mean of some exchanges."""
    # zeros stay zeros, however often they are added
    x = torch.zeros(shape)
    exchange(x, _WARMUP)
    found = []
    for _ in range(count):
        began = time.perf_counter()
        exchange(x, exchanges)
        found.append((time.perf_counter() - began) / exchanges)
    return found


def _memory(folder: Path, size: int) -> Tensor:
    path = str(folder / "ranks")
    memory = torch.from_file(path, shared=True, size=rank_words(size), dtype=torch.int64)
    memory[LONGEST_WAIT] = _LONGEST_WAIT_SECONDS * 10**9
    return memory


def _raise_if_lost(memory: Tensor) -> None:
    lost = failed_rank(memory)
    if lost is not None:
        raise RuntimeError(f"rank {lost} did not come within {_LONGEST_WAIT_SECONDS} s")


if __name__ == "__main__":
    run_worker(start)
