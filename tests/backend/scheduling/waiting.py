"""Sequences that wait, and costs by formula, for tests of the scheduler."""

import math

import numpy as np

from varlen.config import EngineConfig
from varlen.costs.model import CostModel
from varlen.request import Prompt, Request, RequestOptions, Ticket, Waiting
from varlen.scheduling.scheduler import Scheduler


def ticket_of(*lengths, arrival=0.0, deadline=math.inf, priority=0):
    rows = tuple(Prompt(np.zeros(length, dtype=np.int32)) for length in lengths)
    return Ticket(Request(rows, RequestOptions(priority=priority)), None, arrival, deadline)


def waiting(num_tokens, since=0.0, due=None, deadline=math.inf, seconds=0.0):
    ticket = ticket_of(num_tokens, arrival=since, deadline=deadline)
    return Waiting(ticket, 0, num_tokens, seconds, since, since if due is None else due)


def cost_table(seconds=None, execution="packed", max_sequences=64, max_length=512):
    seconds = seconds or (lambda n, length: 1.5e-3 + 30e-6 * n * length + 20e-9 * n * length**2)
    return CostModel.of_function(
        seconds, execution, max_sequences=max_sequences, max_length=max_length
    )


def make_scheduler(costs=None, max_batch_tokens=4096, **settings):
    config = EngineConfig(**settings)
    return Scheduler(config, costs or cost_table(execution=config.execution), max_batch_tokens)


def lengths_of(batch):
    return [each.num_tokens for each in batch.sequences]
