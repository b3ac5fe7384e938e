"""Cost model of a loaded model: read from the cache, measured, or assumed.

Costs are measured when a model is first loaded on a device with its settings, for at most `warmup_seconds`.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from varlen.config import EngineConfig
from varlen.costs.batch_shape import BatchLimits
from varlen.costs.measurement import Measurement, measure
from varlen.costs.model import CostModel
from varlen.costs.store import CostKey, CostStore, StoredCosts
from varlen.execution.fingerprint import checkpoint_hash, device_name, library_versions
from varlen.execution.runner import Runner
from varlen.models.checkpoint import Checkpoint
from varlen.request import DEFAULT_OPTIONS, Prompt

_log = logging.getLogger(__name__)

# To be increased when other batches are measured, or the same in another way.
_PLAN_VERSION = "4"
# Models that load together measure one after another. Longest wait for the others, in units of `warmup_seconds`.
_LONGEST_WAIT = 3
# A larger spread means that other work keeps the machine busy; an idle machine has 1.1.
_BUSY_SPREAD = 1.5
_SYSTEM_CACHE = Path("/var/cache")


def costs_for(runner: Runner, checkpoint: Checkpoint, config: EngineConfig) -> CostModel:
    """Return the cost model of a model: stored, measured, or assumed.

    If `warmup_seconds` is 0, costs are assumed, and nothing is read or written.

    Args:
        runner: runs the model; nothing else may use it meanwhile.
        checkpoint: the checkpoint of the model.
        config: its settings.
    """
    if not config.warmup_seconds:
        _log.info("warmup_seconds is 0; using assumed costs, which batches correct as they run")
        return assumed_costs(runner, config)
    try:
        return measured_costs(runner, checkpoint, config).measurement.model(config.execution)
    except MemoryError:
        _log.warning("too little memory to measure costs; using assumed costs")
        return assumed_costs(runner, config)


def assumed_costs(runner: Runner, config: EngineConfig) -> CostModel:
    """Return typical costs of a small encoder on two cores or on a GPU."""
    on_gpu = runner.device.type == "cuda"

    def seconds(count: int, length: int) -> float:
        tokens, squares = count * length, count * length**2
        if on_gpu:
            return 2e-3 + 4e-6 * max(tokens, 256) + 2e-9 * squares
        return 1.5e-3 + 30e-6 * tokens + 20e-9 * squares

    return CostModel.of_function(
        seconds,
        config.execution,
        max_sequences=config.max_batch_sequences,
        max_length=runner.max_sequence_tokens,
    )


def measured_costs(
    runner: Runner, checkpoint: Checkpoint, config: EngineConfig, *, again: bool = False
) -> StoredCosts:
    """Return the stored costs of a model, or measure and store them.

    Args:
        runner, checkpoint, config: as for `costs_for`.
        again: measure even if there are stored costs.

    Raises:
        MemoryError: there is too little memory for one sequence.
    """
    key = cache_key_fields(runner, checkpoint, config)
    store = CostStore(cache_folder(config.cache_folder))
    stored = None if again else _load(store, key, config)
    if stored is None:
        with store.measuring(timeout=_LONGEST_WAIT * config.warmup_seconds):
            # while this one waited, another server may have measured the same
            stored = None if again else _load(store, key, config)
            if stored is None:
                stored = StoredCosts.now(key, config.warmup_seconds, _measure(runner, config))
                store.save(stored)
                return stored
    _log.info(
        "costs read from the cache, measured %s", stored.measured_at.strftime("%Y-%m-%d %H:%M %Z")
    )
    return stored


def cache_key_fields(runner: Runner, checkpoint: Checkpoint, config: EngineConfig) -> CostKey:
    """Return everything that decides costs, and which batches are measured."""
    device = {"device": device_name(runner.device)}
    if runner.device.type == "cpu":
        device["threads"] = str(torch.get_num_threads())
    return {
        "checkpoint": checkpoint_hash(checkpoint.folder),
        "model": _name(checkpoint),
        "task": runner.task,
        **device,
        "dtype": str(runner.dtype).removeprefix("torch."),
        "execution": config.execution,
        "max_batch_sequences": str(config.max_batch_sequences),
        "max_batch_tokens": str(runner.max_batch_tokens),
        "max_sequence_tokens": str(runner.max_sequence_tokens),
        "arena_bytes": str(runner.arena.capacity),
        **library_versions(runner.device),
        "plan": _PLAN_VERSION,
    }


def cache_folder(setting: str) -> Path:
    """Return the folder of a `cache_folder` setting; `auto` is `varlen` in the user's cache folder."""
    try:
        if setting != "auto":
            return Path(setting).expanduser()
        configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
        # the XDG specification says to ignore relative paths
        base = configured if configured.is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        # a user without a home
        base = _SYSTEM_CACHE
    return base / "varlen"


def _load(store: CostStore, key: CostKey, config: EngineConfig) -> StoredCosts | None:
    """Return the stored costs, unless a shorter time limit cut their measurement short."""
    stored = store.load(key)
    if stored is None:
        return None
    if not stored.measurement.is_complete and stored.allowed_seconds < config.warmup_seconds:
        return None
    if not stored.measurement.batches:
        _log.warning("the costs in the cache have no batches; measuring them again")
        return None
    return stored


def _measure(runner: Runner, config: EngineConfig) -> Measurement:
    # a token's id does not change its cost
    numbers = np.random.default_rng(0)
    ids = numbers.integers(0, runner.vocab_size, runner.max_batch_tokens, dtype=np.int32)

    def run(lengths: list[int]) -> None:
        runner.run([Prompt(ids[:length]) for length in lengths], [DEFAULT_OPTIONS] * len(lengths))

    limits = BatchLimits(config.max_batch_sequences, runner.max_batch_tokens, config.execution)
    measurement = measure(
        run,
        limits,
        max_length=runner.max_sequence_tokens,
        seconds=config.warmup_seconds,
        clock=time.perf_counter,
        report=_log.info,
    )
    errors = measurement.errors(measurement.model(config.execution))
    _log.info(
        "costs measured in %.1f s (%d batches%s); the fit's median error is %.1f%%, its largest %.1f%%",
        measurement.seconds,
        len(measurement.batches),
        "" if measurement.is_complete else ", cut short",
        100 * statistics.median(map(abs, errors)),
        100 * max(map(abs, errors)),
    )
    if measurement.spread > _BUSY_SPREAD:
        _log.warning(
            "the reference batch took %.1f times as long in slow moments as in fast ones: the machine was busy,"
            " and costs may be too high; `python -m varlen_tools.profile_costs --again` measures again",
            measurement.spread,
        )
    return measurement


def _name(checkpoint: Checkpoint) -> str:
    layers = checkpoint.config.get("num_hidden_layers")
    return f"{checkpoint.config.get('model_type')}, {layers} layers of {checkpoint.hidden_size}"
