"""The gateway before a real server: `varlen serve-http` answers the `openai` client and plain HTTP."""

import asyncio
import base64
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import jsonschema
import numpy as np
import openai
import pytest

from tests.checkpoints import change_tensors, save_checkpoint
from tests.closeness import assert_close
from varlen_client import Client
from varlen_tools.local_server import LOOPBACK, LocalServer, reserved_port

from .serving import (
    TIMEOUT_SECONDS,
    add_model,
    cancel_once_it_runs,
    load,
    metrics,
    unload,
    wait_until,
    wait_until_free,
)

GREEDY = {"temperature": 0.0, "extra_body": {"ignore_eos": True}}
EMBEDDER = "slow"
TEXTS = ["word3", "word5 word7", "word9 word2 word4"]
CONCURRENT = 200
CHAT_TEMPLATE = """{% for message in messages %}{{ message.content }} \
{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\
{% endfor %}{{ tone }}{% if tools %}{{ tools | tojson }}{% endif %}"""
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["c", "f"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
# Defaults of vLLM, which ask for nothing.
VLLM_DEFAULTS = {
    "detokenize": True,
    "spaces_between_special_tokens": True,
    "length_penalty": 1.0,
    "early_stopping": False,
    "use_beam_search": False,
    "min_tokens": 0,
    "top_k": -1,
    "stop_token_ids": [],
    "bad_words": [],
    "logit_bias": {},
    "priority": 0,
    "add_special_tokens": True,
}
SCHEMA = {"type": "boolean"}
# Fields of a completion, and the client's options for the same answers.
SAME_ANSWERS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "defaults": (VLLM_DEFAULTS, {}),
    "logit_bias": ({"logit_bias": {"70": 50}}, {"logit_bias": {"70": 50}}),
    "use_beam_search": ({"n": 3, "use_beam_search": True}, {"num_beams": 3}),
    "num_beams": (
        {"n": 2, "num_beams": 4, "length_penalty": 0.5, "early_stopping": True},
        {"num_beams": 4, "length_penalty": 0.5, "early_stopping": True},
    ),
    "choice": ({"guided_choice": ["yes", "no"]}, {"structured_outputs": {"choice": ["yes", "no"]}}),
    "regex": (
        {"structured_outputs": {"regex": "[0-9]{5}", "json": None}},
        {"structured_outputs": {"regex": "[0-9]{5}"}},
    ),
    "json": (
        {"guided_json": SCHEMA, "guided_decoding_backend": "outlines"},
        {"structured_outputs": {"json": SCHEMA}},
    ),
}
# Fields of a completion, and what the answer says of them.
REFUSED: Sequence[tuple[dict[str, Any], str]] = (
    ({"best_of": 0}, "best_of is 0; allowed: from n, which is 1"),
    ({"echo": True, "logprobs": 1}, "echo is True with logprobs"),
    ({"guided_grammar": "root ::= 'a'"}, "guided_grammar is not supported"),
    ({"allowed_token_ids": [5]}, "allowed_token_ids is not supported"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens is not supported"),
    ({"priority": 1}, "priority is 1"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"70": 101}}, "logit_bias"),
    ({"bad_words": [""]}, "bad_words"),
    ({"num_beams": 0}, "num_beams is 0; allowed: whole numbers from 1"),
    ({"length_penalty": 0.5}, "length_penalty is 0.5; allowed: 1.0 without num_beams above 1"),
    ({"use_beam_search": True, "n": 2, "stop": "a"}, "stop"),
    ({"guided_choice": []}, "structured_outputs.choice"),
)


@dataclass(frozen=True)
class RunningGateway:
    """A gateway process and the server that it asks."""

    url: str
    server: LocalServer
    process: subprocess.Popen[bytes]


@pytest.fixture(scope="module")
def gateway(server, repository, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gateway")
    ranker = save_checkpoint(folder / "ranker", "BertForSequenceClassification", num_labels=1)
    # a ranker that finds every document irrelevant, as many do
    change_tensors(ranker, lambda tensors: tensors["classifier.bias"].fill_(-18.5))
    add_model(repository, "ranker", ranker, task="rerank")
    # its steps take milliseconds, so that a test can interrupt an answer
    writer = save_checkpoint(
        folder / "writer",
        "GPT2LMHeadModel",
        files={"chat_template.jinja": CHAT_TEMPLATE},
        n_embd=96,
        n_inner=384,
        n_layer=2,
        n_positions=4096,
    )
    add_model(repository, "writer", writer, task="generate")
    running = start_gateway(server, folder)
    try:
        assert [load(server, name) for name in ("ranker", "writer")] == [None, None]
        wait_until(lambda: is_healthy(running.url), "the gateway is healthy")
        yield running
    finally:
        running.process.terminate()
        running.process.wait(TIMEOUT_SECONDS)
        unload(server, "ranker")
        unload(server, "writer")


def start_gateway(server: LocalServer, folder: Path, *options: str) -> RunningGateway:
    """Start `varlen serve-http` with its log in a folder."""
    # free again for uvicorn, which shares no port
    with reserved_port() as port:
        pass
    command = [sys.executable, "-m", "varlen_client.cli.main", "serve-http"]
    command += ["--url", server.grpc_url, "--port", str(port), *options]
    with (folder / "gateway.log").open("ab") as log:
        environment = os.environ | {"VARLEN_API_KEYS": "key"}
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    return RunningGateway(f"http://{LOOPBACK}:{port}", server, process)


def is_healthy(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/health", timeout=TIMEOUT_SECONDS).status_code == 200
    except httpx2.TransportError:
        return False


def batch(gateway: RunningGateway, file: Path, output: Path) -> subprocess.Popen[bytes]:
    """Start `varlen batch`, two requests at a time."""
    command = [sys.executable, "-m", "varlen_client.cli.main", "batch", file, "--output", output]
    command += ["--url", gateway.server.grpc_url, "--concurrency", "2"]
    return subprocess.Popen(list(map(str, command)))


def test_a_killed_batch_job_goes_on_and_answers_each_request_once(gateway, roundings, tmp_path):
    bodies = {
        f"r{number}": ("/v1/embeddings", {"model": EMBEDDER, "input": TEXTS[number % 3]})
        for number in range(12)
    }
    bodies["told"] = ("/v1/completions", {"model": "writer", "prompt": "hello", "max_tokens": 4})
    lines = (
        {"custom_id": name, "method": "POST", "url": path, "body": body}
        for name, (path, body) in bodies.items()
    )
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    output = tmp_path / "out.jsonl"

    job = batch(gateway, tmp_path / "in.jsonl", output)
    wait_until(lambda: output.exists() and output.stat().st_size > 0, "an answer is written")
    job.kill()
    job.wait(TIMEOUT_SECONDS)
    assert batch(gateway, tmp_path / "in.jsonl", output).wait(TIMEOUT_SECONDS) == 0

    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert sorted(each["custom_id"] for each in found) == sorted(bodies)
    for each in found:
        response, (path, body) = each["response"], bodies[each["custom_id"]]
        assert response["status_code"] == 200
        if path == "/v1/embeddings":
            vectors = [post(gateway, path, **body), response["body"]]
            one, other = (np.array(each["data"][0]["embedding"]) for each in vectors)
            # batches of other rows add in another order
            assert_close(one, other, roundings=roundings[EMBEDDER])


@pytest.mark.full
def test_a_killed_gateway_goes_on_with_its_batches_and_answers_each_request_once(gateway, tmp_path):
    names = [f"r{number}" for number in range(40)]
    body = {"model": "writer", "prompt": "hello", "max_tokens": 40, "ignore_eos": True}
    requests = (
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}
        for name in names
    )
    content = "".join(f"{json.dumps(each)}\n" for each in requests).encode()
    options = ["--batch-folder", str(tmp_path / "batches")]

    async def create(client: openai.AsyncOpenAI) -> str:
        file = await client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        while batch.request_counts.completed == 0:
            batch = await client.batches.retrieve(batch.id)
        return batch.id

    async def answers(client: openai.AsyncOpenAI, batch_id: str) -> str:
        while (batch := await client.batches.retrieve(batch_id)).status != "completed":
            await asyncio.sleep(0.05)
        assert batch.request_counts.completed == len(names)
        return (await client.files.content(batch.output_file_id)).text

    async def with_client(call: Any, *arguments: str) -> str:
        async with openai_client(running) as client:
            return await call(client, *arguments)

    running = start_gateway(gateway.server, tmp_path, *options)
    try:
        wait_until(lambda: is_healthy(running.url), "the gateway is healthy")
        batch_id = asyncio.run(with_client(create))
        running.process.kill()
        running.process.wait(TIMEOUT_SECONDS)
        running = start_gateway(gateway.server, tmp_path, *options)
        wait_until(lambda: is_healthy(running.url), "the gateway is healthy")
        found = [
            json.loads(line)
            for line in asyncio.run(with_client(answers, batch_id)).split("\n")[:-1]
        ]
    finally:
        running.process.terminate()
        running.process.wait(TIMEOUT_SECONDS)

    assert sorted(each["custom_id"] for each in found) == sorted(names)
    assert {len(each["response"]["body"]["choices"]) for each in found} == {1}


def openai_client(gateway: RunningGateway) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key="key", max_retries=0, timeout=TIMEOUT_SECONDS
    )


def test_embeddings_are_those_of_the_server(gateway):
    async def embed() -> list[list[float]]:
        async with openai_client(gateway) as client:
            result = await client.embeddings.create(model=EMBEDDER, input=TEXTS)
            return [each.embedding for each in result.data]

    vectors = np.float32(asyncio.run(embed()))

    with Client(gateway.server.grpc_url, EMBEDDER) as client:
        np.testing.assert_allclose(vectors, client.embed(TEXTS), rtol=1e-4, atol=1e-5)


def test_scores_far_below_zero_are_right_to_the_last_digit_on_every_route(gateway):
    with Client(gateway.server.grpc_url, "ranker") as client:
        logits = np.float64(client.rerank("the cat", TEXTS))
        kserve = client.rerank("the cat", TEXTS, activation="sigmoid")
    pairs = [["the cat", text] for text in TEXTS]

    scores = post(gateway, "/v1/score?model=ranker", text_1="the cat", text_2=TEXTS)["data"]
    labels = post(gateway, "/predict?model=ranker", inputs=pairs)
    ranks = {
        path: post(gateway, f"{path}?model=ranker", query="the cat", documents=TEXTS)["results"]
        for path in ("/rerank", "/v1/rerank", "/v2/rerank", "/infinity/rerank")
    }

    assert (logits < -15).all()
    # two products of the same row may differ in their last digits
    expected = 1 / (1 + np.exp(-logits))
    np.testing.assert_allclose(kserve, expected, rtol=2e-5)
    np.testing.assert_allclose([each["score"] for each in scores], expected, rtol=2e-5)
    np.testing.assert_allclose([row[0]["score"] for row in labels], expected, rtol=2e-5)
    for found in ranks.values():
        order = np.argsort(-logits, kind="stable").tolist()
        assert [each["index"] for each in found] == order
        values = [each["relevance_score"] for each in found]
        np.testing.assert_allclose(values, expected[order], rtol=2e-5)
        assert len(set(values)) == len(set(logits))


def test_ranks_by_the_scores_of_the_server(gateway):
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


def post(gateway: RunningGateway, path: str, **body: Any) -> Any:
    response = httpx2.post(
        f"{gateway.url}{path}",
        json=body,
        headers={"Authorization": "Bearer key"},
        timeout=TIMEOUT_SECONDS,
    )
    assert response.status_code == 200, response.text
    return response.json()


def test_every_interface_gives_the_vectors_of_the_server(gateway):
    with Client(gateway.server.grpc_url, EMBEDDER) as client:
        expected = client.embed(TEXTS, normalize=True)

    named = f"?model={EMBEDDER}"
    kinds = {"input_type": "search_document", "embedding_types": ["float", "base64"]}
    answer = post(gateway, f"/v2/embed{named}", texts=TEXTS, **kinds)
    raw = [np.frombuffer(base64.b64decode(each), "<f4") for each in answer["embeddings"]["base64"]]
    np.testing.assert_array_equal(np.stack(raw), np.float32(answer["embeddings"]["float"]))
    # without `normalize` they are as the checkpoint makes them
    vectors = np.stack(raw) / np.linalg.norm(raw, axis=1, keepdims=True)
    np.testing.assert_allclose(vectors, expected, rtol=1e-4, atol=1e-5)
    parameters = {"truncate": True, "truncation_direction": "left"}
    vectors = np.float32(post(gateway, f"/{named}", inputs=TEXTS, parameters=parameters))
    np.testing.assert_allclose(vectors, expected, rtol=1e-4, atol=1e-5)
    tensor = {"name": "input_text", "datatype": "BYTES", "shape": [3], "data": TEXTS}
    [output] = post(gateway, f"/v2/models/{EMBEDDER}/infer", inputs=[tensor])["outputs"]
    assert output["shape"] == list(expected.shape)

    cosines = expected[1:] @ expected[0]
    sentences = {"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}
    found = post(gateway, f"/similarity{named}", inputs=sentences)
    np.testing.assert_allclose(found, cosines, rtol=1e-4, atol=1e-5)
    scores = post(gateway, f"/score{named}", text_1=TEXTS[0], text_2=TEXTS[1:])["data"]
    found = [each["score"] for each in scores]
    np.testing.assert_allclose(found, cosines, rtol=1e-4, atol=1e-5)


def test_scores_are_those_of_the_ranks(gateway):
    scores = post(gateway, "/v1/score?model=ranker", text_1="the cat", text_2=TEXTS)
    ranks = post(gateway, "/rerank?model=ranker", query="the cat", documents=TEXTS)["results"]

    assert scores["usage"]["total_tokens"] > 0
    by_index = {each["index"]: each["relevance_score"] for each in ranks}
    found = {each["index"]: each["score"] for each in scores["data"]}
    np.testing.assert_allclose(
        [found[index] for index in range(3)], [by_index[index] for index in range(3)], rtol=1e-5
    )


def test_the_tokenizer_answers_in_both_forms(gateway):
    rows = post(gateway, "/tokenize", model=EMBEDDER, inputs=TEXTS)
    assert all(row[0]["special"] and row[-1]["special"] for row in rows)
    ids = [[each["id"] for each in row if not each["special"]] for row in rows]
    plain = [[each["text"] for each in row if not each["special"]] for row in rows]
    assert ["".join(row) for row in plain] == [text.replace(" ", "") for text in TEXTS]
    assert post(gateway, "/decode", model=EMBEDDER, ids=ids) == TEXTS
    prompt = post(gateway, "/tokenize", model="writer", prompt="a cat", return_token_strs=True)
    assert len(prompt["token_strs"]) == prompt["count"] == len(prompt["tokens"]) > 0
    assert prompt["max_model_len"] == 4096
    assert post(gateway, "/detokenize", model="writer", tokens=prompt["tokens"]) == {
        "prompt": "a cat"
    }


def test_a_body_that_is_too_large_is_refused_before_it_is_sent(gateway):
    address = urlsplit(gateway.url)
    head = (
        "POST /embed HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer key\r\n"
        "Content-Length: 9000000000\r\nExpect: 100-continue\r\n\r\n"
    )
    with socket.create_connection((address.hostname, address.port), TIMEOUT_SECONDS) as connection:
        connection.sendall(head.encode())
        answer = connection.recv(1 << 16)

    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer.lower()


def test_a_large_body_and_a_large_answer_pass_through(gateway):
    texts = [f"word{number} " * 20 for number in range(200)]

    found = post(gateway, "/v1/embeddings", model=EMBEDDER, input=texts)["data"]

    assert [each["index"] for each in found] == list(range(len(texts)))
    with Client(gateway.server.grpc_url, EMBEDDER) as client:
        expected = client.embed(texts)
    np.testing.assert_allclose(
        [each["embedding"] for each in found], expected, rtol=1e-4, atol=1e-5
    )


def test_the_chunks_of_a_stream_make_the_whole_completion(gateway):
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


def completed(gateway: RunningGateway, **fields: Any) -> list[str]:
    """Return the texts of a greedy completion."""

    async def complete() -> list[str]:
        async with openai_client(gateway) as client:
            answer = await client.completions.create(
                model="writer", prompt="hello", max_tokens=12, temperature=0.0, extra_body=fields
            )
            return [choice.text for choice in answer.choices]

    return asyncio.run(complete())


@pytest.mark.parametrize("name", SAME_ANSWERS)
def test_fields_of_foreign_clients_are_options_of_the_server(gateway, name):
    fields, options = SAME_ANSWERS[name]

    texts = completed(gateway, **fields)

    with Client(gateway.server.grpc_url, "writer") as client:
        n = fields.get("n", 1)
        expected = client.samples("hello", n, max_tokens=12, temperature=0.0, **options)
        plain = client.generate("hello", max_tokens=12, temperature=0.0)
    assert texts == [sample.text for sample in expected]
    assert (texts == [plain.text]) == (not options)


@pytest.mark.parametrize(
    "fields, message", REFUSED, ids=[" ".join(fields) for fields, _ in REFUSED]
)
def test_fields_that_are_not_served_are_refused_by_name(gateway, fields, message):
    with pytest.raises(openai.BadRequestError) as caught:
        completed(gateway, **fields)

    assert message in str(caught.value.body["message"])


def test_bad_words_are_not_generated(gateway):
    bias = {"logit_bias": {"70": 50}}
    [text] = completed(gateway, **bias)
    [word] = set(text)

    [without] = completed(gateway, **bias, bad_words=[word])

    assert word not in without


def test_an_echo_begins_with_the_prompt(gateway):
    async def stream() -> list[str]:
        async with openai_client(gateway) as client:
            chunks = await client.completions.create(
                model="writer",
                prompt="hello",
                max_tokens=12,
                temperature=0.0,
                echo=True,
                stream=True,
            )
            return [chunk.choices[0].text async for chunk in chunks]

    [plain], [echoed], parts = (
        completed(gateway),
        completed(gateway, echo=True),
        asyncio.run(stream()),
    )

    assert echoed == "hello" + plain
    assert parts[0].startswith("hello")
    assert "".join(parts) == echoed


def test_a_chat_sets_variables_of_its_template(gateway):
    async def chat(**fields: Any) -> str:
        async with openai_client(gateway) as client:
            answer = await client.chat.completions.create(
                model="writer",
                messages=[{"role": "user", "content": "hello"}],
                max_completion_tokens=12,
                temperature=0.0,
                **fields,
            )
            return str(answer.choices[0].message.content)

    variables = {"chat_template_kwargs": {"tone": "kind"}}
    with_tone = asyncio.run(chat(extra_body=variables, reasoning_effort="low"))
    without = asyncio.run(chat())

    with Client(gateway.server.grpc_url, "writer") as client:
        options = {"max_tokens": 12, "temperature": 0.0}
        assert with_tone == client.generate("hello kind", **options).text
        assert without == client.generate("hello ", **options).text


def test_a_tool_is_called(gateway):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
    options: dict[str, Any] = {
        "model": "writer",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 400,
        "temperature": 0.0,
    }

    async def answers() -> tuple[Any, ...]:
        async with openai_client(gateway) as client:
            create = client.chat.completions.create
            forced = await create(tools=tools, tool_choice="required", **options)
            async with client.chat.completions.stream(
                tools=tools, tool_choice="required", **options
            ) as events:
                streamed = await events.get_final_completion()
            return forced, streamed

    forced, streamed = asyncio.run(answers())

    arguments = []
    for answer in (forced, streamed):
        [call] = answer.choices[0].message.tool_calls
        assert (call.function.name, answer.choices[0].finish_reason) == ("weather", "tool_calls")
        arguments.append(call.function.arguments)
    assert arguments[0] == arguments[1]
    jsonschema.validate(json.loads(arguments[0]), WEATHER)
    # the model sees the tool
    function = {"name": "weather", "description": "", "parameters": WEATHER}
    shown = json.dumps([{"type": "function", "function": function}])
    with Client(gateway.server.grpc_url, "writer") as client:
        expected = len(client.tokenize([f"hello {shown}"])[0].token_ids)
    assert forced.usage.prompt_tokens == expected


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_stops_the_generation(gateway, streams):
    most, server = 4000, gateway.server
    # blocks of an earlier generation would look like blocks of this one, before it is even sent
    before = wait_until_free(server, "writer")

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
                await cancel_once_it_runs(server, "writer", task)

    asyncio.run(leave())

    name = "varlen_requests_total cancelled"
    wait_until(
        lambda: metrics(server, "writer")[name] == before[name] + 1, "the request is cancelled"
    )
    name = "varlen_decode_tokens_total"
    assert metrics(server, "writer")[name] - before[name] < most / 2


def test_many_requests_at_a_time_are_each_answered_with_their_own_vector(gateway):
    texts = [f"word{number % 190} word{number // 190}" for number in range(CONCURRENT)]

    async def embed() -> list[list[float]]:
        async with openai_client(gateway) as client:
            ask = client.embeddings.create
            results = await asyncio.gather(*(ask(model=EMBEDDER, input=text) for text in texts))
            return [each.data[0].embedding for each in results]

    vectors = np.float32(asyncio.run(embed()))

    with Client(gateway.server.grpc_url, EMBEDDER) as client:
        np.testing.assert_allclose(vectors, client.embed(texts), rtol=1e-4, atol=1e-5)
