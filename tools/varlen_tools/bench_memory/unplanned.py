"""The same program without its arena: each op makes its own result, as a model written in plain torch does.

It takes the executors of the engine, so lanes, threads and, on a GPU, graphs are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from varlen.memory.arena import Arena, Region, Shape
from varlen.program.program import Batch, Program, Value


class UnplannedProgram(Program):
    """A program whose values live where torch's allocator puts them, each until its last use."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.ops, program.output)
        last_use = {
            operand.name: number
            for number, op in enumerate(self.ops)
            for operand in op.operands
            if isinstance(operand, Value)
        }
        self._unused_after: list[list[str]] = [[] for _ in self.ops]
        for name, number in last_use.items():
            self._unused_after[number].append(name)

    def run(
        self,
        batch: Batch,
        kernels: object,
        region: Region,  # noqa: ARG002  # as a planned program is run
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the output for `batch`: `out`, or a new tensor; the region is left alone."""
        bound: dict[str, Tensor] = dict(batch.inputs)
        for op, unused in zip(self.ops, self._unused_after, strict=True):
            operands = [x if isinstance(x, Tensor) else bound[x.name] for x in op.operands]
            into = {"out": out} if op.result is self.output and out is not None else {}
            made = getattr(kernels, op.kernel)(*operands, **op.attributes, **into)
            del operands
            for name in unused:
                del bound[name]
            bound[op.result.name] = made
        return bound[self.output.name]


class NoArena(Arena):
    """An arena without memory, which has room for every batch."""

    def __init__(self, max_tokens: int, device: torch.device) -> None:
        self.max_tokens = max_tokens
        self.device = device
        self._nothing = Region(torch.empty(0, dtype=torch.uint8, device=device), ())

    def carve(self, shapes: Sequence[Shape]) -> list[Region] | None:
        """Return a region of no bytes for each share."""
        return [self._nothing] * len(shapes)

    def carve_whole(self, tokens: int, sequences: int) -> Region:  # noqa: ARG002  # an arena's
        """Return a region of no bytes."""
        return self._nothing
