"""Waiting requests and costs by formula, for scheduling tests."""

import math

import numpy as np

from tests.backend import requests
from varlen.config import SHORTEST_QUEUE, EngineConfig
from varlen.costs.model import CostModel
from varlen.scheduling.admission import Admission
from varlen.scheduling.batch import BatchResult, Forecast, RequestState
from varlen.scheduling.one_shot.one_shot import OneShotScheduler


def request_of(*lengths, **options):
    return requests.request_of(*([0] * length for length in lengths), **options)


def state_of(*lengths, arrival=0.0, deadline=math.inf, priority=0, seconds=0.0):
    request = request_of(*lengths, priority=priority)
    return RequestState(request, None, arrival, deadline, Forecast(seconds))


def cost_table(seconds=None, execution="packed", max_sequences=64, max_length=512):
    seconds = seconds or (lambda n, length: 1.5e-3 + 30e-6 * n * length + 20e-9 * n * length**2)
    return CostModel.of_function(
        seconds, execution, max_sequences=max_sequences, max_length=max_length
    )


def make_scheduler(costs=None, max_batch_tokens=4096, kind=OneShotScheduler, slots=1, **settings):
    config = EngineConfig(**settings)
    queued_tokens = config.max_queued_tokens or SHORTEST_QUEUE
    admission = Admission(config.max_queued_requests, queued_tokens, slots=slots)
    costs = costs or cost_table(execution=config.execution)
    return kind(config, costs, admission, max_batch_tokens)


def add(scheduler, *lengths, now=0.0, deadline=math.inf, priority=0):
    """Admit and queue a request, as the engine does."""
    allowed = None if math.isinf(deadline) else deadline - now
    request = request_of(*lengths, priority=priority, deadline_seconds=allowed)
    state = RequestState(request, None, now, deadline, scheduler.admit(request, now))
    scheduler.add(state)
    return state


def run(scheduler, batch, seconds=1.0, cores="one"):
    """Tell the scheduler that a batch has run."""
    outputs = [np.zeros(1, dtype=np.float32)] * len(batch.sequences)
    return scheduler.update(batch, BatchResult(outputs, seconds, cores=cores))


def lengths_of(batch):
    return [each.num_tokens for each in batch.sequences]
