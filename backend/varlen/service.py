"""One loaded model: checkpoint, input checks, engine and response cache.

The server's model class and the in-process API both use it.
"""

import logging
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from varlen.config import EngineConfig, Task
from varlen.cost_warmup import costs_for
from varlen.engine import Engine
from varlen.execution.device import name_of
from varlen.execution.executor import ThreadExecutor
from varlen.execution.runner import Runner
from varlen.intake import InputLimits, Intake
from varlen.metrics import MetricsSnapshot, SnapshotMetric, Stats
from varlen.models.checkpoint import Checkpoint
from varlen.request import DEFAULT_OPTIONS, Prompt, Reply, Request
from varlen.response_cache import CacheUse, JoinLimits, ResponseCache
from varlen.scheduling.admission import Admission
from varlen.scheduling.one_shot import OneShotScheduler
from varlen.tokenization import Tokenizer

_log = logging.getLogger(__name__)

_MEGABYTE = 1e6
# Larger batches than this are allowed, but a load should not wait for one.
_WARM_UP_TOKENS = 16_384


@dataclass(frozen=True, slots=True)
class Service:
    """A running model.

    Attributes:
        checkpoint: the loaded checkpoint.
        task: the task of the model.
        intake: checks inputs and makes prompts of them.
        admission: counts waiting work.
        engine: schedules requests; started.
        executor: runs batches.
        runner: the model that the engine owns.
        cache: the response cache in front of the engine, if it is on.
    """

    checkpoint: Checkpoint
    task: Task
    intake: Intake
    admission: Admission
    engine: Engine
    executor: ThreadExecutor
    runner: Runner
    cache: ResponseCache | None = None

    @classmethod
    def load(
        cls, folder: str | Path, config: EngineConfig, stats: Stats, *, gpu: int = 0
    ) -> "Service":
        """Return the model of a checkpoint folder, warmed up.

        Args:
            folder: holds the checkpoint.
            config: the settings.
            stats: gets the counts of the engine.
            gpu: number of the GPU, if the model runs on one.

        Raises:
            CheckpointError: the checkpoint is incomplete or of a kind that is not served.
            ConfigError: a setting does not fit the checkpoint.
        """
        began = time.monotonic()
        if config.threads:
            torch.set_num_threads(config.threads)
        checkpoint = Checkpoint.open(folder)
        runner = Runner(checkpoint, config, gpu=gpu)
        _warm_up(runner)
        limits = InputLimits(
            max_sequence_tokens=runner.max_sequence_tokens,
            max_text_bytes=config.max_text_bytes,
            vocab_size=runner.vocab_size,
            type_vocab_size=runner.type_vocab_size,
            arena=runner.arena,
        )
        prompt = checkpoint.default_prompt if runner.task == "embed" else ""
        tokenizer = Tokenizer(checkpoint.folder, runner.max_sequence_tokens, prompt=prompt)
        intake = Intake(tokenizer, limits)
        executor = ThreadExecutor([runner])
        admission = Admission(
            config.max_queued_requests, config.max_queued_tokens, slots=executor.slots
        )
        costs = costs_for(runner, checkpoint, config)
        scheduler = OneShotScheduler(config, costs, admission, runner.max_batch_tokens)
        engine = Engine(scheduler, executor, stats)
        engine.start()
        _log.info(
            "serving %s in %s on %s, sequences up to %d tokens, batches up to %d; arena up to %.1f MB, weights %.1f MB;"
            " loaded in %.1f s",
            runner.task,
            str(runner.dtype).removeprefix("torch."),
            name_of(runner.device),
            runner.max_sequence_tokens,
            runner.max_batch_tokens,
            runner.arena.capacity / _MEGABYTE,
            runner.weight_bytes / _MEGABYTE,
            time.monotonic() - began,
        )
        cache = _response_cache(config, engine, runner)
        return cls(checkpoint, runner.task, intake, admission, engine, executor, runner, cache)

    @property
    def is_ready(self) -> bool:
        """Whether requests are accepted; False for good after a fault of the device."""
        return self.engine.is_ready

    def submit(self, request: Request, reply: Reply) -> None:
        """Answer a request, now or later. Any thread may call this.

        Raises:
            VarlenError: the request is not admitted; the caller answers it. See `Engine.submit`.
        """
        (self.cache or self.engine).submit(request, reply)

    def snapshot(self) -> MetricsSnapshot:
        """Return the values of all gauges and totals. From any thread."""
        requests, tokens = self.admission.depth
        arena = self.runner.arena
        layout, use = arena.layout, arena.use()
        cache = self.cache.use() if self.cache else CacheUse()
        return {
            SnapshotMetric.QUEUED_REQUESTS: requests,
            SnapshotMetric.QUEUED_TOKENS: tokens,
            SnapshotMetric.WEIGHT_BYTES: self.runner.weight_bytes,
            SnapshotMetric.ARENA_CAPACITY: arena.capacity,
            SnapshotMetric.ARENA_RESERVED: use.reserved_bytes,
            SnapshotMetric.ARENA_CHUNKS: use.chunks,
            SnapshotMetric.ARENA_FOOTPRINT: use.footprint_bytes,
            SnapshotMetric.ARENA_PEAK_LIVE: use.peak_live_bytes,
            SnapshotMetric.PLAN_SECONDS: layout.plan_seconds,
            SnapshotMetric.PLAN_CACHE_HITS: layout.plan_hits,
            SnapshotMetric.PLAN_CACHE_MISSES: layout.plan_misses,
            SnapshotMetric.CACHE_BYTES: cache.held_bytes,
            SnapshotMetric.CACHE_ENTRIES: cache.entries,
            SnapshotMetric.CACHE_HITS: cache.hits,
            SnapshotMetric.CACHE_JOINED: cache.joined,
            SnapshotMetric.CACHE_MISSES: cache.misses,
            SnapshotMetric.CACHE_EVICTIONS: cache.evictions,
        }

    def close(self) -> None:
        """Run what is queued, then stop."""
        self.engine.close()
        self.executor.close()
        self.runner.close()


def _response_cache(config: EngineConfig, engine: Engine, runner: Runner) -> ResponseCache | None:
    if not config.response_cache_bytes:
        return None
    joins = JoinLimits(
        max_flight_tokens=runner.max_batch_tokens,
        max_requests=config.max_queued_requests,
        max_tokens=config.max_queued_tokens,
    )
    return ResponseCache(
        engine.submit,
        joins,
        time.monotonic,
        max_bytes=config.response_cache_bytes,
        max_seconds=config.response_cache_seconds or math.inf,
    )


def _warm_up(runner: Runner) -> None:
    """Run a full batch, so that the first request runs at normal speed."""
    length = min(runner.max_sequence_tokens, runner.max_batch_tokens)
    longest = Prompt(np.zeros(length, dtype=np.int32))
    count = max(1, min(runner.max_batch_tokens, _WARM_UP_TOKENS) // length)
    runner.run([longest] * count, [DEFAULT_OPTIONS] * count)
