"""Cost model of a loaded model: read from the cache, measured, or assumed.

Costs are measured when a model is first loaded on a device with its settings, for at most `warmup_seconds`.
"""

from __future__ import annotations

import logging
import statistics
import time
from queue import SimpleQueue

import numpy as np

from varlen.config import EngineConfig
from varlen.costs.model import BatchLimits, BatchShape, CostModel
from varlen.costs.store import CostKey, CostStore, Measurement, StoredCosts, find_cache, measure
from varlen.errors import EngineError
from varlen.execution.executor import ModelExecutor
from varlen.execution.model_info import ModelInfo
from varlen.models.checkpoint.weights import locate_weights, shards
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.request import Int32Array, Prompt, Request
from varlen.scheduling.batch import Batch, BatchResult, unanswered_sequences

_log = logging.getLogger(__name__)

# To be increased when other batches are measured, or the same in another way.
_PLAN_VERSION = "6"
# Models that load together measure one after another. Longest wait for the others, in units of `warmup_seconds`.
_LONGEST_WAIT = 3
# A larger spread means that other work keeps the machine busy; an idle machine has 1.1.
_BUSY_SPREAD = 1.5
# Larger batches than this are allowed, but a load should not wait for one, nor every core take memory for it.
_WARM_UP_TOKENS = {"cpu": 128, "cuda": 16_384}


def costs_for(
    info: ModelInfo, executor: ModelExecutor, checkpoint: Checkpoint, config: EngineConfig
) -> CostModel:
    """Return the cost model of a model: stored, measured, or assumed.

    If `warmup_seconds` is 0, none are read or written. What int8 gives is logged where it was measured before. Nothing
    else may use the executor meanwhile.
    """
    if price := _int8_price(info, checkpoint, config):
        _log.info("%s (measured before on this machine)", price)
    if not config.warmup_seconds:
        _log.info("warmup_seconds is 0; using assumed costs, which batches correct as they run")
        return assumed_costs(info, config)
    try:
        return measured_costs(info, executor, checkpoint, config).measurement.model(
            config.execution
        )
    except MemoryError:
        _log.warning("too little memory to measure costs; using assumed costs")
        return assumed_costs(info, config)


def save_int8_price(
    price: str, info: ModelInfo, checkpoint: Checkpoint, config: EngineConfig
) -> None:
    """Store what int8 gives here, in a line, for the log of later loads.

    Args:
        info: the model in its own dtype.
    """
    store = CostStore(find_cache(config.cache_folder))
    store.save_texts(_int8_key(info, checkpoint), {"price": price})


def _int8_price(info: ModelInfo, checkpoint: Checkpoint, config: EngineConfig) -> str:
    store = CostStore(find_cache(config.cache_folder))
    return (store.load_texts(_int8_key(info, checkpoint)) or {}).get("price", "")


def _int8_key(info: ModelInfo, checkpoint: Checkpoint) -> CostKey:
    """Return what decides speed and quality of int8: the weights too, not only their sizes."""
    folder = checkpoint.weights_folder
    files = [locate_weights(folder, shard.name).stat() for shard in shards(folder)]
    return {
        "files": " ".join(f"{file.st_size}@{file.st_mtime_ns}" for file in files),
        "task": info.task,
        "dtype": info.dtype,
        **info.cost_fields,
    }


def assumed_costs(info: ModelInfo, config: EngineConfig) -> CostModel:
    """Return typical costs of a small encoder on one core or on a GPU."""
    on_gpu = info.device == "cuda"

    def seconds(count: int, length: int) -> float:
        tokens, squares = count * length, count * length**2
        if on_gpu:
            return 2e-3 + 4e-6 * max(tokens, 256) + 2e-9 * squares
        return 2e-3 + 150e-6 * tokens + 50e-9 * squares

    return CostModel.of_function(
        seconds,
        config.execution,
        max_sequences=_most_sequences(info, config),
        max_length=info.max_sequence_tokens,
    )


def measured_costs(
    info: ModelInfo,
    executor: ModelExecutor,
    checkpoint: Checkpoint,
    config: EngineConfig,
    *,
    again: bool = False,
) -> StoredCosts:
    """Return the stored costs of a model, or measure and store them.

    Args:
        again: measure even if there are stored costs.

    Raises:
        MemoryError: there is too little memory for one sequence.
    """
    key = cache_key_fields(info, checkpoint, config)
    store = CostStore(find_cache(config.cache_folder))
    stored = None if again else _load(store, key, config)
    if stored is None:
        with store.measuring(timeout=_LONGEST_WAIT * config.warmup_seconds):
            # while this one waited, another server may have measured the same
            stored = None if again else _load(store, key, config)
            if stored is None:
                stored = StoredCosts.now(
                    key, config.warmup_seconds, _measure(info, executor, config)
                )
                store.save(stored)
                return stored
    _log.info(
        "costs read from the cache, measured %s", stored.measured_at.strftime("%Y-%m-%d %H:%M %Z")
    )
    return stored


def cache_key_fields(info: ModelInfo, checkpoint: Checkpoint, config: EngineConfig) -> CostKey:
    """Return everything that decides costs, and which batches are measured."""
    return {
        "model": _name(checkpoint),
        "task": "+".join((info.task, *info.outputs)),
        "workers": str(info.workers),
        "dtype": info.dtype,
        "execution": config.execution,
        "max_batch_sequences": str(config.max_batch_sequences),
        "max_batch_tokens": str(info.max_batch_tokens),
        "max_sequence_tokens": str(info.max_sequence_tokens),
        "arena_bytes": str(info.arena_bytes),
        **info.cost_fields,
        "plan": _PLAN_VERSION,
    }


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


def warm_up(info: ModelInfo, executor: ModelExecutor, config: EngineConfig) -> None:
    """Run a batch in every worker, so that the first request is fast."""
    most = min(info.max_batch_tokens, _WARM_UP_TOKENS[info.device])
    length = min(info.max_sequence_tokens, most)
    count = max(1, min(most // length, config.max_batch_sequences))
    _run_on_all(info, executor, [np.zeros(length, dtype=np.int32)] * count)


def _run_on_all(info: ModelInfo, executor: ModelExecutor, rows: list[Int32Array]) -> None:
    """Run a batch of token ids in every worker.

    Raises:
        MemoryError: a worker has too little memory.
        EngineError: a worker failed.
    """
    prompts = tuple(Prompt(row, payload=info.payload_of(len(row))) for row in rows)
    # a batch whose rows ask for everything, and have an adapter, takes longest
    request = Request(prompts, info.most_work)
    batch = Batch(
        unanswered_sequences(request), BatchShape.of([len(row) for row in rows]), 0.0, "warm-up"
    )
    results: SimpleQueue[BatchResult] = SimpleQueue()
    for _ in range(info.workers):
        executor.start(batch, lambda _, result: results.put(result))
    failures = [results.get().failure for _ in range(info.workers)]
    if "memory" in failures:
        raise MemoryError("too little memory for a batch")
    if any(failures):
        raise EngineError("the model failed on its first batches; the log says why")


def _measure(info: ModelInfo, executor: ModelExecutor, config: EngineConfig) -> Measurement:
    # a token's id does not change its cost
    numbers = np.random.default_rng(0)
    ids = numbers.integers(0, info.vocab_size, info.max_batch_tokens, dtype=np.int32)

    def run(lengths: list[int]) -> None:
        _run_on_all(info, executor, [ids[:length] for length in lengths])

    limits = BatchLimits(_most_sequences(info, config), info.max_batch_tokens, config.execution)
    measurement = measure(
        run,
        limits,
        # a load does not wait for the longest sequence: the model extrapolates to it
        max_length=min(info.max_sequence_tokens, info.max_batch_tokens),
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
            " and costs may be too high; `varlen costs --again` measures again",
            measurement.spread,
        )
    return measurement


def _most_sequences(info: ModelInfo, config: EngineConfig) -> int:
    """Return the largest number of sequences in a batch; each has a token."""
    return min(config.max_batch_sequences, info.max_batch_tokens)


def _name(checkpoint: Checkpoint) -> str:
    layers = checkpoint.config.get("num_hidden_layers")
    return f"{checkpoint.config.get('model_type')}, {layers} layers of {checkpoint.hidden_size}"
