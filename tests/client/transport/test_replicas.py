"""The choice of a replica and the budget of moves, on a virtual clock."""

import asyncio
import itertools

import pytest

from tests.client.gateway.asgi import run_virtual
from varlen_client import ServerError, ServerUnavailable
from varlen_client.transport.endpoint import Discovery, Endpoint
from varlen_client.transport.replicas import (
    BUDGET_SECONDS,
    FIRST_AVOIDANCE_SECONDS,
    LONGEST_AVOIDANCE_SECONDS,
    Replica,
    Replicas,
    RetryBudget,
)


def new_replicas(number):
    return [
        Replica(Endpoint.parse(f"grpc://127.0.0.1:{8001 + n}"), None, 0.0) for n in range(number)
    ]


def replicas_of(members):
    by_endpoint = {each.endpoint: each for each in members}
    return Replicas(Discovery(list(by_endpoint)), by_endpoint.__getitem__)


def moves(budget, now):
    """Spend all of a budget; return the number of moves."""
    count = 0
    while budget.spend(now):
        count += 1
    return count


def test_the_budget_is_a_tenth_of_the_requests_and_three():
    budget = RetryBudget()
    for _ in range(100):
        budget.count_request(0.0)

    assert moves(budget, 0.0) == 13


def test_the_budget_of_few_requests_returns_with_time():
    budget = RetryBudget()

    assert moves(budget, 0.0) == 3
    assert moves(budget, 0.0) == 0
    assert moves(budget, 20 * BUDGET_SECONDS) == 3


def test_moves_stay_in_the_budget_while_replicas_are_full():
    sent = []

    async def attempt(replica):
        sent.append(replica)
        raise ServerUnavailable("queue full")

    async def run():
        replicas = replicas_of(new_replicas(2))
        for _ in range(50):
            with pytest.raises(ServerUnavailable):
                await replicas.send(attempt)

    run_virtual(run())

    assert 50 < len(sent) <= 50 + 3 + 5


def test_the_avoidance_of_a_replica_doubles_up_to_a_bound():
    waits = []

    async def run():
        dead, works = new_replicas(2)
        replicas = replicas_of([dead, works])
        clock = asyncio.get_running_loop().time
        failed_at = []

        async def attempt(replica):
            if replica is dead:
                failed_at.append(clock())
                raise ServerUnavailable("no connection")

        while len(failed_at) < 10:
            await replicas.send(attempt)
            await asyncio.sleep(0.01)
        waits.extend(b - a for a, b in itertools.pairwise(failed_at))

    run_virtual(run())

    expected = [
        min(FIRST_AVOIDANCE_SECONDS * 2**n, LONGEST_AVOIDANCE_SECONDS) for n in range(len(waits))
    ]
    assert waits == pytest.approx(expected, abs=0.05)
    assert waits[-1] == pytest.approx(LONGEST_AVOIDANCE_SECONDS, abs=0.05)


def test_one_request_tries_whether_a_replica_works_again():
    async def run():
        broken, works = new_replicas(2)
        replicas = replicas_of([broken, works])
        sent = []

        async def attempt(replica):
            sent.append(replica)
            if replica is broken and len(sent) <= 2:
                raise ServerUnavailable("no connection")
            await asyncio.sleep(1)

        while broken not in sent:
            await replicas.send(attempt)
        await asyncio.sleep(FIRST_AVOIDANCE_SECONDS)
        sent.clear()
        sent += [works] * 2
        await asyncio.gather(*(replicas.send(attempt) for _ in range(4)))
        tried = sent[2:].count(broken)
        await asyncio.gather(*(replicas.send(attempt) for _ in range(4)))
        return tried, sent[6:].count(broken)

    (tried, later), _ = run_virtual(run())

    assert (tried, later) == (1, 2)


def test_replicas_are_used_when_all_are_avoided():
    async def run():
        replicas = replicas_of(new_replicas(2))
        answers = [ServerUnavailable("full"), ServerUnavailable("full"), None]

        async def attempt(replica):
            if (answer := answers.pop(0)) is not None:
                raise answer
            return "answer"

        with pytest.raises(ServerUnavailable, match="tried 2 of 2 replicas"):
            await replicas.send(attempt)
        return await replicas.send(attempt)

    assert run_virtual(run())[0] == "answer"


def test_a_request_from_before_the_end_of_the_client_connects_no_more():
    sent = []

    async def run():
        replicas = replicas_of(new_replicas(2))

        async def attempt(replica):
            sent.append(replica)

        send = replicas.sender(attempt)
        await send()
        await replicas.close()
        with pytest.raises(ServerError, match="the client was closed"):
            await send()
        # a later call connects again
        await replicas.sender(attempt)()

    run_virtual(run())

    assert len(sent) == 2
