"""Translation and beam search through the server: answers, refusals, many clients, shared load."""

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import save_checkpoint
from varlen.in_process.generator import Generation, Generator
from varlen_client import AsyncClient, Client, DeadlineMissed, InvalidRequest
from varlen_tools.local_server import LocalServer

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

MODELS = {"translator": "MarianMTModel", "writer": "GPT2LMHeadModel", "encoder": "BertModel"}
POSITIONS = {"translator": "max_position_embeddings", "writer": "n_positions"}
# Long enough that a test can interrupt an answer.
LONGEST = 512
TEXTS = ("the cat", "a", "the cat and the river, again and again", "0123456789", "é", "the the the")
CLIENTS = 8
SHARED_SECONDS = 3.0
# Roundings of a sum of a few dozen log probabilities, each of a few units.
SCORE_TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Tiny random checkpoints by model name."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return {
        name: save_checkpoint(
            folder / name, kind, **({POSITIONS[name]: LONGEST} if name in POSITIONS else {})
        )
        for name, kind in MODELS.items()
    }


@pytest.fixture(scope="module")
def server(checkpoints, tmp_path_factory):
    """A server of a model that translates; tests load the other two."""
    folder = tmp_path_factory.mktemp("translating")
    for name, checkpoint in checkpoints.items():
        add_model(folder, name, checkpoint)
    with LocalServer(folder, arguments=["--load-model=translator"], is_managed=True) as running:
        running.wait_ready()
        yield running


@pytest.fixture(scope="module")
def server_of_all(server):
    """The server with all models."""
    load_all(server, MODELS.keys() - {"translator"})
    return server


@pytest.fixture(scope="module")
def translator(checkpoints):
    """The model that translates, in this process."""
    with in_process(checkpoints["translator"]) as generator:
        yield generator


@pytest.fixture(scope="module")
def writer(checkpoints):
    """The model that continues texts, in this process."""
    with in_process(checkpoints["writer"]) as generator:
        yield generator


def in_process(checkpoint: Path) -> Generator:
    return Generator.from_pretrained(checkpoint, device="cpu", dtype="fp32", threads=1)


def check_answer(answer: Any, expected: Generation) -> None:
    """Check a translation or a row of the plain endpoint against the answer in process."""
    assert answer.token_ids == expected.token_ids
    assert answer.text == expected.text
    assert answer.finish_reason == expected.finish_reason
    assert expected.score is not None
    assert answer.score == pytest.approx(expected.score, rel=SCORE_TOLERANCE, abs=SCORE_TOLERANCE)


def test_translations_are_those_of_the_model_in_process(url, translator):
    options = {"num_beams": 4, "max_tokens": 20, "length_penalty": 0.8}
    expected = translator.generate(TEXTS, n=3, **options)

    with Client(url, "translator") as client:
        answers = client.translate(TEXTS, n_best=3, **options)
        [first, *_] = client.translate(TEXTS, **options)

    for number, best in enumerate(answers):
        for answer, known in zip(
            (best, *best.alternatives), expected[3 * number : 3 * number + 3], strict=True
        ):
            check_answer(answer, known)
        scores = [best.score, *(each.score for each in best.alternatives)]
        assert scores == sorted(scores, reverse=True)
    check_answer(first, expected[0])


def test_without_options_the_checkpoint_decides(url, translator):
    [expected] = translator.generate(["the cat"], max_tokens=30)

    with Client(url, "translator") as client:
        [answer] = client.translate(["the cat"], max_tokens=30)
        plain = client.generate("the cat", max_tokens=30)
        parts = list(client.stream("the cat", max_tokens=30))

    check_answer(answer, expected)
    assert (plain.token_ids, plain.text) == (expected.token_ids, expected.text)
    assert "".join(part.text for part in parts) == expected.text
    assert parts[-1].finish_reason == expected.finish_reason


@pytest.mark.full
@pytest.mark.usefixtures("server_of_all")
def test_a_model_that_continues_text_searches_too(url, writer):
    options = {"num_beams": 4, "max_tokens": 12}
    expected = writer.generate(["the cat"], n=4, **options)

    with Client(url, "writer") as client:
        answers = client.samples("the cat", 4, **options)

    assert [(each.token_ids, each.text) for each in answers] == [
        (each.token_ids, each.text) for each in expected
    ]


def test_the_generate_endpoint_takes_plain_json(server, translator):
    expected = translator.generate(["the cat"], num_beams=3, n=2, max_tokens=9)
    body = {
        "text_input": "the cat",
        "num_beams": 3,
        "num_return_sequences": 2,
        "max_tokens": 9,
        "return_score": True,
        "return_num_input_tokens": True,
    }

    status, answer = http_call(server, "POST", "/v2/models/translator/generate", body)

    assert status == 200
    # an answer never starts with the source
    assert answer["text_output"] == [each.text for each in expected]
    assert answer["score"] == pytest.approx([each.score for each in expected], rel=SCORE_TOLERANCE)
    assert answer["num_input_tokens"] == 2
    status, answer = http_call(
        server, "POST", "/v2/models/translator/generate", {"text_input": "a", "num_beams": 0}
    )
    assert (status, "num_beams is 0" in answer["error"]) == (400, True)


def test_a_search_that_finds_fewer_answers_says_so(url):
    # two tokens are left to choose from
    options = {"suppress_tokens": list(range(2, 261)), "num_beams": 4, "max_tokens": 1}

    with Client(url, "translator") as client:
        [best] = client.translate(["the cat"], n_best=4, **options)

    assert len(best.alternatives) < 3
    assert all(each.token_ids for each in (best, *best.alternatives))


def test_searches_of_different_widths_share_steps_and_change_no_answer(server, translator):
    chance = random.Random(0)
    plans = [
        {
            "num_beams": beams,
            "n_best": chance.randint(1, beams),
            "max_tokens": chance.randint(1, 24),
            "no_repeat_ngram_size": chance.choice((0, 2)),
            **(
                {
                    "length_penalty": chance.choice((0.0, 1.0, 2.0)),
                    "early_stopping": chance.choice((True, False, "never")),
                }
                if beams > 1
                else {}
            ),
        }
        for beams in (1, 2, 3, 4, 5, 8) * 5
    ]

    async def run() -> list[Any]:
        async with AsyncClient(server.grpc_url, "translator") as client:
            return await asyncio.gather(
                *(
                    client.translate([TEXTS[index % len(TEXTS)]], **plan)
                    for index, plan in enumerate(plans)
                )
            )

    answers = asyncio.run(run())

    for index, (plan, [best]) in enumerate(zip(plans, answers, strict=True)):
        options = {name: value for name, value in plan.items() if name != "n_best"}
        expected = translator.generate([TEXTS[index % len(TEXTS)]], n=plan["n_best"], **options)
        for answer, known in zip((best, *best.alternatives), expected, strict=True):
            check_answer(answer, known)


@pytest.mark.parametrize(
    "text, options, message",
    [
        ("a", {"num_beams": 0}, "num_beams is 0; allowed: whole numbers from 1"),
        ("a", {"num_beams": 4, "n_best": 5}, "n is 5; allowed: up to num_beams, 4"),
        ("a", {"num_beam": 4}, 'unknown parameter "num_beam". Did you mean "num_beams"?'),
        ("a", {"num_beams": 4, "stop": "b"}, "stop is "),
        ("a", {"logprobs": 2}, "logprobs is 2"),
        ("a", {"early_stopping": "soon"}, "early_stopping is "),
        (list(range(3, 250)) * 3, {}, "input_ids has 741 tokens; this model takes at most"),
        ([5, 700], {}, "input_ids holds 700"),
    ],
    ids=["none", "n_best", "unknown", "stop", "logprobs", "word", "long", "vocabulary"],
)
def test_a_bad_request_is_the_caller_s_fault_and_names_its_row(url, text, options, message):
    first = "good" if isinstance(text, str) else [5]
    with Client(url, "translator", concurrency=1) as client:
        with pytest.raises(InvalidRequest, match=r"^row [01]") as caught:
            client.translate([first, text], max_tokens=4, **options)

    assert message in str(caught.value)
    assert caught.value.rows == (range(1, 2) if not options else range(1))


@pytest.mark.full
@pytest.mark.usefixtures("server_of_all")
@pytest.mark.parametrize("model", ["writer", "encoder"])
def test_a_model_of_another_task_does_not_translate(url, model):
    with (
        Client(url, model) as client,
        pytest.raises(InvalidRequest, match="return_score|translate"),
    ):
        client.translate(["a"])


def test_a_client_that_cancels_frees_the_blocks_of_its_search(server):
    before = wait_until_free(server, "translator")
    longest = {"num_beams": 8, "max_tokens": LONGEST - 2, "min_tokens": LONGEST - 2}

    async def leave() -> None:
        async with AsyncClient(server.grpc_url, "translator") as client:
            task = asyncio.create_task(client.translate(["the cat"] * 2, **longest))
            await cancel_once_it_runs(server, "translator", task)

    asyncio.run(leave())

    name = "varlen_requests_total cancelled"
    wait_until(
        lambda: metrics(server, "translator")[name] == before[name] + 2, "both are cancelled"
    )
    after = wait_until_free(server, "translator")
    name = "varlen_decode_tokens_total"
    # two whole searches would decode this many
    assert after[name] - before[name] < 2 * 8 * (LONGEST - 2)


def test_a_deadline_ends_a_search_and_frees_its_blocks(url, server):
    longest = {"num_beams": 8, "max_tokens": LONGEST - 2, "min_tokens": LONGEST - 2}

    with Client(url, "translator") as client, pytest.raises(DeadlineMissed):
        client.translate(["the cat"], deadline_ms=200, **longest)

    wait_until_free(server, "translator")


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.full)])
def test_requests_of_several_clients_are_each_ended_once(server, translator, count):
    """Each is translated, misses its deadline, or is cancelled by its client; none is lost."""
    stub, before = stub_of(server, "translator"), outcomes(server, "translator")
    chance = random.Random(1)
    plans = [
        {
            "text": chance.choice(TEXTS),
            "num_beams": chance.choice((1, 2, 4)),
            "max_tokens": chance.choice((1, 3, 6)),
            "deadline_ms": 40.0 if index % 23 == 7 else None,
            "leaves": index % 19 == 5,
        }
        for index in range(count)
    ]

    async def ask(client: AsyncClient, plan: dict[str, Any]) -> Any:
        names = ("num_beams", "max_tokens", "deadline_ms")
        options = {name: plan[name] for name in names}
        task = asyncio.ensure_future(client.translate([plan["text"]], **options))
        if plan["leaves"]:
            await asyncio.sleep(0.02)
            task.cancel()
        try:
            [answer] = await task
        except asyncio.CancelledError:
            return "left"
        except DeadlineMissed:
            return "missed"
        return answer

    async def run_client(number: int) -> list[Any]:
        url = server.http_url if number % 4 == 3 else server.grpc_url
        async with AsyncClient(url, "translator") as client:
            return await asyncio.gather(*(ask(client, plan) for plan in plans[number::CLIENTS]))

    async def run() -> list[list[Any]]:
        calls = asyncio.gather(*(run_client(number) for number in range(CLIENTS)))
        return await asyncio.wait_for(calls, TIMEOUT_SECONDS)

    by_client = asyncio.run(run())

    known: dict[tuple[Any, ...], Generation] = {}
    for number, ends in enumerate(by_client):
        for plan, end in zip(plans[number::CLIENTS], ends, strict=True):
            if end == "left":
                assert plan["leaves"]
            elif end == "missed":
                assert plan["deadline_ms"]
            else:
                options = {name: plan[name] for name in ("num_beams", "max_tokens")}
                key = plan["text"], *options.values()
                if key not in known:
                    [known[key]] = translator.generate([plan["text"]], **options)
                check_answer(end, known[key])
    wait_until_free(server, "translator")
    after = outcomes(server, "translator")
    ended = {name: after[name] - before[name] for name in after}
    assert ended["failed"] == ended["invalid"] == 0
    whole = sum(not isinstance(end, str) for ends in by_client for end in ends)
    # what a client no longer waits for may have been complete, or have never reached the server
    assert ended["ok"] >= whole >= count * 0.8
    assert whole <= sum(ended.values()) <= count
    assert stub_of(server, "translator") == stub


@pytest.mark.full
def test_models_of_each_kind_in_one_server_all_make_progress_under_load(server_of_all):
    before = {name: outcomes(server_of_all, name)["ok"] for name in MODELS}

    async def send_all_the_time(name: str, client: AsyncClient, until: float) -> int:
        answered = 0
        while asyncio.get_running_loop().time() < until:
            if name == "translator":
                await client.translate(["the cat and the river"], num_beams=4, max_tokens=20)
            elif name == "writer":
                await client.generate("the cat", max_tokens=20, temperature=0, ignore_eos=True)
            else:
                vectors = await client.embed(["the cat and the river"] * 16)
                assert np.isfinite(vectors).all()
            answered += 1
        return answered

    async def run() -> dict[str, int]:
        until = asyncio.get_running_loop().time() + SHARED_SECONDS
        clients = {name: AsyncClient(server_of_all.grpc_url, name) for name in MODELS}
        try:
            calls = {
                name: asyncio.gather(*(send_all_the_time(name, client, until) for _ in range(6)))
                for name, client in clients.items()
            }
            return {
                name: sum(await asyncio.wait_for(call, TIMEOUT_SECONDS))
                for name, call in calls.items()
            }
        finally:
            for client in clients.values():
                await client.close()

    answered = asyncio.run(run())

    assert all(count >= 6 for count in answered.values()), answered
    for name, count in answered.items():
        assert outcomes(server_of_all, name)["ok"] - before[name] >= count
    wait_until_free(server_of_all, "translator")
    wait_until_free(server_of_all, "writer")
