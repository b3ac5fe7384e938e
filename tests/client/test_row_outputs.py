"""Forms of embeddings, labels with scores, and the commands that show them."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from varlen_client import FilledToken, InvalidRequest, LabelScore, ServerError, TokenLabel, tasks
from varlen_client.cli import main as cli


@pytest.fixture
def varlen(server, monkeypatch):
    """Return a function that runs a command against the fake server, and returns its lines."""
    monkeypatch.setenv("VARLEN_URL", server.url)
    monkeypatch.delenv("VARLEN_MODEL", raising=False)

    def run(*arguments):
        result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
        assert result.exit_code == 0, result.output
        return result.stdout.splitlines()

    return run


@pytest.mark.parametrize(
    "form, dtype, width",
    [
        ({}, np.float32, 3),
        ({"dimensions": 2}, np.float32, 2),
        ({"output_dtype": "float16"}, np.float16, 3),
        ({"output_dtype": "ubinary"}, np.uint8, 1),
        ({"output_dtype": "ubinary", "dimensions": 2}, np.uint8, 1),
    ],
)
def test_embed_returns_the_form_that_it_asks_for(client, server, form, dtype, width):
    vectors = client.embed(["a", "bc"], truncation_side="left", **form)

    assert (vectors.dtype, vectors.shape) == (dtype, (2, width))
    assert server.model.requests[0].parameters == {"truncation_side": "left", **form}
    assert client.embed([], **form).shape == (0, width)


def test_refuses_a_form_that_does_not_exist(client):
    with pytest.raises(InvalidRequest, match="output_dtype is 'fp16'; allowed: float32, float16"):
        client.embed(["a"], output_dtype="fp16")


def test_a_server_that_ignores_the_form_is_an_error(client, server):
    server.model.form_of = lambda vectors, parameters: vectors.astype(np.float32)

    with pytest.raises(
        ServerError, match=r"is float32 \[1, 3\]; expected float32 with 1 rows of 2"
    ):
        client.embed(["a"], dimensions=2)


def test_predict_returns_labels_with_the_best_first(client, server):
    server.model.task = "classify"

    rows = client.predict([("ab", "xyz"), ("abcd", "")], activation="softmax")

    assert rows == [
        [LabelScore("über 1", pytest.approx(0.003)), LabelScore("über 0", pytest.approx(0.002))],
        [LabelScore("über 0", pytest.approx(0.004)), LabelScore("über 1", 0.0)],
    ]
    assert server.model.requests[0].parameters == {"activation": "softmax"}
    assert server.model.requests[0].outputs == ("scores", "labels")


def test_predict_is_in_order_over_many_requests(client, server):
    server.model.task = "classify"

    rows = client.predict(["x" * (n + 1) for n in range(30)], top_k=1)

    scores = [label.score for [label] in rows]
    np.testing.assert_allclose(scores, np.arange(1, 31) / 1000, rtol=1e-5)
    assert client.predict([]) == []


def test_predict_needs_a_server_that_has_scores(client, server):
    server.model.task, server.model.has_scores = "classify", False

    with pytest.raises(InvalidRequest, match="its task is classify; predict needs scores"):
        client.predict(["a"])
    with pytest.raises(InvalidRequest, match="top_k is 0; at least 1"):
        client.predict(["a"], top_k=0)


def test_rerank_returns_scores_if_there_is_an_activation(client, server):
    server.model.task = "rerank"

    logits = client.rerank("ab", ["c", "cd"])
    scores = client.rerank("ab", ["c", "cd"], activation="sigmoid")

    np.testing.assert_allclose(scores, logits / 1000, rtol=1e-6)
    assert [each.outputs for each in server.model.requests] == [("logits",), ("scores",)]
    assert server.model.requests[1].parameters == {"activation": "sigmoid"}


def test_the_command_classify_prints_labels(varlen, server):
    server.model.task = "classify"

    assert varlen("classify", "abc", "d") == [
        "abc  über 0 0.0030, über 1 0.0000",
        "d  über 0 0.0010, über 1 0.0000",
    ]
    [line] = varlen("classify", "abc", "--json", "--top-k", 1, "--activation", "none")
    labels = [{"label": "über 0", "score": pytest.approx(0.003)}]
    assert json.loads(line) == {"text": "abc", "labels": labels}


def test_the_command_rerank_prints_the_most_relevant_first(varlen, server, tmp_path):
    server.model.task = "rerank"
    file = tmp_path / "documents.txt"
    file.write_text("a\nabc\nab\n")

    lines = varlen("rerank", "q", "--file", file)

    assert [line.split() for line in lines] == [
        ["0.1030", "2", "abc"],
        ["0.1020", "3", "ab"],
        ["0.1010", "1", "a"],
    ]
    [line] = varlen("rerank", "q", "a", "abc", "--top-k", 1, "--json")
    assert json.loads(line) == {"number": 2, "score": pytest.approx(0.103), "document": "abc"}


def test_an_integer_that_the_protocol_cannot_hold_is_refused(client):
    with pytest.raises(
        InvalidRequest, match="dimensions is 10{30}; allowed: up to 9223372036854775807"
    ):
        client.embed(["a"], dimensions=10**30)


def test_the_command_embed_asks_for_dimensions(varlen, server):
    options = ["--truncate", "--truncation-side", "left", "--prompt-name", "query"]
    varlen("embed", "a", "--dimensions", 2, *options)

    expected = {"dimensions": 2, "truncate": True, "truncation_side": "left"}
    assert server.model.requests[0].parameters == {**expected, "prompt_name": "query"}


@pytest.mark.parametrize("command", [("classify",), ("rerank", "q")], ids=["classify", "rerank"])
def test_an_empty_line_is_named(server, monkeypatch, tmp_path, command):
    monkeypatch.setenv("VARLEN_URL", server.url)
    file = tmp_path / "lines.txt"
    file.write_text("a\n\nb\n")

    result = CliRunner().invoke(cli.app, [*command, "--file", str(file)])

    assert result.exit_code == 2
    assert "line 2: empty" in result.output


def test_sparse_vectors_have_the_terms_of_their_row_alone(client, server):
    server.model.task = "sparse_embed"
    texts = ["ab", "é", *("x" * (n + 1) for n in range(40))]

    vectors = client.sparse_embed(texts, with_terms=True, max_active_dims=7, prompt_name="query")

    assert vectors[0].terms == ("b", "a")
    assert vectors[0].indices.tolist() == [98, 97]
    assert vectors[0].values.tolist() == [2, 1]
    assert (vectors[0].indices.dtype, vectors[0].values.dtype) == (np.int32, np.float32)
    assert [len(each.indices) for each in vectors] == [len(text) for text in texts]
    assert server.model.requests[0].parameters == {"max_active_dims": 7, "prompt_name": "query"}
    assert "terms" in server.model.requests[0].outputs


def test_sparse_vectors_come_without_texts_unless_they_are_asked_for(client, server):
    server.model.task = "sparse_embed"

    [vector] = client.sparse_embed(["ab"])

    assert vector.terms == ()
    assert server.model.requests[0].outputs == ("indices", "values", "num_terms")
    assert client.sparse_embed([]) == []


@pytest.mark.parametrize("counts", [True, False], ids=["counted", "not counted"])
def test_sparse_vectors_come_with_their_number_of_tokens(client, server, counts):
    server.model.task, server.model.counts_tokens = "sparse_embed", counts
    texts = ["x" * (n + 1) for n in range(40)]

    vectors, tokens = client.counted(tasks.SPARSE_EMBED, texts, with_terms=True)

    assert tokens == (sum(map(len, texts)) if counts else None)
    assert [len(each.terms) for each in vectors] == [len(text) for text in texts]
    assert client.counted(tasks.SPARSE_EMBED, []) == ([], 0 if counts else None)


def test_a_model_of_another_task_has_no_sparse_vectors(client):
    with pytest.raises(InvalidRequest, match="does not serve sparse_embed: its task is embed"):
        client.sparse_embed(["a"])


def test_sparse_embed_prints_the_largest_weights(varlen, server):
    server.model.task = "sparse_embed"

    lines = varlen("sparse-embed", "ab", "0123456789", "--max-active-dims", "9")

    assert lines[0] == "ab  2 terms  [b 2.0000, a 1.0000]"
    assert lines[1].startswith("0123456789  10 terms  [9 10.0000, 8 9.0000")
    assert lines[1].endswith("2 3.0000, …]")
    assert server.model.requests[0].parameters == {"max_active_dims": 9}


def test_sparse_embed_as_json_prints_every_term(varlen, server):
    server.model.task = "sparse_embed"

    [line] = varlen("sparse-embed", "--json", "aé")

    assert json.loads(line) == {
        "text": "aé",
        "indices": [233, 97],
        "values": [2.0, 1.0],
        "terms": ["é", "a"],
    }


def test_masks_get_the_tokens_of_their_row_alone(client, server):
    server.model.task = "fill_mask"

    rows = client.fill_mask(["_", "a_b_", *("_" * (n + 1) for n in range(5))], top_k=2)

    assert rows[0] == [[FilledToken(1, "é1", 1.0), FilledToken(2, "é2", 0.5)]]
    assert [[token.token_id for token in mask] for mask in rows[1]] == [[4, 5], [4, 5]]
    assert [len(masks) for masks in rows] == [1, 2, 1, 2, 3, 4, 5]
    assert server.model.requests[0].parameters == {"top_k": 2}
    assert client.fill_mask([]) == []


def test_fill_mask_prints_a_line_for_each_mask(varlen, server):
    server.model.task = "fill_mask"

    lines = varlen("fill-mask", "_b_", "_")

    assert lines == ["_b_  é3 0.3333, é4 0.2500"] * 2 + ["_  é1 1.0000, é2 0.5000"]


def test_fill_mask_as_json_prints_tokens_with_ids(varlen, server):
    server.model.task = "fill_mask"

    [line] = varlen("fill-mask", "--json", "--top-k", "1", "_")

    token = {"token_id": 1, "text": "é1", "score": 1.0}
    assert json.loads(line) == {"text": "_", "masks": [[token]]}


@pytest.mark.parametrize(
    "task, name, width",
    [("token_embed", "vectors", 3), ("hidden", "hidden", 3)],
)
def test_arrays_of_tokens_are_printed_or_written(
    varlen, server, client, tmp_path, task, name, width
):
    server.model.task = task
    command = task.replace("_", "-")
    expected = getattr(client, task)(["a b", "c"])

    lines = varlen(command, "a b", "c")
    objects = [json.loads(line) for line in varlen(command, "--json", "a b", "c")]
    varlen(command, "a b", "c", "--output", tmp_path / "arrays.npz")

    counted = "vectors" if name == "vectors" else "tokens"
    assert lines == [f"a b  2 {counted} of {width} values", f"c  1 {counted} of {width} values"]
    assert [each["text"] for each in objects] == ["a b", "c"]
    with np.load(tmp_path / "arrays.npz") as file:
        written = dict(file)
    assert list(written) == ["0", "1"]
    for number, array in enumerate(expected):
        np.testing.assert_array_equal(np.float32(objects[number][name]), array)
        np.testing.assert_array_equal(written[str(number)], array)


def test_tokens_come_with_their_best_labels(client, server):
    server.model.task = "token_classify"

    first, second = client.predict_tokens(["in ZÜRICH", "a b c"], activation="softmax")

    assert first == [TokenLabel("in", "O", 0.25), TokenLabel("ZÜRICH", "Ö", 0.75)]
    assert [each.token for each in second] == ["a", "b", "c"]
    assert server.model.requests[0].parameters == {"activation": "softmax"}
    assert client.predict_tokens([]) == []


def test_labels_of_tokens_are_printed_and_logits_written(varlen, server, client, tmp_path):
    server.model.task = "token_classify"

    lines = varlen("token-classify", "in ZÜRICH", "a")
    [line] = varlen("token-classify", "--json", "A")
    varlen("token-classify", "a b", "--output", tmp_path / "logits.npz")

    assert lines == ["in ZÜRICH  in O 0.2500, ZÜRICH Ö 0.7500", "a  a O 0.2500"]
    tokens = [{"token": "A", "label": "Ö", "score": 0.75}]
    assert json.loads(line) == {"text": "A", "tokens": tokens}
    with np.load(tmp_path / "logits.npz") as file:
        np.testing.assert_array_equal(file["0"], client.token_classify(["a b"])[0])


def test_token_embed_sends_the_role_of_its_texts(varlen, server):
    server.model.task = "token_embed"

    varlen("token-embed", "a", "--prompt-name", "query", "--no-normalize")

    assert server.model.requests[-1].parameters == {"prompt_name": "query", "normalize": False}
