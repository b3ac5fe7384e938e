"""First releases of NomicBERT and GTE match transformers' own models of the same weights."""

import json

import pytest
import torch
import transformers

from tests.backend.refusals import refused_checkpoint as refused
from tests.checkpoints import change_tensors, set_fields, write_file
from tests.closeness import assert_rows_close, encoder_roundings
from varlen import Encoder
from varlen.models.checkpoint.first_releases import to_native
from varlen.models.checkpoint_folder import Checkpoint

# As in nomic-embed-text-v1.5, but small.
NOMIC = {
    "activation_function": "swiglu",
    "architectures": ["NomicBertModel"],
    "attn_pdrop": 0.0,
    "auto_map": {
        "AutoConfig": "nomic-ai/nomic-bert-2048--configuration_hf_nomic_bert.NomicBertConfig",
        "AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel",
        "AutoModelForMaskedLM": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertForPreTraining",
    },
    "bos_token_id": None,
    "causal": False,
    "dense_seq_output": True,
    "embd_pdrop": 0.0,
    "eos_token_id": None,
    "fused_bias_fc": True,
    "fused_dropout_add_ln": True,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-12,
    "max_trained_positions": 40,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "model_type": "nomic_bert",
    "n_embd": 24,
    "n_head": 3,
    "n_inner": 250,
    "n_layer": 2,
    "n_positions": 64,
    "pad_vocab_size_multiple": 64,
    "parallel_block": False,
    "parallel_block_tied_norm": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "reorder_and_upcast_attn": False,
    "resid_pdrop": 0.0,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "summary_activation": None,
    "summary_first_dropout": 0.0,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "torch_dtype": "float32",
    "transformers_version": "4.34.0",
    "type_vocab_size": 2,
    "use_cache": True,
    "use_flash_attn": True,
    "use_rms_norm": False,
    "use_xentropy": True,
    "vocab_size": 90,
}
# As in gte-multilingual-base, but small.
GTE = {
    "architectures": ["NewModel", "NewForTokenClassification"],
    "attention_probs_dropout_prob": 0.0,
    "auto_map": {
        "AutoConfig": "Alibaba-NLP/new-impl--configuration.NewConfig",
        "AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel",
    },
    "classifier_dropout": 0.0,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 24,
    "id2label": {"0": "LABEL_0"},
    "initializer_range": 0.02,
    "intermediate_size": 40,
    "label2id": {"LABEL_0": 0},
    "layer_norm_eps": 1e-12,
    "layer_norm_type": "layer_norm",
    "logn_attention_clip1": False,
    "logn_attention_scale": False,
    "max_position_embeddings": 64,
    "model_type": "new",
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "pack_qkv": True,
    "pad_token_id": 1,
    "position_embedding_type": "rope",
    "rope_scaling": {"factor": 8.0, "type": "ntk"},
    "rope_theta": 20000,
    "torch_dtype": "float16",
    "transformers_version": "4.39.1",
    "type_vocab_size": 1,
    "unpad_inputs": False,
    "use_memory_efficient_attention": False,
    "vocab_size": 90,
}
# As in snowflake-arctic-embed-m-v2.0.
ARCTIC = {
    **GTE,
    "architectures": ["GteModel"],
    "auto_map": {
        "AutoConfig": "configuration_hf_alibaba_nlp_gte.GteConfig",
        "AutoModel": "modeling_hf_alibaba_nlp_gte.GteModel",
    },
    "matryoshka_dimensions": [8],
    "model_type": "gte",
    "rope_scaling": None,
    "rope_theta": 160000,
    "unpad_inputs": "true",
    "use_memory_efficient_attention": "true",
}
ROWS = [[5], [7, 8, 9], list(range(2, 62)), [40, 3, 17, 60, 21, 9, 9]]


@pytest.fixture
def first_release(make_checkpoint):
    """Return a function that saves a model as a first release did, and returns both."""

    def save(kind, config, old_prefix="", **native):
        folder = make_checkpoint(kind, **native)
        model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32).eval()
        size = json.loads((folder / "config.json").read_text())["vocab_size"]
        multiple = config.get("pad_vocab_size_multiple", 1)
        assert size % multiple == 0
        write_file(folder, "config.json", {**config, "vocab_size": size - (multiple > 1)})
        prefix = "nomic_bert." if kind.startswith("Nomic") else "gte."
        change_tensors(folder, lambda tensors: rename(tensors, prefix, old_prefix))
        return folder, model

    return save


def rename(tensors, prefix, old_prefix):
    for name in list(tensors):
        plain = name.removeprefix(prefix)
        if not plain.startswith("classifier"):
            tensors[f"{old_prefix}{plain}"] = tensors.pop(name)


def assert_equals_transformers(folder, model, task="hidden"):
    with Encoder.from_pretrained(folder, task=task, dtype="fp32") as encoder:
        actual = getattr(encoder, task)(ROWS)
        native = dict(encoder._service.checkpoint.config)
    with torch.inference_mode():
        outputs = [model(torch.tensor([row])) for row in ROWS]
    expected = [
        output.last_hidden_state[0] if task == "hidden" else output.logits[0] for output in outputs
    ]
    write_file(folder, "native/config.json", native)
    roundings = encoder_roundings(folder / "native")
    assert_rows_close(actual, expected, roundings=roundings)


NOMIC_SIZES = {"vocab_size": 128, "intermediate_size": 256}


def test_nomic_bert_matches_transformers(first_release):
    folder, model = first_release("NomicBertModel", NOMIC, **NOMIC_SIZES)

    assert_equals_transformers(folder, model)
    assert Checkpoint.open(folder).max_sequence_tokens == 64


def test_a_classifier_on_nomic_bert_matches_transformers(first_release):
    kind = "NomicBertForSequenceClassification"
    labels = {"0": "a", "1": "b", "2": "c"}
    config = {**NOMIC, "architectures": [kind], "id2label": labels}

    assert_equals_transformers(
        *first_release(kind, config, "bert.", num_labels=3, **NOMIC_SIZES), "classify"
    )


def test_nomic_bert_may_have_the_fields_of_both_releases(make_checkpoint):
    folder = make_checkpoint("NomicBertModel", **NOMIC_SIZES)
    model = transformers.NomicBertModel.from_pretrained(folder, dtype=torch.float32).eval()
    old = {key: value for key, value in NOMIC.items() if key not in ("n_inner", "vocab_size")}
    set_fields(folder, "config.json", **old, n_inner=256, max_position_embeddings=40)

    assert_equals_transformers(folder, model)
    assert Checkpoint.open(folder).position_limit == 64


def test_nomic_bert_with_scaled_positions_ends_where_they_depend_on_the_length():
    assert to_native(NOMIC)["max_position_embeddings"] == 64
    scaled = to_native({**NOMIC, "rotary_scaling_factor": 2})
    assert scaled["max_position_embeddings"] == 40


def ntk_frequencies(theta, factor, dim):
    """Return the frequencies as the code of the first release computes them."""
    exponents = torch.arange(0, dim, 2).float() / dim
    return 1.0 / (theta * factor) ** exponents / factor ** (2 / dim)


@pytest.mark.parametrize("types", [0, 1, 2])
def test_gte_with_ntk_scaling_matches_transformers(first_release, types):
    config = {**GTE, "type_vocab_size": types}
    folder, model = first_release("GteModel", config, "new.", type_vocab_size=types)
    model.rotary_emb.inv_freq = ntk_frequencies(20000, 8.0, 8)

    assert_equals_transformers(folder, model)


def test_a_reranker_on_gte_matches_transformers(first_release):
    kind = "GteForSequenceClassification"
    config = {**GTE, "architectures": ["NewForSequenceClassification"]}
    folder, model = first_release(kind, config, "new.", num_labels=1, type_vocab_size=1)
    model.gte.rotary_emb.inv_freq = ntk_frequencies(20000, 8.0, 8)

    assert_equals_transformers(folder, model, "classify")
    # both texts have its one type of tokens
    with Encoder.from_pretrained(folder, task="rerank") as encoder:
        assert encoder.classify([("the cat", "a river")]).shape == (1, 1)


def test_gte_under_its_new_name_matches_transformers(first_release):
    native = {"rope_theta": 160000.0, "type_vocab_size": 1}

    assert_equals_transformers(*first_release("GteModel", ARCTIC, **native))


def test_transformers_reads_the_translated_fields(first_release):
    for config in (NOMIC, GTE, ARCTIC):
        native = to_native(config)
        made = transformers.AutoConfig.for_model(**native)

        assert made.num_hidden_layers == 2
        assert to_native(native) == native


def test_a_native_config_stays_as_it_is(make_checkpoint):
    for kind in ("NomicBertModel", "GteModel", "BertModel"):
        config = json.loads((make_checkpoint(kind) / "config.json").read_text())

        assert to_native(config) == config


@pytest.mark.parametrize(
    "config, change, message",
    [
        (NOMIC, {"prenorm": True}, "has prenorm true; allowed: false"),
        (NOMIC, {"qkv_proj_bias": True}, "has qkv_proj_bias true; allowed: false"),
        (NOMIC, {"rotary_emb_fraction": 0.5}, "has rotary_emb_fraction 0.5; allowed: 1.0"),
        (NOMIC, {"rotary_emb_scale_base": 512}, "has rotary_emb_scale_base 512; allowed: null"),
        (NOMIC, {"activation_function": "gelu"}, 'activation_function "gelu"; allowed: swiglu, g'),
        (NOMIC, {"moe_every_n_layers": 2}, "has mlp_fc1_bias false; allowed: true"),
        (NOMIC, {"n_embd": None}, "has hidden_size None"),
        (NOMIC, {"num_hidden_layers": 3}, "n_layer 2 and num_hidden_layers 3; make them agree"),
        (NOMIC, {"window": 7}, 'has the field "window" (7), which this version does not know'),
        (NOMIC, {"auto_map": {"AutoModel": "mine.Other"}}, 'auto_map with "mine.Other", code that'),
        (GTE, {"pack_qkv": False}, "has pack_qkv false; allowed: true"),
        (GTE, {"logn_attention_scale": True}, "has logn_attention_scale true; allowed: false"),
        (GTE, {"layer_norm_type": "rms_norm"}, 'layer_norm_type "rms_norm"; allowed: "layer_norm"'),
        (GTE, {"position_embedding_type": "absolute"}, 'type "absolute"; allowed: "rope"'),
        (GTE, {"rope_scaling": {"type": "ntk", "factor": 1.0}}, "factor 1; allowed: numbers above"),
        (
            GTE,
            {"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.6}},
            "has mixed_b 0.6; allowed: null",
        ),
        (GTE, {"architectures": ["NewForMultipleChoice"]}, '"GteForMultipleChoice"; allowed'),
        (
            GTE,
            {"auto_map": {"AutoModel": "mine.Model"}},
            'auto_map with "mine.Model", code that is not known, and custom code never runs; allowed: New or Gte',
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) and len(value) < 3 else None,
)
def test_refuses_what_transformers_has_no_model_for(make_checkpoint, config, change, message):
    folder = make_checkpoint("GteModel")
    write_file(folder, "config.json", {**config, **change})

    with refused(message):
        Checkpoint.open(folder)


def test_fields_whose_default_is_another_variant_must_be_there(make_checkpoint):
    folder = make_checkpoint("NomicBertModel")
    config = {key: value for key, value in NOMIC.items() if key != "rotary_emb_fraction"}
    write_file(folder, "config.json", config)

    with refused("has rotary_emb_fraction 0.0; allowed: 1.0"):
        Checkpoint.open(folder)
