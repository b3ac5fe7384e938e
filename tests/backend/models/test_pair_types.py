"""Token types of pairs: those that the tokenizer of transformers gives."""

import pytest
import torch
from sentence_transformers import CrossEncoder
from transformers import AutoTokenizer

from tests.checkpoints import set_fields
from tests.closeness import assert_rows_close, encoder_roundings
from varlen import Encoder
from varlen.intake.tokenization import Tokenizer
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.notes import checkpoint_notes

from ..refusals import refused_checkpoint as refused

CONFIG = "tokenizer_config.json"
TYPES = ["input_ids", "token_type_ids", "attention_mask"]
NO_TYPES = ["input_ids", "attention_mask"]
PAIRS = [("the cat", "a river"), ("river", "the cat sat"), ("a", "b")]
# The family, and the fields of tokenizer_config.json; None without the file.
FILES = [
    ("Bert", None),
    ("Bert", {}),
    ("Bert", {"tokenizer_class": "BertTokenizer"}),
    ("Bert", {"tokenizer_class": "BertTokenizerFast"}),
    ("Bert", {"tokenizer_class": "BertTokenizer", "model_input_names": NO_TYPES}),
    ("Bert", {"tokenizer_class": "DistilBertTokenizer"}),
    ("Bert", {"tokenizer_class": "TokenizersBackend"}),
    ("Bert", {"tokenizer_class": "TokenizersBackend", "model_input_names": TYPES}),
    ("Bert", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    ("Bert", {"tokenizer_class": "NoSuchTokenizer"}),
    ("Electra", None),
    ("Electra", {"tokenizer_class": "ElectraTokenizerFast"}),
    ("Electra", {"tokenizer_class": "TokenizersBackend"}),
    ("NomicBert", None),
    ("NomicBert", {"tokenizer_class": "TokenizersBackend"}),
    ("Albert", {"tokenizer_class": "BertTokenizer"}),
    ("Albert", {"tokenizer_class": "TokenizersBackend"}),
    ("Gte", {"tokenizer_class": "BertTokenizer"}),
    ("Gte", {"tokenizer_class": "TokenizersBackend"}),
    ("Roberta", {"tokenizer_class": "BertTokenizer"}),
    ("Roberta", {"tokenizer_class": "TokenizersBackend"}),
    ("DistilBert", {"tokenizer_class": "TokenizersBackend", "model_input_names": NO_TYPES}),
    ("DebertaV2", {"tokenizer_class": "TokenizersBackend", "model_input_names": TYPES}),
]


def save_reranker(make_checkpoint, family, fields, **config):
    folder = make_checkpoint(f"{family}ForSequenceClassification", num_labels=1, **config)
    if fields is not None:
        set_fields(folder, CONFIG, pad_token="[PAD]", **fields)
    return folder


def our_types(folder):
    """Return the types of each pair, as an encoder sends them to the model."""
    has_types = Checkpoint.open(folder).has_token_types
    pairs = Tokenizer(folder, 64, has_types=has_types).encode(PAIRS, truncate=False)
    return [None if pair.type_ids is None else pair.type_ids.tolist() for pair in pairs]


@pytest.mark.parametrize("family, fields", FILES, ids=str)
def test_scores_and_types_match_cross_encoder(make_checkpoint, family, fields):
    folder = save_reranker(make_checkpoint, family, fields)
    original = CrossEncoder(str(folder), device="cpu", model_kwargs={"dtype": torch.float32})
    expected = original.predict(PAIRS, activation_fn=torch.nn.Identity(), batch_size=1)
    types = [original.tokenizer(*pair).get("token_type_ids") for pair in PAIRS]

    with Encoder.from_pretrained(folder, task="rerank", dtype="fp32") as encoder:
        actual = encoder.classify(PAIRS)

    roundings = encoder_roundings(folder)
    assert_rows_close(actual, torch.tensor(expected)[:, None], roundings=roundings)
    # these models have one type of token
    is_read = family not in ("DistilBert", "DebertaV2")
    assert our_types(folder) == (types if is_read else [None] * len(PAIRS))


def test_a_class_in_config_json_counts_where_the_tokenizer_names_none(make_checkpoint):
    folder = save_reranker(make_checkpoint, "Bert", None)
    set_fields(folder, "config.json", tokenizer_class="DistilBertTokenizer")

    assert our_types(folder) == [None] * len(PAIRS)
    assert "token_type_ids" not in AutoTokenizer.from_pretrained(folder)("a", "b")


def test_notes_that_pairs_have_no_types(make_checkpoint):
    folder = save_reranker(make_checkpoint, "Bert", {"tokenizer_class": "TokenizersBackend"})
    checkpoint = Checkpoint.open(folder)

    (note,) = checkpoint_notes(checkpoint, "rerank", 64)

    assert note.startswith("both texts of a pair have token type 0: TokenizersBackend, the class")
    assert checkpoint_notes(checkpoint, "embed", 64) == ()
    set_fields(folder, CONFIG, model_input_names=TYPES)
    assert checkpoint_notes(Checkpoint.open(folder), "rerank", 64) == ()


@pytest.mark.parametrize("names", ["token_type_ids", None, [1]])
def test_refuses_names_that_are_no_list_of_strings(folder, names):
    set_fields(folder, CONFIG, model_input_names=names)

    with refused("tokenizer_config.json has model_input_names "):
        Checkpoint.open(folder)
