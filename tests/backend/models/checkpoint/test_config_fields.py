"""Fields of config.json that are ignored: unread ones, and those that the owner names."""

import logging

import pytest

from tests.backend.refusals import refused_checkpoint as refused
from tests.checkpoints import set_fields
from varlen import Encoder, Generator
from varlen.models.checkpoint.config_fields import FieldRules, check_known, fields_read
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.notes import checkpoint_notes
from varlen.models.registry import FAMILIES

UNREAD = "read by no release of transformers from 4.48 to 5.23"
# Field of a model that reads more than BERT does.
CODE = {"AutoModel": "modeling.Model"}
FIRST_RELEASE = {"layer_norm_type": "layer_norm", "position_embedding_type": "rope"}


def test_a_field_that_no_release_reads_is_ignored_and_named(folder):
    set_fields(folder, "config.json", tie_weights_=True, unsloth_version="2024.9")

    checkpoint = Checkpoint.open(folder)

    assert checkpoint_notes(checkpoint, "embed", 64) == (
        f"fields of config.json that are ignored: tie_weights_, unsloth_version ({UNREAD})",
    )
    assert not {"tie_weights_", "unsloth_version"} & checkpoint.config.keys()


def test_a_checkpoint_whose_fields_are_all_known_has_no_note(folder):
    set_fields(folder, "config.json", gradient_checkpointing=False, num_beams=1, top_k=50)

    assert checkpoint_notes(Checkpoint.open(folder), "embed", 64) == ()


def test_generation_defaults_change_no_encoder(folder):
    """Releases before 5 saved them in every config.json."""
    set_fields(folder, "config.json", max_length=20, bad_words_ids=[[3]], forced_eos_token_id=2)

    Checkpoint.open(folder).check_task("embed")


def test_with_code_of_its_own_a_checkpoint_may_read_any_field(folder):
    set_fields(folder, "config.json", auto_map=CODE, tie_weights_=True)

    with refused(
        'has the field "tie_weights_" (true), which this version does not know (the setti'
    ):
        Checkpoint.open(folder, ignore_config_fields=("auto_map",))


def test_a_first_release_may_read_any_field(make_checkpoint):
    folder = make_checkpoint("GteModel")
    set_fields(folder, "config.json", **FIRST_RELEASE, tie_weights_=True)

    with refused('has the field "tie_weights_" (true), which this version does not know'):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    "name, value",
    [
        ("auto_map", CODE),
        ("rope_scaling", {"factor": 2.0}),
        ("position_embedding_type", "relative_key"),
        ("is_decoder", True),
    ],
)
def test_the_owner_may_leave_a_refused_field_out(folder, name, value):
    set_fields(folder, "config.json", **{name: value})
    with refused("(the setting ignore_config_fields leaves it out)"):
        Checkpoint.open(folder)

    checkpoint = Checkpoint.open(folder, ignore_config_fields=(name, "absent"))

    assert name not in checkpoint.config
    assert checkpoint.ignored.note() == (
        f"fields of config.json that are ignored: {name} (named by ignore_config_fields)"
    )


def test_the_owner_may_leave_out_a_field_of_a_first_release(make_checkpoint):
    folder = make_checkpoint("GteModel")
    set_fields(folder, "config.json", **FIRST_RELEASE, logn_attention_scale=True)
    with refused("has logn_attention_scale true; allowed: false (the setting ignore_config_fields"):
        Checkpoint.open(folder)

    Checkpoint.open(folder, ignore_config_fields=("logn_attention_scale",))


@pytest.mark.parametrize("name", ["hidden_size", "hidden_act", "architectures", "pad_token_id"])
def test_the_owner_may_not_leave_out_what_is_known(folder, name):
    with refused(f"ignore_config_fields names {name}, which varlen knows: correct it in config"):
        Checkpoint.open(folder, ignore_config_fields=(name,))


def test_the_owner_cannot_make_floats_of_quantized_weights(folder):
    set_fields(folder, "config.json", quantization_config={"bits": 4})

    with refused("has quant_method null; allowed: awq, gptq"):
        Checkpoint.open(folder, ignore_config_fields=("quantization_config",))


def test_an_encoder_takes_the_setting_and_logs_what_it_ignores(folder, caplog):
    set_fields(folder, "config.json", is_decoder=True, output_past=True, _num_labels=9)

    with caplog.at_level(logging.WARNING, logger="varlen"):
        Encoder.from_pretrained(folder, ignore_config_fields="is_decoder, absent").close()

    assert caplog.messages == [
        f"fields of config.json that are ignored: output_past, _num_labels ({UNREAD});"
        " is_decoder (named by ignore_config_fields)"
    ]


def test_a_generator_takes_the_setting_and_logs_what_it_ignores(make_checkpoint, caplog):
    folder = make_checkpoint("LlamaForCausalLM")
    set_fields(
        folder,
        "config.json",
        num_kv_shared_layers=1,
        is_llama_config=True,
    )

    with caplog.at_level(logging.WARNING, logger="varlen"):
        Generator.from_pretrained(folder, ignore_config_fields="num_kv_shared_layers").close()

    assert caplog.messages == [
        f"fields of config.json that are ignored: is_llama_config ({UNREAD});"
        " num_kv_shared_layers (named by ignore_config_fields)"
    ]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_of_unknown_fields_those_of_value_zero_load_and_others_are_refused_by_name(model_type):
    rules = FAMILIES[model_type].fields
    config = {"model_type": model_type}
    unknown = {
        name
        # code of the checkpoint has a refusal of its own
        for name in (fields_read("shared") | fields_read(model_type)) - {"auto_map"}
        if not rules.know(name) and name not in rules.fixed
    }

    # a family with experts reads their number
    others = {"logits_to_keep", "num_kv_shared_layers"}
    assert others | ({"num_experts"} - {*rules.read}) <= unknown
    for value in (None, False, 0, 0.0, "", [], {}):
        check_known(config | dict.fromkeys(unknown, value), rules)
    for name in unknown:
        with refused(f'config.json has the field "{name}" (7), which this version does not know'):
            check_known({**config, name: 7}, rules)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_fields_of_training_change_nothing_whatever_their_values_are(model_type):
    fields = {
        "hidden_dropout": 0.5,
        "attention_dropout": 0.1,
        "embd_pdrop": 0.1,
        "encoder_layerdrop": 0.2,
        "initializer_factor": 2.0,
        "use_flash_attention_2": True,
        "base_model": "someone/a-model",
    }

    check_known({"model_type": model_type, **fields}, FAMILIES[model_type].fields)


@pytest.mark.parametrize("hidden", ["hidden_size", "d_model", "n_embd", "dim"])
def test_embeddings_as_wide_as_layers_need_no_projection(hidden):
    rules = FAMILIES["bert"].fields
    config = {"model_type": "bert", "embedding_size": 24}

    check_known({**config, hidden: 24}, FieldRules(rules.read | {hidden}, rules.harmless, {}))
    with refused('config.json has the field "embedding_size" (24), which this version does not'):
        check_known({**config, "hidden_size": 48}, rules)
