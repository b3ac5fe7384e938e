"""A program of generation with everything that it runs with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from varlen.execution.cpu.compiled_program import CompiledProgram
from varlen.execution.handoffs import Handoffs
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
        number: number of the program in the model.
        handoffs: values that its stage receives and sends, if it is a part of a pipeline.
    """

    program: Program
    kernels: object
    arena: Arena
    caches: Mapping[str, Tensor]
    block_size: int
    compiled: CompiledProgram | None = None
    number: int = 0
    handoffs: Handoffs | None = None

    def run(self, inputs: Mapping[str, Tensor], dims: Dims, out: Sequence[Tensor]) -> None:
        """Run a batch of these inputs and dimensions.

        Its outputs go to `out`, or to the next stage.
        """
        region = self.arena.allocate(dims)
        if self.handoffs is None:
            self.run_in(region, inputs, dims, out)
            return
        received = self.handoffs.received(self.number, dims)
        sent = self.handoffs.sent(self.number, dims)
        if sent:
            out = [sent[value.name] for value in self.program.outputs]
        self.run_in(region, {**inputs, **received}, dims, out)
        self.handoffs.pass_on(self.number, received, sent)

    def run_in(
        self, region: Region, inputs: Mapping[str, Tensor], dims: Dims, out: Sequence[Tensor]
    ) -> None:
        """Run a batch as `run` does, in a region of the arena for its dimensions."""
        batch = PackedBatch(inputs, dims)
        if self.compiled is not None:
            self.compiled.run(batch, self.kernels, region, out=out)
            return
        self.program.run(batch, self.kernels, region, states=self.caches, out=out)
