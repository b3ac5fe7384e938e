"""Launches steps of generation before the device has run the ones before them.

A step whose tokens and beams are chosen from its logits alone is launched as a whole, and the next one behind it: the
device gives it the tokens. Where the host takes part in the choice, for a grammar or log probabilities, it needs the
tokens before, so the next step starts after that. docs/decisions/0059-steps-ahead.md has the reasons.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Generic, Protocol, TypeVar, cast

import numpy as np
from torch import Tensor

from varlen.errors import EngineError
from varlen.execution.executor import StepOrder, WaitingLauncher, outcome_of
from varlen.execution.model_info import GraphUse, ModelInfo
from varlen.memory.memory_use import MemoryUse
from varlen.request.request import Int32Array
from varlen.scheduling.batch import Batch
from varlen.scheduling.device_plan import BeamStep, Chosen, DevicePlan, SampledToken
from varlen_kernels.reference.beam_search import NOT_GIVEN


class Chooser(Protocol):
    """Chooses tokens and steps of searches, and says what the device can choose by itself."""

    def plan(self, step: Batch) -> DevicePlan:
        """Return what the device chooses in a step.

        The tokens of the step before it are perhaps not known yet.
        """

    def given(self, step: Batch) -> Int32Array:
        """Return what the host has chosen for the beams of a step, `[beams, 2]`.

        That is the beam that each one continues, and the token; NOT_GIVEN where the device has chosen them.
        """

    def forget(self) -> None:
        """Forget what the device keeps of sequences: it has lost it."""

    def outputs(
        self, step: Batch, choice: DevicePlan, chosen: Chosen, logits: Tensor | None
    ) -> Sequence[SampledToken | BeamStep]:
        """Return the outputs of a step, chunk by chunk.

        Args:
            step: the step.
            choice: the result of `plan` for it.
            chosen: the choices of the device.
            logits: `[logit rows, vocabulary]` fp32, may be overwritten; None if nothing is left to choose.
        """


class NoChooser:
    """A `Chooser` without outputs, for a process that only runs steps."""

    def plan(self, step: Batch) -> DevicePlan:  # noqa: ARG002  # of every chooser
        """Return nothing."""
        return DevicePlan()

    def given(self, step: Batch) -> Int32Array:
        """Return that nothing is given."""
        return np.full((sum(chunk.beams for chunk in step.chunks), 2), NOT_GIVEN, np.int32)

    def forget(self) -> None:
        """Do nothing."""

    def outputs(
        self,
        step: Batch,  # noqa: ARG002
        choice: DevicePlan,  # noqa: ARG002
        chosen: Chosen,  # noqa: ARG002
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
    def info(self) -> ModelInfo:
        """Model facts for the engine."""

    def use(self) -> MemoryUse:
        """Return the memory use. From any thread."""

    def close(self) -> None:
        """Release memory and end processes. Nothing may run."""


_Packed = TypeVar("_Packed")


class StepDevice(Protocol[_Packed]):
    """What runs steps, in the order in which they start."""

    def pack(self, step: Batch, choice: DevicePlan) -> _Packed:
        """Return a step as the device takes it.

        Args:
            step: the step.
            choice: the part of the choice that is left to the device.
        """

    def may_queue(self, packed: _Packed) -> bool:
        """Return whether a step can start while another one runs, without waiting for it."""

    def start(self, step: Batch, packed: _Packed) -> Callable[[], Chosen]:
        """Start a step; return a function that waits for what the device chooses.

        Args:
            step, packed: the step, and what `pack` has made of it.
        """

    def choose(
        self, step: Batch, packed: _Packed, choice: DevicePlan, chosen: Chosen
    ) -> Sequence[SampledToken | BeamStep]:
        """Return the outputs of a step, completed by the host.

        It is the step that was started last, unless steps in flight have different sequences.

        Args:
            step, packed: the step, and what `pack` has made of it.
            choice, chosen: the part that was left to the device, and its choices.
        """


@dataclass(slots=True, eq=False)
class _Launched(Generic[_Packed]):
    """A step in flight.

    Attributes:
        step, packed: the step, as it is and as the device takes it.
        choice: the part of the choice that is left to the device.
        is_started: whether it is on the device's queue, or never will be.
        chosen: waits for what the device chooses, once.
        error: reason why it could not be packed or started.
    """

    step: Batch
    packed: _Packed | None = None
    choice: DevicePlan = field(default_factory=DevicePlan)
    is_started: bool = False
    chosen: Callable[[], Chosen] | None = None
    error: BaseException | None = None


class StepLauncher(Generic[_Packed]):
    """Launches steps from one thread.

    Their outputs are asked for in order, in the same thread or another one.
    """

    def __init__(
        self, device: StepDevice[_Packed], choice: Chooser, *, runs_apart: bool = False
    ) -> None:
        """Start without a step.

        Args:
            device: runs them.
            choice: says what the device chooses.
            runs_apart: whether steps in flight have different sequences, so that none waits for what is chosen in
                another one, and the device keeps the logits of each.
        """
        self._device = device
        self._runs_apart = runs_apart
        self._choice = choice
        self._order = StepOrder()
        self._in_flight: deque[_Launched[_Packed]] = deque()
        self._lock = Lock()

    def launch(self, step: Batch) -> Callable[[], Sequence[SampledToken | BeamStep]]:
        """Start a step; return a function that waits for its outputs.

        If the host has to choose the tokens before it, it starts after that. `Runner.launch_batch` says what the
        function raises.
        """
        launched = _Launched[_Packed](step)
        try:
            choice = self._choice.plan(step)
            launched.packed = self._device.pack(step, choice)
            launched.choice = choice
        except BaseException as error:
            launched.error = error
        with self._lock:
            self._in_flight.append(launched)
            self._start_all()
        return partial(self._outputs, launched)

    @property
    def awaits_device(self) -> bool:
        """Whether the outputs of the first step in flight depend on the device."""
        if not self._in_flight:
            return False
        launched = self._in_flight[0]
        return launched.chosen is not None and not self._order.is_skipped(launched.step.after)

    def drain(self) -> None:
        """Wait for steps that were started and do not count: one before them has failed."""
        waits = []
        with self._lock:
            for launched in self._in_flight:
                if launched.chosen is not None and self._order.is_skipped(launched.step.after):
                    waits.append(launched.chosen)
                    launched.chosen = None
        for wait in waits:
            with suppress(Exception):
                wait()

    def settle(self) -> None:
        """Wait for all steps that were started, whose outputs are asked for later."""
        self.drain()
        with self._lock:
            started = [each for each in self._in_flight if each.chosen is not None]
        for launched in started:
            assert launched.chosen is not None
            launched.chosen = outcome_of(launched.chosen)

    def _outputs(self, launched: _Launched[_Packed]) -> Sequence[SampledToken | BeamStep]:
        """Return the outputs of the first step in flight."""
        step = launched.step
        try:
            # until then the device uses the inputs of a step that is skipped
            self.drain()
            with self._order.running(step.number, step.after):
                if launched.error is not None:
                    raise launched.error
                assert launched.chosen is not None
                waits, launched.chosen = launched.chosen, None
                choice, chosen = launched.choice, waits()
                if choice.is_whole:
                    return self._whole(step, choice, chosen)
                return self._device.choose(step, cast(_Packed, launched.packed), choice, chosen)
        finally:
            with self._lock:
                self._in_flight.popleft()
                # its frames hold the step
                launched.error = None
                self._start_all()

    def _whole(
        self, step: Batch, choice: DevicePlan, chosen: Chosen
    ) -> Sequence[SampledToken | BeamStep]:
        """Return the outputs of a step that the device has chosen.

        Raises:
            EngineError: the host has too little memory for them. The next step may have run, so this one cannot run
                again, as one that runs out of memory does.
        """
        try:
            return self._choice.outputs(step, choice, chosen, None)
        except MemoryError:
            raise EngineError(
                "the server had too little memory to read what a step chose"
            ) from None

    def _start_all(self) -> None:
        """Start the steps in flight, up to one that the next has to wait for."""
        for place, launched in enumerate(self._in_flight):
            if not launched.is_started and launched.error is None:
                packed = cast(_Packed, launched.packed)
                if place and not self._device.may_queue(packed):
                    return
                self._start(launched, packed)
            # the host chooses its tokens, which the next one takes, or it does not run
            if not self._runs_apart and not (launched.choice.is_whole and launched.error is None):
                return

    def _start(self, launched: _Launched[_Packed], packed: _Packed) -> None:
        """Start a step unless it must not run; an error is kept."""
        launched.is_started = True
        if self._order.is_skipped(launched.step.after):
            return
        try:
            launched.chosen = self._device.start(launched.step, packed)
        except BaseException as error:
            launched.error = error
