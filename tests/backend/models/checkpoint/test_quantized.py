"""Quantized checkpoints of every served form, whole and damaged."""

import json
import logging
import shutil

import numpy as np
import pytest
import torch
import transformers

from tests.backend.models.paged import run_in_chunks
from tests.backend.refusals import refused_checkpoint as refused
from tests.checkpoints import change_tensors, set_fields
from tests.quantized import FORMS, save_quantized, widen
from varlen import Encoder
from varlen.execution import programs
from varlen.models.checkpoint.weights import CheckpointWeights
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.notes import checkpoint_notes
from varlen_kernels.cpu.calls.run_calls import has_compiled_ops

LAYER = "model.layers.0.self_attn.q_proj"
ENCODER = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
GPT2 = {"n_embd": 32, "n_inner": 64, "n_head": 4}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a function that returns a checkpoint in a form, and its weights."""
    made = {}

    def get(form):
        if form not in made:
            folder = tmp_path_factory.mktemp(form)
            made[form] = folder, save_quantized(folder, form)
        return made[form]

    return get


@pytest.fixture
def damaged(saved, tmp_path):
    """Return a function that returns a copy of a checkpoint whose tensors are changed."""

    def get(form, change):
        folder = shutil.copytree(saved(form)[0], tmp_path / form)
        change_tensors(folder, change)
        return folder

    return get


def load(folder, **options):
    """Check a checkpoint, and run it."""
    checkpoint = Checkpoint.open(folder)
    checkpoint.check_task("generate")
    return run_in_chunks(folder, [range(9)], [5], **options)


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_what_the_format_states(saved, form):
    folder, expected = saved(form)
    checkpoint = Checkpoint.open(folder)

    checkpoint.check_task("generate")

    with CheckpointWeights(folder) as weights:
        for name, weight in expected.items():
            torch.testing.assert_close(weights.read(name, *weight.shape), weight, rtol=1e-6, atol=0)
    (note,) = checkpoint_notes(checkpoint, "generate", 64)
    assert FORMS[form].says in note
    (note,) = checkpoint_notes(checkpoint, "generate", 64, keeps_codes=True)
    assert ("keeps the codes" in note) == (not form.startswith("fp8"))


@pytest.mark.parametrize("form", ["awq", "gptq-asymmetric", "int8", "fp8-blocks", "nf4-double"])
def test_a_model_answers_as_with_floats(saved, tmp_path, form):
    folder, expected = saved(form)
    floats = shutil.copytree(folder, tmp_path / "floats")
    widen(floats, expected)

    ((actual,), (_,)), ((wanted,), (_,)) = (
        [[np.concatenate([each]) for each in part] for part in load(each)]
        for each in (folder, floats)
    )

    np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not has_compiled_ops(), reason="numba compiles the products")
@pytest.mark.parametrize("form", [name for name in FORMS if not name.startswith("fp8")])
def test_codes_that_stay_answer_as_floats(saved, tmp_path, form):
    folder, expected = saved(form)
    floats = shutil.copytree(folder, tmp_path / "floats")
    widen(floats, expected)

    actual, wanted = (load(each, compiled=True, keeps_codes=True) for each in (folder, floats))

    for part, of_floats in zip(actual, wanted, strict=True):
        torch.testing.assert_close(part, of_floats, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not has_compiled_ops(), reason="numba compiles the products")
@pytest.mark.parametrize(
    "kind", ["Qwen3Model", "BertModel", "ModernBertModel", "DebertaV2Model"], ids=str
)
def test_a_model_that_embeds_keeps_codes(kind, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(programs, "choose_dtype", lambda *_: torch.float32)
    folder, floats = tmp_path / "codes", tmp_path / "floats"
    sizes = {} if kind == "Qwen3Model" else ENCODER
    expected = save_quantized(folder, "awq", kind, **sizes)
    widen(shutil.copytree(folder, floats), expected)
    caplog.set_level(logging.INFO)

    def embed(folder):
        with Encoder.from_pretrained(folder, task="embed") as encoder:
            return encoder.embed([[1, 2, 3], [*range(40)]])

    found, wanted = map(embed, (folder, floats))

    assert caplog.text.count("linear layers that keep codes: ") == 1
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


# nf4 has blocks of 64 weights: rows of 64, of 14 layers two, have whole ones
@pytest.mark.parametrize(
    "form, kept", [("gptq-old", 14), ("int8", 14), ("nf4", 2), ("fp8-blocks", 0)]
)
def test_codes_of_blocks_that_lie_in_a_row_stay(saved, form, kept):
    folder, expected = saved(form)

    with CheckpointWeights(folder) as weights:
        found = [weights.read_blocks(name, *weight.shape) for name, weight in expected.items()]

    assert sum(each is not None for each in found) == kept


def test_groups_of_different_sizes_are_widened(damaged):
    def change(groups):
        groups[groups.argmax()] = 0
        return groups

    folder = damaged("gptq-old", put(".g_idx", change))

    with CheckpointWeights(folder) as weights:
        assert weights.read_blocks(f"{LAYER}.weight", 32, 32) is None


def test_a_cut_inside_a_block_makes_smaller_blocks(saved):
    folder, expected = saved("packed-4-asymmetric")
    weight = expected[f"{LAYER}.weight"]
    with CheckpointWeights(folder) as weights:
        blocks = weights.read_blocks(f"{LAYER}.weight", *weight.shape)

    part = blocks.part([(3, 9), (20, 32)], (8, 24), 8)

    scale, offset = (each.repeat_interleave(8, 1) for each in (part.scale, part.offset))
    values = (part.codes - 8.0) * scale + offset
    rows = torch.cat([weight[3:9], weight[20:]])
    torch.testing.assert_close(values, rows[:, 8:24], rtol=1e-4, atol=1e-6)


def test_ranks_read_parts_of_a_weight(saved):
    folder, expected = saved("gptq")
    name = f"{LAYER}.weight"
    weight = expected[name]

    with CheckpointWeights(folder) as weights:
        for axis in (0, 1):
            parts = weights.read_parts(name, *weight.shape, axis=axis, bounds=[(3, 9), (20, 32)])
            torch.testing.assert_close(
                parts, torch.cat([weight.narrow(axis, 3, 6), weight.narrow(axis, 20, 12)], axis)
            )


def drop(end):
    """Return a change that removes a part of a layer."""
    return lambda tensors: tensors.pop(f"{LAYER}{end}")


def put(end, make):
    """Return a change of a part of a layer."""

    def change(tensors):
        tensors[f"{LAYER}{end}"] = make(tensors[f"{LAYER}{end}"]).contiguous()

    return change


def state(text):
    return put(
        ".weight.quant_state.bitsandbytes__nf4",
        lambda _: torch.tensor(list(text.encode()), dtype=torch.uint8),
    )


DAMAGED = {
    "awq-no-scales": ("awq", drop(".scales"), f'no tensor "{LAYER}.scales", which a weight'),
    "awq-no-zeros": ("awq", drop(".qzeros"), f'no tensor "{LAYER}.qzeros"'),
    "awq-narrow-zeros": (
        "awq",
        put(".qzeros", lambda x: x[:, :1]),
        "I32 [2, 1]; allowed: words of 4 bits of 32 outputs",
    ),
    "gptq-zeros-of-2-bits": (
        "gptq",
        put(".qzeros", lambda x: x[:, ::2]),
        "I32 [2, 2]; allowed: words of 4 or 8 bits of 32 outputs",
    ),
    "gptq-fewer-zeros": ("gptq", put(".qzeros", lambda x: x[:1]), "I32 [1, 4]; allowed: [2, 4]"),
    "awq-fewer-scales": (
        "awq",
        put(".scales", lambda x: x[:1]),
        "F16 [1, 32]; allowed: scales by output and input [32, 2] of a weight [32, 32]",
    ),
    "awq-integer-scales": ("awq", put(".scales", lambda x: x.int()), "I32 [2, 32]; allowed: F64"),
    "awq-codes-of-bytes": ("awq", put(".qweight", lambda x: x.to(torch.int8)), "allowed: I32"),
    "awq-one-axis": ("awq", put(".qweight", lambda x: x.flatten()), "allowed: 2 axes, none empty"),
    "awq-another-shape": ("awq", put(".qweight", lambda x: x[:16]), "of a weight [32, 16]"),
    "gptq-short-order": ("gptq", put(".g_idx", lambda x: x[:9]), "I32 [9]; allowed: [32]"),
    "gptq-no-order": ("gptq-old", drop(".g_idx"), f'no tensor "{LAYER}.g_idx"'),
    "gptq-order-beyond": ("gptq", put(".g_idx", lambda x: x + 1), "names groups from 1 to 2; all"),
    "gptq-order-below": ("gptq", put(".g_idx", lambda x: x - 1), "names groups from -1 to 0; all"),
    "packed-another-shape": (
        "packed-4",
        put(".weight_shape", lambda x: x * 1000),
        "I32 [32, 4]; allowed: words of 4 or 8 bits of [32000, 32000]",
    ),
    "packed-no-shape": ("packed-4", drop(".weight_shape"), "has no tensor"),
    "packed-zeros": (
        "packed-4-asymmetric",
        put(".weight_zero_point", lambda x: x[:1]),
        "I32 [1, 2]; allowed: [4, 2]",
    ),
    "int8-no-scales": ("int8", drop(".weight_scale"), "has dtype I8; allowed: F64, F32, F16, BF16"),
    "int8-more-scales": ("int8", put(".weight_scale", lambda x: x.repeat(1, 3)), "BF16 [32, 3]"),
    "fp8-fewer-blocks": (
        "fp8-blocks",
        put(".weight_scale_inv", lambda x: x[:1]),
        "F32 [1, 2]; allowed: scales by output and input [2, 2] of a weight [32, 32]",
    ),
    "nf4-short": ("nf4", put(".weight", lambda x: x[:9]), "allowed: 4 bits of each of [32, 32]"),
    "nf4-no-table": ("nf4", drop(".weight.quant_map"), "has no tensor"),
    "nf4-small-table": ("nf4", put(".weight.quant_map", lambda x: x[:9]), "[9]; allowed: [16]"),
    "nf4-no-factors": ("nf4-double", drop(".weight.nested_absmax"), "has no tensor"),
    "nf4-text": ("nf4", state("no JSON"), "allowed: JSON with shape and blocksize"),
    "nf4-list": ("nf4", state("[]"), "allowed: JSON with shape and blocksize"),
    "nf4-long": ("nf4", state("x" * 5000), "allowed: at most 4096 bytes"),
    "nf4-huge": ("nf4", state('{"shape": [1, 4], "blocksize": 1e300}'), "powers of two from 32"),
    "nf4-odd-blocks": ("nf4", state('{"shape": [1, 4], "blocksize": 7}'), "powers of two from 32"),
    "llm-int8-tiles": ("llm-int8", put(".weight_format", lambda x: x + 1), "allowed: 0, rows"),
    "two-weights": (
        "gptq",
        lambda tensors: tensors.update({f"{LAYER}.weight": torch.ones(32, 32)}),
        f'has two tensors "{LAYER}.weight"',
    ),
}


@pytest.mark.parametrize("form, change, message", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_checkpoint_is_refused(damaged, form, change, message):
    folder = damaged(form, change)

    with refused(message) as error:
        load(folder)

    assert str(folder) not in str(error.value)


CONFIGS = [
    ("awq", {"bits": 3}, "quantization_config of config.json has bits 3; allowed: 4; take the"),
    ("awq", {"version": "gemv"}, 'has format "gemv"; allowed: gemm; take the checkpoint that it'),
    ("awq", {"group_size": 0}, "has group_size 0; allowed: -1, or whole numbers from 1"),
    ("awq", {"group_size": 1 << 70}, "F16 [4, 32]; allowed: scales by output and input [32, 1]"),
    ("awq", {"rotation": "x"}, 'the field "rotation" ("x"), which this version does not know'),
    ("gptq", {"bits": 2}, "has bits 2; allowed: 4 or 8"),
    ("gptq", {"checkpoint_format": "marlin"}, 'has format "marlin"; allowed: gptq'),
    ("gptq", {"is_marlin_format": True}, "has is_marlin_format true; allowed: false"),
    (
        "gptq",
        {"dynamic": {"+:mlp": {"bits": 2}}},
        "has bits 2; allowed: 4 or 8; take the checkpoint",
    ),
    (
        "gptq",
        {"dynamic": {"+:mlp": 2}},
        'has dynamic {"+:mlp": 2}; allowed: objects by name; take',
    ),
    ("gptq", {"dynamic": ["mlp"]}, 'has dynamic ["mlp"]; allowed: objects by name'),
    ("auto-round", {"bits": 2}, "has bits 2; allowed: 4 or 8"),
    ("auto-round", {"data_type": "mx_fp"}, 'has data_type "mx_fp"; allowed: "int"; take the check'),
    (
        "auto-round",
        {"packing_format": "auto_round:llm_compressor"},
        'has packing_format "auto_round:llm_compressor"; allowed: auto_round:auto_gptq, auto_round:gptq',
    ),
    (
        "fp8-modelopt",
        {"quant_algo": "NVFP4"},
        'has quant_algo "NVFP4"; allowed: "FP8"; take the che',
    ),
    ("gptq", {"group_size": 8}, "F16 [4, 32]; allowed: scales by output and input [32, 8]"),
    (
        "int8",
        {"format": "nvfp4-pack-quantized"},
        'has format "nvfp4-pack-quantized"; allowed: pack',
    ),
    ("int8", {"sparsity_config": {"format": "2:4"}}, "has sparsity_config"),
    ("int8", {"transform_config": {"config_groups": {"R": {}}}}, "has transform_config"),
    ("int8", {"config_groups": [1]}, "has config_groups [1]; allowed: objects by name"),
    ("fp8-blocks", {"fmt": "e5m2"}, 'has fmt "e5m2"; allowed: "e4m3"'),
    ("fp8-blocks", {"weight_block_size": [128]}, "has weight_block_size [128]; allowed: two whole"),
]


@pytest.mark.parametrize("form, change, message", CONFIGS)
def test_a_configuration_that_is_not_served_is_refused(saved, tmp_path, form, change, message):
    folder = shutil.copytree(saved(form)[0], tmp_path / "copy")
    set_fields(folder, "config.json", quantization_config={**FORMS[form].config, **change})

    with refused(message):
        load(folder)


# Methods of transformers 5.23, vLLM and exllama.
OTHERS = (
    "aqlm bitblas bitnet eetq exl3 fouroversix fp_quant gemma gguf higgs hqq marlin metal mxfp4 mxfp8 nvfp4 qqq quanto"
    " quark sinq spqr torchao vptq"
)


@pytest.mark.parametrize("method", OTHERS.split())
def test_another_method_is_refused_by_its_name(folder, method):
    set_fields(folder, "config.json", quantization_config={"quant_method": method, "bits": 4})

    with refused(f'has quant_method "{method}"; allowed: awq, gptq, compressed-') as error:
        Checkpoint.open(folder)

    assert str(error.value).endswith("; take the checkpoint that it was made of")


@pytest.mark.parametrize(
    "weights, message",
    [
        ({"num_bits": 3}, 'weights of type "int" with num_bits 3; allowed: int with 4 or 8'),
        ({"num_bits": 4, "type": "float"}, 'type "float" with num_bits 4'),
        ({"num_bits": 8, "dynamic": True}, "none dynamic"),
        ({"num_bits": 8, "strategy": "attn_head"}, 'has strategy "attn_head"; allowed: tensor'),
        ({"num_bits": 8, "group_size": "x"}, 'has group_size "x"; allowed: -1, or whole'),
    ],
)
def test_a_group_that_is_not_served_is_refused(saved, tmp_path, weights, message):
    folder = shutil.copytree(saved("int8")[0], tmp_path / "copy")
    config = {**FORMS["int8"].config, "config_groups": {"group_0": {"weights": weights}}}
    set_fields(folder, "config.json", quantization_config=config)

    with refused(message):
        Checkpoint.open(folder)


def test_a_gpt2_of_another_method_is_refused(make_checkpoint):
    folder = make_checkpoint("GPT2LMHeadModel")
    set_fields(folder, "config.json", quantization_config=FORMS["awq"].config)

    with refused('has quant_method "awq"; allowed for a gpt2: gptq; take the checkpoint that'):
        Checkpoint.open(folder)


@pytest.mark.parametrize("keeps_codes", [True, False])
def test_a_gpt2_whose_layers_are_saved_by_output_answers_as_with_floats(tmp_path, keeps_codes):
    folder, floats = tmp_path / "codes", tmp_path / "floats"
    expected = save_quantized(folder, "gptq", "GPT2LMHeadModel", **GPT2)
    save_quantized(floats, "gptq", "GPT2LMHeadModel", **GPT2)
    # floats are saved by input
    widen(floats, {name: each.t() for name, each in expected.items()})

    actual, wanted = (
        load(each, compiled=True, keeps_codes=keeps_codes) for each in (folder, floats)
    )

    for part, of_floats in zip(actual, wanted, strict=True):
        torch.testing.assert_close(part, of_floats, rtol=1e-4, atol=1e-5)


# As checkpoints of the hub have it: Qwen2.5-0.5B-Instruct-AWQ, Mistral-7B-Instruct-v0.2-GPTQ of TheBloke,
# Llama-3.2-1B-Instruct-bnb-4bit of unsloth, Qwen3-0.6B-FP8, a w4a16 of Red Hat AI, and a model of OPEA.
HUB = {
    "auto-round": {
        "amp": True,
        "autoround_version": "0.4.2.dev",
        "backend": "auto_round:gptq:exllamav2",
        "batch_size": 8,
        "bits": 4,
        "data_type": "int",
        "dataset": "NeelNanda/pile-10k",
        "enable_minmax_tuning": True,
        "enable_norm_bias_tuning": False,
        "enable_quanted_input": True,
        "gradient_accumulate_steps": 1,
        "group_size": 128,
        "iters": 200,
        "low_gpu_mem_usage": False,
        "lr": 0.005,
        "minmax_lr": 0.005,
        "nsamples": 128,
        "quant_method": "intel/auto-round",
        "scale_dtype": "torch.float16",
        "seqlen": 2048,
        "sym": True,
        "to_quant_block_names": [["model.layers.0", "model.layers.1"]],
    },
    "awq": {
        "bits": 4,
        "group_size": 128,
        "modules_to_not_convert": None,
        "quant_method": "awq",
        "version": "gemm",
        "zero_point": True,
    },
    "gptq": {
        "bits": 4,
        "group_size": 128,
        "damp_percent": 0.1,
        "desc_act": True,
        "sym": True,
        "quant_method": "gptq",
        "true_sequential": True,
        "model_name_or_path": None,
        "model_file_base_name": "model",
    },
    "bitsandbytes": {
        "_load_in_4bit": True,
        "_load_in_8bit": False,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_type": "nf4",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "quant_method": "bitsandbytes",
    },
    "fp8": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "compressed-tensors": {
        "config_groups": {
            "group_0": {
                "input_activations": None,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {
                    "actorder": "weight",
                    "block_structure": None,
                    "dynamic": False,
                    "group_size": 128,
                    "num_bits": 4,
                    "observer": "mse",
                    "observer_kwargs": {},
                    "strategy": "group",
                    "symmetric": True,
                    "type": "int",
                },
            }
        },
        "format": "pack-quantized",
        "global_compression_ratio": 1.8,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {"format": "dense", "registry_requires_subclass": False},
        "transform_config": {"config_groups": {}},
        "version": "0.9.0",
    },
}


@pytest.mark.parametrize("method", HUB)
def test_the_fields_of_the_hub_are_known(folder, method):
    set_fields(folder, "config.json", quantization_config=HUB[method])

    found = Checkpoint.open(folder).quantization

    assert found.method == ("gptq" if method == "auto-round" else method)
    assert found.floats == (("activations",) if method == "fp8" else ())


@pytest.mark.parametrize(
    "config",
    [
        transformers.AutoRoundConfig(),
        transformers.AwqConfig(),
        transformers.BitsAndBytesConfig(load_in_4bit=True),
        transformers.BitsAndBytesConfig(load_in_8bit=True),
        transformers.FbgemmFp8Config(),
        transformers.FineGrainedFP8Config(),
        transformers.GPTQConfig(bits=4),
    ],
    ids=lambda config: type(config).__name__,
)
def test_the_fields_that_transformers_writes_are_known(folder, config):
    set_fields(folder, "config.json", quantization_config=json.loads(config.to_json_string(False)))

    assert Checkpoint.open(folder).quantization is not None
