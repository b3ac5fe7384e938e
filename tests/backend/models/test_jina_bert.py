"""JinaBERT in the form of the hub equals its statement; what is refused."""

import numpy as np
import pytest
import torch
import transformers

from tests.backend.refusals import refused_checkpoint as refused
from tests.checkpoints import SMALL, change_tensors, set_fields, write_file
from tests.closeness import assert_close, assert_rows_close, encoder_roundings
from varlen import Encoder
from varlen.models.blocks.attention import alibi_by_distance
from varlen.models.checkpoint.first_releases import to_native
from varlen.models.checkpoint_folder import Checkpoint

from . import stated
from .oracle import assert_states_equal, logits_of, states_of

# The code of models that normalize queries and keys.
QK_NORM = "jinaai/jina-bert-v2-qk-post-norm"
CODE = "jinaai/jina-bert-implementation--modeling_bert"
# As in jina-embeddings-v2-small-en, but small.
CONFIG = {
    "_name_or_path": "jinaai/jina-bert-implementation",
    "architectures": ["JinaBertForMaskedLM"],
    "attention_probs_dropout_prob": 0.0,
    "attn_implementation": None,
    "auto_map": {
        "AutoConfig": "jinaai/jina-bert-implementation--configuration_bert.JinaBertConfig",
        "AutoModel": f"{CODE}.JinaBertModel",
        "AutoModelForMaskedLM": f"{CODE}.JinaBertForMaskedLM",
        "AutoModelForSequenceClassification": f"{CODE}.JinaBertForSequenceClassification",
    },
    "classifier_dropout": None,
    "emb_pooler": "mean",
    "feed_forward_type": "geglu",
    "gradient_checkpointing": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-12,
    "model_max_length": 8192,
    "model_type": "bert",
    "pad_token_id": 0,
    "position_embedding_type": "alibi",
    "torch_dtype": "float32",
    "transformers_version": "4.26.0",
    "type_vocab_size": 2,
    "use_cache": True,
    "vocab_size": 100,
    **SMALL,
    "max_position_embeddings": 300,
}
FORMS = {
    "v2-small": {},
    "v2-base": {"hidden_size": 36, "num_attention_heads": 12, "num_hidden_layers": 1},
    "odd": {"hidden_size": 35, "num_attention_heads": 5, "intermediate_size": 71},
    "powers": {"hidden_size": 24, "num_attention_heads": 8},
    "reglu": {"feed_forward_type": "reglu", "hidden_act": "relu"},
    "v2-base-code": {"_name_or_path": QK_NORM, "hidden_size": 35, "num_attention_heads": 5},
}
LENGTHS = (1, 2, 7, 300, 33, 60, 7)


def save_jina_bert(folder, kind="JinaBertModel", **fields):
    """Save a random checkpoint without a tokenizer and return its statement."""
    config = {**CONFIG, "architectures": [kind], **fields}
    settings = transformers.BertConfig(**config)
    torch.manual_seed(0)
    model = getattr(stated, kind)(settings).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            scale = 0.2 if parameter.ndim == 1 else settings.hidden_size**-0.5
            parameter.copy_(noise * scale + (parameter if parameter.ndim == 1 else 0))
    model.save_pretrained(folder)
    write_file(folder, "config.json", config)
    return model.double()


@pytest.fixture
def saved(tmp_path, small_bert):
    """Return a function that saves a random checkpoint and returns its statement too."""
    write_file(tmp_path, "tokenizer.json", (small_bert / "tokenizer.json").read_text())
    return lambda *kind, **fields: (tmp_path, save_jina_bert(tmp_path, *kind, **fields))


def rows_of(rng, lengths=LENGTHS):
    return [rng.integers(5, 60, length).tolist() for length in lengths]


@pytest.mark.parametrize("form", FORMS)
def test_hidden_states_equal_the_statement_alone_and_mixed(saved, rng, form):
    folder, model = saved(**FORMS[form])
    rows = rows_of(rng)

    assert_states_equal(folder, states_of(model, rows), rows)


@pytest.mark.parametrize("code", [CONFIG["_name_or_path"], QK_NORM])
def test_bf16_keeps_the_direction_of_vectors(saved, rng, code):
    folder, model = saved(_name_or_path=code)
    rows = rows_of(rng)

    with Encoder.from_pretrained(folder, task="embed", dtype="bf16") as encoder:
        actual = np.stack(encoder.embed(rows, normalize=True))

    means = [states.mean(dim=0).numpy() for states in states_of(model, rows)]
    expected = np.stack([mean / np.linalg.norm(mean) for mean in means])
    assert (actual * expected).sum(axis=1).min() > 0.999


def test_a_reranker_scores_pairs_with_their_token_types(saved):
    folder, model = saved("JinaBertForSequenceClassification", num_labels=1)
    pairs = [("the cat", "a river"), ("a", "b"), ("is it?", "the cat is in the river, 7 times")]
    set_fields(folder, "tokenizer_config.json", tokenizer_class="BertTokenizer")

    with Encoder.from_pretrained(folder, task="rerank", dtype="fp32") as encoder:
        actual = encoder.classify(pairs)

    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    encoded = [tokenizer(*pair, return_tensors="pt", return_token_type_ids=True) for pair in pairs]
    with torch.inference_mode():
        expected = [model(each["input_ids"], each["token_type_ids"]).logits[0] for each in encoded]
    assert_rows_close(actual, expected, roundings=encoder_roundings(folder))


def test_terms_of_a_masked_language_model_equal_the_statement(saved, rng):
    folder, model = saved("JinaBertForMaskedLM", tie_word_embeddings=False)
    (row,) = rows_of(rng, [20])

    with Encoder.from_pretrained(folder, task="sparse_embed", dtype="fp32") as encoder:
        (actual,) = encoder.sparse_embed([row])

    (logits,) = logits_of(model, [row])
    expected = logits.relu().log1p().amax(dim=0)
    dense = np.zeros(len(expected))
    dense[actual.indices] = actual.values
    assert_close(dense, expected, roundings=encoder_roundings(folder))


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 12, 16, 20])
def test_slopes_equal_the_statement(heads):
    actual = alibi_by_distance(heads, 4)

    distance = torch.tensor([4, 3, 2, 1, 0, 1, 2, 3, 4])
    expected = -torch.tensor(stated.alibi_slopes(heads))[:, None] * distance
    assert_close(actual, expected, roundings=2)


def test_the_form_of_transformers_stays_as_it_is():
    native = to_native(CONFIG)

    assert to_native(native) == native
    assert native["architectures"] == ["JinaBertForMaskedLM"]
    assert to_native({**CONFIG, "architectures": None})["architectures"] == ["JinaBertModel"]
    assert to_native({**CONFIG, "architectures": ["BertForMaskedLM"]}) == native


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"position_embedding_type": "absolute"},
            'has position_embedding_type "absolute"; allowed: "alibi"',
        ),
        ({"feed_forward_type": "original"}, 'feed_forward_type "original"; allowed: geglu, reglu'),
        ({"hidden_act": "relu"}, 'has feed_forward_type "gelu" and hidden_act "relu"'),
        ({"auto_map": {"AutoModel": "mine.Other"}}, 'auto_map with "mine.Other", code that is not'),
        ({"window": 7}, 'has the field "window" (7), which this version does not know'),
        (
            {"architectures": ["JinaBertForMultipleChoice"]},
            'has the architecture "JinaBertForMultipleChoice"; allowed: JinaBertModel, ',
        ),
        ({"architectures": ["HF_ColBERT"]}, "has the architecture HF_ColBERT, that of the first"),
        ({"max_position_embeddings": 10**9}, "max_position_embeddings 1000000000; allowed"),
    ],
)
def test_refuses_what_is_not_served(saved, change, message):
    folder, _ = saved()
    set_fields(folder, "config.json", **change)

    with refused(message):
        Checkpoint.open(folder)


def test_a_checkpoint_without_gates_is_refused_by_its_tensor(saved):
    folder, _ = saved()
    change_tensors(folder, lambda tensors: tensors.pop("encoder.layer.1.mlp.gated_layers.weight"))

    with refused('no tensor "encoder.layer.1.mlp.gated_layers.weight"'):
        Checkpoint.open(folder).check_task("embed")
