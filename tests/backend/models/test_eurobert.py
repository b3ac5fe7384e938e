"""EuroBERT equals transformers: each classifier, and the form of its first release."""

import dataclasses

import numpy as np
import pytest
import transformers

from tests.checkpoints import drop_field, set_fields
from tests.closeness import assert_rows_close, encoder_roundings
from varlen import Encoder
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.registry import FAMILIES

from ..refusals import refused_checkpoint as refused
from .oracle import assert_states_equal, load_oracle, logits_of, states_of


def rows_of(rng):
    return [rng.integers(1, 90, length).tolist() for length in (1, 2, 9, 33, 60, 9)]


@pytest.mark.parametrize("kind", ["EuroBertModel", "EuroBertForMaskedLM"])
def test_hidden_states_match_transformers(make_checkpoint, rng, kind):
    folder = make_checkpoint(kind, attention_bias=True, mlp_bias=True)
    rows = rows_of(rng)
    drop_field(folder, "config.json", "rms_norm_eps")

    assert_states_equal(folder, states_of(load_oracle(folder, "EuroBertModel"), rows), rows)
    assert Checkpoint.open(folder).tasks == ("embed", "hidden")


@pytest.mark.parametrize("pooling", ["late", "mean", "bos", None])
def test_classifiers_of_sequences_match_transformers(make_checkpoint, rng, pooling):
    folder = make_checkpoint(
        "EuroBertForSequenceClassification", num_labels=3, classifier_pooling=pooling or "late"
    )
    rows = rows_of(rng)
    if pooling is None:
        drop_field(folder, "config.json", "classifier_pooling")

    with Encoder.from_pretrained(folder, dtype="fp32") as encoder:
        actual = encoder.classify(rows)

    expected = logits_of(load_oracle(folder, "EuroBertForSequenceClassification"), rows)
    assert_rows_close(actual, expected, roundings=encoder_roundings(folder))


def test_a_classifier_of_tokens_matches_transformers(make_checkpoint, rng):
    folder = make_checkpoint("EuroBertForTokenClassification", num_labels=4)
    rows = rows_of(rng)

    with Encoder.from_pretrained(folder, dtype="fp32") as encoder:
        actual = encoder.token_classify(rows)

    expected = logits_of(load_oracle(folder, "EuroBertForTokenClassification"), rows)
    assert_rows_close(actual, expected, roundings=encoder_roundings(folder))


def test_bf16_keeps_the_direction_of_vectors(make_checkpoint, rng):
    folder = make_checkpoint("EuroBertModel")
    rows = rows_of(rng)

    with Encoder.from_pretrained(folder, dtype="bf16") as encoder:
        actual = encoder.embed(rows, normalize=True)

    states = states_of(load_oracle(folder, "EuroBertModel"), rows)
    means = [each.mean(dim=0).numpy() for each in states]
    cosines = [row @ mean / np.linalg.norm(mean) for row, mean in zip(actual, means, strict=True)]
    assert min(cosines) > 0.999


def test_reads_the_first_release(make_checkpoint, rng):
    folder = make_checkpoint(
        "EuroBertForSequenceClassification", num_labels=2, classifier_pooling="mean"
    )
    rows = rows_of(rng)
    logits = logits_of(load_oracle(folder, "EuroBertForSequenceClassification"), rows)
    drop_field(folder, "config.json", "classifier_pooling")
    code = {"AutoModel": "modeling_eurobert.EuroBertModel"}
    set_fields(folder, "config.json", auto_map=code, clf_pooling="mean")

    with Encoder.from_pretrained(folder, dtype="fp32") as encoder:
        actual = encoder.classify(rows)

    assert_rows_close(actual, logits, roundings=encoder_roundings(folder))
    set_fields(folder, "config.json", auto_map={"AutoModel": "modeling.Mine"})
    with refused('auto_map with "modeling.Mine", code that is not known'):
        Checkpoint.open(folder)


def test_knows_every_field_of_transformers_configuration():
    rules = FAMILIES["eurobert"].fields
    fields = {field.name for field in dataclasses.fields(transformers.EuroBertConfig)}

    assert {field for field in fields - rules.fixed.keys() if not rules.know(field)} == set()


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("classifier_pooling", "max", 'has classifier_pooling "max"; allowed: bos, mean, late'),
        ("is_causal", True, "has is_causal true; allowed: false"),
        ("hidden_act", "gelu", 'has hidden_act "gelu"; allowed: "silu"'),
    ],
)
def test_refuses_a_field_that_would_change_results(make_checkpoint, field, value, message):
    folder = make_checkpoint("EuroBertModel")
    set_fields(folder, "config.json", **{field: value})

    with refused(message):
        Checkpoint.open(folder)
