"""`/rerank`, `/v1/rerank` and `/predict` of the gateway."""

import numpy as np
import pytest

from .fake_models import score_of

TEXTS = ["first", "second one", "third"]
PAIRS = [("query", text) for text in TEXTS]
SCORES = [score_of(pair) for pair in PAIRS]


def test_ranks_texts_the_best_first(post, calls):
    ranks = post("/rerank", model="ranker", query="query", texts=TEXTS)

    assert [rank["index"] for rank in ranks] == np.argsort(SCORES)[::-1].tolist()
    assert ranks == [{"index": at["index"], "score": SCORES[at["index"]]} for at in ranks]
    assert calls.received == [("ranker", "rerank", PAIRS, {"activation": "sigmoid"})]


def test_documents_are_another_name_of_texts(post, refusal):
    body = {"model": "ranker", "query": "query", "return_text": True}

    assert post("/rerank", documents=TEXTS, **body) == post("/rerank", texts=TEXTS, **body)
    _, error = refusal("/rerank", documents=TEXTS, texts=TEXTS, **body)
    assert error["message"] == "documents is not supported"


def test_raw_scores_and_texts_on_request(post, calls):
    options = {"raw_scores": True, "return_text": True, "truncate": True}
    ranks = post("/rerank", model="ranker", query="query", texts=TEXTS, **options)

    assert all(rank["text"] == TEXTS[rank["index"]] for rank in ranks)
    expected = {"activation": None, "truncate": True, "truncation_side": "right"}
    assert calls.received[0][3] == expected


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
def test_documents_are_ranked_as_by_cohere_and_jina(post, calls, path):
    documents = [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]

    answer = post(path, model="ranker", query="query", documents=documents)

    order = np.argsort(SCORES)[::-1].tolist()
    assert answer.pop("id").startswith("rerank-")
    tokens = sum(map(len, TEXTS))
    assert answer == {
        "model": "ranker",
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "results": [
            {"index": at, "relevance_score": SCORES[at], "document": {"text": TEXTS[at]}}
            for at in order
        ],
    }
    assert calls.received == [("ranker", "rerank", PAIRS, {"activation": "sigmoid"})]


@pytest.mark.parametrize("top_n, ranks", [(1, 1), (3, 3), (9, 3)])
def test_the_best_documents_alone_without_their_texts(post, calls, top_n, ranks):
    calls.counts_tokens = False
    options = {"top_n": top_n, "return_documents": False}

    answer = post("/v1/rerank", model="ranker", query="query", documents=TEXTS, **options)

    assert answer.keys() == {"id", "model", "results"}
    assert [each["index"] for each in answer["results"]] == np.argsort(SCORES)[::-1][
        :ranks
    ].tolist()
    assert all(each.keys() == {"index", "relevance_score"} for each in answer["results"])


@pytest.mark.parametrize(
    "inputs, rows",
    [
        ("a", ["a"]),
        (["a"], ["a"]),
        (["a", "b"], [("a", "b")]),
        ([["a"], ["b"]], ["a", "b"]),
        ([["a", "b"], ["c", "d"]], [("a", "b"), ("c", "d")]),
    ],
    ids=["text", "list", "pair", "batch", "batch of pairs"],
)
def test_predicts_labels_of_texts_and_pairs(post, calls, inputs, rows):
    answer = post("/predict", model="classifier", inputs=inputs)

    assert calls.received == [("classifier", "predict", rows, {"activation": "auto"})]
    is_batch = isinstance(inputs, list) and isinstance(inputs[0], list)
    expected = [
        [{"score": score_of(row), "label": "best"}, {"score": -9.0, "label": "other"}]
        for row in rows
    ]
    assert answer == (expected if is_batch else expected[0])


@pytest.mark.parametrize(
    "inputs", [[], [["a"], ["b", "c"]], ["a", "b", "c"], [[]]], ids=["none", "mixed", "3", "empty"]
)
def test_rows_are_texts_or_pairs(refusal, inputs):
    status, error = refusal("/predict", model="classifier", inputs=inputs)

    assert status == 400
    assert "allowed: one text in each row, or two" in error["message"]


def test_a_batch_has_no_more_rows_than_other_requests(refusal, calls):
    status, error = refusal("/predict", model="classifier", inputs=[["a"]] * 2049)

    assert status == 400
    assert error["message"] == "inputs has 2049 rows; allowed: 1 to 2048"
    assert calls.received == []


@pytest.mark.parametrize(
    "path, body",
    [
        ("/rerank", {"query": "q", "texts": []}),
        ("/rerank", {"texts": ["a"]}),
        ("/rerank", {"query": "q", "documents": [5]}),
        ("/predict", {}),
        ("/v1/rerank", {"query": "q", "documents": []}),
        ("/v1/rerank", {"query": "q", "documents": ["a"] * 2049}),
        ("/v1/rerank", {"query": "q", "documents": [{"title": "a"}]}),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "top_n": 0}),
    ],
    ids=["texts", "query", "number", "inputs", "documents", "too many", "not a text", "top_n"],
)
def test_a_wrong_body_is_refused(refusal, calls, path, body):
    status, error = refusal(path, **body)

    assert status == 400
    assert error["param"].split(".")[0] in ("query", "texts", "inputs", "documents", "top_n")
    assert calls.received == []
