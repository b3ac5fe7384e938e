"""`/rerank`, `/v1/rerank`, `/v1/score` and `/predict` of the gateway."""

import numpy as np
import pytest

from varlen_client.gateway.ranks import cosines

from .fake_models import score_of, vector_of

TEXTS = ["first", "second one", "third"]
PAIRS = [("query", text) for text in TEXTS]
RANKED = {"model": "ranker", "query": "query", "documents": TEXTS}
SCORES = [score_of(pair) for pair in PAIRS]
VECTORS = np.random.default_rng(0).normal(size=(6, 24)).astype(np.float32)


def test_ranks_texts_the_best_first(post, calls):
    ranks = post("/rerank", model="ranker", query="query", texts=TEXTS)

    assert [rank["index"] for rank in ranks] == np.argsort(SCORES)[::-1].tolist()
    assert ranks == [{"index": at["index"], "score": SCORES[at["index"]]} for at in ranks]
    assert calls.received == [
        ("ranker", "rerank", PAIRS, {"activation": "sigmoid", "truncate": True})
    ]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank", "/infinity/rerank"])
def test_texts_of_equal_scores_are_in_the_order_of_their_logits(post, calls, path):
    calls.scores_of = np.ones_like

    ranks = post(path, **RANKED)

    ranked = [each["index"] for each in ranks["results"]]
    assert ranked == np.argsort(SCORES)[::-1].tolist()


def test_documents_choose_the_form_of_v1_rerank(post):
    body = {"model": "ranker", "query": "query", "top_n": 2}

    found, expected = (post(path, documents=TEXTS, **body) for path in ("/rerank", "/v1/rerank"))

    assert found.pop("id") != expected.pop("id")
    assert found == expected
    assert len(found["results"]) == 2


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "the request has neither texts nor documents; send texts for an answer in the form"),
        ({"texts": ["a"], "documents": ["a"]}, "the request has texts and documents; send texts"),
        ({"texts": ["a"], "return_documents": True}, "and return_documents; send return_text"),
        ({"documents": ["a"], "return_text": True}, "and return_text; send return_documents"),
    ],
    ids=["neither", "both", "tei", "cohere"],
)
def test_the_two_forms_of_rerank_are_not_mixed(refusal, calls, options, message):
    status, error = refusal("/rerank", model="ranker", query="q", **options)

    assert status == 400
    assert message in error["message"]
    assert calls.received == []


@pytest.mark.parametrize("name", ["instruction", "instruct"])
def test_an_instruction_goes_to_the_model(post, calls, name):
    post("/v1/rerank", **RANKED, **{name: "find"})
    post("/v1/score", model="ranker", text_1="query", text_2=TEXTS, **{name: "find"})

    assert [call[3] for call in calls.received] == [
        {"activation": "sigmoid", "instruction": "find"},
        {"activation": "sigmoid", "instruction": "find"},
    ]


def test_an_instruction_has_one_name_and_no_embeddings(refusal, calls):
    status, error = refusal("/v1/rerank", **RANKED, instruction="a", instruct="b")
    assert (status, error["message"]) == (
        400,
        "the request has instruction and instruct; send one of them",
    )

    _, error = refusal(
        "/v1/score", model="embedder", text_1="query", text_2=TEXTS, instruction="find"
    )
    assert "gives embeddings, whose documents have no instruction" in error["message"]
    assert calls.received == []


def test_the_best_texts_only(post):
    ranks = post("/rerank", model="ranker", query="query", texts=TEXTS, top_n=1)

    assert [rank["index"] for rank in ranks] == [int(np.argmax(SCORES))]


@pytest.mark.parametrize(
    "path, has_documents",
    [("/rerank", True), ("/v1/rerank", True), ("/v2/rerank", False), ("/infinity/rerank", False)],
)
def test_each_path_has_documents_by_default_as_its_interface_has(post, path, has_documents):
    for options, expected in (
        ({}, has_documents),
        ({"return_documents": True}, True),
        ({"return_documents": False}, False),
    ):
        results = post(path, **RANKED, **options)["results"]
        assert [("document" in each) for each in results] == [expected] * len(TEXTS)


def test_infinitys_documents_are_strings(post):
    answer = post("/infinity/rerank", **RANKED, return_documents=True)

    assert [each["document"] for each in answer["results"]] == [
        TEXTS[each["index"]] for each in answer["results"]
    ]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(
    "body, pairs",
    [
        ({"text_1": "query", "text_2": TEXTS}, PAIRS),
        ({"queries": ["query"], "documents": TEXTS}, PAIRS),
        ({"text_1": "a", "text_2": "b"}, [("a", "b")]),
        ({"text_1": ["a", "b"], "text_2": ["c", "d"]}, [("a", "c"), ("b", "d")]),
    ],
    ids=["one with many", "queries", "two", "pairs"],
)
def test_pairs_are_scored_in_their_order(post, calls, path, body, pairs):
    answer = post(path, model="ranker", **body)

    assert answer["data"] == [
        {"index": index, "object": "score", "score": score_of(pair)}
        for index, pair in enumerate(pairs)
    ]
    assert answer["id"].startswith("score-")
    assert (answer["object"], answer["model"]) == ("list", "ranker")
    assert answer["usage"]["total_tokens"] > 0
    assert calls.received == [("ranker", "rerank", pairs, {"activation": "sigmoid"})]


def test_logits_of_pairs_on_request(post, calls):
    post("/score", model="ranker", text_1="a", text_2="b", use_activation=False)

    assert calls.received[0][3] == {"activation": None}


def test_an_embedding_models_scores_are_cosines(post, calls):
    answer = post("/score", model="embedder", text_1=["ab", "c"], text_2=["c", "c"], truncate=True)

    left, same = vector_of("ab"), vector_of("c")
    found = [each["score"] for each in answer["data"]]
    np.testing.assert_allclose(found, [left @ same, 1.0], rtol=1e-5)
    options = {"normalize": True, "truncate": True}
    # each text is embedded once
    assert calls.received == [("embedder", "embed", ["ab", "c"], options)]


@pytest.mark.parametrize(
    "body, message",
    [
        ({"text_2": "a"}, "the request has no text_1; send text_1"),
        ({"text_1": "a", "queries": "a", "text_2": "a"}, "text_1 and queries; send text_1"),
        ({"text_1": ["a", "b"], "text_2": "a"}, "text_1 has 2 texts and text_2 1; allowed: one"),
        ({"text_1": "a", "text_2": []}, "text_2, which has 1 to 2048"),
        ({"text_1": "a", "text_2": ["a"] * 2049}, "text_2 2049; allowed"),
        (
            {"queries": "a", "documents": ["a"] * 3000},
            "queries has 1 texts and documents 3000; allowed: one text in queries",
        ),
        (
            {"queries": "a" * (1 << 20), "documents": ["a"] * 100},
            "queries has 1048576 characters for 100 pairs",
        ),
        ({"text_1": "a", "text_2": "a", "use_activation": True}, "has no activation"),
        ({"text_1": "a", "text_2": "a", "truncation_side": "left"}, "no text is cut"),
    ],
    ids=["missing", "twice", "more", "none", "many", "names", "long", "activation", "side"],
)
def test_sides_that_do_not_fit_are_refused(refusal, calls, body, message):
    status, error = refusal("/v1/score", model="embedder", **body)

    assert status == 400
    assert message in error["message"]
    assert calls.received == []


def test_raw_scores_and_texts_on_request(post, calls):
    options = {"raw_scores": True, "return_text": True, "truncate": True}
    ranks = post("/rerank", model="ranker", query="query", texts=TEXTS, **options)

    assert all(rank["text"] == TEXTS[rank["index"]] for rank in ranks)
    expected = {"activation": "none", "truncate": True}
    assert calls.received[0][3] == expected


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
def test_documents_are_ranked_as_by_cohere_and_jina(post, calls, path):
    documents = [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]

    answer = post(path, model="ranker", query="query", documents=documents, return_documents=True)

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
    assert [call[:3] for call in calls.received] == [("ranker", "rerank", PAIRS)]
    assert calls.received[0][3]["activation"] == "sigmoid"


@pytest.mark.parametrize("top_n, ranks", [(1, 1), (3, 3), (9, 3), (0, 3)])
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

    options = {"activation": "auto", "truncate": True}
    assert calls.received == [("classifier", "predict", rows, options)]
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
        ("/rerank", {"query": "q", "texts": [5]}),
        ("/predict", {}),
        ("/v1/rerank", {"query": "q", "documents": []}),
        ("/v1/rerank", {"query": "q", "documents": ["a"] * 2049}),
        ("/v1/rerank", {"query": "q", "documents": [{"title": "a"}]}),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "top_n": -1}),
    ],
    ids="texts query document number inputs documents many not-a-text top_n".split(),
)
def test_a_wrong_body_is_refused(refusal, calls, path, body):
    status, error = refusal(path, **body)

    assert status == 400
    assert error["param"].split(".")[0] in ("query", "texts", "inputs", "documents", "top_n")
    assert calls.received == []


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_cosines_are_those_of_float64(size):
    left, right = VECTORS * np.float32(size), VECTORS[::-1]
    wide = left.astype(np.float64), right.astype(np.float64)
    lengths = [np.linalg.norm(each, axis=1) for each in wide]

    found = cosines(left, right)

    expected = np.sum(wide[0] * wide[1], axis=1) / lengths[0] / lengths[1]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    np.testing.assert_allclose(cosines(left, left), 1, rtol=1e-15)
    np.testing.assert_allclose(cosines(left, left[0])[0], 1, rtol=1e-15)


def test_the_cosine_with_a_vector_of_zeros_is_zero():
    assert not cosines(VECTORS, np.zeros_like(VECTORS)).any()


@pytest.mark.parametrize(
    "path, fields, is_cut",
    [
        ("/v2/rerank", {}, True),
        ("/v2/rerank", {"truncate": False}, False),
        ("/infinity/rerank", {}, True),
        ("/v1/rerank", {}, False),
        ("/v1/rerank", {"truncate": "END"}, True),
    ],
)
def test_documents_are_cut_by_default_where_the_original_cuts_them(
    post, calls, path, fields, is_cut
):
    post(path, model="ranker", query="a", documents=["b"], **fields)

    assert ("truncate" in calls.received[0][3]) is is_cut


@pytest.mark.parametrize("path", ["/predict", "/"])
def test_labels_of_a_request_are_judged_by_entailment(post, calls, path):
    parameters = {"candidate_labels": ["sea", "land"], "hypothesis_template": "It is {}."}

    one = post(path, model="classifier", inputs="first", parameters=parameters)
    [same, other] = post(path, model="classifier", inputs=["first", "second"], **parameters)

    assert one == same
    assert (one["sequence"], other["sequence"]) == ("first", "second")
    assert sorted(one["labels"]) == ["land", "sea"]
    assert one["scores"] == sorted(one["scores"], reverse=True)
    assert sum(one["scores"]) == pytest.approx(1)
    pairs = [("first", "It is sea."), ("first", "It is land.")]
    assert calls.received[0] == ("classifier", "zero_shot", pairs, {"truncate": True})


@pytest.mark.parametrize(
    "options, message",
    [
        ({"multi_label": True}, "has multi_label and no candidate_labels; send both"),
        ({"candidate_labels": []}, "candidate_labels has 0 labels; allowed: 1 to 512"),
        ({"candidate_labels": "a", "hypothesis_template": "{x}"}, "hypothesis_template is"),
        ({"candidate_labels": "a", "inputs": [["a", "b"]]}, "is for single texts"),
        ({"candidate_labels": ["a"] * 500, "inputs": ["a"] * 5}, "allowed: 2048 pairs"),
        (
            {"candidate_labels": ["a" * (1 << 20)], "inputs": ["a"] * 100},
            "candidate_labels has 1048576 characters for 100 pairs",
        ),
        ({"candidate_labels": "a", "hypothesis_template": ""}, "hypothesis_template is ''"),
        ({"candidate_labels": "a", "top_k": 1}, "has top_k and candidate_labels; send one"),
        ({"aggregation_strategy": "none", "candidate_labels": "a"}, "aggregation_strategy and"),
        ({"model": "tagger", "raw_scores": True}, "raw_scores, which is for labels of whole"),
        ({"ignore_labels": ["MISC"]}, "ignore_labels is not supported: tokens with the label O"),
        ({"aggregation_strategy": "simple"}, "labels whole texts, which have no entities"),
    ],
)
def test_wrong_options_of_labels_are_refused(refusal, calls, options, message):
    status, error = refusal("/predict", **({"model": "classifier", "inputs": "a"} | options))

    assert status == 400
    assert message in error["message"]
    assert calls.received == []


@pytest.mark.parametrize("path", ["/predict", "/"])
def test_a_model_that_labels_tokens_answers_with_entities(post, calls, path):
    one = post(path, model="tagger", inputs="Ada")
    many = post(path, model="tagger", inputs=["Ada"], parameters={"aggregation_strategy": "none"})

    # the server names the fields, as the pipeline does
    assert one == [{"entity_group": "Pé", "end": 3}]
    assert many == [one]
    strategies = [call[3]["aggregation_strategy"] for call in calls.received]
    assert strategies == ["simple", "none"]


QUESTION = {"question": "who?", "context": "Ada Lovelace"}
ANSWER = {"score": 0.5, "start": 0, "end": 3, "answer": "Ada"}
NO_ANSWER = {"score": 0.25, "start": 0, "end": 0, "answer": ""}


def test_a_model_that_answers_questions_has_the_form_of_the_pipeline(post, calls):
    given = {"top_k": 2, "handle_impossible_answer": True, "max_question_len": 64}
    two = post("/", model="answerer", inputs=QUESTION, parameters=given)
    one = post("/", model="answerer", inputs={**QUESTION, "question": "?"}, doc_stride=0)
    many = post("/", model="answerer", inputs=[QUESTION, {**QUESTION, "question": "?"}])

    assert two == [ANSWER, NO_ANSWER]
    # one answer is no list
    assert one == ANSWER
    assert many == [[ANSWER, NO_ANSWER], ANSWER]
    assert calls.received[0][1:3] == ("question_answer", [("who?", "Ada Lovelace")])
    options = [given_to(call) for call in calls.received]
    assert options == [{"top_k": 2, "handle_impossible_answer": True}, {"doc_stride": 0}, {}]


def given_to(call):
    """Return the options of a call that are not None."""
    return {name: each for name, each in call[3].items() if each is not None}


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"inputs": "who?"}, "inputs is 'who?': Input should be"),
        ({"inputs": {"question": "who?"}}, "inputs.context: Field required"),
        ({"inputs": []}, "inputs has 0 rows"),
        ({"top_k": 0}, "top_k is 0"),
        ({"truncate": True}, "truncate is not supported"),
        ({"parameters": {"truncate_prompt_tokens": 3}}, "truncate_prompt_tokens"),
    ],
)
def test_wrong_questions_are_refused(refusal, calls, wrong, message):
    status, error = refusal("/", **{"model": "answerer", "inputs": QUESTION, **wrong})

    assert status == 400
    assert message in error["message"]
    assert calls.received == []
