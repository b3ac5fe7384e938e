"""ModernBERT checkpoints: the classifier's forms, older configurations, and what is refused."""

import pytest
import torch
import transformers

from tests.checkpoints import drop_field, set_fields
from tests.closeness import assert_rows_close, encoder_roundings
from varlen import Encoder
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.modernbert import ModernBertConfig

from ..refusals import refused_checkpoint as refused
from .oracle import assert_states_equal, load_oracle, logits_of, states_of

CLASSIFIER = "ModernBertForSequenceClassification"


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_classifier_reads_the_first_token_or_the_mean(
    make_checkpoint, rng, pooling, has_bias, dtype
):
    fields = {"classifier_pooling": pooling, "classifier_bias": has_bias, "norm_bias": has_bias}
    folder = make_checkpoint(CLASSIFIER, num_labels=3, classifier_activation="relu", **fields)
    model = load_oracle(folder, CLASSIFIER)
    rows = [rng.integers(5, 40, length).tolist() for length in (1, 17, 60)]

    with Encoder.from_pretrained(folder, dtype=dtype) as encoder:
        actual = encoder.classify(rows)

    expected = logits_of(model, rows)
    precision = torch.float32 if dtype == "fp32" else torch.bfloat16
    roundings = encoder_roundings(folder, precision)
    assert_rows_close(actual, expected, roundings=roundings, dtype=precision)


def test_fields_of_older_configurations_are_read(make_checkpoint, rng):
    folder = make_checkpoint("ModernBertModel", num_hidden_layers=5)
    for field in ("layer_types", "rope_parameters"):
        drop_field(folder, "config.json", field)
    old = {
        "global_attn_every_n_layers": 2,
        "global_rope_theta": 500.0,
        "local_rope_theta": 70.0,
    }
    set_fields(folder, "config.json", **old)
    model = load_oracle(folder, "ModernBertModel")
    assert model.config.layer_types == ["full_attention", "sliding_attention"] * 2 + [
        "full_attention"
    ]
    rows = [rng.integers(5, 40, length).tolist() for length in (3, 60)]

    assert_states_equal(folder, states_of(model, rows), rows)


def test_a_field_that_is_absent_has_the_default_of_transformers():
    default = transformers.ModernBertConfig()
    full = {name: value for name, value in default.to_dict().items() if value is not None}
    needed = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads".split()
    )
    least = {name: full[name] for name in (*needed, "max_position_embeddings")}

    assert ModernBertConfig.read(least) == ModernBertConfig.read(full)


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("layer_types", ["full_attention"], "allowed: 4 names, each of full_attention"),
        ("layer_types", ["full", "full", "full", "full"], "allowed: 4 names"),
        ("layer_types", [{}, [], None, "full_attention"], "allowed: 4 names"),
        ("num_hidden_layers", 2**63, "allowed: whole numbers from 1 to 10000"),
        ("rope_parameters", {"rope_type": "yarn"}, "allowed: an object with full_attention"),
        (
            "rope_parameters",
            {"full_attention": {"rope_type": "ntk"}},
            'has the type "ntk"; allowed: default',
        ),
        ("classifier_pooling", "max", 'has classifier_pooling "max"; allowed: cls, mean'),
        ("local_rope_theta", None, "has local_rope_theta None; allowed: numbers above 0"),
        ("global_rope_theta", "x", "has global_rope_theta 'x'; allowed: numbers above 0"),
        ("num_hidden_layers", 0, "has num_hidden_layers 0; allowed: whole numbers from 1"),
        ("local_attention", 0, "has local_attention 0; allowed: whole numbers from 1"),
        ("num_attention_heads", 8, "heads have 3 features; allowed: even numbers"),
        ("rope_scaling", {"factor": 2}, "has rope_scaling"),
    ],
)
def test_refuses_a_field_that_would_change_results(make_checkpoint, field, value, message):
    folder = make_checkpoint("ModernBertModel")
    set_fields(folder, "config.json", **{field: value})

    with refused(message):
        Checkpoint.open(folder)
