"""Encoder families: random checkpoints match transformers, and fields that are not served are refused."""

import dataclasses

import numpy as np
import pytest
import torch
import transformers

from tests.checkpoints import change_tensors, set_fields
from tests.closeness import assert_rows_close, encoder_roundings
from varlen import Encoder
from varlen.models.bert_relatives import RELATIVES
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.registry import FAMILIES as FAMILIES_OF_CHECKPOINTS

from ..refusals import refused_checkpoint as refused
from .oracle import load_oracle, logits_of, states_of

# The beginning of the classes' names in transformers, and more shapes than the usual small one.
POST_NORM = {name: family.class_name for name, family in RELATIVES.items()}
FAMILIES = {
    **POST_NORM,
    "modernbert": "ModernBert",
    "deberta": "Deberta",
    "deberta-v2": "DebertaV2",
}
SHAPES = {
    "roberta": {"pad_token_id": 0, "max_position_embeddings": 65, "hidden_act": "relu"},
    "xlm-roberta": {"hidden_size": 35, "num_attention_heads": 5, "layer_norm_eps": 1e-5},
    "camembert": {"num_hidden_layers": 0},
    "distilbert": {"dim": 35, "n_heads": 5, "activation": "relu"},
    "electra": {"embedding_size": 24},
    "albert": {"hidden_size": 35, "num_attention_heads": 5, "embedding_size": 35},
    "nomic_bert": {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
    "gte": {"hidden_act": "silu", "hidden_size": 42, "type_vocab_size": 1},
    "modernbert": {
        "local_attention": 5,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "attention_bias": True,
        "mlp_bias": True,
        "norm_bias": True,
    },
    "mpnet": {"max_position_embeddings": 302},
    "deberta": {
        "pos_att_type": ["p2c"],
        "max_relative_positions": 9,
        "position_biased_input": True,
        "hidden_size": 35,
        "num_attention_heads": 5,
    },
    # without shared projections and buckets
    "deberta-v2": {
        "share_att_key": False,
        "position_buckets": -1,
        "max_relative_positions": 20,
        "norm_rel_ebd": "none",
        "hidden_size": 35,
        "num_attention_heads": 5,
    },
}
TEXTS = ["the cat", "a", "river, the river! is it 42?", "x" * 40]
PAIRS = [("the cat", "a river"), ("a", "b"), ("is it?", "the cat is in the river, 7 times")]


def rows_of(rng, vocab_size, pad=None):
    """Return rows of token ids; transformers gives padding tokens another position."""
    ids = np.setdiff1d(np.arange(vocab_size), [] if pad is None else [pad])
    return [rng.choice(ids, size=length).tolist() for length in (1, 2, 7, 33, 60, 7)]


def check(folder, actual, expected):
    assert_rows_close(actual, expected, roundings=encoder_roundings(folder))


CASES = [
    *((name, {}) for name in FAMILIES if name != "bert"),
    *SHAPES.items(),
]


@pytest.mark.parametrize("name, shape", CASES)
def test_hidden_states_match_transformers(make_checkpoint, rng, name, shape):
    folder = make_checkpoint(f"{FAMILIES[name]}Model", **shape)
    model = load_oracle(folder, f"{FAMILIES[name]}Model")
    rows = rows_of(rng, model.config.vocab_size, model.config.pad_token_id)
    if name == "mpnet":
        # further than the last bucket of distances
        rows.append(rows[4] * 4)
        rows[-1] = rows[-1][: model.config.max_position_embeddings - 2]

    with Encoder.from_pretrained(folder, task="hidden", dtype="fp32") as encoder:
        actual = encoder.hidden(rows)
        alone = encoder.hidden(rows[-1:])

    check(folder, actual, states_of(model, rows))
    check(folder, alone, actual[-1:])


@pytest.mark.parametrize("task", ["SequenceClassification", "TokenClassification"])
@pytest.mark.parametrize("name", FAMILIES)
def test_classification_matches_transformers(make_checkpoint, rng, name, task):
    kind = f"{FAMILIES[name]}For{task}"
    folder = make_checkpoint(kind, num_labels=3)
    model = load_oracle(folder, kind)
    rows = rows_of(rng, model.config.vocab_size, model.config.pad_token_id)

    with Encoder.from_pretrained(folder, dtype="fp32") as encoder:
        actual = getattr(encoder, encoder.task)(rows)

    check(folder, actual, logits_of(model, rows))


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {"xlm-roberta", "jina_embeddings_v3"}))
def test_pairs_have_token_types_only_where_the_family_has_them(make_checkpoint, name):
    kind = f"{FAMILIES[name]}ForSequenceClassification"
    folder = make_checkpoint(kind, num_labels=1)
    model = load_oracle(folder, kind)
    names = ["input_ids", "token_type_ids", "attention_mask"]
    set_fields(
        folder,
        "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        model_input_names=names,
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    has_types = name not in ("distilbert", "mpnet", "modernbert", "deberta", "deberta-v2")
    encoded = [
        tokenizer(*pair, return_tensors="pt", return_token_type_ids=has_types) for pair in PAIRS
    ]
    with Encoder.from_pretrained(folder, task="rerank", dtype="fp32") as encoder:
        actual = encoder.classify(PAIRS)

    with torch.inference_mode():
        expected = [model(**each).logits[0] for each in encoded]
    check(folder, actual, expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_bf16_keeps_the_direction_of_vectors(make_checkpoint, rng, name):
    folder = make_checkpoint(f"{FAMILIES[name]}Model")
    model = load_oracle(folder, f"{FAMILIES[name]}Model")
    rows = rows_of(rng, model.config.vocab_size, model.config.pad_token_id)

    with Encoder.from_pretrained(folder, dtype="bf16") as encoder:
        actual = np.stack(encoder.embed(rows, normalize=True))

    means = [states.mean(dim=0).numpy() for states in states_of(model, rows)]
    expected = np.stack([mean / np.linalg.norm(mean) for mean in means])
    assert (actual * expected).sum(axis=1).min() > 0.999


@pytest.mark.parametrize("name", FAMILIES)
def test_knows_every_field_of_transformers_configuration(name):
    rules = FAMILIES_OF_CHECKPOINTS[name].fields
    config = getattr(transformers, f"{FAMILIES[name]}Config")
    fields = {field.name for field in dataclasses.fields(config)}

    assert {field for field in fields - rules.fixed.keys() if not rules.know(field)} == set()


@pytest.mark.parametrize("name", POST_NORM)
def test_a_field_that_is_absent_has_the_default_of_transformers(name):
    family = RELATIVES[name]
    default = getattr(transformers, f"{family.class_name}Config")()
    full = {name: value for name, value in default.to_dict().items() if value is not None}
    fields = family.fields
    optional = {fields.activation, fields.norm_eps, "pad_token_id"}

    without = {key: value for key, value in full.items() if key not in optional}

    assert family.read_sizes(without) == family.read_sizes(full)


@pytest.mark.parametrize(
    "name, field, value, message",
    [
        ("albert", "num_hidden_groups", 2, "has num_hidden_groups 2; allowed: 1"),
        ("albert", "inner_group_num", 2, "has inner_group_num 2; allowed: 1"),
        ("roberta", "is_decoder", True, "has is_decoder true; allowed: false"),
        ("roberta", "max_position_embeddings", 5, "allowed: whole numbers from 6"),
        ("distilbert", "dim", 25, "dim 25 is not a multiple of n_heads 3"),
        ("electra", "embedding_size", 0, "has embedding_size 0; allowed: whole numbers from 1"),
        ("mpnet", "relative_attention_num_buckets", 16, "allowed: 32"),
        ("gte", "head_dim", 6, "has head_dim 6; allowed: 8, hidden_size / num_attention_heads"),
        ("gte", "num_attention_heads", 8, "heads have 3 features; allowed: even numbers"),
        ("gte", "rope_parameters", {"type": "ntk"}, 'has the type "ntk"; allowed: default'),
        ("mpnet", "rope_theta", 1e4, 'has the field "rope_theta" (10000.0)'),
    ],
)
def test_refuses_a_field_that_would_change_results(make_checkpoint, name, field, value, message):
    folder = make_checkpoint(f"{FAMILIES[name]}Model")
    set_fields(folder, "config.json", **{field: value})

    with refused(message):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    "name, kind",
    [
        (name, kind)
        for name, class_name in FAMILIES.items()
        for kind in ("ForMaskedLM", "ForQuestionAnswering")
        if hasattr(transformers, f"{class_name}{kind}")
    ],
)
def test_takes_the_encoder_of_a_model_with_another_head(make_checkpoint, rng, name, kind):
    folder = make_checkpoint(f"{FAMILIES[name]}{kind}")
    set_fields(folder, "config.json", architectures=[f"{FAMILIES[name]}Model"])
    model = load_oracle(folder, f"{FAMILIES[name]}Model")
    rows = rows_of(rng, model.config.vocab_size, model.config.pad_token_id)

    with Encoder.from_pretrained(folder, task="hidden", dtype="fp32") as encoder:
        actual = encoder.hidden(rows)

    check(folder, actual, states_of(model, rows))


@pytest.mark.parametrize("kind", ["T5EncoderModel", "MT5EncoderModel"])
def test_an_encoder_of_t5_alone_matches_transformers(make_checkpoint, rng, kind):
    folder = make_checkpoint(kind)
    model = load_oracle(folder, kind)
    rows = rows_of(rng, model.config.vocab_size)

    with Encoder.from_pretrained(folder, task="hidden", dtype="fp32") as encoder:
        actual = encoder.hidden(rows)

    check(folder, actual, states_of(model, rows))
    with refused('task "translate" is not served'):
        Checkpoint.open(folder).check_task("translate")


@pytest.mark.parametrize(
    "kind, dtype",
    [
        *(
            (f"{family}For{task}Classification", dtype)
            for family in ("Llama", "Mistral", "Qwen2", "Qwen3")
            for task in ("Sequence", "Token")
            for dtype in ("fp32", "bf16")
        ),
        *(
            (f"{family}ForSequenceClassification", "fp32")
            for family in ("Qwen3Moe", "Phi3", "Olmo2", "HunYuanDenseV1", "Gemma", "Gemma3Text")
        ),
        ("SmolLM3ForTokenClassification", "fp32"),
    ],
)
def test_a_classifier_on_a_decoder_matches_transformers(make_checkpoint, rng, kind, dtype):
    folder = make_checkpoint(kind, num_labels=3, pad_token_id=1)
    model = load_oracle(folder, kind)
    rows = rows_of(rng, model.config.vocab_size, pad=1)

    with Encoder.from_pretrained(folder, dtype=dtype) as encoder:
        actual = getattr(encoder, encoder.task)(rows)

    precision = torch.float32 if dtype == "fp32" else torch.bfloat16
    expected = logits_of(model, rows)
    roundings = encoder_roundings(folder, precision)
    assert_rows_close(actual, expected, roundings=roundings, dtype=precision)


def test_a_decoder_without_its_classifier_is_refused(make_checkpoint):
    folder = make_checkpoint("Qwen3ForSequenceClassification", num_labels=1)
    change_tensors(folder, lambda tensors: tensors.pop("score.weight"))

    with refused('the checkpoint has no tensor "score.weight"'):
        Checkpoint.open(folder).check_task("rerank")
