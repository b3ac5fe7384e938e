"""Thousands of requests of every length: all answered, and no memory leak."""

import random
from concurrent.futures import Future

import numpy as np
import pytest

from .clients import Array, integers
from .serving import resident_bytes, stub_of, worker_processes

pytestmark = pytest.mark.full

ROUNDS = 5
REQUESTS_A_ROUND = 400
IN_FLIGHT = 8
# An answer has 64 KiB on average: a leak of every fifth one would exceed this.
MOST_GROWTH_BYTES = 24 << 20


def test_two_thousand_requests_of_random_lengths_leave_no_memory_behind(server, grpc_client):
    stub = stub_of(server, "encoder")
    host, workers = worker_processes(stub)
    chance = random.Random(0)
    resident = []

    for _ in range(ROUNDS):
        waiting: list[tuple[int, Future[Array]]] = []
        for _ in range(REQUESTS_A_ROUND):
            length = chance.randint(1, 512)
            inputs = {"input_ids": integers(np.full((1, length), chance.randint(5, 150)))}
            waiting.append((length, grpc_client.start("encoder", inputs)))
            if len(waiting) == IN_FLIGHT:
                _check(waiting.pop(0))
        while waiting:
            _check(waiting.pop(0))
        resident.append(sum(map(resident_bytes, [stub, host, *workers])))

    # the first round may still fill buffers and pools
    assert resident[-1] - resident[0] < MOST_GROWTH_BYTES, resident


def _check(sent: tuple[int, Future[Array]]) -> None:
    length, answer = sent
    assert answer.result().shape == (1, length, 32)
    assert np.isfinite(answer.result()).all()
