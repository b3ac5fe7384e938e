"""Generation by the clients against a fake server: whole answers, streams, errors and cancellation."""

import asyncio
import inspect
import json
import time
from contextlib import aclosing

import pytest

from varlen_client import (
    AsyncClient,
    Client,
    DeadlineMissed,
    GeneratedPart,
    Generation,
    InvalidRequest,
    ModelNotFound,
    RequestTimeout,
    ServerError,
    ServerUnavailable,
)

SECONDS = 10.0


@pytest.fixture(autouse=True)
def _task(server):
    server.model.task = "generate"


def run(client, call, *arguments, **options):
    """Run a call to its end."""
    result = getattr(client, call)(*arguments, **options)
    return list(result) if call == "stream" else result


def test_generates_a_whole_answer(client, server):
    answer = client.generate("héllo", max_tokens=3, temperature=0.5)

    assert answer == Generation("0.0 0.1 0.2 ", (0, 1, 2), "length", 7)
    (received,) = server.model.requests
    assert received.sampling == {"max_tokens": 3, "temperature": 0.5, "n": 1}
    text = received.tensors["text_input"][0]
    assert (text.decode() if isinstance(text, bytes) else text) == "héllo"
    assert not received.tensors["stream"][0]
    assert received.tensors["exclude_input_in_output"][0]


def test_streams_an_answer_in_parts(client, server):
    parts = list(client.stream("hello", max_tokens=3))

    assert parts == [
        GeneratedPart("0.0 ", (0,), num_prompt_tokens=7),
        GeneratedPart("0.1 ", (1,), num_prompt_tokens=7),
        GeneratedPart("0.2 ", (2,), "length", num_prompt_tokens=7),
    ]
    assert server.model.requests[0].tensors["stream"][0]


def test_a_stream_that_ends_before_its_last_part_is_an_error(client, server):
    server.model.ends_after = 2
    parts = client.stream("hello")

    assert [next(parts).token_ids, next(parts).token_ids] == [(0,), (1,)]
    with pytest.raises(ServerError, match="the server ended an answer before its last part"):
        next(parts)


def test_yields_each_part_as_it_comes(client, server):
    server.model.delay = lambda received: 0.2
    start = time.monotonic()

    next(client.stream("hello", max_tokens=300))

    assert time.monotonic() - start < 30


def test_generates_several_samples(client):
    answers = client.samples("hello", 3, max_tokens=2)

    assert [answer.text for answer in answers] == ["0.0 0.1 ", "1.0 1.1 ", "2.0 2.1 "]
    assert all(answer.token_ids == (0, 1) for answer in answers)


def test_streams_several_samples(server):
    async def collect():
        async with AsyncClient(server.url) as client:
            return [parts async for parts in client.stream_samples("hello", 2, max_tokens=2)]

    parts = asyncio.run(collect())

    assert [[each.text for each in row] for row in parts] == [["0.0 ", "1.0 "], ["0.1 ", "1.1 "]]
    assert [each.finish_reason for each in parts[-1]] == ["length", "length"]


def test_a_client_sends_its_tenant(server):
    async def generate():
        async with AsyncClient(server.url, tenant="a") as client:
            await client.generate("hello", max_tokens=2)

    asyncio.run(generate())

    assert [received.sampling["tenant"] for received in server.model.requests] == ["a"]


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_one_answer_is_not_several_samples(client, call):
    with pytest.raises(InvalidRequest, match="n is 2; .* come from samples"):
        run(client, call, "hello", n=2)


@pytest.mark.parametrize(
    "prompt, name",
    [
        ([5, 6, 7], "input_ids"),
        ((5,), "input_ids"),
        ([{"role": "user", "content": "hello"}], "messages"),
    ],
    ids=["list", "tuple", "messages"],
)
def test_a_prompt_may_be_token_ids_or_messages(client, server, prompt, name):
    client.generate(prompt)

    value = server.model.requests[0].tensors[name]
    expected = list(prompt)
    assert (json.loads(value[0]) if name == "messages" else value.tolist()) == expected


@pytest.mark.parametrize(
    "prompt", [[], [[1, 2]], [0.5], ["a", "b"], "\ud800", [5, -1], [2**63, 5]], ids=repr
)
def test_refuses_a_prompt_of_another_form(client, server, prompt):
    with pytest.raises(InvalidRequest, match="the prompt (is|has token ids outside of 0 to) "):
        client.generate(prompt)
    assert server.model.requests == []


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, object()], ids=["nan", "set", "object"])
def test_refuses_sampling_parameters_without_json(client, value):
    with pytest.raises(InvalidRequest, match="the sampling parameters are no JSON"):
        client.generate("hello", temperature=value)


def test_log_probabilities_come_by_token(client):
    answer = client.generate("hello", max_tokens=2, logprobs=0)

    assert answer.logprobs == ({0: -0.5}, {1: -0.5})
    assert answer.token_texts == ({0: "token 0"}, {1: "token 1"})
    assert answer.token_bytes == ({0: b"\xf0"}, {1: b"\xf1"})
    [first, _] = client.stream("hello", max_tokens=2, logprobs=0)
    assert first.logprobs == ({0: -0.5},)


@pytest.mark.parametrize("method", ["generate", "samples", "stream", "stream_samples", "translate"])
def test_deadline_and_priority_are_arguments_with_types(method):
    for client in (AsyncClient, Client):
        if hasattr(client, method):
            arguments = inspect.signature(getattr(client, method)).parameters
            assert arguments["deadline_ms"].annotation == "float | None"
            assert arguments["priority"].annotation == "int | None"


def test_sends_deadline_and_priority(client, server):
    client.generate("hello", deadline_ms=5000, priority=3)

    sampling = server.model.requests[0].sampling
    assert 4000 < sampling["deadline_ms"] <= 5000
    assert sampling["request_priority"] == 3


@pytest.mark.parametrize("call", ["generate", "stream"])
@pytest.mark.parametrize(
    "kind, message, error",
    [
        ("invalid", "max_tokens is 0", InvalidRequest),
        ("unavailable", "deadline missed: too late", DeadlineMissed),
        ("unavailable", "the queue is full", ServerUnavailable),
        ("internal", "broken", ServerError),
        ("internal", "Request for unknown model: 'x' has no available versions", ModelNotFound),
    ],
)
def test_an_error_before_the_answer_has_its_own_type(
    client, server, fault, call, kind, message, error
):
    server.model.refuse = lambda received: fault(kind, message)

    with pytest.raises(error, match=message):
        run(client, call, "hello")


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_a_request_is_sent_again_while_the_server_is_unavailable(client, server, fault, call):
    server.model.faults = [fault("unavailable")] * 2

    run(client, call, "hello")

    assert len(server.model.requests) == 3


@pytest.mark.parametrize(
    "kind, message, error",
    [
        ("unavailable", "deadline missed: too late", DeadlineMissed),
        ("internal", "broken", ServerError),
    ],
)
def test_an_error_in_the_middle_ends_the_stream_without_a_retry(
    client, server, fault, kind, message, error
):
    server.model.fail_after = (2, fault(kind, message))
    parts = client.stream("hello")

    assert [next(parts).token_ids, next(parts).token_ids] == [(0,), (1,)]
    with pytest.raises(error, match=message):
        next(parts)
    assert len(server.model.requests) == 1


def test_leaving_the_loop_cancels_the_request(client, server):
    server.model.delay = lambda received: 0.05
    for _ in client.stream("hello", max_tokens=1000):
        break

    assert server.model.cancelled.wait(SECONDS)
    # and the client goes on
    server.model.delay = lambda received: 0.0
    assert client.generate("hello", max_tokens=1).text == "0.0 "


def test_leaving_the_loop_at_the_last_part_cancels_nothing(server):
    """Servers may keep a request for ever that is cancelled before its stream has ended."""
    server.model.holds_streams = 0.5

    with Client(server.url) as client:
        for part in client.stream("hello", max_tokens=3):
            if part.finish_reason:
                break
        # a whole answer does not wait for the end of its stream either
        assert client.generate("hello", max_tokens=1).finish_reason == "length"

    assert not server.model.cancelled.is_set()


def test_a_stream_that_does_not_end_is_cancelled(server, monkeypatch):
    monkeypatch.setattr("varlen_client.transport.grpc._END_SECONDS", 0.1)
    server.model.holds_streams = SECONDS

    with Client(server.url) as client:
        list(client.stream("hello", max_tokens=3))

    # HTTP has no such end
    assert server.url.startswith("http") or server.model.cancelled.wait(SECONDS)


def test_closing_the_async_stream_cancels_the_request(server):
    server.model.delay = lambda received: 0.05

    async def leave():
        async with AsyncClient(server.url) as client:
            async with aclosing(client.stream("hello", max_tokens=1000)) as parts:
                async for _ in parts:
                    break
            return await asyncio.to_thread(server.model.cancelled.wait, SECONDS)

    assert asyncio.run(leave())


@pytest.mark.parametrize("call, delay", [("generate", 30.0), ("stream", 0.1)])
def test_a_timeout_ends_the_call(client, server, call, delay):
    server.model.delay = lambda received: delay

    with pytest.raises(RequestTimeout, match=r"the answer was not complete within 0\.35 s"):
        run(client, call, "hello", max_tokens=100, timeout=0.35)

    assert call == "generate" or server.model.cancelled.wait(SECONDS)


def test_many_streams_run_at_the_same_time(server):
    server.model.delay = lambda received: 0.01

    async def run():
        async with AsyncClient(server.url) as client:

            async def collect(tokens):
                return "".join([d.text async for d in client.stream("a", max_tokens=tokens)])

            return await asyncio.gather(*(collect(tokens) for tokens in range(1, 20)))

    texts = asyncio.run(run())

    assert texts == ["".join(f"0.{i} " for i in range(tokens)) for tokens in range(1, 20)]


def test_a_model_that_embeds_does_not_generate(client, server):
    server.model.task = "embed"

    with pytest.raises(InvalidRequest, match="does not serve generate: its task is embed"):
        client.generate("hello")


def test_an_unknown_model_is_not_found(server):
    with Client(server.url, "nope") as client, pytest.raises(ModelNotFound):
        client.generate("hello")


def test_no_connection_is_server_unavailable(unused_url, fast_retries):
    with Client(unused_url, "m", retry=fast_retries) as client:
        with pytest.raises(ServerUnavailable, match="no connection to"):
            list(client.stream("hello"))
