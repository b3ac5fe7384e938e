"""Steps that are launched before the one before them has ended.

Such a step takes tokens that the one before it chooses, and reads the keys and values that it stores. If that one
fails, this one must not run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from varlen.execution.executor import SkippedStepError
from varlen.execution.step_packing import StepArrays
from varlen.scheduling.sequence import BeamStep, Chunk, SampledToken, StepBatch


class StepOrder:
    """What the next step needs to know of the one before it."""

    def __init__(self) -> None:
        self._failed: int | None = None
        self._outputs: Sequence[SampledToken | BeamStep] = ()

    def is_skipped(self, step: StepBatch) -> bool:
        """Return whether a step must not run, since the one before it has failed or was skipped."""
        return step.after is not None and step.after == self._failed

    @contextmanager
    def running(self, step: StepBatch) -> Iterator[None]:
        """Return the context in which a step runs.

        Raises:
            SkippedStepError: it must not run.
        """
        try:
            if self.is_skipped(step):
                raise SkippedStepError
            yield
        except BaseException:
            self._failed = step.number
            raise

    def chose(self, outputs: Sequence[SampledToken | BeamStep]) -> None:
        """Remember the outputs of the step that has run."""
        self._outputs = outputs

    def set_tokens(self, inputs: StepArrays, chunks: Sequence[Chunk]) -> None:
        """Set the tokens of a step, in place, that the one before it has chosen.

        A token that it could not choose is 0; what comes of it is ignored.

        Args:
            inputs: inputs of the step.
            chunks: chunks of the step.
        """
        # chunks of one token come first
        places = [place for place, chunk in enumerate(chunks) if chunk.follows is not None]
        if not places:
            return
        chosen = (self._outputs[chunk.follows] for chunk in chunks if chunk.follows is not None)
        token_ids = (each.token_id for each in chosen if isinstance(each, SampledToken))
        inputs["token_ids"][places] = np.fromiter(token_ids, np.int32, len(places))
