"""Models whose queries are looked up give the vectors of SparseEncoder in sentence-transformers."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Router, Transformer
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling

from tests.checkpoints import WEIGHTS, set_fields, write_file
from tests.closeness import assert_close, encoder_roundings
from varlen import Encoder
from varlen.errors import RequestError
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.row_parameters import TextPrefix

from ..refusals import refused_checkpoint as refused
from ..refusals import refused_request
from .test_sparse import dense

# Some tokens occur twice, and some texts name special tokens.
TEXTS = ["the cat", "a", "river, the river! is it 42?", "[CLS] the [SEP] the", "thé 河"]
ROUTES = "router_config.json"
QUERIES = "query_0_SparseStaticEmbedding"
DOCUMENTS = "document_0_Transformer"
POOLING = "document_1_SpladePooling"
SIZE = 92


def save(folder, target, *, default="document", signs=False, **settings):
    """Save a checkpoint with routes, and return it as SparseEncoder loads it."""
    transformer = Transformer(str(folder), transformer_task="fill-mask")
    torch.manual_seed(0)
    weights = torch.rand(SIZE) * 7
    weights[::5] = 0
    if signs:
        weights[::3] *= -1
    table = SparseStaticEmbedding(transformer.tokenizer, weights, frozen=True)
    router = Router.for_query_document(
        query_modules=[table],
        document_modules=[transformer, SpladePooling("max", "log1p_relu")],
        default_route=default,
    )
    SparseEncoder(modules=[router], device="cpu", **settings).save_pretrained(str(target))
    return SparseEncoder(str(target), device="cpu")


def as_at_the_hub(folder):
    """Move the model of documents into the checkpoint folder itself."""
    for path in (folder / DOCUMENTS).iterdir():
        shutil.move(path, folder / path.name)
    (folder / DOCUMENTS).rmdir()
    config = json.loads((folder / ROUTES).read_text())
    config["types"][""] = "sentence_transformers.sparse_encoder.models.MLMTransformer"
    del config["types"][DOCUMENTS]
    config["structure"]["document"][0] = ""
    write_file(folder, ROUTES, config)


@pytest.fixture(scope="module")
def small_masked_lm(make_checkpoint):
    """Return a shared checkpoint that tests must not change."""
    return make_checkpoint("BertForMaskedLM")


@pytest.fixture(scope="module")
def kept(small_masked_lm, tmp_path_factory):
    """Return a checkpoint with routes that tests must not change."""
    folder = tmp_path_factory.mktemp("routes") / "saved"
    save(small_masked_lm, folder)
    return folder


@pytest.fixture
def saved(kept, tmp_path):
    """Return a checkpoint with routes that a test may change."""
    return shutil.copytree(kept, tmp_path / "saved")


@pytest.mark.parametrize("form", ["saved", "at the hub"])
def test_queries_and_documents_are_those_of_sentence_transformers(saved, form):
    oracle = SparseEncoder(str(saved), device="cpu")
    queries, documents, plain = (
        encode(TEXTS).to_dense().numpy()
        for encode in (oracle.encode_query, oracle.encode_document, oracle.encode)
    )
    if form == "at the hub":
        as_at_the_hub(saved)

    with Encoder.from_pretrained(saved, dtype="fp32", threads=1) as encoder:
        assert encoder.task == "sparse_embed"
        looked_up = encoder.sparse_embed(TEXTS, prompt_name="query")
        actual = dense(encoder.sparse_embed(TEXTS, prompt_name="document"), SIZE)
        alone = [encoder.sparse_embed([text], prompt_name="document")[0] for text in TEXTS]
        by_default = dense(encoder.sparse_embed(TEXTS), SIZE)

    np.testing.assert_array_equal(dense(looked_up, SIZE), queries)
    for vector in looked_up:
        assert (np.diff(vector.values) <= 0).all()
        assert len(np.unique(vector.indices)) == len(vector.indices)
    roundings = encoder_roundings(Checkpoint.open(saved).weights_folder) + 200
    assert_close(actual, documents, roundings=roundings)
    assert_close(dense(alone, SIZE), documents, roundings=roundings)
    assert_close(by_default, plain, roundings=roundings)


def test_bf16_keeps_queries_and_the_direction_of_documents(kept):
    oracle = SparseEncoder(str(kept), device="cpu")
    queries, documents = (
        encode(TEXTS).to_dense().numpy() for encode in (oracle.encode_query, oracle.encode_document)
    )

    with Encoder.from_pretrained(kept, dtype="bf16", threads=1) as encoder:
        looked_up = dense(encoder.sparse_embed(TEXTS, prompt_name="query"), SIZE)
        rough = dense(encoder.sparse_embed(TEXTS, prompt_name="document"), SIZE)

    np.testing.assert_array_equal(looked_up, queries)
    lengths = np.linalg.norm(documents, axis=1) * np.linalg.norm(rough, axis=1)
    assert ((documents * rough).sum(axis=1) / lengths).min() > 0.999


@pytest.mark.parametrize("default", ["query", None])
def test_texts_of_no_role_take_the_default_route(small_masked_lm, tmp_path, default):
    # without a name it is the first route
    oracle = save(small_masked_lm, tmp_path / "saved", default=default)
    expected = oracle.encode(TEXTS).to_dense().numpy()

    with Encoder.from_pretrained(tmp_path / "saved", dtype="fp32", threads=1) as encoder:
        actual = dense(encoder.sparse_embed(TEXTS), SIZE)

    np.testing.assert_array_equal(actual, expected)


def test_weights_of_any_sign_are_kept_by_their_size(small_masked_lm, tmp_path):
    folder = tmp_path / "saved"
    oracle = save(small_masked_lm, folder, signs=True, max_active_dims=4)

    with Encoder.from_pretrained(folder, dtype="fp32", threads=1) as encoder:
        by_default = encoder.sparse_embed(TEXTS, prompt_name="query")
        by_request = encoder.sparse_embed(TEXTS, prompt_name="query", max_active_dims=2)

    for vectors, most in ((by_default, None), (by_request, 2)):
        expected = oracle.encode_query(TEXTS, max_active_dims=most).to_dense().numpy()
        np.testing.assert_array_equal(dense(vectors, SIZE), expected)


def test_prompts_are_put_before_queries_and_documents(small_masked_lm, tmp_path):
    prompts = {"query": "the cat is: ", "passage": "a river ", "other": "is it "}
    oracle = save(small_masked_lm, tmp_path / "saved", prompts=prompts)
    queries, documents = (
        encode(TEXTS).to_dense().numpy() for encode in (oracle.encode_query, oracle.encode_document)
    )
    other = oracle.encode(TEXTS, prompt_name="other").to_dense().numpy()

    with Encoder.from_pretrained(tmp_path / "saved", dtype="fp32", threads=1) as encoder:
        found = {
            name: dense(encoder.sparse_embed(TEXTS, prompt_name=name), SIZE)
            for name in ("query", "document", "other")
        }
        roles = encoder._service.intake.roles
        for input_type, name in (("query", "query"), ("passage", "document")):
            prefix = TextPrefix(input_type=input_type)
            assert roles.select(prefix) == roles.select(TextPrefix(prompt_name=name))

    np.testing.assert_array_equal(found["query"], queries)
    np.testing.assert_allclose(found["document"], documents, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["other"], other, rtol=1e-4, atol=1e-5)


def test_queries_are_cut_without_special_tokens(saved):
    set_fields(saved, f"{QUERIES}/tokenizer_config.json", model_max_length=6)
    text = "the cat is a river, the river! is it 42?"
    oracle = SparseEncoder(str(saved), device="cpu")
    expected = oracle.encode_query([text]).to_dense().numpy()

    with Encoder.from_pretrained(saved, dtype="fp32", threads=1) as encoder:
        cut = encoder.sparse_embed([text], prompt_name="query", truncate=True)
        (one,) = encoder.sparse_embed([text], prompt_name="query", truncate_prompt_tokens=1)
        with refused_request("this model takes at most 6"):
            encoder.sparse_embed([text], prompt_name="query")
        with pytest.raises(RequestError, match="row 0: text has no tokens"):
            encoder.sparse_embed([""], prompt_name="query")

    np.testing.assert_array_equal(dense(cut, SIZE), expected)
    assert len(one.indices) <= 1


def test_queries_wait_for_no_batch_and_fill_no_cache(kept):
    settings = {"dtype": "fp32", "threads": 1, "response_cache_bytes": 1 << 20}
    with Encoder.from_pretrained(kept, **settings) as encoder:
        encoder.sparse_embed(TEXTS, prompt_name="query")
        assert encoder._service.model.cache.use().misses == 0
        encoder.sparse_embed(TEXTS, prompt_name="document")
        assert encoder._service.model.cache.use().misses == len(TEXTS)


def change_route(folder, **parts):
    config = json.loads((folder / ROUTES).read_text())
    for name, fields in parts.items():
        config[name] |= fields
    write_file(folder, ROUTES, config)


@pytest.mark.parametrize(
    "parts, message",
    [
        ({"structure": {"image": [QUERIES]}}, "; allowed: query (SparseStaticEmbedding), documen"),
        ({"structure": {"query": [POOLING]}}, "has the routes query (SpladePooling), document (Tr"),
        ({"structure": {"document": [DOCUMENTS]}}, "document (Transformer); allowed"),
        ({"structure": {"query": "x"}}, 'has the route "x"; allowed: a list of folders'),
        ({"structure": {"query": ["../x"]}}, 'names the folder "../x"; allowed: a folder beside'),
        ({"types": {QUERIES: "mine.SparseStaticEmbedding"}}, "; allowed: modules of sentence_tra"),
        ({"parameters": {"route_mappings": {"(None, 'text')": "query"}}}, "has route_mappings {"),
        ({"parameters": {"default_route": "image"}}, 'has default_route "image"; allowed: query'),
        (
            {"parameters": {"default_route": None, "allow_empty_key": False}},
            "has default_route null; allowed: query, document",
        ),
    ],
)
def test_refuses_routes_that_are_not_served(saved, parts, message):
    change_route(saved, **parts)

    with refused(message) as caught:
        Checkpoint.open(saved)
    assert str(caught.value).startswith(ROUTES)


def test_refuses_a_router_beside_other_modules(saved):
    modules = json.loads((saved / "modules.json").read_text())
    write_file(
        saved, "modules.json", [*modules, {"type": "sentence_transformers.models.Normalize"}]
    )

    with refused("modules.json has the module Router; allowed: Router alone"):
        Checkpoint.open(saved)


def test_refuses_a_table_that_is_not_of_this_vocabulary(saved):
    weights = load_file(saved / QUERIES / WEIGHTS)["weight"]
    save_file({"weight": weights[:-1].clone()}, saved / QUERIES / WEIGHTS)
    with refused('the tensor "weight" has shape [91]; config.json implies [92]'):
        Checkpoint.open(saved).check_task("sparse_embed")

    set_fields(saved, f"{QUERIES}/config.json", path="idf.json")
    with refused(f'{QUERIES}/config.json has the field "path" ("idf.json")'):
        Checkpoint.open(saved)


def test_refuses_queries_with_another_tokenizer(saved):
    set_fields(saved, f"{QUERIES}/tokenizer.json", pre_tokenizer={"type": "Whitespace"})

    with refused(f"{QUERIES}/tokenizer.json splits queries in another way"):
        Checkpoint.open(saved)
