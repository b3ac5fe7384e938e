"""The asyncio client: many calls on one loop, and cancellation by the caller."""

import asyncio

import numpy as np
import pytest

from varlen_client import AsyncClient, ServerUnavailable
from varlen_client.transport import replicas, session


def test_calls_run_concurrently(server, vectors_of):
    async def embed_all():
        async with AsyncClient(server.url) as client:
            return await asyncio.gather(*(client.embed([f"text {n}"]) for n in range(20)))

    server.model.delay = lambda received: 0.05
    results = asyncio.run(embed_all())

    expected = vectors_of([f"text {n}" for n in range(20)])
    np.testing.assert_array_equal(np.concatenate(results), expected)
    assert server.model.max_in_flight > 4


def test_a_cancelled_call_raises_cancelled_error_and_sends_no_further_request(server, vectors_of):
    async def cancel_one():
        async with AsyncClient(server.url, rows_per_request=1, concurrency=2) as client:
            task = asyncio.create_task(client.embed(["a", "b", "c", "d"]))
            while len(server.model.requests) < 2:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            server.model.delay = lambda received: 0.0
            return await client.embed(["e"])

    server.model.delay = lambda received: 30.0
    vectors = asyncio.run(cancel_one())

    np.testing.assert_array_equal(vectors, vectors_of(["e"]))
    assert [received.texts for received in server.model.requests[2:]] == [["e"]]


def test_a_model_that_was_loaded_again_may_have_other_sizes(server, monkeypatch):
    monkeypatch.setattr(session, "_INFO_SECONDS", -1.0)

    async def embed_twice():
        async with AsyncClient(server.url) as client:
            await client.embed(["a"] * 8)
            server.model.max_batch_size = 2
            # the model of the first request stays the one of the client
            server.model.models = [("fake", "READY"), ("other", "READY")]
            return await client.embed(["a"] * 8)

    asyncio.run(embed_twice())

    assert [received.num_rows for received in server.model.requests] == [8, 2, 2, 2, 2]


def test_a_client_sends_its_tenant_unless_a_call_names_one(server):
    async def embed_for_two():
        async with AsyncClient(server.url, tenant="a") as client:
            await client.embed(["x"])
            await client.embed(["x"], tenant="b")

    asyncio.run(embed_for_two())

    assert [received.parameters["tenant"] for received in server.model.requests] == ["a", "b"]


class SlowConfigs:
    """A connection on which the configs of some models come late, or not at all."""

    def __init__(self):
        self.asked, self.running, self.most = [], 0, 0

    async def model_config(self, name):
        self.asked.append(name)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(60 if name == "stuck" else 0.001)
        finally:
            self.running -= 1
        if name == "gone":
            raise ServerUnavailable("the connection is lost")
        return {"name": name, "output": []}

    async def close(self):
        assert not self.running


def test_the_infos_of_many_models_are_read_a_few_at_a_time_and_never_waited_for(monkeypatch):
    connection = SlowConfigs()
    monkeypatch.setattr(replicas, "_connect", lambda *_: connection)
    monkeypatch.setattr(replicas, "METADATA_TIMEOUT_SECONDS", 1.0)
    names = [f"model{n}" for n in range(100)]

    async def infos(names):
        async with AsyncClient("grpc://127.0.0.1:1") as client:
            return await client.model_infos(names)

    assert asyncio.run(infos([])) == {}
    found = asyncio.run(infos(["gone", "stuck", *names]))

    assert found.keys() == set(names)
    assert all(found[name].name == name for name in names)
    # without retries
    assert sorted(connection.asked) == sorted(["gone", "stuck", *names])
    assert connection.most == 8
