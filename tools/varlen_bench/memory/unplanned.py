"""The same program without its arena: each op allocates its results.

The engine's runners run it, so threads and CUDA graphs are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from varlen.memory.arena import Arena, Region
from varlen.memory.usage import Dims
from varlen.program.program import CallOp, PackedBatch, Program, State, Value


class UnplannedProgram(Program):
    """A program whose values are allocated by torch and freed after their last use."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.ops, program.outputs)
        last_use = {value: number for number, op in enumerate(self.ops) for value in op.reads}
        self._unused_after: list[list[str]] = [[] for _ in self.ops]
        for value, number in last_use.items():
            if value not in self.outputs:
                self._unused_after[number].append(value.name)

    def run(
        self,
        batch: PackedBatch,
        kernels: object,
        region: Region,  # noqa: ARG002  # the signature of Program
        *,
        states: Mapping[str, Tensor] | None = None,
        out: Sequence[Tensor] | None = None,
        call: CallOp | None = None,
    ) -> tuple[Tensor, ...]:
        """Return the outputs for `batch`: `out`, or new tensors."""
        assert call is None
        bound: dict[str, Tensor] = {**batch.inputs, **(states or {})}
        placed = dict(zip(self.outputs, out or (), strict=False))
        for op, unused in zip(self.ops, self._unused_after, strict=True):
            operands = [bound[x.name] if isinstance(x, Value | State) else x for x in op.operands]
            # every op of an encoder has one result
            (result,) = op.results
            into = {"out": placed[result]} if result in placed else {}
            made = getattr(kernels, op.kernel)(*operands, **op.attributes, **into)
            del operands
            for name in unused:
                del bound[name]
            bound[result.name] = made
        return tuple(bound[value.name] for value in self.outputs)


class OpByOp:
    """Kernels whose ops run one by one: compiled steps need an arena."""

    def __init__(self, kernels: object) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> object:
        return getattr(self._kernels, name)


class NoArena(Arena):
    """An arena without memory; every batch fits."""

    def __init__(self, largest: Dims, device: torch.device) -> None:
        self.largest, self.max_tokens, self.device = largest, largest["tokens"], device
        self._empty = Region(torch.empty(0, dtype=torch.uint8, device=device), ())

    def allocate(self, dims: Dims) -> Region:  # noqa: ARG002  # the signature of Arena
        """Return an empty region."""
        return self._empty
