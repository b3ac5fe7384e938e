"""BERT checkpoints: unsupported fields and tensors are refused before weights are loaded."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints import WEIGHTS, change_tensors, set_fields
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.loading import load_encoder

from ..refusals import refused_checkpoint as refused
from .oracle import assert_hidden_states_match, load_oracle

ROWS = [[5, 6, 7], [1], list(range(5, 45))]


def check(folder, task="embed"):
    Checkpoint.open(folder).check_task(task)


@pytest.mark.parametrize("value", [None, False, 0, 0.0, "", {}, []], ids=repr)
def test_takes_an_unknown_feature_that_is_off(folder, value):
    before = Checkpoint.open(folder)
    set_fields(folder, "config.json", rope_scaling=value)

    check(folder)
    after = Checkpoint.open(folder)
    assert replace(after, config={**after.config, "rope_scaling": None}) == replace(
        before, config={**before.config, "rope_scaling": None}
    )


@pytest.mark.parametrize(
    "name, value, message",
    [
        (
            "rope_scaling",
            {"factor": 2.0},
            'has the field "rope_scaling" ({"factor": 2.0}), which this version does not know',
        ),
        ("auto_map", {"AutoModel": "m.M"}, "has auto_map, which names code of the checkpoint"),
        (
            "num_experts",
            8,
            'has the field "num_experts" (8), which this version does not know (the',
        ),
        ("decoder", "x" * 300, 'has the field "decoder" ("' + "x" * 79 + "...)"),
        ("quantization_config", {"bits": 8}, "has quant_method null; allowed: awq, gptq"),
        ("quantization", {"bits": 4}, "has quantization, which is not served"),
        ("is_decoder", True, "has is_decoder true; allowed: false"),
        ("is_encoder_decoder", True, "has is_encoder_decoder true; allowed: false"),
        ("add_cross_attention", True, "has add_cross_attention true; allowed: false"),
        ("pruned_heads", {"0": [1]}, 'has pruned_heads {"0": [1]}; allowed: {}'),
        (
            "position_embedding_type",
            "relative_key",
            'has position_embedding_type "relative_key"; allowed: "absolute"',
        ),
        ("hidden_act", ["gelu"], "allowed: gelu, gelu_new"),
        ("hidden_act", "mish", 'has hidden_act "mish"; allowed: gelu, gelu_new'),
        ("num_attention_heads", 5, "hidden_size 24 is not a multiple of num_attention_heads 5"),
        ("layer_norm_eps", "small", "has layer_norm_eps 'small'; allowed: numbers from 0"),
        ("layer_norm_eps", True, "has layer_norm_eps True; allowed: numbers from 0"),
        (
            "architectures",
            ["BertForMultipleChoice"],
            'has the architecture "BertForMultipleChoice"; allowed: BertModel',
        ),
        ("architectures", "BertModel2", 'has the architecture "BertModel2"; allowed: BertModel'),
    ],
)
def test_refuses_a_field_that_would_change_results(folder, name, value, message):
    set_fields(folder, "config.json", **{name: value})

    with refused(message):
        Checkpoint.open(folder)


@pytest.mark.parametrize("count", [0, "3", 1.5])
def test_refuses_a_number_of_labels_that_is_not_positive(make_checkpoint, count):
    folder = make_checkpoint("BertForSequenceClassification")
    set_fields(folder, "config.json", num_labels=count, id2label=None)

    with refused(f"has num_labels {count!r}; allowed: whole numbers from 1"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.int64])
def test_refuses_weights_that_are_quantized(folder, dtype):
    """Integers were once loaded as weights, without their scales."""
    name = "encoder.layer.1.output.dense.weight"

    def quantize(tensors):
        scale = tensors[name].abs().max() / 127
        tensors[name] = (tensors[name] / scale).to(dtype)

    change_tensors(folder, quantize)

    with refused(f'the tensor "{name}" has dtype '):
        check(folder)
    with refused("allowed: F64, F32, F16, BF16 (quantized weights need their scales"):
        load_encoder(Checkpoint.open(folder), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    "name",
    [
        "encoder.layer.0.output.dense.weight_scale",
        "encoder.layer.0.output.dense.SCB",
        "classifier.weight_scale",
        "encoder.layer.0.attention.self.query.lora_A.weight",
        "encoder.layer.0.attention.self.distance_embedding.weight",
        "encoder.layer.2.output.dense.weight",
        "bert.pooler.bias",
        "linear.weight",
    ],
)
def test_refuses_a_tensor_that_the_model_does_not_use(folder, name):
    change_tensors(folder, lambda tensors: tensors.update({name: torch.ones(3)}))

    with refused(
        f'the checkpoint has the tensor "{name}", which the model in config.json does not use'
    ):
        check(folder)


@pytest.mark.parametrize(
    "name",
    [
        "embeddings.position_ids",
        "embeddings.token_type_ids",
        "cls.predictions.bias",
        "cls.seq_relationship.weight",
        "classifier.weight",
        "qa_outputs.bias",
        "pooler.dense.bias",
    ],
)
def test_takes_a_tensor_that_is_known_to_be_unused(folder, name):
    change_tensors(folder, lambda tensors: tensors.update({name: torch.ones(3, dtype=torch.int64)}))

    check(folder)
    weights = load_encoder(Checkpoint.open(folder), torch.float32, torch.device("cpu"))
    stored = load_file(folder / WEIGHTS)["encoder.layer.1.intermediate.dense.weight"]
    assert torch.equal(weights.layers[1].mlp.up.weight, stored.t())


@pytest.mark.parametrize(
    "name",
    [
        "embeddings.position_embeddings.weight",
        "encoder.layer.1.attention.self.key.bias",
        "encoder.layer.0.output.LayerNorm.weight",
        "encoder.layer.1.intermediate.dense.bias",
    ],
)
def test_finds_a_missing_tensor_without_loading(folder, name):
    change_tensors(folder, lambda tensors: tensors.pop(name))

    with refused(f'the checkpoint has no tensor "{name}"'):
        check(folder)


def test_finds_a_missing_classifier_without_loading(make_checkpoint):
    folder = make_checkpoint("BertForSequenceClassification", num_labels=3)
    change_tensors(folder, lambda tensors: tensors.pop("classifier.weight"))

    with refused('the checkpoint has no tensor "classifier.weight"'):
        check(folder, "classify")


@pytest.mark.parametrize(
    "size, message",
    [
        ({"vocab_size": 93}, 'word_embeddings.weight" has shape [92, 24]; config.json implies [93'),
        ({"intermediate_size": 41}, 'weight" has shape [40, 24]; config.json implies [41, 24]'),
    ],
)
def test_finds_a_tensor_of_another_shape_without_loading(folder, size, message):
    set_fields(folder, "config.json", **size)

    with refused(message):
        check(folder)


def test_finds_a_missing_pooler_of_a_classifier(make_checkpoint):
    folder = make_checkpoint("BertForSequenceClassification")
    change_tensors(folder, lambda tensors: tensors.pop("bert.pooler.dense.weight"))

    for task in ("classify", "rerank", "hidden"):
        with refused('the checkpoint has no tensor "bert.pooler.dense.weight"'):
            check(folder, task)


def test_old_names_of_a_layer_norm_match_transformers(folder):
    """Checkpoints converted from TensorFlow use the names gamma and beta."""

    def rename(tensors):
        for name in [name for name in tensors if "LayerNorm" in name]:
            old = name.replace("LayerNorm.weight", "LayerNorm.gamma")
            tensors[old.replace("LayerNorm.bias", "LayerNorm.beta")] = tensors.pop(name)

    change_tensors(folder, rename)
    assert any(name.endswith("gamma") for name in load_file(folder / WEIGHTS))

    assert_hidden_states_match(folder, load_oracle(folder), ROWS)


def test_refuses_a_tensor_under_its_old_and_its_new_name(folder):
    name = "embeddings.LayerNorm"
    change_tensors(
        folder, lambda tensors: tensors.update({f"{name}.gamma": tensors[f"{name}.weight"].clone()})
    )

    with refused(f'the checkpoint has two tensors "{name}.weight"'):
        check(folder)


def test_weights_in_double_precision_match_transformers(folder):
    change_tensors(
        folder, lambda tensors: tensors.update({k: v.double() for k, v in tensors.items()})
    )

    assert_hidden_states_match(folder, load_oracle(folder), ROWS)
