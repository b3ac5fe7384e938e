"""Token ids in place of texts: only ids of the model's own tokenizer are taken."""

import pytest

from varlen_client.calls import TokenizedText
from varlen_client.errors import InvalidRequest
from varlen_client.gateway.models import check_special_tokens

LANGCHAIN = "check_embedding_ctx_length=False"
# "a" as by BERT, T5, GPT-2, and a tokenizer with two tokens before the text.
SAMPLES = {
    "bert": ((101, 1037, 102), (True, False, True)),
    "t5": ((3, 9, 1), (False, False, True)),
    "gpt2": ((64,), (False,)),
    "two": ((1, 2, 64, 3), (True, True, False, True)),
}
# Rows of ids that are right, and wrong ones.
RIGHT = {
    "bert": [[101, 102], [101, 5, 6, 102]],
    "t5": [[1], [5, 1]],
    "gpt2": [[5], [101, 102]],
    "two": [[1, 2, 3], [1, 2, 9, 3]],
}
WRONG = {
    "bert": [[5, 6], [101, 5], [5, 102], [101], [102, 101], []],
    "t5": [[5], []],
    "two": [[1, 3], [2, 1, 3], [1, 2], [1, 2, 9]],
}


def check(name, rows):
    """Check rows of ids by the sample of a tokenizer."""
    ids, special = SAMPLES[name]
    names = tuple(f"<{each}>" for each in ids)
    check_special_tokens(TokenizedText(ids, names, special, ((0, 0),) * len(ids), "", 9), rows)


@pytest.mark.parametrize("name", RIGHT)
def test_ids_with_the_models_special_tokens_are_taken(name):
    check(name, RIGHT[name])


@pytest.mark.parametrize("name, row", [(name, row) for name in WRONG for row in WRONG[name]])
def test_ids_without_them_are_refused(name, row):
    with pytest.raises(InvalidRequest, match=r"^row 1: the token ids are not .*" + LANGCHAIN):
        check(name, [RIGHT[name][0], row])


def test_a_refusal_names_the_special_tokens():
    with pytest.raises(InvalidRequest, match=r"are not 101 \(<101>\) … 102 \(<102>\), as by"):
        check("bert", [[5]])


@pytest.mark.parametrize(
    "path, model",
    [("/v1/embeddings", "embedder"), ("/embed", "embedder"), ("/embed_sparse", "sparse")],
)
def test_a_route_refuses_ids_of_another_tokenizer(refusal, calls, path, model):
    name = "input" if path == "/v1/embeddings" else "inputs"

    status, error = refusal(path, model=model, **{name: [9906, 1917]})

    assert status == 400
    assert error["message"].startswith("row 0: the token ids are not 1 (<s>) …, as by")
    assert [method for _, method, *_ in calls.received] == ["tokenize"]


def test_a_model_without_ids_says_so(refusal, calls):
    calls.inputs = ("text",)

    status, error = refusal("/v1/embeddings", model="embedder", input=[[9906, 1917]])

    assert status == 400
    assert error["message"].startswith("model 'embedder' takes texts, and no token ids; send texts")
    assert LANGCHAIN in error["message"]
    assert calls.received == []


def test_a_model_without_texts_takes_all_ids(post, calls):
    calls.inputs = ("input_ids",)

    assert post("/embed", model="embedder", inputs=[9906, 1917])
