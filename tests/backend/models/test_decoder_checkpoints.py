"""Decoder checkpoints: unsupported fields, tensors and tasks are refused before weights are loaded."""

import dataclasses

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.checkpoints import (
    SMALL_DECODERS,
    WEIGHTS,
    change_tensors,
    config_class_of,
    drop_field,
    set_fields,
)
from varlen.models import llama
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.loading import load_decoder, load_encoder
from varlen.models.registry import DECODERS, FAMILIES

from ..refusals import refused_checkpoint as refused

CPU = torch.device("cpu")
FIXED = {field: value for each in DECODERS.values() for field, value in each.fields.fixed.items()}
CAUSAL = {
    name: "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM" for name in SMALL_DECODERS
}


def check(folder, task="generate"):
    Checkpoint.open(folder).check_task(task)


def known_fields(family):
    """Return the lists of fields that are read, harmless and fixed."""
    rules = FAMILIES[family].fields
    return rules.read, rules.harmless, rules.fixed.keys()


def read_config(config):
    return FAMILIES[config["model_type"]].read_sizes(config)


@pytest.mark.parametrize("name", SMALL_DECODERS)
def test_knows_every_field_of_transformers_configuration(name):
    config_class = config_class_of(name)
    fields = {field.name for field in dataclasses.fields(config_class)}

    rules = FAMILIES[config_class.model_type].fields

    assert {field for field in fields - rules.fixed.keys() if not rules.know(field)} == set()


@pytest.mark.parametrize("family", DECODERS)
def test_a_field_is_in_one_list_only(family):
    lists = known_fields(family)

    assert sum(map(len, lists)) == len(frozenset().union(*lists))


@pytest.mark.parametrize("name", SMALL_DECODERS)
def test_absent_fields_have_the_defaults_of_transformers(make_checkpoint, name):
    defaults = config_class_of(name)()
    config = Checkpoint.open(make_checkpoint(CAUSAL[name])).config
    sizes = (
        "n_embd n_head n_layer n_positions hidden_size intermediate_size max_position_embeddings"
    )
    # Llama's own default number of key heads is None: as many as query heads
    needed = f"{sizes} model_type num_attention_heads num_hidden_layers vocab_size".split()
    needed = {key: value for key, value in config.items() if key in needed}
    read, _, fixed = known_fields(config["model_type"])

    for field in fixed:
        assert getattr(defaults, field, None) in (FIXED[field], None)
    spelled_out = {
        field: getattr(defaults, field)
        for field in read - needed.keys() - {"architectures", "layer_types", "num_key_value_heads"}
        if hasattr(defaults, field)
        # derived, where the class has no default
        and (field != "head_dim" or name not in ("Llama", "Mistral", "Qwen2"))
    }
    assert read_config(needed) == read_config(needed | spelled_out)


def test_an_absent_window_of_mistral_is_that_of_transformers(make_checkpoint):
    folder = make_checkpoint(CAUSAL["Mistral"], max_position_embeddings=5000)
    drop_field(folder, "config.json", "sliding_window")

    windows = llama.LlamaConfig.read(Checkpoint.open(folder).config).windows

    assert set(windows) == {transformers.MistralConfig().sliding_window}


def test_a_window_as_long_as_every_sequence_is_none(make_checkpoint):
    folder = make_checkpoint(CAUSAL["Mistral"], sliding_window=320)

    assert llama.LlamaConfig.read(Checkpoint.open(folder).config).windows == (0, 0, 0)


@pytest.mark.parametrize(
    "kind, task",
    [
        ("GPT2LMHeadModel", "generate"),
        ("GPT2Model", "embed"),
        ("MistralForCausalLM", "generate"),
        ("MistralModel", "embed"),
        ("Qwen2Model", "embed"),
    ],
)
def test_the_architecture_decides_the_task(make_checkpoint, kind, task):
    checkpoint = Checkpoint.open(make_checkpoint(kind))

    assert (checkpoint.architecture, checkpoint.task) == (kind, task)
    assert (checkpoint.is_decoder, checkpoint.num_labels) == (True, 0)
    assert (checkpoint.hidden_size, checkpoint.position_limit) == (36, 320)
    for allowed in ("embed", "hidden"):
        checkpoint.check_task(allowed)


def test_generation_needs_an_output_layer(make_checkpoint):
    folder = make_checkpoint("LlamaModel")

    with refused('task "generate" needs a LlamaForCausalLM checkpoint; this one is a LlamaModel'):
        check(folder)


@pytest.mark.parametrize("task, head", [("rerank", "Sequence"), ("token_classify", "Token")])
def test_refuses_to_classify_without_a_classifier(make_checkpoint, task, head):
    folder = make_checkpoint("Qwen2ForCausalLM")

    with refused(f'task "{task}" needs a Qwen2For{head}Classification checkpoint; this one is a'):
        check(folder, task)


def test_refuses_to_classify_with_a_family_that_has_no_classifier(make_checkpoint):
    folder = make_checkpoint("GPT2LMHeadModel")

    message = 'task "classify" is not served with model_type "gpt2"; allowed: embed, hidden'
    with refused(message):
        check(folder, "classify")


def test_refuses_to_generate_with_an_encoder(folder):
    with refused('task "generate" is not served with model_type "bert"; allowed: embed, hidden'):
        check(folder)


@pytest.mark.parametrize(
    "kind", ["LlamaForMultipleChoice", "MistralForCausalLM", "LlamaForQuestionAnswering"]
)
def test_refuses_another_architecture(make_checkpoint, kind):
    folder = make_checkpoint("LlamaModel")
    set_fields(folder, "config.json", architectures=[kind])

    with refused(f'the architecture "{kind}"; allowed: LlamaForCausalLM, LlamaModel'):
        Checkpoint.open(folder)


COMMON = [
    ("num_kv_shared_layers", 3, 'has the field "num_kv_shared_layers" (3), which this version'),
    ("position_embedding_type", "alibi", 'has the field "position_embedding_type" ("alibi")'),
    ("auto_map", {"AutoModel": "model.M"}, "has auto_map, which names code of the checkpoint"),
    ("quantization_config", {"bits": 4}, "has quant_method null; allowed: awq, gptq"),
    ("is_encoder_decoder", True, "has is_encoder_decoder true; allowed: false"),
    ("add_cross_attention", True, "has add_cross_attention true; allowed: false"),
    ("is_causal", None, "has is_causal null; allowed: true, false"),
    ("suppress_tokens", [3], "has suppress_tokens [3]; allowed: null"),
    ("tie_word_embeddings", "no", "has tie_word_embeddings 'no'; allowed: true, false"),
    ("vocab_size", 0, "has vocab_size 0; allowed: whole numbers from 1"),
]
REFUSED = [
    *(("GPT2", *case) for case in COMMON),
    ("GPT2", "scale_attn_weights", False, "has scale_attn_weights false; allowed: true"),
    ("GPT2", "scale_attn_by_inverse_layer_idx", True, "inverse_layer_idx true; allowed: false"),
    ("GPT2", "activation_function", "swiglu", 'has activation_function "swiglu"; allowed: gelu'),
    ("GPT2", "n_head", 5, "n_embd 36 is not a multiple of n_head 5"),
    ("GPT2", "n_inner", 0, "has n_inner 0; allowed: whole numbers from 1"),
    ("GPT2", "layer_norm_epsilon", -1, "has layer_norm_epsilon -1; allowed: numbers from 0"),
    *(("Qwen3", *case) for case in COMMON),
    ("Llama", "hidden_act", "gelu", 'has hidden_act "gelu"; allowed: "silu"'),
    ("Llama", "sliding_window", 7, 'has the field "sliding_window" (7)'),
    ("Llama", "partial_rotary_factor", 0.5, "has partial_rotary_factor 0.5; allowed: 1.0"),
    ("Llama", "num_key_value_heads", 4, "num_attention_heads 6 is not a multiple of num_key_va"),
    ("Llama", "head_dim", 7, "heads have 7 features; allowed: even numbers"),
    ("Llama", "rope_scaling", {"type": "su"}, "which disagree"),
    ("Llama", "attention_bias", 1, "has attention_bias 1; allowed: true, false"),
    ("Mistral", "sliding_window", 0, "has sliding_window 0; allowed: whole numbers from 1"),
    ("Llama", "num_hidden_layers", 2**31, "allowed: whole numbers from 0 to 10000"),
    ("GPT2", "n_layer", 2**31, "allowed: whole numbers from 0 to 10000"),
    ("Mistral", "layer_types", ["full_attention"], 'has the field "layer_types"'),
    ("Qwen2", "layer_types", ["full_attention"], "allowed: 3 names"),
    ("Qwen2", "layer_types", [None, [], {}], "has null in layer_types; allowed: full_attention"),
    ("Qwen2", "use_sliding_window", "yes", "has use_sliding_window 'yes'; allowed: true, false"),
    (
        "Qwen2",
        "layer_types",
        ["sliding_attention"] * 3,
        'has "sliding_attention" in layer_types; allowed: full_attention',
    ),
    (
        "Qwen3",
        "layer_types",
        ["full_attention", "chunked_attention", "full_attention"],
        'has "chunked_attention" in layer_types; allowed: full_attention',
    ),
]


@pytest.mark.parametrize("name, field, value, message", REFUSED)
def test_refuses_a_field_that_would_change_results(make_checkpoint, name, field, value, message):
    folder = make_checkpoint(CAUSAL[name])
    set_fields(folder, "config.json", **{field: value})

    with refused(message):
        Checkpoint.open(folder)


@pytest.mark.parametrize("name", SMALL_DECODERS)
def test_takes_fields_that_change_no_result(make_checkpoint, name):
    config = Checkpoint.open(make_checkpoint(CAUSAL[name])).config
    _, harmless, _ = known_fields(config["model_type"])

    assert read_config(config | dict.fromkeys(harmless, "anything")) == read_config(config)


@pytest.mark.parametrize(
    "name, tensor",
    [
        ("GPT2", "transformer.h.1.attn.c_attn.bias"),
        ("GPT2", "transformer.wpe.weight"),
        ("Llama", "lm_head.weight"),
        ("Llama", "model.layers.2.mlp.gate_proj.weight"),
        ("Qwen2", "model.layers.0.self_attn.k_proj.bias"),
        ("Qwen3", "model.layers.0.self_attn.q_norm.weight"),
    ],
)
def test_finds_a_missing_tensor_without_loading(make_checkpoint, name, tensor):
    folder = make_checkpoint(CAUSAL[name])
    change_tensors(folder, lambda tensors: tensors.pop(tensor))

    with refused(f'the checkpoint has no tensor "{tensor}"'):
        check(folder)


@pytest.mark.parametrize(
    "name, tensor",
    [
        ("Llama", "model.layers.0.self_attn.q_proj.weight_scale"),
        ("Llama", "model.layers.0.self_attn.q_proj.bias"),
        ("Llama", "model.layers.0.self_attn.q_norm.weight"),
        ("Llama", "model.layers.3.mlp.up_proj.weight"),
        ("Mistral", "model.layers.0.self_attn.q_proj.lora_A.weight"),
        ("Qwen2", "model.layers.0.self_attn.o_proj.bias"),
        ("GPT2", "transformer.h.0.crossattention.c_attn.weight"),
        ("GPT2", "score.weight"),
    ],
)
def test_refuses_a_tensor_that_the_model_does_not_use(make_checkpoint, name, tensor):
    folder = make_checkpoint(CAUSAL[name])
    change_tensors(folder, lambda tensors: tensors.update({tensor: torch.ones(3)}))

    with refused(f'has the tensor "{tensor}", which the model in config.json does not use'):
        check(folder)


@pytest.mark.parametrize(
    "name, tensor",
    [
        ("Llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("GPT2", "transformer.h.0.attn.bias"),
        ("GPT2", "transformer.h.0.attn.masked_bias"),
    ],
)
def test_takes_a_tensor_of_older_releases(make_checkpoint, name, tensor):
    folder = make_checkpoint(CAUSAL[name])
    before = load_decoder(Checkpoint.open(folder), torch.float32, CPU)
    change_tensors(folder, lambda tensors: tensors.update({tensor: torch.ones(3)}))

    check(folder)
    load_encoder(Checkpoint.open(folder), torch.float32, CPU)
    after = load_decoder(Checkpoint.open(folder), torch.float32, CPU)
    assert torch.equal(before.layers[1].qkv.weight, after.layers[1].qkv.weight)


def test_takes_names_without_a_prefix(make_checkpoint):
    """OpenAI's own GPT-2 checkpoint names its tensors so, though it is a GPT2LMHeadModel."""
    folder = make_checkpoint(CAUSAL["GPT2"])
    before = load_decoder(Checkpoint.open(folder), torch.float32, CPU)

    def shorten(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)

    change_tensors(folder, shorten)

    check(folder)
    after = load_decoder(Checkpoint.open(folder), torch.float32, CPU)
    assert torch.equal(before.layers[1].qkv.weight, after.layers[1].qkv.weight)


@pytest.mark.parametrize("name", ["GPT2", "Qwen2"])
def test_takes_a_copy_of_the_tied_table(make_checkpoint, name):
    folder = make_checkpoint(CAUSAL[name], tie_word_embeddings=True)
    table = "transformer.wte.weight" if name == "GPT2" else "model.embed_tokens.weight"
    change_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": tensors[table] + 0}))

    check(folder)
    model = load_decoder(Checkpoint.open(folder), torch.float32, CPU)
    assert model.output.weight.data_ptr() == model.token_table.weight.data_ptr()


def test_refuses_another_output_layer_than_the_table_that_it_is_tied_to(make_checkpoint):
    """Then transformers 5 ignores tie_word_embeddings, and releases before it ignore the tensor."""
    folder = make_checkpoint(CAUSAL["Qwen2"], tie_word_embeddings=True)
    table = "model.embed_tokens.weight"
    change_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": tensors[table] + 1}))

    with refused('tie_word_embeddings true, but the tensor "lm_head.weight" is not the embedding'):
        load_decoder(Checkpoint.open(folder), torch.float32, CPU)


def test_linear_weights_are_laid_out_input_by_output(make_checkpoint):
    folder = make_checkpoint(CAUSAL["Qwen2"])
    stored = load_file(folder / WEIGHTS)

    layer = load_decoder(Checkpoint.open(folder), torch.float32, CPU).layers[1]

    attention = "model.layers.1.self_attn"
    qkv = [stored[f"{attention}.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(layer.qkv.weight, torch.cat(qkv).t())
    bias = [stored[f"{attention}.{part}_proj.bias"] for part in "qkv"]
    assert torch.equal(layer.qkv.bias, torch.cat(bias))
    gate_up = [stored[f"model.layers.1.mlp.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(layer.mlp.up.weight, torch.cat(gate_up).t())
    assert layer.qkv.weight.is_contiguous()
    assert layer.mlp.down.weight.is_contiguous()
