"""Answers are the same JSON, whole or in parts."""

import asyncio
import json
import math

import numpy as np
import pytest

from varlen_client.gateway import json_io
from varlen_client.gateway.json_io import Blocks, Rows, json_response

from .asgi import Exchange, run_virtual
from .conftest import http_client

VALUE = {
    "text": 'a "quoted" é',
    "rows": [[1.5, None], [], [2.0]],
    "nested": {"objects": [{"a": 1}, {}], "empty": []},
    "blocks": [1, 2, 3],
}


def written():
    """Return the value, whose lists are written in parts."""
    return {
        "text": VALUE["text"],
        "rows": Rows([Blocks([[1.5], [], [math.nan]]), Rows(()), [2.0]]),
        "nested": {"objects": Rows(iter(VALUE["nested"]["objects"])), "empty": Blocks(())},
        "blocks": Blocks(iter([[1, 2], [], [3]])),
    }


def body_of(response):
    async def read():
        if hasattr(response, "body_iterator"):
            return [part async for part in response.body_iterator]
        return [response.body]

    return asyncio.run(read())


@pytest.mark.parametrize("part_bytes", [1, 10, 1 << 20])
def test_an_answer_is_the_same_in_parts_of_any_size(monkeypatch, part_bytes):
    monkeypatch.setattr(json_io, "_PART_BYTES", part_bytes)

    parts = body_of(json_response(written()))

    assert json.loads(b"".join(parts)) == VALUE
    assert (len(parts) == 1) == (part_bytes == 1 << 20)


def test_a_list_in_parts_has_to_be_where_it_is_found():
    with pytest.raises(Exception, match="Unable to serialize"):
        json_response({"a": [Rows(())]})


def test_rows_are_made_as_they_are_written(monkeypatch):
    monkeypatch.setattr(json_io, "_PART_BYTES", 100)
    made = []

    def rows():
        for row in range(1000):
            made.append(row)
            yield [row] * 50

    response = json_response(Rows(rows()))

    # two parts tell whether an answer is large
    assert len(made) <= 3
    assert len(json.loads(b"".join(body_of(response)))) == 1000


def test_other_requests_go_on_between_the_parts(monkeypatch):
    monkeypatch.setattr(json_io, "_PART_BYTES", 100)
    turns = []

    async def other():
        for turn in range(10):
            turns.append(turn)
            await asyncio.sleep(0)

    async def run():
        task = asyncio.ensure_future(other())
        parts = json_response(Rows([[1] * 100] * 5)).body_iterator
        turns_at_parts = [len(turns) async for _ in parts]
        await task
        return turns_at_parts

    turns_at_parts = asyncio.run(run())

    assert len(turns_at_parts) >= 5
    assert turns_at_parts == sorted(set(turns_at_parts))


@pytest.mark.parametrize(
    "path, body, found",
    [
        ("/v1/embeddings", {"input": ["a", "b"]}, lambda answer: answer["data"][1]["embedding"]),
        ("/embed", {"inputs": ["a", "b"]}, lambda answer: answer[1]),
        ("/v1/embed", {"texts": ["a", "b"]}, lambda answer: answer["embeddings"][1]),
        (
            "/v2/embed",
            {"texts": ["a", "b"], "input_type": "classification"},
            lambda answer: answer["embeddings"]["float"][1],
        ),
        (
            "/v2/models/embedder/infer",
            {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [2], "data": ["a", "b"]}]},
            lambda answer: answer["outputs"][0]["data"][4:],
        ),
        (
            "/predict",
            {"inputs": [["a"], ["b"]], "model": "classifier"},
            lambda answer: answer[1][0]["score"],
        ),
        (
            "/v1/completions",
            {"prompt": "a", "n": 2, "logprobs": 1, "model": "writer"},
            lambda answer: [len(each["logprobs"]["tokens"]) for each in answer["choices"]],
        ),
    ],
)
def test_large_answers_come_in_parts(make_app, monkeypatch, path, body, found):
    body = body if "infer" in path else {"model": "embedder", **body}

    async def ask():
        async with http_client(make_app()) as client:
            return await client.post(path, json=body)

    whole = asyncio.run(ask())
    monkeypatch.setattr(json_io, "_PART_BYTES", 20)
    exchange, _ = run_virtual(Exchange(path, body).run(make_app()))

    assert "content-length" in whole.headers
    assert "content-length" not in exchange.headers
    np.testing.assert_array_equal(found(json.loads(exchange.body)), found(whole.json()))
    assert exchange.headers["content-type"] == whole.headers["content-type"]
