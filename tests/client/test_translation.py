"""Translation by the clients against a fake server: order, n-best, errors of one text, cancellation."""

import asyncio

import pytest

from varlen_client import (
    AsyncClient,
    Client,
    DeadlineMissed,
    InvalidRequest,
    RequestTimeout,
    ServerError,
    ServerUnavailable,
    Translation,
)

SECONDS = 10.0


@pytest.fixture(autouse=True)
def _task(server):
    server.model.task = "translate"


def test_translates_each_text(client, server):
    answers = client.translate(["un", "deux"], num_beams=4, max_tokens=2, length_penalty=0.6)

    assert answers == [
        Translation("UN 0", (0, 1), -0.5, "length"),
        Translation("DEUX 0", (0, 1), -0.5, "length"),
    ]
    for received in server.model.requests:
        assert received.sampling == {
            "num_beams": 4,
            "max_tokens": 2,
            "length_penalty": 0.6,
            "n": 1,
        }
        assert received.tensors["return_score"][0]
        assert received.tensors["exclude_input_in_output"][0]


def test_the_next_best_translations_are_alternatives_of_the_best(client):
    [best] = client.translate(["un"], n_best=3, max_tokens=1)

    assert (best.text, best.score) == ("UN 0", -0.5)
    assert best.alternatives == (
        Translation("UN 1", (0,), -1.0, "length"),
        Translation("UN 2", (0,), -1.5, "length"),
    )


def test_a_search_may_find_fewer_than_n_best(client, server):
    server.model.most_answers = 2

    [best] = client.translate(["un"], n_best=4, max_tokens=1)

    assert [each.text for each in best.alternatives] == ["UN 1"]


def test_the_checkpoint_decides_what_the_caller_leaves_out(client, server):
    client.translate(["un"])

    assert server.model.requests[0].sampling == {"n": 1}


def test_many_texts_come_back_in_order_with_a_bound_on_those_in_flight(server):
    texts = [f"text {number}" for number in range(60)]
    server.model.delay = lambda received: 0.02 if received.prompt[-1] in "147" else 0.005
    progress = []

    with Client(server.url, concurrency=7) as client:
        answers = client.translate(texts, on_progress=progress.append)

    assert [answer.text for answer in answers] == [f"{text.upper()} 0" for text in texts]
    assert 1 < server.model.max_in_flight <= 7
    assert progress == list(range(1, 61))


def test_no_text_is_no_request(client, server):
    assert client.translate([]) == []
    assert server.model.requests == []


def test_a_text_may_be_token_ids(server, client):
    server.model.task = "generate"
    server.model.shows_task = False

    client.translate([[5, 6, 2]])

    assert server.model.requests[0].tensors["input_ids"].tolist() == [5, 6, 2]


@pytest.mark.parametrize(
    "kind, message, error, shown",
    [
        ("invalid", "row 0: text has 900 tokens", InvalidRequest, "row 2: text has 900 tokens"),
        ("invalid", "num_beams is 0", InvalidRequest, "row 2 of 4: num_beams is 0"),
        ("unavailable", "deadline missed: late", DeadlineMissed, "row 2 of 4: deadline missed"),
        ("unavailable", "the queue is full", ServerUnavailable, "row 2 of 4: the queue is full"),
    ],
    ids=["row", "option", "deadline", "queue"],
)
def test_the_error_of_a_text_names_its_row(client, server, fault, kind, message, error, shown):
    server.model.refuse = lambda received: (
        fault(kind, message) if received.prompt == "BAD" else None
    )

    with pytest.raises(error) as caught:
        client.translate(["a", "b", "bad", "c"])

    assert str(caught.value).startswith(shown)
    assert caught.value.rows == range(2, 3)


@pytest.mark.parametrize(
    "texts, options, message",
    [
        ("one text", {}, "got one string; pass a list"),
        (["a", 3], {}, "row 1 is int; expected text"),
        (["a", "\ud800"], {}, "row 1 is not valid Unicode"),
        ([[]], {}, "the prompt is neither a text"),
        (["a"], {"n_best": 0}, "n_best is 0; allowed: whole numbers from 1"),
        (["a"], {"n": 2}, "n is 2; n_best is this number here"),
        (["a"], {"num_return_sequences": 2}, "num_return_sequences is 2; n_best is this number"),
        (["a"], {"length_penalty": float("nan")}, "the sampling parameters are no JSON"),
    ],
    ids=["string", "number", "surrogate", "empty", "n_best", "n", "alias", "nan"],
)
def test_refuses_what_cannot_be_sent(client, server, texts, options, message):
    with pytest.raises(InvalidRequest, match=message):
        client.translate(texts, **options)

    assert server.model.requests == []


@pytest.mark.parametrize(
    "task, message", [("generate", "its task is generate"), ("embed", "embed")]
)
def test_another_model_does_not_translate(client, server, task, message):
    server.model.task = task

    with pytest.raises(InvalidRequest, match=f"does not serve translate: .*{message}"):
        client.translate(["a"])
    assert server.model.requests == []


def test_a_config_may_leave_the_task_to_the_checkpoint(client, server):
    server.model.shows_task = False
    assert client.translate(["a"])[0].text == "A 0"

    server.model.task = "embed"
    with Client(server.url) as other:
        with pytest.raises(InvalidRequest, match="translate: it has sentence_embedding .3.; "):
            other.translate(["a"])


def test_a_model_that_translates_does_not_embed(client, server):
    server.model.max_batch_size = 0

    with pytest.raises(InvalidRequest, match="does not serve embed: its task is translate"):
        client.embed(["a"])


def test_generate_works_with_a_model_that_translates(client):
    assert client.generate("un", max_tokens=2).text == "UN 0"


def test_an_answer_without_scores_is_an_error_of_the_server(client, server):
    server.model.returns_score = False

    with pytest.raises(ServerError, match="row 0|cannot be read"):
        client.translate(["a"])


def test_a_timeout_says_how_many_texts_were_translated(client, server):
    server.model.delay = lambda received: 300.0 if received.prompt == "SLOW" else 0.0

    # a busy machine may need a longer timeout for two answers
    for timeout in (0.5, 5, 50):
        with pytest.raises(RequestTimeout) as caught:
            client.translate(["a", "slow", "b"], timeout=timeout)
        if "2 of 3" in str(caught.value):
            break

    assert f"translate did not end within {timeout} s; 2 of 3 rows" in str(caught.value)


def test_a_cancelled_call_sends_nothing_more(server):
    server.model.delay = lambda received: 0.1

    async def leave():
        async with AsyncClient(server.url, concurrency=1) as client:
            task = asyncio.create_task(client.translate(["a", "b", "c"]))
            while not server.model.requests:
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if server.url.startswith("http"):
                # such a server does not notice that a client leaves
                return True
            return await asyncio.to_thread(server.model.cancelled.wait, SECONDS)

    assert asyncio.run(leave())
    assert len(server.model.requests) == 1


def test_each_text_is_sent_again_while_the_server_is_unavailable(client, server, fault):
    server.model.faults = [fault("unavailable")] * 2

    assert [answer.text for answer in client.translate(["a", "b"])] == ["A 0", "B 0"]
    assert len(server.model.requests) == 4
