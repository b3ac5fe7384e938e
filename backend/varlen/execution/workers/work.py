"""The work of a process of a model: batches, or steps of generation.

Steps draw their tokens here, and take steps of searches that depend on the logits alone, and the next step goes on with
them. Others are chosen by the engine, from logits in memory that both map.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np
import torch

from varlen.execution.cpu.step_runner import CpuSteps
from varlen.execution.device import cores_of_rank, usable_cores
from varlen.execution.executor import CoreShare, StepOrder
from varlen.execution.model_info import ModelInfo, StepInfo
from varlen.execution.rank_link import NO_OTHERS, RankLink
from varlen.execution.runner import Runner, WorkOfBatch
from varlen.execution.step_launcher import NoChooser
from varlen.execution.step_packing import PackedStep
from varlen.execution.step_runner import StepRunner
from varlen.execution.warm_up import warm_up, warm_up_draws
from varlen.execution.workers.messages import Array, batch_message, batch_of, step_message, step_of
from varlen.execution.workers.process import Setup
from varlen.memory.memory_use import MemoryUse
from varlen.request.request import Int32Array

_Order = TypeVar("_Order")
_Part = TypeVar("_Part")


class Work(Protocol[_Order, _Part]):
    """The work of a process that has loaded a model, or a part of one.

    Attributes:
        share_cores: has the workers that are forked from this process use all cores while a batch runs alone; None if
            it is its own only worker.
    """

    share_cores: Callable[[CoreShare], None] | None

    @property
    def info(self) -> ModelInfo | StepInfo:
        """Model facts for the engine."""

    def warm_up(self) -> None:
        """Run the first batch or steps, in all processes of the model."""

    def share(self) -> Sequence[int]:
        """Return file descriptors of memory that the engine maps."""

    def read(self, message: bytes, /) -> _Order:
        """Return the work of a message."""

    def prepare(self, order: _Order, /) -> _Part:
        """Return the part that ranks or stages run; other work may run meanwhile."""

    def run(self, order: _Order, part: Callable[[], _Part], /) -> Sequence[Array]:
        """Return the answers to some work.

        Args:
            order: the work.
            part: returns the result of `prepare`.
        """

    def run_part(self, message: bytes) -> None:
        """Run this process's part of what the leader has sent."""

    def use(self) -> MemoryUse:
        """Return the memory use."""

    def release(self) -> None:
        """Return the memory of intermediates to the system."""


class BatchWork:
    """Batches of a model of one step, which all of its processes run."""

    read = staticmethod(batch_of)

    def __init__(self, setup: Setup, link: RankLink[WorkOfBatch] | None = None) -> None:
        """Load the model, or a part of it, and compile it once for all workers."""
        config = setup.config
        is_forked = link is None
        workers = (config.threads or usable_cores()) if is_forked else 1
        torch.set_num_threads(1 if is_forked else cores_of_rank(config))
        runner = Runner(
            setup.open_checkpoint(), config, workers=workers, measures=True, link=link or NO_OTHERS
        )
        runner.compile_products()
        self._runner, self.info = runner, runner.info
        self.share_cores: Callable[[CoreShare], None] | None = (
            runner.share_cores if is_forked else None
        )
        self.warm_up, self.use, self.release = runner.check, runner.use, runner.release_arena

    @staticmethod
    def message_of(work: WorkOfBatch) -> bytes:
        """Return the message of a batch to other processes."""
        return batch_message(*work)

    def share(self) -> Sequence[int]:
        """Return no file descriptor: answers are sent."""
        return ()

    def prepare(self, batch: WorkOfBatch) -> WorkOfBatch:
        """Return the batch."""
        return batch

    def run(self, _: WorkOfBatch, part: Callable[[], WorkOfBatch], /) -> Sequence[Array]:
        """Return the answer of each sequence of a batch."""
        return self._runner.run(*part())

    def run_part(self, message: bytes) -> None:
        """Run a batch of the leader."""
        self._runner.run(*batch_of(message))


class StepWork:
    """Steps of a model that generates: `Work`. A step that is None is a check."""

    share_cores: Callable[[CoreShare], None] | None = None
    message_of = staticmethod(step_message)
    read = staticmethod(step_of)

    def __init__(self, setup: Setup, link: RankLink[PackedStep] | None = None) -> None:
        """Load the model, or a part of it."""
        torch.set_num_threads(cores_of_rank(setup.config))
        # the engine chooses what the process does not
        runner = StepRunner(
            setup.open_checkpoint(), setup.config, NoChooser(), link=link or NO_OTHERS
        )
        self._runner, self.info = runner, runner.info
        self.use, self.release = runner.use, runner.release_arenas
        self._order = StepOrder()
        # tokens that the step before has chosen
        self._chosen: Int32Array = np.empty(0, np.int32)

    def warm_up(self) -> None:
        """Run steps of each kind."""
        warm_up(self._runner)
        warm_up_draws(self._runner)

    def share(self) -> Sequence[int]:
        """Return the memory of the logits."""
        assert isinstance(self._runner.steps, CpuSteps)
        return (self._runner.steps.share_logits(),)

    def prepare(self, step: PackedStep | None) -> PackedStep | None:
        """Return the part of a step that ranks or stages run."""
        return None if step is None else self._runner.prepare(step)

    def run(
        self, step: PackedStep | None, part: Callable[[], PackedStep | None]
    ) -> Sequence[Array]:
        """Return what a step chooses."""
        if step is None:
            self._runner.check()
            return ()
        with self._order.running(step.number, step.after):
            step.take_tokens(self._chosen)
            prepared = part()
            assert prepared is not None
            found = self._runner.run_prepared(step, prepared)
        self._chosen = np.array(found.token_ids, np.int32)
        return (self._chosen, *(found.searches or ()))

    def run_part(self, message: bytes) -> None:
        """Run a step of the leader."""
        step = step_of(message)
        assert step is not None
        self._runner.run_part(step)
