"""`/rerank` and `/predict` of the gateway."""

import numpy as np
import pytest

from .fake_models import score_of

TEXTS = ["first", "second one", "third"]
SCORES = [score_of(("query", text)) for text in TEXTS]


def test_ranks_texts_the_best_first(post, calls):
    ranks = post("/rerank", model="ranker", query="query", texts=TEXTS)

    assert [rank["index"] for rank in ranks] == np.argsort(SCORES)[::-1].tolist()
    assert ranks == [{"index": at["index"], "score": SCORES[at["index"]]} for at in ranks]
    assert calls.received == [("ranker", "rerank", ("query", TEXTS), {"activation": "sigmoid"})]


def test_raw_scores_and_texts_on_request(post, calls):
    options = {"raw_scores": True, "return_text": True, "truncate": True}
    ranks = post("/rerank", model="ranker", query="query", texts=TEXTS, **options)

    assert all(rank["text"] == TEXTS[rank["index"]] for rank in ranks)
    expected = {"activation": None, "truncate": True, "truncation_side": "right"}
    assert calls.received[0][3] == expected


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
    [("/rerank", {"query": "q", "texts": []}), ("/rerank", {"texts": ["a"]}), ("/predict", {})],
    ids=["no texts", "no query", "no inputs"],
)
def test_a_wrong_body_is_refused(refusal, calls, path, body):
    status, error = refusal(path, **body)

    assert status == 400
    assert error["param"] in ("query", "texts", "inputs")
    assert calls.received == []
