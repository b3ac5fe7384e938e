"""The steps of a GPU as `StepLauncher` starts them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from varlen.execution.cuda.step_runner import CudaSteps
from varlen.execution.step_model import Choose
from varlen.memory.out_of_memory import memory_errors
from varlen.scheduling.batch import StepBatch
from varlen.scheduling.choices import BeamStep, Draws, SampledToken


class GpuSteps:
    """Steps of one model on a GPU: a `StepDevice`."""

    def __init__(
        self, steps: CudaSteps, prepare: Callable[[StepBatch], None], choose: Choose
    ) -> None:
        """Use the graphs of a model.

        Args:
            steps: runs them.
            prepare: starts what comes before a step.
            choose: chooses tokens on the host.
        """
        self._steps = steps
        self._prepare = prepare
        self._choose = choose

    def pack(self, step: StepBatch, draws: Draws | None) -> Draws | None:  # noqa: ARG002  # packed when it starts
        """Return `draws`: a step is packed when it starts, into memory that the GPU reads."""
        return draws

    def may_queue(self, packed: Draws | None) -> bool:  # noqa: ARG002  # of every device
        """Return True: a stream takes any step."""
        return True

    def start(self, step: StepBatch, packed: Draws | None) -> Callable[[], Sequence[int]]:
        """Start a step; return a function that waits for drawn tokens, or returns none."""
        with memory_errors(), torch.inference_mode(), self._steps.stream():
            self._prepare(step)
            if packed is not None:
                return self._steps.draw(step.chunks, packed)
            self._steps.logits(step.chunks)
        return tuple

    def choose(self, step: StepBatch) -> Sequence[SampledToken | BeamStep]:
        """Return what the host chooses, and give the tokens to the next step."""
        with memory_errors(), torch.inference_mode(), self._steps.stream():
            logits = self._steps.last_logits(step.num_outputs)
            try:
                outputs = self._choose(logits, *step.sampled)
            except BaseException:
                # a choice has waited for the step
                self._steps.wait()
                raise
            # none continues a search before it is known
            self._steps.set_tokens(
                [each.token_id if isinstance(each, SampledToken) else 0 for each in outputs]
            )
        return outputs
