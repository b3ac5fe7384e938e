"""The addresses behind a name, on a virtual clock with a fake resolver."""

import asyncio
import socket

import pytest

from tests.client.gateway.asgi import run_virtual
from varlen_client import ServerUnavailable
from varlen_client.transport.endpoint import (
    FIRST_ANSWER_SECONDS,
    HURRIED_REFRESH_SECONDS,
    MAX_ADDRESSES,
    REFRESH_SECONDS,
    Discovery,
    Endpoint,
    resolve_host,
)
from varlen_client.transport.replicas import Replica, Replicas

NAME = Endpoint.parse("dns+grpc://models.test:8001")


class FakeResolver:
    """Answers with the addresses that are set, or raises the error that is set."""

    def __init__(self, *addresses):
        self.addresses = list(addresses)
        self.error = None
        self.delay = 0.0
        self.queries = []

    async def __call__(self, host):
        self.queries.append(host)
        await asyncio.sleep(self.delay)
        if self.error is not None:
            raise self.error
        return self.addresses


async def addresses_of(discovery):
    return [each.address for each in await discovery.endpoints()]


async def soon():
    """Let a resolution in the background end."""
    await asyncio.sleep(0.01)


def test_each_address_is_an_endpoint_of_the_name():
    async def run():
        return await Discovery([NAME], FakeResolver("10.0.0.1", "fd00::1")).endpoints()

    found, _ = run_virtual(run())

    assert {each.target for each in found} == {"models.test:8001"}
    assert {each.peer for each in found} == {"10.0.0.1:8001", "[fd00::1]:8001"}


def test_a_name_without_the_prefix_is_not_resolved():
    resolver = FakeResolver("10.0.0.1", "10.0.0.2")
    given = Endpoint.parse("grpc://models.test")

    async def run():
        return await Discovery([given], resolver).endpoints()

    assert run_virtual(run())[0] == (given,)
    assert resolver.queries == []


def test_a_name_is_resolved_again_in_the_background_while_it_is_used():
    resolver = FakeResolver("10.0.0.1")
    discovery = Discovery([NAME], resolver)

    async def run():
        await discovery.endpoints()
        resolver.addresses = ["10.0.0.2"]
        for _ in range(50):
            await discovery.endpoints()
        assert len(resolver.queries) == 1
        await asyncio.sleep(REFRESH_SECONDS)
        assert await addresses_of(discovery) == ["10.0.0.1"]
        await soon()
        assert await addresses_of(discovery) == ["10.0.0.2"]

    run_virtual(run())

    assert len(resolver.queries) == 2


def test_a_failure_resolves_names_at_most_once_in_a_second():
    resolver = FakeResolver("10.0.0.1")
    discovery = Discovery([NAME], resolver)

    async def run():
        await discovery.endpoints()
        discovery.hurry()
        await soon()
        assert len(resolver.queries) == 1
        await asyncio.sleep(HURRIED_REFRESH_SECONDS)
        for _ in range(20):
            discovery.hurry()
        await soon()

    run_virtual(run())

    assert len(resolver.queries) == 2


@pytest.mark.parametrize("known", [True, False])
def test_addresses_that_are_known_survive_a_failure_of_the_resolver(known):
    resolver = FakeResolver("10.0.0.1")
    discovery = Discovery([NAME], resolver)

    async def run():
        if known:
            await discovery.endpoints()
            await asyncio.sleep(REFRESH_SECONDS)
        resolver.error = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        if known:
            await discovery.endpoints()
            await soon()
            assert await addresses_of(discovery) == ["10.0.0.1"]
            return
        with pytest.raises(ServerUnavailable, match=r"no address of models\.test: .*not known"):
            await discovery.endpoints()
        resolver.error = None
        await asyncio.sleep(HURRIED_REFRESH_SECONDS)
        assert await addresses_of(discovery) == ["10.0.0.1"]

    run_virtual(run())


def test_a_resolver_that_does_not_answer_holds_requests_for_a_bounded_time():
    resolver = FakeResolver()
    resolver.delay = 1000.0
    discovery = Discovery([NAME], resolver)

    async def run():
        with pytest.raises(ServerUnavailable, match="the resolver did not answer"):
            await discovery.endpoints()
        seconds = asyncio.get_running_loop().time()
        await discovery.close()
        return seconds

    assert run_virtual(run())[0] == pytest.approx(FIRST_ANSWER_SECONDS, abs=0.1)
    assert resolver.queries == ["models.test"]


def test_the_number_of_addresses_is_bounded_and_those_in_use_stay():
    resolver = FakeResolver("10.9.9.9")
    discovery = Discovery([NAME], resolver)

    async def run():
        await discovery.endpoints()
        resolver.addresses = [f"10.0.{n >> 8}.{n & 255}" for n in range(2000)] + ["10.9.9.9"]
        await asyncio.sleep(REFRESH_SECONDS)
        await discovery.endpoints()
        await soon()
        return await addresses_of(discovery)

    found, _ = run_virtual(run())

    assert found[0] == "10.9.9.9"
    assert len(set(found)) == len(found) == MAX_ADDRESSES


def test_the_systems_resolver_answers_with_one_family(monkeypatch):
    found = [
        (family, socket.SOCK_STREAM, 6, "", (address, 0))
        for family, address in [
            (socket.AF_INET, "10.0.0.1"),
            (socket.AF_INET6, "fd00::1"),
            (socket.AF_INET, "10.0.0.2"),
        ]
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: found)

    assert list(asyncio.run(resolve_host("models.test"))) == ["10.0.0.1", "10.0.0.2"]


def test_requests_follow_the_addresses_and_those_in_flight_end_where_they_are():
    resolver = FakeResolver("10.0.0.1", "10.0.0.2")
    closed = []

    class Closing(Replica):
        async def close(self):
            closed.append(self.endpoint.address)
            await super().close()

    async def run():
        replicas = Replicas(Discovery([NAME], resolver), lambda each: Closing(each, None, 0.0))

        async def answer(replica, seconds=0.0):
            await asyncio.sleep(seconds)
            return replica.endpoint.address

        slow = [
            asyncio.ensure_future(replicas.send(lambda replica: answer(replica, 100.0)))
            for _ in range(2)
        ]
        await soon()
        resolver.addresses = ["10.0.0.2", "10.0.0.3"]
        await asyncio.sleep(REFRESH_SECONDS)
        await replicas.send(answer)
        await soon()
        sent = {await replicas.send(answer) for _ in range(4)}
        assert (sent, closed) == ({"10.0.0.3"}, [])
        assert {await each for each in slow} == {"10.0.0.1", "10.0.0.2"}
        await replicas.send(answer)
        assert closed == ["10.0.0.1"]
        await replicas.close()

    run_virtual(run())

    assert sorted(closed) == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
