"""Launches steps of generation before the device has run the ones before them.

A step whose tokens are drawn from its logits alone is launched as a whole, and the next one behind it: the device
gives it the tokens. Where the host takes part in the choice, for a grammar or a search, it needs the tokens before, so
the next step starts after that. docs/decisions/0059-steps-ahead.md has the reasons.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Generic, Protocol, TypeVar, cast

from varlen.execution.step_model import ChooseDraws
from varlen.execution.step_order import StepOrder
from varlen.scheduling.batch import StepBatch
from varlen.scheduling.choices import BeamStep, Draws, SampledToken

_Packed = TypeVar("_Packed")


class StepDevice(Protocol[_Packed]):
    """What runs steps, in the order in which they start."""

    def pack(self, step: StepBatch, draws: Draws | None) -> _Packed:
        """Return a step as the device takes it.

        Args:
            step: the step.
            draws: numbers that its tokens are drawn with; None if the host chooses them.
        """

    def may_queue(self, packed: _Packed) -> bool:
        """Return whether a step can start while another one runs, without waiting for it."""

    def start(self, step: StepBatch, packed: _Packed) -> Callable[[], Sequence[int]]:
        """Start a step; return a function that waits for drawn tokens, or returns none.

        Args:
            step, packed: the step, and what `pack` has made of it.
        """

    def choose(self, step: StepBatch) -> Sequence[SampledToken | BeamStep]:
        """Return what the host chooses from the logits of the step that was started last."""


@dataclass(slots=True, eq=False)
class _Launched(Generic[_Packed]):
    """A step in flight.

    Attributes:
        step, packed: the step, as it is and as the device takes it.
        is_drawn: whether the device chooses its tokens.
        is_started: whether it is on the device's queue, or never will be.
        tokens: waits for the tokens, once.
        error: reason why it could not be packed or started.
    """

    step: StepBatch
    packed: _Packed | None = None
    is_drawn: bool = False
    is_started: bool = False
    tokens: Callable[[], Sequence[int]] | None = None
    error: BaseException | None = None


class StepLauncher(Generic[_Packed]):
    """Launches steps from one thread.

    Their outputs are asked for in order, in the same thread or another one.
    """

    def __init__(self, device: StepDevice[_Packed], draws: ChooseDraws) -> None:
        """Start without a step.

        Args:
            device: runs them.
            draws: returns what the tokens of a step are drawn with, if nothing else is needed.
        """
        self._device = device
        self._draws = draws
        self._order = StepOrder()
        self._in_flight: deque[_Launched[_Packed]] = deque()
        self._lock = Lock()

    def launch(self, step: StepBatch) -> Callable[[], Sequence[SampledToken | BeamStep]]:
        """Start a step; return a function that waits for its outputs.

        If the host has to choose the tokens before it, it starts after that. `StepRunner.launch_batch` says what the
        function raises.
        """
        launched = _Launched[_Packed](step)
        try:
            draws = self._draws(*step.sampled)
            launched.packed = self._device.pack(step, draws)
            launched.is_drawn = draws is not None
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
        return launched.tokens is not None and not self._order.is_skipped(launched.step.after)

    def drain(self) -> None:
        """Wait for steps that were started and do not count: one before them has failed."""
        waits = []
        with self._lock:
            for launched in self._in_flight:
                if launched.tokens is not None and self._order.is_skipped(launched.step.after):
                    waits.append(launched.tokens)
                    launched.tokens = None
        for wait in waits:
            with suppress(Exception):
                wait()

    def _outputs(self, launched: _Launched[_Packed]) -> Sequence[SampledToken | BeamStep]:
        """Return the outputs of the first step in flight."""
        step = launched.step
        try:
            # until then the device uses the inputs of a step that is skipped
            self.drain()
            with self._order.running(step.number, step.after):
                if launched.error is not None:
                    raise launched.error
                assert launched.tokens is not None
                waits, launched.tokens = launched.tokens, None
                token_ids = waits()
                if launched.is_drawn:
                    return [SampledToken(token_id) for token_id in token_ids]
                return self._device.choose(step)
        finally:
            with self._lock:
                self._in_flight.popleft()
                # its frames hold the step
                launched.error = None
                self._start_all()

    def _start_all(self) -> None:
        """Start the steps in flight, up to one that the next has to wait for."""
        for place, launched in enumerate(self._in_flight):
            if not launched.is_started and launched.error is None:
                packed = cast(_Packed, launched.packed)
                if place and not self._device.may_queue(packed):
                    return
                self._start(launched, packed)
            # the host chooses its tokens, or it does not run
            if not launched.is_drawn or launched.error is not None:
                return

    def _start(self, launched: _Launched[_Packed], packed: _Packed) -> None:
        """Start a step unless it must not run; an error is kept."""
        launched.is_started = True
        if self._order.is_skipped(launched.step.after):
            return
        try:
            launched.tokens = self._device.start(launched.step, packed)
        except BaseException as error:
            launched.error = error
