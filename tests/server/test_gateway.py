"""The gateway before a real server: `varlen serve-http` answers the `openai` client and plain HTTP."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import numpy as np
import openai
import pytest

from tests.checkpoints import save_checkpoint
from varlen_client import Client
from varlen_tools.local_server import LOOPBACK, LocalServer, reserved_port

from .serving import TIMEOUT_SECONDS, add_model, load, metrics, unload, wait_until

GREEDY = {"temperature": 0.0, "extra_body": {"ignore_eos": True}}
EMBEDDER = "slow"
TEXTS = ["word3", "word5 word7", "word9 word2 word4"]
CONCURRENT = 200


@dataclass(frozen=True)
class RunningGateway:
    """A gateway process and the server that it asks."""

    url: str
    server: LocalServer


@pytest.fixture(scope="module")
def gateway(
    server: LocalServer, repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    folder = tmp_path_factory.mktemp("gateway")
    ranker = save_checkpoint(folder / "ranker", "BertForSequenceClassification", num_labels=1)
    add_model(repository, "ranker", ranker, task="rerank")
    # its steps take milliseconds, so that a test can interrupt an answer
    writer = save_checkpoint(
        folder / "writer", "GPT2LMHeadModel", n_embd=96, n_inner=384, n_layer=2, n_positions=4096
    )
    add_model(repository, "writer", writer, task="generate")
    # free again for uvicorn, which shares no port
    with reserved_port() as port:
        pass
    command = [sys.executable, "-m", "varlen_client.cli.main", "serve-http"]
    command += ["--url", server.grpc_url, "--port", str(port)]
    url = f"http://{LOOPBACK}:{port}"
    with (folder / "gateway.log").open("wb") as log:
        environment = os.environ | {"VARLEN_API_KEYS": "key"}
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        assert [load(server, name) for name in ("ranker", "writer")] == [None, None]
        wait_until(lambda: is_healthy(url), "the gateway is healthy")
        yield RunningGateway(url, server)
    finally:
        process.terminate()
        process.wait(TIMEOUT_SECONDS)
        unload(server, "ranker")
        unload(server, "writer")


def is_healthy(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/health", timeout=TIMEOUT_SECONDS).status_code == 200
    except httpx2.TransportError:
        return False


def openai_client(gateway: RunningGateway) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key="key", max_retries=0, timeout=TIMEOUT_SECONDS
    )


def test_embeddings_are_those_of_the_server(gateway: RunningGateway) -> None:
    async def embed() -> list[list[float]]:
        async with openai_client(gateway) as client:
            result = await client.embeddings.create(model=EMBEDDER, input=TEXTS)
            return [each.embedding for each in result.data]

    vectors = np.float32(asyncio.run(embed()))

    with Client(gateway.server.grpc_url, EMBEDDER) as client:
        np.testing.assert_allclose(vectors, client.embed(TEXTS), rtol=1e-4, atol=1e-5)


def test_ranks_by_the_scores_of_the_server(gateway: RunningGateway) -> None:
    body = {"model": "ranker", "query": "the cat", "texts": TEXTS}
    response = httpx2.post(
        f"{gateway.url}/rerank",
        json=body,
        headers={"Authorization": "Bearer key"},
        timeout=TIMEOUT_SECONDS,
    )

    ranks = response.json()
    with Client(gateway.server.grpc_url, "ranker") as client:
        logits = client.rerank("the cat", TEXTS)
    assert [rank["index"] for rank in ranks] == np.argsort(-logits, kind="stable").tolist()
    for rank in ranks:
        expected = 1 / (1 + np.exp(-logits[rank["index"]]))
        np.testing.assert_allclose(rank["score"], expected, rtol=1e-5)

    response = httpx2.post(
        f"{gateway.url}/v1/rerank",
        json={"model": "ranker", "query": "the cat", "documents": TEXTS, "top_n": 2},
        headers={"Authorization": "Bearer key"},
        timeout=TIMEOUT_SECONDS,
    )

    assert [(each["index"], each["document"]["text"]) for each in response.json()["results"]] == [
        (rank["index"], TEXTS[rank["index"]]) for rank in ranks[:2]
    ]
    assert response.json()["usage"]["total_tokens"] > 0


def test_the_chunks_of_a_stream_make_the_whole_completion(gateway: RunningGateway) -> None:
    async def complete() -> tuple[str, list[str]]:
        async with openai_client(gateway) as client:
            ask = client.completions.create
            options = {"model": "writer", "prompt": "hello", "max_tokens": 40, **GREEDY}
            whole = await ask(**options)
            assert whole.usage.completion_tokens == 40
            stream = await ask(**options, stream=True)
            return whole.choices[0].text, [chunk.choices[0].text async for chunk in stream]

    whole, parts = asyncio.run(complete())

    assert "".join(parts) == whole
    assert len(parts) > 5


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_stops_the_generation(gateway: RunningGateway, streams: bool) -> None:
    most, server = 4000, gateway.server
    before = metrics(server, "writer")

    async def leave() -> None:
        async with openai_client(gateway) as client:
            task = asyncio.ensure_future(
                client.completions.create(
                    model="writer", prompt="a", max_tokens=most, stream=streams, **GREEDY
                )
            )
            if streams:
                stream = await task
                await anext(aiter(stream))
                await stream.close()
            else:
                while metrics(server, "writer")["varlen_kv_blocks_used"] == 0:
                    assert not task.done()
                    await asyncio.sleep(0.05)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())

    name = "varlen_requests_total cancelled"
    wait_until(
        lambda: metrics(server, "writer")[name] == before[name] + 1, "the request is cancelled"
    )
    name = "varlen_decode_tokens_total"
    assert metrics(server, "writer")[name] - before[name] < most / 2


def test_many_requests_at_a_time_are_each_answered_with_their_own_vector(
    gateway: RunningGateway,
) -> None:
    texts = [f"word{number % 190} word{number // 190}" for number in range(CONCURRENT)]

    async def embed() -> list[list[float]]:
        async with openai_client(gateway) as client:
            ask = client.embeddings.create
            results = await asyncio.gather(*(ask(model=EMBEDDER, input=text) for text in texts))
            return [each.data[0].embedding for each in results]

    vectors = np.float32(asyncio.run(embed()))

    with Client(gateway.server.grpc_url, EMBEDDER) as client:
        np.testing.assert_allclose(vectors, client.embed(texts), rtol=1e-4, atol=1e-5)
