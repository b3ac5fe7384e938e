"""A program of generation with everything that it runs with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from varlen.execution.cpu.compiled_program import CompiledProgram
from varlen.memory.arena import Arena, Region
from varlen.memory.usage import Dims
from varlen.program.program import PackedBatch, Program


@dataclass(frozen=True, slots=True)
class BoundProgram:
    """A program, and the memory that it reads and writes.

    Attributes:
        program: program of a step, or of the encoder of its source texts.
        kernels: has the functions that ops name.
        arena: arena of the program.
        caches: the states of the program, by name.
        block_size: tokens of a block.
        compiled: the program as calls of compiled code, if there are any.
    """

    program: Program
    kernels: object
    arena: Arena
    caches: Mapping[str, Tensor]
    block_size: int
    compiled: CompiledProgram | None = None

    def run(self, inputs: Mapping[str, Tensor], dims: Dims, out: Sequence[Tensor]) -> None:
        """Run a batch of these inputs and dimensions; its outputs go to `out`."""
        self.run_in(self.arena.allocate(dims), inputs, dims, out)

    def run_in(
        self, region: Region, inputs: Mapping[str, Tensor], dims: Dims, out: Sequence[Tensor]
    ) -> None:
        """Run a batch as `run` does, in a region of the arena for its dimensions."""
        batch = PackedBatch(inputs, dims)
        if self.compiled is not None:
            self.compiled.run(batch, self.kernels, region, out=out)
            return
        self.program.run(batch, self.kernels, region, states=self.caches, out=out)
