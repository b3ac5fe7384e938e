"""Tasks of masked language models on the real server, over both protocols."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SparseEncoder

from tests.checkpoints import save_checkpoint
from tests.closeness import assert_close, encoder_roundings
from varlen_client import Client, InvalidRequest, ServerError
from varlen_tools.local_server import LocalServer

from .serving import add_model, load, unload

TEXTS = ["the cat", "a", "river, the river! is it 42?"]


@pytest.fixture(scope="module")
def masked_lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("masked"), "BertForMaskedLM")


@pytest.fixture(scope="module")
def splade(
    server: LocalServer, repository: Path, masked_lm: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A model of sentence-transformers, loaded as "splade"."""
    folder = tmp_path_factory.mktemp("splade")
    SparseEncoder(str(masked_lm), device="cpu", prompts={"query": "a: "}).save_pretrained(
        str(folder)
    )
    add_model(repository, "splade", folder, response_cache_bytes="1000000")
    assert load(server, "splade") is None
    yield folder
    unload(server, "splade")


@pytest.fixture(params=["grpc", "http"])
def url(request: pytest.FixtureRequest, server: LocalServer) -> str:
    return server.grpc_url if request.param == "grpc" else server.http_url


def test_sparse_vectors_are_those_of_sentence_transformers(splade: Path, url: str) -> None:
    oracle = SparseEncoder(str(splade), device="cpu")
    expected = oracle.encode(TEXTS).to_dense().numpy()
    tokens = oracle.tokenizer.convert_ids_to_tokens(range(expected.shape[1]))

    with Client(url, "splade") as client:
        vectors = client.sparse_embed(TEXTS, with_terms=True)
        # out of the cache
        largest = client.sparse_embed(TEXTS, max_active_dims=3)
        queries = client.sparse_embed(TEXTS, prompt_name="query")

    actual = np.zeros_like(expected)
    for row, vector in zip(actual, vectors, strict=True):
        row[vector.indices] = vector.values
        assert vector.terms == tuple(tokens[index] for index in vector.indices)
    assert_close(actual, expected, roundings=encoder_roundings(splade) + 200)
    for few, whole in zip(largest, vectors, strict=True):
        np.testing.assert_array_equal(few.indices, whole.indices[:3])
        np.testing.assert_array_equal(few.values, whole.values[:3])
    assert not np.array_equal(queries[0].indices, vectors[0].indices)


def test_a_wrong_number_of_terms_is_refused(splade: Path, url: str) -> None:
    del splade
    with Client(url, "splade") as client:
        with pytest.raises(InvalidRequest, match="max_active_dims is 93; this model takes 1 to 92"):
            client.sparse_embed(TEXTS, max_active_dims=93)
        with pytest.raises((InvalidRequest, ServerError), match="does not serve embed"):
            client.embed(TEXTS)
