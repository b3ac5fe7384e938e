"""The work of a process of a model that has torch: batches or steps.

The process of steps draws the tokens of samples, and advances the searches that need only the logits; the next step
continues from them. The engine chooses the other tokens, from logits in memory that both processes map.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch

from varlen.execution.cpu.runner import CpuSteps, map_logits
from varlen.execution.device import cores_of_rank, usable_cores
from varlen.execution.executor import StepOrder
from varlen.execution.packing import PackedStep, part_of_step
from varlen.execution.rank_link import NO_OTHERS, RankLink
from varlen.execution.runner import Runner
from varlen.execution.token_state import NoChooser
from varlen.execution.warm_up import check_numbers, warm_up, warm_up_draws
from varlen.execution.workers.messages import (
    Array,
    Work,
    batch_message,
    batch_of,
    step_message,
    step_of,
)
from varlen.execution.workers.process import Setup
from varlen.memory.planner import new_shared
from varlen.request.request import Bytes, Int32Array, Prompt, RequestOptions

_Batch: TypeAlias = tuple[Sequence[Prompt], Sequence[RequestOptions]]


class BatchWork(Work[_Batch, _Batch]):
    """Batches of a model of one step, which all of its processes run."""

    runner: Runner
    read = staticmethod(batch_of)

    def __init__(self, setup: Setup, link: RankLink[_Batch] | None = None) -> None:
        """Load the model, or a part of it, and compile it once for all workers."""
        config = setup.config
        self.is_forked = link is None
        workers = (config.threads or usable_cores()) if self.is_forked else 1
        torch.set_num_threads(1 if self.is_forked else cores_of_rank(config))
        self.runner = Runner(
            setup.open_checkpoint(),
            config,
            gpu=setup.gpu,
            workers=workers,
            measures=True,
            link=link or NO_OTHERS,
        )
        if self.runner.device.type == "cpu":
            self.runner.compile_products()

    @staticmethod
    def message_of(batch: _Batch) -> bytes:
        return batch_message(*batch)

    def warm_up(self) -> None:
        self.runner.check()
        if self.runner.device.type == "cuda" and not self.runner.info.is_padded:
            check_numbers(self.runner)

    def prepare(self, batch: _Batch) -> _Batch:
        return batch

    def run(self, _: _Batch, part: Callable[[], _Batch], /) -> Sequence[Array]:
        return self.runner.run(*part())


class StepWork(Work[PackedStep | None, PackedStep | None]):
    """Steps of a model that generates. A step that is None is a check."""

    runner: Runner
    is_forked = False
    read = staticmethod(step_of)

    def __init__(self, setup: Setup, link: RankLink[PackedStep] | None = None) -> None:
        """Load the model, or a part of it."""
        torch.set_num_threads(cores_of_rank(setup.config))
        # the engine chooses what the process does not
        self.runner = Runner(
            setup.open_checkpoint(),
            setup.config,
            NoChooser(),
            gpu=setup.gpu,
            link=link or NO_OTHERS,
        )
        self._decoder = self.runner.decoder
        self._order = StepOrder()
        # tokens that the step before has chosen
        self._chosen: Int32Array = np.empty(0, np.int32)

    @staticmethod
    def message_of(step: PackedStep | None) -> bytes:
        """Return the message of the part of a step that other processes run."""
        if step is not None:
            step = part_of_step(step.inputs, step.copies, step.sources, step.order)
        return step_message(step)

    def warm_up(self) -> None:
        warm_up(self.runner)
        warm_up_draws(self.runner)

    def share(self, byte: Bytes) -> Sequence[int]:
        steps = self._decoder.steps
        if isinstance(steps, CpuSteps):
            self._decoder.hear(byte)
            return (steps.share_logits(),)
        info = self.runner.info
        descriptor = new_shared(torch.float32.itemsize * info.max_logit_rows * info.vocab_size)
        (steps.on_host,) = map_logits(descriptor, 1, info.max_logit_rows, info.vocab_size)
        return (descriptor,)

    def prepare(self, step: PackedStep | None) -> PackedStep | None:
        """Return a step with what ranks or stages need of it."""
        return None if step is None else self._decoder.prepare(step)

    def run(
        self, step: PackedStep | None, part: Callable[[], PackedStep | None], /
    ) -> Sequence[Array]:
        if step is None:
            self.runner.check()
            return ()
        with self._order.running(step.number, step.after):
            step.take_tokens(self._chosen)
            prepared = part()
            assert prepared is not None
            found = self._decoder.run_prepared(step, prepared)
        self._chosen = np.array(found.token_ids, np.int32)
        return (self._chosen, np.array(found.guesses, np.int32), *(found.searches or ()))
