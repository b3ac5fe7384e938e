"""Runs the steps of generation on a CPU, one after another."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from varlen.execution.bound_program import BoundProgram
from varlen.execution.cpu.step_cores import StepCores
from varlen.execution.rank_link import RankLink
from varlen.execution.source_encoder import SourceEncoder
from varlen.execution.step_packing import (
    PackedStep,
    StepArrays,
    part_of_step,
    source_arrays,
    step_arrays,
    step_dims,
    tensors_of,
)
from varlen.memory.shared import map_shared, new_shared
from varlen.request.request import Int32Array
from varlen.scheduling.batch import Chunk
from varlen_kernels.cpu.threads import usable_cores, using_cores

_NO_COPIES: Int32Array = np.empty((0, 2), np.int32)
_NO_SOURCES: StepArrays = {}


class CpuSteps:
    """Runs a program's steps on one core or on all cores of torch.

    Not for two threads at once.
    """

    def __init__(
        self,
        bound: BoundProgram,
        encoder: SourceEncoder | None,
        copy_blocks: Callable[[Int32Array], None],
        link: RankLink[PackedStep],
    ) -> None:
        """Prepare to run steps.

        Args:
            bound: the program of the decoder.
            encoder: runs the encoder, if there is one.
            copy_blocks: copies blocks of the KV caches, `[copies, 2]`.
            link: link to the other ranks of the model.
        """
        self._bound = bound
        self._encoder = encoder
        self._copy_blocks = copy_blocks
        self._link = link
        self._cores = StepCores(time.perf_counter)
        # allocated once: pages that are mapped anew for each step cost more than the copy into them
        (self._logits,) = bound.program.new_outputs(bound.arena.largest, bound.arena.device)

    def stream(self) -> AbstractContextManager[object]:
        """Return a context that does nothing."""
        return nullcontext()

    def logits(self, chunks: Sequence[Chunk]) -> Tensor:
        """Return the logits of a step, `[logit rows, vocabulary]`, valid until the next one."""
        block_size = self._bound.block_size
        return self.run(step_arrays(chunks, block_size), sources=source_arrays(chunks, block_size))

    def run(
        self,
        arrays: StepArrays,
        copies: Int32Array = _NO_COPIES,
        sources: StepArrays = _NO_SOURCES,
    ) -> Tensor:
        """Return the logits of a step on all ranks of the model; see `logits`.

        Args:
            arrays: `step_arrays`.
            copies: `[copies, 2]`, blocks to copy before it.
            sources: `source_arrays`, encoded before it.
        """
        with self._link.running(part_of_step(arrays, copies, sources)):
            self._copy_blocks(copies)
            if self._encoder is not None:
                self._encoder.run(sources)
            return self._run(arrays)

    def _run(self, arrays: StepArrays) -> Tensor:
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
