"""The workers of a model: on a GPU one, on a CPU one per core.

Each runs whole batches, so cores never wait for each other; a batch that runs alone uses all of them. A GPU has the
next batch before it has run the last one. docs/decisions/0025-workers.md and 0029-gpu-executor.md have the reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from varlen.config import Device, EngineConfig
from varlen.execution.cuda.timeout import with_timeout
from varlen.execution.executor import (
    Launcher,
    ModelExecutor,
    OverlappingExecutor,
)
from varlen.execution.model_info import GraphUse, ModelInfo
from varlen.execution.thread_executor import CoreShare, ThreadExecutor
from varlen.execution.workers.process import ModelProcess, excludes_gpu
from varlen.execution.workers.worker import WorkerProcess
from varlen.memory.memory_use import AdapterUse, MemoryUse
from varlen.models.checkpoint_folder import Checkpoint
from varlen.telemetry.metrics import CountedMetric, Stats


class Worker(Launcher, Protocol):
    """A runner whose memory use can be read."""

    @property
    def adapter_uses(self) -> Sequence[AdapterUse]:
        """Adapters in memory, if they are counted."""

    def use(self) -> MemoryUse:
        """Return the memory use. From any thread."""

    def close(self) -> None:
        """Release what it holds."""


@dataclass(frozen=True, slots=True)
class Workers:
    """The workers of one model.

    Attributes:
        prepare: function to be called first by each thread that uses one.
        host: the process that starts them, if they are processes.
        launcher: the only worker, if it starts a batch while another one runs: a GPU, or the stages of a pipeline.
        device_timeout: longest time of a batch of the launcher, in seconds; 0 is no limit.
        share: tells the workers of a CPU whether their batch runs alone.
    """

    info: ModelInfo
    runners: Sequence[Worker]
    prepare: Callable[[], None] | None = None
    host: ModelProcess | None = None
    launcher: Launcher | None = None
    graphs: GraphUse = field(default_factory=GraphUse)
    device_timeout: float = 0.0
    share: CoreShare | None = None

    def new_executor(self) -> ModelExecutor:
        """Return an executor of these workers; it has started its threads."""
        if self.launcher is not None:
            executor = OverlappingExecutor(self.launcher, is_pipeline=self.host is not None)
            return with_timeout(executor, self.device_timeout)
        are_processes = self.host is not None
        return ThreadExecutor(self.runners, self.prepare, self.share, starts_at_once=are_processes)

    def use_all_cores(self) -> None:
        """Let a batch that runs alone use the cores of all workers from now on.

        With one worker every batch has all cores, and its time is what costs are.
        """
        if self.share is not None and len(self.runners) > 1:
            self.share.is_on = True

    def use(self) -> MemoryUse:
        return MemoryUse.total(each.use() for each in self.runners)

    @property
    def adapter_uses(self) -> Sequence[AdapterUse]:
        return [use for each in self.runners for use in each.adapter_uses]

    def close(self) -> None:
        """Release memory and end processes. Nothing may run."""
        for runner in self.runners:
            runner.close()
        if self.host is not None:
            # and the share with it
            self.host.close()
        elif self.share is not None:
            self.share.close()


def load_workers(
    checkpoint: Checkpoint, config: EngineConfig, stats: Stats, *, gpu: int, isolated: bool
) -> Workers:
    """Return the workers of a model.

    Args:
        stats: counts workers that had to be started again.
        isolated: whether workers on a CPU are processes instead of threads.

    Raises:
        CheckpointError: the checkpoint is incomplete or of a kind that is not served.
        ConfigError: a setting does not fit the checkpoint.
    """
    if isolated and excludes_gpu(config.device):
        return _processes(checkpoint, config, stats)
    # imports torch, which an engine of processes does not need
    from varlen.execution.device import check_ranks, choose_device, usable_cores, use_one_core
    from varlen.execution.runner import Runner
    from varlen.execution.warm_up import check_numbers

    device = choose_device(config.device, gpu)
    check_ranks(config, device, isolated=isolated)
    if device.type == "cuda" and config.num_processes == 1:
        runner = Runner(checkpoint, config, gpu=gpu)
        check_numbers(runner, config.device_timeout_seconds)
        return Workers(
            runner.info,
            [runner],
            launcher=runner,
            graphs=runner.graph_use,
            device_timeout=config.device_timeout_seconds,
        )
    if isolated:
        return _processes(checkpoint, config, stats, "cpu" if device.type == "cpu" else "cuda", gpu)
    count = config.threads or usable_cores()
    runner = Runner(checkpoint, config, workers=count, measures=True)
    runners, share = [runner, *(runner.another() for _ in range(count - 1))], CoreShare()
    for each in runners:
        each.share_cores(share)
    return Workers(runner.info, runners, use_one_core, share=share)


def _processes(
    checkpoint: Checkpoint, config: EngineConfig, stats: Stats, device: Device = "cpu", gpu: int = 0
) -> Workers:
    config = replace(config, device=device)
    host = ModelProcess(checkpoint.folder, config, generates=False, gpu=gpu)

    def count_restart() -> None:
        stats.count(CountedMetric.WORKER_RESTARTS)

    runners: list[WorkerProcess] = []
    workers = Workers(host.info, runners, host=host, share=host.share)
    try:
        stages = config.pipeline_parallel
        runners += (WorkerProcess(host, count_restart, stages) for _ in range(host.info.workers))
    except BaseException:
        workers.close()
        raise
    # its stages run as many batches at the same time
    return replace(workers, launcher=runners[0]) if stages > 1 else workers
