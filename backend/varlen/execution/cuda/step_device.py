"""The steps of a GPU as `StepLauncher` starts them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from varlen.execution.cuda.step_runner import CudaSteps
from varlen.execution.step_launcher import Chooser
from varlen.execution.step_packing import tokens_of_rows
from varlen.memory.out_of_memory import memory_errors
from varlen.scheduling.batch import Batch
from varlen.scheduling.device_plan import BeamStep, Chosen, DevicePlan, SampledToken


class GpuSteps:
    """Steps of one model on a GPU: a `StepDevice`."""

    def __init__(self, steps: CudaSteps, prepare: Callable[[Batch], None], choice: Chooser) -> None:
        """Use the graphs of a model.

        Args:
            steps: runs them.
            prepare: starts what comes before a step.
            choice: chooses on the host.
        """
        self._steps = steps
        self._prepare = prepare
        self._choice = choice

    def pack(self, step: Batch, choice: DevicePlan) -> DevicePlan:  # noqa: ARG002  # packed when it starts
        """Return `choice`: a step is packed when it starts, into memory that the GPU reads."""
        return choice

    def may_queue(self, packed: DevicePlan) -> bool:  # noqa: ARG002  # of every device
        """Return True: a stream takes any step."""
        return True

    def start(self, step: Batch, packed: DevicePlan) -> Callable[[], Chosen]:
        """Start a step; return a function that waits for what the GPU chooses."""
        with memory_errors(), torch.inference_mode(), self._steps.stream():
            try:
                self._prepare(step)
                return self._steps.start(step.chunks, packed, self._choice.given(step))
            except BaseException:
                # what has started reads memory that a later step writes
                self._steps.wait()
                raise

    def choose(
        self,
        step: Batch,
        packed: DevicePlan,  # noqa: ARG002  # of every device
        choice: DevicePlan,
        chosen: Chosen,
    ) -> Sequence[SampledToken | BeamStep]:
        """Return the outputs of a step, and give the tokens to the next step."""
        with memory_errors(), torch.inference_mode(), self._steps.stream():
            logits = self._steps.last_logits(step.num_logit_rows)
            try:
                outputs = self._choice.outputs(step, choice, chosen, logits)
            except BaseException:
                # a choice has waited for the step
                self._steps.wait()
                raise
            self._steps.set_tokens(tokens_of_rows(step, outputs).tolist())
        return outputs
