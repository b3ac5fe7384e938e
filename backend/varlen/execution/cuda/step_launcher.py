"""Launches steps of generation on a GPU before it has run the ones before them.

A step whose tokens are drawn from its logits alone is launched as a whole, and the next one behind it. Where the host
takes part in the choice, for a grammar or a search, it needs the tokens before, so the next step starts after that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock

import torch

from varlen.execution.cuda.step_runner import SLOTS, CudaSteps
from varlen.execution.step_model import Choose, ChooseDraws
from varlen.execution.step_order import StepOrder
from varlen.memory.out_of_memory import memory_errors
from varlen.scheduling.sequence import BeamStep, Draws, SampledToken, StepBatch


@dataclass(slots=True, eq=False)
class _Launched:
    """A step in flight.

    Attributes:
        step: the step.
        draws: what its tokens are drawn with; None if the host chooses them.
        is_started: whether it is on the GPU's queue.
        tokens: waits for the tokens that were drawn.
        error: reason why it could not be started.
    """

    step: StepBatch
    draws: Draws | None
    is_started: bool = False
    tokens: Callable[[], list[int]] | None = None
    error: BaseException | None = None


class StepLauncher:
    """Launches steps from one thread; their outputs are asked for in another one, in order."""

    def __init__(
        self,
        steps: CudaSteps,
        prepare: Callable[[StepBatch], None],
        choose: Choose,
        draws: ChooseDraws,
    ) -> None:
        """Start without a step.

        Args:
            steps: runs them.
            prepare: starts what comes before a step.
            choose: chooses tokens on the host.
            draws: returns what the tokens of a step are drawn with, if nothing else is needed.
        """
        self._steps = steps
        self._prepare = prepare
        self._choose = choose
        self._draws = draws
        self._order = StepOrder()
        self._in_flight: deque[_Launched] = deque()
        self._lock = Lock()

    def launch(self, step: StepBatch) -> Callable[[], Sequence[SampledToken | BeamStep]]:
        """Start a step, now or once the host has chosen the tokens before it; return what waits for its outputs.

        What that function raises: see `StepRunner.launch_batch`.
        """
        launched = _Launched(step, self._draws(*step.sampled))
        with self._lock:
            assert len(self._in_flight) < SLOTS
            self._in_flight.append(launched)
            self._start_all()
        return partial(self._outputs, launched)

    def _outputs(self, launched: _Launched) -> Sequence[SampledToken | BeamStep]:
        """Return the outputs of the first step in flight."""
        step = launched.step
        try:
            # in any case: until then the GPU uses its buffers on the host
            token_ids = [] if launched.tokens is None else launched.tokens()
            with self._order.running(step):
                if launched.error is not None:
                    raise launched.error
                if launched.draws is not None:
                    return [SampledToken(token_id) for token_id in token_ids]
                return self._chosen(step)
        finally:
            with self._lock:
                self._in_flight.popleft()
                self._start_all()

    def _start_all(self) -> None:
        """Start the steps in flight, up to the first one whose tokens the host has to choose."""
        for launched in self._in_flight:
            if not launched.is_started:
                self._start(launched)
            if launched.draws is None:
                return

    def _start(self, launched: _Launched) -> None:
        """Start a step unless it must not run; an error is kept."""
        step = launched.step
        launched.is_started = True
        if self._order.is_skipped(step):
            return
        try:
            with memory_errors(), torch.inference_mode(), self._steps.stream():
                self._prepare(step)
                if launched.draws is None:
                    self._steps.logits(step.chunks)
                else:
                    launched.tokens = self._steps.draw(step.chunks, launched.draws)
        except BaseException as error:
            launched.error = error

    def _chosen(self, step: StepBatch) -> Sequence[SampledToken | BeamStep]:
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
