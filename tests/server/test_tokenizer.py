"""The tokenizer through the server: both protocols and every task."""

import json

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from varlen.tasks import ITERATIVE_TASKS
from varlen_client import Client, InvalidRequest

from .serving import http_call
from .task_models import TASK_MODELS

TEXTS = ["the cat's river", "wörld 😀 x", "tokenization " * 300, "a"]


@pytest.fixture
def client(url):
    with Client(url, "minilm") as client:
        yield client


def test_tokens_are_those_of_transformers(client, minilm):
    oracle = AutoTokenizer.from_pretrained(minilm, model_max_length=10**6)

    found = client.tokenize(TEXTS)
    plain = client.tokenize(TEXTS, add_special_tokens=False)
    cut = client.tokenize(TEXTS, truncate=True)

    expected = oracle(TEXTS, return_offsets_mapping=True)
    assert [list(each.token_ids) for each in found] == expected["input_ids"]
    assert [list(each.offsets) for each in found] == expected["offset_mapping"]
    for each in found:
        assert list(each.tokens) == oracle.convert_ids_to_tokens(each.token_ids)
        assert each.special == (True, *[False] * (len(each.tokens) - 2), True)
    without = oracle(TEXTS, add_special_tokens=False)
    assert [list(each.token_ids) for each in plain] == without["input_ids"]
    most = found[0].max_tokens
    assert [len(each.token_ids) for each in cut] == [
        min(len(each.token_ids), most) for each in found
    ]
    for skip in (True, False):
        texts = client.detokenize(expected["input_ids"], skip_special_tokens=skip)
        library = Tokenizer.from_file(str(minilm / "tokenizer.json"))
        assert texts == [
            library.decode(ids, skip_special_tokens=skip) for ids in expected["input_ids"]
        ]


def test_what_cannot_be_tokenized_is_named(client):
    with pytest.raises(InvalidRequest, match="^row 0: text is .99999999.; allowed: a JSON list of"):
        client.detokenize([[99_999_999]])
    with pytest.raises(
        InvalidRequest, match="prompt_name is 'q'; this model has the prompts: none"
    ):
        client.tokenize(["a"], prompt_name="q")


@pytest.mark.full
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_models_of_every_task_have_their_tokenizer(task_server, task_checkpoints, protocol):
    url = task_server.grpc_url if protocol == "grpc" else task_server.http_url
    texts = ["word1 word2", "word3"]
    for name in TASK_MODELS:
        library = Tokenizer.from_file(str(task_checkpoints[name] / "tokenizer.json"))
        library.no_truncation()
        library.no_padding()
        expected = [library.encode(text).ids for text in texts]
        with Client(url, name) as client:
            found = client.tokenize(texts)
            back = client.detokenize(expected, skip_special_tokens=False)
        assert [list(each.token_ids) for each in found] == expected, name
        assert back == [library.decode(ids, skip_special_tokens=False) for ids in expected], name


@pytest.mark.full
def test_other_clients_read_the_tokens_as_json(task_server):
    for name, task in TASK_MODELS.items():
        if task in ITERATIVE_TASKS:
            body = {"text_input": "word1", "parameters": {"operation": "tokenize"}}
            status, answer = http_call(task_server, "POST", f"/v2/models/{name}/generate", body)
            assert status == 200, answer
            found = json.loads(answer["text_output"])
        else:
            text = {"name": "text", "datatype": "BYTES", "shape": [1, 1], "data": ["word1"]}
            # fetch requires the pairs of tasks that take no single texts
            of_pairs = task in ("rerank", "question_answer")
            pair = [text | {"name": "text_pair", "data": [""]}] if of_pairs else []
            body = {"inputs": [text, *pair], "parameters": {"operation": "tokenize"}}
            status, answer = http_call(task_server, "POST", f"/v2/models/{name}/infer", body)
            assert status == 200, answer
            # the only output, though the request names none
            [output] = answer["outputs"]
            assert (output["datatype"], output["shape"]) == ("BYTES", [1, 1]), name
            found = json.loads(output["data"][0])
        assert found["token_ids"], name
        assert len(found["tokens"]) == len(found["offsets"]) == len(found["token_ids"])
