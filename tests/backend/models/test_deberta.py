"""DeBERTa checkpoints: all forms of their positions match transformers; what is refused."""

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

from tests.checkpoints import change_tensors, set_fields
from tests.closeness import assert_rows_close, encoder_roundings
from varlen import Encoder
from varlen.execution.int8 import int8_model
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.deberta import DebertaConfig, distance_rows

from ..refusals import refused_checkpoint as refused
from .oracle import assert_states_equal, load_oracle, logits_of, states_of

CLASSIFIER = "DebertaV2ForSequenceClassification"
# What differs from the small checkpoint, which has the form of DeBERTa-v3.
FORMS = {
    "v2-xlarge-without-convolution": {"attention_head_size": 8, "norm_rel_ebd": "layer_norm"},
    "odd-heads": {"hidden_size": 35, "num_attention_heads": 5, "intermediate_size": 71},
    "own-projections": {"share_att_key": False},
    "own-keys": {"share_att_key": False, "pos_att_type": ["c2p"]},
    "own-queries": {"share_att_key": False, "pos_att_type": "p2c"},
    "keys": {"pos_att_type": ["c2p"]},
    "queries": {"pos_att_type": ["p2c"], "norm_rel_ebd": "none"},
    "no-terms": {"pos_att_type": None},
    "no-buckets": {"position_buckets": -1},
    "near": {"position_buckets": -1, "max_relative_positions": 7},
    "few-buckets": {"position_buckets": 4, "max_relative_positions": 9},
    "odd-buckets": {"position_buckets": 13},
    "absolute": {"position_biased_input": True, "relative_attention": False, "pos_att_type": []},
    "absolute-scaled": {"position_biased_input": True, "relative_attention": False},
    "both-positions": {"position_biased_input": True},
    "narrow-embeddings": {"embedding_size": 10},
    "narrow-embeddings-with-positions": {"embedding_size": 10, "position_biased_input": True},
    "relu": {"hidden_act": "relu", "layer_norm_eps": 1e-3},
    "v2-xlarge": {"conv_kernel_size": 3, "conv_act": "gelu", "norm_rel_ebd": "layer_norm"},
    "wide-convolution-of-one-layer": {
        "conv_kernel_size": 5,
        "num_hidden_layers": 1,
        "hidden_size": 35,
        "num_attention_heads": 5,
    },
}


def rows_of(rng, lengths=(1, 2, 17, 64, 33, 17)):
    return [rng.integers(5, 40, length).tolist() for length in lengths]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_positions_matches_transformers(make_checkpoint, rng, form):
    folder = make_checkpoint("DebertaV2Model", **FORMS[form])
    rows = rows_of(rng)

    assert_states_equal(folder, states_of(load_oracle(folder, "DebertaV2Model"), rows), rows)


def test_sequences_longer_than_all_buckets_match_transformers(make_checkpoint, rng):
    folder = make_checkpoint(
        "DebertaV2Model",
        max_position_embeddings=512,
        max_relative_positions=100,
        position_buckets=32,
    )
    rows = rows_of(rng, [512, 3, 130])

    assert_states_equal(folder, states_of(load_oracle(folder, "DebertaV2Model"), rows), rows)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("activation", ["gelu", "tanh"])
def test_a_classifier_has_the_activation_of_its_pooler(make_checkpoint, rng, activation, dtype):
    folder = make_checkpoint(CLASSIFIER, num_labels=3, pooler_hidden_act=activation)
    rows = rows_of(rng)

    with Encoder.from_pretrained(folder, dtype=dtype) as encoder:
        actual = encoder.classify(rows)

    precision = torch.float32 if dtype == "fp32" else torch.bfloat16
    roundings = encoder_roundings(folder, precision)
    expected = logits_of(load_oracle(folder, CLASSIFIER), rows)
    assert_rows_close(actual, expected, roundings=roundings, dtype=precision)


@pytest.mark.parametrize("window", [0, 3])
def test_padding_in_transformers_changes_nothing(make_checkpoint, rng, window):
    folder = make_checkpoint(CLASSIFIER, num_labels=2, conv_kernel_size=window)
    rows = rows_of(rng, [5, 40, 12])
    model = load_oracle(folder, CLASSIFIER)
    ids = torch.zeros(3, 40, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, : len(row)], mask[index, : len(row)] = torch.tensor(row), 1

    with Encoder.from_pretrained(folder, dtype="fp32") as encoder:
        actual = encoder.classify(rows)

    with torch.inference_mode():
        expected = model(ids, attention_mask=mask).logits
    assert_rows_close(actual, list(expected), roundings=encoder_roundings(folder))


@pytest.mark.parametrize("layers", [1, 2])
def test_a_classifier_may_have_a_convolution(make_checkpoint, rng, layers):
    folder = make_checkpoint(CLASSIFIER, num_labels=3, num_hidden_layers=layers, conv_kernel_size=3)
    rows = rows_of(rng)

    with Encoder.from_pretrained(folder, dtype="bf16") as encoder:
        actual = encoder.classify(rows)

    roundings = encoder_roundings(folder, torch.bfloat16)
    expected = logits_of(load_oracle(folder, CLASSIFIER), rows)
    assert_rows_close(actual, expected, roundings=roundings, dtype=torch.bfloat16)


def test_int8_keeps_the_direction_of_vectors(make_checkpoint, rng, monkeypatch):
    # enough texts to calibrate a small model
    monkeypatch.setattr(int8_model, "TEXTS", int8_model.TEXTS[:16])
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}
    folder = make_checkpoint("DebertaV2Model", **sizes)
    rows = rows_of(rng)

    with Encoder.from_pretrained(folder, dtype="int8") as encoder:
        actual = np.stack(encoder.embed(rows, normalize=True))

    means = [
        states.mean(dim=0) for states in states_of(load_oracle(folder, "DebertaV2Model"), rows)
    ]
    expected = np.stack([(mean / mean.norm()).numpy() for mean in means])
    assert (actual * expected).sum(axis=1).min() > 0.99


@pytest.mark.parametrize(
    "buckets, furthest, positions",
    [(256, 512, 512), (32, 100, 512), (13, 64, 64), (4, 9, 64), (0, 20, 64), (0, 512, 512)],
)
def test_distances_have_the_rows_of_transformers(make_checkpoint, buckets, furthest, positions):
    settings = {"position_buckets": buckets, "max_relative_positions": furthest}
    config = transformers.DebertaV2Config(max_position_embeddings=positions, **settings)

    actual = distance_rows(DebertaConfig.read(config.to_dict()))

    tokens, span = torch.zeros(1, positions, 1), buckets or furthest
    distances = build_relative_position(tokens, tokens, buckets, furthest)[0]
    expected = (distances + span).clamp(0, 2 * span - 1)
    # of the last query, which all other tokens precede, and of the first one
    assert actual[:positions].tolist() == expected[-1].tolist()
    assert actual[positions - 1 :].tolist() == expected[0].tolist()


def test_a_tokenizer_converted_from_sentencepiece_matches_transformers(make_checkpoint):
    folder = make_checkpoint(CLASSIFIER, num_labels=1, vocab_size=64)
    _save_unigrams(folder)
    texts = ["The cat  sat", "a río, 42?", " leading", "\uff46\uff55\uff4c\uff4c width"]
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    model = load_oracle(folder, CLASSIFIER)
    pairs = [(first, second) for first in texts for second in texts[:2]]

    with Encoder.from_pretrained(folder, task="rerank", dtype="fp32") as encoder:
        actual = encoder.classify(pairs)

    ids = [theirs(*pair)["input_ids"] for pair in pairs]
    assert_rows_close(actual, logits_of(model, ids), roundings=encoder_roundings(folder))


def test_a_field_that_is_absent_has_the_default_of_transformers():
    full = transformers.DebertaV2Config().to_dict()
    needed = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads".split()
    )
    least = {name: full[name] for name in (*needed, "max_position_embeddings")}

    assert DebertaConfig.read(least) == DebertaConfig.read(full)


def test_a_masked_language_model_may_have_the_head_of_its_training(make_checkpoint, rng):
    folder = make_checkpoint("DebertaV2ForMaskedLM", legacy=False)
    rows = rows_of(rng, [3, 20])

    with Encoder.from_pretrained(folder, task="sparse_embed", dtype="fp32") as encoder:
        actual = encoder.sparse_embed(rows)

    # as SPLADE: the largest of log(1 + relu) over the tokens
    logits = logits_of(load_oracle(folder, "DebertaV2ForMaskedLM"), rows)
    for row, expected in zip(actual, logits, strict=True):
        weights = expected.relu().log1p().amax(dim=0)
        dense = np.zeros(len(weights), dtype=np.float32)
        dense[row.indices] = row.values
        assert_rows_close([dense], [weights], roundings=encoder_roundings(folder))


def test_tensors_of_pretraining_are_left_out(make_checkpoint):
    folder = make_checkpoint("DebertaV2ForMaskedLM", legacy=False)
    positions = {"deberta.embeddings.position_embeddings.weight": torch.zeros(64, 24)}
    change_tensors(folder, lambda tensors: tensors.update(positions))

    Checkpoint.open(folder).check_task("embed")


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("conv_kernel_size", 4, "has conv_kernel_size 4; allowed: 0 (no convolution), or odd"),
        ("conv_groups", 2, "has conv_groups 2; allowed: 1"),
        ("conv_act", "mish", 'has conv_act "mish"; allowed: gelu'),
        ("type_vocab_size", 2, "has type_vocab_size 2; allowed: 0"),
        ("attention_head_size", 64, "has attention_head_size 64; allowed: 8"),
        ("pooler_hidden_size", 12, "has pooler_hidden_size 12; allowed: 24"),
        ("pos_att_type", "c2p|p2p", 'has pos_att_type "c2p|p2p"; allowed: c2p, p2c'),
        ("norm_rel_ebd", "batch_norm", 'has norm_rel_ebd "batch_norm"; allowed: none, layer_norm'),
        ("position_buckets", 3, "has position_buckets 3; allowed: -1 (none), or 4 to 125"),
        ("position_buckets", 126, "has position_buckets 126; allowed: -1 (none), or 4 to 125"),
        ("relative_attention", "yes", "has relative_attention 'yes'; allowed: true, false"),
        ("num_attention_heads", 7, "hidden_size 24 is not a multiple of num_attention_heads 7"),
        ("num_hidden_layers", 0, "has num_hidden_layers 0; allowed: whole numbers from 1"),
        (
            "num_hidden_layers",
            10**9,
            "has num_hidden_layers 1000000000; allowed: whole numbers from 1 to",
        ),
        (
            "max_position_embeddings",
            10**10,
            "has max_position_embeddings 10000000000; allowed: whole",
        ),
        ("rope_scaling", {"factor": 2.0}, 'has the field "rope_scaling"'),
    ],
)
def test_refuses_a_field_that_would_change_results(make_checkpoint, field, value, message):
    folder = make_checkpoint("DebertaV2Model")
    set_fields(folder, "config.json", **{field: value})

    with refused(message):
        Checkpoint.open(folder)


def _save_unigrams(folder):
    """Save a tokenizer in the form that transformers makes of DeBERTa-v3's SentencePiece model."""
    special = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
    pieces = ["▁", "▁the", "▁c", "at", "▁s", "▁a", "▁r", "í", "o", ",", "▁4", "2", "?", "▁full"]
    letters = [letter for letter in "abcdefghijklmnopqrstuvwxyzTC" if letter not in pieces]
    vocabulary = [(token, 0.0) for token in special]
    vocabulary += [(piece, -1.0 - place / 8) for place, piece in enumerate(pieces + letters)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=3))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace("\n", " "), normalizers.NFKC(), normalizers.Strip()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    set_fields(folder, "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", **names)
