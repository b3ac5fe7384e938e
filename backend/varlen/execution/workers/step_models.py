"""Loads a model that generates, into this process or one of its own.

On a server's CPU it has its own.
"""

from __future__ import annotations

from dataclasses import replace

from varlen.config import EngineConfig
from varlen.execution.device import check_ranks, choose_device
from varlen.execution.executor import StepModel
from varlen.execution.runner import Runner
from varlen.execution.token_state import Chooser
from varlen.execution.warm_up import warm_up, warm_up_choice
from varlen.execution.workers.step_process import StepProcess
from varlen.models.checkpoint_folder import Checkpoint
from varlen.telemetry.metrics import CountedMetric, Stats


def load_step_model(
    checkpoint: Checkpoint,
    config: EngineConfig,
    choice: Chooser,
    stats: Stats,
    *,
    gpu: int,
    isolated: bool,
) -> StepModel:
    """Return a model that generates, warmed up.

    Args:
        checkpoint: checkpoint to load.
        config: the settings.
        choice: chooses tokens from logits on the device of the settings.
        stats: counts processes that had to be started again.
        gpu: number of the GPU, if the model runs on one.
        isolated: whether a model on a CPU has a process of its own.

    Raises:
        CheckpointError: the checkpoint is incomplete or of a kind that is not served.
        ConfigError: a setting does not fit the checkpoint.
    """
    device = choose_device(config.device, gpu)
    check_ranks(config, device, isolated=isolated)
    if device.type == "cpu" and isolated:
        return _process(checkpoint, config, choice, stats)
    runner = Runner(checkpoint, config, choice, gpu=gpu)
    warm_up(runner, config.device_timeout_seconds)
    # sequences of the warm-up, which never end
    choice.forget()
    return runner


def _process(
    checkpoint: Checkpoint,
    config: EngineConfig,
    choice: Chooser,
    stats: Stats,
) -> StepProcess:
    model = StepProcess(
        checkpoint.folder,
        replace(config, device="cpu"),
        choice,
        lambda: stats.count(CountedMetric.WORKER_RESTARTS),
    )
    try:
        warm_up_choice(choice, model.info)
    except BaseException:
        model.close()
        raise
    return model
