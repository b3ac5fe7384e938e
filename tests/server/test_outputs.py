"""Outputs and forms of answers that a request asks for, over both protocols."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer import modules

from tests.checkpoints import WORDS, save_checkpoint
from tests.closeness import assert_close, encoder_roundings
from varlen import Encoder
from varlen_client import Client, InvalidRequest
from varlen_tools.local_server import LOOPBACK, LocalServer

from .serving import add_model, load, unload

SENTENCES = ("A man is eating food.", "ok")


@pytest.fixture(params=[tritonclient.grpc, tritonclient.http], ids=["grpc", "http"])
def protocol(request):
    """The module of NVIDIA's client of each protocol."""
    return request.param


def ask(
    server: LocalServer,
    protocol: ModuleType,
    model: str,
    outputs: tuple[str, ...] = (),
    **parameters: Any,
) -> Any:
    """Return the answer to a request of SENTENCES that names these outputs."""
    port = server.grpc_port if protocol is tritonclient.grpc else server.http_port
    with protocol.InferenceServerClient(f"{LOOPBACK}:{port}") as client:
        rows = protocol.InferInput("text", [len(SENTENCES), 1], "BYTES")
        rows.set_data_from_numpy(np.array([[each.encode()] for each in SENTENCES], dtype=object))
        wanted = [protocol.InferRequestedOutput(name) for name in outputs]
        return client.infer(model, [rows], outputs=wanted or None, parameters=parameters)


def names_of(answer: Any, protocol: ModuleType) -> list[str]:
    response = answer.get_response()
    if protocol is tritonclient.http:
        return [output["name"] for output in response["outputs"]]
    return [output.name for output in response.outputs]


def test_a_classifier_answers_with_the_outputs_that_are_requested(server, protocol):
    everything = ask(server, protocol, "classifier")
    some = ask(server, protocol, "classifier", ("labels", "num_tokens"))

    names = ["logits", "scores", "labels", "num_tokens"]
    assert sorted(names_of(everything, protocol)) == sorted(names)
    assert sorted(names_of(some, protocol)) == ["labels", "num_tokens"]
    labels = [[f"LABEL_{number}".encode() for number in range(3)]] * 2
    assert some.as_numpy("labels").tolist() == labels
    counts = some.as_numpy("num_tokens")
    assert (counts.dtype, counts.shape) == (np.int32, (2, 1))
    assert counts[0] > counts[1]
    logits = everything.as_numpy("logits")
    exponentials = np.exp(logits)
    np.testing.assert_allclose(
        everything.as_numpy("scores"),
        exponentials / exponentials.sum(axis=1, keepdims=True),
        rtol=1e-5,
    )


def test_num_tokens_tells_tokens_from_padding(server, protocol):
    answer = ask(server, protocol, "tagger")

    for row, count in zip(answer.as_numpy("logits"), answer.as_numpy("num_tokens"), strict=True):
        assert row[: count[0]].any(axis=1).all()
        assert not row[count[0] :].any()


def test_our_client_predicts_labels_with_scores(server, protocol):
    url = server.grpc_url if protocol is tritonclient.grpc else server.http_url
    logits = ask(server, protocol, "classifier").as_numpy("logits")

    with Client(url, "classifier") as client:
        rows = client.predict(SENTENCES, activation="none", top_k=2)

    for row, expected in zip(rows, logits, strict=True):
        best = np.argsort(-expected)[:2]
        assert [each.label for each in row] == [f"LABEL_{label}" for label in best]
        np.testing.assert_allclose([each.score for each in row], expected[best], rtol=1e-4)


def test_modules_and_prompts_are_those_of_sentence_transformers(
    server, repository, checkpoints, tmp_path
):
    folder, prompts = tmp_path / "dense", {"query": "word1 word2 ", "document": ""}
    transformer = modules.Transformer(str(checkpoints["encoder"]))
    features = transformer.get_embedding_dimension()
    layers = [modules.Pooling(features, ("mean", "cls")), Dense(2 * features, 9), Normalize()]
    made = SentenceTransformer(modules=[transformer, *layers], device="cpu", prompts=prompts)
    made.save_pretrained(str(folder))
    texts = ["word3 word4", "word5"]
    add_model(repository, "dense", folder)
    try:
        assert load(server, "dense") is None
        with Client(server.grpc_url, "dense") as client:
            answer = client.embed(texts, prompt_name="query")
            by_meaning = client.embed(texts, input_type="search_query")
            with pytest.raises(InvalidRequest, match="has no prompt for it.*: document, query"):
                client.embed(texts, input_type="clustering")
    finally:
        unload(server, "dense")

    expected = made.encode(texts, prompt_name="query")
    for each in (answer, by_meaning):
        assert_close(each, expected, roundings=encoder_roundings(folder) + 100)


@pytest.mark.parametrize(
    "dtype, numpy_dtype, width",
    [
        ("float32", np.float32, 64),
        ("float16", np.float16, 64),
        ("int8", np.int8, 64),
        ("binary", np.int8, 8),
        ("ubinary", np.uint8, 8),
    ],
)
def test_an_embedding_has_the_dimensions_and_the_type_that_are_requested(
    server, protocol, in_process, dtype, numpy_dtype, width
):
    answer = ask(
        server, protocol, "minilm", ("sentence_embedding",), dimensions=64, output_dtype=dtype
    )

    vectors = answer.as_numpy("sentence_embedding")
    assert (vectors.dtype, vectors.shape) == (numpy_dtype, (2, width))
    if width == 64:
        floats = vectors.astype(np.float64)
        floats /= np.linalg.norm(floats, axis=1, keepdims=True)
        expected = in_process.embed(SENTENCES)[:, :64]
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
        assert np.abs(floats - expected).max() < 0.01


@pytest.fixture(scope="module")
def several(server, repository, tmp_path_factory):
    """The checkpoint of the model `several`, which has three outputs."""
    folder = save_checkpoint(
        tmp_path_factory.mktemp("outputs") / "several", "BertForMaskedLM", words=WORDS
    )
    add_model(repository, "several", folder, task="embed", outputs="sparse_embed, hidden")
    assert load(server, "several") is None
    yield folder
    unload(server, "several")


def test_each_request_gets_the_outputs_that_it_names(server, several, protocol):
    names = ("sentence_embedding", "sparse_indices", "sparse_values", "last_hidden_state")
    wishes = [names[:1], names[1:3], names[3:], names, (names[0], names[3]), ("num_tokens",)]
    wishes = [*wishes, *(wish[::-1] for wish in wishes)] * 4
    everything = ask(server, protocol, "several")
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(partial(ask, server, protocol, "several"), wishes))

    roundings = encoder_roundings(several)
    for wish, answer in zip(wishes, answers, strict=True):
        assert sorted(names_of(answer, protocol)) == sorted(wish)
        for each in wish:
            found, expected = answer.as_numpy(each), everything.as_numpy(each)
            if each == "sparse_indices":
                # weights that are nearly equal have any order
                found, expected = (np.sort(terms) for terms in (found, expected))
            assert_close(found, expected, roundings=roundings)
    with Encoder.from_pretrained(several, task="embed", dtype="fp32", warmup_seconds=0) as encoder:
        assert_close(
            everything.as_numpy("sentence_embedding"), encoder.embed(SENTENCES), roundings=roundings
        )
