"""What a process of a model runs: batches of a model of one step, or steps of one that generates.

Steps draw their tokens here, and take steps of searches that depend on the logits alone, and the next step goes on with
them. Others are chosen by the engine, from logits in memory that both map.
"""

from __future__ import annotations

import os
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
from varlen.execution.step_launcher import NoChoice
from varlen.execution.step_packing import PackedStep
from varlen.execution.step_runner import StepRunner
from varlen.execution.warm_up import warm_up, warm_up_draws
from varlen.execution.workers.child import Setup
from varlen.execution.workers.messages import Array, batch_message, batch_of, step_message, step_of
from varlen.memory.memory_use import MemoryUse
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.request import Int32Array

_Order = TypeVar("_Order")
_Part = TypeVar("_Part")


class Work(Protocol[_Order, _Part]):
    """The work of a process that has loaded a model, or a part of one.

    Attributes:
        is_forked: whether workers are forked from this process.
    """

    is_forked: bool

    @property
    def info(self) -> ModelInfo | StepInfo:
        """Model facts for the engine."""

    def warm_up(self) -> None:
        """Run what has to run before the first work, in all processes of the model."""

    def share(self) -> Sequence[int]:
        """Return file descriptors of memory that the engine maps."""

    def read(self, message: bytes) -> _Order:
        """Return the work of a message."""

    def prepare(self, order: _Order) -> _Part:
        """Return the part of some work that ranks or stages run; other work may run meanwhile."""

    def run(self, order: _Order, part: Callable[[], _Part]) -> Sequence[Array]:
        """Return the answers to some work.

        Args:
            order: the work.
            part: returns the result of `prepare`.
        """

    def run_part(self, message: bytes) -> None:
        """Run this process's part of what the leader has sent."""

    def share_cores(self, share: CoreShare) -> None:
        """Use all cores while `share` says that a batch runs alone."""

    def use(self) -> MemoryUse:
        """Return the memory use."""

    def release(self) -> None:
        """Return the memory of intermediates to the system."""


class BatchWork:
    """Batches of a model of one step: `Work`. All processes of the model run them whole."""

    def __init__(self, setup: Setup, link: RankLink[WorkOfBatch] | None = None) -> None:
        """Load the model, or a part of it."""
        config = setup.config
        self.is_forked = link is None
        workers = (config.threads or usable_cores()) if self.is_forked else 1
        torch.set_num_threads(1 if self.is_forked else cores_of_rank(config))
        self._runner = Runner(
            _checkpoint(setup), config, workers=workers, measures=True, link=link or NO_OTHERS
        )
        # once for all workers
        self._runner.compile_products()
        self.info = self._runner.info
        self.warm_up, self.use = self._runner.check, self._runner.use
        self.release, self.share_cores = self._runner.release_arena, self._runner.share_cores
