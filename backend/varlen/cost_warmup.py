"""The costs that a model's batches are planned by: read from the cache, or measured now, or assumed.

They are measured when a model is first loaded under its circumstances, for at most `warmup_seconds`.
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
from varlen.costs.store import About, CostStore, StoredCosts
from varlen.costs.table import CostTable
from varlen.execution.fingerprint import checkpoint_hash, device_name, library_versions
from varlen.execution.runner import Runner
from varlen.models.checkpoint import Checkpoint
from varlen.request import DEFAULT_OPTIONS, Prompt

_log = logging.getLogger(__name__)

# Changes when other batches are measured, or in another way.
_GRID_VERSION = "3"
# How long models that load together wait for each other's measuring, in times of their own.
_PATIENCE = 3
# Repeats of one batch that are more unlike than this tell of other work on the machine.
_BUSY = 1.5
_SYSTEM_CACHE = Path("/var/cache")


def costs_for(runner: Runner, checkpoint: Checkpoint, config: EngineConfig) -> CostTable:
    """Return what a model's batches cost: as it was measured earlier, else as measured now.

    Where `warmup_seconds` is 0 costs are assumed, and nothing is read or written.

    Args:
        runner: the model, which nothing else uses meanwhile.
        checkpoint: what it was loaded from.
        config: how it is run.
    """
    if not config.warmup_seconds:
        _log.info("costs assumed, as warmup_seconds is 0; batches that run correct them")
        return assumed_costs(runner, config)
    try:
        return measured_costs(runner, checkpoint, config).measurement.table(config.execution)
    except MemoryError:
        _log.warning("too little memory to measure costs: they are assumed")
        return assumed_costs(runner, config)


def assumed_costs(runner: Runner, config: EngineConfig) -> CostTable:
    """Return costs of a small encoder on two cores or a GPU, made up of tokens and squared lengths."""
    on_gpu = runner.device.type == "cuda"

    def seconds(count: int, length: int) -> float:
        tokens, squares = count * length, count * length**2
        if on_gpu:
            return 2e-3 + 4e-6 * max(tokens, 256) + 2e-9 * squares
        return 1.5e-3 + 30e-6 * tokens + 20e-9 * squares

    return CostTable.of_function(
        seconds,
        config.execution,
        max_sequences=max(2, config.max_batch_sequences),
        max_length=runner.max_sequence_tokens,
    )


def measured_costs(
    runner: Runner, checkpoint: Checkpoint, config: EngineConfig, *, again: bool = False
) -> StoredCosts:
    """Return what was measured of a model under these circumstances, or is now and kept.

    Args:
        runner, checkpoint, config: as for `costs_for`.
        again: measure what was measured already.

    Raises:
        MemoryError: there was too little for the smallest batches.
    """
    about = circumstances(runner, checkpoint, config)
    store = CostStore(cache_folder(config.cache_folder))
    kept = None if again else _load(store, about, config)
    if kept is None:
        with store.measuring(timeout=_PATIENCE * config.warmup_seconds):
            # another server may just have measured the same
            kept = None if again else _load(store, about, config)
            if kept is None:
                measurement = _measure(runner, config)
                kept = StoredCosts.now(about, config.warmup_seconds, measurement)
                store.save(kept)
                return kept
    _log.info(
        "costs read from the cache, measured %s", kept.measured_at.strftime("%Y-%m-%d %H:%M %Z")
    )
    return kept


def circumstances(runner: Runner, checkpoint: Checkpoint, config: EngineConfig) -> About:
    """Return all that decides what a batch costs, and which batches are measured, in words."""
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
        "grid": _GRID_VERSION,
    }


def cache_folder(setting: str) -> Path:
    """Return the folder that `cache_folder` names; `auto` is `varlen` in the user's cache folder."""
    try:
        if setting != "auto":
            return Path(setting).expanduser()
        configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
        # the specification has relative ones ignored
        base = configured if configured.is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        # a user without a home
        base = _SYSTEM_CACHE
    return base / "varlen"


def _load(store: CostStore, about: About, config: EngineConfig) -> StoredCosts | None:
    """Return what is kept, unless it was cut short by less time than there is now."""
    kept = store.load(about)
    if kept is None:
        return None
    if not kept.measurement.is_complete and kept.allowed_seconds < config.warmup_seconds:
        return None
    try:
        kept.measurement.grid_table(config.execution)
    except ValueError as error:
        _log.warning("the costs in the cache are of no use, and measured anew: %s", error)
        return None
    return kept


def _measure(runner: Runner, config: EngineConfig) -> Measurement:
    # any ids do: what a token is makes no difference to what it costs
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
        say=_log.info,
    )
    _log.info(
        "costs measured in %.1f s (%d batches%s); batches of mixed lengths %s",
        measurement.seconds,
        measurement.batches,
        "" if measurement.is_complete else ", cut short",
        _how_far_off(measurement, config),
    )
    if measurement.spread > _BUSY:
        _log.warning(
            "one batch took %.1f times as long as the same batch at another time, in the median: the machine was busy,"
            " and costs may be too high; `python -m varlen_tools.profile_costs --again` measures anew",
            measurement.spread,
        )
    return measurement


def _how_far_off(measurement: Measurement, config: EngineConfig) -> str:
    errors = measurement.errors(measurement.grid_table(config.execution))
    if not errors:
        return "were not measured"
    corrected = measurement.errors(measurement.table(config.execution))
    return (
        f"are {statistics.median(map(abs, errors)):.1%} off in the median,"
        f" {statistics.median(map(abs, corrected)):.1%} once they correct it"
    )


def _name(checkpoint: Checkpoint) -> str:
    layers = checkpoint.config.get("num_hidden_layers")
    return f"{checkpoint.config.get('model_type')}, {layers} layers of {checkpoint.hidden_size}"
