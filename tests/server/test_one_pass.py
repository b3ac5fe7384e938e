"""Several outputs of one pass, and MaxSim, with clients and gateway of a real server."""

import base64
import json
import urllib.request
from contextlib import closing

import numpy as np
import pytest
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from torch import nn

from tests.checkpoints import SPECIAL_TOKENS, save_checkpoint, set_fields
from tests.closeness import assert_close, encoder_roundings
from tests.m3_models import save_m3
from varlen import Encoder
from varlen_client import Client, InvalidRequest
from varlen_client.gateway import GatewaySettings
from varlen_tools.convert_pickle import convert

from .local_gateway import local_gateway
from .serving import TIMEOUT_SECONDS, add_model, load_all, running_server

TEXTS = ["the cat", "river 42, the river", "a"]
TASKS = ("embed", "sparse_embed", "token_embed")
TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": 60,
    **{f"{token.strip('[]').lower()}_token": token for token in SPECIAL_TOKENS},
}


def save_colbert(folder, target):
    """Save a ColBERT model, and return MultiVectorEncoder of it."""
    save_checkpoint(folder, "BertModel", pad_token_id=0)
    set_fields(folder, "tokenizer_config.json", **TOKENIZER)
    made = Transformer(str(folder), query_expansion={"strategy": "fixed", "length": 12})
    dense = Dense(
        made.get_embedding_dimension(),
        8,
        bias=False,
        activation_function=nn.Identity(),
        module_input_name="token_embeddings",
    )
    modules = [made, dense, MultiVectorMask(), Normalize("token_embeddings")]
    oracle = MultiVectorEncoder(modules=modules, prompts={"query": "the "}, device="cpu")
    oracle.save_pretrained(str(target), create_model_card=False)
    return oracle


def post(host, path, **body):
    request = urllib.request.Request(
        f"http://{host}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server with both models, a gateway before it, and their checkpoints."""
    folder = tmp_path_factory.mktemp("one_pass")
    oracle = save_colbert(folder / "plain", folder / "late")
    m3 = save_m3(save_checkpoint(folder / "m3_files", "XLMRobertaModel"))
    convert(m3)
    add_model(folder / "models", "m3", m3, outputs="sparse_embed,token_embed")
    add_model(folder / "models", "colbert", folder / "late")
    with running_server(folder / "models") as server:
        load_all(server, ("m3", "colbert"))
        with local_gateway(GatewaySettings(url=server.grpc_url)) as gateway:
            yield server, gateway, m3, oracle


@pytest.mark.full
def test_one_call_has_all_outputs_of_bge_m3(served):
    server, gateway, folder, _ = served
    with Encoder.from_pretrained(
        folder, dtype="fp32", outputs="sparse_embed,token_embed", warmup_seconds=0
    ) as encoder:
        expected = encoder.outputs(TEXTS, TASKS)

    flags = {"return_sparse": True, "return_colbert_vecs": True}
    answer = post(gateway, "/v1/embeddings", model="m3", input=TEXTS, **flags)["data"]
    with closing(Client(server.grpc_url, "m3")) as client:
        rows = client.outputs(TEXTS, TASKS)
        sparse, plain = client.sparse_embed(TEXTS), client.embed(TEXTS)
    terms = post(gateway, "/embed_sparse?model=m3", inputs=TEXTS)
    vectors = post(gateway, "/embed_all?model=m3", inputs=TEXTS)

    roundings = encoder_roundings(folder)
    for index, want in enumerate(expected):
        weights = dict(want["sparse_embed"].tolist())
        got, row = answer[index], rows[index]
        assert_close(got["embedding"], want["embed"], roundings=roundings)
        assert_close(row["embed"], want["embed"], roundings=roundings)
        assert_close(plain[index], want["embed"], roundings=roundings)
        for each in (got["colbert_vecs"], row["token_embed"], vectors[index]):
            assert_close(each, want["token_embed"], roundings=roundings)
        from_gateway = got["sparse_embedding"]
        found = [
            dict(zip(from_gateway["indices"], from_gateway["values"], strict=True)),
            *(
                dict(zip(each.indices.tolist(), each.values.tolist(), strict=True))
                for each in (row["sparse_embed"], sparse[index])
            ),
            {each["index"]: each["value"] for each in terms[index]},
        ]
        for each in found:
            assert each.keys() == weights.keys()
            assert_close([each[term] for term in weights], [*weights.values()], roundings=roundings)
    coded = post(gateway, "/v1/embeddings?model=m3", input=TEXTS, encoding_format="base64", **flags)
    for row, want in zip(coded["data"], expected, strict=True):
        for name, task in (("embedding", "embed"), ("colbert_vecs", "token_embed")):
            found = np.frombuffer(base64.b64decode(row[name]), "<f4")
            assert_close(found.reshape(want[task].shape), want[task], roundings=roundings)
    pooled = post(gateway, "/pooling?model=m3", input=TEXTS, task="token_embed")["data"]
    for row, want in zip(pooled, expected, strict=True):
        assert_close(row["data"], want["token_embed"], roundings=roundings)
    some = post(gateway, "/v1/embeddings?model=m3", input="a", return_dense=False, **flags)
    assert some["data"][0].keys() == {"object", "index", "sparse_embedding", "colbert_vecs"}


@pytest.mark.full
def test_colbert_ranks_and_scores_by_max_sim(served):
    server, gateway, _, oracle = served
    query = oracle.encode_query("the cat")
    expected = [float(oracle.similarity([query], [oracle.encode_document(each)])) for each in TEXTS]

    found = []
    for url in (server.grpc_url, server.http_url):
        with closing(Client(url, "colbert")) as client:
            found.append(client.rerank("the cat", TEXTS))
            with pytest.raises(InvalidRequest, match="activation"):
                client.rerank("the cat", TEXTS, activation="sigmoid")
    of_tei = post(gateway, "/rerank?model=colbert", query="the cat", texts=TEXTS)
    pairs = post(gateway, "/v1/score?model=colbert", text_1="the cat", text_2=TEXTS)["data"]

    def check(scores):
        np.testing.assert_allclose(scores, expected, rtol=1e-4)

    for scores in found:
        check(scores)
    check([each["score"] for each in pairs])
    check([each["score"] for each in sorted(of_tei, key=lambda each: each["index"])])
    best = sorted(range(len(TEXTS)), key=lambda index: -expected[index])
    for path in ("/rerank", "/v1/rerank", "/v2/rerank", "/infinity/rerank"):
        body = {"model": "colbert", "query": "the cat", "documents": TEXTS}
        ranks = post(gateway, path, **body)["results"]
        assert [each["index"] for each in ranks] == best
        check([each["relevance_score"] for each in sorted(ranks, key=lambda each: each["index"])])
        assert [each["index"] for each in post(gateway, path, top_n=1, **body)["results"]] == best[
            :1
        ]
