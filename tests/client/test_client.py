"""The sync client against a fake server: requests, order of the results, and refusals."""

import threading

import numpy as np
import pytest

from varlen_client import (
    Client,
    InvalidRequest,
    ModelNotFound,
    ServerError,
    VarlenClientError,
)
from varlen_client.tasks.labels import PREDICT, RERANK
from varlen_client.tasks.tokens import PREDICT_TOKENS
from varlen_client.tasks.vectors import EMBED, SPARSE_EMBED
from varlen_client.wire import query_and_documents

TEXTS = [f"text {'x' * (n % 7)} {n}" for n in range(50)]


def test_embeds_texts_in_order_over_many_requests(client, server, vectors_of):
    # the first request is the slowest, so responses arrive out of order
    server.model.delay = lambda received: 0.1 if received.texts[0] == TEXTS[0] else 0.0

    vectors = client.embed(TEXTS)

    assert vectors.dtype == np.float32
    np.testing.assert_array_equal(vectors, vectors_of(TEXTS))


@pytest.mark.parametrize(("max_batch_size", "rows"), [(8, 8), (100, 32)])
def test_sends_at_most_max_batch_size_and_at_most_32_rows_per_request(
    client, server, max_batch_size, rows
):
    server.model.max_batch_size = max_batch_size

    client.embed(TEXTS)

    sizes = [received.num_rows for received in server.model.requests]
    assert max(sizes) == rows
    assert sum(sizes) == len(TEXTS)


def test_rows_per_request_can_be_chosen(server):
    with Client(server.url, rows_per_request=3) as client:
        client.embed(TEXTS[:7])

    assert sorted(received.num_rows for received in server.model.requests) == [1, 3, 3]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_concurrency_limits_the_requests_in_flight(server, concurrency):
    server.model.delay = lambda received: 0.03
    with Client(server.url, rows_per_request=5, concurrency=concurrency) as client:
        client.embed(TEXTS)

    assert server.model.max_in_flight == concurrency


def test_pads_token_ids_with_a_mask(client, server, vectors_of):
    ids = [[101, 7, 102], [101, 102], [5], np.array([1, 2, 3, 4])]

    vectors = client.embed(ids)

    np.testing.assert_array_equal(vectors, vectors_of(ids))
    (received,) = server.model.requests
    assert received.tensors["input_ids"].tolist()[1] == [101, 102, 0, 0]
    assert received.tensors["attention_mask"].tolist()[1] == [1, 1, 0, 0]


def test_token_ids_of_one_length_need_no_mask(client, server):
    client.embed(np.arange(6).reshape(2, 3))

    assert set(server.model.requests[0].tensors) == {"input_ids"}


@pytest.mark.parametrize("text", ["", "näïve ☃ 日本語", "a\x00b", "x" * 100_000])
def test_sends_any_unicode_text_unchanged(client, server, text):
    client.embed([text])

    assert server.model.requests[0].texts == [text]


def test_an_empty_input_sends_no_request(client, server):
    assert client.embed([]).shape == (0, 3)
    assert server.model.requests == []


def test_sends_only_the_parameters_that_were_given(client, server):
    client.embed(["a"])
    options = {"deadline_ms": 60_000.5, "priority": 9, "tenant": "shop", "cache_salt": "x"}
    client.embed(["a"], normalize=False, truncate=True, **options)

    bare, full = (received.parameters for received in server.model.requests)
    assert not {"normalize", "truncate", "deadline_ms", "request_priority"} & set(bare)
    assert full["normalize"] is False
    assert full["truncate"] is True
    # the rest of it when the request is sent
    assert 0 < full["deadline_ms"] <= 60_000.5
    assert full["request_priority"] == 9
    assert full["tenant"] == "shop"
    assert full["cache_salt"] == "x"


@pytest.mark.parametrize("task", ["classify", "rerank", "token_classify", "hidden", "token_embed"])
def test_every_method_sends_the_deadline_and_the_priority(client, server, task):
    server.model.task = task
    arguments = ("q", ["a"]) if task == "rerank" else (["a"],)

    getattr(client, task)(*arguments, deadline_ms=60_000, priority=1, truncate=True)

    (received,) = server.model.requests
    assert received.parameters["request_priority"] == 1
    assert received.parameters["truncate"] is True
    # the rest of it when the request is sent
    assert 0 < received.parameters["deadline_ms"] <= 60_000


@pytest.mark.parametrize("counts", [True, False], ids=["counted", "not counted"])
@pytest.mark.parametrize(
    "model, task, inputs, options",
    [
        ("embed", EMBED, TEXTS, {"dimensions": 2}),
        ("sparse_embed", SPARSE_EMBED, TEXTS, {"with_terms": True}),
        ("classify", PREDICT, TEXTS, {"top_k": 1}),
        ("rerank", RERANK, query_and_documents("query", TEXTS), {}),
    ],
)
def test_answers_come_with_their_number_of_tokens(
    client, server, model, task, inputs, options, counts
):
    server.model.task, server.model.counts_tokens = model, counts
    arguments = ("query", TEXTS) if task is RERANK else (inputs,)
    expected = getattr(client, task.method)(*arguments, **options)
    server.model.requests.clear()

    answer, tokens = client.counted(task, inputs, truncate=True, **options)

    received = server.model.requests
    assert all(each.parameters["truncate"] for each in received)
    sent = sum(int(server.model.num_tokens(each).sum()) for each in received)
    assert sent > 0
    assert tokens == (sent if counts else None)
    # vectors in dataclasses have no ==
    assert repr(answer) == repr(expected)
    nothing, tokens = client.counted(task, [])
    assert (len(nothing), tokens) == (0, 0 if counts else None)


def test_labels_of_tokens_count_them_anyway(client, server):
    server.model.task = "token_classify"

    rows, tokens = client.counted(PREDICT_TOKENS, ["one", "two words"])

    assert [len(row) for row in rows] == [1, 2]
    assert tokens == 3


def test_an_empty_setting_of_the_model_is_no_failure(client, server, vectors_of):
    server.model.more_settings = {"cache_folder": {"string_value": ""}}

    np.testing.assert_array_equal(client.embed(["a"]), vectors_of(["a"]))


@pytest.mark.parametrize("method", ["embed", "classify", "predict", "hidden"])
def test_an_unknown_option_is_a_type_error(client, server, method):
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'trunctate'"):
        getattr(client, method)(["a"], trunctate=True)
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'trunctate'"):
        client.counted(EMBED, ["a"], trunctate=True)

    assert server.model.requests == []


def test_classifies_texts_and_pairs(client, server):
    server.model.task = "classify"

    assert client.classify(["ab", "c"]).tolist() == [[2, 0], [1, 0]]
    assert client.classify([("ab", "xyz"), ("c", "")]).tolist() == [[2, 3], [1, 0]]


def test_ranks_documents_against_the_query(client, server):
    server.model.task = "rerank"

    scores = client.rerank("ab", ["d" * n for n in range(20)])

    assert scores.tolist() == [200 + n for n in range(20)]


def test_rerank_needs_a_model_of_one_label(client, server):
    server.model.task = "classify"

    with pytest.raises(InvalidRequest, match="gives 2 values per row; rerank needs 1"):
        client.rerank("q", ["d"])


def test_vectors_of_tokens_have_the_role_of_their_text(client, server):
    server.model.task = "token_embed"

    client.token_embed(["one"], prompt_name="query", normalize=False)
    client.token_embed(["one"], input_type="passage")

    received, meaning = server.model.requests
    assert meaning.parameters["input_type"] == "passage"
    assert {"prompt_name": "query", "normalize": False}.items() <= received.parameters.items()
    assert received.outputs == ("token_embeddings",)
    with pytest.raises(TypeError, match="unexpected keyword argument 'dimensions'"):
        client.token_embed(["one"], dimensions=2)


@pytest.mark.parametrize("method", ["hidden", "token_classify", "token_embed"])
def test_outputs_per_token_are_one_array_per_row(client, server, method):
    server.model.task = method

    arrays = getattr(client, method)(["one", "one two three", "four five"])

    assert [len(array) for array in arrays] == [1, 3, 2]
    np.testing.assert_array_equal(arrays[0][0], arrays[1][0])
    assert all(array.flags.writeable for array in arrays)


def test_a_model_of_another_task_is_refused_with_its_outputs(client, server):
    with pytest.raises(InvalidRequest, match=r"does not serve classify: its task is embed"):
        client.classify(["a"])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ("one string", "pass a list"),
        (["text", 3], "row 1 is int; expected text"),
        ([[1, 2], "text"], "row 1 is text"),
        ([[1.5]], "row 0 is neither text nor a list of token ids"),
        ([[[1]]], "row 0 is neither"),
        ([[1], [2, [3]]], "row 1 is neither"),
        (["\ud800"], "row 0 is not valid Unicode"),
    ],
)
def test_refuses_bad_input_before_sending(client, server, inputs, message):
    with pytest.raises(InvalidRequest, match=message):
        client.embed(inputs)

    assert server.model.requests == []


def test_refuses_a_mix_of_texts_and_pairs(client):
    with pytest.raises(InvalidRequest, match="row 0 is not a pair of texts"):
        client.classify(["a", ("b", "c")])


def test_an_output_of_another_dtype_is_a_server_error(client, server):
    server.model.output_dtype = np.float64

    with pytest.raises(ServerError, match="sentence_embedding is float64"):
        client.embed(["a"])


def test_uses_the_only_ready_model(server):
    server.model.models = [("other", "UNAVAILABLE"), ("fake", "READY")]

    with Client(server.url) as client:
        assert client.embed(["a"]).shape == (1, 3)
        assert client.status().model == "fake"


def test_lists_the_models_when_there_are_several(server):
    server.model.models = [("fake", "READY"), ("another", "READY")]

    with Client(server.url) as client, pytest.raises(ModelNotFound, match="another, fake"):
        client.embed(["a"])


def test_an_unknown_model_is_not_found(server):
    with Client(server.url, "nope") as client, pytest.raises(ModelNotFound, match="unknown model"):
        client.embed(["a"])


def test_ready_needs_the_server_and_the_model(server):
    with Client(server.url) as client:
        assert client.ready() is True
        server.model.models = [("fake", "LOADING")]
        assert client.ready() is False
        server.model.models = [("fake", "READY")]
        server.model.server_ready = False
        assert client.ready() is False


def test_status_reports_the_server_and_its_models(client, server):
    server.model.models = [("fake", "READY"), ("other", "UNAVAILABLE")]

    status = client.status()

    assert (status.server_ready, status.model, status.model_ready) == (True, "fake", True)
    assert status.server.version == "0.1"
    assert [(model.name, model.ready) for model in status.models] == server_states(server)


def server_states(server):
    return [(name, state == "READY") for name, state in server.model.models]


def test_one_client_serves_many_threads(client, vectors_of):
    failures = []

    def embed(name):
        texts = [f"{name} {n}" for n in range(20)]
        try:
            np.testing.assert_array_equal(client.embed(texts), vectors_of(texts))
        except (AssertionError, VarlenClientError) as error:
            failures.append(error)

    threads = [threading.Thread(target=embed, args=(name,)) for name in "abcdef"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == []


def test_reports_progress_up_to_the_last_row(client):
    done = []

    client.embed(TEXTS, on_progress=done.append)

    assert done == sorted(done)
    assert done[-1] == len(TEXTS)


@pytest.mark.parametrize("option", [{"concurrency": 0}, {"rows_per_request": 0}])
def test_refuses_settings_below_one(option):
    with pytest.raises(ValueError, match="at least 1"):
        Client("grpc://127.0.0.1:1", **option)
