"""`/v1/embeddings`, `/embed` and `/embed_sparse` of the gateway."""

import base64

import numpy as np
import pytest

from . import fake_models
from .fake_models import tokens_of, vector_of


@pytest.mark.parametrize(
    "given, rows",
    [
        ("a text", ["a text"]),
        (["a", "b c"], ["a", "b c"]),
        ([1, 6, 7], [[1, 6, 7]]),
        ([[1], [1, 7]], [[1], [1, 7]]),
    ],
    ids=["text", "texts", "ids", "rows of ids"],
)
@pytest.mark.parametrize("path, name", [("/v1/embeddings", "input"), ("/embed", "inputs")])
def test_texts_and_token_ids_are_rows(post, calls, path, name, given, rows):
    answer = post(path, model="embedder", **{name: given})

    vectors = answer if path == "/embed" else [each["embedding"] for each in answer["data"]]
    np.testing.assert_array_equal(np.float32(vectors), np.stack([vector_of(row) for row in rows]))
    assert calls.received[-1][:3] == ("embedder", "embed", rows)


def test_an_answer_has_openais_form(post):
    answer = post("/v1/embeddings", model="embedder", input=["ab", "c"])

    assert answer["object"] == "list"
    assert answer["model"] == "embedder"
    assert [each["index"] for each in answer["data"]] == [0, 1]
    assert {each["object"] for each in answer["data"]} == {"embedding"}
    assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 3}


def test_base64_holds_little_endian_floats(post):
    answer = post("/v1/embeddings", model="embedder", input="ab", encoding_format="base64")

    raw = base64.b64decode(answer["data"][0]["embedding"])
    np.testing.assert_array_equal(np.frombuffer(raw, "<f4"), vector_of("ab"))


def test_dimensions_are_the_servers_work(post, calls):
    answer = post("/v1/embeddings", model="embedder", input="ab", dimensions=2)

    assert len(answer["data"][0]["embedding"]) == 2
    assert calls.received[0][3] == {"dimensions": 2}


@pytest.mark.parametrize(
    "options, parameters",
    [
        ({"truncate": True}, {"truncate": True}),
        (
            {"truncate_prompt_tokens": -1, "truncation_side": "left"},
            {"truncate": True, "truncation_side": "left"},
        ),
        ({"truncate_prompt_tokens": 7}, {"truncate_prompt_tokens": 7}),
        (
            {"truncate_prompt_tokens": "7", "truncate": "START"},
            {"truncate_prompt_tokens": 7, "truncation_side": "left"},
        ),
        ({"truncation_side": "right"}, {}),
        ({"truncate": False, "truncation_side": "left"}, {}),
        ({"truncate": "NONE"}, {}),
        ({"truncate": "START"}, {"truncate": True, "truncation_side": "left"}),
        ({"truncate": "END"}, {"truncate": True, "truncation_side": "right"}),
        ({"prompt_name": "query"}, {"prompt_name": "query"}),
        ({"prompt": "find: "}, {"prompt": "find: "}),
        ({"instruct": "find"}, {"instruction": "find"}),
        ({"instruction": "find", "instruct": ""}, {"instruction": "find"}),
        ({"cache_salt": "a"}, {"cache_salt": "a"}),
        ({"input_type": "passage", "modality": "text"}, {"input_type": "passage"}),
        ({"normalize": False, "output_dimension": 2}, {"normalize": False, "dimensions": 2}),
        ({"truncation": "true"}, {"truncate": True}),
        ({"truncation": False, "input_type": "query"}, {"input_type": "query"}),
        (
            {"task": "retrieval.passage", "normalized": True},
            {"input_type": "document", "normalize": True},
        ),
    ],
    ids=(
        "truncate vllm tokens tokens-left side uncut none start end prompt own-prompt instruct instruction salt nim"
        " infinity voyage uncut-voyage jina"
    ).split(),
)
def test_openais_embeddings_take_options_of_texts(post, calls, options, parameters):
    post("/v1/embeddings", model="embedder", input="ab", **options)

    assert calls.received[0][3] == parameters


@pytest.mark.parametrize(
    "options, message",
    [
        ({"truncation_side": "left"}, "truncation_side is left, but no text is cut"),
        ({"truncate": "START", "truncation_side": "right"}, "truncate START and truncation_side"),
        (
            {"truncation_side": "left", "truncation_direction": "Right", "truncate": True},
            "truncation_side left and truncation_direction Right; send one of them",
        ),
        (
            {"truncate": False, "truncate_prompt_tokens": -1},
            "truncate_prompt_tokens is -1, but truncate forbids it",
        ),
        ({"dimensions": 2, "output_dimension": 2}, "dimensions and output_dimension"),
        ({"truncate": True, "truncation": False}, "truncate and truncation; send one of them"),
        ({"task": "separation", "input_type": "query"}, "input_type and task; send one of them"),
        ({"truncate": "MIDDLE"}, "truncate is 'MIDDLE'"),
        ({"input_type": "image"}, "input_type is 'image'"),
        ({"modality": "image"}, "modality is 'image'"),
    ],
    ids="side contradiction two-sides forbidden two-names voyage jina truncate type modality".split(),
)
def test_options_that_contradict_each_other_or_are_not_served(refusal, calls, options, message):
    status, error = refusal("/v1/embeddings", model="embedder", input="ab", **options)

    assert status == 400
    assert message in error["message"]
    assert calls.received == []


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/embeddings", {"model": "embedder", "input": "ab"}),
        ("/embed", {"model": "embedder", "inputs": "ab"}),
        ("/rerank", {"model": "ranker", "query": "a", "texts": ["b"]}),
        ("/v1/rerank", {"model": "ranker", "query": "a", "documents": ["b"]}),
        ("/predict", {"model": "classifier", "inputs": "ab"}),
        ("/v1/score", {"model": "ranker", "text_1": "a", "text_2": "b"}),
    ],
)
def test_a_gateway_may_cut_texts_by_default(send, make_app, calls, path, body):
    app = make_app(auto_truncate=True)
    for options in ({}, {"truncation_side": "left"}, {"truncate": False}):
        assert send("POST", path, body | options, app=app).status_code == 200

    found = [(given.get("truncate"), given.get("truncation_side")) for *_, given in calls.received]
    assert found == [(True, None), (True, "left"), (None, None)]


def test_infinitys_clients_have_a_path_of_their_own(post):
    body = {"model": "embedder", "input": ["ab", "c"], "encoding_format": "base64"}

    assert post("/infinity/embeddings", **body) == post("/v1/embeddings", **body)


def test_a_model_that_does_not_count_tokens_has_no_usage(post, calls):
    calls.counts_tokens = False

    assert "usage" not in post("/v1/embeddings", model="embedder", input="ab")


@pytest.mark.parametrize(
    "options, parameters",
    [
        ({}, {"normalize": True, "truncate": True}),
        ({"normalize": False, "truncate": False}, {"normalize": False}),
        (
            {"truncate": True, "truncation_direction": "Left"},
            {"normalize": True, "truncate": True, "truncation_side": "left"},
        ),
        (
            {"truncate_prompt_tokens": 5, "dimensions": 2},
            {"normalize": True, "truncate_prompt_tokens": 5, "dimensions": 2},
        ),
        (
            {"prompt_name": "query"},
            {"normalize": True, "truncate": True, "prompt_name": "query"},
        ),
    ],
    ids=["none", "uncut", "left", "dimensions", "prompt"],
)
def test_embed_passes_its_options_on(post, calls, options, parameters):
    post("/embed", model="embedder", inputs="ab", **options)

    assert calls.received[0][3] == parameters


@pytest.mark.parametrize(
    "body, param, message",
    [
        ({}, "input", "input: Field required"),
        ({"input": 5}, "input", "input is 5: Input should be a valid string"),
        ({"input": ["a", 5]}, "input", "Input should be a valid string"),
        ({"input": []}, None, "input has 0 rows; allowed: 1 to 2048"),
        ({"input": ["a"] * 2049}, None, "input has 2049 rows"),
        ({"input": "a", "dimensions": 0}, "dimensions", "dimensions is 0: Input should be greater"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "a", "output_dtype": "int8"}, "output_dtype", "is not supported: vectors are"),
        (
            {"input": "a", "truncate_prompt_tokens": 0},
            "truncate_prompt_tokens",
            "truncate_prompt_tokens is 0: Input should be -1",
        ),
    ],
    ids="nothing number mixed empty many dimensions format unknown tokens".split(),
)
def test_a_wrong_body_is_refused_by_name(refusal, calls, body, param, message):
    status, error = refusal("/v1/embeddings", model="embedder", **body)

    assert status == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert message in error["message"]
    assert calls.received == []


def test_nulls_and_the_user_change_nothing(post, calls):
    asked = {"model": "embedder", "input": "a"}
    plain = post("/v1/embeddings", **asked)

    assert post("/v1/embeddings", **asked, dimensions=None, user="someone") == plain
    first, second = calls.received
    assert first == second


def test_sparse_vectors_are_lists_of_terms(post, calls):
    options = {"truncate": True, "truncation_direction": "Left", "prompt_name": "query"}

    answer = post("/embed_sparse", model="embedder", inputs=["ab", "c"], **options)

    assert answer == [
        [{"index": 11, "value": 2.5}, {"index": 6, "value": 1.0}],
        [{"index": 10, "value": 2.5}, {"index": 5, "value": 1.0}],
    ]
    given = {"truncate": True, "truncation_side": "left", "prompt_name": "query"}
    assert calls.received == [("embedder", "sparse_embed", ["ab", "c"], given)]


def test_numbers_that_json_does_not_have_are_null(post, monkeypatch):
    vector = np.array([np.nan, -np.inf, np.inf, 1.5], np.float32)
    monkeypatch.setattr(fake_models, "vector_of", lambda row: vector)

    assert post("/embed", model="embedder", inputs="a") == [[None, None, None, 1.5]]


@pytest.mark.parametrize(
    "path, fields, is_cut",
    [
        ("/infinity/embeddings", {}, True),
        ("/infinity/embeddings", {"truncate": False}, False),
        ("/v1/embeddings", {}, False),
    ],
)
def test_texts_are_cut_by_default_where_the_original_cuts_them(post, calls, path, fields, is_cut):
    post(path, model="embedder", input="a", **fields)

    assert ("truncate" in calls.received[0][3]) is is_cut


TASKS = {
    "return_dense": "embed",
    "return_sparse": "sparse_embed",
    "return_colbert_vecs": "token_embed",
}
FIELDS = dict(zip(TASKS.values(), ("embedding", "sparse_embedding", "colbert_vecs"), strict=True))


@pytest.mark.parametrize("encoding", ["float", "base64"])
@pytest.mark.parametrize(
    "flags",
    [
        {"return_sparse": True},
        {"return_colbert_vecs": True},
        {"return_sparse": True, "return_colbert_vecs": True},
        {"return_dense": False, "return_sparse": True},
        {"return_dense": False, "return_sparse": True, "return_colbert_vecs": True},
    ],
    ids=str,
)
def test_one_call_has_the_outputs_that_it_asks_for(post, calls, flags, encoding):
    texts = ["ab", "c"]

    answer = post("/v1/embeddings", model="several", input=texts, encoding_format=encoding, **flags)

    wanted = {"return_dense": True} | flags
    tasks = [task for name, task in TASKS.items() if wanted.get(name)]
    assert calls.received == [("several", "outputs", texts, {"tasks": tasks})]
    assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    for index, (text, row) in enumerate(zip(texts, answer["data"], strict=True)):
        assert (row.pop("index"), row.pop("object")) == (index, "embedding")
        assert list(row) == [FIELDS[task] for task in tasks]
        expected = {"embedding": vector_of(text), "colbert_vecs": tokens_of(text)}
        for name, array in expected.items():
            if name in row and encoding == "base64":
                raw = np.frombuffer(base64.b64decode(row[name]), "<f4")
                np.testing.assert_array_equal(raw.reshape(array.shape), array)
            elif name in row:
                np.testing.assert_array_equal(np.float32(row[name]), array)
        if "sparse_embedding" in row:
            size = len(text)
            assert row["sparse_embedding"] == {"indices": [9 + size, 4 + size], "values": [2.5, 1]}


def test_refuses_a_request_without_an_output(refusal):
    status, error = refusal("/v1/embeddings", model="several", input="a", return_dense=False)

    assert status == 400
    assert "set one of return_dense, return_sparse, return_colbert_vecs" in error["message"]


def test_late_chunks_are_parts_of_one_document(post, calls):
    """Jina's API joins its inputs by a space, and answers with a vector for each."""
    chunks = ["Berlin is large.", "It is green", "é"]

    answer = post("/v1/embeddings", model="embedder", input=chunks, late_chunking=True)

    vectors = np.float32([each["embedding"] for each in answer["data"]])
    np.testing.assert_array_equal(vectors, np.stack([vector_of(each) for each in chunks]))
    assert [each["index"] for each in answer["data"]] == [0, 1, 2]
    document = " ".join(chunks)
    assert calls.received[-1] == (
        "embedder",
        "embed",
        [document],
        {"spans": [(0, 16), (17, 28), (29, 30)], "windows": True},
    )
    assert answer["usage"]["prompt_tokens"] == len(document)
    # it cuts nothing
    options = {"truncate": True, "dimensions": 2, "late_chunking": True}
    assert len(post("/v1/embeddings", model="embedder", input="a", **options)["data"]) == 1
    assert calls.received[-1][3] == {"spans": [(0, 1)], "windows": True, "dimensions": 2}


def test_windows_are_the_servers_work_and_cut_nothing_by_default(post, calls, send, make_app):
    app = make_app(auto_truncate=True)
    body = {"model": "embedder", "input": ["a"], "windows": True, "window_overlap": 4}
    for path in ("/v1/embeddings", "/infinity/embeddings"):
        assert send("POST", path, body, app=app).status_code == 200
        assert calls.received[-1][3] == {"windows": True, "window_overlap": 4}
    post("/v1/embeddings", **body, truncate=True)
    assert calls.received[-1][3] == {"windows": True, "window_overlap": 4, "truncate": True}


@pytest.mark.parametrize(
    "given, message",
    [
        ({"input": ["a", " "]}, "input[1] is blank, and so has no vector; leave it out"),
        ({"input": [[1, 2]]}, "input has token ids, and late_chunking needs texts; send texts"),
        ({"input": ["a"], "return_sparse": True}, "late_chunking has only dense vectors"),
    ],
)
def test_late_chunks_without_a_vector_are_named(refusal, given, message):
    status, error = refusal("/v1/embeddings", model="embedder", late_chunking=True, **given)

    assert status == 400
    assert message in error["message"]
