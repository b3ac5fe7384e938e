"""Settings in sentence-transformers' files are followed, or refused with their name."""

import json

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer import modules

from tests.backend.refusals import refused_checkpoint as refused
from tests.checkpoints import END_OF_TEXT, module, pooling_files, set_fields, write_file
from tests.closeness import assert_close, encoder_roundings
from varlen import Encoder
from varlen.models.checkpoint_folder import Checkpoint

TEXTS = ["the cat", "a", "river, the river! is it 42?"]
PAIRS = [("the cat", "a river"), ("a", "river, the river! is it 42?")]
PROMPT = "the cat is: "
DEFAULT_PROMPT = {
    "prompts": {"query": PROMPT, "document": "a river "},
    "default_prompt_name": "query",
}
MODEL = "config_sentence_transformers.json"


@pytest.fixture
def saved(small_bert, tmp_path):
    """Return a checkpoint saved by sentence-transformers, which a test may change."""
    folder = tmp_path / "saved"
    SentenceTransformer(str(small_bert), device="cpu").save_pretrained(str(folder))
    return folder


def test_serves_the_logits_of_a_cross_encoder(make_checkpoint, tmp_path):
    folder = tmp_path / "saved"
    made = make_checkpoint("BertForSequenceClassification", num_labels=1)
    CrossEncoder(str(made), device="cpu").save_pretrained(str(folder))
    assert (folder / "modules.json").exists()

    with Encoder.from_pretrained(folder, task="rerank", dtype="fp32") as encoder:
        actual = encoder.classify(PAIRS)

    oracle = CrossEncoder(str(folder), device="cpu")
    expected = oracle.predict(PAIRS, activation_fn=torch.nn.Identity())
    assert_close(actual[:, 0], expected, roundings=encoder_roundings(folder))


@pytest.mark.parametrize("truncate", [False, True])
def test_a_default_prompt_gives_the_vectors_of_sentence_transformers(saved, truncate):
    """The prompt was once ignored, and vectors differed by 0.48."""
    set_fields(saved, MODEL, **DEFAULT_PROMPT)
    texts = [*TEXTS, "x" * 80] if truncate else TEXTS
    expected = SentenceTransformer(str(saved), device="cpu").encode(texts)

    with Encoder.from_pretrained(saved, dtype="fp32") as encoder:
        actual = encoder.embed(texts, truncate=truncate)

    assert Checkpoint.open(saved).default_prompt == PROMPT
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_a_prompt_that_is_not_the_default_changes_nothing(saved):
    set_fields(saved, MODEL, prompts={"query": PROMPT})
    expected = SentenceTransformer(str(saved), device="cpu").encode(TEXTS)

    with Encoder.from_pretrained(saved, dtype="fp32") as encoder:
        actual = encoder.embed(TEXTS)

    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_a_default_prompt_is_for_texts_and_for_embed_alone(saved, small_bert):
    set_fields(saved, MODEL, **DEFAULT_PROMPT)
    ids = [[2, 5, 6, 3]]
    with Encoder.from_pretrained(small_bert, dtype="fp32") as plain:
        expected = plain.embed(ids)
    with Encoder.from_pretrained(small_bert, dtype="fp32", task="hidden") as plain:
        (expected_hidden,) = plain.hidden(TEXTS[:1])

    with Encoder.from_pretrained(saved, dtype="fp32") as encoder:
        np.testing.assert_array_equal(encoder.embed(ids), expected)
    with Encoder.from_pretrained(saved, dtype="fp32", task="hidden") as encoder:
        np.testing.assert_array_equal(encoder.hidden(TEXTS[:1])[0], expected_hidden)


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            {"default_prompt_name": "passage", "prompts": {"query": "q: "}},
            'has default_prompt_name "passage"; allowed: null, or one of its prompts: query',
        ),
        ({"default_prompt_name": "query", "prompts": None}, "one of its prompts: it has none"),
        ({"default_prompt_name": "query", "prompts": {"query": 7}}, "has the prompt 7; allowed"),
        ({"prompts": {"query": 7}}, "has the prompt 7; allowed: strings"),
        ({"prompts": ["query"]}, 'has prompts ["query"]; allowed: an object'),
        ({"truncate_dim": 8}, "has truncate_dim 8; allowed: null"),
        ({"model_type": "SparseEncoder"}, 'has model_type "SparseEncoder"; allowed: Sentence'),
        ({"max_active_dims": 3}, 'has the field "max_active_dims" (3)'),
    ],
)
def test_refuses_a_model_field_that_would_change_vectors(saved, fields, message):
    set_fields(saved, MODEL, **fields)

    with refused(f"{MODEL} {message}" if message.startswith("has") else message):
        Checkpoint.open(saved)


def test_refuses_a_default_prompt_of_a_cross_encoder(saved):
    set_fields(saved, MODEL, model_type="CrossEncoder", **DEFAULT_PROMPT)

    with refused("prompts of a CrossEncoder are not served"):
        Checkpoint.open(saved)


@pytest.mark.parametrize("similarity", ["dot", "euclidean"])
def test_takes_every_similarity_function(saved, similarity):
    before = Checkpoint.open(saved)
    set_fields(saved, MODEL, similarity_fn_name=similarity)

    assert Checkpoint.open(saved) == before


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"transformer_task": "fill-mask"}, 'has transformer_task "fill-mask"; allowed: feature'),
        (
            {
                "modality_config": {
                    "text": {"method": "forward", "method_output_name": "pooler_output"}
                }
            },
            "has modality_config {",
        ),
        (
            {"module_output_name": "sentence_embedding"},
            'has module_output_name "sentence_embedding"',
        ),
        ({"model_args": {"x": 1}}, 'has the field "model_args" ({"x": 1})'),
        ({"processing_kwargs": {"text": {"max_length": 3}}}, 'has the field "processing_kwargs"'),
        ({"query_length": 32}, 'has the field "query_length" (32)'),
    ],
)
def test_refuses_a_transformer_field_that_would_change_vectors(saved, fields, message):
    set_fields(saved, "sentence_bert_config.json", **fields)

    with refused(f"sentence_bert_config.json {message}"):
        Checkpoint.open(saved)


def test_refuses_to_lowercase_what_the_tokenizer_does_not(saved):
    set_fields(saved, "sentence_bert_config.json", do_lower_case=True)
    Checkpoint.open(saved)
    set_fields(saved, "tokenizer.json", normalizer=None)

    with refused("sentence_bert_config.json has do_lower_case true, and tokenizer.json does not"):
        Checkpoint.open(saved)


@pytest.mark.parametrize(
    "kinds, message",
    [
        (
            ["Pooling", "Transformer"],
            "has the modules Pooling, Transformer; allowed: Transformer, WeightedLayerPooling or none, Po",
        ),
        (["Transformer", "Normalize"], "has the modules Transformer, Normalize; allowed"),
        (["Transformer", "Pooling", "Pooling"], "has the modules Transformer, Pooling, Pooling"),
        (["Transformer", "Dense"], "has the modules Transformer, Dense; allowed"),
        (
            ["Transformer", "Pooling", "Normalize", "Dense"],
            "has the modules Transformer, Pooling, Normalize, Dense; allowed",
        ),
        (["Transformer", "LayerNorm"], "has the modules Transformer, LayerNorm; allowed"),
        (
            ["Transformer", "CNN"],
            'has a module "CNN"; allowed: Transformer, WeightedLayerPooling, Pooling, Dense, Layer',
        ),
    ],
)
def test_refuses_modules_in_another_order(saved, kinds, message):
    write_file(saved, "modules.json", [module(kind) for kind in kinds])

    with refused(f"modules.json {message}"):
        Checkpoint.open(saved)


def test_refuses_a_module_with_code_of_its_own(saved):
    write_file(saved, "modules.json", [{"type": "custom_st.Transformer", "path": ""}])

    with refused('modules.json has a module "custom_st.Transformer"; allowed: modules of sentence'):
        Checkpoint.open(saved)


def test_refuses_a_transformer_in_a_folder_of_its_own(saved):
    write_file(saved, "modules.json", [module("Transformer", "0_BERT")])

    with refused(
        'has the transformer in the folder "0_BERT"; allowed: the checkpoint folder itself'
    ):
        Checkpoint.open(saved)


@pytest.mark.parametrize(
    "name, fields, message",
    [
        ("1_Pooling", {"weights": [1, 2]}, '1_Pooling/config.json has the field "weights"'),
        (
            "2_Normalize",
            {"module_input_name": "token_embeddings"},
            '2_Normalize/config.json has module_input_name "token_embeddings"; allowed: "sentence',
        ),
    ],
)
def test_refuses_a_module_field_that_would_change_vectors(saved, name, fields, message):
    modules = json.loads((saved / "modules.json").read_text())
    write_file(saved, "modules.json", [*modules, module("Normalize", "2_Normalize")])
    Checkpoint.open(saved)
    set_fields(saved, f"{name}/config.json", **fields)

    with refused(message):
        Checkpoint.open(saved)


@pytest.mark.parametrize("limits", [{"max_seq_length": 20}, {}], ids=["own", "tokenizer"])
def test_a_cut_text_is_cut_as_sentence_transformers_cuts_it(saved, limits):
    set_fields(saved, "sentence_bert_config.json", **limits)
    set_fields(saved, "tokenizer_config.json", model_max_length=30)
    oracle = SentenceTransformer(str(saved), device="cpu")
    expected = oracle.encode(["x" * 60])

    with Encoder.from_pretrained(saved, dtype="fp32") as encoder:
        actual = encoder.embed(["x" * 60], truncate=True)

    assert Checkpoint.open(saved).max_sequence_tokens == oracle.max_seq_length
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def save_decoder(folder, tmp_path, *, normalize, prompt=""):
    """Save a decoder for sentence-transformers, with an end token after each text."""
    set_fields(
        folder,
        "tokenizer.json",
        post_processor={
            "type": "TemplateProcessing",
            "single": [
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": END_OF_TEXT, "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"],
            "special_tokens": {
                END_OF_TEXT: {"id": END_OF_TEXT, "ids": [0], "tokens": [END_OF_TEXT]}
            },
        },
    )
    set_fields(
        folder,
        "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        pad_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
    )
    transformer = modules.Transformer(str(folder), processor_kwargs={"padding_side": "left"})
    pooling = modules.Pooling(transformer.get_embedding_dimension(), pooling_mode="lasttoken")
    stack = [transformer, pooling, *([modules.Normalize()] if normalize else [])]
    made = SentenceTransformer(modules=stack, device="cpu", prompts={"query": prompt})
    made.default_prompt_name = "query" if prompt else None
    made.save_pretrained(str(tmp_path / "saved"))
    return tmp_path / "saved", made


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("kind", ["Qwen3ForCausalLM", "Qwen3Model", "MistralModel", "GPT2Model"])
def test_last_tokens_of_a_decoder_are_those_of_sentence_transformers(
    make_checkpoint, tmp_path, kind, normalize
):
    saved, made = save_decoder(make_checkpoint(kind), tmp_path, normalize=normalize, prompt=PROMPT)

    with Encoder.from_pretrained(saved, dtype="fp32", task="embed") as encoder:
        actual = encoder.embed(TEXTS)

    checkpoint = Checkpoint.open(saved)
    assert (checkpoint.pooling, checkpoint.normalize) == (("last",), normalize)
    # one by one: padding on the left would shift the positions of GPT-2
    np.testing.assert_allclose(actual, made.encode(TEXTS, batch_size=1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "kind, pooling",
    [("LlamaForCausalLM", "last"), ("LlamaModel", "mean"), ("GPT2LMHeadModel", "mean")],
)
def test_a_decoder_without_modules_is_pooled_as_sentence_transformers_does(
    make_checkpoint, kind, pooling
):
    folder = make_checkpoint(kind)
    set_fields(
        folder,
        "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        pad_token=END_OF_TEXT,
    )

    with Encoder.from_pretrained(folder, dtype="fp32", task="embed") as encoder:
        actual = encoder.embed(TEXTS)

    assert Checkpoint.open(folder).pooling == (pooling,)
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "kind, task",
    [
        ("BertForSequenceClassification", "classify"),
        ("Qwen3ForTokenClassification", "token_classify"),
    ],
)
def test_pooling_decides_the_task_and_the_head_stays_available(make_checkpoint, rng, kind, task):
    files = pooling_files(pooling_mode="mean")
    pooled = make_checkpoint(kind, num_labels=3, files=files)
    plain = make_checkpoint(kind, num_labels=3)
    rows = [rng.integers(5, 60, length).tolist() for length in (3, 9)]

    assert Checkpoint.open(pooled).task == "embed"
    assert task in Checkpoint.open(pooled).tasks
    assert Checkpoint.open(plain).task == task
    answers = []
    for folder in (pooled, plain):
        with Encoder.from_pretrained(folder, task=task, dtype="fp32") as encoder:
            answers.append(np.concatenate(getattr(encoder, task)(rows)))
    np.testing.assert_array_equal(*answers)
