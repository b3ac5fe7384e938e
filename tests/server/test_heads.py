"""Masked language models and vectors of tokens on the real server, over both protocols."""

import shutil

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import MultiVectorEncoder, SparseEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from tokenizers import Tokenizer

from tests.checkpoints import add_mask, save_checkpoint
from tests.closeness import assert_close, assert_rows_close, encoder_roundings
from tests.gliner2_models import (
    PARTS,
    SCHEMA,
    Gliner2,
    assert_same,
    clear_of_scores,
    save_gliner2,
)
from tests.gliner_models import Gliner, save_gliner, thresholds_of
from tests.question_pipeline import QuestionPipeline
from tests.rerank_forms import PAIRS, expected_scores, save_reranker
from varlen_client import Client, InvalidRequest, ServerError

from .serving import add_model, load, unload

pytestmark = pytest.mark.full

TEXTS = ["the cat", "a", "river, the river! is it 42?"]


@pytest.fixture(scope="module")
def masked_lm(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("masked"), "BertForMaskedLM")


@pytest.fixture(scope="module")
def splade(server, repository, masked_lm, tmp_path_factory):
    """A model of sentence-transformers, loaded as "sparse_encoder"."""
    folder = tmp_path_factory.mktemp("splade")
    SparseEncoder(str(masked_lm), device="cpu", prompts={"query": "a: "}).save_pretrained(
        str(folder)
    )
    add_model(repository, "sparse_encoder", folder, response_cache_bytes="1000000")
    assert load(server, "sparse_encoder") is None
    yield folder
    unload(server, "sparse_encoder")


def test_sparse_vectors_are_those_of_sentence_transformers(splade, url):
    oracle = SparseEncoder(str(splade), device="cpu")
    expected = oracle.encode(TEXTS).to_dense().numpy()
    tokens = oracle.tokenizer.convert_ids_to_tokens(range(expected.shape[1]))

    with Client(url, "sparse_encoder") as client:
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


def test_a_wrong_number_of_terms_is_refused(splade, url):
    del splade
    with Client(url, "sparse_encoder") as client:
        with pytest.raises(
            InvalidRequest, match="max_active_dims is 93; allowed: whole numbers from 1 to 92"
        ):
            client.sparse_embed(TEXTS, max_active_dims=93)
        with pytest.raises((InvalidRequest, ServerError), match="does not serve embed"):
            client.embed(TEXTS)


def test_vectors_of_tokens_are_those_of_sentence_transformers(server, repository, tmp_path, url):
    folder, name = tmp_path / "saved", f"colbert-{url[:4]}"
    made = save_checkpoint(tmp_path / "plain")
    expansion = {"strategy": "fixed", "length": 32, "token": "[MASK]"}
    transformer = Transformer(str(made), query_expansion=expansion)
    dense = Dense(24, 5, bias=False, module_input_name="token_embeddings")
    stack = [transformer, dense, MultiVectorMask(["?"]), Normalize("token_embeddings")]
    oracle = MultiVectorEncoder(modules=stack, device="cpu")
    oracle.save_pretrained(str(folder))
    add_model(repository, name, folder, response_cache_bytes="1000000")
    assert load(server, name) is None
    try:
        with Client(url, name) as client:
            queries = client.token_embed(TEXTS, prompt_name="query")
            documents = client.token_embed(TEXTS, prompt_name="document")
            nothing = client.token_embed([[oracle.tokenizer.convert_tokens_to_ids("?")]])
            with pytest.raises(InvalidRequest, match="has the prompts: document, query"):
                client.token_embed(TEXTS, prompt_name="passage")
    finally:
        unload(server, name)

    # a row of only skipped tokens
    assert [each.shape for each in nothing] == [(0, 5)]
    roundings = encoder_roundings(folder) + 100
    expected = oracle.encode_query(TEXTS, convert_to_numpy=True)
    assert_rows_close(queries, expected, roundings=roundings)
    expected = oracle.encode_document(TEXTS, convert_to_numpy=True)
    assert_rows_close(documents, expected, roundings=roundings)


def test_masks_are_filled_as_by_transformers(server, repository, masked_lm, tmp_path, url):
    folder = shutil.copytree(masked_lm, tmp_path / "filling")
    add_mask(folder)
    name = f"filling-{url[:4]}"
    add_model(repository, name, folder, task="fill_mask")
    assert load(server, name) is None
    try:
        with Client(url, name) as client:
            [[single], masks] = client.fill_mask(["a [MASK]", "[MASK] cat [MASK]"], top_k=3)
            with pytest.raises(InvalidRequest, match=r"has 0 tokens \[MASK\]; this model takes 1"):
                client.fill_mask(["the cat"])
    finally:
        unload(server, name)

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = torch.tensor([tokenizer.encode("a [MASK]").ids])
    with torch.inference_mode():
        logits = transformers.BertForMaskedLM.from_pretrained(folder).eval()(ids).logits[0]
    best = logits[ids[0] == 4].softmax(-1)[0].topk(3)
    assert [token.token_id for token in single] == best.indices.tolist()
    assert [token.text for token in single] == [tokenizer.decode([i]) for i in best.indices]
    np.testing.assert_allclose([token.score for token in single], best.values, rtol=1e-3)
    assert [len(mask) for mask in masks] == [3, 3]


def test_instructions_reach_a_reranker_of_a_named_form(server, repository, tmp_path, url):
    name = f"named_form_{url.partition(':')[0]}"
    folder = save_reranker(tmp_path / "reranker", "Qwen2ForCausalLM")
    add_model(repository, name, folder, rerank_form="mxbai", response_cache_bytes="1000000")
    query, documents = PAIRS[0][0], [document for _, document in PAIRS]
    pairs = [(query, document) for document in documents]
    assert load(server, name) is None

    with Client(url, name) as client:
        plain = client.rerank(query, documents)
        told = client.rerank(query, documents, instruction="find the river?")
        # out of the cache
        again = client.rerank(query, documents)
        with pytest.raises(InvalidRequest, match="instruction is .*; allowed: a string of 1 to"):
            client.rerank(query, documents, instruction="a" * 4097)
    unload(server, name)

    roundings = 4 * encoder_roundings(folder)
    assert_close(plain[:, None], expected_scores(folder, "mxbai", pairs), roundings=roundings)
    expected = expected_scores(folder, "mxbai", pairs, "find the river?")
    assert_close(told[:, None], expected, roundings=roundings)
    np.testing.assert_array_equal(again, plain)


def test_entities_are_those_of_the_pipeline(server, repository, tmp_path, url):
    name = f"spans_{url.partition(':')[0]}"
    labels = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
    named = {
        "id2label": dict(enumerate(labels)),
        "label2id": {each: at for at, each in enumerate(labels)},
    }
    folder = save_checkpoint(tmp_path / "entities", "BertForTokenClassification", **named)
    add_model(repository, name, folder)
    tokenizer = transformers.BertTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    model = transformers.BertForTokenClassification.from_pretrained(folder)
    assert load(server, name) is None

    with Client(url, name) as client:
        for strategy in ("none", "simple", "first", "average", "max"):
            pipeline = transformers.TokenClassificationPipeline(
                model=model, tokenizer=tokenizer, aggregation_strategy=strategy
            )
            expected = pipeline(TEXTS)
            actual = client.predict_entities(TEXTS, aggregation_strategy=strategy)

            assert [[(e.word, e.start, e.end) for e in row] for row in actual] == [
                [(e["word"], e["start"], e["end"]) for e in row] for row in expected
            ]
            field = "entity" if strategy == "none" else "entity_group"
            assert [[e.label for e in row] for row in actual] == [
                [e[field] for e in row] for row in expected
            ]
            scores = [[e.score for e in row] for row in actual]
            assert scores == [
                pytest.approx([float(e["score"]) for e in row], rel=1e-3) for row in expected
            ]
    unload(server, name)


def test_answers_to_questions_are_those_of_the_pipeline(server, repository, tmp_path, url):
    name = f"questions_{url.partition(':')[0]}"
    kind = "BertForQuestionAnswering"
    folder = save_checkpoint(tmp_path / "questions", kind)
    add_model(repository, name, folder)
    oracle = QuestionPipeline(folder, kind, gives_types=True)
    pairs = [(text, " ".join([*TEXTS, text] * (8 * row + 1))) for row, text in enumerate(TEXTS)]
    assert load(server, name) is None

    with Client(url, name) as client:
        for options in ({}, {"top_k": 5, "doc_stride": 9, "handle_impossible_answer": True}):
            actual = client.question_answer(pairs, **options)

            expected = [oracle(*pair, **options) for pair in pairs]
            assert [[(e.start, e.end, e.answer) for e in row] for row in actual] == [
                [(e["start"], e["end"], e["answer"]) for e in row] for row in expected
            ]
            assert [[e.score for e in row] for row in actual] == [
                pytest.approx([e["score"] for e in row], rel=1e-3) for row in expected
            ]
        with pytest.raises(InvalidRequest, match="the context is empty; send a text"):
            client.question_answer([("a", "")])
    unload(server, name)


def test_spans_are_those_of_the_library(server, repository, tmp_path, url):
    protocol = url.partition(":")[0]
    name = f"gliner_{protocol}"
    # one protocol with an encoder of labels
    labels_kind = "BertModel" if protocol == "grpc" else None
    folder = save_gliner(tmp_path / "gliner", labels_kind=labels_kind)
    add_model(repository, name, folder, response_cache_bytes="1000000")
    oracle, labels = Gliner(folder), ["person name", "x"]
    texts = [*TEXTS, "the \U0001f600 cat"]
    assert load(server, name) is None
    try:
        with Client(url, name) as client:
            for form in ({}, {"flat_ner": False, "multi_label": True}):
                for limit in thresholds_of(oracle, texts, labels):
                    rows = client.extract([*texts, ""], labels=labels, threshold=limit, **form)
                    found = [[(e.start, e.end, e.text, e.label) for e in row] for row in rows]
                    expected = [
                        oracle.entities(text, labels, threshold=limit, **form) for text in texts
                    ]
                    assert found == [*([e[:4] for e in row] for row in expected), []]
            # arrays without elements
            assert client.extract(texts, labels=labels, threshold=1) == [[]] * len(texts)
            with pytest.raises(InvalidRequest, match="the request has no labels; send the para"):
                client.extract(texts)
            with pytest.raises(InvalidRequest, match=r'labels is "\[\]"; allowed: a list of 1'):
                client.extract(texts, labels=[])
    finally:
        unload(server, name)


def test_answers_to_a_schema_are_those_of_the_library(server, repository, tmp_path, url):
    name = f"gliner2_{url.partition(':')[0]}"
    folder = save_gliner2(tmp_path / "gliner2", scale=1)
    add_model(repository, name, folder, response_cache_bytes="1000000")
    oracle, texts = Gliner2(folder), [*TEXTS, "the \U0001f600 cat"]
    assert load(server, name) is None
    try:
        with Client(url, name) as client:
            # from the cache too
            for given in (SCHEMA, PARTS["relations"], SCHEMA):
                schema, limit = clear_of_scores(oracle, texts, given)
                rows = client.extract_schema(texts, schema=schema, threshold=limit)
                expected = [oracle.extract(text, schema, threshold=limit) for text in texts]
                assert_same(rows, expected)
            with pytest.raises(InvalidRequest, match='a key of schema is "entity"'):
                client.extract_schema(texts, schema={"entity": ["x"]})
    finally:
        unload(server, name)


def test_labels_of_a_request_are_those_of_the_pipeline(server, repository, tmp_path, url):
    name = f"nli_{url.partition(':')[0]}"
    labels = ["contradiction", "neutral", "entailment"]
    named = {
        "id2label": dict(enumerate(labels)),
        "label2id": {each: at for at, each in enumerate(labels)},
    }
    folder = save_checkpoint(tmp_path / "nli", "BertForSequenceClassification", **named)
    add_model(repository, name, folder)
    pipeline = transformers.ZeroShotClassificationPipeline(
        model=transformers.BertForSequenceClassification.from_pretrained(folder),
        tokenizer=transformers.BertTokenizerFast(tokenizer_file=str(folder / "tokenizer.json")),
    )
    asked = {"hypothesis_template": "it is the {}", "multi_label": True}
    assert load(server, name) is None

    with Client(url, name) as client:
        for options in ({}, asked):
            actual = client.zero_shot(TEXTS, ["sea", "cat", "river"], **options)
            for row, expected in zip(
                actual, pipeline(TEXTS, ["sea", "cat", "river"], **options), strict=True
            ):
                assert [each.label for each in row] == expected["labels"]
                assert [each.score for each in row] == pytest.approx(expected["scores"], rel=1e-3)
    unload(server, name)
