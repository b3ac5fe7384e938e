"""Runs the steps of generation on a CPU, one after another."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from varlen.execution.bound_program import BoundProgram
from varlen.execution.cpu.step_cores import StepCores
from varlen.execution.step_packing import StepArrays, step_arrays, step_dims, tensors_of
from varlen.memory.shared import map_shared, new_shared
from varlen.program.stages import NO_STAGES, Stage
from varlen.scheduling.batch import Chunk
from varlen_kernels.cpu.native.threads import usable_cores, using_cores


class CpuSteps:
    """Runs a program's steps on one core or on all cores of torch.

    Not for two threads at once.
    """

    def __init__(self, bound: BoundProgram, stage: Stage = NO_STAGES) -> None:
        """Allocate the logits.

        Args:
            bound: the program of a step.
            stage: the stage that runs it; the last one keeps the logits of as many steps as there are stages.
        """
        self._bound = bound
        self._cores = StepCores(time.perf_counter)
        # allocated once: pages that are mapped anew for each step cost more than the copy into them
        self._logits = torch.empty(0)
        if stage.is_last:
            (logits,) = bound.program.outputs
            shape = logits.at(bound.arena.largest)
            self._logits = torch.empty(stage.count, *shape, dtype=logits.dtype)

    def stream(self) -> AbstractContextManager[object]:
        """Return a context that does nothing."""
        return nullcontext()

    def logits(self, chunks: Sequence[Chunk]) -> Tensor:
        """Return the logits of a step, `[logit rows, vocabulary]`, valid until the next one."""
        return self.run(step_arrays(chunks, self._bound.block_size))

    def run(self, arrays: StepArrays, place: int = 0) -> Tensor:
        """Return the logits of a step whose inputs are `step_arrays`; see `logits`.

        Args:
            arrays: the inputs.
            place: place of the logits, where the logits of several steps are kept.
        """
        inputs = tensors_of(arrays)
        dims = step_dims(inputs)
        logits = self.last_logits(dims["logit_rows"], place)
        if self._bound.compiled is None:
            # ops of torch use its threads in any case
            self._bound.run(inputs, dims, [logits])
            return logits

        def step(cores: int) -> None:
            with using_cores(cores):
                self._bound.run(inputs, dims, [logits])

        self._cores.run(step, dims["tokens"], usable_cores())
        return logits

    def last_logits(self, rows: int, place: int = 0) -> Tensor:
        """Return the logits of the last step in a place, `[rows, vocabulary]`.

        Stages before the last have none.
        """
        return self._logits[place, :rows] if len(self._logits) else self._logits

    def share_logits(self) -> int:
        """Move the logits to memory that another process can map; return its file descriptor."""
        descriptor = new_shared(self._logits.nbytes)
        self._logits = map_logits(descriptor, *self._logits.shape)
        return descriptor

    def close(self) -> None:
        """No resources to release."""


def map_logits(descriptor: int, places: int, rows: int, vocab_size: int) -> Tensor:
    """Return the logits in the memory of a file descriptor, `[places, rows, vocabulary]` fp32."""
    memory = map_shared(descriptor)
    return torch.frombuffer(memory, dtype=torch.float32).view(places, rows, vocab_size)
