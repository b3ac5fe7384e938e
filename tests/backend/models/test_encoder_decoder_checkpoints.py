"""Checks of checkpoints with an encoder and a decoder: config.json, generation_config.json, tensors."""

import json
import shutil

import pytest
import torch
from transformers import GenerationConfig

from tests.checkpoints import change_tensors, drop_field, set_fields, write_file
from varlen.models.checkpoint import generation_config
from varlen.models.checkpoint.family import HeaderReader
from varlen.models.checkpoint.generation_config import TargetTokens, TranslateDefaults
from varlen.models.checkpoint.weights import read_headers
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.loading import load_decoder

from ..refusals import refused_checkpoint as refused

GENERATION = "generation_config.json"
CPU = torch.device("cpu")
KINDS = {
    "bart": "BartForConditionalGeneration",
    "mbart": "MBartForConditionalGeneration",
    "marian": "MarianMTModel",
    "m2m_100": "M2M100ForConditionalGeneration",
    "t5": "T5ForConditionalGeneration",
    "mt5": "MT5ForConditionalGeneration",
}
# What the first releases of transformers saved in config.json.
OLD_FIELDS = {
    "bart": {
        "_num_labels": 3,
        "add_bias_logits": False,
        "add_final_layer_norm": False,
        "classif_dropout": 0.0,
        "normalize_before": False,
        "normalize_embedding": True,
        "num_hidden_layers": 2,
        "prefix": " ",
        "task_specific_params": {"summarization": {"num_beams": 4}},
    },
    "mbart": {
        "add_final_layer_norm": True,
        "normalize_before": True,
        "normalize_embedding": True,
        "static_position_embeddings": False,
        "extra_pos_embeddings": 2,
    },
    "marian": {"static_position_embeddings": True, "normalize_embedding": False},
    "m2m_100": {"gradient_checkpointing": False, "num_attention_heads": 2},
    "t5": {"n_positions": 512, "output_past": True},
    "mt5": {"tokenizer_class": "T5Tokenizer", "tie_word_embeddings": False},
}


@pytest.fixture(scope="module")
def small(make_checkpoint):
    """Return shared checkpoints by family, that tests must not change."""
    return {name: make_checkpoint(kind) for name, kind in KINDS.items()}


@pytest.fixture
def copy_of(small, tmp_path):
    """Return a function that copies a checkpoint for a test to change."""
    return lambda name: shutil.copytree(small[name], tmp_path / name)


def load(folder):
    checkpoint = Checkpoint.open(folder)
    checkpoint.check_task("translate")
    return load_decoder(checkpoint, torch.float32, CPU)


@pytest.mark.parametrize("name", KINDS)
def test_translates_and_does_nothing_else(small, name):
    checkpoint = Checkpoint.open(small[name])

    assert (checkpoint.architecture, checkpoint.task) == (KINDS[name], "translate")
    assert (checkpoint.hidden_size, checkpoint.is_decoder) == (36, False)
    checkpoint.check_task("translate")
    with refused(f'task "generate" is not served with model_type "{name}"; allowed: translate'):
        checkpoint.check_task("generate")


@pytest.mark.parametrize("name", KINDS)
def test_asks_for_the_tensors_that_transformers_saves(small, name):
    checkpoint, reader = Checkpoint.open(small[name]), HeaderReader(read_headers(small[name]))

    checkpoint.family.load(reader, checkpoint.config, checkpoint.head)

    reader.check_unread(lambda _: False)


@pytest.mark.parametrize("name", KINDS)
def test_takes_fields_of_the_first_releases(small, copy_of, name):
    folder = copy_of(name)
    set_fields(folder, "config.json", **OLD_FIELDS[name])

    load(folder)
    old, new = Checkpoint.open(folder), Checkpoint.open(small[name])
    assert old.family.read_sizes(old.config) == new.family.read_sizes(new.config)


REFUSED = [
    ("bart", "normalize_before", True, "has normalize_before true; allowed: false"),
    ("bart", "normalize_embedding", False, "has normalize_embedding false; allowed: true"),
    ("bart", "is_encoder_decoder", False, "has is_encoder_decoder false; allowed: true"),
    ("bart", "rope_theta", 1e4, 'has the field "rope_theta"'),
    ("bart", "activation_function", "mish", 'has activation_function "mish"; allowed: gelu'),
    ("bart", "decoder_attention_heads", 5, "d_model 36 is not a multiple of decoder_attention"),
    ("bart", "num_hidden_layers", 3, "has num_hidden_layers 3 and encoder_layers 2"),
    ("bart", "scale_embedding", 1, "has scale_embedding 1; allowed: true, false"),
    ("mbart", "add_final_layer_norm", False, "has add_final_layer_norm false; allowed: true"),
    ("marian", "static_position_embeddings", False, "static_position_embeddings false"),
    ("marian", "decoder_vocab_size", 300, "has decoder_vocab_size 300 and vocab_size 263"),
    ("m2m_100", "pad_token_id", None, "has pad_token_id None; allowed: whole numbers from 0"),
    ("m2m_100", "quantization_config", {"bits": 8}, "has quant_method null; allowed: awq, gptq"),
    ("t5", "feed_forward_proj", "gated-mish", 'feed_forward_proj "gated-mish"; allowed: gelu'),
    ("t5", "dense_act_fn", "gelu", "dense_act_fn 'gelu' and feed_forward_proj \"relu\""),
    ("t5", "relative_attention_max_distance", 4, "max_distance 4; allowed: numbers above 4"),
    ("t5", "relative_attention_num_buckets", 2, "num_buckets 2; allowed: whole numbers from 4"),
    ("mt5", "is_gated_act", False, "has is_gated_act False and feed_forward_proj"),
    ("mt5", "num_layers", 0, "has num_layers 0; allowed: whole numbers from 1"),
    ("t5", "num_layers", 10**9, "num_layers 1000000000; allowed: whole numbers from 1 to 10000"),
    ("marian", "encoder_layers", 10**9, "allowed: whole numbers from 0 to 10000"),
    ("marian", "max_position_embeddings", 2**53, "allowed: whole numbers up to 1048576, since"),
]


@pytest.mark.parametrize("name, field, value, message", REFUSED)
def test_refuses_a_configuration_by_name(copy_of, name, field, value, message):
    folder = copy_of(name)
    set_fields(folder, "config.json", **{field: value})

    with refused(message):
        Checkpoint.open(folder)


@pytest.mark.parametrize("model_type", ["nllb-moe", "pegasus", "umt5", "longt5"])
def test_refuses_another_family(copy_of, model_type):
    folder = copy_of("t5")
    set_fields(folder, "config.json", model_type=model_type)

    with refused(f'config.json has model_type "{model_type}"; this version serves: bert'):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    "name, tensor",
    [
        ("bart", "model.encoder.layernorm_embedding.weight"),
        ("mbart", "model.decoder.layer_norm.bias"),
        ("marian", "model.decoder.layers.2.encoder_attn.k_proj.weight"),
        ("m2m_100", "model.encoder.layers.1.fc1.bias"),
        ("t5", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
        ("mt5", "decoder.block.1.layer.2.DenseReluDense.wi_1.weight"),
    ],
)
def test_finds_a_missing_tensor_without_loading(copy_of, name, tensor):
    folder = copy_of(name)
    change_tensors(folder, lambda tensors: tensors.pop(tensor))

    with refused(f'the checkpoint has no tensor "{tensor}"'):
        Checkpoint.open(folder).check_task("translate")


@pytest.mark.parametrize(
    "name, tensor",
    [
        ("bart", "model.encoder.layer_norm.weight"),
        ("marian", "model.decoder.layers.0.self_attn.q_proj.lora_A.weight"),
        ("m2m_100", "final_logits_bias"),
        ("t5", "decoder.block.1.layer.1.EncDecAttention.relative_attention_bias.weight"),
    ],
)
def test_refuses_a_tensor_that_the_model_does_not_use(copy_of, name, tensor):
    folder = copy_of(name)
    change_tensors(folder, lambda tensors: tensors.update({tensor: torch.ones(3)}))

    with refused(f'has the tensor "{tensor}", which the model in config.json does not use'):
        Checkpoint.open(folder).check_task("translate")


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_copies_of_the_shared_table_take_no_memory(copy_of, name):
    """Checkpoints of old releases have up to four copies."""
    folder = copy_of(name)
    prefix = "" if name == "t5" else "model."
    copies = [f"{prefix}{stack}.embed_tokens.weight" for stack in ("encoder", "decoder")]

    def add_copies(tensors):
        shared = tensors[f"{prefix}shared.weight"]
        tensors.update({copy: shared.clone() for copy in [*copies, "lm_head.weight"]})

    change_tensors(folder, add_copies)

    model = load(folder)

    tables = (
        (model.encoder.token_table, model.token_table)
        if name == "t5"
        else (model.source_embedding.token_table, model.target_embedding.token_table)
    )
    weights = [table.weight for table in tables]
    addresses = {weight.data_ptr() for weight in (*weights, model.output.weight)}
    assert len(addresses) == 1


@pytest.mark.parametrize("name", ["marian", "m2m_100"])
def test_takes_computed_positions_of_old_releases(small, copy_of, name):
    """They are computed again, whatever the file has."""
    folder = copy_of(name)
    positions = "model.encoder.embed_positions.weight"
    change_tensors(folder, lambda tensors: tensors.update({positions: torch.ones(64, 36)}))

    found, expected = (load(each).source_embedding for each in (folder, small[name]))
    assert torch.equal(found.position_table, expected.position_table)


def test_reads_what_generation_config_says(copy_of):
    folder = copy_of("marian")
    write_file(
        folder,
        GENERATION,
        {
            "bad_words_ids": [[1], [2], [9]],
            "begin_suppress_tokens": [4, 3],
            "bos_token_id": 0,
            "decoder_start_token_id": 1,
            "eos_token_id": [2, 7],
            "forced_bos_token_id": 8,
            "forced_eos_token_id": 2,
            "suppress_tokens": [5],
            "max_length": 30,
            "min_length": 4,
            "num_beams": 6,
            "length_penalty": -0.5,
            "early_stopping": "never",
            "renormalize_logits": True,
            "temperature": 0.5,
        },
    )

    settings = Checkpoint.open(folder).translate

    assert settings.tokens == TargetTokens(
        start=1,
        eos=(2, 7),
        pad=1,
        forced_first=8,
        forced_last=(2,),
        bad_words=(1, 9),
        suppressed=(5,),
        suppressed_first=(3, 4),
    )
    assert settings.defaults == TranslateDefaults(
        num_beams=6,
        length_penalty=-0.5,
        early_stopping="never",
        min_new_tokens=3,
        max_new_tokens=29,
        renormalize_logits=True,
    )


def test_reads_config_json_where_there_is_no_generation_config(copy_of):
    folder = copy_of("bart")
    (folder / GENERATION).unlink()
    set_fields(
        folder,
        "config.json",
        force_bos_token_to_be_generated=True,
        no_repeat_ngram_size=3,
        num_beams=4,
        early_stopping=True,
        max_length=142,
        min_length=56,
    )

    settings = Checkpoint.open(folder).translate

    assert (settings.tokens.forced_first, settings.tokens.forced_last) == (0, (2,))
    assert settings.defaults == TranslateDefaults(
        num_beams=4,
        no_repeat_ngram_size=3,
        early_stopping=True,
        min_new_tokens=55,
        max_new_tokens=141,
    )


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("bad_words_ids", [[3, 4]], "bad_words_ids [[3, 4]]; allowed: lists of one token id below"),
        ("suppress_tokens", [263], "suppress_tokens [263]; allowed: token ids below 263"),
        ("forced_bos_token_id", [3, 4], "forced_bos_token_id [3, 4]; allowed: one token id"),
        ("do_sample", True, "has do_sample true; allowed: false"),
        ("num_beam_groups", 2, "has num_beam_groups 2; allowed: 1"),
        ("diversity_penalty", 0.5, "has diversity_penalty 0.5; allowed: 0.0"),
        ("encoder_no_repeat_ngram_size", 3, "encoder_no_repeat_ngram_size 3; allowed: 0"),
        ("stop_strings", ["."], 'has stop_strings ["."]; allowed: null'),
        ("num_beams", 0, "has num_beams 0; allowed: whole numbers from 1"),
        ("early_stopping", "soon", "has early_stopping 'soon'; allowed: true, false"),
        ("max_length", 1, "has max_length 1; allowed: whole numbers from 2"),
        ("a_new_feature", 3, 'has the field "a_new_feature"'),
    ],
)
def test_refuses_what_changes_translations(copy_of, field, value, message):
    folder = copy_of("t5")
    set_fields(folder, GENERATION, **{field: value})

    with refused(message):
        Checkpoint.open(folder)


@pytest.mark.parametrize("field", ["decoder_start_token_id", "eos_token_id"])
def test_translating_needs_tokens_at_both_ends(copy_of, field):
    folder = copy_of("t5")
    for name in ("config.json", GENERATION):
        drop_field(folder, name, field)

    with refused(f"generation_config.json has no {field}, which translating needs"):
        Checkpoint.open(folder)


def test_knows_every_field_of_transformers_generation_config():
    fields = json.loads(GenerationConfig().to_json_string(use_diff=False)).keys()

    assert fields <= generation_config.TRANSLATE_FIELDS
    parts = [generation_config.TRANSLATE_READ_FIELDS, generation_config.TRANSLATE_HARMLESS_FIELDS]
    assert len(generation_config.TRANSLATE_FIELDS) == sum(map(len, parts)) + len(
        generation_config.TRANSLATE_FIXED_FIELDS
    )
