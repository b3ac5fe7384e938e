"""A model that generates, as the engine sees it.

It runs in this process or in one of its own.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from varlen.execution.executor import WaitingLauncher
from varlen.execution.model_info import GraphUse, StepInfo
from varlen.memory.memory_use import MemoryUse
from varlen.request.request import Int32Array
from varlen.scheduling.batch import StepBatch
from varlen.scheduling.choices import BeamStep, DeviceChoice, DeviceChosen, SampledToken
from varlen_kernels.reference.beam_search import NOT_GIVEN


class StepChoice(Protocol):
    """Chooses tokens and steps of searches, and says what the device can choose by itself."""

    def on_device(self, step: StepBatch) -> DeviceChoice:
        """Return what the device chooses in a step.

        The tokens of the step before it are perhaps not known yet.
        """

    def given(self, step: StepBatch) -> Int32Array:
        """Return what the host has chosen for the beams of a step, `[beams, 2]`.

        That is the beam that each one continues, and the token; NOT_GIVEN where the device has chosen them.
        """

    def forget(self) -> None:
        """Forget what the device keeps of sequences: it has lost it."""

    def outputs(
        self, step: StepBatch, choice: DeviceChoice, chosen: DeviceChosen, logits: Tensor | None
    ) -> Sequence[SampledToken | BeamStep]:
        """Return the outputs of a step, chunk by chunk.

        Args:
            step: the step.
            choice: the result of `on_device` for it.
            chosen: the choices of the device.
            logits: `[logit rows, vocabulary]` fp32, may be overwritten; None if nothing is left to choose.
        """


class NoChoice:
    """Of a process that only runs steps: a `StepChoice` without outputs."""

    def on_device(self, step: StepBatch) -> DeviceChoice:  # noqa: ARG002  # of every choice
        """Return nothing."""
        return DeviceChoice()

    def given(self, step: StepBatch) -> Int32Array:
        """Return that nothing is given."""
        return np.full((sum(chunk.beams for chunk in step.chunks), 2), NOT_GIVEN, np.int32)

    def forget(self) -> None:
        """Do nothing."""

    def outputs(
        self,
        step: StepBatch,  # noqa: ARG002
        choice: DeviceChoice,  # noqa: ARG002
        chosen: DeviceChosen,  # noqa: ARG002
        logits: Tensor | None,  # noqa: ARG002
    ) -> Sequence[SampledToken | BeamStep]:
        """Return no outputs."""
        return ()


class StepModel(WaitingLauncher, Protocol):
    """A loaded model that generates.

    Attributes:
        graph_use: cost of its CUDA graphs.
    """

    graph_use: GraphUse

    @property
    def info(self) -> StepInfo:
        """Model facts for the engine."""

    def use(self) -> MemoryUse:
        """Return the memory use. From any thread."""

    def close(self) -> None:
        """Release memory and end processes. Nothing may run."""
