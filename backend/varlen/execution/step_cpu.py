"""Runs the steps of generation on a CPU, all cores on one step."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from varlen.execution.step_packing import step_dims, step_inputs
from varlen.memory.arena import Arena
from varlen.program.program import PackedBatch, Program
from varlen.sequence import Chunk


class CpuSteps:
    """Runs a program's steps on all cores of torch. Not for two threads at once."""

    def __init__(
        self,
        program: Program,
        kernels: object,
        arena: Arena,
        caches: Mapping[str, Tensor],
        *,
        block_size: int,
    ) -> None:
        self._program = program
        self._kernels = kernels
        self._arena = arena
        self._caches = caches
        self._block_size = block_size
        # allocated once: pages that are mapped anew for each step cost more than the copy into them
        (self._logits,) = program.new_outputs(arena.largest, arena.device)

    def stream(self) -> AbstractContextManager[object]:
        """Return a context that does nothing."""
        return nullcontext()

    def logits(self, chunks: Sequence[Chunk]) -> Tensor:
        """Return the logits of a step, `[logit rows, vocabulary]`, valid until the next one."""
        inputs = step_inputs(chunks, self._block_size)
        dims = step_dims(inputs)
        batch = PackedBatch(inputs, dims)
        logits = self._logits[: dims["logit_rows"]]
        region = self._arena.allocate(dims)
        self._program.run(batch, self._kernels, region, states=self._caches, out=[logits])
        return logits

    def close(self) -> None:
        """Do nothing: there is nothing but memory."""
