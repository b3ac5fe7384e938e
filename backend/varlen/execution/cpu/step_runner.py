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
from varlen.scheduling.batch import Chunk
from varlen_kernels.cpu.threads import usable_cores, using_cores


class CpuSteps:
    """Runs a program's steps on one core or on all cores of torch.

    Not for two threads at once.
    """

    def __init__(self, bound: BoundProgram) -> None:
        self._bound = bound
        self._cores = StepCores(time.perf_counter)
        # allocated once: pages that are mapped anew for each step cost more than the copy into them
        (self._logits,) = bound.program.new_outputs(bound.arena.largest, bound.arena.device)

    def stream(self) -> AbstractContextManager[object]:
        """Return a context that does nothing."""
        return nullcontext()

    def logits(self, chunks: Sequence[Chunk]) -> Tensor:
        """Return the logits of a step, `[logit rows, vocabulary]`, valid until the next one."""
        return self.run(step_arrays(chunks, self._bound.block_size))

    def run(self, arrays: StepArrays) -> Tensor:
        """Return the logits of a step whose inputs are `step_arrays`; see `logits`."""
        inputs = tensors_of(arrays)
        dims = step_dims(inputs)
        logits = self._logits[: dims["logit_rows"]]
        if self._bound.compiled is None:
            # ops of torch use its threads in any case
            self._bound.run(inputs, dims, [logits])
            return logits

        def step(cores: int) -> None:
            with using_cores(cores):
                self._bound.run(inputs, dims, [logits])

        self._cores.run(step, dims["tokens"], usable_cores())
        return logits

    def last_logits(self, rows: int) -> Tensor:
        """Return the logits of the last step, `[rows, vocabulary]`."""
        return self._logits[:rows]

    def share_logits(self) -> int:
        """Move the logits to memory that another process can map; return its file descriptor."""
        rows, vocab_size = self._logits.shape
        descriptor = new_shared(self._logits.nbytes)
        self._logits = map_logits(descriptor, rows, vocab_size)
        return descriptor

    def close(self) -> None:
        """No resources to release."""


def map_logits(descriptor: int, rows: int, vocab_size: int) -> Tensor:
    """Return the logits in the memory of a file descriptor, `[rows, vocabulary]` fp32."""
    memory = map_shared(descriptor)
    return torch.frombuffer(memory, dtype=torch.float32).view(rows, vocab_size)
