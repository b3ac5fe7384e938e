"""Runs the steps of generation on a CPU, all cores on one step."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from varlen.execution.bound_program import BoundProgram
from varlen.execution.step_packing import step_dims, step_inputs
from varlen.scheduling.sequence import Chunk


class CpuSteps:
    """Runs a program's steps on all cores of torch. Not for two threads at once."""

    def __init__(self, bound: BoundProgram) -> None:
        self._bound = bound
        # allocated once: pages that are mapped anew for each step cost more than the copy into them
        (self._logits,) = bound.program.new_outputs(bound.arena.largest, bound.arena.device)

    def stream(self) -> AbstractContextManager[object]:
        """Return a context that does nothing."""
        return nullcontext()

    def logits(self, chunks: Sequence[Chunk]) -> Tensor:
        """Return the logits of a step, `[logit rows, vocabulary]`, valid until the next one."""
        inputs = step_inputs(chunks, self._bound.block_size)
        dims = step_dims(inputs)
        logits = self._logits[: dims["logit_rows"]]
        self._bound.run(inputs, dims, [logits])
        return logits

    def close(self) -> None:
        """No resources to release."""
