"""Packed weights in large pages of memory.

A step of generation reads all weights once. In pages of 4 KiB a core searches the page table all the time, and its
prefetcher stops at the end of each page. docs/decisions/0054-compiled-steps.md has measurements.
"""

import mmap
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from varlen.program.program import Operand, Program

_ALIGNMENT = 64


def in_large_pages(programs: Sequence[Program]) -> tuple[Program, ...]:
    """Return programs whose packed weights lie in one piece of memory.

    Its pages are large where the system has such pages.

    A packed weight is a tensor in a named tuple.
    """
    found = {
        id(part): part
        for program in programs
        for op in program.ops
        for operand in op.operands
        if isinstance(operand, tuple)
        for part in operand
        # a layout of oneDNN cannot be copied
        if isinstance(part, Tensor) and not part.is_mkldnn
    }
    if not found:
        return tuple(programs)
    memory = _large_pages(sum(_aligned(part.nbytes) for part in found.values()))
    moved, begin = dict[int, Tensor](), 0
    for key, part in found.items():
        place = memory[begin : begin + part.nbytes].view(part.dtype).view(part.shape)
        moved[key] = place.copy_(part)
        begin += _aligned(part.nbytes)

    def changed(operand: Operand) -> Operand:
        if not isinstance(operand, tuple):
            return operand
        # a named tuple
        make: Callable[..., Operand] = type(operand)
        return make(*[moved.get(id(part), part) for part in operand])

    return tuple(
        Program(
            [replace(op, operands=tuple(map(changed, op.operands))) for op in program.ops],
            program.outputs,
        )
        for program in programs
    )


def _large_pages(count: int) -> Tensor:
    pages = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT
