"""A document of 100 pages in windows and spans, beside requests for short texts."""

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise

import numpy as np
import pytest

from tests.checkpoints import WORDS
from tests.closeness import assert_close
from varlen import Encoder
from varlen_client import Client, InvalidRequest, tasks
from varlen_client.gateway import GatewaySettings

from .local_gateway import local_gateway
from .serving import TIMEOUT_SECONDS, http_call

# 500 words on each page.
PAGES, WORDS_OF_A_PAGE = 100, 500
SHORT = ["word1 word2", "word3", "word9 " * 30]


@pytest.fixture(scope="module")
def document():
    """Return a text of 100 pages, and the spans of its paragraphs."""
    numbers = np.random.default_rng(0).integers(0, len(WORDS), PAGES * WORDS_OF_A_PAGE)
    text = " ".join(f"word{number}" for number in numbers)
    begins = [0]
    while (at := text.find(" ", begins[-1] + 900)) > 0:
        begins.append(at + 1)
    return text, list(pairwise([*begins, len(text)]))


@pytest.fixture(scope="module")
def oracle(checkpoints):
    with Encoder.from_pretrained(
        checkpoints["slow"], device="cpu", dtype="fp32", warmup_seconds=0
    ) as encoder:
        yield encoder


@pytest.mark.full
def test_a_document_of_100_pages_beside_short_texts(url, document, oracle, roundings):
    text, spans = document
    expected = oracle.embed([text], spans=spans, windows=True, window_overlap=64)
    mean = oracle.embed([text], windows=True)
    short = oracle.embed(SHORT)

    with closing(Client(url, "slow")) as client, ThreadPoolExecutor(3) as pool:
        asked = {"spans": spans, "windows": True, "window_overlap": 64}
        chunks = pool.submit(client.counted, tasks.vectors.EMBED, [text], **asked)
        whole = pool.submit(client.embed, [text], windows=True)
        others = [client.embed(SHORT) for _ in range(10)]
        (vectors, num_tokens), [vector] = chunks.result(), whole.result()

    assert len(spans) > 400
    assert_close(vectors, expected, roundings=roundings["slow"])
    assert_close(vector, mean[0], roundings=roundings["slow"])
    # windows share tokens
    assert num_tokens > PAGES * WORDS_OF_A_PAGE
    for found in others:
        assert_close(found, short, roundings=roundings["slow"])


def test_spans_at_the_server_and_late_chunks_at_the_gateway(server, oracle, roundings):
    chunks = ["word1 word2.", "word3", "word4 word5 word6"]
    text, spans = " ".join(chunks), [(0, 12), (13, 18), (19, 36)]
    expected = oracle.embed([text], spans=spans)
    body = {
        "inputs": [{"name": "text", "datatype": "BYTES", "shape": [1, 1], "data": [text]}],
        "outputs": [{"name": "sentence_embedding"}, {"name": "num_tokens"}],
        "parameters": {"spans": json.dumps(spans), "dimensions": 16},
    }

    status, answer = http_call(server, "POST", "/v2/models/slow/infer", body)
    with local_gateway(GatewaySettings(url=server.grpc_url)) as host:
        request = urllib.request.Request(
            f"http://{host}/v1/embeddings",
            json.dumps({"model": "slow", "input": chunks, "late_chunking": True}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            found = json.load(response)

    assert status == 200, answer
    vectors, counts = sorted(answer["outputs"], key=lambda each: each["name"], reverse=True)
    assert (vectors["shape"], counts["shape"]) == ([3, 16], [1, 1])
    assert_close(
        np.reshape(vectors["data"], (3, 16)), expected[:, :16], roundings=roundings["slow"]
    )
    assert_close(
        [each["embedding"] for each in found["data"]], expected, roundings=roundings["slow"]
    )
    assert found["usage"]["prompt_tokens"] == counts["data"][0]


def test_refusals_name_the_span_and_the_remedy(server):
    with closing(Client(server.grpc_url, "slow")) as client:
        with pytest.raises(InvalidRequest, match=r"spans\[1\] is \[5, 90\] and is outside"):
            client.embed(["word1 word2"], spans=[(0, 5), (5, 90)])
        with pytest.raises(InvalidRequest, match="windows: true reads it in parts"):
            client.embed(["word1 " * 600], spans=[(0, 5)])
        with pytest.raises(InvalidRequest, match="the request has windows and cuts texts"):
            client.embed(["word1"], windows=True, truncate=True)
        with pytest.raises(InvalidRequest, match="spans are parts of one text, and there are 2"):
            client.embed(["word1", "word2"], spans=[(0, 5)])
    with closing(Client(server.grpc_url, "capped")) as client:
        # the setting max_text_bytes holds for windows too
        with pytest.raises(InvalidRequest, match="this model takes at most 4096"):
            client.embed(["word1 " * 900], windows=True)
        assert client.embed(["word1 " * 600], windows=True).shape[0] == 1
