"""tokenizer.json and tokenizer_config.json must agree on everything that changes token ids."""

import pytest
from transformers import AutoTokenizer

from tests.backend.refusals import refused_checkpoint as refused
from tests.checkpoints import set_fields
from varlen.intake.tokenization import Tokenizer
from varlen.models.checkpoint_folder import Checkpoint

CONFIG = "tokenizer_config.json"
TEXTS = ["The CAT", "thé cat", "river 河河 cat", "a\tb"]


def bert_normalizer(**changes):
    return {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": None,
        "lowercase": True,
    } | changes


def our_ids(folder):
    prompts = Tokenizer(folder, 64).encode(TEXTS, truncate=False)
    return [prompt.token_ids.tolist() for prompt in prompts]


def their_ids(folder):
    return AutoTokenizer.from_pretrained(folder)(TEXTS)["input_ids"]


DISAGREEMENTS = [
    ({"do_lower_case": False}, {}, "has do_lower_case false, and the normalizer of tokenizer.json"),
    ({}, {"lowercase": False}, "has do_lower_case true (its default), and the normalizer"),
    ({"strip_accents": False}, {}, "has strip_accents false, and the normalizer"),
    ({}, {"strip_accents": False}, "has strip_accents true (its default), and the normalizer"),
    ({"tokenize_chinese_chars": False}, {}, "has tokenize_chinese_chars false, and the normalizer"),
]


@pytest.mark.parametrize("fields, normalizer, message", DISAGREEMENTS)
def test_refuses_files_that_disagree(folder, fields, normalizer, message):
    set_fields(folder, CONFIG, tokenizer_class="BertTokenizer", **fields)
    set_fields(folder, "tokenizer.json", normalizer=bert_normalizer(**normalizer))

    with refused(message):
        Checkpoint.open(folder)


@pytest.mark.parametrize("fields, normalizer, message", DISAGREEMENTS)
def test_what_is_refused_gives_other_token_ids_in_transformers(folder, fields, normalizer, message):
    set_fields(folder, CONFIG, tokenizer_class="BertTokenizer", **fields)
    set_fields(folder, "tokenizer.json", normalizer=bert_normalizer(**normalizer))

    assert our_ids(folder) != their_ids(folder)


@pytest.mark.parametrize(
    "fields, normalizer",
    [
        ({}, {}),
        ({"do_lower_case": False}, {"lowercase": False}),
        (
            {"do_lower_case": False, "strip_accents": None},
            {"lowercase": False, "strip_accents": False},
        ),
        (
            {"do_lower_case": False, "strip_accents": True},
            {"lowercase": False, "strip_accents": True},
        ),
        ({"strip_accents": True}, {}),
        ({"tokenize_chinese_chars": False}, {"handle_chinese_chars": False}),
    ],
)
@pytest.mark.parametrize(
    "kind",
    ["BertTokenizer", "BertTokenizerFast", None, "DistilBertTokenizerFast", "ElectraTokenizer"],
)
def test_files_that_agree_give_the_token_ids_of_transformers(folder, fields, normalizer, kind):
    set_fields(folder, CONFIG, tokenizer_class=kind, **fields)
    set_fields(folder, "tokenizer.json", normalizer=bert_normalizer(**normalizer))
    Checkpoint.open(folder)

    assert our_ids(folder) == their_ids(folder)


def test_another_class_takes_tokenizer_json_as_it_is(folder):
    set_fields(folder, CONFIG, tokenizer_class="PreTrainedTokenizerFast", do_lower_case=False)
    Checkpoint.open(folder)

    assert our_ids(folder) == their_ids(folder)


@pytest.mark.parametrize("normalizer", [None, {"type": "Lowercase"}], ids=["none", "lowercase"])
def test_refuses_a_normalizer_that_transformers_would_replace(folder, normalizer):
    set_fields(folder, CONFIG, tokenizer_class="BertTokenizer")
    set_fields(folder, "tokenizer.json", normalizer=normalizer)

    with refused("and tokenizer_config.json the class BertTokenizer, which replaces it"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("stored", [None, "Left", "Right"])
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_the_side_that_is_cut_is_that_of_transformers(folder, side, stored):
    cut = {"direction": stored, "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    set_fields(folder, "tokenizer.json", truncation=cut if stored else None)
    set_fields(folder, CONFIG, truncation_side=side) if side else None

    original = AutoTokenizer.from_pretrained(folder)

    assert Checkpoint.open(folder).truncation_side == original.truncation_side


def test_refuses_another_side(folder):
    set_fields(folder, CONFIG, truncation_side="middle")

    with refused('tokenizer_config.json has truncation_side "middle"; allowed: right, left'):
        Checkpoint.open(folder)


@pytest.mark.parametrize("limit, expected", [(17, 17), (10**30, 64), (1e30, 64), (None, 64)])
def test_the_length_of_the_tokenizer_is_the_limit(folder, limit, expected):
    set_fields(folder, CONFIG, model_max_length=limit)

    assert Checkpoint.open(folder).max_sequence_tokens == expected


@pytest.mark.parametrize("limit", [0, -3, "many", True])
def test_refuses_a_length_that_is_no_positive_number(folder, limit):
    set_fields(folder, CONFIG, model_max_length=limit)

    with refused(f"tokenizer_config.json has model_max_length {limit!r}; allowed"):
        Checkpoint.open(folder)
