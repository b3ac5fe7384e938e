"""Tokenizers of models that translate give the token ids of transformers."""

import shutil

import pytest
import transformers

from tests.checkpoints import drop_field, set_fields
from varlen.intake.tokenization import Tokenizer
from varlen.models.checkpoint_folder import Checkpoint

from ..refusals import refused_checkpoint as refused

CONFIG = "tokenizer_config.json"
TEXTS = ["the cat", " the  river", "thé cat </s> the"]
PIECES = ["▁the", "▁cat", "▁", "t", "h", "e", "c", "a", "▁r", "iver"]
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
BYTE_PAIRS = {token: number for number, token in enumerate([*SPECIAL, "▁", "t", "h", "e", "▁t"])}
BYTES = {
    token: number for number, token in enumerate([*SPECIAL, "<mask>", "t", "h", "e", "Ġ", "th"])
}


def unigrams(special):
    return [(piece, -float(number)) for number, piece in enumerate([*special, *PIECES])]


def merged(*pair):
    return {"merges": [pair]}


# By the class of the tokenizer: the class of its model, and its arguments.
CASES = {
    "T5Tokenizer": (
        "T5ForConditionalGeneration",
        {"vocab": unigrams(["<pad>", "</s>", "<unk>"]), "extra_ids": 2},
    ),
    "BartTokenizer": ("BartForConditionalGeneration", {"vocab": BYTES, **merged("t", "h")}),
    "MBartTokenizer": (
        "MBartForConditionalGeneration",
        {"vocab": unigrams(SPECIAL), "src_lang": "de_DE"},
    ),
    "MBart50Tokenizer": (
        "MBartForConditionalGeneration",
        {"vocab": unigrams(SPECIAL), "src_lang": "de_DE"},
    ),
    "NllbTokenizer": (
        "M2M100ForConditionalGeneration",
        {"vocab": BYTE_PAIRS, **merged("▁", "t"), "src_lang": "deu_Latn"},
    ),
}


@pytest.fixture(scope="module")
def small(make_checkpoint):
    """Return shared checkpoints by the class of their tokenizer."""

    def make(name):
        kind, arguments = CASES[name]
        folder = make_checkpoint(kind, vocab_size=300)
        getattr(transformers, name)(**arguments).save_pretrained(folder)
        return folder

    return {name: make(name) for name in CASES}


def our_ids(folder):
    Checkpoint.open(folder).check_task("translate")
    prompts = Tokenizer(folder, 64).encode(TEXTS, truncate=False)
    return [prompt.token_ids.tolist() for prompt in prompts]


@pytest.mark.parametrize("name", CASES)
def test_gives_the_token_ids_of_transformers(small, name):
    folder = small[name]

    expected = transformers.AutoTokenizer.from_pretrained(folder)(TEXTS)["input_ids"]

    assert our_ids(folder) == expected
    assert all(len(row) > 2 for row in expected)


@pytest.mark.parametrize("name", ["MBartTokenizer", "MBart50Tokenizer", "NllbTokenizer"])
def test_refuses_a_source_language_that_tokenizer_json_does_not_add(small, tmp_path, name):
    folder = shutil.copytree(small[name], tmp_path / name)
    set_fields(folder, CONFIG, src_lang="xx_XX")
    with refused('has src_lang "xx_XX", and tokenizer.json adds'):
        Checkpoint.open(folder)
    drop_field(folder, CONFIG, "src_lang")

    with refused("(its default), and tokenizer.json adds"):
        Checkpoint.open(folder)
