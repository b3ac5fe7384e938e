"""Sparse vectors of masked language models match SparseEncoder in sentence-transformers."""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sparse_encoder.modules import SpladePooling

from tests.checkpoints import WEIGHTS, change_tensors, module, set_fields, write_file
from tests.closeness import assert_close, encoder_roundings
from varlen import Encoder
from varlen.models.bert_relatives import RELATIVES
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.registry import FAMILIES

from ..refusals import refused_checkpoint as refused
from ..refusals import refused_request

TEXTS = ["the cat", "a", "river, the river! is it 42?", "the cat"]
KINDS = [
    *(family.class_name for family in RELATIVES.values()),
    *("ModernBert", "Deberta", "DebertaV2"),
]
# The head with its biases, with another width than the encoder's, and with a table of its own.
SHAPES = {
    "ModernBert": {"classifier_bias": True, "norm_bias": True, "decoder_bias": False},
    "Albert": {"embedding_size": 24, "hidden_act": "relu"},
    "Bert": {"tie_word_embeddings": False, "hidden_act": "silu"},
    "Roberta": {"hidden_act": "relu"},
}


def dense(vectors, size):
    """Return sparse vectors as rows of all terms."""
    rows = np.zeros((len(vectors), size), np.float32)
    for row, vector in zip(rows, vectors, strict=True):
        row[vector.indices] = vector.values
    return rows


def save(folder, target, *, pooling="max", activation="relu", **settings):
    """Save a checkpoint for SparseEncoder, and return it as that loads it."""
    modules = [
        Transformer(str(folder), transformer_task="fill-mask"),
        SpladePooling(pooling, activation),
    ]
    SparseEncoder(modules=modules, device="cpu", **settings).save_pretrained(str(target))
    return SparseEncoder(str(target), device="cpu")


@pytest.fixture(scope="module")
def small_masked_lm(make_checkpoint):
    """Return a shared checkpoint that tests must not change."""
    return make_checkpoint("BertForMaskedLM")


@pytest.fixture
def saved(small_masked_lm, tmp_path):
    """Return a checkpoint of SparseEncoder that a test may change."""
    save(small_masked_lm, tmp_path / "saved")
    return tmp_path / "saved"


@torch.inference_mode()
def splade_of(folder, kind, rows):
    """Return log(1 + relu(logits)), at its largest over the tokens of each row."""
    loader = getattr(transformers, kind)
    model = loader.from_pretrained(folder, dtype=torch.float32).eval()
    logits = [model(torch.tensor([row])).logits[0] for row in rows]
    return np.stack([each.clamp_min(0).log1p().amax(0).numpy() for each in logits])


@pytest.mark.parametrize("name, shape", [*((name, {}) for name in KINDS), *SHAPES.items()], ids=str)
def test_every_family_gives_the_weights_of_transformers(make_checkpoint, rng, name, shape):
    kind = f"{name}ForMaskedLM"
    folder = make_checkpoint(kind, **shape)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    # the fifth token is padding in some families, which transformers gives another position
    rows = [rng.integers(5, size, length).tolist() for length in (1, 2, 7, 33, 60, 7)]

    with Encoder.from_pretrained(folder, task="sparse_embed", dtype="fp32", threads=1) as encoder:
        actual = dense(encoder.sparse_embed(rows), size)
        alone = np.concatenate([dense(encoder.sparse_embed([row]), size) for row in rows])

    roundings = encoder_roundings(folder) + 200
    assert_close(actual, splade_of(folder, kind, rows), roundings=roundings)
    assert_close(alone, actual, roundings=roundings)


def test_every_family_with_masked_language_models_has_the_task():
    served = {name for name, family in FAMILIES.items() if family.masked_lm is not None}

    assert served >= {*RELATIVES, "modernbert"}
    assert all("sparse_embed" in FAMILIES[name].tasks for name in served)


@pytest.mark.parametrize("pooling", ["max", "sum"])
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_vectors_are_those_of_sentence_transformers(small_masked_lm, tmp_path, pooling, activation):
    folder = tmp_path / "saved"
    oracle = save(small_masked_lm, folder, pooling=pooling, activation=activation)
    expected = oracle.encode(TEXTS).to_dense().numpy()

    with Encoder.from_pretrained(folder, dtype="fp32", threads=1) as encoder:
        assert encoder.task == "sparse_embed"
        vectors = encoder.sparse_embed(TEXTS)

    assert_close(
        dense(vectors, expected.shape[1]), expected, roundings=encoder_roundings(folder) + 200
    )
    for vector in vectors:
        assert (np.diff(vector.values) <= 0).all()
        assert (vector.values > 0).all()


def test_a_vocabulary_of_several_slices_gives_the_same_weights(make_checkpoint, rng):
    folder = make_checkpoint("BertForMaskedLM", vocab_size=5000)
    rows = [rng.integers(5, 5000, length).tolist() for length in (3, 17)]

    with Encoder.from_pretrained(folder, task="sparse_embed", dtype="fp32", threads=1) as encoder:
        actual = dense(encoder.sparse_embed(rows), 5000)

    expected = splade_of(folder, "BertForMaskedLM", rows)
    assert_close(actual, expected, roundings=encoder_roundings(folder) + 200)


def test_bf16_keeps_the_direction_of_vectors(make_checkpoint, rng):
    folder = make_checkpoint("BertForMaskedLM", initializer_range=0.05)
    rows = [rng.integers(5, 90, length).tolist() for length in (1, 4, 33)]
    settings = {"task": "sparse_embed", "threads": 1}

    with Encoder.from_pretrained(folder, dtype="fp32", **settings) as encoder:
        exact = dense(encoder.sparse_embed(rows), 92)
    with Encoder.from_pretrained(folder, dtype="bf16", **settings) as encoder:
        rough = dense(encoder.sparse_embed(rows), 92)

    lengths = np.linalg.norm(exact, axis=1) * np.linalg.norm(rough, axis=1)
    assert ((exact * rough).sum(axis=1) / lengths).min() > 0.999


def test_a_checkpoint_or_a_request_keeps_the_largest_weights(small_masked_lm, tmp_path):
    folder = tmp_path / "saved"
    oracle = save(small_masked_lm, folder, max_active_dims=5)

    with Encoder.from_pretrained(folder, dtype="fp32", threads=1) as encoder:
        by_default = encoder.sparse_embed(TEXTS)
        by_request = encoder.sparse_embed(TEXTS, max_active_dims=9)
        with refused_request("max_active_dims is 93; allowed: whole numbers from 1 to 92"):
            encoder.sparse_embed(TEXTS, max_active_dims=93)

    for vectors, most in ((by_default, None), (by_request, 9)):
        expected = oracle.encode(TEXTS, max_active_dims=most).to_dense().numpy()
        assert [len(each.indices) for each in vectors] == [most or 5] * len(TEXTS)
        np.testing.assert_allclose(dense(vectors, 92), expected, rtol=1e-4, atol=1e-5)


def test_a_named_prompt_gives_the_vectors_of_sentence_transformers(small_masked_lm, tmp_path):
    prompts = {"query": "the cat is: ", "document": ""}
    oracle = save(small_masked_lm, tmp_path / "saved", prompts=prompts)
    expected = oracle.encode_query(TEXTS).to_dense().numpy()

    with Encoder.from_pretrained(tmp_path / "saved", dtype="fp32", threads=1) as encoder:
        actual = encoder.sparse_embed(TEXTS, prompt_name="query")

    np.testing.assert_allclose(dense(actual, 92), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "kinds, message",
    [
        (["Router"], "has no router_config.json"),
        (["Transformer", "Router"], 'has a module "Router"; allowed'),
        (["SparseStaticEmbedding"], 'has a module "SparseStaticEmbedding"; allowed'),
        (["Transformer", "Pooling", "SparseAutoEncoder"], 'a module "SparseAutoEncoder"; allowed'),
        (["Transformer", "SpladePooling", "Normalize"], "or Transformer, SpladePooling"),
        (["MLMTransformer"], "or Transformer, SpladePooling"),
    ],
)
def test_refuses_other_sparse_modules_by_name(saved, kinds, message):
    write_file(saved, "modules.json", [module(kind) for kind in kinds])

    with refused(message):
        Checkpoint.open(saved)


@pytest.mark.parametrize(
    "name, fields, message",
    [
        ("1_SpladePooling/config.json", {"pooling_strategy": "mean"}, '"mean"; allowed: max, sum'),
        ("1_SpladePooling/config.json", {"activation_function": "gelu"}, "allowed: relu, log1p"),
        ("1_SpladePooling/config.json", {"threshold": 2}, 'has the field "threshold" (2)'),
        ("config_sentence_transformers.json", {"max_active_dims": 0}, "max_active_dims 0; allowed"),
        (
            "sentence_bert_config.json",
            {"transformer_task": "feature-extraction"},
            'transformer_task "feature-extraction"; allowed: fill-mask',
        ),
    ],
)
def test_refuses_a_field_that_is_not_served(saved, name, fields, message):
    set_fields(saved, name, **fields)

    with refused(message):
        Checkpoint.open(saved)


def test_reads_the_modules_of_older_releases(saved):
    expected = SparseEncoder(str(saved), device="cpu").encode(TEXTS).to_dense().numpy()
    names = [("MLMTransformer", ""), ("SpladePooling", "1_SpladePooling")]
    kinds = [f"sentence_transformers.sparse_encoder.models.{kind}" for kind, _ in names]
    write_file(
        saved,
        "modules.json",
        [{"path": path, "type": kind} for kind, (_, path) in zip(kinds, names, strict=True)],
    )
    write_file(saved, "sentence_bert_config.json", {"max_seq_length": 64, "do_lower_case": False})

    with Encoder.from_pretrained(saved, dtype="fp32", threads=1) as encoder:
        actual = encoder.sparse_embed(TEXTS)

    np.testing.assert_allclose(dense(actual, 92), expected, rtol=1e-4, atol=1e-5)


def test_refuses_a_checkpoint_without_the_head(make_checkpoint, small_masked_lm, tmp_path):
    with refused('"sparse_embed" needs a BertForMaskedLM checkpoint; this one is a BertModel'):
        Checkpoint.open(make_checkpoint()).check_task("sparse_embed")

    folder = shutil.copytree(small_masked_lm, tmp_path / "copy")
    change_tensors(folder, lambda tensors: tensors.pop("cls.predictions.bias"))
    Checkpoint.open(folder).check_task("embed")
    with refused('the checkpoint has no tensor "cls.predictions.bias"'):
        Checkpoint.open(folder).check_task("sparse_embed")


def test_refuses_a_table_that_is_not_the_one_it_is_said_to_be(small_masked_lm, tmp_path):
    folder = shutil.copytree(small_masked_lm, tmp_path / "copy")
    tensors = load_file(folder / WEIGHTS)
    table = tensors["bert.embeddings.word_embeddings.weight"]
    save_file({**tensors, "cls.predictions.decoder.weight": table + 1}, folder / WEIGHTS)

    with refused('"cls.predictions.decoder.weight" is not the embedding table'):
        Encoder.from_pretrained(folder, task="sparse_embed")
