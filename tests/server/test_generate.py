"""Generation through the server: whole answers and streams, both protocols, cancellation, many streams."""

import asyncio
import http.client
import json
import random
import re
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc

from tests.checkpoints import save_checkpoint, set_fields, write_file
from tests.generation_refusals import generation_refusals
from varlen.in_process.generator import Generator
from varlen_client import AsyncClient, Client, DeadlineMissed, InvalidRequest
from varlen_tools.local_server import LOOPBACK, LocalServer

from .serving import (
    TIMEOUT_SECONDS,
    add_model,
    cancel_once_it_runs,
    http_call,
    load_all,
    metrics,
    outcomes,
    stub_of,
    wait_until,
    wait_until_free,
)

VOCABULARY = 263
# The random model may end an answer at once.
GREEDY = {"temperature": 0, "ignore_eos": True}
STREAMS = 64
CHAT_TEMPLATE = "{{ messages[0].content }}{% if enable_thinking %} think{% endif %}"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A GPT-2 whose steps take milliseconds, so that a test can interrupt an answer."""
    folder = tmp_path_factory.mktemp("checkpoint") / "gpt2"
    save_checkpoint(folder, "GPT2LMHeadModel", n_embd=96, n_inner=384, n_layer=2, n_positions=4096)
    write_file(folder, "chat_template.jinja", CHAT_TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def with_defaults(tmp_path_factory):
    """A GPT-2 with sampling options of its own, and a chat template with a name."""
    folder = tmp_path_factory.mktemp("defaults") / "gpt2"
    save_checkpoint(folder, "GPT2LMHeadModel")
    set_fields(folder, "generation_config.json", temperature=0.0, max_new_tokens=8)
    templates = [{"name": "rag", "template": "{{ messages[0].content }}"}]
    set_fields(folder, "tokenizer_config.json", chat_template=templates)
    return folder


@pytest.fixture(scope="module")
def server(checkpoint, with_defaults, tmp_path_factory):
    """A server of a model that streams; others wait for a test to load them."""
    folder = tmp_path_factory.mktemp("generating")
    add_model(folder, "greedy", with_defaults, task="generate")
    add_model(folder, "sampled", with_defaults, task="generate", generation_config="none")
    add_model(folder, "writer", checkpoint, task="generate", max_text_bytes="65536")
    once = "model_transaction_policy { decoupled: false }"
    drafts = {"speculation": "ngram", "prompt_lookup_min": "1"}
    add_model(folder, "drafting", checkpoint, task="generate", **drafts)
    drafts = {"speculation": "draft_model", "draft_model": str(checkpoint)}
    add_model(folder, "two_models", checkpoint, task="generate", **drafts)
    add_model(folder, "once", checkpoint, text=once, task="generate")
    with LocalServer(folder, arguments=["--load-model=writer"], is_managed=True) as running:
        running.wait_ready()
        yield running


@pytest.fixture(scope="module")
def server_of_all(server):
    """The server with models that answer once, or have defaults of a checkpoint."""
    load_all(server, ("greedy", "sampled", "once"))
    return server


@pytest.fixture(scope="module")
def in_process(checkpoint):
    with Generator.from_pretrained(checkpoint, device="cpu", dtype="fp32", threads=1) as generator:
        yield generator


@pytest.fixture
def client(url):
    with Client(url, "writer") as client:
        yield client


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(1, VOCABULARY, length).tolist()


def test_callers_of_different_salts_share_no_prefix(client, server, url):
    # each protocol has its own
    prompt, salts = prompt_of(200, seed=42), [f"{caller} {url}" for caller in "aba"]
    before = metrics(server, "writer")
    answers = [client.generate(prompt, max_tokens=2, cache_salt=s, **GREEDY) for s in salts]

    def grown(name: str) -> float:
        return metrics(server, "writer")[name] - before[name]

    def computed_or_shared() -> float:
        return grown("varlen_prefill_tokens_total") + grown("varlen_prefix_cache_hit_tokens_total")

    assert [each.text for each in answers] == [answers[0].text] * 3
    # series are exported now and then
    wait_until(lambda: computed_or_shared() == 3 * 200, "all prompts are counted")
    # the second request of a salt shares the prompt's full blocks of 16 tokens
    assert grown("varlen_prefix_cache_hit_tokens_total") == 192


def test_a_whole_answer_is_that_of_the_model_in_process(client, in_process):
    for prompt in (prompt_of(1), prompt_of(150), "the quick brown fox"):
        [expected] = in_process.generate([prompt], max_tokens=40, **GREEDY)

        answer = client.generate(prompt, max_tokens=40, **GREEDY)

        assert answer.token_ids == expected.token_ids
        assert answer.text == expected.text
        assert answer.finish_reason == "length"


def test_the_parts_of_a_stream_make_the_whole_answer(client):
    whole = client.generate(prompt_of(20), max_tokens=50, **GREEDY)

    parts = list(client.stream(prompt_of(20), max_tokens=50, **GREEDY))

    assert len(parts) > 5
    assert "".join(part.text for part in parts) == whole.text
    assert tuple(i for part in parts for i in part.token_ids) == whole.token_ids
    assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]


def test_samples_and_log_probabilities(client):
    options = {"max_tokens": 8, "seed": 5, "temperature": 1.0, "logprobs": 2, "ignore_eos": True}

    answers = client.samples(prompt_of(9), 3, **options)

    assert len({answer.token_ids for answer in answers}) > 1
    assert answers == client.samples(prompt_of(9), 3, **options)
    for answer in answers:
        assert all(
            token_id in entry and len(entry) in (2, 3) and max(entry.values()) <= 0
            for token_id, entry in zip(answer.token_ids, answer.logprobs, strict=True)
        )


@pytest.mark.parametrize(
    "prompt, options, message",
    [
        ("a", {"max_tokens": 0}, "max_tokens is 0; allowed: whole numbers from 1"),
        ("a", {"temperature": -1}, "temperature is -1; allowed: "),
        ("a", {"max_tokenz": 3}, 'unknown parameter "max_tokenz"'),
        ([VOCABULARY + 100], {}, "input_ids holds 363"),
        (prompt_of(5000), {}, "input_ids has 5000 tokens; this model takes at most"),
        ("", {}, "row 0: text has no tokens, and the tokenizer adds none"),
    ],
    ids=["max_tokens", "temperature", "unknown", "vocabulary", "too long", "empty"],
)
@pytest.mark.parametrize("call", ["generate", "stream"])
def test_a_bad_request_is_the_caller_s_fault(client, call, prompt, options, message):
    with pytest.raises(InvalidRequest) as caught:
        list(getattr(client, call)(prompt, **options))

    assert message in str(caught.value)


@pytest.mark.parametrize("refusal", generation_refusals(), ids=lambda each: each.description)
def test_each_mistake_has_its_message(client, refusal):
    [content] = [each[0].decode() for each in refusal.inputs.values()]
    prompt = json.loads(content) if "messages" in refusal.inputs else content

    with pytest.raises(InvalidRequest) as caught:
        client.generate(prompt, **refusal.parameters)

    assert refusal.message in str(caught.value)


@pytest.mark.parametrize(
    "prompt, options, message",
    [
        ("a", {"stop": ["x" * 10] * 60_000}, "sampling_parameters has 840018 bytes; allowed:"),
        (
            [{"role": "user", "content": "a" * 524_288}],
            {},
            "messages has 524321 bytes; allowed: up to 524288",
        ),
        (
            [{"role": "user", "content": [0] * 90_000}],
            {},
            "messages has 90003 commas and opening brackets; allowed: up to 85536",
        ),
    ],
    ids=["long options", "long messages", "messages of many objects"],
)
def test_json_that_takes_long_to_read_is_refused(client, prompt, options, message):
    with pytest.raises(InvalidRequest, match=message):
        client.generate(prompt, **options)


def test_biases_and_bad_words_reach_the_model(client, server, in_process):
    options = {"logit_bias": {"70": 80, "71": 79.5}, "bad_words": ["fg"], "max_tokens": 6, **GREEDY}
    [expected] = in_process.generate(["hello"], **options)
    assert {*expected.token_ids} <= {70, 71}

    assert client.generate("hello", **options).token_ids == expected.token_ids
    # the endpoint takes no lists and objects as parameters
    body = {"text_input": "hello", **options, "logit_bias": '{"70": 80, "71": 79.5}'}
    body |= {"bad_words": "fg", "exclude_input_in_output": True}
    status, answer = http_call(server, "POST", "/v2/models/writer/generate", body)
    assert (status, answer["text_output"]) == (200, expected.text)
    with pytest.raises(InvalidRequest, match="logit_bias has the token 263; this model generates"):
        client.generate("hello", logit_bias={"263": 1})


def test_the_generate_endpoint_takes_names_of_other_servers(server, in_process):
    [expected] = in_process.generate(["hello"], max_tokens=5, bad_words=["f"], **GREEDY)
    # as the tutorials of TensorRT-LLM's backend have it
    body = {"text_input": "hello", "max_tokens": 5, "bad_words": "f", "stop_words": "", "pad_id": 2}
    body |= {"end_id": 262, "temperature": 0, "ignore_eos": True, "exclude_input_in_output": True}

    status, answer = http_call(server, "POST", "/v2/models/writer/generate", body)

    assert (status, answer["text_output"]) == (200, expected.text)
    status, answer = http_call(
        server, "POST", "/v2/models/writer/generate", body | {"embedding_bias_words": "a"}
    )
    assert status == 400
    assert "embedding_bias_words is not served; send logit_bias" in answer["error"]


def test_a_chat_template_gets_its_variables(client, server):
    messages = [{"role": "user", "content": "hello"}]
    asked = {"max_tokens": 6, **GREEDY}
    plain, thinking = client.generate("hello", **asked), client.generate("hello think", **asked)
    assert plain.token_ids != thinking.token_ids

    assert client.generate(messages, **asked).text == plain.text
    chosen = client.generate(messages, chat_template_kwargs={"enable_thinking": True}, **asked)
    assert chosen.text == thinking.text
    # the endpoint takes no object as a parameter
    body = {"messages": json.dumps(messages), "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    body["chat_template_kwargs"] = '{"enable_thinking": true}'
    status, answer = http_call(server, "POST", "/v2/models/writer/generate", body)
    assert (status, answer["text_output"]) == (200, thinking.text)
    with pytest.raises(InvalidRequest, match="has 'think'; the chat template of this model reads"):
        client.generate(messages, chat_template_kwargs={"think": True})


@pytest.mark.full
def test_sampling_options_are_those_of_the_checkpoint(server_of_all):
    def answers(name: str, **options: Any) -> set[tuple[int, ...]]:
        with Client(server_of_all.grpc_url, name) as client:
            return {
                client.generate(
                    "hello", max_tokens=12, ignore_eos=True, seed=seed, **options
                ).token_ids
                for seed in range(4)
            }

    [greedy] = answers("greedy")
    [expected] = answers("sampled", temperature=0)
    # max_new_tokens limits all requests
    assert (len(greedy), len(expected)) == (8, 12)
    assert greedy == expected[:8]
    assert len(answers("sampled")) == 4
    assert len(answers("greedy", temperature=1)) == 4


@pytest.mark.full
def test_a_request_chooses_one_of_the_templates_with_names(server_of_all):
    messages = [{"role": "user", "content": "hello"}]
    with Client(server_of_all.grpc_url, "greedy") as client:
        chosen = client.generate(messages, chat_template_kwargs={"chat_template": "rag"})

        assert chosen.token_ids == client.generate("hello").token_ids
        with pytest.raises(InvalidRequest, match="send chat_template with one of their names: rag"):
            client.generate(messages)


# `make test` drafts in the process of a model, in tests/backend/service/test_generation_worker.py
@pytest.mark.full
@pytest.mark.parametrize("model", ["drafting", "two_models"])
def test_drafts_change_no_answer(server, url, in_process, model):
    load_all(server, [model])
    prompts = [[5, 6, 7] * 6, prompt_of(20)]
    with Client(url, model) as client:
        for prompt in prompts:
            (expected,) = in_process.generate([prompt], max_tokens=40, **GREEDY)
            parts = list(client.stream(prompt, max_tokens=40, **GREEDY))
            assert [token for part in parts for token in part.token_ids] == [*expected.token_ids]
    # how many run depends on what they cost here
    assert metrics(server, model)["varlen_draft_tokens_accepted_total"] >= 0


def test_the_generate_endpoint_takes_plain_json(server, in_process):
    [expected] = in_process.generate(["hello"], max_tokens=5, **GREEDY)
    body = {"text_input": "hello", "max_tokens": 5, "temperature": 0, "ignore_eos": True}

    status, answer = http_call(server, "POST", "/v2/models/writer/generate", body)

    assert status == 200
    # as the vLLM backend has it
    assert answer["text_output"] == f"hello{expected.text}"
    body |= {"exclude_input_in_output": True, "return_num_output_tokens": True}
    status, answer = http_call(server, "POST", "/v2/models/writer/generate", body)
    assert (answer["text_output"], answer["num_output_tokens"]) == (expected.text, 5)


def test_the_generate_stream_endpoint_sends_an_event_per_part(server):
    body = {
        "text_input": "hello",
        "stream": True,
        "return_finish_reason": True,
        "sampling_parameters": json.dumps({"max_tokens": 12, **GREEDY}),
    }
    connection = http.client.HTTPConnection(LOOPBACK, server.http_port, timeout=TIMEOUT_SECONDS)
    connection.request("POST", "/v2/models/writer/generate_stream", json.dumps(body))
    response = connection.getresponse()
    lines = response.read().decode().splitlines()
    connection.close()

    assert response.status == 200
    events = [json.loads(line.removeprefix("data:")) for line in lines if line]
    assert all(line.startswith("data:") for line in lines if line)
    reasons = [event["finish_reason"] for event in events]
    assert reasons == ["None"] * (len(events) - 1) + ["length"]


@pytest.mark.full
def test_a_model_that_is_not_decoupled_answers_plain_inference(server_of_all, in_process):
    [expected] = in_process.generate([prompt_of(12)], max_tokens=10, **GREEDY)
    inputs = []
    for name, array, datatype in (
        ("input_ids", np.array(prompt_of(12)), "INT64"),
        (
            "sampling_parameters",
            np.array([json.dumps({"max_tokens": 10, **GREEDY}).encode()], dtype=object),
            "BYTES",
        ),
        ("return_output_ids", np.array([True]), "BOOL"),
    ):
        tensor = tritonclient.grpc.InferInput(name, list(array.shape), datatype)
        inputs.append(tensor.set_data_from_numpy(array))
    with tritonclient.grpc.InferenceServerClient(f"{LOOPBACK}:{server_of_all.grpc_port}") as plain:
        result = plain.infer("once", inputs)

    assert tuple(result.as_numpy("output_ids").tolist()) == expected.token_ids
    assert result.as_numpy("text_output").tolist() == [expected.text.encode()]


@pytest.mark.full
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_model_that_is_not_decoupled_refuses_to_stream(server_of_all, protocol):
    url = server_of_all.grpc_url if protocol == "grpc" else server_of_all.http_url
    with Client(url, "once") as client:
        assert len(client.generate("hello", max_tokens=3, **GREEDY).token_ids) == 3
        with pytest.raises(InvalidRequest, match="model_transaction_policy"):
            list(client.stream("hello"))


@pytest.mark.parametrize("call", ["stream", "generate"])
def test_a_client_that_cancels_stops_the_generation(server, call):
    most = 4000
    before = wait_until_free(server, "writer")

    async def leave() -> None:
        async with AsyncClient(server.grpc_url, "writer") as client:
            if call == "stream":
                async with aclosing(client.stream("a", max_tokens=most, **GREEDY)) as parts:
                    await anext(parts)
            else:
                task = asyncio.create_task(client.generate("a", max_tokens=most, **GREEDY))
                await cancel_once_it_runs(server, "writer", task)

    asyncio.run(leave())

    # metrics are exported a moment later
    name = "varlen_requests_total cancelled"
    wait_until(
        lambda: metrics(server, "writer")[name] == before[name] + 1, "the request is cancelled"
    )
    after = wait_until_free(server, "writer")
    name = "varlen_decode_tokens_total"
    # how far it came until then depends on the machine
    assert after[name] - before[name] < most


def test_a_deadline_ends_an_answer_and_frees_its_blocks(server):
    with Client(server.grpc_url, "writer") as client, pytest.raises(DeadlineMissed):
        client.generate(prompt_of(50), max_tokens=4000, deadline_ms=300, **GREEDY)

    wait_until_free(server, "writer")


def test_64_streams_with_cancels_and_deadlines_are_each_answered_and_return_their_blocks(
    server, in_process
):
    """Each stream is complete and right, missed its deadline, or left; none is lost."""
    stub, before = stub_of(server, "writer"), outcomes(server, "writer")
    chance = random.Random(0)
    plans = [
        {
            "prompt": prompt_of(chance.choice((1, 3, 17, 64, 65, 200)), seed),
            "max_tokens": chance.randint(1, 80),
            "leaves_after": chance.randint(1, 5) if seed % 6 == 5 else None,
            "deadline_ms": chance.uniform(5, 400) if seed % 5 == 4 else None,
        }
        for seed in range(STREAMS)
    ]
    # one leaves at the first part, and one cannot be in time
    plans[5] |= {"leaves_after": 1}
    plans[4] |= {"deadline_ms": 1, "max_tokens": 200}

    async def talk(client: AsyncClient, plan: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
        tokens: list[int] = []
        options = {"max_tokens": plan["max_tokens"], "deadline_ms": plan["deadline_ms"], **GREEDY}
        try:
            async with aclosing(client.stream(plan["prompt"], **options)) as parts:
                async for number, part in _enumerated(parts):
                    tokens += part.token_ids
                    if plan["leaves_after"] == number:
                        return "left", tuple(tokens)
        except DeadlineMissed:
            return "missed", tuple(tokens)
        return "complete", tuple(tokens)

    async def run() -> list[tuple[str, tuple[int, ...]]]:
        async with AsyncClient(server.grpc_url, "writer") as client:
            calls = asyncio.gather(*(talk(client, plan) for plan in plans))
            return await asyncio.wait_for(calls, TIMEOUT_SECONDS)

    ends = asyncio.run(run())

    assert (ends[5][0], ends[4][0]) == ("left", "missed")
    for plan, (end, tokens) in zip(plans, ends, strict=True):
        if plan["leaves_after"] is plan["deadline_ms"] is None:
            assert end == "complete"
        [expected] = in_process.generate([plan["prompt"]], max_tokens=plan["max_tokens"], **GREEDY)
        assert expected.token_ids[: len(tokens)] == tokens
        assert end != "complete" or tokens == expected.token_ids
        assert end != "missed" or plan["deadline_ms"] is not None
    wait_until_free(server, "writer")
    after = outcomes(server, "writer")
    assert after["failed"] == before["failed"]
    assert sum(after.values()) - sum(before.values()) >= STREAMS
    assert stub_of(server, "writer") == stub


async def _enumerated(parts: Any) -> Any:
    number = 0
    async for part in parts:
        number += 1
        yield number, part


COSTLY = {"type": "integer", "allOf": [{"multipleOf": 997}, {"multipleOf": 1009}]}


def test_a_grammar_that_cannot_be_served_fails_its_own_request_and_no_other(server, client):
    """A costly grammar compiles in its process, under its deadline, while others are answered."""
    with pytest.raises(InvalidRequest, match="requires itself without an end"):
        client.generate("x", structured_outputs={"json": {"$ref": "#"}})
    with pytest.raises(InvalidRequest, match="the grammar takes more than"):
        client.generate("x", structured_outputs={"json": COSTLY})
    with pytest.raises(InvalidRequest, match="the grammar takes more than"):
        list(client.stream("x", structured_outputs={"json": COSTLY}))
    status, answer = http_call(
        server,
        "POST",
        "/v2/models/writer/generate",
        {
            "text_input": "x",
            "sampling_parameters": json.dumps({"structured_outputs": {"choice": ["yes", "no"]}}),
        },
    )
    assert (status, answer["text_output"]) in {(200, "xyes"), (200, "xno")}

    wait_until(
        lambda: metrics(server, "writer")["varlen_grammars"] == 1, "one grammar has a process"
    )


def test_answers_with_a_grammar_match_beside_answers_without_one(client):
    patterns = ["[a-f]{3,9}", "(red|green|blue){1,9}", "[0-9]{1,4}(,[0-9]{1,4}){2}"]

    for pattern in patterns:
        options = {"structured_outputs": {"regex": pattern}, "max_tokens": 100, "seed": 1}
        for answer in client.samples("x", 4, **options):
            assert answer.finish_reason == "stop"
            assert re.fullmatch(pattern, answer.text)
